"""Rollouts on disk and in memory, beside pickle and LZ4."""
