"""CompressedDataCollector: batches that stay compressed in memory until a minibatch needs them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.core.codecs import Raw
from penstock.core.memory import whole_number
from penstock.core.pack import DTYPES
from penstock.core.threads import parallel_list
from penstock.errors import UsageError
from penstock.rollouts.file import check_level, codec_for
from penstock.rollouts.structure import (
    Key,
    Leaf,
    Picked,
    TensorDict,
    TensorDictBase,
    as_path,
    choose,
    dense,
)
from penstock.tensors import empty_array, tensor_bytes, tensor_over

Keys = Literal["auto"] | Sequence[Any]
Words = NDArray[Any]

_GROUP_BYTES = 256 * 1024  # half of it takes half as long again, measured
_SMALLEST_BYTES = 64 * 1024  # of a key that is worth the trouble
_WORTH_IT = 1.1


class CompressedDataCollector:
    """Iterate over a collector and compress the big keys of each batch, losslessly.

    It pays where memory is short, or many batches are kept: a batch that is used once and dropped
    only takes longer. The collector's own TensorDicts are not changed.

    Args:
        base_collector: Any iterable of TensorDicts of batch size [env, time] or [step].
        compression_level: As for `RolloutStorage`: 1 to 9 are fast, 10 to 16 smaller.
        keys: Keys, tuples or prefixes to compress; "auto" takes those that are large and get at
            least 10 % smaller.
        cache_bytes: Decoded data to keep for further minibatches.

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
    ) -> None:
        self.base_collector = base_collector
        self.compression_level = check_level(compression_level)
        if compression_level == 0:
            raise UsageError("compression_level=0 compresses nothing; use the collector as it is")
        if isinstance(keys, str) and keys != "auto":
            raise UsageError(f'keys={keys!r}: give "auto" or a list of keys')
        self._keys = None if isinstance(keys, str) else keys
        self._cache = _DecodedKeys(whole_number("cache_bytes", cache_bytes))

    def __iter__(self) -> Iterator[CompressedBatch]:
        for data in self.base_collector:
            yield self.compress(data)

    def compress(self, data: TensorDictBase) -> CompressedBatch:
        """Compress one batch."""
        if not isinstance(data, TensorDictBase):
            raise UsageError(f"the collector yields {type(data).__name__}, not TensorDicts")
        shape = list(data.batch_size)
        if not shape or 0 in shape[:2]:
            raise UsageError(f"a batch of size {shape} cannot be compressed by environment")
        data = dense(data, "the batch")
        return CompressedBatch(data, self.compression_level, self._keys, self._cache)

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Pass on to the collector."""
        self.base_collector.update_policy_weights_(*args, **kwargs)  # type: ignore[attr-defined]

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Shut the collector down, if it can be."""
        getattr(self.base_collector, "shutdown", lambda *_, **__: None)(*args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class CompressedBatch:
    """A batch whose big keys are compressed in groups of a few environments.

    Attributes:
        batch_size: Of the batch as it was collected.
        raw_bytes: Its size before.

    Example:
        data = batch.minibatch(torch.randperm(batch.numel())[:4096])
    """

    def __init__(
        self, data: TensorDictBase, level: int, keys: Sequence[Any] | None, cache: _DecodedKeys
    ) -> None:
        pairs = data.items(include_nested=True, leaves_only=True)
        leaves = {as_path(key): Leaf.of(as_path(key), value) for key, value in pairs}
        chosen = choose(leaves, keys)
        self.batch_size = data.batch_size
        self.raw_bytes = sum(leaf.nbytes for leaf in leaves.values())
        self._compressed: dict[Key, CompressedKey] = {}
        for path in leaves if chosen is None else [path for path in leaves if path in chosen]:
            packed = compress_key(leaves[path], data.ndim > 1, level, always=chosen is not None)
            if packed is not None:
                self._compressed[path] = packed
        self._rest = data.exclude(*self._compressed).clone()
        self._order = list(data.keys(True))
        self._cache = cache

    @property
    def nbytes(self) -> int:
        """Memory held, without the cache."""
        plain = sum(tensor_bytes(value) for value in self._rest.values(True, True))
        return plain + sum(key.nbytes for key in self._compressed.values())

    @property
    def ratio(self) -> float:
        """How many times smaller it is."""
        return self.raw_bytes / self.nbytes if self.nbytes else 1.0

    @property
    def compressed_keys(self) -> list[Key]:
        """The keys that are compressed."""
        return list(self._compressed)

    def numel(self) -> int:
        """Return the number of steps of all environments."""
        return int(self.batch_size[:2].numel())

    def __len__(self) -> int:
        return int(self.batch_size[0])

    def decompress(self) -> TensorDict:
        """Return the whole batch, in memory of its own."""
        data = self._rest.clone()
        for path, key in self._compressed.items():
            data.set(path, key.tensor(key.decode()))
        return data.select(*self._order)

    def minibatch(self, indices: Any) -> TensorDict:
        """Return steps, numbered as in `data.reshape(-1)`; what is decoded for it is cached.

        `indices` is a slice, numbers in a list, array or tensor, or one boolean for each.
        """
        picked = Picked.of("indices", indices, self.numel())
        if picked.drops:
            raise UsageError(f"indices={indices!r}: give a list, as [{indices!r}]")
        return self._part(np.unravel_index(picked.positions, self.batch_size[:2]))

    def minibatches(
        self, count: int, generator: torch.Generator | None = None
    ) -> Iterator[TensorDict]:
        """Yield all steps in `count` random minibatches of equal size (to one)."""
        if type(count) is not int or not 1 <= count <= self.numel():
            raise UsageError(f"count={count!r}: give a number from 1 to {self.numel()}")
        order = torch.randperm(self.numel(), generator=generator).numpy()
        for part in np.array_split(order, count):
            yield self.minibatch(part)

    def __getitem__(self, index: Any) -> Any:
        """Return one key, as a tensor; or environments, as `decompress()[index]` would."""
        path = as_path(index)
        if path and all(isinstance(name, str) for name in path):
            if key := self._compressed.get(path):
                return key.tensor(key.decode())
            choose(map(as_path, (*self._compressed, *self._rest.keys(True))), [path])
            return self._rest.get(path).clone()
        picked = Picked.of("index", index, len(self))
        data = self._part((picked.positions,))
        return data[0] if picked.drops else data

    def _part(self, where: tuple[Words, ...]) -> TensorDict:
        if where[0].size:
            data = self._rest[tuple(map(torch.from_numpy, where))]
        else:  # an empty list is no index for stacks of other things than tensors
            data = self._rest[tuple(torch.zeros(1, dtype=torch.int64) for _ in where)][:0]
        for path, key in self._compressed.items():
            data.set(path, key.tensor(self._cache.decoded(key)[where]))
        return data


class CompressedKey:
    """A tensor of shape [env, …] or [env, time, …], compressed in groups of environments."""

    def __init__(self, leaf: Leaf, time: bool, level: int) -> None:
        self._dtype, self._shape = leaf.dtype, leaf.shape
        self._device = leaf.value.device if isinstance(leaf.value, torch.Tensor) else "cpu"
        rank = len(self._shape)
        self._order = (0, *range(2, rank), 1) if time else tuple(range(rank))
        self._codec = codec_for(DTYPES[leaf.dtype].words, max(1, level), time_last=time) or Raw()
        self.raw_bytes = leaf.nbytes
        rows = max(1, _GROUP_BYTES * self._shape[0] // leaf.nbytes)
        self.groups = [slice(start, start + rows) for start in range(0, self._shape[0], rows)]
        self.blobs: list[bytes] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the compressed groups."""
        return sum(map(len, self.blobs))

    def encode(self, rows: Words) -> bytes:
        """Return one group of the tensor, compressed."""
        stored = np.ascontiguousarray(rows.transpose(self._order))
        return b"".join(self._codec.encode(stored.reshape(-1)))

    def decode(self) -> Words:
        """Return the words of the tensor, in memory of their own."""
        out = empty_array(self._dtype, self._shape)

        def decode(number: int) -> None:
            place = out[self.groups[number]].transpose(self._order)
            stored = np.empty(place.shape, out.dtype)
            self._codec.decode(memoryview(self.blobs[number]), stored.reshape(-1))
            np.copyto(place, stored)

        parallel_list(decode, range(len(self.groups)), name="decompress", nbytes=out.nbytes)
        return out

    def tensor(self, words: Words) -> torch.Tensor:
        """Return words of it as a tensor, where it was."""
        return tensor_over(words, self._dtype).to(self._device)


def compress_key(
    leaf: Leaf, time: bool, level: int, *, always: bool = False
) -> CompressedKey | None:
    """Compress a tensor if it is large and gets smaller; with `always`, whenever it can be.

    `time` says whether its second axis is time, `level` is of the scale of `codec_for`.
    """
    if not leaf.nbytes or (not always and leaf.nbytes < _SMALLEST_BYTES):
        return None
    key, values = CompressedKey(leaf, time, level), leaf.words()
    parts = [values[group] for group in key.groups]
    some = parts[len(parts) // 2]
    if not always and some.nbytes < _WORTH_IT * len(key.encode(some)):
        return None
    key.blobs = parallel_list(key.encode, parts, name="compress", nbytes=leaf.nbytes)
    return key


class _DecodedKeys(WeakKeyDictionary[CompressedKey, Words]):
    """Keys that were decoded and are kept; the longest unused make way, and those of lost batches.

    A key that would not fit alone is decoded anew each time.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit_bytes, self._lock = limit_bytes, threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(words.nbytes for words in self.values())

    def decoded(self, key: CompressedKey) -> Words:
        """Return the words of a key; not to be written to."""
        with self._lock:
            words = self.pop(key, None)
            words = key.decode() if words is None else words
            for oldest in list(self):
                if self.nbytes + key.raw_bytes > self._limit_bytes:
                    del self[oldest]
            if key.raw_bytes <= self._limit_bytes:
                self[key] = words  # the last is the one used last
            return words
