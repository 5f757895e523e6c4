"""Saving a CompressedStorage: only what changed is written, and nothing damaged is believed."""

import copy
import errno
import functools
import json
import multiprocessing
import os
import shutil
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from penstock import errors
from penstock.core.pack import Item
from penstock.replay.segments import MANIFEST, LogReader, SegmentLog
from penstock.replay.torchrl.save import BLOCK, HOLDER
from penstock.replay.torchrl.storage import CompressedStorage


def numbered(start, count):
    """Items whose content is their number, in every kind of key."""
    numbers = torch.arange(start, start + count)
    pixels = (numbers % 251).to(torch.uint8)[:, None].repeat(1, 500)
    return TensorDict(
        {
            "n": numbers,
            "pixels": pixels,
            "half": numbers[:, None].to(torch.bfloat16),
            "next": {"pixels": pixels.flip(0).float(), "done": numbers % 7 == 0},
        },
        batch_size=[count],
    )


def assert_equal(one, other):
    assert set(one.keys(True)) == set(other.keys(True))
    for key in one.keys(True, True):
        assert one[key].dtype == other[key].dtype, key
        assert torch.equal(one[key], other[key]), key


def filled(size, count, step=100):
    storage = CompressedStorage(size)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=8)
    for start in range(0, count, step):
        buffer.extend(numbered(start, min(step, count - start)))
    return buffer


def loaded(folder, size):
    storage = CompressedStorage(size)
    storage.loads(folder)
    return storage


def segments(folder):
    return {p.name: p.stat().st_size for p in folder.iterdir() if p.name.startswith("segment")}


