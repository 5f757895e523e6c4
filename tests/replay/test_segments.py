"""The segment log: what is committed is there, what is not is gone, whatever happens between."""

import errno
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import errors
from penstock.core.codecs import Planes
from penstock.core.files import FolderLock
from penstock.core.pack import Item, PackReader, PackWriter
from penstock.replay.segments import MANIFEST, LogReader, SegmentLog


def numbers(n):
    return np.arange(n, dtype=np.int64) * (n + 1)


def files(folder):
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))


def content(folder):
    """Everything that a reader sees."""
    with LogReader(folder) as log:
        found = []
        for name in log.segments:
            with log.open_segment(name) as segment:
                found.append((segment.index.meta, {n: segment.read(n) for n in segment.names}))
        return log.state, {n: log.item(n) for n in log.names}, found


def save(folder, *counts, keep_old=True):
    with SegmentLog(folder) as log:
        names = [log.append([Item("data", numbers(n))], {"n": n}) for n in counts]
        log.commit({"counts": counts}, keep=[*(log.segments if keep_old else []), *names])
        return names


def test_what_is_committed_is_read(tmp_path):
    folder = tmp_path / "a" / "replay"
    with SegmentLog(folder) as log:
        assert log.segments == []
        assert log.digest == ""
        packed = Item("packed", np.arange(100_000, dtype=np.float32), codec=Planes())
        first = log.append([Item("data", numbers(5)), packed], {"episodes": [1, 2]})
        second = log.append([Item("data", numbers(700_000))], {})
        log.commit({"a": {"b": 1.5}}, [Item("live", numbers(3))], keep=[second, first])
        assert log.segments == [second, first]
    with LogReader(folder) as log:
        assert (log.state, log.segments, log.names) == (
            {"a": {"b": 1.5}},
            [second, first],
            ["live"],
        )
        np.testing.assert_array_equal(log.item("live"), numbers(3))
        with log.open_segment(first) as segment:
            assert segment.index.meta == {"episodes": [1, 2]}
            np.testing.assert_array_equal(segment.read("data"), numbers(5))
            np.testing.assert_array_equal(segment.read("packed"), packed.values)
        with log.open_segment(second) as segment:
            assert segment.entry("data").block_bytes == 1 << 20
            np.testing.assert_array_equal(segment.read("data"), numbers(700_000))


def test_only_new_segments_are_written_and_old_ones_go(tmp_path):
    first, second = save(tmp_path, 10, 20)
    before = (tmp_path / second).stat()
    with SegmentLog(tmp_path) as log:
        third = log.append([Item("data", numbers(30))], {})
        log.commit({}, keep=[second, third])
        assert files(tmp_path) == [MANIFEST, second, third]
        assert first not in log.segments
    after = (tmp_path / second).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_what_is_appended_and_not_committed_does_not_exist(tmp_path):
    (first,) = save(tmp_path, 10)
    state = content(tmp_path)[0]
    log = SegmentLog(tmp_path)
    orphan = log.append([Item("data", numbers(99))], {})
    assert orphan in files(tmp_path)
    assert content(tmp_path)[0] == state
    log.close()
    assert files(tmp_path) == [MANIFEST, first]


def test_a_dead_writers_leftovers_are_swept(tmp_path):
    (first,) = save(tmp_path, 10)
    shutil.copy(tmp_path / first, tmp_path / "segment_000099.pack")
    temporary = tmp_path / ".penstock-tmp-host-1-1-abcdef"  # of another host: never guessed
    temporary.write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("mine")
    SegmentLog(tmp_path).close()
    assert files(tmp_path) == ["notes.txt", MANIFEST, first]
    assert temporary.exists()


def test_segments_before_the_first_commit_are_leftovers(tmp_path):
    save(tmp_path, 10)
    (tmp_path / MANIFEST).unlink()  # as if it had never got so far
    with SegmentLog(tmp_path) as log:
        assert log.segments == []
        assert files(tmp_path) == []


def test_a_name_is_never_used_again(tmp_path):
    names = save(tmp_path, 1, 2, 3)
    names += save(tmp_path, 4, keep_old=False)
    names += save(tmp_path, 5, keep_old=False)
    assert len(set(names)) == 5


def test_the_digest_tells_that_somebody_else_saved(tmp_path):
    save(tmp_path, 1)
    with SegmentLog(tmp_path) as log:
        mine = log.digest
    with LogReader(tmp_path) as reader:
        assert reader.digest == mine
    with SegmentLog(tmp_path) as log:
        log.commit({"n": 2}, keep=log.segments)
        assert log.digest != mine
        latest = log.digest
    with SegmentLog(tmp_path) as log:
        assert log.digest == latest


