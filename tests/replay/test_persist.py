"""A buffer in a folder: equal after loading, incremental, and no damage goes unnoticed."""

from __future__ import annotations

import resource
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import CorruptFile, DataError, StorageError, UnknownFormat, UsageError
from penstock.replay.episodes.buffer import DictReplayBuffer
from penstock.replay.segments import LogReader, SegmentLog

FILES = Path(__file__).parent / "files"
KEYS = ["obs", ("deep", "x"), "reward", "done"]


def episode(length: int, serial: int) -> dict[str, Any]:
    rng = np.random.default_rng(serial)
    obs = np.zeros((length, 16, 24), np.uint8)
    obs[:, :3] = rng.integers(0, 255, (length, 3, 24))
    return {
        "obs": obs,
        "deep": {"x": torch.from_numpy(rng.normal(size=(length, 3))).to(torch.bfloat16)},
        "reward": rng.normal(size=length),
        "done": np.arange(length) == length - 1,
    }


def made(**options: Any) -> DictReplayBuffer:
    chosen = {"max_size": 300, "keys": KEYS, "img_compressed": True, "seed": 3, **options}
    return DictReplayBuffer(**chosen)


def flat(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    return [tensor for key in sorted(batch.keys()) for tensor in flat(batch[key])]


def assert_equal(a: DictReplayBuffer, b: DictReplayBuffer, draws: int = 4) -> None:
    """Same content, same order of eviction, same next draws."""
    assert a.episodes == b.episodes
    assert a.codecs == b.codecs
    assert len(a) == len(b)
    assert a.stored_bytes == b.stored_bytes
    for k in range(draws):
        for options in ({}, {"sequence": 3, "pad": True}, {"n_step": 2}):
            x, y = a.sample(16, **options), b.sample(16, **options)
            assert type(x) is type(y)
            for left, right in zip(flat(x), flat(y), strict=True):
                assert left.dtype == right.dtype
                assert torch.equal(left, right)
        if k == 1:
            for buffer in (a, b):
                buffer.add(episode(40, 99))
            assert a.episodes == b.episodes


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir() if path.suffix == ".pack"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eviction": "lru", "next_keys": ["obs"]},
        {"priority": 0.7},
        {"max_size": None, "max_bytes": 60_000},
    ],
)
def test_loading_gives_an_equal_buffer(tmp_path: Path, options: dict[str, Any]) -> None:
    buffer = made(**options)
    for serial in range(14):
        buffer.add(episode(20 + serial, serial))
        batch = buffer.sample(8)
        if "priority" in options:
            buffer.update_priority(batch["index"], np.arange(8) + 0.5)
    buffer.remove(buffer.episodes[2])
    buffer.save(tmp_path / "replay")
    assert_equal(DictReplayBuffer.load(tmp_path / "replay"), buffer)


