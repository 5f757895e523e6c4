"""One episode, staged in a folder of its own until a dataset takes it.

```
rows.parquet          the numbers of every frame, in small row groups
<key>.mp4             a camera's video, or
<key>.images.parquet  a camera's PNGs
stats.pack            the state of the statistics
episode.json          written last: a folder without it is worth nothing
```
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from isal import isal_zlib
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.core.codecs import Zstd
from penstock.core.files import publish_bytes, storage_error
from penstock.core.pack import Item, PackReader, PackWriter
from penstock.errors import CorruptFile, DataError, PenstockError, UsageError
from penstock.lerobot.layout import AUTO_FEATURES, Feature, arrow_type, check_name, has_stats
from penstock.lerobot.parquet import new_parquet
from penstock.lerobot.sinks import PictureSink, open_sink
from penstock.lerobot.stats import PictureStats, VectorStats
from penstock.lerobot.video import VideoSettings

BATCH_ROWS = 4096
_FORMAT = 1
AnyStats = VectorStats | PictureStats


class EpisodeWriter:
    """Write one episode into a private folder.

    Rows may come in any portions: the files do not depend on them.

    Args:
        folder: Created; must not exist, or be empty.
        features: Of the dataset; the automatic ones are added by the commit.
        fps: Frames per second.
        frames_expected: How many frames it will have; the picture statistics are spread over them.
        videos: How each camera is stored; h264 for those that are not named.

    Example:
        writer = EpisodeWriter(folder, features, 30, 300, {"observation.images.head": settings})
        writer.add_rows({"observation.state": state, "action": action})
        sink = writer.video("observation.images.head")
        for jpeg in jpegs:
            sink.add_jpeg(jpeg)
        staged = writer.finish("pick and place")
    """

    def __init__(
        self,
        folder: Path | str,
        features: Mapping[str, Feature],
        fps: int,
        frames_expected: int,
        videos: Mapping[str, VideoSettings] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.frames = 0
        self._features = {n: f for n, f in features.items() if n not in AUTO_FEATURES}
        self._fps = fps
        self._expected = frames_expected
        self._settings = dict(videos or {})
        for name in self._features:
            check_name(name)
        unknown = set(self._settings) - {n for n, f in self._features.items() if f.is_picture}
        if unknown:
            raise UsageError(f"{min(unknown)!r} is no camera of the dataset")
        self._numeric = {n: f for n, f in self._features.items() if not f.is_picture}
        self._stats: dict[str, AnyStats] = {
            name: VectorStats(int(np.prod(feature.shape)))
            for name, feature in self._numeric.items()
            if has_stats(feature)
        }
        self._waiting: dict[str, list[NDArray[Any]]] = {name: [] for name in self._numeric}
        self._waiting_rows = 0
        self._sinks: dict[str, PictureSink] = {}
        self._lock = threading.Lock()
        self._open = True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if any(self.folder.iterdir()):
                raise UsageError(
                    f"{self.folder} is not empty: an episode needs a folder of its own"
                )
        except OSError as error:
            raise storage_error("write", self.folder, error) from error
        self._stack = ExitStack()
        self._parquet: Any = None
        if self._numeric:
            self._schema = pa.schema([(n, arrow_type(f)) for n, f in self._numeric.items()])
            rows = new_parquet(self.folder / "rows.parquet", self._schema)
            self._parquet = self._stack.enter_context(rows)

    def add_rows(self, columns: Mapping[str, Any]) -> None:
        """Add frames: for every feature but pictures an array of (n, *shape), n alike for all.

        NaN and infinities are stored as they are; the statistics leave them out.
        """
        self._check_open()
        if set(columns) != set(self._numeric):
            odd = sorted(set(columns) ^ set(self._numeric))[0]
            what = "is missing" if odd in self._numeric else "is no numeric feature of the dataset"
            raise UsageError(f"{odd!r} {what}")
        arrays = {n: _column(n, self._numeric[n], columns[n]) for n in self._numeric}
        counts = {len(array) for array in arrays.values()}
        if len(counts) > 1:
            lengths = {name: len(array) for name, array in arrays.items()}
            raise UsageError(f"the features have different numbers of rows: {lengths}")
        count = counts.pop() if counts else 0
        for name, array in arrays.items():
            # A copy: the caller may use its array again before it is written.
            self._waiting[name].append(array.copy() if count < BATCH_ROWS else array)
        self._waiting_rows += count
        self.frames += count
        while self._waiting_rows >= BATCH_ROWS:
            self._flush(BATCH_ROWS)

    def video(self, key: str) -> PictureSink:
        """Return the sink of a camera, to be used from one thread."""
        self._check_open()
        with self._lock:
            if key not in self._sinks:
                feature = self._features.get(key)
                if feature is None or not feature.is_picture:
                    raise UsageError(f"{key!r} is no camera of the dataset")
                settings = self._settings.get(key, VideoSettings())
                if (settings.codec == "png") != (
                    feature.dtype == "image"
                ) and key in self._settings:
                    raise UsageError(f"{key!r} is {feature.dtype}, and its codec {settings.codec}")
                self._sinks[key] = open_sink(
                    self.folder, key, feature, settings, self._fps, self._expected
                )
            return self._sinks[key]

    def finish(self, task: str) -> StagedEpisode:
        """Complete the files and make them durable; on an error everything is removed.

        Raises:
            DataError: A feature has another number of frames than the others.
        """
        self._check_open()
        try:
            return self._finish(task)
        except BaseException as error:
            self.abandon()
            if isinstance(error, pa.ArrowException | MemoryError):
                raise DataError(
                    f"{self.folder}: the episode cannot be written ({error})"
                ) from error
            if isinstance(error, OSError) and not isinstance(error, PenstockError):
                raise storage_error("write", self.folder, error) from error
            raise

    def abandon(self) -> None:
        """Remove everything; safe to call twice, and after `finish` it does nothing."""
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

    def _finish(self, task: str) -> StagedEpisode:
        if self._waiting_rows:
            self._flush(self._waiting_rows)
        counts = dict.fromkeys(self._numeric, self.frames)
        for key, feature in self._features.items():
            if feature.is_picture:
                counts[key] = self._sinks[key].frames if key in self._sinks else 0
        frames = max(counts.values(), default=0)
        for name, count in counts.items():
            if count != frames or not frames:
                raise DataError(f"{name!r} has {count} frames, and others have {frames}")
        self._stack.close()
        for sink in self._sinks.values():
            sink.close()
        order = {n: self._stats[n] for n in self._numeric if n in self._stats}
        pictures = {key: sink.stats for key, sink in self._sinks.items()}
        write_stats(self.folder / "stats.pack", {**order, **pictures})
        infos = {key: sink.info for key, sink in sorted(self._sinks.items())}
        described = {name: feature.to_json() for name, feature in self._features.items()}
        content = {
            "format": _FORMAT,
            "frames": frames,
            "fps": self._fps,
            "task": task,
            "features": described,
            "infos": infos,
            "files": {path.name: file_digest(path) for path in sorted(self.folder.iterdir())},
        }
        publish_bytes(self.folder / "episode.json", json.dumps(content).encode())
        self._open = False
        return StagedEpisode.open(self.folder)

    def _flush(self, rows: int) -> None:
        """Write the first rows that wait, and count them."""
        arrays = {}
        for name, parts in self._waiting.items():
            whole = np.concatenate(parts) if len(parts) > 1 else parts[0]
            arrays[name] = whole[:rows]
            self._waiting[name] = [whole[rows:]]
        self._waiting_rows -= rows
        try:
            table = {n: to_arrow(self._numeric[n], a) for n, a in arrays.items()}
            self._parquet.write_table(pa.table(table, self._schema))
        except pa.ArrowException as error:
            if not isinstance(error, OSError):
                raise DataError(f"{self.folder}: rows cannot be written ({error})") from error
            raise storage_error("write", self.folder, error) from error
        except OSError as error:
            raise storage_error("write", self.folder, error) from error
        for name, stats in self._stats.items():
            assert isinstance(stats, VectorStats)
            stats.add(arrays[name])

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError(f"{self.folder}: this episode was finished or given up already")


@dataclass(frozen=True)
class StagedEpisode:
    """An episode that is complete in its folder, and not yet in a dataset."""

    folder: Path
    frames: int
    fps: int
    task: str
    features: dict[str, Feature]
    infos: dict[str, dict[str, Any]]
    files: dict[str, list[int]]

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Open what `EpisodeWriter.finish` left, in this process or another."""
        path = Path(folder) / "episode.json"
        try:
            content = json.loads(path.read_bytes())
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']}")
            features = {n: Feature.from_json(n, f) for n, f in content["features"].items()}
            return cls(
                Path(folder),
                int(content["frames"]),
                int(content["fps"]),
                str(content["task"]),
                features,
                dict(content["infos"]),
                dict(content["files"]),
            )
        except FileNotFoundError as error:
            raise DataError(f"{folder} holds no finished episode") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptFile(f"{path} is damaged ({error})") from error

    def stats(self) -> dict[str, AnyStats]:
        """Read the state of the statistics."""
        return read_stats(self.folder / "stats.pack")


