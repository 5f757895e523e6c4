"""Collecting ahead of the learner."""
