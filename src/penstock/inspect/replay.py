"""What is in a saved replay buffer or a folder of rollouts (`info`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from penstock.core.files import storage_error
from penstock.core.memory import format_bytes
from penstock.core.pack import DTYPES, PackReader
from penstock.errors import CorruptFile, DataError
from penstock.replay.segments import MANIFEST, LogReader
from penstock.ui.report import aligned, text_table

Facts = dict[str, Any]

_NONSENSE = (LookupError, ValueError, TypeError, AttributeError)


def is_replay(path: Path) -> bool:
    """Tell whether a folder holds a saved replay buffer."""
    return (path / MANIFEST).is_file()


def is_rollouts(path: Path) -> bool:
    """Tell whether a folder holds rollouts."""
    return bool(rollout_files(path))


def rollout_files(path: Path) -> list[Path]:
    """List the rollouts in a folder."""
    return sorted(path.glob("rollout_*.pack"))


def describe_replay(path: Path) -> Facts:
    """Say what is in a saved replay buffer, from its manifest.

    Raises:
        DataError: The manifest is damaged.
    """
    with LogReader(path) as log:
        try:
            keys = [_describe_key(record) for record in _key_records(log.state)]
            episodes, frames = _counts(log)
        except _NONSENSE as error:
            raise CorruptFile(f"{path / MANIFEST}: its state makes no sense ({error!r})") from error
        files = [path / MANIFEST, *(path / name for name in log.segments)]
        sizes = [file.stat().st_size for file in files if file.is_file()]
        missing = [file.name for file in files if not file.is_file()]
        return {
            "path": str(path),
            "kind": f"penstock replay buffer ({log.holder})",
            "size_bytes": sum(sizes),
            "raw_bytes": frames * sum(key["frame_bytes"] for key in keys),
            "segments": len(log.segments),
            "missing": missing,
            "episodes_held": episodes,
            "frames": frames,
            "keys": keys,
        }


def _key_records(state: Facts) -> list[Facts]:
    return list(state.get("keys") or state.get("columns") or [])


def _describe_key(record: Facts) -> Facts:
    codec = record["codec"]
    shape = [int(n) for n in record["shape"]]
    frame_bytes = math.prod(shape) * DTYPES[record["dtype"]].words.itemsize
    return {
        "key": ".".join(map(str, record["path"])),
        "dtype": str(record["dtype"]),
        "shape": shape,
        "codec": str(codec["id"]) if codec else "plain",
        "frame_bytes": frame_bytes,
        "mode": record.get("mode", "frame"),
    }


def _counts(log: LogReader) -> tuple[int | None, int]:
    """Return the number of episodes, where the buffer knows of them, and of frames."""
    if "len" in log.state:
        return None, int(log.state["len"])
    if "lengths" not in log.names:
        return 0, 0
    lengths = log.item("lengths")
    return len(lengths), int(lengths.sum())


def replay_text(facts: Facts) -> str:
    """Lay out what `describe_replay` found for the terminal."""
    episodes = facts["episodes_held"]
    lines = [
        ("path", facts["path"]),
        ("kind", facts["kind"]),
        (
            "size on disk",
            f"{format_bytes(facts['size_bytes'])} of {format_bytes(facts['raw_bytes'])} "
            f"in {facts['segments']} segments",
        ),
        ("frames", str(facts["frames"]) + (f" in {episodes} episodes" if episodes else "")),
    ]
    if facts["missing"]:
        lines.append(("MISSING", ", ".join(facts["missing"])))
    rows = [
        (key["key"], key["dtype"], _shape(key["shape"]), key["codec"], key["mode"])
        for key in facts["keys"]
    ]
    table = text_table(("key", "dtype", "shape", "codec", "mode"), rows)
    return f"{aligned(lines)}\n\n{table}" if rows else aligned(lines)


def describe_rollouts(path: Path) -> Facts:
    """Say what rollouts are in a folder, from their headers."""
    rollouts = [_describe_rollout(file) for file in rollout_files(path)]
    return {
        "path": str(path),
        "kind": "folder of rollouts",
        "size_bytes": sum(facts["size_bytes"] for facts in rollouts),
        "raw_bytes": sum(facts.get("raw_bytes", 0) for facts in rollouts),
        "rollouts": rollouts,
    }


def _describe_rollout(file: Path) -> Facts:
    try:
        with PackReader(file) as pack:
            meta, entries = pack.index.meta, pack.index.entries
            raw_bytes = sum(entry.nbytes for entry in entries.values())
            return {
                "name": file.name,
                "iteration": meta.get("iteration"),
                "batch": meta.get("batch"),
                "tensors": len(entries),
                "size_bytes": pack.size_bytes,
                "raw_bytes": raw_bytes,
                "ratio": raw_bytes / pack.size_bytes,
            }
    except DataError as error:
        return {"name": file.name, "size_bytes": file.stat().st_size, "damaged": str(error)}
    except OSError as error:
        raise storage_error("read", file, error) from error


def rollouts_text(facts: Facts) -> str:
    """Lay out what `describe_rollouts` found for the terminal."""
    rollouts = facts["rollouts"]
    lines = [
        ("path", facts["path"]),
        ("kind", facts["kind"]),
        (
            "size on disk",
            f"{format_bytes(facts['size_bytes'])} of {format_bytes(facts['raw_bytes'])} "
            f"in {len(rollouts)} files",
        ),
    ]
    rows = [
        (
            item["name"],
            "DAMAGED, run doctor" if "damaged" in item else str(item["iteration"]),
            _shape(item.get("batch") or []),
            str(item.get("tensors", "-")),
            format_bytes(item["size_bytes"]),
            f"{item['ratio']:.2f}" if "ratio" in item else "-",
        )
        for item in rollouts
    ]
    table = text_table(("name", "iteration", "batch", "tensors", "size", "ratio"), rows)
    return f"{aligned(lines)}\n\n{table}"


def _shape(shape: list[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
