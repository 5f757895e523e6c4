"""Copies from CUDA devices: a side stream into pinned memory, and events instead of waiting.

Nothing here runs on a machine without a CUDA device. Lazy tensors are copied while the training
stream goes on; at the barrier that stream, not the host, waits for the copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def pinned(size_bytes: int) -> NDArray[np.uint8]:
    """Allocate page-locked memory, which devices copy into without the host."""
    memory: NDArray[np.uint8] = torch.empty(
        max(size_bytes, 1), dtype=torch.uint8, pin_memory=True
    ).numpy()
    return memory


class SideCopy:
    """The device part of one capture."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._events: dict[torch.device, Any] = {}

    def copy(self, source: torch.Tensor, target: NDArray[np.uint8], *, eager: bool) -> None:
        """Start the copy of a tensor into host memory."""
        device = source.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
        out = torch.from_numpy(target).view(source.dtype).view(source.shape)
        with torch.cuda.stream(stream):
            out.copy_(source.detach(), non_blocking=True)
            event = self._events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        # The allocator must not hand the memory on while the side stream reads it.
        source.record_stream(stream)
        if eager:
            torch.cuda.current_stream(device).wait_event(event)

    def hold_back_training(self) -> None:
        """Make the training streams wait for the copies; the host goes on."""
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def ready(self) -> bool:
        """Whether all copies have arrived in host memory."""
        return all(event.query() for event in self._events.values())
