"""Training.

config.py   train.yaml and key=value words, checked        conf/       the settings themselves
group.py    the processes that train together              launch.py   starting them
collect.py  rollouts from the simulator                    sources.py  sync, pipelined
plugin.py   rollouts from any TorchRL environment          runs.py     a run's folder and state
episodes.py how episodes ended, counted
log.py      metrics to files                               panel.py    metrics on the terminal
loop.py     the loop
"""
