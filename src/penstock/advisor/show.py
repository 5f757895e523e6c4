"""The advice in words: a verdict, three lines of why, a table, what to type; and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.advisor.decide import LEAST_RATIO, MEANING, Decision, codec_of, to_json
from penstock.advisor.measure import COMPARED
from penstock.advisor.model import CodecMeasure, KeyMeasure, Limits, Measurements
from penstock.core.memory import format_bytes
from penstock.ui.report import text_table, wrapped

_ROWS = 10
_LONG = 400
_INNER = ("encode_bytes_s", "decode_bytes_s", "limit_bytes", "limit_is_device", "pays")
_NOTE_DELTAS = (
    "saved often, checkpoints may get smaller as differences (delta_every): give `penstock advise` "
    "a folder of two or more to find out"
)


def speed(bytes_s: float | None) -> str:
    """Say a number of bytes per second."""
    return "-" if not bytes_s else f"{format_bytes(bytes_s)}/s"


def rate(bytes_s: float) -> str:
    """Say a bandwidth in bytes and in bits."""
    bits = format_bytes(8 * bytes_s).replace("B", "b")
    return f"{format_bytes(bytes_s)}/s ({bits}/s)"


def times(ratio: float | None) -> str:
    """Say a ratio."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"


def why(measurements: Measurements, limits: Limits, decision: Decision) -> list[str]:
    """Explain a decision in three lines: what it saves, what decides, what it costs."""
    return [
        _saves(measurements, decision),
        _decides(measurements, limits, decision),
        _costs(measurements, limits, decision),
    ]


def _saves(measurements: Measurements, decision: Decision) -> str:
    text = (
        f"{format_bytes(decision.raw_bytes)} become {format_bytes(decision.stored_bytes)} stored "
        f"({times(decision.ratio_stored)})"
    )
    if decision.delta_every:
        text += f" as differences, a full checkpoint every {decision.delta_every}"
        text += f" (all full: {times(decision.ratio_full)})"
    elif decision.ratio_delta is not None:
        text += f", as differences {times(decision.ratio_delta)}"
    if decision.ratio_in_memory is not None and decision.compressed_bytes is not None:
        text += (
            f"; in memory, {format_bytes(decision.memory_bytes)} become "
            f"{format_bytes(decision.compressed_bytes)} in a replay buffer "
            f"({times(decision.ratio_in_memory)})"
        )
    if decision.batch_bytes is not None:
        size = format_bytes(decision.batch_bytes)
        text += f" or {size} as compressed batches ({times(decision.ratio_batch)})"
    bound = whole_bound(measurements)
    if bound is not None:
        text += f"; a memoryless coder reaches {times(bound)}"
        if decision.delta_every:
            text += " of full ones"
        elif decision.ratio_stored > 1.02 * bound:
            text += " (beaten: the data repeats itself)"
    return text


def _decides(measurements: Measurements, limits: Limits, decision: Decision) -> str:
    limit, held = decision.limit_bytes, format_bytes(decision.memory_bytes)
    if limit is not None:
        return _too_large(measurements, decision, format_bytes(limit), held)
    if decision.reason == "saves too little":
        coded = [k for k in measurements.keys if k.note.startswith("already compressed")]
        share = sum(k.raw_bytes for k in coded) / max(1, decision.raw_bytes)
        text = f"under {LEAST_RATIO}x compression costs time and complexity for nothing"
        if share >= 0.01:
            text += f"; {share:.0%} of it is already compressed"
        if decision.pays:
            text += f"; only {_listed(decision.pays)} would gain"
        return text
    if decision.reason == "in memory":
        return "it is in memory, fits there, and crosses no link: nothing would get faster"
    if decision.reason == "link is fast":
        return (
            f"a link of {rate(limits.bandwidth or 0)} is faster than the break-even of "
            f"{rate(decision.break_even.bandwidth)}: sending it as it is takes less time"
        )
    fits = ""
    if limits.memory is not None or limits.device_memory is not None:
        fits = ", and fits the memory as it is when it is used"
    if limits.bandwidth is not None:
        return f"it crosses a link of {rate(limits.bandwidth)}, below the break-even{fits}"
    if any(key.writer == "recording" for key in measurements.keys):
        return (
            "it lies on a disk: zstd, as bags have it, saves that much; convert keeps what a "
            "dataset needs, its compressed pictures as they are"
        )
    now = ""
    if measurements.disk_bytes and measurements.disk_bytes < 0.9 * decision.raw_bytes:
        now = f" ({format_bytes(measurements.disk_bytes)} now, so it is compressed already)"
    how = ""
    if measurements.kind != "replay buffer" and measurements.keys[0].writer == "replay":
        how = "; smallest as a replay buffer, with its method save"
    return f"it lies on a disk{now}{fits}{how}"