@pytest.mark.parametrize("entry", ["checkpoint.pt", "videos", "segment_1.pack"])
def test_a_folder_with_something_else_is_refused(tmp_path, entry):
    (tmp_path / entry).mkdir()
    with pytest.raises(errors.UsageError, match=rf"holds something else \({entry}\)"):
        SegmentLog(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [entry]


def test_another_pack_under_the_name_is_refused(tmp_path):
    with PackWriter(tmp_path / MANIFEST, kind="checkpoint") as pack:
        pack.write([Item("x", numbers(3))])
    before = (tmp_path / MANIFEST).read_bytes()
    for call in (SegmentLog, LogReader):
        with pytest.raises(errors.UnknownFormat, match="is a 'checkpoint', not a saved replay"):
            call(tmp_path)
    assert (tmp_path / MANIFEST).read_bytes() == before
    FolderLock(tmp_path).acquire()  # the refusal did not keep the lock


def test_a_log_of_another_holder_is_refused(tmp_path):
    with SegmentLog(tmp_path, "CompressedStorage") as log:
        log.commit({}, keep=[])
    with pytest.raises(errors.UsageError, match="saved by 'CompressedStorage'"):
        SegmentLog(tmp_path, "DictReplayBuffer")
    with pytest.raises(errors.UnknownFormat, match="saved by 'CompressedStorage'"):
        LogReader(tmp_path, "DictReplayBuffer")
    LogReader(tmp_path, "CompressedStorage").close()


def test_one_writer_at_a_time(tmp_path):
    with (
        SegmentLog(tmp_path),
        pytest.raises(errors.LockHeld, match="is being written"),
    ):
        SegmentLog(tmp_path)
    SegmentLog(tmp_path).close()


def test_nothing_there(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(errors.UnknownFormat, match=f"there is no {MANIFEST}"):
            LogReader(folder)


def test_wrong_calls(tmp_path):
    with SegmentLog(tmp_path) as log:
        name = log.append([Item("data", numbers(1))], {})
        for keep in (["segment_000077.pack"], [name, name]):
            with pytest.raises(errors.UsageError, match="cannot keep"):
                log.commit({}, keep=keep)
        with pytest.raises(errors.UsageError, match="not JSON"):
            log.commit({"x": np.int64(1)}, keep=[name])
        log.commit({}, keep=[name])
    with pytest.raises(errors.UsageError, match="was closed"):
        log.append([], {})
    with pytest.raises(errors.UsageError, match="was closed"):
        log.commit({}, keep=[])
    log.close()
    with LogReader(tmp_path) as reader:
        with pytest.raises(errors.UsageError, match="lists no segment"):
            reader.open_segment("../x")
        with pytest.raises(errors.CorruptFile, match="holds no 'missing'"):
            reader.item("missing")


def test_a_missing_or_foreign_segment_is_named(tmp_path):
    first, second = save(tmp_path, 10, 20)
    good = (tmp_path / first).read_bytes()
    (tmp_path / first).unlink()
    with pytest.raises(errors.CorruptFile, match=f"{first} is missing"):
        content(tmp_path)
    shutil.copy(tmp_path / second, tmp_path / first)
    with pytest.raises(errors.CorruptFile, match=f"{first} is not the segment"):
        content(tmp_path)
    (tmp_path / first).write_bytes(b"x" * 100)
    with pytest.raises(errors.CorruptFile, match=first):
        content(tmp_path)
    (tmp_path / first).write_bytes(good)
    assert len(content(tmp_path)[2]) == 2


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"holder": "x", "state": {}, "segments": [{"name": "../../etc/passwd", "digest": ""}]},
        {"holder": "x", "state": {}, "segments": [{"name": "segment_000000.pack"}], "next": 1},
        {"holder": "x", "state": [], "segments": [], "next": 1},
        {"holder": "x", "state": {}, "segments": 7, "next": 1},
        {"holder": "x", "state": {}, "segments": [], "next": "x"},
    ],
)
def test_a_manifest_that_makes_no_sense(tmp_path, meta):
    meta = {"next": 1, **meta} if "segments" in meta and "next" not in meta else meta
    with PackWriter(tmp_path / MANIFEST, kind="replay", meta=meta):
        pass
    with pytest.raises(errors.CorruptFile, match="makes no sense"):
        LogReader(tmp_path)


def test_a_reader_that_is_overtaken_says_so(tmp_path):
    (first,) = save(tmp_path, 10)
    with LogReader(tmp_path) as log:
        save(tmp_path, 20, keep_old=False)
        with pytest.raises(errors.StorageError, match="saved again while it was read"):
            log.open_segment(first)


