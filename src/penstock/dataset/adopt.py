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
from penstock.dataset.layout import PRIVATE_FOLDER, Feature, FileLimits, Spec, own_features
from penstock.dataset.plan import Base, parse_line
from penstock.dataset.reader import Dataset
from penstock.dataset.stats import AnyStats, PictureStats, VectorStats, known_picture_stats
from penstock.dataset.tables import inside, to_column
from penstock.errors import DataError, UsageError

JOURNAL = f"{PRIVATE_FOLDER}/journal.jsonl"  # of format 1
OLD_SETTINGS = f"{PRIVATE_FOLDER}/settings.json"  # of format 1
_NUMBERED = re.compile(r".*chunk-(\d+)/file-(\d+)\.(?:parquet|mp4)")
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
    own = own_features(info.features)
    return Spec(own, info.fps, info.raw.get("robot_type"), format_.version, limits)


def adopt(root: Path, sources: list[dict[str, Any]]) -> tuple[Base, dict[str, AnyStats]]:
    """Return what a dataset on disk holds, and its statistics; nothing is written."""
    dataset = Dataset(root)
    if not len(dataset):  # lerobot has made it, and recorded nothing yet
        return Base(info=dataset.info, sources=sources), {}
    spec = spec_of(root)
    files: dict[str, set[str]] = {"data": set(), "episodes": set()}
    for record in dataset.records:
        files["data"].add(record.data_file)
        files["episodes"].add(record.source)
        for key, span in record.videos.items():
            files.setdefault(f"videos/{key}", set()).add(span.file)
    next_file = {}
    for kind, names in files.items():
        found = [match for match in map(_NUMBERED.fullmatch, names) if match]
        numbers = [int(m[1]) * spec.limits.files_per_chunk + int(m[2]) for m in found]
        next_file[kind] = max(numbers, default=-1) + 1
    base = Base(len(dataset), dataset.total_frames, dataset.tasks, next_file, dataset.info, sources)
    if spec.format.stats is None:
        return base, {}
    return base, _statistics(dataset, spec)


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


def _statistics(dataset: Dataset, spec: Spec) -> dict[str, AnyStats]:
    features = {n: f for n, f in spec.features.items() if f.has_stats}
    numeric = {n: VectorStats(f.size) for n, f in features.items() if not f.is_picture}
    for _, rows in dataset.scan(list(numeric)) if numeric else ():
        for name, vector in numeric.items():
            vector.add(rows[name])
    known, stats = dataset.stats(), dict[str, AnyStats](numeric)
    for name, feature in features.items():
        if feature.is_picture:
            stats[name] = pictures = PictureStats.of(feature)
            try:
                pictures.prior = known_picture_stats(known[name], feature, dataset.total_frames)
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

    lerobot counts all rows of a matrix as one: (a, b) gives statistics of (b,): `rows_of`
    returns all rows of a feature of an episode.
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
