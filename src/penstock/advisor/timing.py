"""Time codecs on blocks of a sample: one thread, the best of a few times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.advisor.entropy import HIGHEST
from penstock.advisor.model import CodecMeasure, Machine
from penstock.core.codecs import Codec, Delta

Array = NDArray[Any]

_ENOUGH_S = 0.1  # what took so long is not measured again


def raw(machine: Machine) -> CodecMeasure:
    """Return what leaving data as it is takes: a copy."""
    return CodecMeasure("raw", 1.0, machine.copy_bytes_s, machine.copy_bytes_s)


def codec_name(codec: Codec) -> str:
    """Name a codec and its level."""
    if isinstance(codec, Delta):
        return f"{codec.id} {codec_name(codec.inner)}"
    level = codec.config().get("level")
    return codec.id if level is None else f"{codec.id} {level}"


def timed(
    name: str, codec: Codec, blocks: Sequence[Array], bases: Sequence[Array] = ()
) -> CodecMeasure:
    """Encode and decode blocks; a `Delta` needs as many bases."""
    size = sum(block.nbytes for block in blocks)
    none: list[Array | None] = [None] * len(blocks)
    pairs = list(zip(blocks, bases or none, strict=True))
    begin = time.perf_counter()
    coded = [b"".join(codec.encode(block, base)) for block, base in pairs]
    encode_s = time.perf_counter() - begin
    out = [np.empty_like(block) for block in blocks]

    def encode() -> None:
        for block, base in pairs:
            codec.encode(block, base)

    def decode() -> None:
        for data, target, (_, base) in zip(coded, out, pairs, strict=True):
            codec.decode(memoryview(data), target, base)

    ratio = min(HIGHEST, size / max(1, sum(map(len, coded))))
    if encode_s < 5 * _ENOUGH_S:
        encode_s = min(encode_s, best(encode))
    return CodecMeasure(name, ratio, size / max(encode_s, 1e-9), size / best(decode))


def best(work: Callable[[], object]) -> float:
    """Return the least seconds that some work took."""
    least, spent = float("inf"), 0.0
    for _ in range(3):
        begin = time.perf_counter()
        work()
        took = time.perf_counter() - begin
        least, spent = min(least, took), spent + took
        if spent > _ENOUGH_S:
            break
    return max(least, 1e-9)
