"""Check the rows of a dataset and the statistics that should describe them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.dataset import layout, metadata
from penstock.dataset.columns import Columns, Table
from penstock.dataset.doctor_training import TrainingCheck
from penstock.dataset.doctor_videos import TOLERANCE_S, Brightness, Decode, sample_indices
from penstock.dataset.findings import Report
from penstock.dataset.layout import Feature
from penstock.dataset.metadata import EpisodeRecord, Info, Stats
from penstock.dataset.moments import Moments, Shares
from penstock.dataset.reader import decode_picture
from penstock.errors import DataError
from penstock.media.images import ImageDecoder

_COPY = "copy the file again, or convert the recording again"
_CONVERT = "convert the recording again"
_RECOMPUTE = "compute the statistics again"


class RowCheck:
    """Goes through the data files in order, and compares what it counts with the statistics.

    Args:
        root: The dataset's folder.
        info: What info.json says.
        tasks: The task texts by number.
        decode: Whether every picture in the rows is decoded, or a few of each episode.
        report: Where findings go.
    """

    def __init__(
        self, root: Path, info: Info, tasks: Sequence[str], decode: Decode, report: Report
    ) -> None:
        self._root, self._info, self._tasks = root, info, tasks
        self._decode, self._report = decode, report
        self._numeric = {
            name: feature
            for name, feature in info.features.items()
            if not feature.is_picture and layout.has_stats(feature)
        }
        self._decoder = ImageDecoder()
        self.global_stats: Stats = {}
        self.totals = {name: Moments.of(feature) for name, feature in self._numeric.items()}
        self.shares: dict[str, Shares] = {}
        self.pictures: dict[str, dict[int, Brightness]] = {}
        self.training = TrainingCheck(info.features, report)

    def expect(self, stats: Stats) -> None:
        """Take the statistics of the whole dataset, to count the shares of the data by."""
        self.global_stats = stats
        for name, feature in self._numeric.items():
            points = {q: stats[name][q] for q in layout.QUANTILES if q in stats.get(name, {})}
            shares = Shares.of(feature, points)
            if shares is not None:
                self.shares[name] = shares

    def check_file(
        self,
        name: str,
        records: Sequence[EpisodeRecord],
        done: Callable[[EpisodeRecord, dict[str, Moments]], None],
    ) -> None:
        """Check one data file that should hold exactly these episodes.

        Args:
            name: The file's path in the dataset.
            records: Its episodes, in order.
            done: Called with each episode that was read to its end, and its moments.
        """
        self._report.count("data files")
        try:
            with Table(self._root, name) as table:
                features = self._check_schema(name, table.schema)
                expected = sum(record.length for record in records)
                if table.rows != expected:
                    self._report.error(
                        name,
                        f"it has {table.rows} rows, its episodes need {expected}",
                        _COPY,
                    )
                start = 0
                for record in records:
                    if start + record.length > table.rows:
                        return
                    done(record, self._check_episode(name, table, features, record, start))
                    start += record.length
        except DataError as error:
            self._report.error(name, str(error), _COPY)

    def _check_schema(self, name: str, schema: pa.Schema) -> dict[str, Feature]:
        """Compare the columns with the features; return those that can be read."""
        wanted = layout.arrow_schema(self._info.features, self._info.version)
        found: dict[str, Feature] = {}
        for column in wanted:
            place = schema.get_field_index(column.name)
            if place < 0:
                self._report.error(name, f"the column {column.name!r} is missing", _CONVERT)
                continue
            kind = schema.field(place).type
            if not same_kind(kind, column.type):
                self._report.error(
                    name, f"{column.name!r} is stored as {kind}, not {column.type}", _CONVERT
                )
                continue
            found[column.name] = self._info.features[column.name]
        for extra in sorted(set(schema.names) - set(wanted.names)):
            self._report.warning(
                name, f"the column {extra!r} is not in info.json", "nothing reads it", "columns"
            )
        return found

    def _check_episode(
        self,
        name: str,
        table: Table,
        features: Mapping[str, Feature],
        record: EpisodeRecord,
        start: int,
    ) -> dict[str, Moments]:
        moments = {n: Moments.of(f) for n, f in self._numeric.items() if n in features}
        tasks: set[int] = set()
        sampled = set(sample_indices(record.length).tolist()) if record.length else set()
        position = 0
        self.training.start()
        for batch in table.batches(features, start, start + record.length):
            count = len(next(iter(batch.values())))
            self._check_counters(name, batch, record, position, count)
            self.training.rows(batch)
            if "task_index" in batch:
                tasks.update(np.unique(batch["task_index"]).tolist())
            for column, one in moments.items():
                one.add(batch[column])
                self.totals[column].add(batch[column])
                if column in self.shares:
                    self.shares[column].add(batch[column])
            for column, feature in features.items():
                if feature.dtype == "image":
                    self._check_pictures(name, column, batch[column], record, position, sampled)
            position += count
            self._report.count("rows", count)
        for column, one in moments.items():
            if one.unusable:
                self._report.warning(
                    name,
                    f"{column!r} has {one.unusable} values that are NaN or infinite in episode "
                    f"{record.index}",
                    "leave those frames out of training",
                    f"NaN in {column}",
                )
        self._check_tasks(name, record, tasks)
        return moments

    def _check_counters(
        self, name: str, batch: Columns, record: EpisodeRecord, position: int, count: int
    ) -> None:
        frames = np.arange(position, position + count)
        expected = {
            "frame_index": frames,
            "index": record.from_index + frames,
            "episode_index": np.full(count, record.index),
        }
        for column, values in expected.items():
            if column in batch and not np.array_equal(batch[column], values):
                k = int(np.argmax(batch[column] != values))
                self._report.error(
                    name,
                    f"{column} is {batch[column][k]} in frame {frames[k]} of episode "
                    f"{record.index}, not {values[k]}",
                    _CONVERT,
                    column,
                )
        if "timestamp" in batch:
            times = frames / self._info.fps
            room = TOLERANCE_S + np.spacing(times.astype(np.float32)).astype(np.float64)
            bad = ~(np.abs(batch["timestamp"].astype(np.float64) - times) <= room)
            if bad.any():
                k = int(np.argmax(bad))
                self._report.error(
                    name,
                    f"timestamp is {batch['timestamp'][k]} in frame {frames[k]} of episode "
                    f"{record.index}, not {times[k]:.6f}",
                    _CONVERT,
                    "timestamp",
                )

    def _check_tasks(self, name: str, record: EpisodeRecord, numbers: set[int]) -> None:
        texts = {self._tasks[n] for n in numbers if 0 <= n < len(self._tasks)}
        bad = [n for n in numbers if not 0 <= n < len(self._tasks)]
        if bad:
            self._report.error(
                name,
                f"task_index {bad[0]} in episode {record.index}: there are {len(self._tasks)}",
                _CONVERT,
                "task_index",
            )
        elif numbers and texts != set(record.tasks):
            self._report.error(
                name,
                f"episode {record.index} has the tasks {sorted(texts)} in its rows, "
                f"{sorted(record.tasks)} in {record.source}",
                _CONVERT,
                "tasks",
            )

    def _check_pictures(
        self,
        name: str,
        column: str,
        pictures: np.ndarray[Any, Any],
        record: EpisodeRecord,
        position: int,
        sampled: set[int],
    ) -> None:
        feature = self._info.features[column]
        _, height, width = feature.picture_size
        few = {0, record.length // 2, record.length - 1}
        for k, data in enumerate(pictures, position):
            if self._decode == "sample" and k not in few:
                continue
            try:
                picture = decode_picture(self._decoder, data)
            except DataError as error:
                self._report.error(
                    name,
                    f"{column!r} in frame {k} of episode {record.index}: {error}",
                    _COPY,
                    f"pictures of {column}",
                )
                continue
            self._report.count("pictures decoded")
            if picture.shape[:2] != (height, width):
                self._report.error(
                    name,
                    f"{column!r} in frame {k} of episode {record.index} is "
                    f"{picture.shape[1]}x{picture.shape[0]}, not {width}x{height}",
                    _CONVERT,
                    f"picture size of {column}",
                )
            elif self._decode == "all" and k in sampled:
                by_episode = self.pictures.setdefault(column, {})
                by_episode.setdefault(record.index, Brightness()).add(picture)


def same_kind(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a stored type means what the wanted one does, list and text flavours aside."""
    types = pa.types
    if isinstance(found, pa.ExtensionType):
        found = found.storage_type
    if types.is_struct(wanted):
        return bool(types.is_struct(found) and found.get_field_index("bytes") >= 0)
    if types.is_fixed_size_list(wanted) and types.is_fixed_size_list(found):
        return bool(found.list_size == wanted.list_size and found.value_type == wanted.value_type)
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    if any(test(wanted) for test in lists):
        return any(test(found) for test in lists) and same_kind(found.value_type, wanted.value_type)
    if types.is_string(wanted):
        return bool(types.is_string(found) or types.is_large_string(found))
    return bool(found == wanted)


class StatsInOrder:
    """Hands out the statistics of episodes as they are asked for, reading the files once."""

    def __init__(self, root: Path, info: Info, report: Report) -> None:
        self._source: Iterator[tuple[int, Stats]] = metadata.read_episode_stats(root, info)
        self._waiting: dict[int, Stats] = {}
        self._report = report
        self._where = (
            layout.EPISODES_FOLDER if info.version == "v3.0" else layout.EPISODES_STATS_JSONL
        )

    def get(self, episode: int) -> Stats | None:
        """Return an episode's statistics; None, and a finding, if there are none."""
        while episode not in self._waiting:
            try:
                number, stats = next(self._source)
            except StopIteration:
                self._report.error(
                    self._where,
                    f"episode {episode} has no statistics",
                    _RECOMPUTE,
                    "missing statistics",
                )
                return None
            except DataError as error:
                self._report.error(self._where, str(error), _COPY, "unreadable statistics")
                self._source = iter(())
                continue
            if number in self._waiting:
                self._report.error(self._where, f"episode {number} has statistics twice", _CONVERT)
            self._waiting[number] = stats
        return self._waiting.pop(episode)
