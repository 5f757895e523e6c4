"""The simulator.

world.py      static boxes with cell lists, and moving obstacles
task.py       settings, where drones start, what a drone's state is
drone.py      how a drone answers to a velocity command, in torch
geometry.py   lidar in torch
reference.py  the back end in torch: any device, the one to believe
native.py     the back end in numba: fast on a CPU     kernels*.py   its compiled code
simulator.py  Simulator: both behind one class         env.py       the same for TorchRL
"""
