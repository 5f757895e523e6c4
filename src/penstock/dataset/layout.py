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
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Literal, get_args

import pyarrow as pa
from typing_extensions import Self

from penstock.errors import DataError, UsageError

Version = Literal["v3.0", "v2.1"]
VERSIONS: tuple[Version, ...] = get_args(Version)

INFO_PATH = "meta/info.json"
STATS_PATH = "meta/stats.json"  # v3.0 only
TASKS_PATH = "meta/tasks.parquet"  # v3.0 only
EPISODES_FOLDER = "meta/episodes"  # v3.0 only
TASKS_JSONL = "meta/tasks.jsonl"  # v2.1 only
EPISODES_JSONL = "meta/episodes.jsonl"  # v2.1 only
EPISODES_STATS_JSONL = "meta/episodes_stats.jsonl"  # v2.1 only
PRIVATE_FOLDER = ".penstock"  # our journal and state; other programs ignore it

EPISODES_TEMPLATE = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA_TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "v3.0": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "v2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    }
)
VIDEO_TEMPLATES: Mapping[str, str] = MappingProxyType(
    {
        "v3.0": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "v2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
)

STATS = ("min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99")
QUANTILES: Mapping[str, float] = MappingProxyType(
    {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
)
DTYPES: Mapping[str, pa.DataType] = MappingProxyType(
    {
        "float32": pa.float32(),
        "float64": pa.float64(),
        "int8": pa.int8(),
        "int16": pa.int16(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "uint8": pa.uint8(),
        "uint16": pa.uint16(),
        "uint32": pa.uint32(),
        "uint64": pa.uint64(),
        "bool": pa.bool_(),
        "string": pa.string(),
    }
)
IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

# The keys of info.json and the types that their values must have.
_NUMBER = (int, float)
INFO_KEYS: Mapping[str, Mapping[str, tuple[type, ...]]] = MappingProxyType(
    {
        "v3.0": {
            "codebase_version": (str,),
            "robot_type": (str, type(None)),
            "total_episodes": (int,),
            "total_frames": (int,),
            "total_tasks": (int,),
            "chunks_size": (int,),
            "data_files_size_in_mb": _NUMBER,
            "video_files_size_in_mb": _NUMBER,
            "fps": _NUMBER,
            "splits": (dict,),
            "data_path": (str,),
            "video_path": (str, type(None)),
            "features": (dict,),
        },
        "v2.1": {
            "codebase_version": (str,),
            "robot_type": (str, type(None)),
            "total_episodes": (int,),
            "total_frames": (int,),
            "total_tasks": (int,),
            "total_videos": (int,),
            "total_chunks": (int,),
            "chunks_size": (int,),
            "fps": _NUMBER,
            "splits": (dict,),
            "data_path": (str,),
            "video_path": (str, type(None)),
            "features": (dict,),
        },
    }
)
_MAX_DIMENSIONS = 5
_PLACEHOLDER = re.compile(r"\{(\w+)(?::0?(\d{1,2})d)?\}")  # a width of a billion is a bomb


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

    def to_json(self) -> dict[str, Any]:
        """Return it as info.json holds it."""
        found: dict[str, Any] = {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "names": self.names,
        }
        if self.info is not None:
            found["info"] = self.info
        return found

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


AUTO_FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        "timestamp": Feature("float32", (1,)),
        "frame_index": Feature("int64", (1,)),
        "episode_index": Feature("int64", (1,)),
        "index": Feature("int64", (1,)),
        "task_index": Feature("int64", (1,)),
    }
)


@dataclass(frozen=True)
class FileLimits:
    """How large the files of a v3.0 dataset may grow; an episode never spans two."""

    data_mb: int = 100
    video_mb: int = 200
    files_per_chunk: int = 1000

    def __post_init__(self) -> None:
        for name in ("data_mb", "video_mb", "files_per_chunk"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be 1 or more, not {getattr(self, name)}")


def all_features(features: Mapping[str, Feature]) -> dict[str, Feature]:
    """Return the features with the five that every dataset has, in lerobot's order."""
    own = {name: value for name, value in features.items() if name not in AUTO_FEATURES}
    return own | dict(AUTO_FEATURES)


def check_name(name: str) -> None:
    """Refuse a feature name that cannot be a folder and a column."""
    bad = not name or "/" in name or "\\" in name or name.startswith(".") or name.endswith(".")
    if bad or not name.isprintable() or len(name.encode(errors="replace")) > 200:
        raise UsageError(
            f"{name[:80]!r} cannot name a feature: no slash, no dot at an end, at most 200 bytes"
        )


def read_features(info: Mapping[str, Any]) -> dict[str, Feature]:
    """Read the features of info.json; their names are checked too."""
    found = info.get("features")
    if not isinstance(found, dict):
        raise DataError("info.json has no features")
    for name in found:
        try:
            check_name(name)
        except UsageError as error:
            raise DataError(f"info.json: {error}") from error
    return {name: Feature.from_json(name, value) for name, value in found.items()}


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

    path = _PLACEHOLDER.sub(fill, template) if len(template) < 4096 else ""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or re.search(r"[{}\\\x00]", path):
        raise DataError(f"the path template {template[:200]!r} does not lead into the dataset")
    return path


def data_path(version: Version, chunk: int, file: int) -> str:
    """Return the path of a data file; in v2.1 `file` is the number of the episode."""
    return expand(DATA_TEMPLATES[version], **_place_values(version, chunk, file))


def video_path(version: Version, key: str, chunk: int, file: int) -> str:
    """Return the path of a video file; in v2.1 `file` is the number of the episode."""
    return expand(VIDEO_TEMPLATES[version], video_key=key, **_place_values(version, chunk, file))


def episodes_path(chunk: int, file: int) -> str:
    """Return the path of a file of episode records (v3.0)."""
    return expand(EPISODES_TEMPLATE, chunk_index=chunk, file_index=file)


def _place_values(version: Version, chunk: int, file: int) -> dict[str, int]:
    if version == "v3.0":
        return {"chunk_index": chunk, "file_index": file}
    return {"episode_chunk": chunk, "episode_index": file}


def place(number: int, files_per_chunk: int) -> tuple[int, int]:
    """Return (chunk, file) of the n-th file of a v3.0 dataset."""
    return number // files_per_chunk, number % files_per_chunk


def info_json(
    *,
    version: Version,
    features: Mapping[str, Feature],
    fps: int,
    robot_type: str | None,
    total_episodes: int,
    total_frames: int,
    total_tasks: int,
    limits: FileLimits,
) -> dict[str, Any]:
    """Return info.json, with the keys in lerobot's order."""
    complete = all_features(features)
    videos = sum(feature.dtype == "video" for feature in complete.values())
    info: dict[str, Any] = {
        "codebase_version": version,
        "robot_type": robot_type,
        "total_episodes": total_episodes,
        "total_frames": total_frames,
        "total_tasks": total_tasks,
    }
    if version == "v3.0":
        info["chunks_size"] = limits.files_per_chunk
        info["data_files_size_in_mb"] = limits.data_mb
        info["video_files_size_in_mb"] = limits.video_mb
    else:
        info["total_videos"] = videos * total_episodes
        info["total_chunks"] = -(-total_episodes // limits.files_per_chunk)
        info["chunks_size"] = limits.files_per_chunk
    info["fps"] = fps
    info["splits"] = {"train": f"0:{total_episodes}"} if total_episodes else {}
    info["data_path"] = DATA_TEMPLATES[version]
    info["video_path"] = VIDEO_TEMPLATES[version] if videos else None
    info["features"] = {name: feature.to_json() for name, feature in complete.items()}
    return info


def arrow_type(feature: Feature) -> pa.DataType:
    """Return the type of a feature's column; a video has none."""
    if feature.dtype == "image":
        return IMAGE_TYPE
    element = DTYPES[feature.dtype]
    if feature.shape == (1,):
        return element
    if len(feature.shape) == 1:
        return pa.list_(element, feature.shape[0])
    nested = element
    for _ in feature.shape:  # the storage of datasets.Array2D and its kin
        nested = pa.list_(nested)
    return nested


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
        # Libraries of v2.1's time know a list only by its old name.
        kind = "List" if version == "v3.0" else "Sequence"
        return {"feature": value, "length": feature.shape[0], "_type": kind}
    kind = f"Array{len(feature.shape)}D"
    return {"shape": list(feature.shape), "dtype": feature.dtype, "_type": kind}


def has_stats(feature: Feature) -> bool:
    """Whether a feature has statistics: every one but text."""
    return feature.dtype != "string"


def episodes_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Return the schema of a file of episode records (v3.0)."""
    complete = all_features(features)
    fields: list[tuple[str, pa.DataType]] = [
        ("episode_index", pa.int64()),
        ("tasks", pa.list_(pa.string())),
        ("length", pa.int64()),
        ("data/chunk_index", pa.int64()),
        ("data/file_index", pa.int64()),
        ("dataset_from_index", pa.int64()),
        ("dataset_to_index", pa.int64()),
    ]
    for name, feature in complete.items():
        if feature.dtype == "video":
            fields += [
                (f"videos/{name}/chunk_index", pa.int64()),
                (f"videos/{name}/file_index", pa.int64()),
                (f"videos/{name}/from_timestamp", pa.float64()),
                (f"videos/{name}/to_timestamp", pa.float64()),
            ]
    for name, feature in complete.items():
        if has_stats(feature):
            fields += [(f"stats/{name}/{stat}", _stat_type(feature, stat)) for stat in STATS]
    fields += [("meta/episodes/chunk_index", pa.int64()), ("meta/episodes/file_index", pa.int64())]
    return pa.schema(fields)


def _stat_type(feature: Feature, stat: str) -> pa.DataType:
    if stat == "count":
        return pa.list_(pa.int64())
    nested = pa.float64()
    if stat in ("min", "max") and not feature.is_picture and "float" not in feature.dtype:
        nested = pa.bool_() if feature.dtype == "bool" else pa.int64()
    for _ in feature.shape:  # a picture's are (channels, 1, 1)
        nested = pa.list_(nested)
    return nested


def tasks_table(tasks: Iterable[str]) -> pa.Table:
    """Return tasks.parquet: the task texts are the index of a pandas frame, as lerobot reads it."""
    texts = list(tasks)
    index = "__index_level_0__"

    def column(name: str | None, field: str | None, kind: str, numpy: str) -> dict[str, Any]:
        return {
            "name": name,
            "field_name": field,
            "pandas_type": kind,
            "numpy_type": numpy,
            "metadata": None,
        }

    names = column(None, None, "unicode", "object") | {"metadata": {"encoding": "UTF-8"}}
    pandas = {
        "index_columns": [index],
        "column_indexes": [names],
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


def read_tasks(table: pa.Table) -> list[str]:
    """Read tasks.parquet of any lerobot version: the texts, in the order of their numbers."""
    names = [name for name in ("task", "__index_level_0__") if name in table.column_names]
    if not names or "task_index" not in table.column_names:
        raise DataError(f"{TASKS_PATH} has no task and task_index: {table.column_names[:8]}")
    numbers = table.column("task_index").to_pylist()
    found = dict(zip(numbers, table.column(names[0]).to_pylist(), strict=True))
    if sorted(found, key=str) != sorted(range(len(found)), key=str) or len(found) != len(numbers):
        raise DataError(f"{TASKS_PATH}: its task numbers are not 0 to {len(numbers) - 1}")
    return [str(found[number]) for number in range(len(found))]