def write_stats(path: Path, stats: Mapping[str, AnyStats]) -> None:
    """Store the state of statistics."""
    kinds = {n: "pictures" if isinstance(s, PictureStats) else "vector" for n, s in stats.items()}
    with PackWriter(path, kind="statistics", meta={"kinds": kinds}, workers=1) as pack:
        items = [
            Item(f"{name}/{part}", array, codec=Zstd(1) if array.nbytes > 4096 else None)
            for name, state in stats.items()
            for part, array in state.to_arrays().items()
        ]
        pack.write(items)


def read_stats(path: Path) -> dict[str, AnyStats]:
    """Read the state of statistics."""
    try:
        with PackReader(path) as pack:
            kinds = pack.index.meta.get("kinds", {})
            parts: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in kinds}
            for full in pack.names:
                name, _, part = full.rpartition("/")
                parts[name][part] = pack.read(full)
    except FileNotFoundError as error:
        raise CorruptFile(f"{path} is missing") from error
    except (OSError, KeyError, AttributeError) as error:
        raise CorruptFile(f"{path} is damaged ({error})") from error
    return {
        name: PictureStats.from_arrays(arrays)
        if kinds[name] == "pictures"
        else VectorStats.from_arrays(arrays)
        for name, arrays in parts.items()
    }