@pytest.mark.parametrize("mode", ["block", "episode"])
def test_files_whose_frames_were_compressed_several_at_a_time(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "replay"
    shutil.copytree(FILES / f"mode_{mode}", folder)
    buffer = DictReplayBuffer.load(folder)
    assert buffer.episodes == [1, 2, 3]
    assert buffer.codecs == {"pixels": "lz4", "serial": "raw"}
    batch = buffer.get(np.arange(5, 42))
    assert batch["serial"].tolist() == list(range(5, 42))
    serial = np.arange(5, 42)[:, None, None]
    expected = (serial + np.arange(12)[:, None] * 3 + np.arange(10)) % 251
    assert np.array_equal(batch["pixels"].numpy(), expected)
    assert buffer.sample(8)["index"].tolist() == [5, 12, 18, 20, 23, 29, 34, 37]
    buffer.save(folder)  # written as they are in memory now
    again = DictReplayBuffer.load(folder)
    assert torch.equal(again.get(np.arange(5, 42))["pixels"], batch["pixels"])
    assert torch.equal(again.sample(8)["index"], buffer.sample(8)["index"])


def test_an_empty_buffer(tmp_path: Path) -> None:
    buffer = made()
    buffer.save(tmp_path / "a")
    again = DictReplayBuffer.load(tmp_path / "a")
    assert len(again) == 0
    for each in (buffer, again):
        each.add(episode(9, 1))
    assert_equal(again, buffer)
    buffer.remove(buffer.episodes[0])
    buffer.remove(buffer.episodes[0])
    buffer.save(tmp_path / "a")
    again = DictReplayBuffer.load(tmp_path / "a")
    assert len(again) == 0
    assert again.add(episode(9, 1)) == buffer.add(episode(9, 1))


def test_only_what_is_new_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "replay"
    buffer = made()
    for serial in range(4):
        buffer.add(episode(50, serial))
    buffer.save(folder)
    first = files(folder)
    buffer.save(folder)
    second = files(folder)
    assert second.keys() == first.keys() == {"replay.pack", "segment_000000.pack"}
    buffer.add(episode(50, 4))
    buffer.save(folder)
    third = files(folder)
    assert third["segment_000000.pack"] == first["segment_000000.pack"]
    assert third.keys() - first.keys() == {"segment_000001.pack"}
    sizes = {path.name: path.stat().st_size for path in folder.glob("segment*")}
    assert sizes["segment_000001.pack"] < sizes["segment_000000.pack"] / 2

    again = DictReplayBuffer.load(folder)  # who loaded goes on where the other stopped
    again.add(episode(50, 5))
    again.save(folder)
    assert files(folder)["segment_000000.pack"] == first["segment_000000.pack"]
    assert_equal(DictReplayBuffer.load(folder), again)


def test_segments_that_are_mostly_dead_go(tmp_path: Path) -> None:
    folder = tmp_path / "replay"
    buffer = made(eviction="lru")
    live = 0
    for serial in range(120):
        buffer.add(episode(25, serial))
        buffer.sample(4)
        buffer.save(folder)
        live = buffer.stored_bytes
    stored = sum(path.stat().st_size for path in folder.glob("segment*"))
    assert stored < 2.5 * live + 12 * 16_000  # each file has a header
    assert_equal(DictReplayBuffer.load(folder), buffer)


def test_two_buffers_never_mix(tmp_path: Path) -> None:
    """The other one saved here since: its segments have our names, and not our episodes."""
    folder = tmp_path / "replay"
    one, two = made(seed=1), made(seed=2)
    one.add(episode(30, 1))
    two.add(episode(30, 2))
    one.save(folder)
    two.save(folder)
    one.add(episode(10, 3))
    one.save(folder)
    assert_equal(DictReplayBuffer.load(folder), one)


def test_saving_elsewhere_writes_everything(tmp_path: Path) -> None:
    buffer = made()
    buffer.add(episode(30, 1))
    buffer.save(tmp_path / "a")
    buffer.save(tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    assert_equal(DictReplayBuffer.load(tmp_path / "b"), buffer)


def test_tensordicts_stay_tensordicts(tmp_path: Path) -> None:
    from tensordict import TensorDict

    buffer = DictReplayBuffer(100, [("a", "b")], seed=0)
    buffer.add(TensorDict({"a": {"b": torch.randn(8, 2)}}, batch_size=[8]))
    buffer.save(tmp_path / "r")
    batch = DictReplayBuffer.load(tmp_path / "r").sample(5)
    assert isinstance(batch, TensorDict)
    assert torch.equal(batch["a", "b"], buffer.sample(5)["a", "b"])


def test_large_buffers_are_written_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.replay.segments._SEGMENT_BYTES", 20_000)
    buffer = made(max_size=10_000)
    for serial in range(30):
        buffer.add(episode(60, serial))
    buffer.save(tmp_path / "r")
    assert len(list((tmp_path / "r").glob("segment*"))) > 5
    assert_equal(DictReplayBuffer.load(tmp_path / "r"), buffer)


def test_saving_while_others_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.replay.segments._SEGMENT_BYTES", 20_000)
    buffer = made(max_size=2000)
    stop = threading.Event()

    def add() -> None:
        serial = 0
        while not stop.is_set():
            serial += 1
            buffer.add(episode(1 + serial % 40, serial))

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(6):
            buffer.save(tmp_path / "r")
            loaded = DictReplayBuffer.load(tmp_path / "r")
            if len(loaded):
                loaded.sample(64)
                loaded.get(loaded.sample_indices(20))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    buffer.save(tmp_path / "r")
    assert_equal(DictReplayBuffer.load(tmp_path / "r"), buffer)


def test_what_is_no_saved_buffer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormat):
        DictReplayBuffer.load(tmp_path)
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(UsageError, match=r"thesis\.txt"):
        made().save(tmp_path)
    with SegmentLog(tmp_path / "other", "torchrl") as log:
        log.commit({}, keep=[])
    with pytest.raises(UnknownFormat, match="torchrl"):
        DictReplayBuffer.load(tmp_path / "other")


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    buffer = made()
    buffer.add(episode(30, 1))
    buffer.save(tmp_path / "r")
    (tmp_path / "r" / "segment_000000.pack").unlink()
    with pytest.raises(CorruptFile, match=r"segment_000000\.pack"):
        DictReplayBuffer.load(tmp_path / "r")


MANY = pytest.param(5000, marks=[pytest.mark.stress, pytest.mark.timeout(1500)])


@pytest.mark.parametrize("count", [300, MANY])
def test_no_flipped_bit_and_no_cut_goes_unnoticed(tmp_path: Path, count: int) -> None:
    buffer = made(priority=0.5)
    for serial in range(3):
        buffer.add(episode(12, serial))
    buffer.save(tmp_path / "r")
    rng = np.random.default_rng(0)
    paths = sorted((tmp_path / "r").glob("*.pack"))
    silent = noticed = 0
    for k in range(count):
        path = paths[k % len(paths)]
        good = path.read_bytes()
        bad = bytearray(good)
        at = int(rng.integers(0, len(good)))
        if k % 5 == 0:
            bad = bad[:at]
        else:
            bad[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(bad)
        try:
            DictReplayBuffer.load(tmp_path / "r")
            silent += 1
        except DataError:
            noticed += 1
        finally:
            path.write_bytes(good)
    assert silent == 0
    assert noticed == count
    assert_equal(DictReplayBuffer.load(tmp_path / "r"), buffer)


def hostile(folder: Path, change: Any) -> None:
    """Write a log whose checksums are right and whose content is not."""
    with LogReader(folder) as log:
        state, items = log.state, {name: log.item(name).copy() for name in log.names}
        with log.open_segment(log.segments[0]) as segment:
            records = {name: segment.read(name).copy() for name in segment.names}
    change(state, items, records)
    from penstock.core.pack import Item

    with SegmentLog(folder, "dict") as log:
        name = log.append([Item(key, values) for key, values in records.items()], {})
        log.commit(state, [Item(key, values) for key, values in items.items()], keep=[name])


def set_table(records: dict[str, Any], at: int, value: int) -> None:
    records["records.0"][4 * at : 4 * at + 4] = np.array([value], "<u4").view(np.uint8)


@pytest.mark.parametrize(
    "change",
    [
        lambda s, i, r: set_table(r, 0, 0),
        lambda s, i, r: set_table(r, 3, 2**32 - 1),
        lambda s, i, r: set_table(r, 12, 2**31),
        lambda s, i, r: r["sizes.0"].__setitem__(0, r["sizes.0"][0] + 4),
        lambda s, i, r: r["sizes.0"].__setitem__(0, -1),
        lambda s, i, r: r["lengths"].__setitem__(0, 2**40),
        lambda s, i, r: r.pop("records.1"),
        lambda s, i, r: i["lengths"].__setitem__(0, 13),
        lambda s, i, r: i["ids"].__setitem__(0, 5),
        lambda s, i, r: i["starts"].__setitem__(1, 2),
        lambda s, i, r: i["place"].__setitem__(0, 7),
        lambda s, i, r: i["segment"].__setitem__(0, 3),
        lambda s, i, r: i["leaves"].__setitem__(0, 10**9),
        lambda s, i, r: i["priorities"].__setitem__(0, np.nan),
        lambda s, i, r: i.pop("used"),
        lambda s, i, r: s["columns"][0].__setitem__("shape", [16, 25]),
        lambda s, i, r: s["columns"][0].__setitem__("dtype", "float99"),
        lambda s, i, r: s["columns"][0]["codec"].__setitem__("size", 1),
        lambda s, i, r: s["columns"][0].__setitem__("mode", "other"),
        lambda s, i, r: s["columns"].pop(),
        lambda s, i, r: s["settings"].__setitem__("max_size", "many"),
        lambda s, i, r: s["settings"].pop("alpha"),
        lambda s, i, r: s.__setitem__("rng", {"bit_generator": "MT19937"}),
        lambda s, i, r: s.__setitem__("next", [0, 0]),
        lambda s, i, r: s.__setitem__("version", 2),
        lambda s, i, r: s["priorities"].__setitem__("cursor", 0),
    ],
)
def test_a_hostile_log_is_refused(tmp_path: Path, change: Any) -> None:
    buffer = made(priority=0.5, codecs={"obs": "lz4"})
    for serial in range(3):
        buffer.add(episode(12, serial))
    buffer.save(tmp_path / "r")
    hostile(tmp_path / "r", lambda s, i, r: None)
    assert_equal(DictReplayBuffer.load(tmp_path / "r"), buffer)
    hostile(tmp_path / "r", change)
    with pytest.raises(DataError):
        DictReplayBuffer.load(tmp_path / "r")


def test_a_disk_that_refuses_leaves_the_last_save(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    buffer = made()
    buffer.add(episode(30, 1))
    buffer.save(folder)
    before = DictReplayBuffer.load(folder)
    buffer.add(episode(30, 2))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(StorageError, match="segment_000001"):
            buffer.save(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(files(folder)) == ["replay.pack", "segment_000000.pack"]
    assert_equal(DictReplayBuffer.load(folder), before)
    buffer.save(folder)
    assert_equal(DictReplayBuffer.load(folder), buffer)
