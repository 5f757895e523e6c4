"""Prepare a dataset that others wrote for more episodes: count it, and rebuild its statistics.

Statistics of numbers are computed from all its rows. Those of pictures are taken from stats.json:
mean, std, min and max stay exact when new pictures are added, quantiles become weighted means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from penstock.errors import DataError, UsageError
from penstock.lerobot import layout, opening
from penstock.lerobot.episode import AnyStats, write_stats
from penstock.lerobot.journal import Base
from penstock.lerobot.layout import PRIVATE_FOLDER, QUANTILES, Feature, FileLimits
from penstock.lerobot.parquet import open_parquet, read_table, slices
from penstock.lerobot.state import Spec, make_folders
from penstock.lerobot.stats import PictureStats, Stats, VectorStats, new_stats

_BASE_STATS = "stats-base.pack"
_ROWS = 8192


def adopt(root: Path, given: Spec) -> tuple[Base, Spec]:
    """Return what the dataset holds, and its own description.

    Raises:
        UsageError: It does not fit the new episodes.
        DataError: It cannot be read.
    """
    try:
        info = json.loads((root / layout.INFO_PATH).read_bytes())
        version = opening.check_version(info["codebase_version"], root)
        features = layout.read_features(info)
        own = {n: f for n, f in features.items() if n not in layout.AUTO_FEATURES}
        limits = FileLimits(
            int(info.get("data_files_size_in_mb", 100)),
            int(info.get("video_files_size_in_mb", 200)),
            int(info.get("chunks_size", 1000)),
        )
        fps, episodes, frames = info["fps"], int(info["total_episodes"]), int(info["total_frames"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{root / layout.INFO_PATH} cannot be used ({error!r})") from error
    for what, a, b in (("version", version, given.version), ("fps", fps, given.fps)):
        if a != b:
            raise UsageError(f"{root} has {what} {a}, and the new episodes have {b}")
    opening.check_fits(root, own, given.features)
    templates = layout.DATA_TEMPLATES[version], layout.VIDEO_TEMPLATES[version]
    if info.get("data_path") != templates[0] or info.get("video_path") not in (templates[1], None):
        raise UsageError(f"{root} keeps its files under other names than lerobot's: not supported")
    spec = Spec(own, int(fps), info.get("robot_type"), version, limits)
    base = Base(episodes, frames, _tasks(root, version), info=info)
    if version == "v2.1":
        names = (layout.TASKS_JSONL, layout.EPISODES_JSONL, layout.EPISODES_STATS_JSONL)
        base.sizes = {name: _jsonl_size(root / name) for name in names}
        return base, spec
    base.next_file = _next_files(root, spec)
    make_folders(root / PRIVATE_FOLDER)
    write_stats(root / PRIVATE_FOLDER / _BASE_STATS, _statistics(root, spec, frames))
    base.stats = _BASE_STATS
    return base, spec


def foreign_schema(root: Path, base: Base) -> pa.Schema:
    """Return the schema of the episode records that are there: new ones must have the same."""
    files = opening.numbered(root, layout.EPISODES_FOLDER, 1000)
    if not files:
        raise DataError(f"{root / layout.EPISODES_FOLDER} holds no episodes")
    with open_parquet(root / files[0][1]) as file:
        return file.schema_arrow.remove_metadata()


def fitting_stats(
    stats: Mapping[str, AnyStats], features: Mapping[str, Feature], schema: pa.Schema
) -> dict[str, Stats]:
    """Return the statistics of an episode in the shapes that the other episodes' have.

    lerobot counts all rows of a matrix as one: (a, b) gives statistics of (b,).
    """
    found: dict[str, Stats] = {}
    for name, state in stats.items():
        feature = features[name]
        place = schema.get_field_index(f"stats/{name}/mean")
        flat = place >= 0 and not pa.types.is_nested(schema.field(place).type.value_type)
        if isinstance(state, VectorStats) and len(feature.shape) > 1 and flat:
            feature = replace(feature, shape=feature.shape[-1:])
            state = state.folded(feature.shape[0])
        found[name] = state.to_json(feature)
    return found


def fitting_table(row: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """Return the record of an episode in the types that the other records have."""
    columns = []
    for field in schema:
        value = pa.array([row.get(field.name)])
        try:
            columns.append(value.cast(field.type))
        except pa.ArrowException as error:
            raise DataError(
                f"{field.name!r} of the new episode is {value.type}, and the dataset has "
                f"{field.type}: append to a dataset of one making"
            ) from error
    return pa.Table.from_arrays(columns, schema=schema)


def _tasks(root: Path, version: layout.Version) -> list[str]:
    if version == "v3.0":
        return layout.read_tasks(read_table(root / layout.TASKS_PATH))
    try:
        lines = (root / layout.TASKS_JSONL).read_text("utf-8").splitlines()
        found = [json.loads(line) for line in lines if line.strip()]
        return [str(task["task"]) for task in sorted(found, key=lambda task: task["task_index"])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{root / layout.TASKS_JSONL} cannot be read ({error!r})") from error


def _jsonl_size(path: Path) -> int:
    """Return the size of a file of lines; its last line must be whole."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
    if data and not data.endswith(b"\n"):
        raise DataError(f"{path} does not end with a line feed: its last line may be cut")
    return len(data)


