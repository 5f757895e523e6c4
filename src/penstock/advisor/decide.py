"""The decision: a pure function of what was measured and what the user has.

A  don't compress             it saves too little, or costs more time than it saves
B  compress what is stored    it lies on a disk or crosses a slow link, and fits the memory as it is
C  compress in memory too     it does not fit otherwise

Time per raw byte that crosses a link of bandwidth b once and is then used n times: as it is, 1/b;
compressed r times, 1/c + 1/(r b) + n/d, where c and d are the speeds of compressing and restoring.
So compression saves time below the break-even bandwidth b* = (1 - 1/r) / (1/c + n/d), and at a
bandwidth b for up to n* = d ((1 - 1/r) / b - 1/c) uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from penstock.advisor.model import CodecMeasure, KeyMeasure, Limits, Measurements

Verdict = Literal["A", "B", "C"]
Form = Literal["", "batch", "buffer"]

LEAST_RATIO = 1.3
LEAST_GAIN = 1.1  # of differences between checkpoints over full ones
SLACK = 1.2  # memory of a replay buffer, for what was freed and not yet used again
MEANING: dict[Verdict, str] = {
    "A": "don't compress",
    "B": "compress what is stored",
    "C": "compress in memory too",
}


@dataclass(frozen=True)
class BreakEven:
    """Where compression begins to save time.

    Attributes:
        bandwidth: Bytes per second below which it does, for a link crossed once.
        reuse: Uses that this is computed for.
        at: The bandwidth asked about: the user's, or that of writing to the disk; None for neither.
        uses: At that bandwidth, for up to so many uses; 0 for none.
    """

    bandwidth: float
    reuse: int
    at: float | None
    uses: int | None


@dataclass(frozen=True)
class Decision:
    """What to do, and the numbers it rests on.

    Attributes:
        verdict: A, B or C.
        reason: Which rule decided, in a word.
        form: In which form it is held for C, "batch" (a `CompressedDataCollector`) or "buffer" (a
            replay buffer); "" for the others.
        fits: Whether the memory holds it in the form advised.
        raw_bytes: Stored uncompressed.
        stored_bytes: Stored compressed, as predicted.
        memory_bytes: Held uncompressed.
        compressed_bytes: Held compressed in a replay buffer; None where that does not apply.
        batch_bytes: Held as batches of a `CompressedDataCollector`; None where there are none.
        ratio: Of the form advised.
        ratio_stored: Of storing.
        ratio_full: Of storing every checkpoint in full; None where differences were not measured.
        ratio_delta: Of storing differences between full ones; None where they were not measured.
        delta_every: Checkpoints per full one, differences between; 0 for full ones only.
        ratio_in_memory: Of holding it in a replay buffer; None where that does not apply.
        ratio_batch: Of holding it as compressed batches; None where that does not apply.
        break_even: See there.
        encode_bytes_s: Of storing, all keys together.
        decode_bytes_s: Of reading, all keys together.
        limit_bytes: The tightest memory, if it does not fit uncompressed.
        limit_is_device: Whether that is the device's.
        spill: Whether a replay buffer of it needs a disk besides.
        fitting_frames: How many frames fit that memory uncompressed.
        pays: Names of the keys that get smaller by `LEAST_RATIO`, in the form advised.
    """

    verdict: Verdict
    reason: str
    form: Form
    fits: bool
    raw_bytes: int
    stored_bytes: int
    memory_bytes: int
    compressed_bytes: int | None
    batch_bytes: int | None
    ratio: float
    ratio_stored: float
    ratio_full: float | None
    ratio_delta: float | None
    delta_every: int
    ratio_in_memory: float | None
    ratio_batch: float | None
    break_even: BreakEven
    encode_bytes_s: float
    decode_bytes_s: float
    limit_bytes: int | None
    limit_is_device: bool
    spill: bool
    fitting_frames: int
    pays: tuple[str, ...]


def decide(measurements: Measurements, limits: Limits) -> Decision:
    """Decide; the same measurements and limits always give the same answer."""
    keys = measurements.keys
    raw = sum(key.raw_bytes for key in keys)
    full, delta = _stored(measurements, 0), _stored(measurements, measurements.delta_every)
    delta_every = measurements.delta_every if _differences_pay(measurements, full, delta) else 0
    stored = delta if delta_every else full
    ratio_stored = raw / max(1, stored)
    in_series = bool(measurements.delta_every)
    held = sum(key.memory_bytes for key in keys)
    compressed = math.ceil(sum(_coded(key.memory_bytes, key.memory) for key in keys))
    batches = math.ceil(sum(_coded(key.memory_bytes, key.batch) for key in keys))
    applies = any(key.memory is not None for key in keys)
    ratio_memory = held / max(1, compressed) if applies else None
    ratio_batch = held / max(1, batches) if any(key.batch for key in keys) else None
    encode, decode = _speeds(keys, delta_every)
    even = _break_even(measurements, limits, ratio_stored, encode, decode)

    given = [
        (size, device)
        for size, device in ((limits.memory, False), (limits.device_memory, True))
        if size is not None and held > size
    ]
    limit, device = min(given, default=(None, False))
    # Batches first: what was collected as batches is used as such.
    forms: list[tuple[Form, float | None, int, float]] = [
        ("batch", ratio_batch, batches, 1.0),
        ("buffer", ratio_memory, compressed, SLACK),
    ]
    form, in_memory, size, slack = next(
        (one for one in forms if (one[1] or 1.0) >= LEAST_RATIO), ("", None, held, 1.0)
    )
    stores = measurements.on_disk or limits.bandwidth is not None
    if limit is not None and form:
        verdict, reason = "C", "does not fit"
    elif ratio_stored < LEAST_RATIO:
        verdict, reason = "A", "saves too little"
    elif not stores:
        verdict, reason = "A", "in memory"
    elif limits.bandwidth is not None and limits.bandwidth > even.bandwidth:
        verdict, reason = "A", "link is fast"
    else:
        verdict, reason = "B", "stored"
    held_so = verdict == "C"  # compressed, in host memory
    ratio = {"A": 1.0, "B": ratio_stored, "C": in_memory or 1.0}[verdict]
    frame_bytes = held / max(1, measurements.frames)
    memory = limits.memory or math.inf
    return Decision(
        verdict=verdict,  # type: ignore[arg-type]
        reason=reason,
        form=form if held_so else "",
        fits=size * slack <= memory if held_so else limit is None,
        raw_bytes=raw,
        stored_bytes=stored,
        memory_bytes=held,
        compressed_bytes=compressed if applies else None,
        batch_bytes=batches if ratio_batch is not None else None,
        ratio=ratio,
        ratio_stored=ratio_stored,
        ratio_full=raw / max(1, full) if in_series else None,
        ratio_delta=raw / max(1, delta) if in_series else None,
        delta_every=delta_every,
        ratio_in_memory=ratio_memory,
        ratio_batch=ratio_batch,
        break_even=even,
        encode_bytes_s=encode,
        decode_bytes_s=decode,
        limit_bytes=limit,
        limit_is_device=device,
        spill=held_so and applies and compressed * SLACK > memory,
        fitting_frames=int(limit // frame_bytes) if limit is not None and frame_bytes else 0,
        pays=tuple(
            key.name
            for key in keys
            if (codec := codec_of(key, form if held_so else "", delta_every))
            and codec.ratio >= LEAST_RATIO
        ),
    )


def codec_of(key: KeyMeasure, form: Form, delta_every: int) -> CodecMeasure | None:
    """Return the codec of a key as it is held, or else as it is stored."""
    if form:
        return key.batch if form == "batch" else key.memory
    return key.delta if delta_every and key.delta else key.stored


def _stored(measurements: Measurements, delta_every: int) -> int:
    """Return the bytes stored, headers included."""
    coded = (_coded(k.raw_bytes, codec_of(k, "", delta_every)) for k in measurements.keys)
    return math.ceil(sum(coded)) + measurements.overhead_bytes


def _differences_pay(measurements: Measurements, full: int, delta: int) -> bool:
    """Tell whether differences make the checkpoints clearly smaller, or all of it small enough."""
    series = [key for key in measurements.keys if key.delta]
    before = sum(_coded(key.raw_bytes, key.stored) for key in series)
    after = sum(_coded(key.raw_bytes, key.delta) for key in series)
    enough = sum(key.raw_bytes for key in measurements.keys) / LEAST_RATIO
    return before > LEAST_GAIN * after or delta <= enough < full


def _coded(size: int, codec: CodecMeasure | None) -> float:
    return size / codec.ratio if codec else float(size)


def _speeds(keys: Iterable[KeyMeasure], delta_every: int) -> tuple[float, float]:
    """Speeds of all keys together, by their bytes."""
    found = [(key.raw_bytes, codec_of(key, "", delta_every)) for key in keys]
    coded = [(size, codec) for size, codec in found if codec and size]
    total = sum(size for size, _ in coded)
    if not total:
        return 0.0, 0.0
    encode_s = sum(size / max(1.0, codec.encode_bytes_s) for size, codec in coded)
    decode_s = sum(size / max(1.0, codec.decode_bytes_s) for size, codec in coded)
    return total / encode_s, total / decode_s


def _break_even(
    measurements: Measurements, limits: Limits, ratio: float, encode: float, decode: float
) -> BreakEven:
    uses = limits.reuse or 1
    at = limits.bandwidth
    if at is None and measurements.on_disk:
        at = measurements.machine.write_bytes_s
    saved = max(0.0, 1 - 1 / ratio) if ratio > 0 else 0.0
    if not encode or not decode or not saved:
        return BreakEven(0.0, uses, at, None if at is None else 0)
    bandwidth = saved / (1 / encode + uses / decode)
    most = None if at is None else max(0, math.floor(decode * (saved / at - 1 / encode)))
    return BreakEven(bandwidth, uses, at, most)


def to_json(even: BreakEven) -> dict[str, Any]:
    """Return JSON-able values, units in the names."""
    return {
        "bandwidth_bytes_s": even.bandwidth,
        "reuse": even.reuse,
        "at_bytes_s": even.at,
        "uses": even.uses,
    }
