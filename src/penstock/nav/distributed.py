"""The processes that train together, and how they stop.

Each has some shards of the drones, all have the same weights. Process 0 keeps the record. One
process is a group, too: then nothing is exchanged. Processes that are started here ignore signals:
process 0, the one the user sees, is asked to stop, and tells them at the end of an iteration. If
one of them dies, the others notice in their next exchange and end, too.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from typing_extensions import Self

from penstock.errors import PeerLost, PenstockError, UsageError

_TIMEOUT = timedelta(minutes=30)  # validation and compilation may differ by minutes, not more
_GIVE_UP_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Group:
    """Exchange between processes.

    The processes meet at a file:// or env:// address; a learner on "cuda" takes nccl besides gloo.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, init_method: str | None = None, device: str = "cpu"
    ) -> None:
        self.rank = rank
        self.size = size
        if size > 1:
            on_gpu = torch.device(device).type == "cuda"
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"  # counts stay on the CPU
            dist.init_process_group(
                backend, init_method=init_method, rank=rank, world_size=size, timeout=_TIMEOUT
            )

    @classmethod
    def from_environment(cls, device: str = "cpu") -> Self:
        """Join the group that torchrun made; without torchrun, a group of one."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(int(os.environ.get("RANK", "0")), size, "env://", device)

    @property
    def is_main(self) -> bool:
        """Whether this process keeps the record."""
        return self.rank == 0

    def shards(self, total: int) -> range:
        """Return the numbers of this process's shards."""
        if total % self.size:
            raise UsageError(
                f"{total} shards do not divide among {self.size} processes; change shards"
            )
        each = total // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def mean_(self, tensor: Tensor) -> None:
        """Replace a tensor by its mean over all processes."""
        if self.size > 1:
            self.sum_(tensor).div_(self.size)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over all processes."""
        if self.size > 1:
            try:
                dist.all_reduce(tensor)
            except RuntimeError as error:  # gloo: the connection is gone
                line = str(error).strip().partition("\n")[0][:200]
                raise PeerLost(
                    f"a process of this training is gone ({line}); go on with resume=… from the "
                    "newest checkpoint"
                ) from error
        return tensor

    def any(self, flag: bool) -> bool:
        """Return whether any process says so."""
        return bool(self.sum_(torch.tensor(float(flag)))) if self.size > 1 else flag

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.any(False)

    def gather(self, states: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Collect flat dicts of tensors from all processes, in their order; all get the list."""
        if self.size == 1:
            return [dict(state) for state in states]
        flat = {
            f"{number} {name}": value.contiguous()
            for number, state in enumerate(states)
            for name, value in state.items()
        }
        # As bytes of safetensors, never pickled; a sum with zeros elsewhere gathers them.
        mine = torch.frombuffer(bytearray(save(flat)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(mine)
        parts = torch.zeros(self.size, int(self.sum_(sizes).max()), dtype=torch.uint8)
        parts[self.rank, : len(mine)] = mine
        result: list[dict[str, Tensor]] = []
        for part, size in zip(self.sum_(parts), sizes.tolist(), strict=True):
            found: list[dict[str, Tensor]] = [{} for _ in states]
            for name, tensor in load(part[:size].numpy().tobytes()).items():
                number, _, key = name.partition(" ")
                found[int(number)][key] = tensor
            result += found
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.size > 1:
            dist.destroy_process_group()


@contextmanager
def spawn_workers(
    size: int, main: Callable[..., None], arguments: tuple[Any, ...], device: str
) -> Iterator[Group]:
    """Start the processes besides this one, and yield the group that all make.

    The others do main(rank, address, *arguments). If one dies, a `PenstockError` names it.
    """
    context = multiprocessing.get_context("spawn")
    meeting = Path(tempfile.gettempdir()) / f"penstock-{os.getpid()}-{secrets.token_hex(8)}"
    address = f"file://{meeting}"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they all are on this machine
    workers: list[BaseProcess] = [
        context.Process(None, main, f"penstock-train-{rank}", (rank, address, *arguments))
        for rank in range(1, size)
    ]
    try:
        for process in workers:
            process.start()
        with Group(0, size, address, device) as group:
            yield group
    except PeerLost as error:  # if one died, that is the cause, not the lost connection
        for rank, process in enumerate(workers, 1):
            process.join(1.0)
            if process.exitcode not in (None, 0):
                raise PenstockError(
                    f"process {rank} of the training ended with code {process.exitcode}; go on "
                    "with resume=…"
                ) from error
        raise
    finally:
        for process in workers:
            process.join(_GIVE_UP_S)
            if process.is_alive():
                process.kill()
                process.join()
        with suppress(OSError):
            meeting.unlink()


class Stop:
    """Whether somebody asked to stop, by SIGINT, SIGTERM or `ask`.

    As a context manager on the main thread it takes the signals: the first one only asks, so that
    the state is saved; a second one takes its course. `signal` is the one that asked, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._asked = False
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self._asked

    def __call__(self) -> bool:
        """Return whether somebody asked."""
        return self._asked

    def ask(self) -> None:
        """Ask to stop."""
        self._asked = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._previous):
            signal.signal(number, self._previous.pop(number))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._asked = True
        signal.signal(number, self._previous.pop(number, signal.SIG_DFL))
