"""What was measured, and the limits it is judged by: plain values that go to JSON and back."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from penstock.core.memory import parse_bytes
from penstock.errors import UsageError

WRITERS = ("rollouts", "checkpoint", "replay", "dataset", "recording")
_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kMGT]?)(i?)([bB])(?:/s|ps)\s*")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class CodecMeasure:
    """One codec on the sample of one key, by one thread.

    Attributes:
        name: Such as "series", "lz4 9"; "raw" for as it is.
        ratio: Raw bytes over coded bytes.
        encode_bytes_s: Raw bytes compressed per second.
        decode_bytes_s: Raw bytes restored per second.
    """

    name: str
    ratio: float
    encode_bytes_s: float
    decode_bytes_s: float


@dataclass(frozen=True)
class KeyMeasure:
    """One key, tensor, topic or column.

    Attributes:
        name: For people.
        path: The key, from the outside in.
        writer: Which part of penstock stores it; one of `WRITERS`.
        dtype: Type of its elements.
        shape: Of all of it, or of one element where there is no more to say.
        raw_bytes: What storing it takes uncompressed.
        memory_bytes: What holding it for use takes uncompressed (a video: its pictures).
        sampled_bytes: How much of it was looked at.
        stored: As its writer stores it; None where nothing would be changed.
        memory: As a replay buffer holds it; None where that does not apply.
        batch: As a `CompressedDataCollector` holds it; None where that does not apply.
        delta: Of a series of checkpoints: every so many in full, differences between; None else.
        compared: General compressors over its plain bytes.
        bound: The best ratio of a memoryless coder (see `entropy.memoryless_bound`).
        note: What else is to say, such as "already compressed (jpeg)".
    """

    name: str
    path: tuple[str, ...]
    writer: str
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    memory_bytes: int
    sampled_bytes: int
    stored: CodecMeasure | None = None
    memory: CodecMeasure | None = None
    batch: CodecMeasure | None = None
    delta: CodecMeasure | None = None
    compared: tuple[CodecMeasure, ...] = ()
    bound: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Machine:
    """What this machine does.

    Attributes:
        cores: Logical ones that this process may use.
        memory_bytes: Of the machine.
        copy_bytes_s: A large copy in memory, by one thread.
        write_bytes_s: Onto the disk of the data, fsync included; None if that was refused.
        read_bytes_s: From that disk; None where the cache could not be kept out of it.
    """

    cores: int
    memory_bytes: int
    copy_bytes_s: float
    write_bytes_s: float | None = None
    read_bytes_s: float | None = None


@dataclass(frozen=True)
class Measurements:
    """Everything the decision depends on, beside the limits.

    Attributes:
        kind: What the data is, in words.
        where: Its path; "" for data in memory.
        on_disk: Whether it lies on a disk.
        frames: Frames that a replay buffer would hold; 0 where there are none.
        environments: Rows of a batch, each with its own time; 0 where there are none.
        overhead_bytes: What the headers of stored files take, all together.
        disk_bytes: What the data takes on disk now; 0 for data in memory.
        keys: One entry per key, the largest first.
        machine: Where all of it was measured.
        delta_every: Checkpoints per keyframe that `KeyMeasure.delta` was measured for; 0 for none.
        slots: Of the storage of TorchRL that the data is in; 0 for none.
        notes: What else the user should know, a line each.
    """

    kind: str
    where: str
    on_disk: bool
    frames: int
    environments: int
    overhead_bytes: int
    disk_bytes: int
    keys: tuple[KeyMeasure, ...]
    machine: Machine
    delta_every: int = 0
    notes: tuple[str, ...] = ()
    slots: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """What the user has: None where nothing was said.

    Attributes:
        memory: Bytes of memory for the data.
        bandwidth: Bytes per second of the link that the data crosses.
        reuse: How often each byte is used.
        device_memory: Bytes on the device for the data.
    """

    memory: int | None = None
    bandwidth: float | None = None
    reuse: int | None = None
    device_memory: int | None = None

    @classmethod
    def parse(
        cls,
        memory: str | int | None,
        bandwidth: str | float | None,
        reuse: int | str | None,
        device_memory: str | int | None,
    ) -> Limits:
        """Read limits as a user writes them: "2GB", "1Gb/s", 10.

        Raises:
            UsageError: One of them makes no sense.
        """
        return cls(
            _size("memory", memory),
            None if bandwidth is None else parse_rate(bandwidth),
            _count(reuse),
            _size("device_memory", device_memory),
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return asdict(self)


def parse_rate(value: str | float) -> float:
    """Return bytes per second: "1Gb/s" is 125e6 (b are bits), "125MB/s" as well (B are bytes).

    Args:
        value: A number with bits (b) or bytes (B) per second, or a plain number of bytes.

    Raises:
        UsageError: It is no such rate, or zero.
    """
    wrong = UsageError(
        f"not a bandwidth: {value!r}; write for example 1Gb/s (bits), 125MB/s (bytes)"
    )
    if isinstance(value, bool):
        raise wrong
    if isinstance(value, int | float):
        rate = float(value)
    else:
        match = _RATE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            text = value.strip() if isinstance(value, str) else ""
            if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
                raise wrong
            rate = float(text)
        else:
            number, power, binary, unit = match.groups()
            base = 1024 if binary else 1000
            rate = float(Decimal(number) * base ** _POWERS[power]) / (8 if unit == "b" else 1)
    if not (math.isfinite(rate) and rate > 0):
        raise wrong
    return rate


def _size(name: str, value: str | int | None) -> int | None:
    if value is None:
        return None
    try:
        size = parse_bytes(value)
    except UsageError:
        size = 0
    if size < 1:
        raise UsageError(f"{name}={value!r} is no size; write for example 512MB or 2GiB")
    return size


def _count(value: int | str | None) -> int | None:
    if value is None:
        return None
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if type(number) is not int or number < 1:
        raise UsageError(f"reuse={value!r}: give how often each byte is used, at least 1")
    return number
