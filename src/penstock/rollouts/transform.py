"""CompressedLidarTransform: keys of a TorchRL replay buffer, compressed while they wait in it."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from isal import isal_zlib
from numpy.typing import NDArray

from penstock.core.codecs import Codec, Quantize, Raw
from penstock.core.extras import needs_torchrl
from penstock.core.pack import DTYPES
from penstock.errors import CorruptFile, UnsupportedValue, UsageError
from penstock.rollouts.file import check_level, codec_for
from penstock.rollouts.structure import Leaf, as_path
from penstock.tensors import empty_tensor, flat_words

with needs_torchrl("CompressedLidarTransform"):
    from tensordict import NonTensorData, NonTensorStack, TensorDictBase
    from torchrl.envs import EnvBase
    from torchrl.envs.transforms import Transform

_HEAD = struct.Struct("<BBBBI")  # coded or raw, dtype, axes, axes of the batch, CRC-32
_CRC = struct.Struct("<I")
_CODED, _RAW = 1, 0
_DTYPES = list(DTYPES)

Name = str | tuple[str, ...]


class CompressedLidarTransform(Transform):  # type: ignore[misc]
    """Compress keys when data enters a replay buffer, and decompress them when it is sampled.

    `inv` (on `extend` and `add`) compresses, `forward` (on `sample`) decompresses, as TorchRL calls
    them; `compress` and `decompress` are the same by name. The compressed form of an item is a
    bytes object, so it fits storages that hold objects: `ListStorage`, `LazyStackStorage`. (For
    tensors in a compressed storage see `CompressedStorage`.) One blob is made for each element of
    the first batch axis; a second batch axis is taken for time and compressed along.

    Args:
        in_keys: The keys to compress, of any kind of data.
        out_keys: Where their compressed form goes; by default the same names with "_compressed".
        epsilon: None is lossless; else floats come back within this error. NaN and infinities
            cannot be held then, and are refused.
        compression_level: As for `RolloutStorage`: 1 to 9 are fast, 10 to 16 smaller.

    Example:
        transform = CompressedLidarTransform([("observation", "lidar")])
        buffer = ReplayBuffer(storage=ListStorage(10_000), transform=transform, batch_size=64)
    """

    def __init__(
        self,
        in_keys: Sequence[Name],
        out_keys: Sequence[Name] | None = None,
        *,
        epsilon: float | None = None,
        compression_level: int = 1,
    ) -> None:
        if isinstance(in_keys, str) or isinstance(out_keys, str) or not in_keys:
            raise UsageError(f"in_keys={in_keys!r}, out_keys={out_keys!r}: give lists of keys")
        outs = [_renamed(key) for key in in_keys] if out_keys is None else list(out_keys)
        if len(outs) != len(in_keys) or {*map(as_path, outs)} & {*map(as_path, in_keys)}:
            raise UsageError(f"out_keys={outs!r}: give one other name for each of the in_keys")
        if check_level(compression_level) == 0 and epsilon is None:
            raise UsageError("compression_level=0 compresses nothing; leave the transform out")
        super().__init__(in_keys=list(in_keys), out_keys=outs)
        self._level = max(1, compression_level)
        self._epsilon = epsilon
        if epsilon is not None:
            Quantize(epsilon)  # refuses a wrong epsilon here

    def compress(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the same data with the in_keys compressed under the out_keys."""
        return self._inv_call(tensordict.clone(recurse=False))

    def decompress(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the same data with the in_keys again."""
        return self.forward(tensordict)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Decompress; as TorchRL does when a buffer is sampled.

        Raises:
            UsageError: A compressed key is missing, or was reshaped.
            CorruptFile: A blob is not what was made here.
        """
        result = tensordict.clone(recurse=False)
        for raw, packed in zip(self.in_keys, self.out_keys, strict=True):
            value = result.get(packed, None)
            if not isinstance(value, NonTensorData | NonTensorStack):
                raise UsageError(
                    f"{packed!r} holds no compressed data; fill the buffer through the transform"
                )
            tensor = self._decompressed(value, _batch_of(result, packed), packed)
            result = result.exclude(packed)
            result.set(raw, tensor if result.device is None else tensor.to(result.device))
        return result

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        values = []
        for raw, packed in zip(self.in_keys, self.out_keys, strict=True):
            value, batch = tensordict.get(raw, None), _batch_of(tensordict, packed)
            if not isinstance(value, torch.Tensor):
                known = sorted(map(str, tensordict.keys(True, True)))
                raise UsageError(f"no tensor {raw!r} to compress; there are {', '.join(known)}")
            if batch[:1] == (0,):
                raise UsageError(f"{raw!r} is empty: there is nothing to compress")
            values.append(self._compressed(value, batch, raw))
        tensordict = tensordict.exclude(*self.in_keys)
        for packed, value in zip(self.out_keys, values, strict=True):
            tensordict.set(packed, value)
        return tensordict

    def _compressed(self, tensor: torch.Tensor, batch: tuple[int, ...], key: Name) -> Any:
        leaf, inner = Leaf.of(as_path(key), tensor), batch[1:]
        rows = leaf.words() if batch else [leaf.words()]
        blobs = [self._encode(row, leaf.dtype, len(inner), key) for row in rows]
        made = [NonTensorData(blob, batch_size=inner) for blob in blobs]
        return NonTensorStack(*made) if batch else made[0]

    def _encode(self, row: NDArray[Any], dtype: str, inner: int, key: Name) -> bytes:
        flat = np.ascontiguousarray(np.moveaxis(row, 0, -1) if inner else row).reshape(-1)
        kept, kind, body = flat, _RAW, flat.tobytes()
        codec = self._codec(flat, key)
        coded = b"".join(codec.encode(flat)) if flat.size else b""
        if len(coded) < len(body):
            kind, body = _CODED, coded
            if codec.lossy:  # the checksum covers what comes back
                kept = np.empty_like(flat)
                codec.decode(memoryview(body), kept)
        crc = isal_zlib.crc32(kept.view(np.uint8))
        head = _HEAD.pack(kind, _DTYPES.index(dtype), row.ndim, inner, crc)
        head += struct.pack(f"<{row.ndim}Q", *row.shape)
        return head + _CRC.pack(isal_zlib.crc32(head)) + body

    def _codec(self, flat: NDArray[Any], key: Name) -> Codec:
        # The grid of `Quantize` is of 2 or 4 bytes, whatever the floats are.
        words = flat.dtype if self._epsilon is None else np.dtype(np.uint32)
        codec = codec_for(words, self._level, time_last=True)
        assert codec is not None
        if self._epsilon is not None and flat.dtype.kind != "f":
            raise UnsupportedValue(f"{key!r} is {flat.dtype}: epsilon is for float16, 32 and 64")
        return codec if self._epsilon is None else Quantize(self._epsilon, codec)

    def _decompressed(self, value: Any, batch: tuple[int, ...], key: Name) -> torch.Tensor:
        outer = max(0, len(batch) - _Blob(_first(value)).inner)
        blobs = _blobs(value, outer)
        if not blobs:
            raise UsageError(f"{key!r} is empty: nothing says what shape it had")
        made = {blob: _Blob(blob) for blob in set(blobs)}
        parts = [made[blob] for blob in blobs]
        dtype, shape = parts[0].dtype, parts[0].shape
        whole = (*batch[:outer], *shape)
        same = len({(part.dtype, part.shape) for part in made.values()}) == 1
        if not same or whole[: len(batch)] != batch or len(parts) != math.prod(batch[:outer]):
            raise UsageError(
                f"{key!r} was reshaped, or holds unequal items; decompress it before that"
            )
        tensor = empty_tensor(dtype, whole)
        out = flat_words(tensor).reshape(len(parts), -1)
        for row, part in zip(out, parts, strict=True):
            self._decode(part, row)
        return tensor

    def _decode(self, blob: _Blob, out: NDArray[Any]) -> None:
        shape = blob.shape
        stored = np.empty((*shape[1:], *shape[:1]) if blob.inner else shape, out.dtype)
        flat = stored.reshape(-1)
        codec = Raw() if blob.kind == _RAW else self._codec(flat, "a compressed item")
        codec.decode(blob.body, flat)
        if isal_zlib.crc32(flat.view(np.uint8)) != blob.crc:
            raise CorruptFile("a compressed item is damaged, or was made with other settings")
        np.copyto(out.reshape(shape), np.moveaxis(stored, -1, 0) if blob.inner else stored)

    def set_container(self, container: Any) -> None:
        """Refuse to become part of an environment."""
        if isinstance(container, EnvBase):
            _refuse_environment()
        super().set_container(container)

    def transform_observation_spec(self, observation_spec: Any) -> Any:
        """Refuse: a blob has no spec."""
        _refuse_environment()


class _Blob:
    """The header of one compressed item, checked, and what follows it."""

    def __init__(self, data: Any) -> None:
        if not isinstance(data, bytes) or len(data) < _HEAD.size:
            raise CorruptFile("a compressed item is too short")
        self.kind, code, rank, self.inner, self.crc = _HEAD.unpack_from(data)
        end = _HEAD.size + 8 * rank
        # Its own checksum: a damaged shape must not be allocated first.
        whole = len(data) >= end + _CRC.size
        if not whole or isal_zlib.crc32(data[:end]) != _CRC.unpack_from(data, end)[0]:
            raise CorruptFile("a compressed item is damaged: its header is not what was written")
        if self.kind not in (_RAW, _CODED) or code >= len(_DTYPES) or self.inner > rank:
            raise CorruptFile("a compressed item has a header that makes no sense")
        self.dtype = _DTYPES[code]
        self.shape: tuple[int, ...] = struct.unpack_from(f"<{rank}Q", data, _HEAD.size)
        self.body = memoryview(data)[end + _CRC.size :]


def _batch_of(data: TensorDictBase, key: Name) -> tuple[int, ...]:
    """Return the batch size of what holds a key; agents may have an axis of their own."""
    path = as_path(key)
    holder = data.get(path[:-1], data) if path[1:] else data
    return tuple(holder.batch_size)


def _first(value: Any) -> Any:
    while isinstance(value, NonTensorStack) and len(value.tensordicts):
        value = value.tensordicts[0]
    return value.data


def _blobs(value: Any, outer: int) -> list[Any]:
    """List the blobs of a stack: equal ones may have been merged, and those of time repeated."""
    if isinstance(value, NonTensorData):
        return [value.data] * math.prod(value.batch_size[:outer])
    if outer == 0:
        return [_first(value)]
    return [blob for part in value.unbind(0) for blob in _blobs(part, outer - 1)]


def _renamed(key: Name) -> Name:
    name = f"{as_path(key)[-1]}_compressed"
    return name if isinstance(key, str) else (*key[:-1], name)


def _refuse_environment() -> NoReturn:
    raise UsageError(
        "CompressedLidarTransform belongs into a replay buffer, not into an environment: a policy "
        "cannot read compressed data; pass it as ReplayBuffer(transform=…)"
    )
