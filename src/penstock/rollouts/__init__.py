"""Rollouts: batches of experience on disk, compressed in memory, collected ahead."""
