"""RolloutStorage: what was saved comes back, whole and in part, and nothing else is touched."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from penstock import errors
from penstock.core.pack import Item, PackReader, PackWriter
from penstock.rollouts.storage import RolloutStorage

from .conftest import make_batch, same, same_values

LIDAR = ("agents", "observation", "lidar")


@pytest.mark.parametrize("level", [0, 1, 2, 3, 9, 10, 16])
def test_every_level_is_exact(tmp_path, batch, level):
    storage = RolloutStorage(tmp_path, compression_level=level)
    path = storage.save(batch, 100)
    assert path == tmp_path / "rollout_000100.pack"
    loaded = storage.load(100)
    same(batch, loaded)
    assert all(tensor.is_contiguous() for tensor in loaded.values(True, True))
    with PackReader(path) as pack:
        assert pack.index.kind == "rollout"
        assert pack.entry("agents/observation/lidar").codec.id == (
            "raw" if level == 0 else "series"
        )
        assert (pack.entry("agents/observation/lidar").layout is None) is (level == 0)


def test_it_is_smaller_and_time_is_last(tmp_path):
    batch = make_batch(64, 32)
    RolloutStorage(tmp_path).save(batch, 1)
    with PackReader(tmp_path / "rollout_000001.pack") as pack:
        entry = pack.entry("agents/observation/lidar")
        assert entry.stored_shape == (64, 1, 36, 4, 32)
        row = 32 * 144 * 4
        assert entry.block_bytes % row == 0
        assert entry.block_bytes <= 512 * 1024
        assert entry.nbytes / entry.stored_bytes > 2


def test_single_numbers_are_not_stored_in_tiny_blocks(tmp_path):
    values = torch.randn(100_000).cumsum(0)
    storage = RolloutStorage(tmp_path)
    storage.save(TensorDict({"x": values, "pair": values.reshape(-1, 2)}, []), 0)
    storage.save(TensorDict({"x": values}, [100_000]), 1)
    for number in range(2):
        with PackReader(storage.path(number)) as pack:
            assert {entry.block_bytes for entry in pack.index.entries.values()} == {64 * 1024}
        same(storage.load(number)["x"], values)
    same(storage.load(1, envs=99_999)["x"], values[-1])
    batch = make_batch(200, 32)
    storage.save(batch, 2)
    with PackReader(storage.path(2)) as pack:  # of an environment that has time, only a few others
        assert pack.entry("done").block_bytes == 128 * 32


def reference(data, envs, steps):
    """What indexing the whole gives: environments first, then steps."""
    if envs is not None:
        data = data[envs]
    if steps is not None:
        data = data[steps] if isinstance(envs, int) else data[:, steps]
    return data


def indices(size):
    number = st.integers(-size, size - 1)
    return st.one_of(
        st.none(),
        number,
        st.lists(number, max_size=2 * size),
        st.slices(size).filter(lambda s: s.step is None or s.step > 0),
        st.lists(number, min_size=1, max_size=5).map(torch.tensor),
        st.lists(st.booleans(), min_size=size, max_size=size).map(torch.tensor),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three files: small; with several blocks per key; and with time first."""
    storage = RolloutStorage(tmp_path_factory.mktemp("rollouts"))
    batches = [make_batch(7, 5, 1), make_batch(40, 32, 2, names=["env", "time"])]
    batches.append(make_batch(9, 4, 3).transpose(0, 1).contiguous())
    batches[2].names = ["time", None]
    for number, batch in enumerate(batches):
        storage.save(batch, number)
    return storage, batches


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_part_equals_the_whole_indexed(saved, data):
    storage, batches = saved
    number = data.draw(st.integers(0, 2))
    whole = batches[number]
    first, second = whole.batch_size
    if number == 2:  # [time, env]
        envs, steps = data.draw(indices(second)), data.draw(indices(first))
        expected = reference(whole.transpose(0, 1), envs, steps)
        loaded = storage.load(number, envs=envs, steps=steps)
        dropped = isinstance(envs, int) or isinstance(steps, int)
        same_values(loaded if dropped else loaded.transpose(0, 1), expected)
        return
    envs, steps = data.draw(indices(first)), data.draw(indices(second))
    keys = data.draw(st.sampled_from([None, ["count"], [LIDAR, "done"], [("agents",)]]))
    expected = reference(whole, envs, steps)
    if keys is not None:
        expected = expected.select(*keys)
    same_values(storage.load(number, keys=keys, envs=envs, steps=steps), expected)


