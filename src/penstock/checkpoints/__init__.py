"""Checkpoints that never stall and never lose a run."""
