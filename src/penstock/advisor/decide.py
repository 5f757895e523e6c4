"""What was measured, what the user has, and the decision: a pure function of both.

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
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from penstock.core.memory import parse_bytes, whole_number
from penstock.errors import UsageError

KeyPath = tuple[str, ...]
Writer = Literal["rollouts", "checkpoint", "replay", "dataset", "recording"]
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
class CodecMeasure:
    """One codec on the sample of one key, by one thread; speeds are of raw bytes.

    The name is such as "series 1" or "lz4 9", and "raw" for as it is.
    """

    name: str
    ratio: float
    encode_bytes_s: float
    decode_bytes_s: float


Part = tuple[float, CodecMeasure | None]
"""So many bytes, and what their codec makes of them; None leaves them as they are."""


@dataclass(eq=False)
class KeyMeasure:
    """One key, tensor, topic or column: known when the sample is taken, then measured.

    Attributes:
        path: From the outside in.
        writer: Which part of penstock stores it.
        shape: Of all of it, or of one element where there is no more to say.
        raw_bytes: What storing it takes uncompressed.
        memory_bytes: What holding it for use takes uncompressed (a video: its pictures).
        note: What else is to say, such as "already compressed (jpeg)".
        stored: As its writer stores it; None where nothing would be changed.
        memory: As a replay buffer holds it; None where that does not apply.
        batch: As a `CompressedDataCollector` holds it; None where that does not apply.
        delta: Of a series of checkpoints: every so many in full, differences between; None else.
        compared: General compressors over its plain bytes.
        bound: The best ratio of a memoryless coder (see `measure.memoryless_bound`).
    """

    path: KeyPath
    writer: Writer
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    memory_bytes: int
    note: str = ""
    sampled_bytes: int = 0
    stored: CodecMeasure | None = None
    memory: CodecMeasure | None = None
    batch: CodecMeasure | None = None
    delta: CodecMeasure | None = None
    compared: tuple[CodecMeasure, ...] = ()
    bound: float | None = None

    @property
    def name(self) -> str:
        """Its path, for people."""
        return ".".join(self.path) or "data"

    @property
    def is_compressed(self) -> bool:
        """Whether its elements are compressed pictures."""
        return self.note.startswith("already compressed")


@dataclass(frozen=True)
class Machine:
    """What this machine does; None for a disk that cannot be written to."""

    cores: int = 1
    memory_bytes: int = 0
    copy_bytes_s: float = 1.0
    write_bytes_s: float | None = None


@dataclass
class Measurements:
    """Everything the decision depends on, beside the limits: facts of the data, then measures.

    Attributes:
        kind: What the data is, in words.
        where: Its path; "" for data in memory.
        frames: Frames that a replay buffer would hold; 0 where there are none.
        environments: Rows of a batch, each with its own time; 0 where there are none.
        disk_bytes: What the data takes on disk now; 0 for data in memory.
        slots: Of the storage of TorchRL that the data is in; 0 for none.
        delta_every: Checkpoints per keyframe that `KeyMeasure.delta` was measured for; 0 for none.
        notes: What else the user should know, a line each.
        keys: One entry per key; when they are measured, the largest first.
        overhead_bytes: What the headers of stored files take, all together.
        machine: Where all of it was measured.
    """

    kind: str
    where: str = ""
    frames: int = 0
    environments: int = 0
    disk_bytes: int = 0
    slots: int = 0
    delta_every: int = 0
    notes: list[str] = field(default_factory=list)
    keys: list[KeyMeasure] = field(default_factory=list)
    overhead_bytes: int = 0
    machine: Machine = field(default_factory=Machine)

    @property
    def on_disk(self) -> bool:
        """Whether it lies on a disk."""
        return bool(self.where)


@dataclass(frozen=True)
class Limits:
    """What the user has, in bytes and bytes per second; None where nothing was said."""

    memory: int | None = None
    bandwidth: float | None = None
    reuse: int | None = None
    device_memory: int | None = None

    @classmethod
    def parse(
        cls,
        memory: str | int | None,
        bandwidth: str | float | None,
        reuse: int | None,
        device_memory: str | int | None,
    ) -> Limits:
        """Read limits as a user writes them: "2GB", "1Gb/s", 10.

        Raises:
            UsageError: One of them makes no sense.
        """
        return cls(
            _size("memory", memory),
            None if bandwidth is None else parse_rate(bandwidth),
            None if reuse is None else whole_number("reuse", reuse),
            _size("device_memory", device_memory),
        )


@dataclass(frozen=True)
class BreakEven:
    """Where compression begins to save time: below which bandwidth, and up to how many uses.

    The latter at the user's bandwidth, or that of writing to the disk; None for neither.
    """

    bandwidth_bytes_s: float
    reuse: int
    at_bytes_s: float | None
    uses: int | None


@dataclass(frozen=True)
class Decision:
    """What to do, and the numbers it rests on: docs/metrics.md says what each is.

    Besides: the speeds of storing and reading all keys together, the tightest memory that it does
    not fit uncompressed, and the names of the keys that get smaller by `LEAST_RATIO`.
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
    keys, every = measurements.keys, measurements.delta_every
    raw, held = sum(key.raw_bytes for key in keys), sum(key.memory_bytes for key in keys)
    overhead = measurements.overhead_bytes
    full, delta = (coded_bytes(keys, "", some) + overhead for some in (0, every))
    delta_every = every if _differences_pay(keys, raw, full, delta) else 0
    stored = delta if delta_every else full
    ratio_stored = raw / max(1, stored)
    compressed, batches = coded_bytes(keys, "buffer"), coded_bytes(keys, "batch")
    ratio_memory = held / max(1, compressed) if any(key.memory for key in keys) else None
    ratio_batch = held / max(1, batches) if any(key.batch for key in keys) else None
    codecs = [(key, codec_of(key, "", delta_every)) for key in keys]
    speeds = together((key.raw_bytes, codec) for key, codec in codecs if codec)
    even = _break_even(measurements, limits, ratio_stored, speeds)

    given = ((limits.memory, False), (limits.device_memory, True))
    too_small = [(size, device) for size, device in given if size is not None and held > size]
    limit, device = min(too_small, default=(None, False))
    # Batches first: what was collected as batches is used as such.
    forms: tuple[tuple[Form, float | None, float], ...] = (
        ("batch", ratio_batch, batches),
        ("buffer", ratio_memory, compressed * SLACK),
    )
    fitting = ((form, ratio, size) for form, ratio, size in forms if (ratio or 1.0) >= LEAST_RATIO)
    form, in_memory, size = next(fitting, ("", 1.0, 0.0))
    verdict: Verdict = "A"
    if limit is not None and form:
        verdict, reason = "C", "does not fit"
    elif ratio_stored < LEAST_RATIO:
        reason = "saves too little"
    elif not measurements.on_disk and limits.bandwidth is None:
        reason = "in memory"
    elif limits.bandwidth is not None and limits.bandwidth > even.bandwidth_bytes_s:
        reason = "link is fast"
    else:
        verdict, reason = "B", "stored"
    if verdict != "C":
        form = ""
    memory = limits.memory or math.inf
    judged = ((key.name, codec_of(key, form, delta_every)) for key in keys)
    return Decision(
        verdict=verdict,
        reason=reason,
        form=form,
        fits=size <= memory if form else limit is None,
        raw_bytes=raw,
        stored_bytes=stored,
        memory_bytes=held,
        compressed_bytes=compressed if ratio_memory is not None else None,
        batch_bytes=batches if ratio_batch is not None else None,
        ratio={"A": 1.0, "B": ratio_stored, "C": in_memory or 1.0}[verdict],
        ratio_stored=ratio_stored,
        ratio_full=raw / max(1, full) if every else None,
        ratio_delta=raw / max(1, delta) if every else None,
        delta_every=delta_every,
        ratio_in_memory=ratio_memory,
        ratio_batch=ratio_batch,
        break_even=even,
        encode_bytes_s=speeds.encode_bytes_s,
        decode_bytes_s=speeds.decode_bytes_s,
        limit_bytes=limit,
        limit_is_device=device,
        spill=bool(form) and ratio_memory is not None and compressed * SLACK > memory,
        fitting_frames=int(limit * measurements.frames // held) if limit is not None else 0,
        pays=tuple(name for name, codec in judged if codec and codec.ratio >= LEAST_RATIO),
    )


def codec_of(key: KeyMeasure, form: Form, delta_every: int) -> CodecMeasure | None:
    """Return the codec of a key as it is held, or else as it is stored."""
    if form:
        return key.batch if form == "batch" else key.memory
    return key.delta if delta_every and key.delta else key.stored


def coded_bytes(keys: Iterable[KeyMeasure], form: Form, delta_every: int = 0) -> int:
    """Return the bytes of all keys as they are held, or else as they are stored."""
    total = 0.0
    for key in keys:
        codec = codec_of(key, form, delta_every)
        total += (key.memory_bytes if form else key.raw_bytes) / (codec.ratio if codec else 1.0)
    return math.ceil(total)


def _differences_pay(keys: Iterable[KeyMeasure], raw: int, full: int, delta: int) -> bool:
    """Tell whether differences make the checkpoints clearly smaller, or all of it small enough."""
    series = [key for key in keys if key.delta]
    clearly = coded_bytes(series, "") > LEAST_GAIN * coded_bytes(series, "", 1)
    return clearly or delta <= raw / LEAST_RATIO < full


def together(parts: Iterable[Part]) -> CodecMeasure:
    """Return what codecs make of parts of so many bytes, all together; None leaves one as it is."""
    size = coded = encode_s = decode_s = 0.0
    name, best = "", 0.0
    for part, codec in parts:
        size += part
        coded += part / (codec.ratio if codec else 1.0)
        if codec:
            encode_s += part / max(1.0, codec.encode_bytes_s)
            decode_s += part / max(1.0, codec.decode_bytes_s)
            if codec.ratio > best:  # the name is that of the one that does most
                name, best = codec.name, codec.ratio
    if not encode_s:
        return CodecMeasure("", 1.0, 0.0, 0.0)
    return CodecMeasure(name, size / coded, size / encode_s, size / decode_s)


def _break_even(
    measurements: Measurements, limits: Limits, ratio: float, speeds: CodecMeasure
) -> BreakEven:
    uses = limits.reuse or 1
    at = limits.bandwidth
    if at is None and measurements.on_disk:
        at = measurements.machine.write_bytes_s
    saved = 1 - 1 / max(1.0, ratio)
    encode, decode = speeds.encode_bytes_s, speeds.decode_bytes_s
    if not encode or not saved:
        return BreakEven(0.0, uses, at, None if at is None else 0)
    bandwidth = saved / (1 / encode + uses / decode)
    most = None if at is None else max(0, math.floor(decode * (saved / at - 1 / encode)))
    return BreakEven(bandwidth, uses, at, most)


def parse_rate(value: str | float) -> float:
    """Return bytes per second: "1Gb/s" is 125e6 (b are bits), so is "125MB/s" (B are bytes).

    Raises:
        UsageError: It is no such rate, or zero.
    """
    rate = 0.0
    if isinstance(value, str):
        size, per_second, rest = value.strip().replace("ps", "/s").partition("/s")
        bits = size.endswith("b")
        with suppress(UsageError):
            if not rest and bool(per_second) == size[-1:].isalpha():
                rate = parse_bytes(size) / (8 if bits else 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        rate = float(value)
    if not (math.isfinite(rate) and rate > 0):
        raise UsageError(
            f"not a bandwidth: {value!r}; write for example 1Gb/s (bits), 125MB/s (bytes)"
        )
    return rate


def _size(name: str, value: str | int | None) -> int | None:
    if value is None:
        return None
    with suppress(UsageError):
        if size := parse_bytes(value):
            return size
    raise UsageError(f"{name}={value!r} is no size; write for example 512MB or 2GiB")
