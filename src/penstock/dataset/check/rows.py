"""Check the rows of a dataset, and count what the statistics should say of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.dataset import layout, metadata
from penstock.dataset.check.findings import Report
from penstock.dataset.check.stats import RECOMPUTE
from penstock.dataset.check.training import TrainingCheck
from penstock.dataset.check.videos import TOLERANCE_S, Decode, counted_lines
from penstock.dataset.layout import Feature
from penstock.dataset.metadata import EpisodeRecord, Info, Stats
from penstock.dataset.stats import Moments, PictureStats, VectorStats, sample_indices
from penstock.dataset.tables import Columns, Table, is_list
from penstock.errors import DataError
from penstock.media.images import ImageDecoder


class RowCheck:
    """Goes through the data files in order, and counts what the statistics are compared with."""

    def __init__(
        self, root: Path, info: Info, tasks: Sequence[str], decode: Decode, report: Report
    ) -> None:
        self._root, self._info, self._tasks = root, info, tasks
        self._decode, self._report = decode, report
        self._numeric = {n: f for n, f in info.features.items() if not f.is_picture and f.has_stats}
        self._decoder = ImageDecoder()
        self.totals: dict[str, VectorStats] = {}
        self.pictures: dict[str, dict[int, PictureStats]] = {}
        self.training = TrainingCheck(info.features, report)

    def check_file(
        self, name: str, records: Sequence[EpisodeRecord]
    ) -> Iterator[tuple[EpisodeRecord, dict[str, Moments]]]:
        """Check one data file that should hold exactly these episodes, in this order.

        Yields:
            Each episode that was read to its end, and its moments.
        """
        self._report.count("data files")
        try:
            with Table(self._root, name) as table:
                features = self._check_schema(name, table.schema)
                expected = sum(record.length for record in records)
                if table.rows != expected:
                    what = f"it has {table.rows} rows, its episodes need {expected}"
                    self._report.error(name, what)
                start = 0
                for record in records:
                    if start + record.length > table.rows:
                        return
                    yield record, self._check_episode(name, table, features, record, start)
                    start += record.length
        except DataError as error:
            self._report.error(name, str(error))

    def _check_schema(self, name: str, schema: pa.Schema) -> dict[str, Feature]:
        """Compare the columns with the features; return those that can be read."""
        wanted = layout.arrow_schema(self._info.features, self._info.format.version)
        found: dict[str, Feature] = {}
        for column in wanted:
            place = schema.get_field_index(column.name)
            kind = schema.field(place).type if place >= 0 else None
            if kind is None:
                self._report.error(name, f"the column {column.name!r} is missing")
            elif column.name == "timestamp" and pa.types.is_float64(kind):
                found[column.name] = self._info.features[column.name]  # lerobot has had both
            elif not same_kind(kind, column.type):
                self._report.error(name, f"{column.name!r} is stored as {kind}, not {column.type}")
            else:
                found[column.name] = self._info.features[column.name]
        for extra in sorted(set(schema.names) - set(wanted.names)):
            what = f"the column {extra!r} is not in info.json"
            self._report.warning(name, what, "nothing reads it", "columns")
        return found

    def _check_episode(
        self,
        name: str,
        table: Table,
        features: Mapping[str, Feature],
        record: EpisodeRecord,
        start: int,
    ) -> dict[str, Moments]:
        moments = {n: Moments(f.size) for n, f in self._numeric.items() if n in features}
        tasks: set[int] = set()
        sampled = set(sample_indices(record.length, 0.75).tolist())
        position = 0
        for batch in table.batches(features, start, start + record.length):
            count = len(next(iter(batch.values())))
            self._check_counters(name, batch, record, position, count)
            self.training.rows(batch, begins=position == 0)
            if "task_index" in batch:
                tasks.update(np.unique(batch["task_index"]).tolist())
            for column, one in moments.items():
                one.add(batch[column])
                self.totals.setdefault(column, VectorStats(one.dim)).add(batch[column])
            for column, feature in features.items():
                if feature.dtype == "image":
                    self._check_pictures(name, column, batch[column], record, position, sampled)
            position += count
            self._report.count("rows", count)
        for column, one in moments.items():
            if one.non_finite:
                self._report.warning(
                    name,
                    f"{column!r} has {one.non_finite} values that are NaN or infinite in episode "
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
        times = frames / self._info.fps
        expected = {
            "frame_index": frames,
            "index": record.from_index + frames,
            "episode_index": np.full(count, record.index),
            "timestamp": times,
        }
        for column, values in expected.items():
            if column not in batch:
                continue
            bad = batch[column] != values
            if column == "timestamp":
                room = TOLERANCE_S + np.spacing(times.astype(np.float32)).astype(np.float64)
                bad = ~(np.abs(batch[column].astype(np.float64) - times) <= room)
            if bad.any():
                k = int(np.argmax(bad))
                self._report.error(
                    name,
                    f"{column} is {batch[column][k]} in frame {frames[k]} of episode "
                    f"{record.index}, not {values[k]:.10g}",
                    column,
                )

    def _check_tasks(self, name: str, record: EpisodeRecord, numbers: set[int]) -> None:
        texts = {self._tasks[n] for n in numbers if 0 <= n < len(self._tasks)}
        bad = [n for n in numbers if not 0 <= n < len(self._tasks)]
        if bad:
            what = f"task_index {bad[0]} in episode {record.index}: there are {len(self._tasks)}"
            self._report.error(name, what, "task_index")
        elif numbers and texts != set(record.tasks):
            self._report.error(
                name,
                f"episode {record.index} has the tasks {sorted(texts)} in its rows, "
                f"{sorted(record.tasks)} in {record.source}",
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
        _, height, width = self._info.features[column].picture_size
        few = {0, record.length // 2, record.length - 1}
        for k, data in enumerate(pictures, position):
            if self._decode == "sample" and k not in few:
                continue
            here = f"{column!r} in frame {k} of episode {record.index}"
            try:
                picture = self._decoder.stored(data)
            except DataError as error:
                self._report.error(name, f"{here}: {error}", f"pictures of {column}")
                continue
            self._report.count("pictures decoded")
            if picture.shape[:2] != (height, width):
                what = f"{here} is {picture.shape[1]}x{picture.shape[0]}, not {width}x{height}"
                self._report.error(name, what, f"picture size of {column}")
            elif self._decode == "all" and k in sampled and picture.ndim == 3:
                by_episode = self.pictures.setdefault(column, {})
                by_episode.setdefault(record.index, PictureStats()).add(counted_lines(picture))


def same_kind(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a stored type means what the wanted one does, list and text flavours aside."""
    types = pa.types
    if isinstance(found, pa.ExtensionType):
        found = found.storage_type
    if types.is_struct(wanted):
        return bool(types.is_struct(found) and found.get_field_index("bytes") >= 0)
    if types.is_fixed_size_list(wanted) and types.is_fixed_size_list(found):
        return bool(found.list_size == wanted.list_size and found.value_type == wanted.value_type)
    if is_list(wanted):
        return is_list(found) and same_kind(found.value_type, wanted.value_type)
    if types.is_string(wanted):
        return bool(types.is_string(found) or types.is_large_string(found))
    return bool(found == wanted)


class StatsInOrder:
    """Hands out the statistics of episodes as they are asked for, reading the files once."""

    def __init__(self, root: Path, info: Info, report: Report) -> None:
        self._source: Iterator[tuple[int, Stats]] = metadata.read_episode_stats(root, info)
        self._waiting: dict[int, Stats] = {}
        self._report = report
        self.where = info.format.episode_stats

    def get(self, episode: int) -> Stats | None:
        """Return an episode's statistics; None, and a finding, if there are none."""
        while episode not in self._waiting:
            try:
                number, stats = next(self._source)
            except StopIteration:
                what = f"episode {episode} has no statistics"
                self._report.error(self.where, what, "missing statistics", RECOMPUTE)
                return None
            except DataError as error:
                self._report.error(self.where, str(error), "unreadable statistics")
                self._source = iter(())
                continue
            if number in self._waiting:
                self._report.error(self.where, f"episode {number} has statistics twice")
            self._waiting[number] = stats
        return self._waiting.pop(episode)
