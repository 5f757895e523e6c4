"""What the meta folder of a dataset says: info, tasks, episodes and statistics, v3.0 and v2.1.

Reading takes nothing for granted: sizes, types and names come from files that anybody wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.dataset import layout
from penstock.dataset.layout import FORMATS, Feature, Format
from penstock.dataset.tables import Table, inside, reading
from penstock.errors import CorruptFile, DataError, LimitExceeded, UnknownFormat

_MAX_JSON_BYTES = 64 << 20
_MAX_EPISODES = 10_000_000
_STATS_BATCH = 64

Stats = dict[str, dict[str, np.ndarray[Any, Any]]]


@dataclass(frozen=True, slots=True)
class VideoSpan:
    """Where an episode lies in a video file: from its first frame to the end of its last."""

    file: str  # its path in the dataset
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """What the metadata say of one episode."""

    index: int
    length: int
    tasks: tuple[str, ...]
    from_index: int
    to_index: int
    data_file: str
    videos: Mapping[str, VideoSpan]
    source: str  # the file that says it
    stated_source: str | None = None  # the one in which it says to be


@dataclass(frozen=True)
class Info:
    """What info.json says, checked as far as reading needs it."""

    format: Format
    fps: int | float
    features: dict[str, Feature]
    chunks_size: int
    data_path: str
    video_path: str | None
    raw: dict[str, Any]

    @property
    def video_keys(self) -> list[str]:
        """Return the features that are stored as videos."""
        return [name for name, feature in self.features.items() if feature.dtype == "video"]

    def data_file(self, chunk: int, file: int) -> str:
        """Return the path of a data file, by the template that the dataset states."""
        return layout.expand(self.data_path, **self.format.numbers(chunk, file))

    def video_file(self, key: str, chunk: int, file: int) -> str:
        """Return the path of a video file, by the template that the dataset states."""
        numbers = self.format.numbers(chunk, file)
        return layout.expand(self.video_path or "", video_key=key, **numbers)


def read_json(root: Path, name: str) -> Any:
    """Read a JSON file; NaN and Infinity are let through for the caller to judge."""
    path = inside(root, name)
    with reading(root, name):
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise LimitExceeded(f"{name} in {root} has {size} bytes; {_MAX_JSON_BYTES} are allowed")
        return _parse(root, name, path.read_bytes())


def read_lines(root: Path, name: str) -> Iterator[dict[str, Any]]:
    """Read a JSON-lines file of objects, one at a time."""
    with reading(root, name), inside(root, name).open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_JSON_BYTES + 1), b""), 1):
            if len(line) > _MAX_JSON_BYTES:
                raise LimitExceeded(f"line {number} of {name} in {root} is too long")
            if line.strip():
                value = _parse(root, f"line {number} of {name}", line)
                if not isinstance(value, dict):
                    raise CorruptFile(f"line {number} of {name} in {root} is not an object")
                yield value


def _parse(root: Path, name: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise CorruptFile(f"{name} in {root} is not JSON: {reason}") from error


def read_info(root: Path) -> Info:
    """Read info.json.

    Raises:
        UnknownFormat: The folder is no dataset, or one of another version.
        DataError: A value is missing or wrong.
    """
    if not root.is_dir():
        raise UnknownFormat(f"{root} is not a folder; give the folder of a LeRobot dataset")
    if not (root / layout.INFO_PATH).is_file():
        raise UnknownFormat(f"{root} is not a LeRobot dataset: it has no {layout.INFO_PATH}")
    raw = read_json(root, layout.INFO_PATH)
    where = f"{layout.INFO_PATH} in {root}"
    if not isinstance(raw, dict):
        raise CorruptFile(f"{where} is not an object")
    found = str(raw.get("codebase_version"))[:40]
    if found not in FORMATS:
        raise UnknownFormat(f"{where} says version {found!r}; v3.0 and v2.1 can be read")
    for name, kinds in {**layout.INFO_KEYS, **FORMATS[found].info_keys}.items():
        value = raw.get(name)
        # robot_type and video_path may be left out, as if they were null.
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise DataError(f"{where}: {name} is {str(value)[:40]!r}, of the wrong kind or missing")
    if not (math.isfinite(raw["fps"]) and 0 < raw["fps"] <= 10_000 and raw["chunks_size"] > 0):
        raise DataError(
            f"{where}: fps {raw['fps']} or chunks_size {raw['chunks_size']} is unusable"
        )
    try:
        features = layout.read_features(raw["features"])
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    for name, feature in layout.AUTO_FEATURES.items():
        own = features.get(name)
        dtypes = (feature.dtype, "float64") if name == "timestamp" else (feature.dtype,)
        if own is None or own.dtype not in dtypes or own.shape != feature.shape:
            raise DataError(f"{where}: feature {name!r} is missing or not {feature.dtype} (1,)")
    for name, feature in features.items():
        if feature.is_picture and (len(feature.shape) != 3 or min(feature.picture_size) < 1):
            raise DataError(f"{where}: picture {name!r} has the shape {feature.shape}")
    fps = int(raw["fps"]) if raw["fps"] == int(raw["fps"]) else float(raw["fps"])
    paths = raw["data_path"], raw["video_path"]
    info = Info(FORMATS[found], fps, features, raw["chunks_size"], *paths, raw)
    if info.video_keys and info.video_path is None:
        raise DataError(f"{where}: there are videos, but video_path is null")
    return info


def read_tasks(root: Path, format_: Format) -> list[str]:
    """Read the task texts, in the order of their numbers."""
    name = format_.tasks
    if format_.shares_files:
        with Table(root, name) as table:
            names = ("task_index", "task", "__index_level_0__")  # as lerobot called them in turn
            read = table.whole([n for n in names if n in table.schema.names])
        with reading(root, name):
            lines = read.to_pylist()
    else:
        lines = list(read_lines(root, name))
    tasks: dict[int, str] = {}
    for line in lines:
        number = line.get("task_index")
        text = line.get("task", line.get("__index_level_0__"))
        if type(number) is not int or not isinstance(text, str) or number in tasks:
            raise DataError(f"{name} in {root}: a line has no good task and number")
        tasks[number] = text
    if sorted(tasks) != list(range(len(tasks))):
        raise DataError(f"{name} in {root}: its task numbers are not 0 to {len(tasks) - 1}")
    return [tasks[number] for number in range(len(tasks))]


def episode_files(root: Path) -> list[str]:
    """Return the files of episode records (v3.0), in the order in which lerobot reads them."""
    folder = inside(root, layout.V30.episodes)
    paths = sorted(folder.glob("*/*.parquet"))
    return [path.relative_to(root).as_posix() for path in paths]


def read_episodes(root: Path, info: Info) -> Iterator[EpisodeRecord]:
    """Read the record of every episode, in the order of the files (v3.0) or numbers (v2.1)."""
    if info.format.shares_files:
        for name in episode_files(root):
            yield from _read_episode_file(root, info, name)
        return
    lines = []
    name = info.format.episodes
    for line in read_lines(root, name):
        number, length = (_number(root, name, line.get(k)) for k in ("episode_index", "length"))
        lines.append((number, length, _texts(root, name, line.get("tasks"))))
        if len(lines) > _MAX_EPISODES:
            raise LimitExceeded(f"{root} has more than {_MAX_EPISODES} episodes")
    start = 0
    for number, length, tasks in sorted(lines):
        place = number // info.chunks_size, number
        videos = {
            key: VideoSpan(info.video_file(key, *place), 0.0, length / info.fps)
            for key in info.video_keys
        }
        end, data_file = start + length, info.data_file(*place)
        yield EpisodeRecord(number, length, tasks, start, end, data_file, videos, name)
        start = end


def _read_episode_file(root: Path, info: Info, name: str) -> Iterator[EpisodeRecord]:
    numbers = ["episode_index", "length", "dataset_from_index", "dataset_to_index"]
    numbers += ["data/chunk_index", "data/file_index"]
    for key in info.video_keys:
        numbers += [f"videos/{key}/chunk_index", f"videos/{key}/file_index"]
    own = ["meta/episodes/chunk_index", "meta/episodes/file_index"]
    times = [f"videos/{k}/{end}_timestamp" for k in info.video_keys for end in ("from", "to")]
    with Table(root, name) as table:
        if table.rows > _MAX_EPISODES:
            raise LimitExceeded(f"{name} in {root} has {table.rows} episodes")
        states_itself = set(own) <= set(table.schema.names)
        numbers += own if states_itself else []
        read = table.whole([*numbers, *times, "tasks"])
        with reading(root, name):
            columns = {column: read.column(column).to_pylist() for column in read.column_names}
    for row, values in enumerate(zip(*columns.values(), strict=True)):
        value = dict(zip(columns, values, strict=True))
        for column in numbers:
            _number(root, name, value[column])
        for column in times:
            if not isinstance(value[column], float) or not 0 <= value[column] < math.inf:
                raise CorruptFile(f"{name} in {root}: {column} is {value[column]!r} in row {row}")
        videos = {
            key: VideoSpan(
                info.video_file(
                    key, value[f"videos/{key}/chunk_index"], value[f"videos/{key}/file_index"]
                ),
                value[f"videos/{key}/from_timestamp"],
                value[f"videos/{key}/to_timestamp"],
            )
            for key in info.video_keys
        }
        yield EpisodeRecord(
            value["episode_index"],
            value["length"],
            _texts(root, name, value["tasks"]),
            value["dataset_from_index"],
            value["dataset_to_index"],
            info.data_file(value["data/chunk_index"], value["data/file_index"]),
            videos,
            name,
            layout.episodes_path(value[own[0]], value[own[1]]) if states_itself else None,
        )


def _number(root: Path, name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise CorruptFile(f"{name} in {root}: {str(value)[:40]!r} is no count or index")
    return value


def _texts(root: Path, name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise CorruptFile(f"{name} in {root}: an episode's tasks are not a list of texts")
    return tuple(value)


def read_stats(root: Path) -> Stats:
    """Read stats.json (v3.0)."""
    name = str(layout.V30.stats)
    return parse_stats(read_json(root, name), f"{name} in {root}")


def read_episode_stats(
    root: Path, info: Info, names: Sequence[str] | None = None
) -> Iterator[tuple[int, Stats]]:
    """Read (episode, statistics) of every episode, a few at a time; of some features, or of all."""
    prefixes = ("stats/",) if names is None else tuple(f"stats/{name}/" for name in names)
    if not info.format.shares_files:
        name = info.format.episode_stats
        for line in read_lines(root, name):
            number = _number(root, name, line.get("episode_index"))
            yield number, parse_stats(line.get("stats"), f"{name} in {root}")
        return
    for name in episode_files(root):
        with Table(root, name) as table:
            chosen = [n for n in table.schema.names if n.startswith(prefixes)]
            for piece in table.pieces(["episode_index", *chosen], most=_STATS_BATCH):
                for row in piece.to_pylist():
                    stats = parse_stats(nested_stats(row), f"{name} in {root}")
                    yield row["episode_index"], stats


def nested_stats(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Turn the columns stats/<feature>/<statistic> of a record into objects in objects."""
    nested: dict[str, dict[str, Any]] = {}
    for column, value in row.items():
        if column.startswith("stats/"):
            feature, _, stat = column.removeprefix("stats/").rpartition("/")
            nested.setdefault(feature, {})[stat] = value
    return nested


