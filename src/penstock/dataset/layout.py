"""Where the files of a LeRobot dataset lie and what is in them: v3.0, and v2.1 for older readers.

```
v3.0                                                        v2.1
meta/info.json  meta/stats.json  meta/tasks.parquet         meta/info.json  meta/tasks.jsonl
meta/episodes/chunk-000/file-000.parquet                    meta/episodes.jsonl  meta/episodes_stats.jsonl
data/chunk-000/file-000.parquet                             data/chunk-000/episode_000000.parquet
videos/<key>/chunk-000/file-000.mp4                         videos/chunk-000/<key>/episode_000000.mp4
```
No other file knows these names and schemas.
"""  # noqa: E501

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import Self

from penstock.errors import DataError, UsageError
from penstock.media.depth import DepthCoding

Version = Literal["v3.0", "v2.1"]
VERSIONS: tuple[Version, ...] = get_args(Version)

INFO_PATH = "meta/info.json"
EPISODES_TEMPLATE = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
PRIVATE_FOLDER = ".penstock"  # plan and units; other programs ignore it
_PLACEHOLDER = re.compile(r"\{(\w+)(?::0?(\d{1,2})d)?\}")  # a width of a billion is a bomb


def expand(template: str, **values: int | str) -> str:
    """Fill a path template of info.json; the result never leaves the dataset's folder.

    Only plain `{name}` and `{name:03d}` are understood: templates come from files.

    Raises:
        DataError: For an unknown placeholder, an absolute path, or one with "..".
    """

    def fill(match: re.Match[str]) -> str:
        name, width = match.groups()
        value = values.get(name)
        if value is None or (width is not None and not isinstance(value, int)):
            raise DataError(f"the path template {template!r} asks for an unknown {name!r}")
        return f"{value:0{int(width)}d}" if width is not None else str(value)

    rest = _PLACEHOLDER.sub("", template) if len(template) < 4096 else "{"
    path = "" if re.search("[{}]", rest) else _PLACEHOLDER.sub(fill, template)
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or re.search(r"[\\\x00]", path):
        raise DataError(f"the path template {template[:200]!r} does not lead into the dataset")
    return path


@dataclass(frozen=True)
class Format:
    """One version of LeRobot's format: where its files lie, and what else differs.

    Attributes:
        episodes: The folder of the episodes' records, or their list.
        stats: Statistics of the whole dataset; None where it has none.
        info_keys: The keys of info.json that only this version has, and their types.
        hf_list: What the datasets library of its time calls a list.
        shares_files: Whether a file holds many episodes; otherwise it is numbered by its episode.
    """

    version: Version
    data_template: str
    video_template: str
    tasks: str
    episodes: str
    episode_stats: str
    stats: str | None
    info_keys: Mapping[str, tuple[type, ...]]
    hf_list: str
    shares_files: bool

    @property
    def meta_files(self) -> set[str]:
        """The files of metadata that a build writes, beside info.json."""
        return {self.tasks, self.episodes, self.episode_stats, *filter(None, [self.stats])}

    def data_path(self, chunk: int, file: int) -> str:
        """Return the path of a data file; in v2.1 `file` is the number of the episode."""
        return expand(self.data_template, **self.numbers(chunk, file))

    def video_path(self, key: str, chunk: int, file: int) -> str:
        """Return the path of a video file; in v2.1 `file` is the number of the episode."""
        return expand(self.video_template, video_key=key, **self.numbers(chunk, file))

    def numbers(self, chunk: int, file: int) -> dict[str, int]:
        """Return what its templates call the numbers of a file."""
        if self.shares_files:
            return {"chunk_index": chunk, "file_index": file}
        return {"episode_chunk": chunk, "episode_index": file}


_NUMBER = (int, float)
V30 = Format(
    "v3.0",
    "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    "meta/tasks.parquet",
    "meta/episodes",
    "meta/episodes",
    "meta/stats.json",
    {"data_files_size_in_mb": _NUMBER, "video_files_size_in_mb": _NUMBER},
    "List",
    shares_files=True,
)
V21 = Format(
    "v2.1",
    "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "meta/tasks.jsonl",
    "meta/episodes.jsonl",
    "meta/episodes_stats.jsonl",
    None,
    {"total_videos": (int,), "total_chunks": (int,)},
    "Sequence",  # known before "List" was
    shares_files=False,
)
FORMATS: Mapping[str, Format] = MappingProxyType({"v3.0": V30, "v2.1": V21})
# The keys of every info.json and the types that their values must have.
INFO_KEYS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "codebase_version": (str,),
        "robot_type": (str, type(None)),
        "total_episodes": (int,),
        "total_frames": (int,),
        "total_tasks": (int,),
        "chunks_size": (int,),
        "fps": _NUMBER,
        "splits": (dict,),
        "data_path": (str,),
        "video_path": (str, type(None)),
        "features": (dict,),
    }
)

