"""Slots of compressed frames, against a dict of the frames themselves."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import errors
from penstock.replay import arena as module
from penstock.replay.arena import Arena, CompressedColumns
from penstock.replay.frames import choose_codec

SIZE = 400


def frames(count, seed):
    """Frames that compress differently well: as many different bytes as the seed says."""
    random = np.random.default_rng(seed)
    return random.integers(0, 1 + seed % 200, (count, SIZE)).astype(np.uint8)


def make(slots, names=("lz4", "bits"), **options):
    sample = frames(16, 3).reshape(16, 20, 20)
    codecs = [choose_codec(sample, name) for name in names]
    return CompressedColumns(slots, dict(enumerate(codecs)), **options)


def read(columns, column, slots):
    out = np.empty((len(slots), SIZE), np.uint8)
    columns.decode(column, np.asarray(slots, np.int64), out)
    return out


def put(columns, slots, content):
    encoded = {
        column: columns.codecs[column].encode(content) for column in range(len(columns.codecs))
    }
    columns.store(np.asarray(slots, np.int64), encoded)


def test_slots_hold_what_was_put_there_last():
    columns = make(10)
    first, second = frames(6, 5), frames(3, 7)
    put(columns, [0, 1, 2, 3, 4, 9], first)
    put(columns, [2, 9, 5], second)
    for column in (0, 1):
        wanted = np.stack([first[0], second[0], second[1], second[2], first[4]])
        np.testing.assert_array_equal(read(columns, column, [0, 2, 9, 5, 4]), wanted)
        assert (columns.slot_bytes() > 0).tolist() == [True] * 6 + [False] * 3 + [True]
    with pytest.raises(errors.UsageError, match="slot 7 was never written"):
        read(columns, 0, [0, 7])
    columns.clear()
    assert columns.arena.live_bytes == 0
    with pytest.raises(errors.UsageError, match="slot 0 was never written"):
        read(columns, 0, [0])


def test_one_column_alone():
    columns = make(4)
    content = frames(4, 9)
    put(columns, range(4), content)
    columns.store(np.array([1]), {1: columns.codecs[1].encode(content[:1])})
    np.testing.assert_array_equal(read(columns, 0, [1]), content[1:2])
    np.testing.assert_array_equal(read(columns, 1, [1]), content[:1])


def test_what_is_gathered_can_be_stored_elsewhere():
    columns, other = make(50), make(50)
    content = frames(50, 4)
    put(columns, range(20), content[:20])
    put(columns, range(20, 50), content[20:])
    for slots in (range(50), range(49, -1, -1), [3, 4, 5, 19, 20, 21, 7], [8], []):
        where = np.array(slots, np.int64)
        parts = {column: columns.gather(column, where) for column in (0, 1)}
        for column, (data, lengths) in parts.items():
            expected = columns.codecs[column].encode(content[where])
            np.testing.assert_array_equal(data, expected[0])
            np.testing.assert_array_equal(lengths, expected[1])
        other.store(where, parts)
        np.testing.assert_array_equal(read(other, 1, where), content[where])


def test_a_column_that_does_not_fit_leaves_all_as_they_are(tmp_path, monkeypatch):
    columns = make(10)
    content = frames(10, 6)
    put(columns, range(10), content)
    before = columns.arena.live_bytes
    encoded = {column: columns.codecs[column].encode(frames(3, 8)) for column in (0, 1)}
    original, calls = Arena.put_many, []

    def full(self, data, lengths):
        calls.append(1)
        if len(calls) == 2:
            raise errors.StorageError("no space")
        return original(self, data, lengths)

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "put_many", full)
        with pytest.raises(errors.StorageError):
            columns.store(np.arange(3), encoded)
    assert columns.arena.live_bytes == before
    for column in (0, 1):
        np.testing.assert_array_equal(read(columns, column, range(10)), content)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_run_of_writes(data, tmp_path_factory):
    """Small chunks and no patience, so that everything moves; with and without a disk."""
    slots = data.draw(st.integers(1, 60))
    spill = data.draw(st.booleans())
    options = {"memory_bytes": 6000, "spill_dir": tmp_path_factory.mktemp("s")} if spill else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Arena", functools.partial(Arena, chunk_bytes=2000))
        patch.setattr(module, "_SLACK_BYTES", 0)
        columns = make(slots, ("lz4", "raw"), **options)
        truth = {}
        for turn in range(data.draw(st.integers(1, 15))):
            chosen = data.draw(st.lists(st.integers(0, slots - 1), min_size=1, unique=True))
            content = frames(len(chosen), data.draw(st.integers(0, 400)) + turn)
            put(columns, chosen, content)
            truth.update(zip(chosen, content, strict=True))
            rows = list(truth)
            for column in (0, 1):
                np.testing.assert_array_equal(
                    read(columns, column, rows), np.stack(list(truth.values()))
                )
        lengths = [columns.gather(column, np.array(rows))[1].sum() for column in (0, 1)]
        assert columns.arena.live_bytes == sum(lengths)


def test_random_overwriting_does_not_grow(monkeypatch):
    monkeypatch.setattr(module, "Arena", functools.partial(Arena, chunk_bytes=1 << 14))
    monkeypatch.setattr(module, "_SLACK_BYTES", 1 << 16)
    columns = make(500)
    random = np.random.default_rng(0)
    put(columns, range(500), frames(500, 199))
    for turn in range(300):
        put(columns, random.choice(500, 20, replace=False), frames(20, 150 + turn % 50))
    assert columns.nbytes < 3 * columns.arena.live_bytes


def test_empty_frames():
    columns = CompressedColumns(3, {0: choose_codec(np.empty((3, 0), np.uint8))})
    columns.store(np.arange(3), {0: (np.empty(0, np.uint8), np.zeros(3, np.int64))})
    columns.decode(0, np.arange(3), np.empty((3, 0), np.uint8))
