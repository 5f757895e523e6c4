"""Checkpoints that never stall and never lose a run.

snapshot.py copies a state, saver.py queues it, publish.py encodes it and gives it its name,
folder.py knows what lies in a folder of checkpoints, load.py reads it back.
"""
