"""Timers beside a list of times."""