def file_digest(path: Path) -> list[int]:
    """Return the size and the CRC-32 of a file."""
    crc = size = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            crc = isal_zlib.crc32(chunk, crc)
            size += len(chunk)
    return [size, crc]


def to_arrow(feature: Feature, array: NDArray[Any]) -> pa.Array:
    """Turn rows of a feature into a column, without copying the numbers."""
    kind = arrow_type(feature)
    if feature.dtype == "string":
        return pa.array([str(text) for text in array.reshape(-1)], kind)
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    if feature.shape == (1,):
        return flat
    if len(feature.shape) == 1:
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)
    nested = flat
    for length in reversed(feature.shape):
        offsets = pa.array(np.arange(0, len(nested) + 1, length, dtype=np.int32))
        nested = pa.ListArray.from_arrays(offsets, nested)
    return nested


def _column(name: str, feature: Feature, values: Any) -> NDArray[Any]:
    """Check rows of a feature, and give them its type."""
    if feature.dtype == "string":
        texts = np.asarray(values, dtype=object)
        return texts.reshape(len(texts), 1)
    try:
        array = np.asarray(values)
        if array.ndim == 1 and feature.shape == (1,):
            array = array[:, None]
        if array.shape[1:] != feature.shape:
            raise UsageError(
                f"{name!r}: rows of {list(array.shape[1:])} were given, not {list(feature.shape)}"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            return array.astype(feature.dtype, copy=False)
    except (ValueError, TypeError, IndexError) as error:
        raise UsageError(f"{name!r}: these are no rows of numbers ({error})") from error
