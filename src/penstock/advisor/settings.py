"""The settings to type: lines of Python and commands, ready to be copied."""

from __future__ import annotations

import shlex
from pathlib import Path

from penstock.advisor.decide import LEAST_RATIO, SLACK, Decision
from penstock.advisor.measure import BATCH_LEVEL
from penstock.advisor.model import KeyMeasure, Limits, Measurements
from penstock.advisor.stored import CHECKPOINT_LEVEL, ROLLOUT_LEVEL

_CACHE_BYTES = 64 << 20  # what a CompressedDataCollector takes by default
_LEAST_CACHE_BYTES = 1 << 20


def settings_for(measurements: Measurements, limits: Limits, decision: Decision) -> list[str]:
    """Return what to type, by who stores the data; commands begin with "penstock "."""
    writers = {key.writer for key in measurements.keys}
    compress = decision.verdict != "A"
    lines: list[str] = []
    if "rollouts" in writers:
        lines += _rollouts(measurements, limits, decision)
    if "replay" in writers:
        lines.append(_buffer(measurements, limits, decision))
    if "dataset" in writers:
        lines.append(_buffer(measurements, limits, decision, measurements.where))
    if "recording" in writers:
        lines.append(_convert(measurements))
    if "checkpoint" in writers:
        lines += _checkpoints(decision.delta_every, compress)
    return lines


def _checkpoints(delta_every: int, compress: bool) -> list[str]:
    words = f'AsyncCheckpointSaver("checkpoints", compress={compress}'
    flags = f"penstock train compress_checkpoint={compress}"
    if compress:
        words += f", compression_level={CHECKPOINT_LEVEL}"
        flags += f" save_compression_level={CHECKPOINT_LEVEL}"
        if delta_every:
            words += f", delta_every={delta_every}"
            flags += f" checkpoint_delta_every={delta_every}"
    return [f"{words})", flags]


def _rollouts(measurements: Measurements, limits: Limits, decision: Decision) -> list[str]:
    stored = decision.ratio_stored >= LEAST_RATIO and decision.verdict != "A"
    level = ROLLOUT_LEVEL if stored else 0
    lines = []
    if decision.form == "batch":
        lines.append(_collector(limits, decision))
    needs_memory = decision.verdict == "C" or decision.limit_bytes is not None
    helps = decision.form != "batch" or (decision.ratio_in_memory or 1.0) >= LEAST_RATIO
    if measurements.frames and helps and (needs_memory or decision.reason == "in memory"):
        lines.append(_buffer(measurements, limits, decision))
    if measurements.on_disk or decision.reason != "in memory":
        lines.append(f'RolloutStorage("rollouts", compression_level={level})')
    if measurements.kind in ("rollouts", "training run"):
        lines.append(f"penstock train rollout_save_interval=10 rollout_compression_level={level}")
    return lines


def _collector(limits: Limits, decision: Decision) -> str:
    words = f"compression_level={BATCH_LEVEL}"
    if limits.memory is not None:
        room = limits.memory - (decision.batch_bytes or 0)
        if room < _CACHE_BYTES:  # its cache counts, too
            words += f", cache_bytes={max(_LEAST_CACHE_BYTES, room)}"
    return f"CompressedDataCollector(collector, {words})"


def _buffer(
    measurements: Measurements, limits: Limits, decision: Decision, dataset: str = ""
) -> str:
    """Return the call that makes a replay buffer for this data within the limits."""
    keys = [key for key in measurements.keys if key.memory is not None]
    names = ", ".join(map(_quoted, keys))
    words = [f"keys=[{names}]"]
    frames = measurements.frames
    replaces = any(key.writer == "replay" for key in keys) and decision.verdict == "B"
    if decision.verdict == "C" or replaces:
        codecs = [
            f'{_quoted(key)}: "{key.memory.name}"'
            for key in keys
            if key.memory and key.memory.name != "raw"
        ]
        words.append(f"codecs={{{', '.join(codecs)}}}")
    else:
        words.append("img_compressed=False")
    does_not_fit = decision.limit_bytes is not None
    if limits.memory is not None and does_not_fit:
        if decision.spill or decision.verdict != "C":
            words += [f"max_bytes={_size(limits.memory / SLACK)}", 'spill_dir="spill"']
        else:
            words.append(f"max_bytes={_size(limits.memory / SLACK)}")
    if measurements.slots:
        return _storage(measurements.slots, words[1:])
    if dataset:
        return f"DictReplayBuffer.from_lerobot({dataset!r}, {', '.join(words)})"
    return f"DictReplayBuffer(max_size={max(1, frames)}, {', '.join(words)})"


def _storage(slots: int, words: list[str]) -> str:
    """Return the call that makes a storage for TorchRL, with the settings of a replay buffer."""
    names = {"img_compressed=False": 'codecs="raw"', "max_bytes": "memory_bytes"}
    for old, new in names.items():
        words = [word.replace(old, new) for word in words]
    if any(word.startswith("memory_bytes") for word in words) and not any(
        word.startswith("spill_dir") for word in words
    ):
        words.append('spill_dir="spill"')  # a storage has a fixed number of slots: none may go
    return f"CompressedStorage({', '.join([str(slots), *words])})"


def _quoted(key: KeyMeasure) -> str:
    return repr(key.path[0]) if len(key.path) == 1 else repr(key.path)


def _size(size: float) -> str:
    return f'"{int(size) // 10**6}MB"' if size >= 10**8 else str(max(1, int(size)))


def _convert(measurements: Measurements) -> str:
    jpeg = sum(key.raw_bytes for key in measurements.keys if "(jpeg)" in key.note)
    raw = sum(key.raw_bytes for key in measurements.keys if key.note.startswith("raw pictures"))
    where = shlex.quote(measurements.where)
    out = shlex.quote(Path(measurements.where).name.partition(".")[0] + "_dataset")
    return f"penstock convert {where} {out}{' --codec copy' if jpeg and not raw else ''}"
