"""Put one staged episode into a dataset: its files first, then the line of the journal."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.core.files import NewFile, sync_folder, write_all
from penstock.errors import CorruptFile
from penstock.lerobot import layout
from penstock.lerobot.adopt import fitting_stats, fitting_table
from penstock.lerobot.episode import AnyStats, StagedEpisode, file_digest, write_stats
from penstock.lerobot.journal import Record, episodes_of
from penstock.lerobot.layout import PRIVATE_FOLDER, QUANTILES
from penstock.lerobot.parquet import write_table
from penstock.lerobot.rows import write_data
from penstock.lerobot.state import (
    Spec,
    State,
    make_folders,
    publish_if_changed,
    publish_tasks,
    stats_bytes,
)
from penstock.lerobot.stats import Stats


class Placement:
    """The files of one episode on their way into a dataset; `undo` takes them out again."""

    def __init__(self, root: Path, spec: Spec, state: State, schema: pa.Schema | None) -> None:
        self._root = root
        self._spec = spec
        self._before = state
        self._schema = schema
        self._placed: list[Path] = []

    def place(self, staged: StagedEpisode, source: dict[str, Any]) -> tuple[Record, State]:
        """Write everything but the journal and info.json; return its line and the state after."""
        spec, before = self._spec, self._before
        episode, first = before.episodes, before.frames
        tasks = before.tasks if staged.task in before.tasks else [*before.tasks, staged.task]
        next_file = dict(before.next_file)
        record: Record = {
            "kind": "episode",
            "episode": episode,
            "frames": staged.frames,
            "first_index": first,
            "task": staged.task,
            "source": source,
            "infos": {} if before.infos else staged.infos,
            "files": {},
            "stats": None,
            "packed": spec.version == "v2.1",
        }
        record["videos"] = {
            key: [*self._place_video(staged, key, next_file, record), 0] for key in spec.video_keys
        }
        record["data"] = self._next("data", next_file)
        path = layout.data_path(spec.version, *record["data"])
        self._prepare(path)
        auto = write_data(
            self._root / path,
            staged,
            spec.features,
            spec.version,
            episode_index=episode,
            first_index=first,
            task_index=tasks.index(staged.task),
        )
        record["files"][path] = file_digest(self._root / path)
        complete = layout.all_features(spec.features)
        known: dict[str, AnyStats] = {**staged.stats(), **auto}
        own = {name: known[name] for name in complete if name in known}
        described = {name: stats.to_json(complete[name]) for name, stats in own.items()}
        after = replace(before, tasks=tasks, infos=before.infos or staged.infos)
        if spec.version == "v3.0":
            record["episodes"] = self._next("episodes", next_file)
            table = self._episode_table(record, own, described)
            after = self._place_meta(record, table, own, after)
        else:
            record["sizes"] = self._append_lines(
                episode, [staged.frames], [described], staged.task, tasks
            )
        record["next_file"] = next_file
        return record, after.after(record)

    def undo(self) -> None:
        """Remove what was placed; whatever cannot be removed now, the next opening removes."""
        for path in reversed(self._placed):
            with suppress(OSError):
                path.unlink()
        for name, size in self._before.sizes.items():
            with suppress(OSError):
                os.truncate(self._root / name, size)

    def _next(self, kind: str, next_file: dict[str, int]) -> list[int]:
        """Return (chunk, file) of the next file of a kind, and count it."""
        per_chunk = self._spec.limits.files_per_chunk
        if self._spec.version == "v2.1":
            return [self._before.episodes // per_chunk, self._before.episodes]
        number = next_file.get(kind, 0)
        next_file[kind] = number + 1
        return list(layout.place(number, per_chunk))

    def _prepare(self, path: str) -> Path:
        """Make the folder of a file, and note that the file will be there."""
        target = self._root / path
        make_folders(target.parent)
        self._placed.append(target)
        return target

    def _place_video(
        self, staged: StagedEpisode, key: str, next_file: dict[str, int], record: Record
    ) -> list[int]:
        where = self._next(f"videos/{key}", next_file)
        path = layout.video_path(self._spec.version, key, *where)
        target = self._prepare(path)
        link_file(staged.folder / f"{key}.mp4", target)
        record["files"][path] = staged.files[f"{key}.mp4"]
        if target.stat().st_size != staged.files[f"{key}.mp4"][0]:
            raise CorruptFile(f"{staged.folder / key}.mp4 is not as long as it was staged")
        return where

    def _episode_table(
        self, record: Record, own: Mapping[str, AnyStats], described: Mapping[str, Stats]
    ) -> pa.Table:
        """Return the record of the episode as a table of one row."""
        if self._schema is None:
            row = episode_row(self._spec, record, described)
            return pa.Table.from_pylist([row], layout.episodes_schema(self._spec.features))
        # The records of others, in their shapes and types.
        complete = layout.all_features(self._spec.features)
        row = episode_row(self._spec, record, fitting_stats(own, complete, self._schema))
        return fitting_table(row, self._schema)

    def _place_meta(
        self, record: Record, table: pa.Table, own: Mapping[str, AnyStats], after: State
    ) -> State:
        """Write the records of episodes, the statistics and the tasks of v3.0."""
        path = layout.episodes_path(*record["episodes"])
        target = self._prepare(path)
        write_table(target, table)
        record["files"][path] = file_digest(target)
        merged = dict(self._before.stats)
        for name, stats in own.items():
            if name in merged:
                merged[name] = copy.deepcopy(merged[name])
                merged[name].merge(stats)  # type: ignore[arg-type]
            else:
                merged[name] = stats
        order = layout.all_features(self._spec.features)
        after = replace(after, stats={name: merged[name] for name in order if name in merged})
        record["stats"] = f"stats-{record['episode'] + episodes_of(record):06d}.pack"
        write_stats(self._prepare(f"{PRIVATE_FOLDER}/{record['stats']}"), after.stats)
        publish_if_changed(self._root / layout.STATS_PATH, stats_bytes(self._spec, after))
        if after.tasks != self._before.tasks:
            publish_tasks(self._root, after.tasks)
        return after

    def _append_lines(
        self,
        first: int,
        lengths: Sequence[int],
        described: Iterable[Mapping[str, Stats]],
        task: str,
        tasks: list[str],
    ) -> dict[str, int]:
        """Add the lines of v2.1's files for episodes of one task; return their new sizes."""
        sizes = dict(self._before.sizes)
        numbers = range(first, first + len(lengths))
        lines: dict[str, Iterable[dict[str, Any]]] = {
            layout.TASKS_JSONL: [
                {"task_index": number, "task": tasks[number]}
                for number in range(len(self._before.tasks), len(tasks))
            ],
            # Statistics first: an episode that is listed has some, wherever we are killed.
            layout.EPISODES_STATS_JSONL: (
                {"episode_index": number, "stats": _without_quantiles(stats)}
                for number, stats in zip(numbers, described, strict=True)
            ),
            layout.EPISODES_JSONL: [
                {"episode_index": number, "tasks": [task], "length": length}
                for number, length in zip(numbers, lengths, strict=True)
            ],
        }
        make_folders(self._root / "meta")
        for path, values in lines.items():
            text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
            sizes[path] = append_bytes(self._root / path, sizes.get(path, 0), text.encode())
        return sizes