STATS = ("min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99")
QUANTILES: Mapping[str, float] = MappingProxyType(
    {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
)
_NUMERIC = ("float32", "float64", "bool", "int8", "int16", "int32", "int64")
DTYPES: Mapping[str, pa.DataType] = MappingProxyType(
    {
        name: pa.type_for_alias(name)
        for name in (*_NUMERIC, "uint8", "uint16", "uint32", "uint64", "string")
    }
)
IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

_MAX_DIMENSIONS = 5


@dataclass(frozen=True)
class Feature:
    """One feature of a dataset, as info.json states it.

    Args:
        dtype: "float32", "int64", …, "string", or "image" / "video" for pictures.
        shape: Of one frame; pictures (channels, height, width) or (height, width, channels).
        names: Of the elements: a list, or a dict of lists, or None.
        info: What is known of a video: codec, pix_fmt, fps, ….
    """

    dtype: str
    shape: tuple[int, ...]
    names: list[Any] | dict[str, Any] | None = None
    info: dict[str, Any] | None = None

    @property
    def is_picture(self) -> bool:
        """Whether a frame of it is a picture, in the parquet or in a video."""
        return self.dtype in ("image", "video")

    @property
    def picture_size(self) -> tuple[int, int, int]:
        """Return (channels, height, width), whichever order the shape has."""
        names = self.names if isinstance(self.names, list) else []
        if len(self.shape) != 3:
            raise DataError(f"a picture's shape must have 3 numbers, this one is {self.shape}")
        first, second, third = self.shape
        last = bool(names) and str(names[-1]).startswith("channel")
        if last or (not names and third in (1, 3, 4) and first not in (1, 3, 4)):
            return third, first, second
        return first, second, third

    @property
    def is_depth(self) -> bool:
        """Whether it is a depth map, under lerobot's new or old name for that."""
        info = self.info or {}
        return bool(info.get("is_depth_map") or info.get("video.is_depth_map"))

    def same_coding(self, info: Mapping[str, Any] | None) -> bool:
        """Whether the distances of another video of such frames are coded as here."""
        if not self.is_depth or self.dtype != "video":
            return True
        return DepthCoding.from_info(self.info) == DepthCoding.from_info(info)

    @property
    def size(self) -> int:
        """How many elements a frame has."""
        return math.prod(self.shape)

    @property
    def has_stats(self) -> bool:
        """Whether it has statistics: every feature but text."""
        return self.dtype != "string"

    def to_json(self) -> dict[str, Any]:
        """Return it as info.json holds it."""
        found = {"dtype": self.dtype, "shape": list(self.shape), "names": self.names}
        return found if self.info is None else found | {"info": self.info}

    @classmethod
    def from_json(cls, name: str, value: object) -> Self:
        """Read it from info.json; a DataError names what is wrong."""
        if not isinstance(value, dict):
            raise DataError(f"feature {name!r} is not an object in info.json")
        dtype, shape, names = value.get("dtype"), value.get("shape"), value.get("names")
        if not isinstance(dtype, str) or not (dtype in DTYPES or dtype in ("image", "video")):
            raise DataError(f"feature {name!r} has an unknown dtype {dtype!r}")
        sizes = shape if isinstance(shape, list | tuple) else None
        if sizes is None or not all(type(n) is int and 0 < n < 1 << 31 for n in sizes):
            raise DataError(f"feature {name!r} has a bad shape {shape!r}")
        if not 0 < len(sizes) <= _MAX_DIMENSIONS:
            raise DataError(f"feature {name!r} has {len(sizes)} dimensions: 1 to 5 are possible")
        if not isinstance(names, list | dict | None):
            raise DataError(f"feature {name!r} has bad names: a list or an object is needed")
        info = value.get("info", value.get("video_info"))
        if not isinstance(info, dict | None):
            raise DataError(f"feature {name!r} has a bad info: an object is needed")
        return cls(dtype, tuple(sizes), names, info)


_COUNTER = Feature("int64", (1,))
AUTO_FEATURES: Mapping[str, Feature] = MappingProxyType(
    {"timestamp": Feature("float32", (1,))}
    | dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), _COUNTER)
)


