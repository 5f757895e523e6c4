"""The world and its drones.

task.py       settings, rewards, disturbances, observations         world.py   maps and obstacles
kernels.py    flight, sensors, rewards, disturbances: compiled      simulator.py   all of it
env.py        the same as a TorchRL environment
"""