def _without_quantiles(stats: Mapping[str, Stats]) -> dict[str, Stats]:
    return {
        name: {stat: value for stat, value in values.items() if stat not in QUANTILES}
        for name, values in stats.items()
    }


def episode_row(spec: Spec, record: Record, stats: Mapping[str, Stats]) -> dict[str, Any]:
    """Return the record of an episode as v3.0 stores it."""
    row: dict[str, Any] = {
        "episode_index": record["episode"],
        "tasks": [record["task"]],
        "length": record["frames"],
        "dataset_from_index": record["first_index"],
        "dataset_to_index": record["first_index"] + record["frames"],
    }
    for name, values in stats.items():
        row |= {f"stats/{name}/{stat}": value for stat, value in values.items()}
    return row | places(record, spec.fps)


def places(record: Record, fps: int) -> dict[str, Any]:
    """Return the columns of an episode's record that say where its files are."""
    row: dict[str, Any] = {}
    row["data/chunk_index"], row["data/file_index"] = record["data"]
    for key, (chunk, file, first) in record["videos"].items():
        row |= {
            f"videos/{key}/chunk_index": chunk,
            f"videos/{key}/file_index": file,
            # Divided once, never summed: durations that are added up drift away from the frames.
            f"videos/{key}/from_timestamp": first / fps,
            f"videos/{key}/to_timestamp": (first + record["frames"]) / fps,
        }
    row["meta/episodes/chunk_index"], row["meta/episodes/file_index"] = record["episodes"]
    return row


def link_file(source: Path, target: Path) -> None:
    """Give a durable file a second name, or copy it where that is not possible."""
    with suppress(FileNotFoundError):
        target.unlink()  # what is there was never committed
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise CorruptFile(f"{source} is missing") from None
    except OSError:
        with open(source, "rb") as old, NewFile(target) as new:
            while chunk := old.read(1 << 20):
                write_all(new.file, chunk)
    else:
        sync_folder(target.parent)


def append_bytes(path: Path, size: int, data: bytes) -> int:
    """Write behind the first `size` bytes of a file, durably; return its new size."""
    created = not path.exists()
    with open(os.open(path, os.O_CREAT | os.O_RDWR, 0o666), "r+b", buffering=0) as file:
        file.truncate(size)
        file.seek(size)
        write_all(file, data)
        os.fsync(file.fileno())
    if created:
        sync_folder(path.parent)
    return size + len(data)
