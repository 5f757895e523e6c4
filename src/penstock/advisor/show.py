"""The advice: a verdict, three lines of why, a table, what to type; and as JSON."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.advisor.decide import (
    LEAST_RATIO,
    MEANING,
    SLACK,
    CodecMeasure,
    Decision,
    KeyMeasure,
    Limits,
    Measurements,
    Verdict,
    codec_of,
    together,
)
from penstock.advisor.measure import BATCH_LEVEL, CHECKPOINT_LEVEL, ROLLOUT_LEVEL, raw
from penstock.core.memory import format_bytes
from penstock.ui.report import text_table, wrapped

_ROWS = 10
_CACHE_BYTES = 64 << 20  # what a CompressedDataCollector takes by default
_LEAST_CACHE_BYTES = 1 << 20
_DATA = ("kind", "where", "on_disk", "frames", "environments", "overhead_bytes", "disk_bytes")
_INNER = ("encode_bytes_s", "decode_bytes_s", "limit_bytes", "limit_is_device", "pays")
_NOTE_DELTAS = (
    "saved often, checkpoints may get smaller as differences (delta_every): give `penstock advise` "
    "a folder of two or more to find out"
)


@dataclass(frozen=True)
class Advice:
    """An answer, and everything it rests on: what was measured, what the user has, what follows."""

    measurements: Measurements
    limits: Limits
    decision: Decision

    @property
    def verdict(self) -> Verdict:
        """A (don't compress), B (compress what is stored) or C (compress in memory too)."""
        return self.decision.verdict

    @property
    def ratio(self) -> float:
        """How many times smaller the data gets in the form advised."""
        return self.decision.ratio

    @cached_property
    def why(self) -> list[str]:
        """Three lines that explain the verdict: what it saves, what decides, what it costs."""
        return [_saves(self), _decides(self), _costs(self)]

    @cached_property
    def settings(self) -> list[str]:
        """Lines to type: Python, or commands that begin with "penstock "."""
        return _settings(self)

    @property
    def notes(self) -> list[str]:
        """What else there is to know, a line each."""
        single = not self.measurements.delta_every and self.has("checkpoint")
        return [*self.measurements.notes, *([_NOTE_DELTAS] if single else ())]

    @property
    def bound(self) -> float | None:
        """The memoryless bound of all keys of which it is known."""
        known = [(k.raw_bytes, k.bound) for k in self.measurements.keys if k.bound and k.raw_bytes]
        least = sum(size / bound for size, bound in known)
        return sum(size for size, _ in known) / least if known else None

    def has(self, writer: str) -> bool:
        """Tell whether a part of penstock stores some of the keys."""
        return any(key.writer == writer for key in self.measurements.keys)

    def codec(self, key: KeyMeasure) -> CodecMeasure | None:
        """Return the codec of a key in the form that was judged."""
        return codec_of(key, self.decision.form, self.decision.delta_every)

    def text(self) -> str:
        """Lay it out for the terminal."""
        decision, machine = self.decision, self.measurements.machine
        verdict = f"{decision.verdict}: {MEANING[decision.verdict]}"
        if decision.verdict != "A":
            verdict += f", {_times(decision.ratio)} smaller"
        data = f"{self.measurements.kind} {self.measurements.where}".strip()
        told = [
            *_compared(self.measurements),
            f"machine: {machine.cores} cores, memory copies {_speed(machine.copy_bytes_s)}, disk "
            f"writes {_speed(machine.write_bytes_s)}",
            *(f"note: {note}" for note in self.notes),
        ]
        lines = [
            wrapped(f"{verdict}   ({data}, {format_bytes(decision.raw_bytes)} raw)"),
            *(wrapped(f"  - {line}", "    ") for line in self.why),
            "",
            _table(self),
            "",
            *(wrapped(line, "  ") for line in told),
            "",
            "type:",
            *(_typed(line) for line in self.settings),
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON document."""
        keys = []
        for key in self.measurements.keys:
            codec = self.codec(key)
            judged = {
                "codec": codec.name if codec else None,
                "ratio": codec.ratio if codec else 1.0,
                "pays": key.name in self.decision.pays,
                "beats_bound": _beats_bound(key, codec),
            }
            keys.append({"name": key.name, **asdict(key), **judged})
        decision = asdict(self.decision)
        return {
            **{name: value for name, value in decision.items() if name not in _INNER},
            "meaning": MEANING[self.verdict],
            "bound": self.bound,
            "why": self.why,
            "notes": self.notes,
            "settings": self.settings,
            "keys": keys,
            "machine": asdict(self.measurements.machine),
            "limits": asdict(self.limits),
            "data": {name: getattr(self.measurements, name) for name in _DATA},
        }


def _typed(line: str) -> str:
    """Wrap what is to be typed so that a shell, or Python, takes it as one line."""
    return wrapped(f"  {line}", "      ", " \\" if line.startswith("penstock ") else "")


def _speed(bytes_s: float | None) -> str:
    return "-" if not bytes_s else f"{format_bytes(bytes_s)}/s"


def _rate(bytes_s: float) -> str:
    """Say a bandwidth in bytes and in bits."""
    bits = format_bytes(8 * bytes_s).replace("B", "b")
    return f"{format_bytes(bytes_s)}/s ({bits}/s)"


def _times(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"


def _saves(advice: Advice) -> str:
    decision = advice.decision
    text = (
        f"{format_bytes(decision.raw_bytes)} become {format_bytes(decision.stored_bytes)} stored "
        f"({_times(decision.ratio_stored)})"
    )
    if decision.delta_every:
        text += f" as differences, a full checkpoint every {decision.delta_every}"
        text += f" (all full: {_times(decision.ratio_full)})"
    elif decision.ratio_delta is not None:
        text += f", as differences {_times(decision.ratio_delta)}"
    held = (
        (decision.compressed_bytes, decision.ratio_in_memory, "in a replay buffer"),
        (decision.batch_bytes, decision.ratio_batch, "as compressed batches"),
    )
    forms = [
        f"{format_bytes(s)} {how} ({_times(ratio)})" for s, ratio, how in held if s is not None
    ]
    if forms:
        text += f"; in memory, {format_bytes(decision.memory_bytes)} become {' or '.join(forms)}"
    if advice.bound is not None:
        text += f"; a memoryless coder reaches {_times(advice.bound)}"
        if decision.delta_every:
            text += " of full ones"
        elif decision.ratio_stored > 1.02 * advice.bound:
            text += " (beaten: the data repeats itself)"
    return text


def _decides(advice: Advice) -> str:
    measurements, limits, decision = advice.measurements, advice.limits, advice.decision
    if decision.limit_bytes is not None:
        return _too_large(advice, format_bytes(decision.limit_bytes))
    if decision.reason == "saves too little":
        coded = sum(key.raw_bytes for key in measurements.keys if key.is_compressed)
        share = coded / max(1, decision.raw_bytes)
        text = f"under {LEAST_RATIO}x compression costs time and complexity for nothing"
        if share >= 0.01:
            text += f"; {share:.0%} of it is already compressed"
        if decision.pays:
            more = len(decision.pays) - 3
            names = ", ".join(decision.pays[:3]) + (f" and {more} more" if more > 0 else "")
            text += f"; only {names} would gain"
        return text
    if decision.reason == "in memory":
        return "it is in memory, fits there, and crosses no link: nothing would get faster"
    if decision.reason == "link is fast":
        return (
            f"a link of {_rate(limits.bandwidth or 0)} is faster than the break-even of "
            f"{_rate(decision.break_even.bandwidth_bytes_s)}: sending it as it is takes less time"
        )
    text = "it lies on a disk"
    if limits.bandwidth is not None:
        text = f"it crosses a link of {_rate(limits.bandwidth)}, below the break-even"
    elif measurements.disk_bytes and measurements.disk_bytes < 0.9 * decision.raw_bytes:
        text += f" ({format_bytes(measurements.disk_bytes)} now, so it is compressed already)"
    if limits.memory is not None or limits.device_memory is not None:
        text += ", and fits the memory as it is when it is used"
    if advice.has("recording"):
        text += "; convert keeps what a dataset needs, its compressed pictures as they are"
    elif measurements.kind != "replay buffer" and advice.has("replay"):
        text += "; smallest as a replay buffer, with its method save"
    return text


def _too_large(advice: Advice, limit: str) -> str:
    measurements, decision = advice.measurements, advice.decision
    place = "device memory" if decision.limit_is_device else "memory"
    frames = decision.fitting_frames
    text = f"{format_bytes(decision.memory_bytes)} do not fit {limit} of {place}"
    if decision.limit_is_device and frames:
        steps = measurements.frames // max(1, measurements.environments)
        smaller = f"{frames} frames"
        if measurements.environments and 0 < steps <= frames:
            smaller = f"{frames // steps} environments x {steps} steps"
        text += f"; first try a batch of {smaller}"
    if decision.verdict != "C":
        fewer = f"at most {frames} frames, a spill_dir, or " if measurements.frames else ""
        return f"{text}, and compressing them in memory does not help: use {fewer}more memory"
    size, how = decision.compressed_bytes, "in a replay buffer"
    spilled = ", the rest goes to a spill_dir on disk"
    if decision.form == "batch":
        size, how = decision.batch_bytes, "as compressed batches"
        spilled = ": keep fewer of them, or a replay buffer with a spill_dir on disk"
    host = " of host memory" if decision.limit_is_device else ""
    text += f"; {how} they take {format_bytes(size or 0)}{host}"
    return text if decision.fits else text + spilled


def _costs(advice: Advice) -> str:
    decision, even = advice.decision, advice.decision.break_even
    if decision.verdict == "C":
        machine, size = advice.measurements.machine, decision.memory_bytes
        codecs = ((k.memory_bytes, advice.codec(k)) for k in advice.measurements.keys)
        speed = together((held, codec or raw(machine)) for held, codec in codecs)
        return (
            f"compressing all of it takes one core {size / speed.encode_bytes_s:.3g} s, each use "
            f"{size / speed.decode_bytes_s:.3g} s; copying it uncompressed "
            f"{size / machine.copy_bytes_s:.3g} s"
        )
    if not even.bandwidth_bytes_s:
        return "there is no bandwidth at which compressing it would save time"
    uses = "once" if even.reuse == 1 else f"{even.reuse} times"
    text = (
        f"one core compresses {_speed(decision.encode_bytes_s)} and restores "
        f"{_speed(decision.decode_bytes_s)}: used {uses}, it saves time on links below "
        f"{_rate(even.bandwidth_bytes_s)}"
    )
    if even.at_bytes_s is None:
        return text
    link = "that link" if advice.limits.bandwidth else f"this disk ({_speed(even.at_bytes_s)})"
    return text + (f"; at {link} for up to {even.uses} uses" if even.uses else f", not at {link}")


def _table(advice: Advice) -> str:
    held = advice.verdict == "C"

    def size(key: KeyMeasure) -> int:
        return key.memory_bytes if held else key.raw_bytes

    keys = [key for key in advice.measurements.keys if size(key) or not held]
    keys.sort(key=lambda key: -size(key))
    rows = []
    for key in keys[:_ROWS]:
        codec = advice.codec(key)
        cells = ("as it is", "-", _times(key.bound), "-")
        if codec is not None:
            mb_s = f"{codec.encode_bytes_s / 1e6:,.0f}, {codec.decode_bytes_s / 1e6:,.0f}"
            mb_s = "-" if codec.name == "raw" else mb_s
            cells = (codec.name, _times(codec.ratio), _times(key.bound), mb_s)
        differs = key.delta is not None and advice.decision.delta_every
        note = "repeats" if _beats_bound(key, codec) and not differs else ""
        note = note if held else key.note or note
        rows.append((key.name, format_bytes(size(key)), *cells, note))
    if rest := keys[_ROWS:]:
        ratio = _times(together((size(key), advice.codec(key)) for key in rest).ratio)
        whole = format_bytes(sum(map(size, rest)))
        rows.append((f"{len(rest)} more", whole, "", ratio, "-", "-", ""))
    return text_table(("key", "raw", "codec", "ratio", "bound", "MB/s in, out", ""), rows)


def _beats_bound(key: KeyMeasure, codec: CodecMeasure | None) -> bool:
    """Whether a codec gets more than a coder without memory could: it uses repeats."""
    return bool(codec and key.bound and codec.ratio > 1.02 * key.bound)


def _compared(measurements: Measurements) -> list[str]:
    """Sum up what general compressors make of the plain bytes."""
    keys = [key for key in measurements.keys if key.compared]
    parts = []
    for codecs in zip(*(key.compared for key in keys), strict=True):
        whole = together((key.raw_bytes, codec) for key, codec in zip(keys, codecs, strict=True))
        parts.append(f"{codecs[0].name} {_times(whole.ratio)} at {_speed(whole.encode_bytes_s)}")
    return [f"plain bytes, for comparison: {', '.join(parts)}"] if parts else []


def _settings(advice: Advice) -> list[str]:
    """Return what to type, by who stores the data."""
    lines: list[str] = []
    if advice.has("rollouts"):
        lines += _rollouts(advice)
    if advice.has("replay") or advice.has("dataset"):
        lines.append(_buffer(advice))
    if advice.has("recording"):
        lines.append(_convert(advice.measurements))
    if advice.has("checkpoint"):
        options: list[tuple[str, str, int]] = [
            ("compress", "compress_checkpoint", advice.verdict != "A")
        ]
        if advice.verdict != "A":
            options.append(("compression_level", "save_compression_level", CHECKPOINT_LEVEL))
            if every := advice.decision.delta_every:
                options.append(("delta_every", "checkpoint_delta_every", every))
        words = ", ".join(f"{name}={value}" for name, _, value in options)
        flags = " ".join(f"{name}={value}" for _, name, value in options)
        lines += [f'AsyncCheckpointSaver("checkpoints", {words})', f"penstock train {flags}"]
    return lines


def _rollouts(advice: Advice) -> list[str]:
    measurements, decision = advice.measurements, advice.decision
    compress = decision.ratio_stored >= LEAST_RATIO and decision.verdict != "A"
    level = ROLLOUT_LEVEL if compress else 0
    lines = []
    if decision.form == "batch":
        words = f"compression_level={BATCH_LEVEL}"
        room = (advice.limits.memory or math.inf) - (decision.batch_bytes or 0)
        if room < _CACHE_BYTES:  # its cache counts, too
            words += f", cache_bytes={max(_LEAST_CACHE_BYTES, int(room))}"
        lines.append(f"CompressedDataCollector(collector, {words})")
    needs_memory = decision.verdict == "C" or decision.limit_bytes is not None
    helps = decision.form != "batch" or (decision.ratio_in_memory or 1.0) >= LEAST_RATIO
    if measurements.frames and helps and (needs_memory or decision.reason == "in memory"):
        lines.append(_buffer(advice))
    if measurements.on_disk or decision.reason != "in memory":
        lines.append(f'RolloutStorage("rollouts", compression_level={level})')
    if measurements.kind in ("rollouts", "training run"):
        lines.append(f"penstock train rollout_save_interval=10 rollout_compression_level={level}")
    return lines


def _buffer(advice: Advice) -> str:
    """Return the call that makes a replay buffer for this data within the limits."""
    measurements, decision = advice.measurements, advice.decision
    held = [
        (repr(key.path[0] if len(key.path) == 1 else key.path), key.memory.name)
        for key in measurements.keys
        if key.memory is not None
    ]
    codecs = ", ".join(f'{key}: "{name}"' for key, name in held if name != "raw")
    compress = decision.verdict == "C" or (decision.verdict == "B" and advice.has("replay"))
    slots = measurements.slots
    plain = 'codecs="raw"' if slots else "img_compressed=False"
    words = [f"codecs={{{codecs}}}" if compress else plain]
    if advice.limits.memory is not None and decision.limit_bytes is not None:
        size = int(advice.limits.memory / SLACK)
        words.append(f"{'memory_bytes' if slots else 'max_bytes'}={_size(size)}")
        # A storage of TorchRL has a fixed number of slots: none may go.
        if slots or decision.spill or decision.verdict != "C":
            words.append('spill_dir="spill"')
    if slots:
        return f"CompressedStorage({', '.join([str(slots), *words])})"
    words.insert(0, f"keys=[{', '.join(key for key, _ in held)}]")
    if advice.has("dataset"):
        return f"DictReplayBuffer.from_lerobot({measurements.where!r}, {', '.join(words)})"
    return f"DictReplayBuffer(max_size={max(1, measurements.frames)}, {', '.join(words)})"


def _size(size: int) -> str:
    return f'"{size // 10**6}MB"' if size >= 10**8 else str(max(1, size))


def _convert(measurements: Measurements) -> str:
    jpeg = any("(jpeg)" in key.note and key.raw_bytes for key in measurements.keys)
    raw = any(key.note.startswith("raw pictures") for key in measurements.keys if key.raw_bytes)
    where = shlex.quote(measurements.where)
    out = shlex.quote(Path(measurements.where).name.partition(".")[0] + "_dataset")
    return f"penstock convert {where} {out}{' --codec copy' if jpeg and not raw else ''}"
