"""What is in a LeRobot dataset (`info`), read from its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.core.memory import format_bytes
from penstock.dataset.layout import INFO_PATH
from penstock.dataset.reader import Dataset
from penstock.ui.report import aligned, text_table

Facts = dict[str, Any]


def is_dataset(path: Path) -> bool:
    """Tell whether a folder is a LeRobot dataset."""
    return (path / INFO_PATH).is_file()


def describe(path: Path) -> Facts:
    """Say what is in a dataset."""
    dataset = Dataset(path)
    files = [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    lengths = [episode.length for episode in dataset.episodes]
    return {
        "path": str(path),
        "kind": f"LeRobot dataset {dataset.info['codebase_version']}",
        "size_bytes": sum(file.stat().st_size for file in files),
        "files": len(files),
        "robot_type": dataset.info.get("robot_type"),
        "fps": dataset.fps,
        "episodes": len(lengths),
        "frames": sum(lengths),
        "longest_episode": max(lengths, default=0),
        "shortest_episode": min(lengths, default=0),
        "tasks": sorted({task for episode in dataset.episodes for task in episode.tasks}),
        "features": {
            name: {
                "dtype": feature.dtype,
                "shape": list(feature.shape),
                "codec": (feature.info or {}).get("video.codec"),
            }
            for name, feature in dataset.features.items()
        },
    }


def describe_text(facts: Facts) -> str:
    """Lay out what `describe` found for the terminal."""
    seconds = facts["frames"] / facts["fps"]
    head = [
        ("path", facts["path"]),
        ("kind", facts["kind"]),
        ("size on disk", f"{format_bytes(facts['size_bytes'])} in {facts['files']} files"),
        ("robot", facts["robot_type"] or "-"),
        ("frames", f"{facts['frames']} at {facts['fps']} fps ({seconds:.1f} s)"),
        (
            "episodes",
            f"{facts['episodes']} of {facts['shortest_episode']} to "
            f"{facts['longest_episode']} frames",
        ),
        ("tasks", ", ".join(facts["tasks"][:5]) or "-"),
    ]
    rows = [
        (name, entry["dtype"], "x".join(map(str, entry["shape"])), entry["codec"] or "-")
        for name, entry in facts["features"].items()
    ]
    table = text_table(("feature", "dtype", "shape", "codec"), rows)
    return f"{aligned(head)}\n\n{table}"
