"""Tensors on a GPU: cloned on the stream that computes them, fetched to the host later.

The clone is an operation in the order of the training's own stream: it sees exactly what was asked
to be saved, and costs the host a launch. A side stream then copies it into pinned memory, while the
training goes on.
"""

from __future__ import annotations

from typing import Any

import torch


class DeviceClones:
    """The device part of one snapshot."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._events: dict[torch.device, Any] = {}

    def clone(self, live: torch.Tensor, out: torch.Tensor) -> None:
        """Clone a tensor where it is; `fetch` will put the clone into `out`."""
        try:
            copy = live.detach().clone(memory_format=torch.contiguous_format)
        except torch.cuda.OutOfMemoryError:
            out.copy_(live.detach())  # no room beside it: the caller waits for the transfer
            return
        self._pairs.append((copy, out))

    def cloned(self) -> None:
        """Mark the moment at which every clone has been asked for."""
        for device in {copy.device for copy, _ in self._pairs}:
            if device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
                self._events[device] = event

    def fetch(self) -> None:
        """Copy the clones to the host and let go of them; on any thread."""
        for copy, out in self._pairs:
            event = self._events.get(copy.device)
            if event is None:
                out.copy_(copy)
                continue
            stream = torch.cuda.Stream(copy.device)  # type: ignore[no-untyped-call]
            stream.wait_event(event)
            with torch.cuda.stream(stream):
                out.copy_(copy, non_blocking=True)
            stream.synchronize()
        self._pairs.clear()
        self._events.clear()