def test_one_environment_decodes_one_block_per_key(tmp_path, monkeypatch):
    storage = RolloutStorage(tmp_path)
    batch = make_batch(200, 32)
    storage.save(batch, 0)
    decoded = []
    original = PackReader._decode
    monkeypatch.setattr(
        PackReader,
        "_decode",
        lambda self, entry, block, out: (
            decoded.append(entry.name),
            original(self, entry, block, out),
        ),
    )
    same(storage.load(0, envs=150)[LIDAR], batch[150][LIDAR])
    assert sorted(decoded) == sorted(set(decoded))
    with PackReader(storage.path(0)) as pack:
        assert pack.entry("/".join(LIDAR)).blocks > 5
    decoded.clear()
    storage.load(0, keys=["done"])
    assert set(decoded) == {"done"}


def test_most_environments_of_a_large_key(tmp_path):
    """They are taken out of the whole tensor, which several threads decode."""
    values = torch.randn(64, 32, 700).round(decimals=1)
    storage = RolloutStorage(tmp_path)
    storage.save(TensorDict({"x": values}, [64, 32]), 0)
    envs = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:50]
    same(values[envs], storage.load(0, envs=envs)["x"])
    same(values[envs][:, ::3], storage.load(0, envs=envs, steps=slice(None, None, 3))["x"])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"envs": 6}, "envs: index 6 is out of bounds .* axis of 6"),
        ({"envs": -7}, "envs: index -7 is out of bounds .* axis of 6"),
        ({"steps": [0, 8]}, "steps: index 8 is out of bounds .* axis of 8"),
        ({"envs": "all"}, "give a number, a slice, or a list"),
        ({"envs": 1.5}, "give a number, a slice, or a list"),
        ({"envs": [0.5]}, "a list of whole numbers"),
        ({"envs": torch.zeros(2, 2, dtype=torch.int64)}, "several axes.* list of whole numbers"),
        ({"envs": torch.ones(5, dtype=torch.bool)}, "boolean .* list of whole numbers"),
        ({"envs": slice("a", 2)}, "envs: slice"),
        ({"keys": ["acton"]}, "did you mean 'action'"),
        ({"keys": [("agents", "lidar")]}, "no key"),
        ({"keys": "action"}, "give a list of keys"),
    ],
)
def test_a_wrong_part(tmp_path, batch, part, message):
    storage = RolloutStorage(tmp_path)
    storage.save(batch, 0)
    with pytest.raises(errors.UsageError, match=message):
        storage.load(0, **part)


@pytest.mark.parametrize(
    "settings_",
    [
        {"compression_level": 17},
        {"compression_level": -1},
        {"compression_level": "fast"},
        {"keep_last": 0},
        {"max_pending_bytes": 0},
        {"time_dim": 2},
    ],
)
def test_wrong_settings(tmp_path, settings_):
    (name,) = settings_
    with pytest.raises(errors.UsageError, match=name):
        RolloutStorage(tmp_path / "new", **settings_)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("iteration", [-1, 1.0, "1", None, True])
def test_a_wrong_iteration(tmp_path, batch, iteration):
    storage = RolloutStorage(tmp_path)
    for call in (lambda: storage.save(batch, iteration), lambda: storage.load(iteration)):
        with pytest.raises(errors.UsageError, match="iteration="):
            call()


