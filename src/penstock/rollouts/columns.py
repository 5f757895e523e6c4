"""One key of a batch, compressed in groups of environments, and the cache of decoded groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.codecs import Codec
from penstock.core.pack import DTYPES
from penstock.core.reuse import ReusedMemory
from penstock.core.threads import parallel_list
from penstock.rollouts.files import codec_for
from penstock.rollouts.structure import Key, Leaf
from penstock.tensors import empty_tensor, flat_words, tensor_bytes

_GROUP_BYTES = 256 * 1024  # half of it takes half as long again, measured
_SMALLEST_BYTES = 64 * 1024  # of a key that is worth the trouble
_WORTH_IT = 1.1


class CompressedColumn:
    """A tensor of shape [env, …] or [env, time, …], compressed.

    Args:
        leaf: The tensor.
        time: Whether its second axis is time.
        level: Of the scale of `codec_for`.
    """

    def __init__(self, leaf: Leaf, time: bool, level: int) -> None:
        self.dtype, self.shape = leaf.dtype, leaf.shape
        self.words = DTYPES[leaf.dtype].words
        self.device = leaf.value.device if isinstance(leaf.value, torch.Tensor) else "cpu"
        rank = len(self.shape)
        self._order = (0, *range(2, rank), 1) if time else tuple(range(rank))
        width = self.words.itemsize // 2 if self.words.kind == "c" else self.words.itemsize
        codec = codec_for(width, level, time_last=time)
        assert codec is not None
        self._codec: Codec = codec
        self.row_bytes = leaf.nbytes // self.shape[0]
        self.rows = min(max(1, _GROUP_BYTES // self.row_bytes), self.shape[0])
        self.groups = -(-self.shape[0] // self.rows)
        self._blobs: list[bytes] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed groups."""
        return sum(map(len, self._blobs))

    def sample_ratio(self, values: NDArray[Any]) -> float:
        """Return how many times smaller a group in the middle becomes."""
        group = self.groups // 2
        return self._raw_bytes(group) / len(self._encode(values, group))

    def encode(self, values: NDArray[Any]) -> None:
        """Compress the tensor, given as words in its own shape."""
        self._blobs = parallel_list(
            lambda group: self._encode(values, group),
            range(self.groups),
            name="compress",
            nbytes=self.shape[0] * self.row_bytes,
        )

    def decode(self, group: int, out: NDArray[Any]) -> None:
        """Decode a group into an array of shape [rows, …] in the order of the original axes."""
        start, stop = self.span(group)
        stored = np.empty(
            (stop - start, *(self.shape[axis] for axis in self._order[1:])), self.words
        )
        self._codec.decode(memoryview(self._blobs[group]), stored.reshape(-1))
        np.copyto(out.transpose(self._order), stored)

    def decode_all(self) -> torch.Tensor:
        """Decode everything."""
        tensor = empty_tensor(self.dtype, self.shape)
        out = flat_words(tensor).reshape(self.shape)
        parallel_list(
            lambda group: self.decode(group, out[slice(*self.span(group))]),
            range(self.groups),
            name="decompress",
            nbytes=tensor_bytes(tensor),
        )
        return tensor

    def span(self, group: int) -> tuple[int, int]:
        """Return the environments [start, stop) of a group."""
        return group * self.rows, min((group + 1) * self.rows, self.shape[0])

    def _encode(self, values: NDArray[Any], group: int) -> bytes:
        part = values[slice(*self.span(group))].transpose(self._order)
        return b"".join(self._codec.encode(np.ascontiguousarray(part).reshape(-1)))

    def _raw_bytes(self, group: int) -> int:
        start, stop = self.span(group)
        return (stop - start) * self.row_bytes


def compress_columns(
    leaves: Iterable[Leaf], batch_dims: int, chosen: set[Key] | None, level: int
) -> dict[str, CompressedColumn]:
    """Compress the chosen tensors; with None, those that are large and get smaller.

    Args:
        leaves: The tensors of a batch.
        batch_dims: How many leading axes they share, 1 or 2 or more; the second is time.
        chosen: Keys, or None.
        level: Of the scale of `codec_for`.
    """
    columns: dict[str, CompressedColumn] = {}
    for leaf in leaves:
        if chosen is not None and leaf.key not in chosen:
            continue
        if not leaf.nbytes or (chosen is None and leaf.nbytes < _SMALLEST_BYTES):
            continue
        column = CompressedColumn(leaf, batch_dims > 1, level)
        values = leaf.words()
        if chosen is None and column.sample_ratio(values) < _WORTH_IT:
            continue
        column.encode(values)
        columns[leaf.item] = column
    return columns


class DecodedGroups:
    """Groups of a column that were decoded and are kept; the longest unused makes way.

    Args:
        column: The column.
        limit_bytes: Room for the groups; there is always room for one.
        memory: Where the room comes from.
    """

    def __init__(self, column: CompressedColumn, limit_bytes: int, memory: ReusedMemory) -> None:
        self._column = column
        group_bytes = column.rows * column.row_bytes
        self._slots = max(1, min(column.groups, limit_bytes // group_bytes))
        shape = (self._slots * column.rows, *column.shape[1:])
        self._values = memory.array(shape, column.words)
        self._slot_of = np.full(column.groups, -1, np.int64)
        self._group_in = np.full(self._slots, -1, np.int64)
        self._used = np.zeros(self._slots, np.int64)
        self._clock = 0
        self.decoded = 0

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return int(self._values.nbytes)

    def gather(self, envs: NDArray[np.int64], steps: NDArray[np.int64] | None) -> torch.Tensor:
        """Return rows by environment, or by environment and step."""
        column = self._column
        inner = column.shape[1:] if steps is None else column.shape[2:]
        tensor = empty_tensor(column.dtype, (envs.size, *inner))
        if not tensor.numel():
            return tensor
        out = flat_words(tensor).reshape(envs.size, -1)
        source = self._values.reshape(-1, out.shape[1])
        groups, within = np.divmod(envs, column.rows)
        needed = np.unique(groups)
        for at in range(0, needed.size, self._slots):
            part = needed[at : at + self._slots]
            self._load(part)
            rows = self._slot_of[groups] * column.rows + within
            if steps is not None:
                rows = rows * column.shape[1] + steps
            if part.size == needed.size:
                np.take(source, rows, axis=0, out=out, mode="clip")
            else:
                here = (groups >= part[0]) & (groups <= part[-1])
                out[here] = source[rows[here]]
        return tensor

    def _load(self, groups: NDArray[np.int64]) -> None:
        """Decode what is not here yet."""
        self._clock += 1
        present = self._slot_of[groups]
        self._used[present[present >= 0]] = self._clock
        missing = groups[present < 0]
        if not missing.size:
            return
        slots = np.argsort(self._used, kind="stable")[: missing.size]
        evicted = self._group_in[slots]
        self._slot_of[evicted[evicted >= 0]] = -1
        self._group_in[slots] = -1
        pairs = list(zip(missing.tolist(), slots.tolist(), strict=True))
        nbytes = missing.size * self._column.rows * self._column.row_bytes
        parallel_list(self._decode_one, pairs, name="decompress", nbytes=nbytes)
        self._slot_of[missing] = slots
        self._group_in[slots] = missing
        self._used[slots] = self._clock
        self.decoded += int(missing.size)

    def _decode_one(self, place: tuple[int, int]) -> None:
        group, slot = place
        start, stop = self._column.span(group)
        at = slot * self._column.rows
        self._column.decode(group, self._values[at : at + stop - start])