def parse_stats(value: object, where: str) -> Stats:
    """Turn nested lists into float64 arrays, feature by feature."""
    if not isinstance(value, dict):
        raise CorruptFile(f"{where}: the statistics are not an object")
    found: Stats = {}
    for name, stats in value.items():
        if not isinstance(stats, dict):
            raise CorruptFile(f"{where}: the statistics of {name!r} are not an object")
        found[name] = {}
        for stat, numbers in stats.items():
            try:
                found[name][stat] = np.array(numbers, dtype=np.float64)
            except (TypeError, ValueError, OverflowError) as error:
                raise CorruptFile(f"{where}: {stat} of {name!r} is not numbers") from error
    return found


def record_problems(
    info: Info, tasks: Sequence[str], records: Sequence[EpisodeRecord]
) -> Iterator[tuple[str, str]]:
    """Say what the records contradict: themselves, the tasks, and info.json.

    Yields:
        (file, what is wrong with it).
    """
    position = 0
    known = set(tasks)
    for row, record in enumerate(records):
        here = f"episode {record.index}"
        if record.index != row:
            yield record.source, f"row {row} is {here}: episodes are looked up by their row"
        if record.length < 1:
            yield record.source, f"{here} has {record.length} frames"
        if record.to_index - record.from_index != record.length:
            yield (
                record.source,
                f"{here} has {record.length} frames, but goes from {record.from_index} "
                f"to {record.to_index}",
            )
        if record.from_index != position:
            yield record.source, f"{here} begins at frame {record.from_index}, not {position}"
        position = record.to_index
        for task in record.tasks:
            if task not in known:
                yield record.source, f"{here} has a task that is not in the list: {task[:80]!r}"
        if not record.tasks:
            yield record.source, f"{here} has no task"
    totals = {"total_episodes": len(records), "total_tasks": len(tasks), "total_frames": position}
    for name, number in totals.items():
        if info.raw[name] != number:
            yield layout.INFO_PATH, f"{name} is {info.raw[name]}, but there are {number}"
