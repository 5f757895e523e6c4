"""Pieces in chunks: found again, given back, moved, spilled."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import StorageError, UsageError
from penstock.replay.arena import Arena
from penstock.replay.frames import RawFrames


def piece(number, size):
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def same(arena, held):
    for location, content in held:
        assert (arena.read(int(location), content.size) == content).all()
    if held:
        # And by address, as the kernels see it.
        sizes = {content.size for _, content in held if content.size}
        for size in sizes:
            chosen = [(where, content) for where, content in held if content.size == size]
            out = np.empty((len(chosen), size), np.uint8)
            where = np.array([where for where, _ in chosen], np.int64)
            lengths = np.full(len(chosen), size, np.int64)
            RawFrames(size).decode(arena.addresses(where), lengths, out)
            assert (out == np.stack([content for _, content in chosen])).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "many", "free", "compact"]), st.integers(0, 10**6)),
        max_size=60,
    ),
    st.booleans(),
)
def test_pieces_are_found_whatever_happens(tmp_path_factory, operations, spill):
    folder = tmp_path_factory.mktemp("spill") if spill else None
    arena = Arena(4096, memory_bytes=8192 if spill else None, spill_dir=folder)
    held = []
    for number, (what, value) in enumerate(operations):
        if what == "put":
            content = piece(number, 1 + value % 6000)
            held.append((arena.put([content], content.size), content))
        elif what == "many":
            contents = [piece(number * 100 + k, 1 + (value >> k) % 300) for k in range(20)]
            lengths = np.array([content.size for content in contents])
            where = arena.put_many(np.concatenate(contents), lengths)
            held += list(zip(where.tolist(), contents, strict=True))
        elif what == "free" and held:
            gone = held[value % len(held) :][:10]
            held = [entry for entry in held if not any(entry is other for other in gone)]
            arena.free(
                np.array([where for where, _ in gone], np.int64),
                np.array([content.size for _, content in gone], np.int64),
            )
        elif what == "compact":
            table = np.array([where for where, _ in held], np.int64)
            lengths = np.array([content.size for _, content in held], np.int64)
            moved = arena.compact(table, lengths)
            if moved is not None:
                held = [(int(w), content) for w, (_, content) in zip(moved, held, strict=True)]
        same(arena, held)
        assert arena.live_bytes == sum(content.size for _, content in held)
        assert arena.nbytes + arena.spilled_bytes >= arena.live_bytes
        assert not spill or arena.nbytes <= 8192 + 6000


def test_first_in_first_out_keeps_the_memory_close_to_what_lives():
    arena = Arena(1 << 20)
    held = []
    for number in range(3000):
        content = np.full(5000, number % 256, np.uint8)
        held.append((arena.put([content], content.size), content))
        if len(held) > 1000:
            where, content = held.pop(0)
            arena.free(np.array([where]), np.array([content.size]))
    assert arena.live_bytes == 5_000_000
    assert arena.nbytes < 1.4 * arena.live_bytes
    same(arena, held)


def test_scattered_holes_are_closed_by_compact():
    arena = Arena(64 * 1024)
    contents = [piece(k, 1000) for k in range(2000)]
    where = arena.put_many(np.concatenate(contents), np.full(2000, 1000))
    gone = np.arange(2000) % 4 != 0
    arena.free(where[gone], np.full(int(gone.sum()), 1000))
    assert arena.nbytes > 3.5 * arena.live_bytes
    kept = where[~gone]
    moved = arena.compact(kept, np.full(kept.size, 1000))
    assert moved is not None
    assert arena.nbytes < 1.5 * arena.live_bytes
    same(arena, list(zip(moved.tolist(), contents[::4], strict=True)))
    assert arena.compact(moved, np.full(kept.size, 1000)) is None


def test_spilled_chunks_leave_no_file_and_little_memory(tmp_path):
    arena = Arena(1 << 16, memory_bytes=1 << 18, spill_dir=tmp_path / "new")
    contents = [piece(k, 4000) for k in range(500)]
    held = [(arena.put([content], content.size), content) for content in contents]
    assert arena.nbytes <= 1 << 18
    assert arena.spilled_bytes > 1_700_000
    assert list((tmp_path / "new").iterdir()) == []
    same(arena, held)
    arena.free(np.array([w for w, _ in held]), np.full(500, 4000))
    assert arena.spilled_bytes == 0
    assert arena.live_bytes == 0


def test_bad_settings(tmp_path):
    with pytest.raises(UsageError, match="spill_dir"):
        Arena(memory_bytes=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        Arena(memory_bytes=1, spill_dir=tmp_path / "file" / "below")


def test_pieces_that_came_before_a_failure_are_given_back(monkeypatch):
    arena = Arena()
    arena.put_many(np.zeros(1000, np.uint8), np.array([1000]))
    before, original, chunks = arena.live_bytes, Arena._new_chunk, []

    def limited(self, size):
        chunks.append(size)
        if len(chunks) > 2:
            raise MemoryError
        return original(self, size)

    monkeypatch.setattr(Arena, "_new_chunk", limited)
    with pytest.raises(MemoryError):
        arena.put_many(np.zeros(1_200_000, np.uint8), np.full(4, 300_000))
    assert arena.live_bytes == before
    assert arena.nbytes < 300_000
