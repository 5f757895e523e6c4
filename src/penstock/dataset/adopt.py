"""Take over a dataset that no unit knows: others wrote it, or an earlier version of penstock.

Its episodes stay in front, as they are. Statistics of numbers are computed from all its rows. Those
of pictures are taken from stats.json: mean, std, min and max stay exact when new pictures are
added, quantiles become weighted means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.dataset import layout, metadata
from penstock.dataset.episode_stats import to_column
from penstock.dataset.layout import AUTO_FEATURES, PRIVATE_FOLDER, Feature, FileLimits
from penstock.dataset.plan import Base, Spec, parse_line
from penstock.dataset.reader import Dataset
from penstock.dataset.stats import (
    AnyStats,
    PictureStats,
    VectorStats,
    known_picture_stats,
    new_stats,
    read_stats,
)
from penstock.dataset.tables import Table, inside
from penstock.errors import DataError, UsageError

JOURNAL = f"{PRIVATE_FOLDER}/journal.jsonl"  # of format 1
OLD_SETTINGS = f"{PRIVATE_FOLDER}/settings.json"  # of format 1
_NUMBERED = re.compile(r".*chunk-(\d+)/file-(\d+)\.(?:parquet|mp4)")
_OLD_STATS = re.compile(r"stats-(?:base|\d+)\.pack")
_MOST_LINE_BYTES = 64 << 20


def spec_of(root: Path) -> Spec:
    """Return what a dataset on disk is.

    Raises:
        DataError: It cannot be read.
        UsageError: Its files have other names than lerobot's.
    """
    info = metadata.read_info(root)
    format_ = info.format
    usual = info.data_path == format_.data_template
    if not usual or info.video_path not in (format_.video_template, None):
        raise UsageError(f"{root} keeps its files under other names than lerobot's: not supported")
    if type(info.fps) is not int:
        raise UsageError(f"{root} has {info.fps} frames per second: whole numbers can be added to")
    try:
        limits = FileLimits(
            int(info.raw.get("data_files_size_in_mb", 100)),
            int(info.raw.get("video_files_size_in_mb", 200)),
            info.chunks_size,
        )
    except UsageError as error:
        raise DataError(f"{root / layout.INFO_PATH} cannot be used ({error})") from error
    own = {name: f for name, f in info.features.items() if name not in AUTO_FEATURES}
    return Spec(own, info.fps, info.raw.get("robot_type"), format_.version, limits)


def adopt(root: Path, sources: list[dict[str, Any]]) -> tuple[Base, dict[str, AnyStats]]:
    """Return what a dataset on disk holds, and its statistics; nothing is written.

    Args:
        root: The dataset's folder.
        sources: Where its episodes came from, as far as that is known.

    Raises:
        DataError: It cannot be read, or contradicts itself.
    """
    dataset = Dataset(root)
    spec = spec_of(root)
    files: dict[str, set[str]] = {"data": set(), "episodes": set()}
    for record in metadata.read_episodes(root, metadata.read_info(root)):
        files["data"].add(record.data_file)
        files["episodes"].add(record.source)
        for key, span in record.videos.items():
            files.setdefault(f"videos/{key}", set()).add(span.file)
    per_chunk = spec.limits.files_per_chunk
    next_file = {kind: _next_number(names, per_chunk) for kind, names in files.items()}
    base = Base(len(dataset), dataset.total_frames, dataset.tasks, next_file, dataset.info, sources)
    if spec.format.stats is None:
        return base, {}
    return base, _journal_stats(root, base) or _statistics(dataset, spec)


def _next_number(names: set[str], per_chunk: int) -> int:
    """Return the number of the file behind all these."""
    matches = [_NUMBERED.fullmatch(name) for name in names]
    return max((int(m[1]) * per_chunk + int(m[2]) + 1 for m in matches if m), default=0)


def journal_records(root: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of an earlier version's journal, up to the first that is not whole."""
    path = inside(root, JOURNAL)
    if not path.is_file():
        return
    with path.open("rb") as file:
        while line := file.readline(_MOST_LINE_BYTES):
            try:
                record = parse_line(line)
            except ValueError:
                return
            if isinstance(record, dict):
                yield record


