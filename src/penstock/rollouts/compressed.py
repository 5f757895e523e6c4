"""CompressedDataCollector: batches that stay compressed in memory until a minibatch needs them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.core.pack import DTYPES
from penstock.core.threads import parallel_list
from penstock.errors import UsageError
from penstock.rollouts.collect import cloned
from penstock.rollouts.file import check_level, codec_for
from penstock.rollouts.structure import (
    Axes,
    Key,
    Leaf,
    Picked,
    Selection,
    choose,
    put_together,
    take_apart,
    whole_number,
)
from penstock.rollouts.tensordicts import TensorDict, TensorDictBase
from penstock.tensors import empty_tensor, flat_words, tensor_bytes
from penstock.ui.suggestions import did_you_mean

Keys = Literal["auto"] | Sequence[Any]
Ints = NDArray[np.int64]

_GROUP_BYTES = 256 * 1024  # half of it takes half as long again, measured
_SMALLEST_BYTES = 64 * 1024  # of a key that is worth the trouble
_WORTH_IT = 1.1


class CompressedDataCollector:
    """Iterate over a collector and compress the big keys of each batch, losslessly.

    It pays where memory is short, or many batches are kept: a batch that is used once and dropped
    only takes longer. The collector's own TensorDicts are not changed.

    Args:
        base_collector: Any iterable of TensorDicts of batch size [env, time], or [env * time] with
            `num_envs`.
        compression_level: As for `RolloutStorage`: 1 to 9 are fast, 10 to 16 smaller.
        keys: Keys, tuples or prefixes to compress; "auto" takes those that are large and get at
            least 10 % smaller.
        cache_bytes: Decoded data to keep for further minibatches.
        num_envs: Environments in a batch of one axis.

    Example:
        for batch in CompressedDataCollector(collector, compression_level=1):
            for data in batch.minibatches(16):
                train(data)
    """

    def __init__(
        self,
        base_collector: Iterable[Any],
        compression_level: int = 1,
        *,
        keys: Keys = "auto",
        cache_bytes: int = 64 << 20,
        num_envs: int | None = None,
    ) -> None:
        self.base_collector = base_collector
        self.compression_level = check_level(compression_level)
        if compression_level == 0:
            raise UsageError("compression_level=0 compresses nothing; use the collector as it is")
        if isinstance(keys, str) and keys != "auto":
            raise UsageError(f'keys={keys!r}: give "auto" or a list of keys')
        whole_number("cache_bytes", cache_bytes, 1)
        if num_envs is not None:
            whole_number("num_envs", num_envs, 1)
        self._keys = keys
        self._num_envs = num_envs
        self._cache = _DecodedKeys(cache_bytes)

    def __iter__(self) -> Iterator[CompressedBatch]:
        for data in self.base_collector:
            yield self.compress(data)

    def compress(self, data: TensorDictBase) -> CompressedBatch:
        """Compress one batch.

        Raises:
            UsageError: It is not a TensorDict, has no batch size, or has no such key.
        """
        if not isinstance(data, TensorDictBase):
            raise UsageError(f"the collector yields {type(data).__name__}, not TensorDicts")
        shape = tuple(data.batch_size)
        if self._num_envs is not None and len(shape) == 1:
            if shape[0] % self._num_envs:
                raise UsageError(
                    f"num_envs={self._num_envs} does not divide a batch of {shape[0]} steps"
                )
            data = data.reshape(self._num_envs, shape[0] // self._num_envs)
        if not data.batch_size or 0 in data.batch_size[:2]:
            raise UsageError(f"a batch of size {list(shape)} cannot be compressed by environment")
        return CompressedBatch(data, shape, self.compression_level, self._keys, self._cache)

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Pass on to the collector."""
        self.base_collector.update_policy_weights_(*args, **kwargs)  # type: ignore[attr-defined]

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Shut the collector down, if it can be."""
        shutdown = getattr(self.base_collector, "shutdown", None)
        if shutdown is not None:
            shutdown(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


class CompressedBatch:
    """A batch whose big keys are compressed in groups of a few environments.

    Attributes:
        batch_size: Of the batch as it was collected.
        device: Of the batch as it was collected.
        raw_bytes: Its size before.

    Example:
        data = batch.minibatch(torch.randperm(batch.numel())[:4096])
    """

    def __init__(
        self,
        data: TensorDictBase,
        shape: tuple[int, ...],
        level: int,
        keys: Keys,
        cache: _DecodedKeys,
    ) -> None:
        parts = take_apart(data)
        self.batch_size = torch.Size(shape)
        self.device = data.device
        self._node = parts.node
        self._axes = Axes(tuple(data.batch_size)[:2], 0, 1 if data.ndim > 1 else None)
        self._items: dict[Key, str] = {leaf.key: leaf.item for leaf in parts.leaves}
        chosen = None if isinstance(keys, str) else choose(self._items, keys)
        self._compressed: dict[str, CompressedKey] = {}
        self._plain: dict[str, Any] = {}
        for leaf in parts.leaves:
            key = None
            if chosen is None or leaf.key in chosen:
                key = compress_key(leaf, self._axes.time is not None, level, always=bool(chosen))
            if key is not None:
                self._compressed[leaf.item] = key
            else:
                self._plain[leaf.item] = cloned(leaf.value)
        self._cache = cache
        self.raw_bytes = sum(leaf.nbytes for leaf in parts.leaves)

    @property
    def nbytes(self) -> int:
        """Memory held, without the cache."""
        packed = sum(key.nbytes for key in self._compressed.values())
        return packed + sum(map(tensor_bytes, self._plain.values()))

    @property
    def ratio(self) -> float:
        """How many times smaller it is."""
        return self.raw_bytes / self.nbytes if self.nbytes else 1.0

    @property
    def compressed_keys(self) -> list[Key]:
        """The keys that are compressed."""
        return [key for key, item in self._items.items() if item in self._compressed]

    def numel(self) -> int:
        """Return the number of steps of all environments."""
        return math.prod(self._axes.batch)

    def __len__(self) -> int:
        return int(self.batch_size[0])

    def decompress(self) -> TensorDict:
        """Return the whole batch, in memory of its own."""
        data: TensorDict = put_together(
            self._node, self._whole, self.device, selection=Selection(self._axes)
        )
        return data if data.batch_size == self.batch_size else data.reshape(self.batch_size)

    def minibatch(self, indices: Any, of: Literal["steps", "envs"] = "steps") -> TensorDict:
        """Decode a part: of the compressed keys only the groups that are needed.

        Args:
            indices: A slice, or numbers in a list, array or tensor (negative ones count from the
                end), or one boolean for each.
            of: What they count: "steps" of all environments, as in `data.reshape(-1)`, or whole
                "envs".

        Raises:
            UsageError: An index is out of range.
        """
        if of not in ("steps", "envs"):
            raise UsageError(f'of={of!r}: use "steps" or "envs"')
        count = self._axes.batch[0] if of == "envs" else self.numel()
        picked = Picked.of("indices", indices, count)
        if picked.drops:
            raise UsageError(f"indices={indices!r}: give a list, as [{indices!r}]")
        envs, steps = picked.positions, None
        if of == "steps" and self._axes.time is not None:
            envs, steps = np.divmod(picked.positions, self._axes.batch[1])
        where = (envs,) if steps is None else (envs, steps)
        rows = tuple(map(torch.from_numpy, where))

        def fetch(item: str) -> Any:
            key = self._compressed.get(item)
            if key is None:
                return self._plain[item][rows]
            return self._cache.gather(key, envs, steps).to(key.device)

        selection = Selection(
            self._axes, Picked(envs), None if steps is None else Picked(steps), paired=True
        )
        data: TensorDict = put_together(self._node, fetch, self.device, selection=selection)
        return data

    def minibatches(
        self, count: int, generator: torch.Generator | None = None
    ) -> Iterator[TensorDict]:
        """Yield all steps in `count` random minibatches of equal size (to one).

        Args:
            count: How many.
            generator: Where the order comes from; None for torch's own.
        """
        if type(count) is not int or not 1 <= count <= self.numel():
            raise UsageError(f"count={count!r}: give a number from 1 to {self.numel()}")
        order = torch.randperm(self.numel(), generator=generator).numpy()
        for part in np.array_split(order, count):
            yield self.minibatch(part)

    def __getitem__(self, index: Any) -> Any:
        """Return one key, as a tensor; or environments, as `decompress()[index]` would."""
        key = index if isinstance(index, tuple) else (index,)
        if key and all(isinstance(name, str) for name in key):
            if key not in self._items:
                known = [".".join(map(str, known)) for known in self._items]
                hint = did_you_mean(".".join(key), known)
                raise UsageError(f"no key {key!r} in this batch: {hint}")
            return self._whole(self._items[key])
        picked = Picked.of("index", index, self._axes.batch[0])
        data = self.minibatch(picked.positions, "envs")
        return data[0] if picked.drops else data

    def _whole(self, item: str) -> torch.Tensor:
        key = self._compressed.get(item)
        if key is None:
            tensor: torch.Tensor = cloned(self._plain[item])
            return tensor
        return key.decode_all().to(key.device)


class CompressedKey:
    """A tensor of shape [env, …] or [env, time, …], compressed in groups of environments.

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
        self._codec = codec_for(self.words, max(1, level), time_last=time)
        row_bytes = leaf.nbytes // self.shape[0]
        self.rows = min(max(1, _GROUP_BYTES // row_bytes), self.shape[0])
        self.group_bytes, self.raw_bytes = self.rows * row_bytes, leaf.nbytes
        self.groups = -(-self.shape[0] // self.rows)
        self._blobs: list[bytes] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed groups."""
        return sum(map(len, self._blobs))

    def encode(self, values: NDArray[Any]) -> None:
        """Compress the tensor, given as words in its own shape."""
        self._blobs = parallel_list(
            lambda group: self.encoded(values, group),
            range(self.groups),
            name="compress",
            nbytes=values.nbytes,
        )

    def encoded(self, values: NDArray[Any], group: int) -> bytes:
        """Return one group of the tensor, compressed."""
        assert self._codec is not None
        part = values[self._span(group)].transpose(self._order)
        return b"".join(self._codec.encode(np.ascontiguousarray(part).reshape(-1)))

    def decode(self, group: int, out: NDArray[Any]) -> None:
        """Decode a group into an array of shape [rows, …] in the order of the original axes."""
        assert self._codec is not None
        stored = np.empty(out.transpose(self._order).shape, self.words)
        self._codec.decode(memoryview(self._blobs[group]), stored.reshape(-1))
        np.copyto(out.transpose(self._order), stored)

    def decode_all(self) -> torch.Tensor:
        """Decode everything."""
        tensor = empty_tensor(self.dtype, self.shape)
        out = flat_words(tensor).reshape(self.shape)
        parallel_list(
            lambda group: self.decode(group, out[self._span(group)]),
            range(self.groups),
            name="decompress",
            nbytes=out.nbytes,
        )
        return tensor

    def _span(self, group: int) -> slice:
        return slice(group * self.rows, (group + 1) * self.rows)


def compress_key(
    leaf: Leaf, time: bool, level: int, *, always: bool = False
) -> CompressedKey | None:
    """Compress a tensor if it is large and gets smaller; with `always`, whenever it can be.

    Args:
        leaf: The tensor.
        time: Whether its second axis is time.
        level: Of the scale of `codec_for`.
        always: Whether the user asked for it.
    """
    if not leaf.nbytes or (not always and leaf.nbytes < _SMALLEST_BYTES):
        return None
    key, values = CompressedKey(leaf, time, level), leaf.words()
    middle = key.groups // 2
    raw_bytes = values[middle * key.rows : (middle + 1) * key.rows].nbytes
    if not always and raw_bytes < _WORTH_IT * len(key.encoded(values, middle)):
        return None
    key.encode(values)
    return key


class _DecodedKeys:
    """Keys of which some groups were decoded and are kept; the longest unused make way.

    A key that would not fit alone is decoded anew each time, a few groups at a time: minibatches
    are random, so that each needs all groups, and some of them in a cache would help little.

    Args:
        limit_bytes: For all of them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        # What was used last is last; those of a batch go with it. Of each, which groups are there.
        self._keys: WeakKeyDictionary[CompressedKey, tuple[NDArray[Any], NDArray[np.bool_]]]
        self._keys = WeakKeyDictionary()
        self.decoded = 0

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(values.nbytes for values, _ in self._keys.values())

    def gather(self, key: CompressedKey, envs: Ints, steps: Ints | None) -> torch.Tensor:
        """Return rows of a key by environment, or by environment and step."""
        inner = key.shape[1:] if steps is None else key.shape[2:]
        tensor = empty_tensor(key.dtype, (envs.size, *inner))
        if not tensor.numel():
            return tensor
        out = flat_words(tensor).reshape(envs.size, -1)
        groups = envs // key.rows
        with self._lock:
            if key.raw_bytes <= self._limit_bytes:
                values = self._load(key, np.unique(groups))
                _take(values, envs, steps, out)
                return tensor
            at_once = max(1, self._limit_bytes // key.group_bytes)
            room = np.empty((at_once * key.rows, *key.shape[1:]), key.words)
            for first in range(0, key.groups, at_once):
                here = np.flatnonzero((groups >= first) & (groups < first + at_once))
                needed = np.unique(groups[here])
                self._decode(key, needed, room, first)
                part = np.empty((here.size, out.shape[1]), key.words)
                _take(room, envs[here] - first * key.rows, _at(steps, here), part)
                out[here] = part
        return tensor

    def _load(self, key: CompressedKey, groups: Ints) -> NDArray[Any]:
        """Return a key in which these groups are there."""
        values, present = self._keys.pop(key, (None, None))
        if values is None or present is None:
            for oldest in list(self._keys):
                if self.nbytes + key.raw_bytes > self._limit_bytes:
                    del self._keys[oldest]
            values, present = np.empty(key.shape, key.words), np.zeros(key.groups, np.bool_)
        self._keys[key] = values, present
        self._decode(key, groups[~present[groups]], values, 0)
        present[groups] = True
        return values

    def _decode(self, key: CompressedKey, groups: Ints, out: NDArray[Any], first: int) -> None:
        """Decode groups into an array that begins with the group `first`."""

        def decode(group: int) -> None:
            start = (group - first) * key.rows
            stop = start + min(key.rows, key.shape[0] - group * key.rows)
            key.decode(group, out[start:stop])

        nbytes = groups.size * key.group_bytes
        parallel_list(decode, groups.tolist(), name="decompress", nbytes=nbytes)
        self.decoded += groups.size


def _at(steps: Ints | None, where: Ints) -> Ints | None:
    return None if steps is None else steps[where]


def _take(values: NDArray[Any], envs: Ints, steps: Ints | None, out: NDArray[Any]) -> None:
    rows = envs if steps is None else envs * values.shape[1] + steps
    np.take(values.reshape(-1, out.shape[1]), rows, axis=0, out=out, mode="clip")