def test_a_folder_of_before_is_read(tmp_path):
    """Its manifest has one table: per block the number of its segment, -1 for none."""
    buffer = filled(1000, 600)
    buffer._storage.dumps(tmp_path)
    buffer[300:400] = numbered(5000, 100)
    buffer._storage.dumps(tmp_path)
    with LogReader(tmp_path) as log:
        state, kept, (block, segment) = log.state, log.segments, log.ints("block", "segment")
    home = np.full(-(-1000 // BLOCK), -1, np.int32)
    home[block] = segment
    with SegmentLog(tmp_path, HOLDER) as log:
        log.commit(state, [Item("home", home)], keep=kept)
    other = CompressedStorage(1000)
    other.loads(tmp_path)
    assert_equal(buffer[:], other[:])
    before = segments(tmp_path)
    other.dumps(tmp_path)  # and gone on from
    assert segments(tmp_path) == before
    assert_equal(buffer[:], loaded(tmp_path, 1000)[:])


def test_a_whole_buffer(tmp_path):
    buffer = filled(1000, 1300)
    buffer.set_rng(torch.Generator().manual_seed(1))
    buffer.dumps(tmp_path / "saved")
    other = TensorDictReplayBuffer(storage=CompressedStorage(1000), batch_size=8)
    other.loads(tmp_path / "saved")
    assert len(other) == 1000
    assert_equal(buffer[:], other[:])
    assert_equal(buffer.sample(), other.sample())
    for one in (buffer, other):  # the cursor goes on where it was
        one.extend(numbered(5000, 50))
    assert_equal(buffer[:], other[:])
    assert other.storage._last_cursor_index == buffer.storage._last_cursor_index
    assert other.storage.compressed_keys == buffer.storage.compressed_keys


def test_only_what_changed_is_written(tmp_path):
    buffer = filled(BLOCK * 40, BLOCK * 20)
    storage = buffer.storage
    storage.dumps(tmp_path)
    first = segments(tmp_path)
    storage.dumps(tmp_path)
    assert segments(tmp_path) == first
    buffer.extend(numbered(0, 10))
    storage.dumps(tmp_path)
    new = {name: size for name, size in segments(tmp_path).items() if name not in first}
    assert set(first) < set(segments(tmp_path))
    assert sum(new.values()) < sum(first.values()) / 10
    assert_equal(storage[:], loaded(tmp_path, BLOCK * 40)[:])


def test_what_was_loaded_goes_on_with_the_same_folder(tmp_path):
    filled(BLOCK * 8, BLOCK * 6).storage.dumps(tmp_path)
    before = segments(tmp_path)
    storage = loaded(tmp_path, BLOCK * 8)
    storage[torch.arange(3)] = numbered(900, 3)
    storage.dumps(tmp_path)
    assert set(before) < set(segments(tmp_path))
    assert_equal(storage[:], loaded(tmp_path, BLOCK * 8)[:])


def test_a_change_past_the_storage_is_noticed(tmp_path):
    buffer = filled(BLOCK * 8, BLOCK * 8)
    storage = buffer.storage
    storage.dumps(tmp_path)
    storage[:]["n"][5] = -1  # a view, as in TorchRL: no call of ours tells about it
    buffer.set_at_("half", torch.full((1, 1), 3.0, dtype=torch.bfloat16), torch.tensor([700]))
    storage.dumps(tmp_path)
    again = loaded(tmp_path, BLOCK * 8)
    assert again.get(5)["n"] == -1
    assert again.get(700)["half"] == 3
    assert_equal(storage[:], again[:])


def test_a_folder_that_somebody_else_saved_to_is_written_anew(tmp_path):
    one, other = filled(600, 600), filled(600, 400)
    one.storage.dumps(tmp_path)
    other.storage.dumps(tmp_path)
    one.extend(numbered(0, 1))
    one.storage.dumps(tmp_path)
    assert_equal(one[:], loaded(tmp_path, 600)[:])
    one.storage.dumps(tmp_path / "elsewhere")
    assert_equal(one[:], loaded(tmp_path / "elsewhere", 600)[:])


def test_keys_that_came_later_are_saved(tmp_path):
    buffer = filled(600, 300)
    buffer.storage.dumps(tmp_path)
    data = numbered(0, 100)
    data["extra"] = torch.ones(100, 2)
    buffer.extend(data)
    buffer.storage.dumps(tmp_path)
    again = loaded(tmp_path, 600)
    assert torch.equal(again[300:400]["extra"], torch.ones(100, 2))
    again.set(torch.arange(5), numbered(0, 5))  # the first data had no such key


def test_many_small_saves_stay_few_segments(tmp_path):
    buffer = filled(BLOCK * 100, BLOCK)
    for turn in range(90):
        buffer.extend(numbered(turn * BLOCK, BLOCK))
        buffer.storage.dumps(tmp_path)
    assert len(segments(tmp_path)) <= 50
    assert_equal(buffer[:], loaded(tmp_path, BLOCK * 100)[:])


def test_two_dimensions_and_names(tmp_path):
    storage = CompressedStorage(60, ndim=2)
    buffer = ReplayBuffer(storage=storage, batch_size=4, dim_extend=0)
    data = numbered(0, 40).reshape(8, 5)
    data.names = ["env", "time"]
    buffer.extend(data)
    storage.dumps(tmp_path)
    again = CompressedStorage(60, ndim=2)
    again.loads(tmp_path)
    assert (again.shape, len(again), again.max_size) == (storage.shape, 40, 60)
    assert_equal(storage[:], again[:])
    assert again[:].names == storage[:].names
    with pytest.raises(errors.UsageError, match="make it as it was"):
        CompressedStorage(60).loads(tmp_path)


def test_emptied_and_never_written(tmp_path):
    storage = CompressedStorage(10)
    with pytest.raises(errors.UsageError, match="never written"):
        storage.dumps(tmp_path)
    assert not list(tmp_path.iterdir())
    buffer = filled(600, 600)
    buffer.storage.dumps(tmp_path)
    buffer.empty()
    buffer.storage.dumps(tmp_path)
    assert segments(tmp_path) == {}
    assert len(loaded(tmp_path, 600)) == 0


def test_wrong_folders(tmp_path):
    storage = filled(600, 300).storage
    storage.dumps(tmp_path)
    with pytest.raises(errors.UsageError, match=r"saved with \[600\] slots.*max_size=700"):
        loaded(tmp_path, 700)
    with pytest.raises(errors.UnknownFormat, match="no saved replay"):
        loaded(tmp_path / "none", 600)
    with SegmentLog(tmp_path / "dict", "DictReplayBuffer") as log:
        log.commit({}, keep=[])
    with pytest.raises(errors.UnknownFormat, match="saved by 'DictReplayBuffer'"):
        loaded(tmp_path / "dict", 600)
    with pytest.raises(errors.UsageError, match="saved by 'DictReplayBuffer'"):
        storage.dumps(tmp_path / "dict")
    storage.register_save_hook(lambda data, path: data)
    with pytest.raises(errors.UsageError, match="hooks"):
        storage.dumps(tmp_path)


def test_a_full_disk_leaves_what_was_saved(tmp_path, monkeypatch):
    buffer = filled(600, 300)
    buffer.storage.dumps(tmp_path)
    before = buffer[:].clone()
    buffer.extend(numbered(300, 100))

    def broken(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(errors.StorageError, match="No space left"):
            buffer.storage.dumps(tmp_path)
    assert_equal(before, loaded(tmp_path, 600)[:])
    buffer.storage.dumps(tmp_path)
    assert_equal(buffer[:], loaded(tmp_path, 600)[:])


def test_state_dict_through_torch_save(tmp_path):
    buffer = filled(600, 700)
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert os.path.getsize(tmp_path / "state.pt") < 600 * 1500  # 2517 bytes an item, decoded
    other = TensorDictReplayBuffer(storage=CompressedStorage(600), batch_size=8)
    other.load_state_dict(state)
    assert_equal(buffer[:], other[:])
    other.extend(numbered(0, 20))  # the state given is not changed through it
    third = CompressedStorage(600)
    third.load_state_dict(state["_storage"])
    assert_equal(buffer[:].exclude("index"), third[:].exclude("index"))
    other.load_state_dict(TensorDictReplayBuffer(storage=CompressedStorage(600)).state_dict())
    assert len(other) == 0


def test_a_state_that_makes_no_sense():
    storage = filled(600, 300).storage
    good = storage.state_dict()
    before = storage[:].clone()

    def without(name):
        tensors = {key: value for key, value in good["tensors"].items() if key != name}
        return {**good, "tensors": tensors}

    def with_(name, value):
        return {**good, "tensors": {**good["tensors"], name: value}}

    description = json.loads(good["description"])

    def described(**changes):
        return {**good, "description": json.dumps({**description, **changes})}

    wrong = [
        {**good, "description": "{"},
        {**good, "description": "{}"},
        {**good, "description": good["description"].replace('"uint8"', '"uint9"')},
        without("slots"),
        without("plain.0"),
        without("data.1"),
        with_("slots", good["tensors"]["slots"] + 400),
        with_("lengths.1", good["tensors"]["lengths.1"] + 1),
        with_("lengths.1", -good["tensors"]["lengths.1"]),
        with_("plain.0", torch.zeros(300, 2)),
        with_("more", torch.zeros(1)),
        with_("slots", good["tensors"]["slots"] // 2),  # each of them twice
        described(cursor=1.5),
        described(cursor=True),
        described(len=1.0),
        described(keys=[description["keys"][0], *description["keys"][:-1]]),  # a path twice
    ]
    for state in wrong:
        with pytest.raises(errors.CorruptFile):
            storage.load_state_dict(state)
        assert_equal(before, storage[:])


def test_copies_and_processes():
    storage = filled(600, 300).storage
    other = copy.deepcopy(storage)
    other.set(torch.arange(300, 400), numbered(0, 100))
    assert (len(storage), len(other)) == (300, 400)
    assert_equal(storage[:], other[:300])
    process = multiprocessing.get_context("spawn").Process(target=len, args=(storage,))
    with pytest.raises(errors.UsageError, match="cannot be shared with other processes"):
        process.start()


MEANWHILE = {
    "nothing": lambda buffer: None,
    "emptied": lambda buffer: buffer.empty(),
    "loaded": lambda buffer: buffer.load_state_dict(filled(BLOCK * 6, 300).state_dict()),
    "new key": lambda buffer: buffer.extend(numbered(0, 9).set("late", torch.ones(9))),
}


@pytest.mark.parametrize("what", list(MEANWHILE))
@pytest.mark.parametrize("turn", [1, 4])
def test_others_go_on_while_it_saves(tmp_path, monkeypatch, what, turn):
    """Between the segments of a save somebody writes; what is saved is the last of it."""
    monkeypatch.setattr("penstock.replay.segments._SEGMENT_BYTES", 1)  # a block per segment
    buffer = filled(BLOCK * 6, BLOCK * 6)
    storage = buffer.storage
    original, turns = SegmentLog.append, []

    def meanwhile(self, segment_items, meta):
        name = original(self, segment_items, meta)
        turns.append(name)
        if len(turns) <= turn:  # in another thread: this one would have the lock anyway
            row, data = torch.tensor([len(turns) * 100]), numbered(-1000, 1)
            storage_set = functools.partial(storage.set, row, data, set_cursor=False)
            writer = threading.Thread(target=storage_set)
            writer.start()
            writer.join(20)
            assert not writer.is_alive()
        if len(turns) == turn:
            MEANWHILE[what](buffer)
        return name

    with monkeypatch.context() as patch:
        patch.setattr(SegmentLog, "append", meanwhile)
        storage.dumps(tmp_path)
    assert len(turns) > turn or what == "emptied"
    again = loaded(tmp_path, BLOCK * 6)
    assert len(again) == len(storage) == {"emptied": 0, "loaded": 300}.get(what, BLOCK * 6)
    if len(storage):
        assert_equal(storage[:], again[:])
        assert (again[:]["n"] == -1000).any() == (what != "loaded")
    assert ("late" in again.get(slice(None))) == (what == "new key")
    assert len(segments(tmp_path)) == len(storage._saved.sizes)
    before = segments(tmp_path)
    storage.dumps(tmp_path)  # and nothing is left to do
    assert segments(tmp_path) == before


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_run_of_saves_loads_what_it_saved(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("saves")
    size = data.draw(st.integers(1, 5 * BLOCK))
    storage = CompressedStorage(size)
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    buffer.extend(numbered(0, 1))
    for turn in range(data.draw(st.integers(1, 6))):
        call = data.draw(st.sampled_from(["extend", "set", "load", "view", "empty"]))
        if call == "extend":
            buffer.extend(numbered(turn, data.draw(st.integers(1, size))))
        elif call == "set" and len(storage):
            row = data.draw(st.integers(0, len(storage) - 1))
            storage[torch.tensor([row])] = numbered(turn, 1)
        elif call == "view" and len(storage):
            storage[:]["n"][data.draw(st.integers(0, len(storage) - 1))] = -turn
        elif call == "empty":
            buffer.empty()
        elif call == "load" and (folder / MANIFEST).exists():
            storage.loads(folder)
        storage.dumps(folder)
        again = loaded(folder, size)
        assert len(again) == len(storage)
        if len(storage):
            assert_equal(storage[:], again[:])


MANY = pytest.param(5000, marks=[pytest.mark.stress, pytest.mark.timeout(1500)])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("count", [1000, MANY])
def test_flips_and_cuts(tmp_path, count):
    """Damage anywhere in a saved folder: an error, or the very same content. Never less."""
    good = tmp_path / "good"
    buffer = filled(BLOCK * 3, BLOCK * 2)
    buffer.storage.dumps(good)
    buffer.extend(numbered(0, 100))
    buffer.storage.dumps(good)
    assert len(segments(good)) == 2
    truth = buffer[:].clone()
    names = [MANIFEST, *segments(good)]
    chance = np.random.default_rng(7)
    whole = {name: (good / name).read_bytes() for name in names}
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    detected = 0
    for trial in range(count):
        name = names[int(chance.integers(len(names)))]
        data = bytearray(whole[name])
        at = int(chance.integers(len(data)))
        if trial % 10:
            data[at] ^= 1 << int(chance.integers(8))
        else:
            del data[at:]
        (bad / name).write_bytes(data)
        storage = CompressedStorage(BLOCK * 3)
        try:
            storage.loads(bad)
        except errors.DataError:
            detected += 1
            assert len(storage) == 0
            assert not storage.initialized
        else:
            assert_equal(truth, storage[:])
        (bad / name).write_bytes(whole[name])
    assert detected > 0.9 * count
    assert LogReader(bad, HOLDER).state["len"] == len(buffer)
