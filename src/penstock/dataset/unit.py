"""A unit: what one worker makes of one recording, complete in itself, never changed afterwards.

```
units/<key>/
  rows.parquet             the numbers of all its episodes, one episode behind the other
  <camera>-00003.mp4       a camera's video of one episode, or
  <camera>-00003.parquet   its PNGs
  episodes.parquet         the statistics of every episode, as LeRobot's records have them
  stats.pack               the statistics of all of them, which can be merged
  unit.json                written last
```
A worker needs no lock: it writes into a temporary folder, and the commit is one rename. Two workers
that make a unit of the same recording make the same key and the same bytes; the second finds it
there. `build` makes the LeRobot files out of units.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from isal import isal_zlib
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.core.files import (
    make_folder,
    names_synced_later,
    publish_bytes,
    storage_error,
    sync_folder,
    temporary_path,
)
from penstock.dataset.layout import (
    AUTO_FEATURES,
    Feature,
    arrow_type,
    check_name,
    check_task,
    episodes_schema,
    own_features,
)
from penstock.dataset.sinks import PictureSink
from penstock.dataset.stats import (
    EpisodeStats,
    PictureStats,
    VectorStats,
    episode_stats,
    write_stats,
)
from penstock.dataset.tables import inside, new_parquet, to_column, write_table
from penstock.errors import CorruptFile, DataError, PenstockError, UsageError
from penstock.media.remux import coding
from penstock.media.video import VideoSettings
from penstock.objects import ObjectPath

Digest = tuple[int, int]  # size and CRC-32 of a file
_FORMAT = 1
# What Python raises for JSON that is none, is too deep, or has values of the wrong kind.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
_REMOVE = "remove its folder, and make the unit again"
# Episodes that fit together into so many rows are summed together; longer ones piece by piece.
_PIECE_ROWS = 1024
_DIGEST_BYTES = 1 << 18
RECORD = "unit.json"
ROWS = "rows.parquet"
EPISODES = "episodes.parquet"
UNIT_STATS = "stats.pack"


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode of a unit.

    Attributes:
        start_ns: When the recording of it began; None if there is no clock.
        end_ns: When its last frame was recorded.
        size_bytes: Of its rows, uncompressed.
        videos: Per camera the bytes of its video, and how it is coded.
    """

    frames: int
    task: str
    start_ns: int | None = None
    end_ns: int | None = None
    size_bytes: int = 0
    videos: dict[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """What is known of a unit for as long as its episodes are in a dataset.

    Attributes:
        key: Its name: the same recording and settings have the same.
        position: Its place among the units of the dataset.
        source: JSON that says where it came from.
    """

    key: str
    position: int
    source: dict[str, Any]
    episodes: list[Episode]

    @property
    def frames(self) -> int:
        """Frames of all its episodes."""
        return sum(episode.frames for episode in self.episodes)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read what `asdict` made; a value of the wrong kind raises what Python raises for it.

        What the units of a dataset have in common is one object: there may be very many of them.
        """
        episodes = [
            Episode(
                _count(each["frames"]),
                sys.intern(str(each["task"])),
                _time(each["start_ns"]),
                _time(each["end_ns"]),
                _count(each["size_bytes"]),
                {
                    sys.intern(str(key)): (_count(size), sys.intern(str(how)))
                    for key, (size, how) in each["videos"].items()
                },
            )
            for each in value["episodes"]
        ]
        check_key(value["key"])
        source = {sys.intern(str(name)): each for name, each in dict(value["source"]).items()}
        if any(not isinstance(source.get(name, ""), str) for name in ("bag", "fingerprint")):
            raise ValueError("its source is no text")
        return cls(value["key"], _count(value["position"]), source, episodes)


def parse_json(data: bytes) -> Any:
    """Read JSON of our own: NaN and Infinity are none."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(data, parse_constant=refuse)


def _count(value: Any, bits: int = 48) -> int:
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise ValueError(f"{str(value)[:40]!r} is no count or time")
    return value


def _time(value: Any) -> int | None:
    return None if value is None else _count(value, 63)


def check_key(key: str) -> None:
    """Refuse what cannot be the name of a unit: it becomes the name of a folder."""
    if not (isinstance(key, str) and 0 < len(key) <= 64 and key.isalnum() and key.isascii()):
        raise UsageError(f"{str(key)[:80]!r} cannot name a unit: letters and digits only")


def make_key(*parts: Any) -> str:
    """Return the key of a unit that is made of these JSON values."""
    text = json.dumps(parts, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Unit:
    """A committed unit on disk."""

    folder: Path
    record: UnitRecord
    fps: int
    features: dict[str, Feature]
    infos: dict[str, dict[str, Any]]
    files: dict[str, Digest]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a unit, of this process or another."""
        path = inside(folder, RECORD)
        try:
            content = parse_json(path.read_bytes())
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']}")
            if content["record"]["key"] != folder.name:
                raise ValueError(f"it is of the unit {content['record']['key']}")
            return cls(
                folder,
                UnitRecord.from_json(content["record"]),
                int(content["fps"]),
                *_parse_cameras(json.dumps([content["features"], content["infos"]])),
                {sys.intern(str(n)): (int(a), int(b)) for n, (a, b) in content["files"].items()},
            )
        except FileNotFoundError as error:
            raise DataError(f"{folder} holds no committed unit") from error
        except (*MALFORMED, OSError, UsageError) as error:
            raise CorruptFile(f"{path} is damaged ({error}): {_REMOVE}") from error

    def check(self) -> None:
        """See that every file is there, and has the size that it was committed with."""
        wanted, numbers = {EPISODES, UNIT_STATS}, range(len(self.record.episodes))
        for name, feature in self.features.items():
            own = (pictures_name(name, feature, number) for number in numbers)
            wanted.update(own if feature.is_picture else [ROWS])
        if wanted != set(self.files):
            odd = min(wanted ^ set(self.files))
            raise CorruptFile(f"{self.folder / RECORD} is damaged ({odd!r}): {_REMOVE}")
        for name, (size, _) in self.files.items():
            path = self.folder / Path(name).name
            try:
                found = path.stat().st_size
            except OSError as error:
                raise CorruptFile(f"{path} is missing ({error.strerror}): {_REMOVE}") from error
            if found != size:
                raise CorruptFile(f"{path} has {found} bytes, {size} were committed: {_REMOVE}")


# The units of a dataset have the same: a hundred thousand of them share one.
@lru_cache(maxsize=8)
def _parse_cameras(text: str) -> tuple[dict[str, Feature], dict[str, dict[str, Any]]]:
    features, infos = json.loads(text)
    parsed = {name: Feature.from_json(name, value) for name, value in features.items()}
    return parsed, {str(name): dict(info) for name, info in infos.items()}


def pictures_name(camera: str, feature: Feature, episode: int) -> str:
    """Return the name of a camera's video of one episode, or of its PNGs."""
    return f"{camera}-{episode:05d}.{'mp4' if feature.dtype == 'video' else 'parquet'}"


class UnitWriter:
    """Make a unit; `commit` gives it its name, and before that it does not exist.

    Rows may come in any portions: the files do not depend on them.

    Args:
        units: The folder of all units, here or in object storage; created if need be.
        record: Key, position, source, and the episodes with their lengths and tasks.
        features: Of the dataset; the automatic ones are added by the build.
        fps: Frames per second.
        videos: How each camera is stored; h264 for those that are not named.

    Example:
        record = UnitRecord(make_key("a.bag"), 0, {"bag": "a.bag"}, [Episode(300, "pick")])
        with UnitWriter(units, record, features, 30) as writer:
            writer.add_rows({"observation.state": state, "action": action})
            sink = writer.video("observation.images.head", 0)
            for jpeg in jpegs:
                sink.add_jpeg(jpeg)
            writer.commit()
    """

    def __init__(
        self,
        units: Path | ObjectPath,
        record: UnitRecord,
        features: Mapping[str, Feature],
        fps: int,
        videos: Mapping[str, VideoSettings] | None = None,
    ) -> None:
        check_key(record.key)
        self._features = own_features(features)
        for name in self._features:
            check_name(name)
        self._settings = dict(videos or {})
        unknown = set(self._settings) - {n for n, f in self._features.items() if f.is_picture}
        if unknown:
            raise UsageError(f"{min(unknown)!r} is no camera of the dataset")
        if not record.episodes or min(episode.frames for episode in record.episodes) < 1:
            raise UsageError("a unit needs at least one episode, each of at least one frame")
        for episode in record.episodes:
            check_task(episode.task)
        self._units, self._record, self._fps = units, record, fps
        lengths = np.array([episode.frames for episode in record.episodes], np.int64)
        self._numbers = NumberColumns(
            {n: f for n, f in self._features.items() if not f.is_picture}, lengths
        )
        self._pictures = {n: PictureStats.of(f) for n, f in self._features.items() if f.is_picture}
        self._sinks: dict[tuple[str, int], PictureSink] = {}
        self._infos: dict[str, dict[str, Any]] = {}
        # Of finished videos the bytes, how they are coded, and the statistics.
        self._shown: dict[tuple[str, int], tuple[int, str, dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._open = True
        self._committed = False
        self._stack = ExitStack()
        here = Path(tempfile.gettempdir()) if isinstance(units, ObjectPath) else units
        try:
            make_folder(here)
            self.folder = temporary_path(here)
            self.folder.mkdir()
        except OSError as error:
            raise storage_error("write", here, error) from error
        self._parquet: Any = None
        if self._numbers.features:
            # Measurements hardly repeat: to look for it takes three times the memory, for nothing.
            rows = new_parquet(self.folder / ROWS, self._numbers.schema, dictionary=False)
            self._parquet = self._stack.enter_context(rows)

    @property
    def free_position(self) -> int | None:
        """Its place among the units of the dataset, if nothing will come of it any more."""
        return None if self._open or self._committed else self._record.position

    def add_rows(self, columns: Mapping[str, Any]) -> None:
        """Add frames: for every feature but pictures an array of (n, *shape), n alike for all.

        Episodes follow each other without a mark: their lengths are known. NaN and infinities are
        stored as they are; the statistics leave them out.
        """
        self._check_open()
        for table in self._numbers.add(columns):
            try:
                self._parquet.write_table(table, row_group_size=max(table.num_rows, 1))
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError):
                    raise storage_error("write", self.folder, error) from error
                raise DataError(f"{self.folder}: rows cannot be written ({error})") from error

    def video(self, camera: str, episode: int) -> PictureSink:
        """Return the sink of a camera's pictures of one episode, to be used from one thread."""
        self._check_open()
        feature = self._features.get(camera)
        if feature is None or not feature.is_picture:
            raise UsageError(f"{camera!r} is no camera of the dataset")
        if not 0 <= episode < len(self._record.episodes):
            raise UsageError(f"the unit has no episode {episode}")
        settings = self._settings.get(camera, VideoSettings())
        if (settings.codec == "png") != (feature.dtype == "image") and camera in self._settings:
            raise UsageError(f"{camera!r} is {feature.dtype}, and its codec {settings.codec}")
        with self._lock:
            if (camera, episode) not in self._sinks:
                path = self.folder / pictures_name(camera, feature, episode)
                frames = self._record.episodes[episode].frames
                sink = PictureSink(path, feature, settings, self._fps, frames)
                self._sinks[camera, episode] = sink
            return self._sinks[camera, episode]

    def finish_video(self, camera: str, episode: int) -> None:
        """Complete a video and forget its sink; the commit does so for those that are left."""
        sink = self.video(camera, episode)
        sink.close()
        wanted = self._record.episodes[episode].frames
        if sink.frames != wanted:
            raise DataError(
                f"{camera!r} has {sink.frames} frames in episode {episode}, and others {wanted}"
            )
        size = sink.path.stat().st_size
        how = coding(sink.path) if self._features[camera].dtype == "video" else ""
        with self._lock:
            self._pictures[camera].merge(sink.stats)
            self._infos.setdefault(camera, sink.info or {})
            self._shown[camera, episode] = size, how, sink.stats.to_json()
            del self._sinks[camera, episode]

    def commit(self) -> Unit:
        """Complete the files, make them durable, and give the unit its name.

        Where another worker was faster, its unit stays, and this one is removed.

        Raises:
            DataError: A feature has another number of frames than the episodes; nothing is kept.
            StorageError: The disk refuses; nothing is kept.
        """
        self._check_open()
        target = self._units / self._record.key
        try:
            with names_synced_later():
                unit = self._finish(target if isinstance(target, Path) else self.folder)
            if isinstance(target, Path):
                self._publish(target)
            else:
                for path in sorted(
                    self.folder.iterdir(), key=lambda path: (path.name == RECORD, path)
                ):
                    (target / path.name).upload(path)
            self._committed = True
            self.abandon()  # what is left here
        except BaseException as error:
            self.abandon()
            if isinstance(error, pa.ArrowException | MemoryError):
                raise DataError(f"{target}: the unit cannot be written ({error})") from error
            if isinstance(error, OSError):
                raise storage_error("write", str(target), error) from error
            raise
        return unit  # not read again: a build may have taken it by now

    def _publish(self, target: Path) -> None:
        """Give the finished folder its name, unless another worker was faster."""
        sync_folder(self.folder)
        try:
            os.rename(self.folder, target)
        except OSError:
            if not (target / RECORD).is_file():
                raise
        try:
            sync_folder(target.parent)
            with suppress(FileNotFoundError):
                (target.parent / failure_name(self._record.key)).unlink()
        except BaseException:
            if not self.folder.exists():
                # Nobody was told of it: whoever tries again must not find it there.
                with suppress(OSError):
                    os.rename(target, self.folder)
            raise

    def abandon(self) -> None:
        """Remove everything; safe to call twice, and after `commit` it does nothing."""
        if not self._open:
            return
        self._open = False
        with suppress(PenstockError, OSError, pa.ArrowException):
            self._stack.__exit__(DataError, DataError("given up"), None)
        for sink in self._sinks.values():
            sink.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _finish(self, target: Path) -> Unit:
        """Complete the files in the temporary folder; return the unit that they will be."""
        record = self._record
        if self._numbers.features and self._numbers.rows != record.frames:
            name, rows = next(iter(self._numbers.features)), self._numbers.rows
            raise DataError(f"{name!r} has {rows} frames, and the episodes have {record.frames}")
        self._stack.close()
        episodes = []
        for number, episode in enumerate(record.episodes):
            size_bytes, videos = episode.frames * self._numbers.row_bytes, {}
            for camera in self._pictures:
                if (camera, number) not in self._shown:
                    if (camera, number) not in self._sinks:
                        raise DataError(f"{camera!r} has 0 frames in episode {number}")
                    self.finish_video(camera, number)
                size, how, _ = self._shown[camera, number]
                if how:
                    videos[camera] = size, how
                else:
                    size_bytes += size
            episodes.append(replace(episode, size_bytes=size_bytes, videos=videos))
        record = replace(record, episodes=episodes)
        pictures = {
            camera: [self._shown[camera, number][2] for number in range(len(episodes))]
            for camera in self._pictures
        }
        stats = stats_table(self._features, len(episodes), self._numbers.stats, pictures)
        write_table(self.folder / EPISODES, stats)
        write_stats(self.folder / UNIT_STATS, {**self._numbers.totals, **self._pictures})
        files = {path.name: file_digest(path) for path in sorted(self.folder.iterdir())}
        content = {
            "format": _FORMAT,
            "record": asdict(record),
            "fps": self._fps,
            "features": {name: feature.to_json() for name, feature in self._features.items()},
            "infos": dict(sorted(self._infos.items())),
            "files": files,
        }
        publish_bytes(self.folder / RECORD, json.dumps(content).encode())
        return Unit(target, record, self._fps, self._features, self._infos, files)

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError(f"{self.folder}: this unit was committed or given up already")


def stats_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Return the columns of LeRobot's records that hold the statistics of these features."""
    wanted = tuple(f"stats/{name}/" for name in features if name not in AUTO_FEATURES)
    return pa.schema([f for f in episodes_schema(features) if f.name.startswith(wanted)])


def stats_table(
    features: Mapping[str, Feature],
    count: int,
    numbers: Mapping[str, Sequence[EpisodeStats]],
    pictures: Mapping[str, Sequence[Mapping[str, Any]]],
) -> pa.Table:
    """Return the statistics of so many episodes, in the columns of LeRobot's records.

    Those of numbers come in portions of some episodes each, those of pictures one by one.
    """
    schema = stats_schema(features)
    arrays = []
    for column in schema:
        _, name, stat = column.name.split("/")
        if name in pictures:
            arrays.append(pa.array([one[stat] for one in pictures[name]], column.type))
        else:
            values = np.concatenate([part[stat] for part in numbers[name]])
            shape = (1,) if stat == "count" else features[name].shape
            arrays.append(to_column(values, shape, column.type))
    if not arrays:
        return pa.table({"episode": pa.array(range(count), pa.int64())})
    return pa.table(arrays, schema)


class NumberColumns:
    """Collects rows, cuts them into pieces, and takes the statistics of every episode."""

    def __init__(self, features: Mapping[str, Feature], lengths: NDArray[np.int64]) -> None:
        self.features = dict(features)
        self.schema = pa.schema([(n, arrow_type(f)) for n, f in features.items()])
        self.rows = 0
        self.row_bytes = sum(
            np.dtype(f.dtype).itemsize * f.size if f.dtype != "string" else 64
            for f in features.values()
        )
        self.totals = {n: VectorStats(f.size) for n, f in features.items() if f.has_stats}
        self.stats: dict[str, list[EpisodeStats]] = {name: [] for name in self.totals}
        self._lengths = lengths
        self._pieces = deque(_pieces(lengths))
        self._long: dict[str, VectorStats] = {}  # of the long episode under way
        self._waiting: dict[str, list[NDArray[Any]]] = {name: [] for name in features}
        self._waiting_rows = 0

    def add(self, columns: Mapping[str, Any]) -> list[pa.Table]:
        """Take rows; return the pieces that are complete, as tables."""
        if set(columns) != set(self.features):
            odd = sorted(set(columns) ^ set(self.features))[0]
            what = "is missing" if odd in self.features else "is no numeric feature of the dataset"
            raise UsageError(f"{odd!r} {what}")
        arrays = {n: _column(n, self.features[n], columns[n]) for n in self.features}
        counts = {name: len(array) for name, array in arrays.items()}
        if len(set(counts.values())) > 1:
            raise UsageError(f"the features have different numbers of rows: {counts}")
        count = next(iter(counts.values()), 0)
        total = int(self._lengths.sum())
        if self.rows + count > total:
            raise UsageError(f"{self.rows + count} rows were given, and the episodes have {total}")
        for name, array in arrays.items():
            self._waiting[name].append(array)
        self._waiting_rows += count
        self.rows += count
        tables = []
        while self._pieces and self._waiting_rows >= self._pieces[0][2]:
            tables.append(self._take(*self._pieces.popleft()))
        for parts in self._waiting.values():
            parts[-1] = parts[-1].copy()  # the caller may use its array again
        return tables

    def _take(self, first: int, last: int, rows: int) -> pa.Table:
        """Count and return the next rows: episodes first to last, or a piece of a long one."""
        arrays = {}
        for name, parts in self._waiting.items():
            whole = np.concatenate(parts) if len(parts) > 1 else parts[0]
            arrays[name], self._waiting[name] = whole[:rows], [whole[rows:]]
        self._waiting_rows -= rows
        lengths = self._lengths[first : last + 1]
        for name, total in self.totals.items():
            feature, values = self.features[name], arrays[name]
            if rows == lengths.sum():
                self.stats[name].append(episode_stats(values, lengths, feature))
                total.add(values)
                continue
            long = self._long.setdefault(name, VectorStats(total.dim))
            long.add(values)
            if long.rows == lengths[0]:
                one = {n: np.reshape(v, (1, -1)) for n, v in long.to_json(feature).items()}
                self.stats[name].append(one)
                total.merge(self._long.pop(name))
        columns = [to_arrow(self.features[n], arrays[n]) for n in self.schema.names]
        return pa.table(columns, self.schema)


def _pieces(lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return (first episode, last episode, rows) of the pieces that rows are written in."""
    found: list[tuple[int, int, int]] = []
    first, rows = 0, 0
    for number, length in enumerate(lengths.tolist()):
        if rows and rows + length > _PIECE_ROWS:
            found.append((first, number - 1, rows))
            first, rows = number, 0
        if length > _PIECE_ROWS:
            for start in range(0, length, _PIECE_ROWS):
                found.append((number, number, min(_PIECE_ROWS, length - start)))
            first, rows = number + 1, 0
        else:
            rows += length
    return [*found, (first, len(lengths) - 1, rows)] if rows else found


def remove_unit(folder: Path) -> None:
    """Remove a unit; at no time there is half a unit of that name."""
    away = temporary_path(folder.parent)
    with suppress(OSError):
        os.rename(folder, away)
        shutil.rmtree(away, ignore_errors=True)


def move_units(source: Path, target: Path) -> None:
    """Move all units, and those under way, to another folder of the same disk; safe to repeat.

    Workers know nothing of it: they may have begun a new folder in the target's place already.
    """
    make_folder(target)
    for path in sorted(source.iterdir()):
        try:
            os.rename(path, target / path.name)
        except OSError:
            if not (target / path.name).exists():
                raise  # otherwise it is there already
    sync_folder(target)
    shutil.rmtree(source, ignore_errors=True)


def failure_name(key: str) -> str:
    """Return the name of the note that says why there is no such unit."""
    return f"{key}.failed.json"


def write_failure_note(
    units: Path | ObjectPath, key: str, source: Mapping[str, Any], reason: str
) -> None:
    """Note, durably, why a recording could not become a unit; the next try removes it."""
    check_key(key)
    content = json.dumps({"source": dict(source), "reason": reason}).encode()
    if isinstance(units, ObjectPath):
        (units / failure_name(key)).write_bytes(content)
    else:
        make_folder(units)
        publish_bytes(units / failure_name(key), content)


def file_digest(path: Path) -> Digest:
    """Return the size and the CRC-32 of a file."""
    crc = size = 0
    buffer = memoryview(bytearray(_DIGEST_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = isal_zlib.crc32(buffer[:count], crc)
            size += count
    return size, crc


def json_digest(data: bytes) -> Digest:
    """Return the same for the values of a JSON file, however they are laid out."""
    text = json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()
    return len(text), isal_zlib.crc32(text)


def to_arrow(feature: Feature, array: NDArray[Any]) -> pa.Array:
    """Turn rows of a feature into a column, without copying the numbers."""
    kind, values = arrow_type(feature), np.ascontiguousarray(array).reshape(-1)
    flat = pa.array([*map(str, values)] if feature.dtype == "string" else values)
    if feature.shape == (1,):
        return flat
    if len(feature.shape) == 1:
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)
    return to_column(array, feature.shape, kind)


def _column(name: str, feature: Feature, values: Any) -> NDArray[Any]:
    """Check rows of a feature, and give them its type."""
    is_text = feature.dtype == "string"
    kind, what = (object, "texts") if is_text else (feature.dtype, "numbers")
    try:
        array = np.asarray(values, object if is_text else None)
        if array.ndim == 1 and feature.shape == (1,):
            array = array[:, None]
        if array.shape[1:] != feature.shape:
            raise UsageError(
                f"{name!r}: rows of {list(array.shape[1:])} were given, not {list(feature.shape)}"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            return array.astype(kind, copy=False)
    except (ValueError, TypeError, IndexError) as error:
        raise UsageError(f"{name!r}: these are no rows of {what} ({error})") from error
