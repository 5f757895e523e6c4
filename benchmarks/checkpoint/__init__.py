"""Checkpoints beside their peers."""
