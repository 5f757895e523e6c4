"""Write the data file of one episode from its staged rows, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import CorruptFile
from penstock.lerobot.episode import StagedEpisode
from penstock.lerobot.layout import AUTO_FEATURES, Feature, Version, arrow_schema
from penstock.lerobot.parquet import GroupWriter, new_parquet, open_parquet, slices
from penstock.lerobot.stats import VectorStats

_ROWS = 4096
_PICTURE_ROWS = 64


def write_data(
    path: Path,
    staged: StagedEpisode,
    features: Mapping[str, Feature],
    version: Version,
    *,
    episode_index: int,
    first_index: int,
    task_index: int,
) -> dict[str, VectorStats]:
    """Write a data file with the five automatic columns added.

    Returns:
        The statistics of those columns.
    """
    stats = {name: VectorStats(1) for name in AUTO_FEATURES}
    schema = arrow_schema(features, version)
    done = 0
    with ExitStack() as stack:
        groups = GroupWriter(stack.enter_context(new_parquet(path, schema)))
        for columns, count in _staged_rows(staged, stack):
            frame = np.arange(done, done + count, dtype=np.int64)
            added: dict[str, Any] = {
                "timestamp": (frame / staged.fps).astype(np.float32),
                "frame_index": frame,
                "episode_index": np.full(count, episode_index, np.int64),
                "index": frame + first_index,
                "task_index": np.full(count, task_index, np.int64),
            }
            for name, values in added.items():
                stats[name].add(values[:, None])
            columns |= {name: pa.array(values) for name, values in added.items()}
            groups.add(pa.table([columns[name] for name in schema.names], schema))
            done += count
        groups.flush()
        if done != staged.frames:
            raise CorruptFile(f"{staged.folder} has {done} rows, and {staged.frames} were staged")
    return stats


def _staged_rows(staged: StagedEpisode, stack: ExitStack) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the columns of a few frames at a time, pictures joined with numbers."""
    pictures = [name for name, feature in staged.features.items() if feature.dtype == "image"]
    rows = _PICTURE_ROWS if pictures else _ROWS
    sources: dict[str, Iterator[pa.Table]] = {}
    if any(not feature.is_picture for feature in staged.features.values()):
        file = stack.enter_context(open_parquet(staged.folder / "rows.parquet"))
        sources[""] = slices(file, rows)
    for name in pictures:
        file = stack.enter_context(open_parquet(staged.folder / f"{name}.images.parquet"))
        sources[name] = slices(file, rows)
    for start in range(0, staged.frames, rows):
        count = min(rows, staged.frames - start)
        columns: dict[str, Any] = {}
        for name, source in sources.items():
            table = next(source, None)
            if table is None or table.num_rows != count:
                raise CorruptFile(f"{staged.folder} is damaged: {name or 'rows'} ends too early")
            if name:
                columns[name] = table.column("image")
            else:
                columns |= {key: table.column(key) for key in table.column_names}
        yield columns, count