def test_the_folder(tmp_path, batch):
    storage = RolloutStorage(tmp_path / "a" / "b")
    assert (storage.iterations(), storage.latest(), len(storage)) == ([], None, 0)
    with pytest.raises(errors.UsageError, match=r"no rollout 3 in .*: it is empty"):
        storage.load(3)
    for number in (1_000_000, 5, np.int64(70)):
        storage.save(batch, number)
    (storage.save_dir / "rollout_7.pack").write_text("mine")
    (storage.save_dir / "rollout_0000070.pack").write_text("mine")
    assert storage.iterations() == [5, 70, 1_000_000]
    assert storage.latest() == 1_000_000
    assert 70 in storage
    assert 71 not in storage
    assert "70" not in storage
    with pytest.raises(errors.UsageError, match="there are 3, from 5 to 1000000"):
        storage.load(3)
    found = list(storage.iterate(keys=["count"], envs=0))
    assert [number for number, _ in found] == [5, 70, 1_000_000]
    assert all(list(data.keys()) == ["count"] for _, data in found)
    with pytest.raises(errors.UsageError, match="no key"):
        list(storage.iterate(keys=["cnt"]))


def test_an_iteration_may_be_a_number_of_numpy(tmp_path, batch):
    storage = RolloutStorage(tmp_path)
    storage.save(batch, np.int64(3))
    assert np.int64(3) in storage
    assert 3 in storage
    assert np.int64(4) not in storage
    assert not any(other in storage for other in (-1, "3", None, 3.5))


def test_the_same_iteration_is_replaced(tmp_path, batch):
    storage = RolloutStorage(tmp_path)
    storage.save(batch, 1)
    other = make_batch(3, 3, seed=9)
    storage.save(other, 1)
    same(other, storage.load(1))
    assert len(list(tmp_path.iterdir())) == 1


def test_only_our_files_are_removed(tmp_path, batch):
    storage = RolloutStorage(tmp_path, keep_last=2)
    (tmp_path / "rollout_000000.pack").write_text("a file of somebody else")
    with PackWriter(tmp_path / "rollout_000001.pack", kind="replay") as writer:
        writer.write([Item("x", np.zeros(3))])
    for number in (2, 3, 4):
        storage.save(batch, number)
    assert storage.iterations() == [0, 1, 3, 4]
    assert storage.prune(0) == [3, 4]
    assert storage.iterations() == [0, 1]
    with pytest.raises(errors.UnknownFormat, match="is a replay, not a rollout"):
        storage.load(1)
    with pytest.raises(errors.DataError):
        storage.load(0)


def test_the_one_just_saved_is_kept(tmp_path, batch):
    storage = RolloutStorage(tmp_path, keep_last=1)
    storage.save(batch, 50)
    storage.save(batch, 10)  # a new run in an old folder
    assert storage.iterations() == [10, 50]


def test_pickles_are_refused(tmp_path):
    (tmp_path / "rollout_000004.lz4").write_bytes(b"\x04\x22\x4d\x18")
    storage = RolloutStorage(tmp_path)
    with pytest.raises(errors.UnknownFormat, match=r"is a pickle, .*never read"):
        storage.load(4)


def test_an_environment_larger_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.rollouts.file._LARGEST_ROW_BYTES", 1000)
    storage = RolloutStorage(tmp_path)
    data = TensorDict({"x": torch.randn(5, 20, 3000)}, batch_size=[5, 20])
    storage.save(data, 0)
    same_values(storage.load(0), data)
    same_values(storage.load(0, envs=[4, 1], steps=slice(3, 5)), data[[4, 1]][:, 3:5])


def test_another_device(tmp_path):
    """Device "meta" stands for any that is not the CPU."""
    storage = RolloutStorage(tmp_path)
    storage.save({"x": torch.randn(3, 4), "a": np.arange(5), "n": 1}, 0)
    loaded = storage.load(0, device="meta")
    assert loaded["x"].device.type == "meta"
    same(loaded["a"], np.arange(5))
    with pytest.raises(errors.UsageError, match="device='moon' cannot be used"):
        storage.load(0, device="moon")