@dataclass(frozen=True)
class FileLimits:
    """How large the files of a v3.0 dataset may grow; an episode never spans two."""

    data_mb: int = 100
    video_mb: int = 200
    files_per_chunk: int = 1000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UsageError(f"{name} must be 1 or more, not {value}")


@dataclass(frozen=True)
class Spec:
    """What does not change while a dataset grows."""

    features: dict[str, Feature]
    fps: int
    robot_type: str | None
    version: Version
    limits: FileLimits

    @property
    def format(self) -> Format:
        """Where its files lie."""
        return FORMATS[self.version]

    @property
    def video_keys(self) -> list[str]:
        """The features that are videos."""
        return [name for name, feature in self.features.items() if feature.dtype == "video"]


def own_features(features: Mapping[str, Feature]) -> dict[str, Feature]:
    """Return the features without the five that every dataset has."""
    return {name: value for name, value in features.items() if name not in AUTO_FEATURES}


def all_features(features: Mapping[str, Feature]) -> dict[str, Feature]:
    """Return the features with the five that every dataset has, in lerobot's order."""
    return own_features(features) | dict(AUTO_FEATURES)


def check_name(name: str) -> None:
    """Refuse a feature name that cannot be a folder and a column."""
    bad = not name or "/" in name or "\\" in name or name.startswith(".") or name.endswith(".")
    if bad or not name.isprintable() or len(name.encode(errors="replace")) > 200:
        raise UsageError(
            f"{name[:80]!r} cannot name a feature: no slash, no dot at an end, at most 200 bytes"
        )


