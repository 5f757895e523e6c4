"""Replay buffers beside TorchRL, cpprb and the per-episode way."""
