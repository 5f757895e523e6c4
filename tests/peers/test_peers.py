"""Our reader, doctor and writer against the real lerobot; see peer.py for how it is installed."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.dataset.check import check
from penstock.dataset.layout import Feature
from penstock.dataset.reader import Dataset
from penstock.dataset.unit import Episode
from penstock.dataset.writer import DatasetWriter
from penstock.media.video import VideoSettings

from .peer import lerobot_reads, run

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

HANDMADE = Path(__file__).parent.parent / "dataset" / "handmade.py"
hand = SimpleNamespace(**runpy.run_path(str(HANDMADE)))
MODES = ["video", "image", "h264", "v21"]
CAMERAS = ["observation.images.top", "observation.images.wrist"]


def make_golden(out: Path, mode: str, *words: str) -> Path:
    old = mode == "v21"
    chosen = ["--mode", "video", "--plain"] if old else ["--mode", mode]
    result = run("make_golden.py", out, *chosen, *words, old=old)
    assert result.returncode == 0, result.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def goldens(tmp_path_factory) -> dict[str, Path]:
    """Datasets that lerobot wrote."""
    folder = tmp_path_factory.mktemp("goldens")
    return {mode: make_golden(folder / mode, mode) for mode in MODES}


@pytest.mark.parametrize("mode", MODES)
def test_we_read_what_lerobot_wrote(goldens, mode) -> None:
    dataset = Dataset(goldens[mode])
    assert dataset.version == ("v2.1" if mode == "v21" else "v3.0")
    with np.load(f"{goldens[mode]}.npz") as file:
        expect = dict(file)
    assert [len(episode) for episode in dataset.episodes] == expect["lengths"].tolist()
    for episode in dataset.episodes:
        rows = slice(episode.from_index, episode.to_index)
        columns = episode.columns()
        for name, value in expect.items():
            if name.startswith("vec/"):
                found = columns[name.removeprefix("vec/")]
                wanted = value[rows].reshape(found.shape)
                assert np.array_equal(found, wanted), name
        for frame, index in zip(episode.frames(), range(*rows.indices(10**9)), strict=True):
            assert frame["task"] == expect["task"][index]
            for camera in CAMERAS:
                mean = frame[camera].mean((0, 1)) / 255
                assert np.abs(mean - expect[f"mean/{camera}"][index]).max() < 0.02


@pytest.mark.parametrize("mode", MODES)
def test_the_doctor_finds_only_what_is_known_of_lerobot(goldens, mode) -> None:
    result = check(goldens[mode])
    assert result.errors == [], result.text()
    texts = [finding.what for finding in result.warnings]
    if mode == "v21":
        assert all("temporary of lerobot" in text for text in texts)
    else:
        assert all("std of" in text or "quantiles" in text for text in texts), texts
        assert sum("lerobot before 0.6 writes 0" in text for text in texts) == 4


@pytest.mark.parametrize("files", [(0, 0, 1), (0, 0, 0), (0, 1, 2)])
def test_lerobot_reads_what_is_made_by_hand(tmp_path, files) -> None:
    """So that the datasets of tests/dataset are what lerobot takes for a dataset."""
    root = hand.make_dataset(tmp_path / "made", files=files)
    (tmp_path / "made.npz").write_bytes(hand.to_npz(root))
    verdict = lerobot_reads(root, tmp_path / "made.npz")
    assert verdict["backends"]["pyav"]["frames"] == 39


def test_lerobot_reads_v21_that_is_made_by_hand(tmp_path) -> None:
    root = hand.make_dataset(tmp_path / "made", "v2.1")
    (tmp_path / "made.npz").write_bytes(hand.to_npz(root))
    verdict = lerobot_reads(root, tmp_path / "made.npz", old=True)
    assert verdict["backends"]["pyav"]["frames"] == 39


@pytest.mark.parametrize("mode", ["video", "image"])
def test_we_read_what_lerobot_merged(tmp_path, mode) -> None:
    first = make_golden(tmp_path / "first", mode, "--plain")
    second = Path(shutil.copytree(first, tmp_path / "second"))
    merged = tmp_path / "merged"
    lerobot_reads(first, tmp_path / "first.npz", "--merge", second, "--merged", merged)
    result = check(merged)
    assert result.errors == [], result.text()
    dataset = Dataset(merged)
    assert [len(episode) for episode in dataset.episodes] == [12, 7, 20] * 2
    for k in range(3):
        one, other = (dataset.episode(k + offset) for offset in (0, 3))
        assert np.array_equal(
            one.columns(["action"])["action"], other.columns(["action"])["action"]
        )
        assert np.array_equal(one.image(CAMERAS[0], 6), other.image(CAMERAS[0], 6))


def write(writer: DatasetWriter, source: Dataset, codec: str) -> None:
    """Write all episodes of a dataset once more, with our writer, in two builds."""
    features = writer.plan.spec.features
    for episode in source.episodes:
        settings = {
            # A better quality than usual: the pictures may have gone through a codec already.
            name: VideoSettings("png" if feature.dtype == "image" else codec, crf=10)
            for name, feature in features.items()
            if feature.is_picture
        }
        episodes = [Episode(episode.length, episode.tasks[0])]
        with writer.unit({"episode": episode.index}, episodes, settings) as unit:
            unit.add_rows(episode.columns([n for n in features if n not in settings]))
            for name in settings:
                for frame in episode.frames([name]):
                    unit.video(name, 0).add_frame(frame[name])
            unit.commit()
        if episode.index == 0:
            assert writer.build()
    assert writer.build()


def own_features(source: Dataset, without: tuple[str, ...] = ()) -> dict[str, Feature]:
    automatic = ("timestamp", "frame_index", "episode_index", "index", "task_index")
    return {
        name: Feature(feature.dtype, feature.shape, feature.names)
        for name, feature in source.features.items()
        if name not in (*automatic, *without)
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Dataset, Path]:
    """A dataset made by hand, to be written by our writer, and its values."""
    folder = tmp_path_factory.mktemp("made")
    root = hand.make_dataset(folder / "made")
    (folder / "made.npz").write_bytes(hand.to_npz(root))
    return Dataset(root), folder / "made.npz"


@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_lerobot_reads_what_we_wrote(made, tmp_path, codec) -> None:
    source, expect = made
    with DatasetWriter(tmp_path / "ours", own_features(source), 30, "tester") as writer:
        write(writer, source, codec)
    assert check(tmp_path / "ours").findings == []
    lerobot_reads(tmp_path / "ours", expect)


def test_lerobot_reads_what_we_wrote_as_v21(made, tmp_path) -> None:
    source, expect = made
    features = own_features(source)
    with DatasetWriter(tmp_path / "ours", features, 30, "tester", version="v2.1") as writer:
        write(writer, source, "h264")
    assert check(tmp_path / "ours").findings == []
    lerobot_reads(tmp_path / "ours", expect, old=True)


def test_lerobot_merges_what_we_wrote(made, tmp_path) -> None:
    """All but the matrix, which lerobot cannot merge in datasets of its own either."""
    source, whole = made
    features = own_features(source, ("matrix",))
    for name in ("one", "two"):
        with DatasetWriter(tmp_path / name, features, 30, "tester") as writer:
            write(writer, source, "h264")
    with np.load(whole) as file:
        np.savez(tmp_path / "x.npz", **{n: v for n, v in file.items() if n != "vec/matrix"})
    merged = tmp_path / "merged"
    words = ("--merge", tmp_path / "two", "--merged", merged)
    lerobot_reads(tmp_path / "one", tmp_path / "x.npz", *words)
    result = check(merged)
    assert result.errors == [], result.text()
    assert len(Dataset(merged)) == 6


@pytest.mark.parametrize("mode", ["video", "image"])
def test_lerobot_reads_what_we_added_to_its_own(tmp_path, mode) -> None:
    source = Dataset(make_golden(tmp_path / "golden", mode))
    root = Path(shutil.copytree(tmp_path / "golden", tmp_path / "both"))
    with DatasetWriter(root, own_features(source), 30, "tester", mode="append") as writer:
        write(writer, source, "av1")
    result = check(root)
    assert result.errors == [], result.text()
    numbered = ("vec/index", "vec/episode_index", "vec/task_index")
    with np.load(tmp_path / "golden.npz") as file:
        values = {n: np.concatenate([v, v]) for n, v in file.items() if n not in numbered}
    np.savez(tmp_path / "both.npz", **values)
    lerobot_reads(root, tmp_path / "both.npz")
