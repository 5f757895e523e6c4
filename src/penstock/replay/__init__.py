"""Replay buffers: episodes and frames, compressed where it pays."""