def _next_files(root: Path, spec: Spec) -> dict[str, int]:
    folders = {"data": "data", "episodes": layout.EPISODES_FOLDER}
    folders |= {f"videos/{key}": f"videos/{key}" for key in spec.video_keys}
    found = {}
    for kind, folder in folders.items():
        files = opening.numbered(root, folder, spec.limits.files_per_chunk)
        found[kind] = files[-1][0] + 1 if files else 0
    return found


def _statistics(root: Path, spec: Spec, frames: int) -> dict[str, AnyStats]:
    complete = layout.all_features(spec.features)
    stats = {n: new_stats(f) for n, f in complete.items() if layout.has_stats(f)}
    numeric = {n: s for n, s in stats.items() if isinstance(s, VectorStats)}
    rows = 0
    for _, path in opening.numbered(root, "data", spec.limits.files_per_chunk):
        with open_parquet(root / path) as file:
            rows += _add_rows(file, numeric, complete, path)
    if rows != frames:
        raise DataError(f"{root} has {rows} rows, and info.json says {frames}: check it first")
    try:
        known = json.loads((root / layout.STATS_PATH).read_bytes())
        for name, state in stats.items():
            if isinstance(state, PictureStats) and name in known:
                state.prior = _prior(known[name], state.channels)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{root / layout.STATS_PATH} cannot be used ({error!r})") from error
    return stats


def _add_rows(
    file: pq.ParquetFile,
    stats: dict[str, VectorStats],
    features: dict[str, Feature],
    path: str,
) -> int:
    missing = [name for name in stats if name not in file.schema_arrow.names]
    if missing:
        raise DataError(f"{path} has no column {missing[0]!r}")
    rows = 0
    for table in slices(file, _ROWS):
        for name, state in stats.items():
            state.add(_values(table.column(name), features[name]))
        rows += table.num_rows
    return rows


def _values(column: Any, feature: Feature) -> NDArray[Any]:
    flat = column.combine_chunks()
    while pa.types.is_nested(flat.type):
        flat = flat.flatten()
    return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(column), *feature.shape)


def _prior(known: dict[str, Any], channels: int) -> dict[str, list[Any]]:
    """Read the statistics of pictures; quantiles that are not there are taken for the mean."""
    found: dict[str, list[Any]] = {}
    for name in ("min", "max", "mean", "std", *QUANTILES):
        value = known.get(name, known["mean"])
        found[name] = np.array(value, np.float64).reshape(channels, 1, 1).tolist()
    found["count"] = [int(np.ravel(known["count"])[0])]
    return found
