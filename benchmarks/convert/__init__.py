"""Recordings to datasets, beside lerobot."""
