"""Statistics against numpy, and against themselves when split and merged in any way."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.dataset import stats as module
from penstock.dataset.layout import QUANTILES, Feature
from penstock.dataset.stats import (
    PictureStats,
    VectorStats,
    picture_stride,
    read_stats,
    sample_indices,
    write_stats,
)
from penstock.errors import CorruptFile, UsageError

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
tables = hnp.arrays(np.float32, st.tuples(st.integers(1, 60), st.integers(1, 3)), elements=numbers)


def of(rows: np.ndarray) -> VectorStats:
    found = VectorStats(rows.shape[1])
    found.add(rows)
    return found


def same_bins(a: VectorStats, b: VectorStats) -> bool:
    x, y = a.to_arrays(), b.to_arrays()
    return all(np.array_equal(x[k], y[k]) for k in ("rows", "count", "shift", "keys", "counts"))


@settings(max_examples=150, deadline=None)
@given(tables)
def test_small_data_are_exact(rows: np.ndarray) -> None:
    found = of(rows)
    values = rows.astype(np.float64)
    for share in QUANTILES.values():
        np.testing.assert_allclose(
            found.quantile(share), np.quantile(values, share, axis=0), rtol=1e-9, atol=1e-300
        )
    scale = np.abs(values).max(0) + 1e-300
    assert np.all(np.abs(found.mean - values.mean(0)) <= 1e-12 * scale)
    spread = np.sqrt(found.m2 / len(rows))
    assert np.all(np.abs(spread - values.std(0)) <= 1e-12 * scale)
    assert np.array_equal(found.low, values.min(0))
    assert np.array_equal(found.high, values.max(0))


@settings(max_examples=60, deadline=None)
@given(tables, st.lists(st.integers(0, 60), max_size=4), st.randoms(use_true_random=False))
def test_any_split_gives_the_same_bins(rows: np.ndarray, cuts: list[int], dice: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_BINS", 8)  # so that bins are joined at once
        whole = of(rows)
        parts = [of(part) for part in np.split(rows, sorted(min(c, len(rows)) for c in cuts))]
        dice.shuffle(parts)  # type: ignore[attr-defined]
        while len(parts) > 1:
            first = parts.pop(dice.randrange(len(parts)))  # type: ignore[attr-defined]
            parts[dice.randrange(len(parts))].merge(first)  # type: ignore[attr-defined]
    assert same_bins(whole, parts[0])
    scale = np.abs(rows.astype(np.float64)).max(0) + 1e-300
    assert np.all(np.abs(parts[0].mean - whole.mean) <= 1e-12 * scale)


def test_large_data_are_within_the_stated_bound() -> None:
    rows = np.random.default_rng(0).normal(size=(200_000, 2)).astype(np.float32)
    rows[:, 1] = np.exp(rows[:, 1] * 4)
    found = VectorStats(2)
    for part in np.array_split(rows, 37):
        found.add(part)
    bits = found.to_arrays()["shift"]
    assert 0 < bits.max() < 23
    for share in QUANTILES.values():
        exact = np.quantile(rows.astype(np.float64), share, axis=0)
        bound = np.abs(exact) * 2.0 ** (bits - 23) + 1e-6
        assert np.all(np.abs(found.quantile(share) - exact) <= bound)
    exact_std = rows.astype(np.float64).std(0)
    np.testing.assert_allclose(np.sqrt(found.m2 / found.count), exact_std, rtol=1e-12)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    rows = np.array([[1, np.nan], [2, np.nan], [np.inf, np.nan], [3, np.nan]], np.float32)
    found = of(rows)
    assert found.non_finite == 5
    result = found.to_json(Feature("float32", (2,)))
    assert result["mean"] == [2.0, 0.0]
    assert result["max"] == [3.0, 0.0]
    assert result["q50"] == [2.0, 0.0]
    assert result["count"] == [4]
    assert np.isfinite([x for value in result.values() for x in value]).all()


def test_whole_numbers_and_shapes() -> None:
    found = of(np.arange(1001)[:, None])
    result = found.to_json(Feature("int64", (1,)))
    assert result["min"] == [0] and result["max"] == [1000] and type(result["max"][0]) is int
    assert result["q10"] == [100.0]
    matrix = of(np.arange(24, dtype=np.float32).reshape(4, 6)).to_json(Feature("float32", (2, 3)))
    assert np.shape(matrix["mean"]) == (2, 3)
    with pytest.raises(UsageError):
        found.add(np.zeros((3, 2)))


def test_the_state_survives_storage() -> None:
    rows = np.random.default_rng(1).normal(size=(20_000, 3))
    rows[5, 1] = np.nan
    found = of(rows)
    again = VectorStats.from_arrays(found.to_arrays())
    assert same_bins(found, again)
    assert again.to_json(Feature("float32", (3,))) == found.to_json(Feature("float32", (3,)))
    with pytest.raises(CorruptFile):
        VectorStats.from_arrays({"count": np.zeros(3)})


@settings(max_examples=40, deadline=None)
@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 3), st.just(6), st.just(5), st.just(3))))
def test_pictures_are_exact(pictures: np.ndarray) -> None:
    found, other = PictureStats(), PictureStats()
    for number, picture in enumerate(pictures):
        (found if number % 2 else other).add(picture)
    found.merge(other)
    values = pictures.reshape(-1, 3) / 255
    result = PictureStats.from_arrays(found.to_arrays()).to_json()
    for name, expected in (
        ("mean", values.mean(0)),
        ("std", values.std(0)),
        ("min", values.min(0)),
        ("max", values.max(0)),
        *((name, np.quantile(values, share, axis=0)) for name, share in QUANTILES.items()),
    ):
        assert np.shape(result[name]) == (3, 1, 1)
        np.testing.assert_allclose(np.ravel(result[name]), expected, atol=1e-12)
    assert result["count"] == [len(pictures)]


def test_large_pictures_are_sampled_like_lerobot_does() -> None:
    assert [picture_stride(*size) for size in ((480, 640), (299, 200), (720, 1280))] == [4, 1, 8]
    assert [len(sample_indices(n)) for n in (1, 50, 100, 1000, 10_000)] == [1, 50, 100, 100, 251]
    assert sample_indices(1000)[[0, -1]].tolist() == [0, 999]
    assert len(sample_indices(0)) == 0


def test_depth_statistics_are_millimetres() -> None:
    found = PictureStats(1, depth=True)
    found.add(np.array([[100, 200], [300, 60000]], np.uint16))
    result = found.to_json()
    assert result["max"] == [[[60000.0]]] and result["mean"] == [[[15150.0]]]


def test_pictures_known_only_by_their_statistics_are_weighted_in() -> None:
    rng = np.random.default_rng(3)
    old, new = (rng.integers(low, low + 100, (4, 8, 8, 3)).astype(np.uint8) for low in (0, 120))
    prior, found, whole = PictureStats(), PictureStats(), PictureStats()
    for picture in old:
        prior.add(picture)
        whole.add(picture)
    found.prior = prior.to_json()
    assert found.to_json() == prior.to_json()
    for picture in new:
        found.add(picture)
        whole.add(picture)
    a, b = PictureStats.from_arrays(found.to_arrays()).to_json(), whole.to_json()
    for name in ("mean", "std", "min", "max"):
        np.testing.assert_allclose(a[name], b[name], atol=1e-12)
    assert a["count"] == [8]


def test_truth_values_have_statistics_of_truth_values() -> None:
    result = of(np.array([[True], [False], [True], [True]])).to_json(Feature("bool", (1,)))
    assert (result["min"], result["max"], result["mean"]) == ([False], [True], [0.75])
    assert type(result["min"][0]) is bool


def test_statistics_know_what_they_weigh(tmp_path):
    """A build adds as many up at once as fit into some megabytes: small ones count, too."""
    stats = VectorStats(4)
    stats.add(np.ones((8, 4)))
    write_stats(tmp_path / "stats.pack", {"action": stats})
    read_stats(tmp_path / "stats.pack")
    tracemalloc.start()
    try:
        many = [read_stats(tmp_path / "stats.pack") for _ in range(200)]
        used_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    told = sum(each.nbytes for one in many for each in one.values())
    assert used_bytes / 2 < told < used_bytes * 2
