"""Build the LeRobot files of a dataset from its units, beside the old files, and exchange them.

The bytes depend on the units and their order only, not on who made them, nor on how many builds
there were before. What does not change is linked, not written again: a file that reached LeRobot's
size limit is never touched again. Memory does not grow with the dataset.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.core.files import NewFile, make_folder, publish_bytes, write_all
from penstock.dataset import layout, metadata
from penstock.dataset.adopt import fitting_table
from penstock.dataset.layout import AUTO_FEATURES, QUANTILES
from penstock.dataset.plan import (
    BUILT,
    PLAN,
    STATS_FOLDER,
    TOTAL_STATS,
    UNITS,
    Base,
    Built,
    Plan,
)
from penstock.dataset.stats import (
    AnyStats,
    counter_stats,
    counter_totals,
    read_stats,
    write_stats,
)
from penstock.dataset.swap import replacing, settle, sibling
from penstock.dataset.tables import (
    RowStream,
    Table,
    give_back_unused,
    inside,
    new_parquet,
    read_rows,
    reading,
    to_column,
    write_table,
)
from penstock.dataset.unit import (
    EPISODES,
    ROWS,
    UNIT_STATS,
    Digest,
    Episode,
    Unit,
    UnitRecord,
    file_digest,
    json_digest,
    pictures_name,
    remove_unit,
    stats_schema,
)
from penstock.errors import CorruptFile, UsageError
from penstock.media.remux import Clip, join
from penstock.ui.progress import Progress

MB = 1 << 20
# Whoever reads one episode decodes its row group: small ones, of whole episodes; long episodes
# have some of their own, which are bounded because they are held in memory.
_GROUP_ROWS = 512
_MOST_ROWS = 4096
_MOST_BYTES = 16 << 20  # the writer takes several times that
_PICTURE_ROWS = 128
_RECORDS_AT_ONCE = 256
_NUMBERED = re.compile(r"(?:file-|episode_)\d+\.(?:parquet|mp4)")
_STATS_BYTES = 4 << 20
Fetch = Callable[[Iterable[Path]], None]


@dataclass(frozen=True, slots=True)
class Source:
    """One episode on its way: where its rows, pictures and statistics lie now.

    Attributes:
        images: Its PNGs, where they are not among the rows yet.
        index: Its number in the dataset as it is; None where it is to be written anew.
        unit: The new unit that it is from.
        rows_stay: Whether its rows are in the dataset as they are to be, but for their numbers.
    """

    episode: Episode
    rows: Path
    first_row: int
    clips: dict[str, Clip] = field(default_factory=dict)
    images: dict[str, Path] = field(default_factory=dict)
    index: int | None = None
    unit: Unit | None = None
    rows_stay: bool = True


@dataclass(slots=True)
class Place:
    """Where an episode comes to lie: the (chunk, file) of its rows and videos."""

    data: tuple[int, int] = (0, 0)
    videos: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # and its first frame


def build(
    root: Path,
    plan: Plan,
    built: Built,
    units: Sequence[Unit],
    base_stats: dict[str, AnyStats] | None = None,
    fetch: Fetch | None = None,
) -> Built:
    """Put new units into a dataset; a signal stops it before anything is exchanged.

    Args:
        root: The dataset's folder.
        plan: What the dataset is to be.
        built: What it holds already and is to stay.
        units: The new units.
        base_stats: The statistics of its base (v3.0), if there was no build before.
        fetch: Brings the content of files of the dataset, before they are read.

    Returns:
        What it holds now.

    Raises:
        StorageError: The disk refuses; the dataset is as before.
        CorruptFile: A unit is damaged; the dataset is as before.
    """
    for unit in units:
        unit.check()
    with replacing(root, root) as new:
        making = _UnitBuild(root, new, plan, built, units, base_stats or {})
        making.fetch = fetch or making.fetch
        result = making.run()
    settle(root)
    shutil.rmtree(sibling(root, "undo"), ignore_errors=True)  # of an edit before this
    for unit in units:
        remove_unit(root / UNITS / unit.record.key)
    return result


class Build(ABC):
    """One build, from the dataset `root` into the folder `new`.

    The episodes of `base` stay in front, as they are; the others lie where `sources` say, and are
    from the units of `records`. What is known of `root` are the records of its episodes (`before`)
    and checksums of its files.
    """

    def __init__(
        self,
        root: Path,
        new: Path,
        plan: Plan,
        base: Base,
        before: Sequence[metadata.EpisodeRecord],
        records: Sequence[UnitRecord],
        sources: Sequence[Source],
        digests: Mapping[str, Digest],
        infos: dict[str, dict[str, Any]],
    ) -> None:
        self._root, self._new, self._plan, self._spec = root, new, plan, plan.spec
        self._base, self._before, self._digests, self._infos = base, before, digests, infos
        self._records, self._sources = list(records), list(sources)
        self._format = plan.spec.format
        self._lengths = np.array([source.episode.frames for source in sources], np.int64)
        firsts = base.frames + np.cumsum(self._lengths) - self._lengths
        self._firsts: NDArray[np.int64] = firsts
        self._tasks = list(base.tasks)
        self._task_numbers = {task: number for number, task in enumerate(self._tasks)}
        for source in self._sources:
            if source.episode.task not in self._task_numbers:
                self._task_numbers[source.episode.task] = len(self._tasks)
                self._tasks.append(source.episode.task)
        for task in self._tasks:
            layout.check_task(task)
        numbers = [self._task_numbers[source.episode.task] for source in self._sources]
        self._task_of = np.array(numbers, np.int64)
        self._places = [Place() for _ in self._sources]
        self._in_file = Counter(record.data_file for record in self._before)
        for record in self._before:
            self._in_file.update(span.file for span in record.videos.values())
        self._files: dict[str, Digest] = {}
        self.fetch: Fetch = lambda paths: None

    def run(self) -> Built:
        """Write everything; info.json is the last."""
        self._link_rest()
        steps = len(self._sources) * (2 + len(self._spec.video_keys)) + len(self._records)
        with Progress(steps, "build", "steps", last_line=False) as progress:
            self._progress = progress
            self._write_data()
            for camera in self._spec.video_keys:
                self._write_videos(camera)
            self._stats = RowStream(self._episode_stats())
            if self._format.shares_files:
                self._write_records()
                write_table(self._target(self._format.tasks), layout.tasks_table(self._tasks))
                self._note(self._format.tasks)
            else:
                self._write_lines()
            folded = self._write_stats()
            progress.update(steps)
        result = Built(self._base, self._records, self._infos, self._tasks, folded, self._files)
        info = _json(self._info())
        self._files[layout.INFO_PATH] = json_digest(info)
        publish_bytes(self._target(BUILT), result.to_bytes())
        publish_bytes(self._target(PLAN), replace(self._plan, replaces=False).to_bytes())
        publish_bytes(self._target(layout.INFO_PATH), info)
        return result

    def _link_rest(self) -> None:
        """Give every file that stays a second name: those of the base, and what users put there.

        Left out is what the build writes, and what looks as if: lerobot reads whatever lies there.
        """
        kept: set[str] = set()
        for record in self._before[: self._base.episodes]:
            kept |= {record.data_file, *(span.file for span in record.videos.values())}
            kept |= {record.source} if self._format.shares_files else set()
        ours = ("data/", "videos/", f"{layout.V30.episodes}/")
        formats = layout.FORMATS.values() if self._plan.replaces else [self._format]
        written = {layout.INFO_PATH, BUILT}.union(*(each.meta_files for each in formats))
        aside = {layout.PRIVATE_FOLDER, STATS_FOLDER}
        for folder, folders, names in os.walk(self._root):
            here = Path(folder).relative_to(self._root)
            folders[:] = [name for name in folders if (here / name).as_posix() not in aside]
            links = [name for name in folders if (self._root / here / name).is_symlink()]
            folders[:] = [name for name in folders if name not in links]
            for link in links:
                if (here / link).parts[0] in ("data", "videos", "meta"):
                    raise UsageError(
                        f"{self._root / here / link} is a link: put the folder itself there"
                    )
            for name in [*names, *links]:
                path = (here / name).as_posix()
                own = path.startswith(ours) and _NUMBERED.fullmatch(name) is not None
                if path in kept or not (own or path in written):
                    place(self._root / path, self._target(path))

    def _groups(
        self, limit: int, size: Callable[[int], int], fits: Callable[[int, int], bool]
    ) -> Iterator[range]:
        """Yield runs of episodes that go into one file, by lerobot's rule: below the limit."""
        start, total = 0, 0
        for number in range(len(self._sources)):
            more = size(number)
            full = not self._format.shares_files or total + more >= limit or not fits(start, number)
            if number > start and full:
                yield range(start, number)
                start, total = number, 0
            total += more
        if self._sources:
            yield range(start, len(self._sources))

    def _next(self, kind: str, count: int, first: int) -> tuple[int, int]:
        """Return (chunk, file) of the next file of a kind; v2.1 numbers them by episode."""
        per_chunk = self._spec.limits.files_per_chunk
        if not self._format.shares_files:
            episode = self._base.episodes + first
            return episode // per_chunk, episode
        return divmod(self._base.next_file.get(kind, 0) + count, per_chunk)

    def _write_data(self) -> None:
        limit = self._spec.limits.data_mb * MB
        sizes = [source.episode.size_bytes for source in self._sources]
        for count, group in enumerate(self._groups(limit, sizes.__getitem__, lambda a, b: True)):
            where = self._next("data", count, group[0])
            path = self._format.data_path(*where)
            for number in group:
                self._places[number].data = where
            sources = [self._sources[number] for number in group]
            # The rows hold the numbers of episode and frame: only where these stay, the file does.
            stays = all(map(self._rows_stay, sources, group))
            if stays and self._is_whole_file(sources, [source.rows for source in sources]):
                self._keep(sources[0].rows, path)
            else:
                self._join_rows(group, self._target(path))
                self._note(path)
            self._progress.advance(len(group))

    def _rows_stay(self, source: Source, number: int) -> bool:
        """Whether the rows of an episode are in the dataset just as they are to be."""
        if not source.rows_stay or source.index != self._base.episodes + number:
            return False
        return self._before[source.index].from_index == int(self._firsts[number])

    def _write_videos(self, camera: str) -> None:
        limit = self._spec.limits.video_mb * MB
        shown = [source.episode.videos[camera] for source in self._sources]
        groups = self._groups(limit, lambda n: shown[n][0], lambda a, b: shown[a][1] == shown[b][1])
        for count, group in enumerate(groups):
            where = self._next(f"videos/{camera}", count, group[0])
            path = self._format.video_path(camera, *where)
            sources = [self._sources[number] for number in group]
            clips = [source.clips[camera] for source in sources]
            firsts = list(accumulate((clip.frames for clip in clips[:-1]), initial=0))
            unit = sources[0].unit
            if len(group) == 1 and unit is not None:
                place(clips[0].path, self._target(path))
                self._files[path] = unit.files[clips[0].path.name]
            elif self._is_whole_file(sources, [clip.path for clip in clips]):
                self._keep(clips[0].path, path)
                firsts = [clip.first for clip in clips]
            else:
                self.fetch(clip.path for clip in clips)
                firsts = join(clips, self._target(path), self._spec.fps)
                self._note(path)
            for number, first in zip(group, firsts, strict=True):
                self._places[number].videos[camera] = (*where, first)
            self._progress.advance(len(group))

    def _is_whole_file(self, sources: Sequence[Source], paths: Sequence[Path]) -> bool:
        """Whether these are all the episodes of one file of the dataset, and in its order."""
        if any(source.index is None for source in sources) or len(set(paths)) > 1:
            return False
        numbers = [source.index for source in sources]
        name = paths[0].relative_to(self._root).as_posix()
        in_order = numbers == sorted(numbers)  # type: ignore[type-var]
        return in_order and self._in_file[name] == len(sources)

    def _keep(self, path: Path, target: str) -> None:
        place(path, self._target(target))
        known = self._digests.get(path.relative_to(self._root).as_posix())
        if known is None:
            self.fetch([path])
        self._files[target] = known or file_digest(path)

    def _join_rows(self, group: range, target: Path) -> None:
        """Write a data file: the rows of some episodes, with the five automatic columns."""
        schema = layout.arrow_schema(self._spec.features, self._spec.version)
        lengths = self._lengths[group.start : group.stop]
        columns = [n for n in schema.names if n not in AUTO_FEATURES]
        pictures = [n for n, f in self._spec.features.items() if f.dtype == "image"]
        sources = self._sources[group.start : group.stop]
        self.fetch({source.rows for source in sources if columns})
        stream = RowStream(_rows(sources, [self._column_of(n) for n in columns], pictures))
        row_bytes = max(1, sum(s.episode.size_bytes for s in sources) // max(1, int(lengths.sum())))
        most = _PICTURE_ROWS if pictures else max(1, min(_MOST_ROWS, _MOST_BYTES // row_bytes))
        kept = 0  # rows whose memory the writer may keep: more with every row group
        with new_parquet(target, schema) as writer:
            for start, stop in row_groups(lengths, most):
                counted = self._counters(group, start, stop)
                own = stream.take(stop - start) if columns else pa.table({})
                counted |= {name: own.column(self._column_of(name)) for name in columns}
                writer.write_table(pa.table(counted, schema), row_group_size=stop - start)
                kept += stop - start
                if kept >= _MOST_ROWS:
                    give_back_unused()
                    kept = 0

    def _column_of(self, name: str) -> str:
        """Return what a feature is called where its rows lie."""
        return name

    def _counters(self, group: range, start: int, stop: int) -> dict[str, pa.Array]:
        """Return the automatic columns of rows start to stop of a data file."""
        lengths = self._lengths[group.start : group.stop]
        ends = np.cumsum(lengths)
        row = np.arange(start, stop)
        at = np.searchsorted(ends, row, side="right")
        frame = row - (ends - lengths)[at]
        found = {
            "timestamp": (frame / self._spec.fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": at + group.start + self._base.episodes,
            "index": row + self._firsts[group.start],
            "task_index": self._task_of[group.start : group.stop][at],
        }
        return {name: pa.array(values) for name, values in found.items()}

    def _write_records(self) -> None:
        """Write meta/episodes (v3.0), some records at a time."""
        schema = layout.episodes_schema(self._spec.features)
        if self._base.episodes:
            with Table(self._root, self._before[0].source) as table:
                schema = table.schema.remove_metadata()
        row_bytes = 200 + 100 * len(schema.names)
        per_file = max(1, self._spec.limits.data_mb * MB // row_bytes)
        for count, start in enumerate(range(0, len(self._sources), per_file)):
            where = self._next("episodes", count, start)
            path = layout.episodes_path(*where)
            stop = min(start + per_file, len(self._sources))
            with new_parquet(self._target(path), schema) as writer:
                for records in self._record_tables(range(start, stop), where):
                    if self._base.episodes:
                        features = self._spec.features
                        records = fitting_table(records, schema, features, self._all_rows)
                    writer.write_table(records, row_group_size=len(records))
            self._note(path)

    def _all_rows(self, episode: int, name: str) -> NDArray[Any]:
        """Read one feature of one of our episodes, for the odd shapes of others' statistics."""
        source = self._sources[episode - self._base.episodes]
        start, stop = source.first_row, source.first_row + source.episode.frames
        with Table(source.rows.parent, source.rows.name) as table:
            pieces = list(table.batches({name: self._spec.features[name]}, start, stop))
        return np.concatenate([piece[name] for piece in pieces])

    def _record_tables(self, numbers: range, where: tuple[int, int]) -> Iterator[pa.Table]:
        """Yield the records of episodes as v3.0 stores them, in a file of those numbers."""
        for first in numbers[::_RECORDS_AT_ONCE]:
            block = slice(first, min(first + _RECORDS_AT_ONCE, numbers.stop))
            yield self._record_table(block, where)
            self._progress.advance(block.stop - first)

    def _record_table(self, block: slice, where: tuple[int, int]) -> pa.Table:
        schema = layout.episodes_schema(self._spec.features)
        lengths, firsts, places = self._lengths[block], self._firsts[block], self._places[block]
        count, numbers = len(lengths), np.arange(block.start, block.stop) + self._base.episodes
        stats = self._stats.take(count)
        found = layout.record_columns(
            lengths,
            firsts,
            [[source.episode.task] for source in self._sources[block]],
            [each.data for each in places],
            {key: [each.videos[key] for each in places] for key in self._spec.video_keys},
            self._spec.fps,
        )
        found["episode_index"] = numbers
        found["meta/episodes/chunk_index"] = [where[0]] * count
        found["meta/episodes/file_index"] = [where[1]] * count
        tasks = self._task_of[block]
        counted = counter_stats(lengths, firsts, numbers, tasks, self._spec.fps)
        for name, values in counted.items():
            for stat, array in values.items():
                column = f"stats/{name}/{stat}"
                found[column] = to_column(array, (1,), schema.field(column).type)
        return pa.table(
            {**dict(zip(stats.column_names, stats.columns, strict=True)), **found}, schema
        )

    @abstractmethod
    def _episode_stats(self) -> Iterator[pa.Table]:
        """Yield the statistics of the episodes in the new order."""

    @abstractmethod
    def _total_stats(self) -> tuple[dict[str, AnyStats], int]:
        """Return the statistics of all frames (v3.0), and of how many units they are stored."""

    def _write_lines(self) -> None:
        """Write the lists of tasks, episodes and statistics of v2.1."""
        base = self._base
        tasks = [{"task_index": n, "task": text} for n, text in enumerate(self._tasks)]
        self._write_jsonl(self._format.tasks, iter(tasks))
        listed = (
            {
                "episode_index": base.episodes + number,
                "tasks": [source.episode.task],
                "length": source.episode.frames,
            }
            for number, source in enumerate(self._sources)
        )
        self._write_jsonl(self._format.episodes, listed, base.episodes)
        self._write_jsonl(self._format.episode_stats, self._stats_lines(), base.episodes)

    def _write_jsonl(self, name: str, values: Iterator[dict[str, Any]], base: int = 0) -> None:
        """Write a list: the lines of the base as they are, and then ours."""
        before = islice(metadata.read_lines(self._root, name), base) if base else ()
        lines = chain(before, values)
        with NewFile(self._target(name)) as new:
            while some := list(islice(lines, _RECORDS_AT_ONCE)):
                text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in some)
                write_all(new.file, text.encode(errors="backslashreplace"))
        self._note(name)

    def _stats_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the statistics of every episode as v2.1 has them: without quantiles."""
        for records in self._record_tables(range(len(self._sources)), (0, 0)):
            names = [n for n in records.column_names if n.rpartition("/")[2] not in QUANTILES]
            for record in records.select(names).to_pylist():
                stats = metadata.nested_stats(record)
                yield {"episode_index": record["episode_index"], "stats": stats}

    def _write_stats(self) -> int:
        """Write stats.json (v3.0); return how many units are summed up in one file."""
        name = self._format.stats
        if name is None:
            return 0
        make_folder(self._new / STATS_FOLDER)
        total, folded = self._total_stats()
        complete = layout.all_features(self._spec.features)
        old = self._before[: self._base.episodes]
        lengths = np.array([*(record.length for record in old), *self._lengths], np.int64)
        tasks = [self._task_numbers.get(next(iter(record.tasks), ""), 0) for record in old]
        tasks_of = np.array([*tasks, *self._task_of], np.int64)
        counted = counter_totals(lengths, tasks_of, self._spec.fps)
        found = {
            key: counted[key] if key in counted else total[key].to_json(feature)
            for key, feature in complete.items()
            if key in counted or key in total
        }
        stats = _json(found)
        publish_bytes(self._target(name), stats)
        self._files[name] = json_digest(stats)
        return folded

    def _info(self) -> dict[str, Any]:
        features = {
            name: replace(feature, info=self._infos[name])
            if self._infos.get(name) and feature.info is None
            else feature
            for name, feature in self._spec.features.items()
        }
        info = layout.info_json(
            replace(self._spec, features=features),
            self._base.episodes + len(self._sources),
            self._base.frames + int(self._lengths.sum()),
            len(self._tasks),
        )
        if self._base.info is not None:
            # A dataset of other making keeps whatever else its info says.
            totals = [key for key in info if key.startswith("total_") or key == "splits"]
            info = {**self._base.info, **{key: info[key] for key in totals}}
        return info

    def _target(self, path: str) -> Path:
        target = self._new / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _note(self, path: str) -> None:
        self._files[path] = file_digest(self._new / path)


class _UnitBuild(Build):
    def __init__(
        self,
        root: Path,
        new: Path,
        plan: Plan,
        built: Built,
        units: Sequence[Unit],
        base_stats: dict[str, AnyStats],
    ) -> None:
        self._built, self._base_stats = built, base_stats
        self._units = {unit.record.key: unit for unit in units}
        old, base = built.units, built.base
        records = [*old, *(unit.record for unit in units)]
        records.sort(key=lambda record: record.position)
        shown = set(plan.spec.video_keys)
        for record in records:
            if any(set(episode.videos) != shown for episode in record.episodes):
                raise CorruptFile(f"{root}: the record of unit {record.key} names other cameras")
        before: list[metadata.EpisodeRecord] = []
        if old or base.episodes:
            before = list(metadata.read_episodes(root, metadata.read_info(root)))
        episodes = [episode for record in old for episode in record.episodes]
        if [episode.frames for episode in episodes] != [r.length for r in before[base.episodes :]]:
            raise CorruptFile(f"{root}: {BUILT} does not fit the records of its episodes")
        lying = sources_in(root, plan.spec.fps, before, episodes, base.episodes)
        known_sources = {record.key: list(islice(lying, len(record.episodes))) for record in old}
        known_sources |= {key: _sources_of(unit) for key, unit in self._units.items()}
        sources = [source for record in records for source in known_sources[record.key]]
        # Of the first unit, whichever was built first.
        first = self._units.get(records[0].key) if records else None
        infos = first.infos if first else built.infos
        super().__init__(root, new, plan, base, before, records, sources, built.files, infos)

    def _episode_stats(self) -> Iterator[pa.Table]:
        schema = stats_schema(self._spec.features)
        if not schema.names:
            yield pa.table({"episode": pa.array(range(len(self._sources)), pa.int64())})
            return
        old = RowStream(self._old_stats(schema))
        for record in self._records:
            unit = self._units.get(record.key)
            count = len(record.episodes)
            if unit is None:
                if count:  # an edit may have removed all
                    yield old.take(count)
            else:
                for table in read_rows(unit.folder / EPISODES, 0, count, schema.names):
                    yield _with_schema(table, schema)

    def _old_stats(self, schema: pa.Schema) -> Iterator[pa.Table]:
        if not self._format.shares_files:
            name = self._format.episode_stats
            lines = islice(metadata.read_lines(self._root, name), self._base.episodes, None)
            while some := list(islice(lines, _RECORDS_AT_ONCE)):
                with reading(self._root, name):
                    rows = [
                        {
                            f"stats/{n}/{k}": v
                            for n, own in line["stats"].items()
                            for k, v in own.items()
                        }
                        for line in some
                    ]
                    yield pa.Table.from_pylist(rows, schema)
            return
        counts = Counter(record.source for record in self._before[self._base.episodes :])
        for name, count in counts.items():
            with Table(self._root, name) as table:
                names = [each for each in schema.names if each in table.schema.names]
                for piece in table.pieces(names, 0, count, _RECORDS_AT_ONCE):
                    yield _with_schema(pa.Table.from_batches([piece]), schema)

    def _total_stats(self) -> tuple[dict[str, AnyStats], int]:
        """Sum the statistics of the units up, in their order.

        Those behind a gap keep files of their own: what fills the gap comes before them.
        """
        folded = 0
        while folded < len(self._records) and self._records[folded].position == folded:
            folded += 1
        done, total = self._built.folded, self._base_stats
        if self._built.units:
            stored = inside(self._root, TOTAL_STATS)
            total = read_stats(stored) if stored.exists() else {}
        if folded == done and total:
            write_stats(self._new / TOTAL_STATS, total)
        size, more = 0, list[dict[str, AnyStats]]()
        for number, record in enumerate(self._records[done:], done):
            self._progress.advance()
            unit = self._units.get(record.key)
            kept = f"{STATS_FOLDER}/{record.key}.pack"
            path = unit.folder / UNIT_STATS if unit else inside(self._root, kept)
            more.append(read_stats(path))
            size += sum(stats.nbytes for stats in more[-1].values())
            if number == folded - 1 or size > _STATS_BYTES:
                _merge(total, more)
                size = 0
            if number == folded - 1:
                write_stats(self._new / TOTAL_STATS, total)
            elif number >= folded:
                place(path, self._target(kept))
        _merge(total, more)
        return total, folded


def sources_in(
    root: Path,
    fps: int,
    before: Sequence[metadata.EpisodeRecord],
    episodes: Sequence[Episode],
    first: int = 0,
) -> Iterator[Source]:
    """Yield where the episodes of a dataset lie, from the first on."""
    rows: Counter[str] = Counter()
    find = cache(lambda name: inside(root, name))
    for index, (now, episode) in enumerate(zip(before[first:], episodes, strict=True), first):
        clips = {
            camera: Clip(find(span.file), round(span.from_s * fps), now.length)
            for camera, span in now.videos.items()
        }
        yield Source(episode, find(now.data_file), rows[now.data_file], clips, {}, index)
        rows[now.data_file] += now.length


def _sources_of(unit: Unit) -> list[Source]:
    found, first = [], 0
    for number, episode in enumerate(unit.record.episodes):
        clips, images = {}, {}
        for name, feature in unit.features.items():
            path = unit.folder / pictures_name(name, feature, number)
            if feature.dtype == "video":
                clips[name] = Clip(path, 0, episode.frames)
            elif feature.dtype == "image":
                images[name] = path
        found.append(Source(episode, unit.folder / ROWS, first, clips, images, None, unit))
        first += episode.frames
    return found


def _rows(
    sources: Sequence[Source], columns: Sequence[str], pictures: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield the rows of episodes, those that lie behind each other in one pass."""
    for first, stop in runs(sources):
        if first.images:
            yield from _rows_and_pictures(first, columns)
        else:
            most = _PICTURE_ROWS if pictures else 4096
            yield from read_rows(first.rows, first.first_row, stop, columns, most=most)


def runs(sources: Sequence[Source]) -> Iterator[tuple[Source, int]]:
    """Yield the first of episodes whose rows lie behind each other, and the row behind them."""
    first, stop = None, 0
    for source in sources:
        if first and not first.images and (source.rows, source.first_row) == (first.rows, stop):
            stop += source.episode.frames
            continue
        if first:
            yield first, stop
        first, stop = source, source.first_row + source.episode.frames
    if first:
        yield first, stop


def _rows_and_pictures(source: Source, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the rows of an episode of a unit, joined with its PNGs."""
    frames, first = source.episode.frames, source.first_row
    streams = {
        name: RowStream(read_rows(path, 0, frames, most=_PICTURE_ROWS))
        for name, path in source.images.items()
    }
    numbers = [name for name in columns if name not in streams]
    own = RowStream(read_rows(source.rows, first, first + frames, numbers, most=_PICTURE_ROWS))
    for start in range(0, frames, _PICTURE_ROWS):
        count = min(_PICTURE_ROWS, frames - start)
        found = {name: stream.take(count).column("image") for name, stream in streams.items()}
        table = own.take(count) if numbers else pa.table({})
        yield pa.table({n: found[n] if n in found else table.column(n) for n in columns})


def row_groups(lengths: Sequence[int] | NDArray[np.int64], most: int) -> list[tuple[int, int]]:
    """Return the rows of each row group: whole short episodes, or a part of a long one."""
    found: list[tuple[int, int]] = []
    start = stop = 0
    for length in map(int, lengths):
        if stop > start and stop - start + length > min(_GROUP_ROWS, most):
            found.append((start, stop))
            start = stop
        stop += length
        while stop - start > most:
            found.append((start, start + most))
            start += most
    return [*found, (start, stop)] if stop > start else found


def _merge(total: dict[str, AnyStats], more: list[dict[str, AnyStats]]) -> None:
    """Add the statistics of units, in their order, and forget them."""
    for name in more[0] if more else ():
        found: list[Any] = [one[name] for one in more]
        if name not in total:
            total[name] = found.pop(0)
        total[name].merge(*found)
    more.clear()


def place(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where that is not possible; the folder is synced later.

    A link stays a link: what it leads to is not ours.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        if not source.exists() and not source.is_symlink():
            raise
        shutil.copy2(source, target, follow_symlinks=False)
        if not target.is_symlink():
            with open(target, "rb") as file:
                os.fsync(file.fileno())


def _with_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return statistics that were fitted to others' records in our own types.

    What others do not have, or have in another shape, is null: fitting makes it once more.
    """
    if table.schema.equals(schema):
        return table
    columns = []
    for field_ in schema:
        try:
            columns.append(table.column(field_.name).cast(field_.type))
        except (KeyError, pa.ArrowException):
            columns.append(pa.nulls(table.num_rows, field_.type))
    return pa.table(columns, schema)


def _json(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, indent=4, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace")  # half a pair of UTF-16, as JSON writes it
