"""A LeRobot dataset in a replay buffer: every value, every picture, in bounded memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from penstock.conversion.memory import MemoryWatch
from penstock.core.memory import rss_bytes
from penstock.dataset.layout import Feature
from penstock.dataset.reader import Dataset
from penstock.dataset.unit import Episode
from penstock.dataset.writer import DatasetWriter
from penstock.errors import DataError, UnknownFormat, UsageError
from penstock.media.video import VideoSettings
from penstock.replay.episodes import lerobot
from penstock.replay.episodes.buffer import DictReplayBuffer
from penstock.rollouts.lerobot import export
from penstock.rollouts.storage import RolloutStorage

HEAD, PNG, DEPTH = "observation.images.head", "observation.images.png", "observation.images.depth"
HEIGHT, WIDTH = 32, 48
FEATURES = {
    "observation.state": Feature("float32", (3,)),
    "action": Feature("float32", (1,)),
    "next.reward": Feature("float32", (1,)),
    "label": Feature("string", (1,)),
    HEAD: Feature("video", (HEIGHT, WIDTH, 3), ["height", "width", "channels"]),
    PNG: Feature("image", (HEIGHT, WIDTH, 3), ["height", "width", "channels"]),
    DEPTH: Feature("video", (HEIGHT, WIDTH, 1), ["height", "width", "channels"]),
}
CODECS = {HEAD: VideoSettings("h264"), PNG: VideoSettings("png"), DEPTH: VideoSettings("depth12")}


@pytest.fixture(autouse=True)
def quiet(monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")


def picture(number: int) -> np.ndarray:
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    plane = (rows * 3 + columns * 2 + number * 5) % 256
    return np.stack([plane, 255 - plane, plane // 2], axis=2).astype(np.uint8)


def write_cameras(root, lengths) -> None:
    with DatasetWriter(root, FEATURES, 10) as writer:
        for number, frames in enumerate(lengths):
            rng = np.random.default_rng(number)
            episode = Episode(frames, f"task {number}")
            with writer.unit({"n": number}, [episode], CODECS) as unit:
                unit.add_rows(
                    {
                        "observation.state": rng.normal(size=(frames, 3)),
                        "action": rng.normal(size=(frames, 1)),
                        "next.reward": rng.normal(size=(frames, 1)),
                        "label": [f"frame {k}" for k in range(frames)],
                    }
                )
                for k in range(frames):
                    unit.video(HEAD, 0).add_frame(picture(number * 9 + k))
                    unit.video(PNG, 0).add_frame(picture(number * 7 + k))
                    depth = picture(k)[..., 0].astype(np.uint16) * 9 + 400
                    unit.video(DEPTH, 0).add_frame(depth)
                unit.commit()
        writer.build()


@pytest.fixture(scope="module")
def cameras(tmp_path_factory):
    root = tmp_path_factory.mktemp("cameras") / "dataset"
    write_cameras(root, [7, 1, 12])
    return root


def all_of(buffer):
    return buffer.get(np.arange(len(buffer)))


@pytest.mark.parametrize("window", [1, 5, 4096])
def test_every_frame_is_the_readers_own(cameras, window, monkeypatch) -> None:
    monkeypatch.setattr(lerobot, "_WINDOW_FRAMES", window)
    buffer = DictReplayBuffer.from_lerobot(cameras)
    assert (len(buffer), len(buffer.episodes)) == (20, 3)
    dataset = Dataset(cameras)
    frames = [frame for episode in dataset.episodes for frame in episode.frames()]
    found = all_of(buffer)
    names = {"observation.state", "action", "reward", "done", HEAD, PNG, DEPTH}
    assert set(found) == names
    for name in names - {"done"}:
        wanted = np.stack([f["next.reward" if name == "reward" else name] for f in frames])
        assert found[name].numpy().dtype == wanted.dtype
        assert np.array_equal(found[name].numpy(), wanted), name
    assert found[HEAD].shape == (20, HEIGHT, WIDTH, 3)
    assert found[DEPTH].dtype == torch.uint16
    assert found[DEPTH].shape == (20, HEIGHT, WIDTH)
    assert np.flatnonzero(found["done"].numpy()).tolist() == [6, 7, 19]
    assert buffer.codecs[PNG] != "raw"  # compressed unless it is told otherwise


def test_keys_names_and_episodes_are_chosen(cameras) -> None:
    buffer = DictReplayBuffer.from_lerobot(
        Dataset(cameras),
        ["observation.state", "reward", "done", PNG],
        episodes=[2, 0],
        rename={"observation.state": ("obs", "state"), PNG: ("obs", "pixels"), "reward": "r"},
        img_compressed=False,
        next_keys=[("obs", "state")],
        seed=1,
    )
    dataset = Dataset(cameras)
    state = np.concatenate([dataset.episode(k).columns()["observation.state"] for k in (2, 0)])
    found = all_of(buffer)
    assert np.array_equal(found["obs"]["state"].numpy(), state)
    assert set(found) == {"obs", "r", "done", "next"}
    assert set(buffer.codecs.values()) == {"raw"}
    batch = buffer.sample(16, n_step=2, reward_key="r")
    assert batch["obs"]["pixels"].shape == (16, HEIGHT, WIDTH, 3)
    only = DictReplayBuffer.from_lerobot(cameras, [HEAD], episodes=[1])
    assert (len(only), list(all_of(only))) == (1, [HEAD])
    indices = DictReplayBuffer.from_lerobot(cameras, ["frame_index", "task_index"])
    assert all_of(indices)["task_index"].tolist() == [0] * 7 + [1] + [2] * 12


def test_a_smaller_buffer_keeps_the_last_episodes(cameras) -> None:
    buffer = DictReplayBuffer.from_lerobot(cameras, ["action"], max_size=13)
    assert (len(buffer), buffer.episodes) == (13, [1, 2])
    with pytest.raises(UsageError, match="12 frames does not fit max_size=11"):
        DictReplayBuffer.from_lerobot(cameras, ["action"], max_size=11)


def test_wrong_arguments(cameras, tmp_path) -> None:
    for options, words in [
        ({"keys": ["observation.stat"]}, "did you mean 'observation.state'"),
        ({"keys": "action"}, "give a list of features"),
        ({"keys": ["label"]}, "is text"),
        ({"keys": []}, "keys is empty"),
        ({"episodes": [3]}, "has no episode 3"),
        ({"episodes": []}, "no episode to read"),
        ({"rename": {"actoin": "a"}}, "did you mean 'action'"),
        ({"keys": ["action"], "rename": {HEAD: "a"}}, "not one of the keys"),
        ({"keys": ["action", "reward"], "rename": {"reward": "action"}}, "given twice"),
        ({"eviction": "random"}, "eviction is"),
    ]:
        with pytest.raises(UsageError, match=words):
            DictReplayBuffer.from_lerobot(cameras, **options)
    with pytest.raises(UnknownFormat):
        DictReplayBuffer.from_lerobot(tmp_path)


def test_a_damaged_dataset_is_an_error(cameras, tmp_path) -> None:
    root = tmp_path / "bad"
    root.mkdir()
    for path in cameras.rglob("*"):
        target = root / path.relative_to(cameras)
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    file = next(root.glob("data/*/*.parquet"))
    data = bytearray(file.read_bytes())
    data[60:90] = bytes(30)
    file.write_bytes(data)
    with pytest.raises(DataError):
        DictReplayBuffer.from_lerobot(root)


def test_rollouts_to_dataset_to_buffer(tmp_path) -> None:
    """The whole bridge: what an environment saw is what a batch holds, bit for bit."""
    rng = torch.Generator().manual_seed(0)
    done = torch.rand(40, 9, 1, generator=rng) < 0.15
    batch = TensorDict(
        {
            "agents": {
                "observation": {
                    "state": torch.randn(40, 9, 8, generator=rng),
                    "lidar": torch.rand(40, 9, 1, 36, 4, generator=rng).relu(),
                }
            },
            "action": torch.randn(40, 9, 3, generator=rng),
            "reward": torch.randn(40, 9, 1, generator=rng),
            "done": done,
        },
        batch_size=[40, 9],
    )
    batch["agents", "observation", "state"][3, 3] = torch.tensor([np.nan, -0.0] + [1e-40] * 6)
    RolloutStorage(tmp_path / "r").save(batch, 5)
    report = export(tmp_path / "r", tmp_path / "out")
    buffer = DictReplayBuffer.from_lerobot(
        tmp_path / "out",
        rename={
            "observation.state": ("agents", "observation", "state"),
            "observation.lidar": ("agents", "observation", "lidar"),
        },
    )
    assert (len(buffer), len(buffer.episodes)) == (360, report.episodes)
    found = all_of(buffer)
    for key in batch.keys(True, True):
        value = found
        for name in key if isinstance(key, tuple) else (key,):
            value = value[name]
        wanted = batch[key].flatten(0, 1).reshape(value.shape).contiguous()
        assert value.dtype == wanted.dtype
        assert value.numpy().tobytes() == wanted.numpy().tobytes(), key


def test_many_short_episodes_are_read_in_one_pass(tmp_path, monkeypatch) -> None:
    features = {"x": Feature("int64", (1,))}
    with DatasetWriter(tmp_path / "d", features, 10) as writer:
        with writer.unit({}, [Episode(3, "t")] * 1000) as unit:
            unit.add_rows({"x": np.arange(3000)})
            unit.commit()
        writer.build()
    opened = []
    from penstock.dataset import reader

    table = reader.Table

    def counted(*words):
        opened.append(words)
        return table(*words)

    monkeypatch.setattr(reader, "Table", counted)
    buffer = DictReplayBuffer.from_lerobot(tmp_path / "d")
    assert all_of(buffer)["x"].tolist() == list(range(3000))
    assert len(opened) < 5


def test_ten_thousand_pictures_take_the_memory_of_a_window(tmp_path, cameras) -> None:
    """184 MB of pictures, in one episode, under a third of that beside what the buffer holds."""
    height, width, count = 64, 96, 10_000
    features = {HEAD: Feature("video", (height, width, 3), ["height", "width", "channels"])}
    settings = {HEAD: VideoSettings("h264")}
    frame = np.zeros((height, width, 3), np.uint8)
    with DatasetWriter(tmp_path / "d", features, 30) as writer:
        with writer.unit({}, [Episode(count, "t")], settings) as unit:
            sink = unit.video(HEAD, 0)
            for number in range(count):
                frame[8:40, 8:40] = number % 200
                sink.add_frame(frame)
            unit.commit()
        writer.build()
    DictReplayBuffer.from_lerobot(cameras)  # so that the libraries are loaded
    before = rss_bytes(tree=False)
    with MemoryWatch(interval_s=0.02) as watch:
        buffer = DictReplayBuffer.from_lerobot(tmp_path / "d", codecs={HEAD: "lz4"})
    assert len(buffer) == count
    raw_bytes = height * width * 3 * count
    assert buffer.nbytes < raw_bytes / 10
    assert watch.peak_bytes - before - buffer.nbytes < raw_bytes / 3
    last = Dataset(tmp_path / "d").episode(0).image(HEAD, count - 1)
    assert np.array_equal(buffer.get([count - 1])[HEAD][0].numpy(), last)


def frames_of(count: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    flat = np.repeat(rng.integers(0, 255, (count, 20, 1), dtype=np.uint8), 32, axis=2)
    return {"pixels": flat, "action": rng.normal(size=(count, 2)).astype(np.float32)}


@pytest.mark.parametrize("codec", ["auto", "raw", "lz4", "zstd"])
@pytest.mark.parametrize("parts", [[1] * 21, [21], [8, 8, 5], [3, 17, 1]])
def test_parts_make_the_episode_that_add_makes(codec, parts) -> None:
    episode = frames_of(21)
    codecs = {"pixels": codec}
    one, two = (
        DictReplayBuffer(100, ["pixels", "action"], codecs=codecs, seed=0) for _ in range(2)
    )
    for turn in range(2):  # the first one settles the codecs
        assert one.add(episode) == turn
        with two.episode() as growing:
            start = 0
            for count in parts:
                growing.extend({k: v[start : start + count] for k, v in episode.items()})
                start += count
                assert (len(growing), len(two)) == (start, 21 * turn)
        assert growing.id == turn
    for name, value in all_of(one).items():
        assert torch.equal(value, all_of(two)[name])
    if len(parts) == 1:
        assert (one.stored_bytes, one.codecs) == (two.stored_bytes, two.codecs)
    assert torch.equal(one.sample(9)["pixels"], two.sample(9)["pixels"])


def test_parts_survive_a_save_and_evict(tmp_path) -> None:
    buffer = DictReplayBuffer(30, ["pixels", "action"], img_compressed=True, priority=True)
    for seed in range(4):
        with buffer.episode() as growing:
            for start in (0, 5):
                part = {k: v[start : start + 5] for k, v in frames_of(10, seed).items()}
                growing.extend(TensorDict(part, [5]))
    assert buffer.episodes == [1, 2, 3]
    buffer.save(tmp_path / "saved")
    again = DictReplayBuffer.load(tmp_path / "saved")
    ids = np.arange(10, 40)
    found = again.get(ids)
    assert isinstance(found, TensorDict)
    wanted = np.concatenate([frames_of(10, seed)["pixels"] for seed in (1, 2, 3)])
    assert np.array_equal(found["pixels"].numpy(), wanted)


def test_an_error_leaves_the_buffer_unchanged() -> None:
    buffer = DictReplayBuffer(12, ["pixels", "action"], img_compressed=True)
    with pytest.raises(KeyboardInterrupt), buffer.episode() as growing:
        growing.extend(frames_of(3))
        raise KeyboardInterrupt
    assert (len(buffer), buffer.codecs) == (0, {})
    buffer.add(frames_of(10))
    with pytest.raises(UsageError, match="does not fit max_size=12"), buffer.episode() as growing:
        growing.extend(frames_of(8))
        growing.extend(frames_of(8))
    other = {"pixels": np.zeros((2, 3), np.uint8), "action": np.zeros((2, 2), np.float32)}
    with pytest.raises(UsageError, match="the first one had"), buffer.episode() as growing:
        growing.extend(other)
    with pytest.raises(UsageError, match="the first one had"):  # noqa: SIM117
        with DictReplayBuffer(12, ["pixels", "action"]).episode() as growing:
            growing.extend(frames_of(2))
            growing.extend(other)
    with pytest.raises(UsageError, match="no frames"), buffer.episode():
        pass
    small = DictReplayBuffer(None, ["pixels"], max_bytes=2000)
    with pytest.raises(UsageError, match="does not fit max_bytes"), small.episode() as growing:
        growing.extend({"pixels": frames_of(9)["pixels"]})
    assert (len(buffer), buffer.episodes) == (10, [0])
    with buffer.episode() as growing:
        growing.extend(frames_of(2))
    with pytest.raises(UsageError, match="in the buffer already"):
        growing.extend(frames_of(2))


def test_a_first_episode_that_another_thread_overtook() -> None:
    buffer = DictReplayBuffer(100, ["pixels", "action"], img_compressed=True)
    noise = frames_of(9)
    noise["pixels"] = np.random.default_rng(1).integers(0, 255, (9, 20, 32), dtype=np.uint8)
    with pytest.raises(UsageError, match="another thread added"), buffer.episode() as growing:
        growing.extend(frames_of(9))
        thread = threading.Thread(target=buffer.add, args=(noise,))
        thread.start()
        thread.join()
    assert (buffer.episodes, buffer.codecs["pixels"]) == ([0], "raw")
    with buffer.episode() as growing:
        growing.extend(frames_of(9))
        buffer.add(noise)  # alike: both have their place
    assert len(buffer) == 27
