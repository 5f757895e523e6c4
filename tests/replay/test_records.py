"""Records: any frame out of any episode, and tables that lead nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptFile, UsageError
from penstock.replay.arena import Arena
from penstock.replay.episodes import store
from penstock.replay.episodes.store import Column
from penstock.replay.keys import Field


@st.composite
def columns(draw: st.DrawFn) -> tuple[Column, list[np.ndarray[Any, Any]]]:
    dtype = draw(st.sampled_from(["uint8", "float32", "int16"]))
    shape = draw(st.sampled_from([(), (1,), (12, 20), (3, 5, 20), (300,)]))
    codec = draw(st.sampled_from(["auto", "raw", "lz4", "bits", "zstd", "sparse"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    noisy = draw(st.booleans())
    episodes = []
    for length in lengths:
        values = rng.integers(0, 200 if noisy else 2, (length, *shape)).astype(dtype)
        episodes.append(values * (rng.random(values.shape) < 0.3))
    field = Field(("x",), dtype, shape)
    try:
        column = Column.choose(field, episodes[0].astype(dtype), codec)
    except UsageError:  # sparse and bits do not hold everything
        column = Column.choose(field, episodes[0].astype(dtype), "lz4")
    return column, [episode.astype(dtype) for episode in episodes]


@settings(max_examples=150, deadline=None)
@given(columns(), st.integers(0, 2**32))
def test_any_frame_comes_back(case: tuple[Column, list[np.ndarray[Any, Any]]], seed: int) -> None:
    column, episodes = case
    column = Column.from_config(column.config())
    arena = Arena(chunk_bytes=4096)
    locations = []
    for episode in episodes:
        record = column.encode(episode)
        assert column.from_file(record, len(episode)) is record
        locations.append(arena.put([record], record.size))
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(episodes), 25)
    lengths = np.array([len(episode) for episode in episodes])[rows]
    steps = rng.integers(0, lengths)
    out = np.full((25, column.field.size), 0xAA, np.uint8)
    column.gather(arena.addresses(np.array(locations)[rows]), steps, out)
    for k in range(25):
        assert out[k].tobytes() == episodes[rows[k]][steps[k]].tobytes()


@settings(max_examples=200, deadline=None)
@given(columns(), st.integers(0, 2**32), st.integers(0, 2**32 - 1))
def test_a_changed_table_is_refused_or_harmless(
    case: tuple[Column, list[np.ndarray[Any, Any]]], seed: int, value: int
) -> None:
    column, episodes = case
    if column.plain:
        return
    rng = np.random.default_rng(seed)
    record = np.array(column.encode(episodes[0]))
    units = int(record[:4].view("<u4")[0]) // 4
    at = int(rng.integers(0, units))
    record[4 * at : 4 * at + 4] = np.array([value], "<u4").view(np.uint8)
    try:
        column.from_file(record, len(episodes[0]))
    except CorruptFile:
        return
    table = record[: 4 * units].view("<u4").astype(np.int64)  # what passes stays inside
    assert table[0] == 4 * units
    assert (np.diff(table) > 0).all()
    assert table[-1] == record.size


def test_a_plain_record_is_its_frames() -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    column = Column.choose(Field(("x",), "float32", (3,)), values, "raw")
    assert column.encode(values).tobytes() == values.tobytes()
    with pytest.raises(CorruptFile):
        column.from_file(column.encode(values)[:-1], 4)


def test_an_episode_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_LARGEST_RECORD", 100_000)  # 4 GB, in truth
    frames = np.random.default_rng(0).integers(0, 256, (9, 20_000)).astype(np.uint8)
    column = Column.choose(Field(("x",), "uint8", (20_000,)), frames, "lz4")
    with pytest.raises(UsageError, match="too large for lz4"):
        column.encode(frames)
