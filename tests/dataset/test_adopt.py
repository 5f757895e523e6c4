"""Records of new episodes in the shapes and types of a dataset that others wrote."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import DataError
from penstock.dataset.adopt import fitting_stats, fitting_table
from penstock.dataset.layout import QUANTILES, Feature
from penstock.dataset.stats import PictureStats, VectorStats

FEATURES = {
    "matrix": Feature("float32", (2, 3)),
    "state": Feature("float32", (3,)),
    "cam": Feature("image", (3, 4, 4), ["channels", "height", "width"]),
}


def numbers(levels: int) -> pa.DataType:
    kind = pa.float64()
    for _ in range(levels):
        kind = pa.list_(kind)
    return kind


def stats() -> tuple[np.ndarray, dict]:
    rows = np.random.default_rng(0).normal(size=(40, 2, 3)).astype(np.float32)
    matrix, state, cam = VectorStats(6), VectorStats(3), PictureStats(3)
    matrix.add(rows)
    state.add(rows[:, 0])
    cam.add(np.full((4, 4, 3), 9, np.uint8))
    return rows, {"matrix": matrix, "state": state, "cam": cam}


def test_statistics_of_a_matrix_have_the_shape_that_lerobot_gives_them() -> None:
    rows, states = stats()
    kinds = [("stats/matrix/mean", numbers(1)), ("stats/state/mean", numbers(1))]
    found = fitting_stats(states, FEATURES, pa.schema([*kinds, ("stats/cam/mean", numbers(3))]))
    flat = rows.reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose(found["matrix"]["mean"], flat.mean(0))
    np.testing.assert_allclose(found["matrix"]["std"], flat.std(0))
    for name, share in QUANTILES.items():
        np.testing.assert_allclose(found["matrix"][name], np.quantile(flat, share, axis=0))
    assert found["matrix"]["count"] == [40]
    assert np.shape(found["state"]["mean"]) == (3,)
    assert np.shape(found["cam"]["mean"]) == (3, 1, 1)


def test_statistics_of_a_matrix_stay_whole_where_they_are_so() -> None:
    _, states = stats()
    schema = pa.schema([("stats/matrix/mean", numbers(2))])
    assert np.shape(fitting_stats(states, FEATURES, schema)["matrix"]["mean"]) == (2, 3)


def test_values_get_the_types_of_the_dataset() -> None:
    row = {"a": [1], "b": [True], "c": [2], "d": [[0.5, 1]], "e": 7, "not asked for": 1}
    kinds = {
        "a": pa.list_(pa.bool_()),
        "b": pa.list_(pa.int64()),
        "c": pa.list_(pa.float64()),
        "d": pa.list_(pa.list_(pa.float32())),
        "e": pa.int32(),
        "unknown": pa.list_(pa.float64()),
    }
    table = fitting_table(row, pa.schema(kinds))
    assert table.schema == pa.schema(kinds)
    assert table.to_pylist() == [
        {"a": [True], "b": [1], "c": [2.0], "d": [[0.5, 1.0]], "e": 7, "unknown": None}
    ]
    with pytest.raises(DataError, match="'a' of the new episode"):
        fitting_table({"a": [[1.0]]}, pa.schema(kinds))
