"""The processes that train together: each has some shards of the drones, all have the same weights.

Process 0 keeps the books. One process is a group, too: then nothing is exchanged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from typing_extensions import Self

from penstock.errors import PeerLost, PenstockError, UsageError

_TIMEOUT = timedelta(minutes=30)  # validation and compilation may differ by minutes, not more


class Group:
    """Exchange between processes.

    Args:
        rank: Number of this process.
        size: How many there are.
        init_method: Where they meet: a file:// or env:// address; None for one process.
        device: Of the learner: "cuda" takes nccl besides gloo.

    Example:
        with Group() as group:
            group.mean_(gradient)
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
    def leads(self) -> bool:
        """Whether this process keeps the books."""
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
            _exchange(lambda: dist.all_reduce(tensor))
        return tensor

    def any(self, flag: bool) -> bool:
        """Return whether any process says so."""
        return bool(self.sum_(torch.tensor(float(flag)))) if self.size > 1 else flag

    def gather(self, states: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Collect flat dicts of tensors from all processes, in their order; all get the list."""
        own = [dict(state) for state in states]
        if self.size == 1:
            return own
        flat = {f"{i} {k}": v.contiguous() for i, state in enumerate(own) for k, v in state.items()}
        mine = torch.frombuffer(bytearray(save(flat)), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(mine)
        self.sum_(sizes)
        parts = torch.zeros(self.size, int(sizes.max()), dtype=torch.uint8)
        parts[self.rank, : len(mine)] = mine
        self.sum_(parts)  # zeros elsewhere: a sum of bytes is a gather
        result: list[dict[str, Tensor]] = []
        for part, size in zip(parts, sizes.tolist(), strict=True):
            result += _unflatten(part[:size].numpy().tobytes(), len(own))
        return result

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _unflatten(data: bytes, count: int) -> list[dict[str, Tensor]]:
    states: list[dict[str, Tensor]] = [{} for _ in range(count)]
    try:
        for name, tensor in load(data).items():
            number, _, key = name.partition(" ")
            states[int(number)][key] = tensor
    except SafetensorError as error:
        raise PenstockError(f"another process sent a state that cannot be read: {error}") from error
    return states


def _exchange(call: Any) -> None:
    try:
        call()
    except RuntimeError as error:  # gloo: the connection is gone
        line = str(error).strip().partition("\n")[0][:200]
        raise PeerLost(
            f"a process of this training is gone ({line}); go on with resume=… from the newest "
            "checkpoint"
        ) from error
