"""CompressedDataCollector: batches that stay compressed in memory until a minibatch needs them."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.core.reuse import ReusedMemory
from penstock.errors import UsageError
from penstock.rollouts.columns import DecodedGroups, compress_columns
from penstock.rollouts.files import Picked, check_level
from penstock.rollouts.ownership import cloned
from penstock.rollouts.structure import Key, Part, choose, put_together, stack_of, take_apart
from penstock.rollouts.tensordicts import TensorDict, TensorDictBase
from penstock.tensors import tensor_bytes
from penstock.ui.suggestions import did_you_mean

Keys = Literal["auto"] | Sequence[Any]


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
        cache_bytes: Decoded data to keep for further minibatches, of the batch used last.
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
        for name, value in (("cache_bytes", cache_bytes), ("num_envs", num_envs)):
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name}={value!r}: give a whole number, at least 1")
        self._keys = keys
        self._num_envs = num_envs
        self._cache = _CachePlace(cache_bytes)

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
        cache: _CachePlace,
    ) -> None:
        parts = take_apart(data)
        self.batch_size = torch.Size(shape)
        self.device = data.device
        self._node = parts.node
        self._shape = tuple(data.batch_size)
        self._items: dict[Key, str] = {leaf.key: leaf.item for leaf in parts.leaves}
        chosen = None if isinstance(keys, str) else choose(self._items, keys)
        self._columns = compress_columns(parts.leaves, len(self._shape), chosen, level)
        self._plain = {
            leaf.item: cloned(leaf.value) for leaf in parts.leaves if leaf.item not in self._columns
        }
        self._cache = cache
        self.raw_bytes = sum(leaf.nbytes for leaf in parts.leaves)

    @property
    def nbytes(self) -> int:
        """Memory held, without the cache."""
        packed = sum(column.nbytes for column in self._columns.values())
        return packed + sum(map(tensor_bytes, self._plain.values()))

    @property
    def ratio(self) -> float:
        """How many times smaller it is."""
        return self.raw_bytes / self.nbytes if self.nbytes else 1.0

    @property
    def compressed_keys(self) -> list[Key]:
        """The keys that are compressed."""
        return [key for key, item in self._items.items() if item in self._columns]

    def numel(self) -> int:
        """Return the number of steps of all environments."""
        return math.prod(self._shape[:2])

    def __len__(self) -> int:
        return int(self.batch_size[0])

    def decompress(self) -> TensorDict:
        """Return the whole batch, in memory of its own."""
        tensors = {name: cloned(tensor) for name, tensor in self._plain.items()}
        for name, column in self._columns.items():
            tensors[name] = column.decode_all().to(column.device)
        data: TensorDict = put_together(self._node, tensors.__getitem__, self.device)
        if self._shape != self.batch_size:
            data = data.reshape(self.batch_size)
        return data

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
        count = self._shape[0] if of == "envs" else self.numel()
        picked = Picked.of("indices", indices, count)
        if picked.drops:
            raise UsageError(f"indices={indices!r}: give a list, as [{indices!r}]")
        envs, steps = picked.positions, None
        if of == "steps" and len(self._shape) > 1:
            envs, steps = np.divmod(picked.positions, self._shape[1])
        part = _Gathered(self._shape[:2], envs, steps)
        tensors = self._gather(part)
        data: TensorDict = put_together(self._node, tensors.__getitem__, self.device, part=part)
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
            return self._one_key(key)
        picked = Picked.of("index", index, self._shape[0])
        data = self.minibatch(picked.positions, "envs")
        return data[0] if picked.drops else data

    def _one_key(self, key: Key) -> Any:
        item = self._items.get(key)
        if item is None:
            known = [".".join(map(str, known)) for known in self._items]
            raise UsageError(f"no key {key!r} in this batch: {did_you_mean('.'.join(key), known)}")
        column = self._columns.get(item)
        if column is None:
            return cloned(self._plain[item])
        return column.decode_all().to(column.device)

    def _gather(self, part: _Gathered) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        envs = torch.from_numpy(part.envs)
        where = envs if part.steps is None else (envs, torch.from_numpy(part.steps))
        for name, tensor in self._plain.items():
            tensors[name] = tensor[where]
        with self._cache.of(self) as cached:
            for name, column in self._columns.items():
                tensors[name] = cached[name].gather(part.envs, part.steps).to(column.device)
        return tensors

    def decoded_groups(self, limit_bytes: int, memory: ReusedMemory) -> dict[str, DecodedGroups]:
        """Make a cache for this batch, shared out among its keys by their size."""
        sizes = {name: column.shape[0] * column.row_bytes for name, column in self._columns.items()}
        total = sum(sizes.values())
        return {
            name: DecodedGroups(column, limit_bytes * sizes[name] // total, memory)
            for name, column in self._columns.items()
        }


class _Gathered(Part):
    """Rows of a batch by environment, or by environment and step."""

    def __init__(
        self, batch: tuple[int, ...], envs: NDArray[np.int64], steps: NDArray[np.int64] | None
    ) -> None:
        self._dropped = 1 if steps is None else len(batch)
        self.envs, self.steps = envs, steps

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.envs.size, *shape[self._dropped :])

    def names(self, shape: tuple[int, ...], names: list[Any]) -> list[Any]:
        return [names[0] if self.steps is None else None, *names[self._dropped :]]

    def narrow(self, rows: list[Any], shape: tuple[int, ...]) -> Any:
        if self.steps is None:
            return stack_of([rows[env] for env in self.envs], shape)
        pairs = zip(self.envs, self.steps, strict=True)
        return stack_of([rows[env][step] for env, step in pairs], shape)


class _CachePlace:
    """Room for the decoded groups of one batch at a time: the one used last."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._memory = ReusedMemory(limit_bytes)
        self._lock = threading.Lock()
        self._batch: weakref.ref[CompressedBatch] | None = None
        self._groups: dict[str, DecodedGroups] = {}

    @contextmanager
    def of(self, batch: CompressedBatch) -> Iterator[dict[str, DecodedGroups]]:
        """Lend the room to a batch for the length of a `with` block."""
        with self._lock:
            if self._batch is None or self._batch() is not batch:
                self._groups = {}  # first, so that its memory can be used again
                self._groups = batch.decoded_groups(self._limit_bytes, self._memory)
                self._batch = weakref.ref(batch)
            yield self._groups