def test_two_writers(tmp_path):
    """Different iterations, the same folder, at the same time."""
    batches = [make_batch(10, 16, seed) for seed in range(2)]

    def work(which):
        storage = RolloutStorage(tmp_path)
        for number in range(which, 30, 2):
            storage.save(batches[which], number)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    storage = RolloutStorage(tmp_path)
    assert storage.iterations() == list(range(30))
    for number, data in storage.iterate():
        same(batches[number % 2], data)
    assert len(list(tmp_path.iterdir())) == 30


def test_verbose_says_it(tmp_path, batch, capfd):
    RolloutStorage(tmp_path, verbose=True).save(batch, 2)
    assert "[penstock] saved rollout_000002.pack: " in capfd.readouterr().err
    RolloutStorage(tmp_path).save(batch, 2)
    assert capfd.readouterr() == ("", "")


def test_an_open_file_is_not_taken_for_its_successor(tmp_path):
    storage, other = RolloutStorage(tmp_path), RolloutStorage(tmp_path)
    first, second = make_batch(4, 8, seed=1), make_batch(4, 8, seed=2)
    storage.save(first, 0)
    same(storage.load(0), first)
    other.save(second, 0)  # another program replaces it
    same(storage.load(0), second)
    storage.save(first, 0)
    same(storage.load(0, envs=2), first[2])


def test_damage_after_opening_is_noticed(tmp_path):
    storage = RolloutStorage(tmp_path)
    storage.save(make_batch(64, 32), 0)
    storage.load(0)
    content = bytearray(storage.path(0).read_bytes())
    content[-100] ^= 1
    with storage.path(0).open("r+b") as file:  # the same file, changed in place
        file.write(content)
    with pytest.raises(errors.CorruptFile, match="damaged"):
        storage.load(0)


def test_few_files_stay_open_and_none_after_close(tmp_path):
    def open_files():
        links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return sum(str(tmp_path) in os.path.realpath(link) for link in links)

    storage = RolloutStorage(tmp_path)
    for number in range(8):
        storage.save(make_batch(4, 8), number)
    for number in range(8):
        storage.load(number)
    assert open_files() == 4
    storage.prune(keep_last=2)
    assert open_files() == 0
    storage.load(7)
    storage.close()
    assert open_files() == 0
    same(storage.load(7), make_batch(4, 8))
    del storage
    assert open_files() == 0


def test_threads_may_read_the_same_rollout(tmp_path):
    storage = RolloutStorage(tmp_path)
    batch = make_batch(64, 32)
    storage.save(batch, 0)
    problems = []

    def read(env):
        for _ in range(20):
            if not bool((storage.load(0, envs=env)[LIDAR] == batch[env][LIDAR]).all()):
                problems.append(env)

    threads = [threading.Thread(target=read, args=(env,)) for env in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_dicts_need_no_tensordict(tmp_path, batch):
    """NavRL's environment has one of 2023, others have none."""
    RolloutStorage(tmp_path).save(batch, 0)
    code = f"""
import sys
sys.modules["tensordict"] = None
import torch
from penstock import PenstockError, RolloutStorage
storage = RolloutStorage({str(tmp_path)!r})
storage.save({{"a": torch.arange(6).reshape(2, 3), "next": {{"b": 1}}}}, 1)
print(storage.load(1, envs=1))
try:
    storage.load(0)
except PenstockError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, refused = said.stdout.splitlines()
    assert loaded == "{'a': tensor([3, 4, 5]), 'next': {'b': 1}}"
    assert refused.startswith("tensordict is not installed")


def test_the_memory_of_a_rollout_that_is_dropped_serves_the_next_load(tmp_path):
    storage = RolloutStorage(tmp_path)
    storage.save(TensorDict({"x": torch.rand(64, 32, 256)}, [64, 32]), 1)
    gc.collect()
    gc.disable()
    try:
        places = set()
        for _ in range(5):
            data = storage.load(1)
            places.add(data["x"].data_ptr())
            del data
    finally:
        gc.enable()
    assert len(places) == 1