def check_task(text: str) -> None:
    """Refuse a task that is no text: JSON may hold half a pair of UTF-16, and no file can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the task {text[:80]!r} is no text: relabel the episode") from error


def read_features(found: Mapping[str, Any]) -> dict[str, Feature]:
    """Read the features of info.json; their names are checked too."""
    for name in found:
        try:
            check_name(name)
        except UsageError as error:
            raise DataError(str(error)) from error
    return {name: Feature.from_json(name, value) for name, value in found.items()}


def episodes_path(chunk: int, file: int) -> str:
    """Return the path of a file of episode records (v3.0)."""
    return expand(EPISODES_TEMPLATE, chunk_index=chunk, file_index=file)


def info_json(spec: Spec, episodes: int, frames: int, tasks: int) -> dict[str, Any]:
    """Return info.json, with the keys in lerobot's order."""
    format_, limits, videos = spec.format, spec.limits, len(spec.video_keys)
    own = {
        "data_files_size_in_mb": limits.data_mb,
        "video_files_size_in_mb": limits.video_mb,
        "total_videos": videos * episodes,
        "total_chunks": -(-episodes // limits.files_per_chunk),
    }
    sizes = {name: own[name] for name in format_.info_keys}
    chunks = {"chunks_size": limits.files_per_chunk}
    return {
        "codebase_version": spec.version,
        "robot_type": spec.robot_type,
        "total_episodes": episodes,
        "total_frames": frames,
        "total_tasks": tasks,
        **(chunks | sizes if format_.shares_files else sizes | chunks),
        "fps": spec.fps,
        "splits": {"train": f"0:{episodes}"} if episodes else {},
        "data_path": format_.data_template,
        "video_path": format_.video_template if videos else None,
        "features": {name: f.to_json() for name, f in all_features(spec.features).items()},
    }


def arrow_type(feature: Feature) -> pa.DataType:
    """Return the type of a feature's column; a video has none."""
    if feature.dtype == "image":
        return IMAGE_TYPE
    element = DTYPES[feature.dtype]
    if feature.shape == (1,):
        return element
    if len(feature.shape) == 1:
        return pa.list_(element, feature.shape[0])
    return _nested(element, feature)  # the storage of datasets.Array2D and its kin


def _nested(element: pa.DataType, feature: Feature) -> pa.DataType:
    """Return lists in lists, one for each dimension."""
    for _ in feature.shape:
        element = pa.list_(element)
    return element


def arrow_schema(features: Mapping[str, Feature], version: Version) -> pa.Schema:
    """Return the schema of a data file, with the metadata that the datasets library reads.

    Videos have no column. The five automatic features are added if they are missing.
    """
    columns = {n: f for n, f in all_features(features).items() if f.dtype != "video"}
    described = {name: _hf_feature(feature, version) for name, feature in columns.items()}
    metadata = {"huggingface": json.dumps({"info": {"features": described}})}
    fields = [pa.field(name, arrow_type(feature)) for name, feature in columns.items()]
    return pa.schema(fields, metadata)


def _hf_feature(feature: Feature, version: Version) -> dict[str, Any]:
    if feature.dtype == "image":
        return {"_type": "Image"}
    value = {"dtype": feature.dtype, "_type": "Value"}
    if feature.shape == (1,):
        return value
    if len(feature.shape) == 1:
        kind = FORMATS[version].hf_list
        return {"feature": value, "length": feature.shape[0], "_type": kind}
    kind = f"Array{len(feature.shape)}D"
    return {"shape": list(feature.shape), "dtype": feature.dtype, "_type": kind}


def episodes_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Return the schema of a file of episode records (v3.0)."""
    complete = all_features(features)
    whole, real = pa.int64(), pa.float64()
    fields: list[tuple[str, pa.DataType]] = [
        ("episode_index", whole),
        ("tasks", pa.list_(pa.string())),
        ("length", whole),
        ("data/chunk_index", whole),
        ("data/file_index", whole),
        ("dataset_from_index", whole),
        ("dataset_to_index", whole),
    ]
    for name, feature in complete.items():
        if feature.dtype == "video":
            fields += [(f"videos/{name}/{n}", whole) for n in ("chunk_index", "file_index")]
            fields += [(f"videos/{name}/{n}_timestamp", real) for n in ("from", "to")]
    for name, feature in complete.items():
        if feature.has_stats:
            fields += [(f"stats/{name}/{stat}", _stat_type(feature, stat)) for stat in STATS]
    fields += [("meta/episodes/chunk_index", whole), ("meta/episodes/file_index", whole)]
    return pa.schema(fields)


def record_columns(
    lengths: NDArray[np.int64],
    firsts: NDArray[np.int64],
    tasks: Sequence[Sequence[str]],
    data: Sequence[tuple[int, int]],
    videos: Mapping[str, Sequence[tuple[int, int, int]]],
    fps: float,
) -> dict[str, Any]:
    """Return the columns of episode records (v3.0) that say where the episodes lie.

    `data` are the (chunk, file) of their rows, `videos` per camera the (chunk, file, first frame).
    """
    found: dict[str, Any] = {
        "tasks": tasks,
        "length": lengths,
        "data/chunk_index": [chunk for chunk, _ in data],
        "data/file_index": [file for _, file in data],
        "dataset_from_index": firsts,
        "dataset_to_index": firsts + lengths,
    }
    for camera, places in videos.items():
        shown = np.array(places, np.int64).reshape(-1, 3)
        # Divided once, never summed: durations that are added up drift away from the frames.
        found |= {
            f"videos/{camera}/chunk_index": shown[:, 0],
            f"videos/{camera}/file_index": shown[:, 1],
            f"videos/{camera}/from_timestamp": shown[:, 2] / fps,
            f"videos/{camera}/to_timestamp": (shown[:, 2] + lengths) / fps,
        }
    return found


def _stat_type(feature: Feature, stat: str) -> pa.DataType:
    if stat == "count":
        return pa.list_(pa.int64())
    element = pa.float64()
    if stat in ("min", "max") and not feature.is_picture and "float" not in feature.dtype:
        kinds = {"bool": pa.bool_(), "uint64": pa.uint64()}
        element = kinds.get(feature.dtype, pa.int64())
    return _nested(element, feature)  # a picture's are (channels, 1, 1)


def tasks_table(tasks: Iterable[str]) -> pa.Table:
    """Return tasks.parquet: the task texts are the index of a pandas frame, as lerobot reads it."""
    texts = list(tasks)
    index = "__index_level_0__"

    def column(name: str | None, field: str | None, kind: str, numpy: str, more: Any = None) -> Any:
        found = {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": numpy}
        return found | {"metadata": more}

    pandas = {
        "index_columns": [index],
        "column_indexes": [column(None, None, "unicode", "object", {"encoding": "UTF-8"})],
        "columns": [
            column("task_index", "task_index", "int64", "int64"),
            column(None, index, "unicode", "object"),
        ],
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.3.3",
    }
    schema = pa.schema(
        [("task_index", pa.int64()), (index, pa.string())], {"pandas": json.dumps(pandas)}
    )
    return pa.table([pa.array(range(len(texts)), pa.int64()), pa.array(texts, pa.string())], schema)