def journal_sources(root: Path, episodes: int) -> list[dict[str, Any]]:
    """Return where the episodes of an earlier version's dataset came from."""
    found = []
    for record in journal_records(root):
        number, source = record.get("episode"), record.get("source")
        if type(number) is int and number < episodes and isinstance(source, dict):
            found.append(source)
    return found


def _journal_stats(root: Path, base: Base) -> dict[str, AnyStats]:
    """Return the statistics that an earlier version kept, if they are of these very episodes."""
    episodes, name = 0, None
    for record in journal_records(root):
        if record.get("kind") in ("base", "episode"):
            count = len(record["lengths"]) if "lengths" in record else 1
            if record["kind"] == "base":
                episodes = int(record.get("episodes", 0))
            else:
                episodes = int(record.get("episode", 0)) + count
            name = record.get("stats")
    if episodes != base.episodes or not isinstance(name, str) or not _OLD_STATS.fullmatch(name):
        return {}
    path = inside(root, f"{PRIVATE_FOLDER}/{name}")
    if not path.is_file():
        return {}
    return {name: stats for name, stats in read_stats(path).items() if name not in AUTO_FEATURES}


def _statistics(dataset: Dataset, spec: Spec) -> dict[str, AnyStats]:
    stats = {n: new_stats(f) for n, f in spec.features.items() if f.has_stats}
    numeric = {n: state for n, state in stats.items() if isinstance(state, VectorStats)}
    if numeric:
        for _, rows in dataset.scan(list(numeric)):
            for name, vector in numeric.items():
                vector.add(rows[name])
    known = dataset.stats()
    for name, state in stats.items():
        if isinstance(state, PictureStats):
            try:
                state.prior = known_picture_stats(known[name], spec.features[name])
            except (LookupError, ValueError) as error:
                where = f"{layout.V30.stats} in {dataset.path}"
                raise DataError(f"{where}, {name!r}: it cannot be used ({error!r})") from error
    return stats


def fitting_table(
    table: pa.Table,
    schema: pa.Schema,
    features: Mapping[str, Feature],
    rows_of: Callable[[int, str], NDArray[Any]],
) -> pa.Table:
    """Return records of episodes in the shapes and types that the other records have.

    lerobot counts all rows of a matrix as one: (a, b) gives statistics of (b,).

    Args:
        table: Our records.
        schema: Of the others.
        features: Of the dataset.
        rows_of: Returns all rows of a feature of an episode, by the episode's number.
    """
    columns = []
    for column in schema:
        name, _, stat = column.name.removeprefix("stats/").rpartition("/")
        feature = features.get(name)
        if column.name not in table.column_names:
            value: Any = pa.nulls(table.num_rows, column.type)
        elif feature and stat != "count" and len(feature.shape) > 1 and not feature.is_picture:
            value = table.column(column.name).combine_chunks()
            if not pa.types.is_nested(column.type.value_type):
                numbers = table.column("episode_index").to_pylist()
                value = _folded(feature, stat, (rows_of(number, name) for number in numbers))
        else:
            value = table.column(column.name).combine_chunks()
        try:
            columns.append(value.cast(column.type))
        except pa.ArrowException as error:
            raise DataError(
                f"{column.name!r} of the new episode is {value.type}, and the dataset has "
                f"{column.type}: append to a dataset of one making"
            ) from error
    return pa.Table.from_arrays(columns, schema=schema)


def _folded(feature: Feature, stat: str, episodes: Iterator[NDArray[Any]]) -> pa.Array:
    """Return a statistic of each episode over all rows of its matrices."""
    flat = Feature(feature.dtype, feature.shape[-1:])
    found = []
    for rows in episodes:
        stats = VectorStats(flat.shape[0])
        stats.add(rows.reshape(-1, flat.shape[0]))
        found.append(np.array(stats.to_json(flat)[stat]))
    values = np.array(found)
    return to_column(values, flat.shape, pa.list_(pa.from_numpy_dtype(values.dtype)))


def read_schema(root: Path, name: str) -> pa.Schema:
    """Return the schema of a file of records."""
    with Table(root, name) as table:
        return table.schema.remove_metadata()
