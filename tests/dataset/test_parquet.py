"""Parquet files: pages stay small."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from penstock.dataset.layout import IMAGE_TYPE
from penstock.dataset.parquet import new_parquet, open_parquet

PICTURE_BYTES = 50_000


def test_a_few_pictures_are_read_without_the_whole_row_group(tmp_path: Path) -> None:
    """A reader holds whole pages, and a writer measures a page only after every batch."""
    column = pa.array([{"bytes": bytes(PICTURE_BYTES), "path": f"{i}"} for i in range(600)])
    table = pa.table({"image": column.cast(IMAGE_TYPE)})
    path = tmp_path / "a.parquet"
    with new_parquet(path, table.schema, compression="none", dictionary=False) as writer:
        writer.write_table(table)
    del column, table
    before = pa.total_allocated_bytes()
    with open_parquet(path) as file:
        assert file.num_row_groups == 1
        batches = file.iter_batches(batch_size=4, use_threads=False)
        assert next(batches).num_rows == 4
        assert pa.total_allocated_bytes() - before < 100 * PICTURE_BYTES