def _too_large(measurements: Measurements, decision: Decision, limit: str, held: str) -> str:
    place = "device memory" if decision.limit_is_device else "memory"
    text = f"{held} do not fit {limit} of {place}"
    if decision.limit_is_device and decision.fitting_frames:
        text += f"; first try {smaller(measurements, decision)}"
    if decision.verdict != "C":
        remedy = "more memory"
        if measurements.frames:
            remedy = f"at most {decision.fitting_frames} frames, a spill_dir, or more memory"
        return f"{text}, and compressing them in memory does not help: use {remedy}"
    in_batches = decision.form == "batch"
    packed = format_bytes((decision.batch_bytes if in_batches else decision.compressed_bytes) or 0)
    how = "as compressed batches" if in_batches else "in a replay buffer"
    if decision.limit_is_device:
        text += f"; else hold them in host memory, {packed} {how}; minibatches go over"
    else:
        text += f"; {how} they take {packed}"
    if decision.fits:
        return text
    if in_batches:
        return f"{text}: keep fewer of them, or a replay buffer with a spill_dir on disk"
    return f"{text}, the rest goes to a spill_dir on disk"


def smaller(measurements: Measurements, decision: Decision) -> str:
    """Say to which size a batch must shrink to fit as it is."""
    frames = decision.fitting_frames
    steps = measurements.frames // max(1, measurements.environments)
    if measurements.environments and 0 < steps <= frames:
        return f"a batch of {frames // steps} environments x {steps} steps"
    return f"a batch of {frames} frames"


def _costs(measurements: Measurements, limits: Limits, decision: Decision) -> str:
    even = decision.break_even
    if decision.verdict == "C":
        return _costs_in_memory(measurements, decision)
    if not even.bandwidth:
        return "there is no bandwidth at which compressing it would save time"
    uses = "once" if even.reuse == 1 else f"{even.reuse} times"
    text = (
        f"one core compresses {speed(decision.encode_bytes_s)} and restores "
        f"{speed(decision.decode_bytes_s)}: used {uses}, it saves time on links below "
        f"{rate(even.bandwidth)}"
    )
    if even.at is not None and even.uses is not None:
        name = "that link" if limits.bandwidth is not None else f"this disk ({speed(even.at)})"
        text += f"; at {name} for up to {even.uses} uses" if even.uses else f", not at {name}"
    return text


def _costs_in_memory(measurements: Measurements, decision: Decision) -> str:
    coded = [(key.memory_bytes, chosen(key, decision)) for key in measurements.keys]
    copy = measurements.machine.copy_bytes_s
    took = sum(size / ((codec and codec.decode_bytes_s) or copy) for size, codec in coded)
    spent = sum(size / ((codec and codec.encode_bytes_s) or copy) for size, codec in coded)
    plain = decision.memory_bytes / copy
    text = (
        f"compressing all of it takes one core {spent:.3g} s, each use {took:.3g} s; copying it "
        f"uncompressed {plain:.3g} s"
    )
    if decision.break_even.bandwidth:
        text += f"; stored or sent, it saves time below {rate(decision.break_even.bandwidth)}"
    return text


def whole_bound(measurements: Measurements) -> float | None:
    """The memoryless bound of all keys of which it is known."""
    known = [(k.raw_bytes, k.bound) for k in measurements.keys if k.bound and k.raw_bytes]
    if not known:
        return None
    return sum(size for size, _ in known) / sum(size / bound for size, bound in known)


def chosen(key: KeyMeasure, decision: Decision) -> CodecMeasure | None:
    """The codec of a key in the form that was judged."""
    return codec_of(key, decision.form, decision.delta_every)


def notes(measurements: Measurements) -> list[str]:
    """What else there is to know, a line each."""
    lines = list(measurements.notes)
    if not measurements.delta_every and any(k.writer == "checkpoint" for k in measurements.keys):
        lines.append(_NOTE_DELTAS)
    return lines


