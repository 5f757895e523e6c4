"""What a dataset under way consists of: its journal, its totals, and the files that follow.

info.json, stats.json and tasks follow from the journal: they can be written anew at any time, and
are, whenever they differ from what they must be.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.core.files import publish_bytes, sync_folder
from penstock.errors import DataError
from penstock.lerobot import layout
from penstock.lerobot.episode import AnyStats
from penstock.lerobot.journal import Base, Record, episodes_of
from penstock.lerobot.layout import Feature, FileLimits, Version
from penstock.lerobot.parquet import read_table, write_table


@dataclass(frozen=True)
class Spec:
    """What does not change while a dataset grows."""

    features: dict[str, Feature]
    fps: int
    robot_type: str | None
    version: Version
    limits: FileLimits

    @property
    def video_keys(self) -> list[str]:
        """The features that are videos."""
        return [name for name, feature in self.features.items() if feature.dtype == "video"]


@dataclass(frozen=True)
class State:
    """What has been committed. A commit makes a new one; the old stays valid until it succeeded."""

    base: Base
    episodes: int = 0
    frames: int = 0
    tasks: list[str] = field(default_factory=list)
    next_file: dict[str, int] = field(default_factory=dict)
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    stats_file: str | None = None
    stats: dict[str, AnyStats] = field(default_factory=dict)

    @classmethod
    def begin(cls, base: Base, stats: dict[str, AnyStats]) -> State:
        """Return the state before the first commit."""
        return cls(
            base,
            base.episodes,
            base.frames,
            list(base.tasks),
            dict(base.next_file),
            {},
            dict(base.sizes),
            base.stats,
            stats,
        )

    def after(self, record: Record) -> State:
        """Return the state after a line of the journal; the statistics stay."""
        if record.get("kind") != "episode":
            return self
        tasks = self.tasks
        if record["task"] not in tasks:
            tasks = [*tasks, record["task"]]
        return replace(
            self,
            episodes=record["episode"] + episodes_of(record),
            frames=record["first_index"] + record["frames"],
            tasks=tasks,
            next_file=record["next_file"],
            infos=self.infos or record["infos"],
            sizes=record.get("sizes", {}),
            stats_file=record["stats"],
        )


def info_bytes(spec: Spec, state: State) -> bytes:
    """Return info.json as it must be."""
    features = {
        name: replace(feature, info=state.infos[name])
        if state.infos.get(name) and feature.info is None
        else feature
        for name, feature in spec.features.items()
    }
    info = layout.info_json(
        version=spec.version,
        features=features,
        fps=spec.fps,
        robot_type=spec.robot_type,
        total_episodes=state.episodes,
        total_frames=state.frames,
        total_tasks=len(state.tasks),
        limits=spec.limits,
    )
    if state.base.info is not None:
        # A dataset of other making keeps whatever else its info says.
        totals = [key for key in info if key.startswith("total_") or key == "splits"]
        info = {**state.base.info, **{key: info[key] for key in totals}}
    return _json(info)


def stats_bytes(spec: Spec, state: State) -> bytes:
    """Return stats.json as it must be."""
    complete = layout.all_features(spec.features)
    return _json({name: stats.to_json(complete[name]) for name, stats in state.stats.items()})


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=4, ensure_ascii=False, allow_nan=False).encode()


def publish_if_changed(path: Path, data: bytes) -> None:
    """Publish a small file, unless it is so already."""
    with suppress(OSError):
        if path.stat().st_size == len(data) and path.read_bytes() == data:
            return
    make_folders(path.parent)
    publish_bytes(path, data)


def publish_tasks(root: Path, tasks: list[str]) -> None:
    """Publish tasks.parquet, unless it is so already."""
    path = root / layout.TASKS_PATH
    with suppress(DataError):
        if layout.read_tasks(read_table(path)) == tasks:
            return
    make_folders(path.parent)
    write_table(path, layout.tasks_table(tasks))


def make_folders(folder: Path) -> None:
    """Make a folder and those above it, durably."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
    sync_folder(folder.parent)
