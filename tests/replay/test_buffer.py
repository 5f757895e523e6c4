"""DictReplayBuffer: what goes in, what comes out, what is refused, and what it takes."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from penstock.errors import UnsupportedValue, UsageError
from penstock.replay.arena import Arena
from penstock.replay.episodes.buffer import DictReplayBuffer
from penstock.replay.episodes.index import EpisodeIndex

KEYS = ["obs", "reward", "done"]


def episode(length: int, serial: int = 0) -> dict[str, Any]:
    """Frames that say which episode and step they are from."""
    obs = np.zeros((length, 12, 32), np.uint8)
    obs[:, 0, :4] = np.array([serial], np.int32).view(np.uint8)
    obs[:, 1, :4] = np.arange(length, dtype=np.int32)[:, None].view(np.uint8)
    return {
        "obs": obs,
        "reward": np.arange(length, dtype=np.float32) + 1000 * serial,
        "done": np.arange(length) == length - 1,
    }


def snapshot(buffer: DictReplayBuffer) -> Any:
    return len(buffer), buffer.episodes, buffer.nbytes, buffer.codecs


def test_the_seeds_calls() -> None:
    buffer = DictReplayBuffer(100, ["obs", "reward", "done"], "cpu", True)
    assert len(buffer) == 0
    buffer.add({key: list(value) for key, value in episode(10).items()})
    batch = buffer.sample(32)
    assert batch["obs"].shape == (32, 12, 32)
    assert batch["obs"].dtype == torch.uint8
    assert len(buffer) == 10


def test_compressed_is_smaller_and_equal() -> None:
    plain = DictReplayBuffer(5000, KEYS, seed=1)
    small = DictReplayBuffer(5000, KEYS, img_compressed=True, seed=1)
    for serial in range(10):
        plain.add(episode(100, serial))
        small.add(episode(100, serial))
    assert plain.codecs == {"obs": "raw", "reward": "raw", "done": "raw"}
    assert small.codecs["obs"] != "raw"
    assert small.codecs["done"] == "raw"  # a byte per frame is not worth it
    assert small.stored_bytes * 5 < plain.stored_bytes
    for a, b in zip(plain.sample(64).values(), small.sample(64).values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2, torch.uint16, torch.float64],
)
def test_every_type_comes_back(dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (9, 40, 8)).to(dtype)
    buffer = DictReplayBuffer(100, ["x"], codecs="lz4")
    buffer.add({"x": values})
    got = buffer.get(np.arange(9))["x"]
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), values.view(torch.uint8))


def test_foreign_byte_order_and_strides() -> None:
    values = np.arange(60, dtype=">f4").reshape(5, 3, 4).transpose(0, 2, 1)
    buffer = DictReplayBuffer(100, ["x"])
    buffer.add({"x": values})
    assert np.array_equal(buffer.get(np.arange(5))["x"].numpy(), values)


def test_views_that_torch_works_out_later() -> None:
    values = torch.view_as_complex(torch.arange(12.0).reshape(6, 2))
    buffer = DictReplayBuffer(10, ["conjugate", "imaginary"])
    buffer.add({"conjugate": values.conj(), "imaginary": values.conj().imag})
    got = buffer.get(np.arange(6))
    assert torch.equal(got["conjugate"], values.conj())
    assert got["imaginary"].tolist() == [-1, -3, -5, -7, -9, -11]


def test_memory_mapped_episodes(tmp_path: Path) -> None:
    data = TensorDict({"x": torch.randn(5, 100), "y": torch.arange(5)}, [5])
    buffer = DictReplayBuffer(10, ["x", "y"])
    buffer.add(data.memmap(str(tmp_path)))
    assert torch.equal(buffer.get(np.arange(5))["x"], data["x"])


def test_ids_of_any_shape() -> None:
    buffer = DictReplayBuffer(10, ["x", "y"], next_keys=["x"])
    buffer.add({"x": np.arange(6), "y": np.ones((6, 2), np.float32)})
    assert int(buffer.get(3)["x"]) == 3
    assert buffer.get([[1, 2], [3, 5]])["x"].tolist() == [[1, 2], [3, 5]]
    assert buffer.get(torch.tensor([[1, 2], [3, 5]]))["next"]["x"].tolist() == [[2, 3], [4, 5]]
    assert buffer.get([[1], [2]])["y"].shape == (2, 1, 2)


def test_tensordicts_in_and_out() -> None:
    data = TensorDict(
        {"agents": {"obs": torch.randn(6, 3)}, "done": torch.zeros(6, 1, dtype=torch.bool)},
        batch_size=[6],
    )
    buffer = DictReplayBuffer(100, [("agents", "obs"), "done"], next_keys=[("agents", "obs")])
    buffer.add(data)
    buffer.add({"agents": {"obs": torch.randn(2, 3)}, "done": torch.zeros(2, 1, dtype=torch.bool)})
    batch = buffer.sample(4)
    assert isinstance(batch, TensorDict)
    assert batch.batch_size == torch.Size([4])
    assert batch["next", "agents", "obs"].shape == (4, 3)
    windows = buffer.sample(4, sequence=3, pad=True)
    assert windows.batch_size == torch.Size([4, 3])
    assert windows["mask"].shape == (4, 3)
    assert torch.equal(buffer.get([2])["agents", "obs"], data["agents", "obs"][2:3])


def test_a_batch_that_is_kept_does_not_change() -> None:
    buffer = DictReplayBuffer(1000, KEYS, seed=0)
    buffer.add(episode(1000))
    kept = [buffer.sample(300)["obs"] for _ in range(5)]
    copies = [tensor.clone() for tensor in kept]
    part = buffer.sample(300)["obs"][7]
    copy = part.clone()
    for _ in range(50):
        buffer.sample(300)
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    assert torch.equal(part, copy)


def test_changing_a_batch_changes_nothing_else() -> None:
    buffer = DictReplayBuffer(100, KEYS, next_keys=["obs"], seed=0)
    given = episode(20)
    buffer.add(given)
    given["obs"][:] = 255
    batch = buffer.sample(16)
    after = batch["next"]["obs"].clone()
    batch["obs"].fill_(7)
    assert torch.equal(batch["next"]["obs"], after)
    assert int(buffer.get(np.arange(20))["obs"].max()) < 255


def test_the_same_seed_draws_the_same() -> None:
    buffers = [DictReplayBuffer(300, KEYS, seed=7, priority=p) for p in (False, False, 0.5, 0.5)]
    for buffer in buffers:
        for serial in range(8):
            buffer.add(episode(50, serial))
    for a, b in (buffers[:2], buffers[2:]):
        for _ in range(3):
            assert a.sample_indices(20).tolist() == b.sample_indices(20).tolist()
            x, y = a.sample(9, sequence=5)["reward"], b.sample(9, sequence=5)["reward"]
            assert torch.equal(x, y)


@pytest.mark.parametrize("options", [{}, {"sequence": 7}, {"sequence": 7, "pad": True}])
def test_frames_and_windows_are_drawn_alike(options: dict[str, Any]) -> None:
    lengths = [3, 40, 7, 11, 24, 8]
    buffer = DictReplayBuffer(1000, KEYS, seed=11)
    for serial, length in enumerate(lengths):
        buffer.add(episode(length, serial))
    buffer.remove(1)
    lengths[1] = 0
    counts: dict[int, int] = {}
    for _ in range(100):
        first = buffer.sample(500, **options)["reward"].reshape(500, -1)[:, 0]
        for value in first.tolist():
            counts[int(value)] = counts.get(int(value), 0) + 1
    lost = 6 if options == {"sequence": 7} else 0
    possible = [1000 * s + t for s, n in enumerate(lengths) for t in range(max(0, n - lost))]
    assert set(counts) <= set(possible)
    expected = 50_000 / len(possible)
    chi_squared = sum((counts.get(v, 0) - expected) ** 2 / expected for v in possible)
    freedom = len(possible) - 1
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_bytes_are_bounded() -> None:
    limit = 8_000_000
    rng = np.random.default_rng(0)
    for eviction in ("fifo", "lru"):
        buffer = DictReplayBuffer(None, ["x"], max_bytes=limit, eviction=eviction, seed=0)
        newest = -1
        for _ in range(150):
            length = int(rng.integers(1, 400))
            newest = buffer.add({"x": np.full((length, 1000), length % 256, np.uint8)})
            buffer.sample(4)
            assert buffer.stored_bytes <= limit
            assert buffer.nbytes < 1.25 * limit
        assert buffer.episodes[-1] == newest
        assert buffer.stored_bytes > 0.7 * limit
        batch = buffer.sample(64)["x"]
        assert all(int(row.min()) == int(row.max()) for row in batch)


@pytest.mark.parametrize("spill", [False, True])
def test_scattered_survivors_move_together(tmp_path: Path, spill: bool) -> None:
    """Every chunk keeps a few living episodes: without moving them nothing could be given back."""
    options: dict[str, Any] = {"max_bytes": 8_000_000}
    if spill:
        options = {"max_bytes": 500_000, "spill_dir": tmp_path}
    buffer = DictReplayBuffer(100_000, ["x", "serial"], priority=0.5, seed=0, **options)
    for serial in range(2000):
        values = np.full((10, 200), serial % 256, np.uint8)
        buffer.add({"x": values, "serial": np.full(10, serial)})
    full = buffer.nbytes + buffer.spilled_bytes
    for serial in range(2000):
        if serial % 10:
            buffer.remove(serial)
    assert len(buffer) == 2000
    assert buffer.stored_bytes == 200 * 10 * 208
    priorities = buffer._store.priorities
    assert priorities is not None
    held = buffer.nbytes + buffer.spilled_bytes - priorities.tree.nbytes
    assert held < 0.45 * full
    batch = buffer.get(buffer.sample_indices(500))
    assert torch.equal(batch["x"][:, 77].long(), batch["serial"] % 256)
    assert bool((batch["serial"] % 10 == 0).all())


def test_bytes_evict_as_few_as_possible() -> None:
    buffer = DictReplayBuffer(None, ["x"], max_bytes="10kB")
    for _ in range(12):
        buffer.add({"x": np.zeros((10, 100), np.uint8)})  # 1000 bytes each
    assert buffer.episodes == list(range(2, 12))
    buffer.add({"x": np.zeros((25, 100), np.uint8)})
    assert buffer.episodes == [*range(5, 12), 12]
    before = snapshot(buffer)
    with pytest.raises(UsageError, match="does not fit max_bytes"):
        buffer.add({"x": np.zeros((101, 100), np.uint8)})
    assert snapshot(buffer) == before


def test_spilling_keeps_what_memory_does_not_hold(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_bytes": 1_000_000, "spill_dir": tmp_path / "spill"}
    buffer = DictReplayBuffer(100_000, KEYS, seed=0, **options)
    for serial in range(40):
        buffer.add(episode(400, serial))
    assert len(buffer) == 16_000
    assert buffer.spilled_bytes > 4_000_000
    assert buffer.nbytes < 1_500_000
    batch = buffer.sample(500)
    serials = batch["obs"][:, 0, :4].contiguous().view(torch.int32).reshape(-1)
    steps = batch["obs"][:, 1, :4].contiguous().view(torch.int32).reshape(-1)
    assert torch.equal(batch["reward"], (steps + 1000 * serials).float())
    assert len(serials.unique()) > 35
    for serial in range(0, 40, 2):
        buffer.remove(serial)
    assert len(buffer) == 8_000
    buffer.sample(100)


class TestRefused:
    """One clear error, and the buffer is as it was."""

    @pytest.fixture
    def buffer(self) -> DictReplayBuffer:
        buffer = DictReplayBuffer(50, KEYS, img_compressed=True, seed=0)
        buffer.add(episode(20))
        return buffer

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"obs": np.zeros((19, 12, 32), np.uint8)}, "ragged: 'reward' has 20 frames, 'obs'"),
            ({"done": None}, "has no key 'done'"),
            ({"rewrd": np.zeros(20)}, "no key 'rewrd'; did you mean"),
            ({"obs": np.zeros((20, 12, 33), np.uint8)}, r"uint8\[12, 33\], the first one had"),
            ({"obs": np.zeros((20, 12, 32), np.int8)}, r"int8\[12, 32\], the first one had"),
            ({"reward": np.float32(3.0)}, "'reward' is a single value"),
            ({"reward": np.array(["x"] * 20)}, "array of <U1"),
            ({"reward": [1.0, [2.0]] * 10}, "'reward' is ragged"),
            ({"obs": [np.zeros((12, 32), np.uint8), np.zeros((3, 3), np.uint8)]}, "is ragged"),
            ({"reward": torch.zeros(20).to_sparse()}, "sparse"),
            ({"reward": np.zeros((20, 0), np.float32)}, "there is nothing"),
        ],
    )
    def test_episodes(self, buffer: DictReplayBuffer, change: Any, message: str) -> None:
        before = snapshot(buffer)
        wrong = {key: value for key, value in (episode(20) | change).items() if value is not None}
        with pytest.raises(UsageError, match=message):
            buffer.add(wrong)
        assert snapshot(buffer) == before
        fresh = DictReplayBuffer(50, KEYS)
        if "the first one had" not in message:
            with pytest.raises(UsageError, match=message):
                fresh.add(wrong)
            assert fresh.codecs == {}
            fresh.add(episode(3))

    def test_empty_long_and_foreign(self, buffer: DictReplayBuffer) -> None:
        before = snapshot(buffer)
        with pytest.raises(UsageError, match="no frames"):
            buffer.add(episode(0))
        with pytest.raises(UsageError, match="51 frames does not fit max_size=50"):
            buffer.add(episode(51))
        with pytest.raises(UsageError, match="not a list"):
            buffer.add([1, 2])
        with pytest.raises(UsageError, match="has no key 'obs'; it is empty"):
            buffer.add({})
        assert snapshot(buffer) == before

    def test_samples(self, buffer: DictReplayBuffer) -> None:
        draws = DictReplayBuffer(50, KEYS, img_compressed=True, seed=0)
        draws.add(episode(20))
        for options, message in [
            ({"sequence": 21}, "longer than every episode"),
            ({"sequence": 0}, "sequence=0"),
            ({"n_step": 0}, "n_step=0"),
            ({"n_step": 2, "gamma": 1.5}, "gamma is 1.5"),
            ({"n_step": 2, "reward_key": "rew"}, "did you mean"),
            ({"n_step": 2, "done_key": "obs"}, "one value per frame"),
            ({"pad": True}, "pad=True"),
            ({"beta": -1.0}, "beta is -1"),
        ]:
            with pytest.raises(UsageError, match=message):
                buffer.sample(4, **options)
        for bad in (0, -1, 2.5, None):
            with pytest.raises(UsageError, match="batch_size"):
                buffer.sample(bad)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="empty"):
            DictReplayBuffer(5, KEYS).sample(1)
        with pytest.raises(UsageError, match="no priorities"):
            buffer.update_priority([0], [1.0])
        # Not one random number was used up.
        assert torch.equal(buffer.sample(9)["reward"], draws.sample(9)["reward"])

    def test_frames_and_episodes_that_are_gone(self, buffer: DictReplayBuffer) -> None:
        buffer.add(episode(45, 1))
        for bad in ([0], [65], [-1], [30, 3]):
            with pytest.raises(UsageError, match="is not held"):
                buffer.get(bad)
        with pytest.raises(UsageError, match="use whole numbers"):
            buffer.get([1.5])
        with pytest.raises(UsageError, match="episode 0 is not held"):
            buffer.remove(0)
        assert buffer.get(np.zeros((0,), np.int64))["obs"].shape == (0, 12, 32)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_size": 0}, "max_size=0"),
            ({"max_size": None}, "nothing bounds"),
            ({"max_size": 2.5}, "max_size=2.5"),
            ({"keys": []}, "keys is empty"),
            ({"keys": "obs"}, "keys is the text"),
            ({"keys": ["a", "a"]}, "'a' is given twice"),
            ({"keys": ["a", ("a", "b")]}, "lies inside"),
            ({"keys": [3]}, "not a key"),
            ({"codecs": "lz5"}, "did you mean 'lz4'"),
            ({"codecs": {"ob": "lz4"}}, "did you mean"),
            ({"eviction": "random"}, "eviction is 'random'"),
            ({"next_keys": ["nope"]}, "there is no key 'nope'"),
            ({"keys": ["obs", ("next", "obs")], "next_keys": ["obs"]}, "in the way"),
            ({"keys": ["obs", "next"], "next_keys": ["obs"]}, "in the way"),
            ({"keys": ["obs", "index"], "priority": 0.5}, "in the way"),
            ({"priority": 1.5}, "priority is 1.5"),
            ({"max_bytes": "ten"}, "not a size"),
            ({"max_bytes": 0}, "nothing bounds"),
            ({"spill_dir": "/tmp/x"}, "spill_dir needs max_bytes"),
        ],
    )
    def test_settings(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            DictReplayBuffer(**{"max_size": 10, "keys": KEYS, **options})

    def test_names_that_a_batch_needs(self) -> None:
        buffer = DictReplayBuffer(10, ["mask", "discount", "reward", "done"])
        buffer.add({key: np.zeros(5, np.float32) for key in ("mask", "discount", "reward", "done")})
        buffer.sample(2, sequence=2)
        with pytest.raises(UsageError, match="'mask'"):
            buffer.sample(2, sequence=2, pad=True)
        with pytest.raises(UsageError, match="'discount'"):
            buffer.sample(2, n_step=2)

    def test_a_codec_that_cannot_hold_the_frames(self) -> None:
        buffer = DictReplayBuffer(10, ["x"], codecs="sparse")
        with pytest.raises(UsageError, match="sparse"):
            buffer.add({"x": np.zeros((4, 301), np.uint8)})

    def test_values_that_are_no_numbers(self) -> None:
        with pytest.raises(UnsupportedValue, match="object"):
            DictReplayBuffer(10, ["x"]).add({"x": np.array([None, 1])})


def test_n_steps_in_windows_and_other_types() -> None:
    buffer = DictReplayBuffer(50, KEYS, next_keys=["reward"], seed=0)
    data = episode(12) | {"reward": np.arange(12)[:, None], "done": np.zeros((12, 1), np.int8)}
    buffer.add(data)
    batch = buffer.sample(20, sequence=4, n_step=3, gamma=1.0)
    assert batch["reward"].dtype == torch.float32
    assert batch["reward"].shape == (20, 4, 1)
    assert batch["discount"].shape == (20, 4)
    for row in range(20):
        ahead = batch["next"]["reward"][row, :, 0].tolist()
        summed = batch["reward"][row, :, 0].tolist()
        for k in range(4):
            start = ahead[0] - 3 + k if ahead[0] < 11 else 8 + k
            assert summed[k] == sum(x for x in range(int(start), int(start) + 3) if x < 12)


def test_four_threads_add_and_sample() -> None:
    buffer = DictReplayBuffer(
        3000, KEYS, img_compressed=True, eviction="lru", next_keys=["obs"], priority=0.5, seed=0
    )
    buffer.add(episode(5, 0))
    stop, problems = time.monotonic() + 2.0, []
    counts = [0, 0, 0, 0]

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        serial = 2000 * number  # rewards stay whole in float32
        try:
            while time.monotonic() < stop:
                serial += 1
                identity = buffer.add(episode(int(rng.integers(1, 200)), serial))
                batch = buffer.sample(32, n_step=1)
                check(batch)
                buffer.update_priority(batch["index"], rng.random(32))
                check(buffer.sample(8, sequence=3, pad=True))
                if rng.random() < 0.2:
                    with contextlib.suppress(UsageError):  # evicted already
                        buffer.remove(identity)
                counts[number] += 1
        except Exception as error:
            problems.append(error)

    def check(batch: Any) -> None:
        obs, after = batch["obs"].flatten(0, -3), batch["next"]["obs"].flatten(0, -3)
        words = obs[:, :2, :4].contiguous().view(torch.int32)[..., 0]
        next_words = after[:, :2, :4].contiguous().view(torch.int32)[..., 0]
        assert torch.equal(batch["reward"].flatten(), (words[:, 1] + 1000 * words[:, 0]).float())
        assert torch.equal(next_words[:, 0], words[:, 0])
        moved = next_words[:, 1] - words[:, 1]
        assert torch.equal(moved == 1, batch["next"]["valid"].flatten())
        assert int(obs[:, 2:].max()) == 0

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert min(counts) > 5
    assert len(buffer) <= 3000


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize(
    ("owner", "call"),
    [(Arena, "put"), (Arena, "free"), (EpisodeIndex, "append"), (EpisodeIndex, "remove")],
)
@pytest.mark.parametrize("way", ["add", "episode", "remove"])
def test_an_interrupt_leaves_no_episode_half_there(
    monkeypatch: pytest.MonkeyPatch, way: str, owner: Any, call: str, point: str
) -> None:
    """Ctrl-C in the midst of a call: what it drew by afterwards would be frames that are gone."""
    buffer = DictReplayBuffer(40, KEYS, img_compressed=True, priority=True, seed=0)
    for serial in range(4):
        buffer.add(episode(10, serial))
    original = getattr(owner, call)

    def interrupted(self: Any, *arguments: Any) -> Any:
        if point == "before":
            signal.raise_signal(signal.SIGINT)
        result = original(self, *arguments)
        if point == "after":
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, call, interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        if way == "add":
            buffer.add(episode(20, 4))
        elif way == "episode":
            with buffer.episode() as parts:
                parts.extend(episode(20, 4))
        else:
            buffer.remove(1)
    monkeypatch.undo()
    assert buffer.episodes == ([0, 2, 3] if way == "remove" else [2, 3, 4])
    assert len(buffer) == (30 if way == "remove" else 40)
    for _ in range(20):
        batch = buffer.sample(32)
        serials, steps = batch["obs"][:, 0, 0].float(), batch["obs"][:, 1, 0].float()
        assert torch.equal(batch["reward"], 1000 * serials + steps)
        buffer.update_priority(batch["index"], torch.rand(32))


@pytest.mark.parametrize("fails", [True, False])
def test_an_episode_in_parts_is_used_once(fails: bool) -> None:
    buffer = DictReplayBuffer(100, KEYS, priority=True, seed=0)
    buffer.add(episode(10, 0))
    parts = buffer.episode()
    with contextlib.suppress(ZeroDivisionError), parts:
        parts.extend(episode(5, 1))
        if fails:
            raise ZeroDivisionError
    held = buffer.episodes
    with pytest.raises(UsageError, match="begin another"):
        parts.extend(episode(5, 2))
    with pytest.raises(UsageError, match="begin another"), parts:
        raise AssertionError("not entered")
    assert buffer.episodes == held
    for _ in range(5):
        batch = buffer.sample(32)
        serials, steps = batch["obs"][:, 0, 0].float(), batch["obs"][:, 1, 0].float()
        assert torch.equal(batch["reward"], 1000 * serials + steps)
