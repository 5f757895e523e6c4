"""Commit many short episodes as one: one data file, one line of the journal, all or nothing.

A rollout is a thousand episodes of a few frames. One by one, each would cost a dozen files and as
many waits for the disk; together they cost what one episode costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.lerobot import layout
from penstock.lerobot.batch_stats import EpisodeStats, episode_stats, to_column, to_json
from penstock.lerobot.commit import Placement, places
from penstock.lerobot.episode import AnyStats, file_digest, to_arrow
from penstock.lerobot.journal import Record
from penstock.lerobot.layout import AUTO_FEATURES, Feature
from penstock.lerobot.parquet import new_parquet
from penstock.lerobot.state import State
from penstock.lerobot.stats import VectorStats

# Whoever reads one episode decodes its row group: small ones, of whole episodes.
_GROUP_ROWS = 512
_STATS_ROWS = 4096


@dataclass(frozen=True)
class EpisodeBatch:
    """Episodes of numbers, one behind the other.

    Attributes:
        columns: Per feature an array of (frames, *shape), of the feature's type.
        lengths: Frames of each episode, at least 1.
        task: Of all of them.
    """

    columns: Mapping[str, NDArray[Any]]
    lengths: NDArray[np.int64]
    task: str

    @property
    def frames(self) -> int:
        """Frames of all episodes."""
        return int(self.lengths.sum())

    def check(self, features: Mapping[str, Feature]) -> None:
        """Refuse what does not fit the features of a dataset.

        Raises:
            UsageError: It does not; the first feature that differs is named.
        """
        if not len(self.lengths) or int(self.lengths.min()) < 1:
            raise UsageError("a batch needs at least one episode, each of at least one frame")
        for name in [*features, *self.columns]:
            feature, column = features.get(name), self.columns.get(name)
            if feature is None or column is None:
                where = "batch" if feature is None else "dataset"
                raise UsageError(f"only the {where} has the feature {name!r}")
            if feature.is_picture or feature.dtype == "string":
                raise UsageError(f"{name!r} is {feature.dtype}: commit its episodes one by one")
            wanted = (np.dtype(feature.dtype), (self.frames, *feature.shape))
            if (column.dtype, column.shape) != wanted:
                raise UsageError(
                    f"{name!r}: rows of {column.dtype}{list(column.shape)} were given, not "
                    f"{feature.dtype}{list(wanted[1])}"
                )


class BatchPlacement(Placement):
    """The files of many episodes on their way into a dataset; `undo` takes them out again."""

    def place_many(self, batch: EpisodeBatch, source: dict[str, Any]) -> tuple[Record, State]:
        """Write everything but the journal and info.json; return its line and the state after."""
        spec, before = self._spec, self._before
        if self._schema is not None:
            raise UsageError(f"{self._root} was begun by others: commit episodes one by one")
        tasks = before.tasks if batch.task in before.tasks else [*before.tasks, batch.task]
        next_file = dict(before.next_file)
        record: Record = {
            "kind": "episode",
            "episode": before.episodes,
            "lengths": batch.lengths.tolist(),
            "frames": batch.frames,
            "first_index": before.frames,
            "task": batch.task,
            "source": source,
            "infos": {},
            "files": {},
            "stats": None,
            "packed": spec.version == "v2.1",
            "videos": {},
            "data": self._next("data", next_file),
        }
        complete = layout.all_features(spec.features)
        columns = {**batch.columns, **self._automatic(batch, tasks.index(batch.task))}
        self._place_rows(record, columns, batch.lengths)
        per_episode = {
            name: episode_stats(columns[name], batch.lengths, feature)
            for name, feature in complete.items()
        }
        after = replace(before, tasks=tasks)
        if spec.version == "v3.0":
            record["episodes"] = self._next("episodes", next_file)
            table = self._episodes_table(record, per_episode, complete)
            after = self._place_meta(record, table, _summed(columns, complete), after)
        else:
            shapes = {name: feature.shape for name, feature in complete.items()}
            described = (to_json(per_episode, k, shapes) for k in range(len(batch.lengths)))
            record["sizes"] = self._append_lines(
                before.episodes, record["lengths"], described, batch.task, tasks
            )
        record["next_file"] = next_file
        return record, after.after(record)

    def _automatic(self, batch: EpisodeBatch, task: int) -> dict[str, NDArray[Any]]:
        """Return the five columns that every dataset has."""
        lengths, frames = batch.lengths, batch.frames
        row = np.arange(frames, dtype=np.int64)
        frame = row - np.repeat(np.cumsum(lengths) - lengths, lengths)
        episode = np.arange(len(lengths), dtype=np.int64) + self._before.episodes
        found: dict[str, NDArray[Any]] = {
            "timestamp": (frame / self._spec.fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.repeat(episode, lengths),
            "index": row + self._before.frames,
            "task_index": np.full(frames, task, np.int64),
        }
        return {name: found[name][:, None] for name in AUTO_FEATURES}

    def _place_rows(
        self, record: Record, columns: Mapping[str, NDArray[Any]], lengths: NDArray[np.int64]
    ) -> None:
        """Write the data file; in v2.1 every episode has its own."""
        version, complete = self._spec.version, layout.all_features(self._spec.features)
        schema = layout.arrow_schema(self._spec.features, version)
        ends = np.cumsum(lengths)
        if version == "v3.0":
            paths = [layout.data_path(version, *record["data"])]
            spans = [_groups(lengths)]
        else:
            per_chunk, first = self._spec.limits.files_per_chunk, record["episode"]
            numbers = range(first, first + len(lengths))
            paths = [layout.data_path(version, k // per_chunk, k) for k in numbers]
            spans = [[pair] for pair in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]
        for path, parts in zip(paths, spans, strict=True):
            target = self._prepare(path)
            with new_parquet(target, schema) as writer:
                for start, stop in parts:
                    arrays = [
                        to_arrow(complete[name], columns[name][start:stop]) for name in schema.names
                    ]
                    writer.write_table(pa.table(arrays, schema), row_group_size=stop - start)
            record["files"][path] = file_digest(target)

    def _episodes_table(
        self,
        record: Record,
        per_episode: Mapping[str, EpisodeStats],
        complete: Mapping[str, Feature],
    ) -> pa.Table:
        """Return the records of the episodes as v3.0 stores them."""
        schema = layout.episodes_schema(self._spec.features)
        lengths = np.array(record["lengths"], np.int64)
        count = len(lengths)
        ends = np.cumsum(lengths) + record["first_index"]
        found: dict[str, Any] = {
            "episode_index": np.arange(count) + record["episode"],
            "tasks": [[record["task"]]] * count,
            "length": lengths,
            "dataset_from_index": ends - lengths,
            "dataset_to_index": ends,
        }
        found |= {name: [value] * count for name, value in places(record, self._spec.fps).items()}
        for name, stats in per_episode.items():
            for stat, values in stats.items():
                column = f"stats/{name}/{stat}"
                shape = (1,) if stat == "count" else complete[name].shape
                found[column] = to_column(values, shape, schema.field(column).type)
        arrays = [
            value if isinstance(value, pa.Array) else pa.array(value, schema.field(name).type)
            for name, value in ((name, found[name]) for name in schema.names)
        ]
        return pa.table(arrays, schema)


def _groups(lengths: Sequence[int] | NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the rows of each row group: whole episodes, about `_GROUP_ROWS` rows together."""
    found: list[tuple[int, int]] = []
    start = stop = 0
    for length in map(int, lengths):
        if stop > start and stop - start + length > _GROUP_ROWS:
            found.append((start, stop))
            start = stop
        stop += length
    return [*found, (start, stop)]


def _summed(
    columns: Mapping[str, NDArray[Any]], features: Mapping[str, Feature]
) -> dict[str, AnyStats]:
    """Return the statistics of all rows together, in the portions of a single episode's."""
    found: dict[str, AnyStats] = {}
    for name, feature in features.items():
        stats = VectorStats(math.prod(feature.shape))
        for start in range(0, len(columns[name]), _STATS_ROWS):
            stats.add(columns[name][start : start + _STATS_ROWS])
        found[name] = stats
    return found