@pytest.mark.parametrize("call", ["fsync", "replace", "write"])
@pytest.mark.parametrize("step", ["append", "commit"])
def test_a_failing_disk_changes_nothing(tmp_path, monkeypatch, call, step):
    (first,) = save(tmp_path, 10)
    before = content(tmp_path)[0]

    def broken(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with SegmentLog(tmp_path) as log:
        name = log.append([Item("data", numbers(5))], {})
        with monkeypatch.context() as patch:
            if call == "write":
                patch.setattr("penstock.core.pack.writer.write_all", broken)
            else:
                patch.setattr(os, call, broken)
            with pytest.raises(errors.StorageError, match="No space left"):
                if step == "append":
                    log.append([Item("data", numbers(5))], {})
                else:
                    log.commit({"n": 2}, keep=[first, name])
        assert content(tmp_path)[0] == before
        assert log.segments == [first]
        log.commit({"n": 3}, keep=[first, name])  # it goes on
    assert content(tmp_path)[0] == {"n": 3}
    assert files(tmp_path) == [MANIFEST, first, name]


class Killed(BaseException):
    """The process dies here."""


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_dying_anywhere_leaves_the_last_commit(tmp_path_factory, data):
    """Stop at the n-th rename or unlink of a run of saves, then look, and go on from there."""
    folder = tmp_path_factory.mktemp("log")
    truth = None
    for _ in range(data.draw(st.integers(1, 4))):
        calls_left = data.draw(st.integers(0, 6))

        def dying(call):
            def run(*arguments, **options):
                nonlocal calls_left
                calls_left -= 1
                if calls_left < 0:
                    raise Killed
                return call(*arguments, **options)

            return run

        attempt = truth
        with pytest.MonkeyPatch.context() as patch:
            log = SegmentLog(folder)
            try:
                patch.setattr(os, "replace", dying(os.replace))
                patch.setattr(os, "unlink", dying(os.unlink))
                for _ in range(2):
                    n = data.draw(st.integers(1, 50))
                    name = log.append([Item("data", numbers(n))], {"n": n})
                    old = data.draw(st.sets(st.sampled_from(log.segments))) if log.segments else ()
                    kept = [s for s in log.segments if s in old]
                    attempt = {"n": n, "kept": len(kept)}
                    log.commit(attempt, keep=[*kept, name])
                    truth = attempt
            except Killed:
                pass
            if log._lock is not None:  # what the kernel does with a dead process's lock
                log._lock.release()
        if truth is None and not (folder / MANIFEST).exists():
            continue
        state, _, segments = content(folder)
        assert state in (truth, attempt)
        assert len(segments) == state["kept"] + 1
        assert segments[-1][0] == {"n": state["n"]}
        truth = state


def test_every_bit_counts(tmp_path):
    """Flip single bits and cut the files: an error, or the very same content."""
    save(tmp_path / "good", 10, 300)
    good = content(tmp_path / "good")
    chance = np.random.default_rng(0)
    detected = 0
    for trial in range(200):
        folder = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", folder)
        name = chance.choice(files(folder))
        data = bytearray((folder / name).read_bytes())
        at = int(chance.integers(len(data)))
        if trial % 5:
            data[at] ^= 1 << int(chance.integers(8))
        else:
            del data[at:]
        (folder / name).write_bytes(data)
        try:
            found = content(folder)
        except errors.DataError as error:
            assert name in str(error), (name, error)
            detected += 1
        else:
            np.testing.assert_equal(found, good)
        shutil.rmtree(folder)
    assert detected > 150


def test_verify_names_every_bad_file(tmp_path):
    first, second, third, fourth = save(tmp_path, 10, 20, 30, 40)
    with LogReader(tmp_path) as log:
        assert list(log.verify()) == []
    data = bytearray((tmp_path / first).read_bytes())
    data[-1] ^= 1
    (tmp_path / first).write_bytes(data)
    (tmp_path / third).unlink()
    os.truncate(tmp_path / fourth, 50)
    with LogReader(tmp_path) as log:
        found = dict(log.verify())
    assert set(found) == {first, third, fourth}
    assert second not in found
    assert "checksum" in found[first]
    assert "missing" in found[third]


def test_the_folder_reads_as_plain_packs(tmp_path):
    (name,) = save(tmp_path, 10)
    with PackReader(tmp_path / name) as pack:
        assert pack.index.kind == "replay-segment"
    with PackReader(tmp_path / MANIFEST) as pack:
        assert pack.index.kind == "replay"
