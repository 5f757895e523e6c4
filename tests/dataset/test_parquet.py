"""Parquet files: pages stay small."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from penstock.dataset.layout import IMAGE_TYPE
from penstock.dataset.tables import Table, new_parquet

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
    with Table(tmp_path, path.name) as read:
        assert next(read.pieces(None, most=4)).num_rows == 4
        assert pa.total_allocated_bytes() - before < 100 * PICTURE_BYTES
