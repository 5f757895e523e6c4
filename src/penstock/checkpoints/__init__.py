"""Checkpoints that never stall and never lose a run.

snapshot.py copies a state while training goes on, saver.py queues, encodes and publishes it,
folder.py knows what lies in a folder of checkpoints, load.py reads it back.
"""