def text(
    measurements: Measurements, limits: Limits, decision: Decision, settings: list[str]
) -> str:
    """Lay out the advice for the terminal."""
    verdict = f"{decision.verdict}: {MEANING[decision.verdict]}"
    if decision.verdict != "A":
        verdict += f", {times(decision.ratio)} smaller"
    data = f"{measurements.kind} {measurements.where}".strip()
    lines = [wrapped(f"{verdict}   ({data}, {format_bytes(decision.raw_bytes)} raw)")]
    lines += [wrapped(f"  - {line}", "    ") for line in why(measurements, limits, decision)]
    lines += ["", _table(measurements, decision), ""]
    machine = measurements.machine
    speeds = (
        f"machine: {machine.cores} cores, memory copies {speed(machine.copy_bytes_s)}, disk writes "
        f"{speed(machine.write_bytes_s)}, reads {speed(machine.read_bytes_s)}"
    )
    told = [*_compared(measurements), speeds, *(f"note: {n}" for n in notes(measurements))]
    lines += [wrapped(line, "  ") for line in told]
    lines += ["", "type:"]
    lines += [f"  {_short(line)}" for line in settings]
    return "\n".join(lines)


def _table(measurements: Measurements, decision: Decision) -> str:
    held = decision.verdict == "C"
    keys = [key for key in measurements.keys if key.memory_bytes or not held]
    keys.sort(key=lambda key: -(key.memory_bytes if held else key.raw_bytes))
    rows = [_row(key, decision) for key in keys[:_ROWS]]
    rest = keys[_ROWS:]
    if rest:
        size = sum(key.raw_bytes for key in rest)
        coded = sum(
            key.raw_bytes / c.ratio if (c := chosen(key, decision)) else key.raw_bytes
            for key in rest
        )
        ratio = times(size / coded) if coded else "-"
        rows.append((f"{len(rest)} more", format_bytes(size), "", ratio, "-", "-", ""))
    columns = ("key", "raw", "codec", "ratio", "bound", "MB/s in, out", "")
    return text_table(columns, rows)


def _row(key: KeyMeasure, decision: Decision) -> tuple[str, ...]:
    codec = chosen(key, decision)
    size = key.memory_bytes if decision.verdict == "C" else key.raw_bytes
    if codec is None:
        cells: tuple[str, ...] = ("as it is", "-", times(key.bound), "-")
    else:
        plain = codec.name == "raw"
        cells = (
            codec.name,
            times(codec.ratio),
            times(key.bound),
            "-"
            if plain
            else f"{codec.encode_bytes_s / 1e6:,.0f}, {codec.decode_bytes_s / 1e6:,.0f}",
        )
    differs = key.delta is not None and decision.delta_every
    note = "repeats" if beats_bound(key, codec) and not differs else ""
    note = note if decision.verdict == "C" else key.note or note
    return (key.name, format_bytes(size), *cells, note)


def _mega(bytes_s: float) -> str:
    return f"{bytes_s / 1e6:,.0f}"


def beats_bound(key: KeyMeasure, codec: CodecMeasure | None) -> bool:
    """Whether a codec finds more than a coder without memory could: repeats."""
    return bool(codec and key.bound and codec.ratio > 1.02 * key.bound)


def _compared(measurements: Measurements) -> list[str]:
    """Sum up what general compressors make of the plain bytes."""
    keys = [key for key in measurements.keys if key.compared]
    parts = []
    for number, (name, _) in enumerate(COMPARED):
        found = [(key.raw_bytes, key.compared[number]) for key in keys]
        size = sum(n for n, _ in found)
        if size:
            ratio = size / sum(n / codec.ratio for n, codec in found)
            took = sum(n / codec.encode_bytes_s for n, codec in found)
            parts.append(f"{name} {times(ratio)} at {speed(size / took)}")
    return [f"plain bytes, for comparison: {', '.join(parts)}"] if parts else []


def _short(line: str) -> str:
    return line if len(line) <= _LONG else f"{line[:_LONG]}…  (all of it: --json)"


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def as_json(
    measurements: Measurements, limits: Limits, decision: Decision, settings: list[str]
) -> dict[str, Any]:
    """Return the advice as one JSON document."""
    found = measurements.to_json()
    keys = []
    for key, record in zip(measurements.keys, found["keys"], strict=True):
        codec = chosen(key, decision)
        keys.append(
            {
                **record,
                "codec": codec.name if codec else None,
                "ratio": codec.ratio if codec else 1.0,
                "pays": key.name in decision.pays,
                "beats_bound": beats_bound(key, codec),
            }
        )
    data = ("kind", "where", "on_disk", "frames", "environments", "overhead_bytes", "disk_bytes")
    return {
        **{name: value for name, value in asdict(decision).items() if name not in _INNER},
        "meaning": MEANING[decision.verdict],
        "bound": whole_bound(measurements),
        "break_even": to_json(decision.break_even),
        "why": why(measurements, limits, decision),
        "notes": notes(measurements),
        "settings": settings,
        "keys": keys,
        "machine": found["machine"],
        "limits": limits.to_json(),
        "data": {name: found[name] for name in data},
    }
