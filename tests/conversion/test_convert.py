"""Whole conversions: containers, codecs, versions, resume, append, failures, the command."""

import filecmp
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.bags import open_bag
from penstock.bags.source import Source
from penstock.cli import main
from penstock.conversion.guess import guess_mapping
from penstock.conversion.recordings import fingerprint
from penstock.dataset.reader import Dataset
from penstock.dataset.writer import DatasetWriter
from penstock.errors import DataError, LockHeld, UsageError
from penstock.samples import read_number

QUIET = {"progress": "quiet", "memory": "1GB"}


def same_dataset(one: Path, two: Path, origin: bool = True) -> list[str]:
    """Return the files in which two datasets differ, our private folder left out.

    Without `origin` they may have come from other recordings.
    """
    ours = (".",) if origin else (".", "meta/penstock/")

    def files(root):
        found = (p.relative_to(root) for p in root.rglob("*") if p.is_file())
        return {str(p) for p in found if not str(p).startswith(ours)}

    names = files(one) | files(two)
    return [
        name
        for name in sorted(names)
        if not (one / name).exists()
        or not (two / name).exists()
        or not filecmp.cmp(one / name, two / name, shallow=False)
    ]


CONTAINERS = [
    ("a.bag", {"kind": "bag", "compression": "lz4"}),
    ("b.bag", {"kind": "bag", "compression": "bz2"}),
    ("c.mcap", {"kind": "mcap", "compression": "zstd"}),
    ("d.mcap", {"kind": "mcap", "compression": "lz4"}),
    ("e.db3", {"kind": "db3"}),
    ("folder", {"kind": "mcap"}),
    ("folder", {"kind": "db3", "compression": "zstd"}),
]


@pytest.fixture(scope="module")
def plain(samples, tmp_path_factory):
    """The dataset of the plain ROS 1 bag."""
    out = tmp_path_factory.mktemp("plain") / "out"
    report = penstock.convert(samples(seconds=2).path, out, **QUIET)
    assert report.ok, report.text()
    return out


@pytest.mark.parametrize(("name", "settings"), CONTAINERS)
def test_every_container_gives_the_same_dataset(samples, tmp_path, plain, name, settings):
    report = penstock.convert(samples(name, seconds=2, **settings).path, tmp_path / "out", **QUIET)
    assert report.ok, report.text()
    assert same_dataset(tmp_path / "out", plain, origin=False) == []


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
@pytest.mark.parametrize("codec", ["h264", "av1", "copy", "png"])
def test_every_codec_in_every_version(samples, tmp_path, codec, version):
    facts = samples(seconds=2)
    report = penstock.convert(facts.path, tmp_path / "out", codec=codec, version=version, **QUIET)
    assert report.ok, report.text()
    dataset = Dataset(tmp_path / "out")
    assert dataset.info["codebase_version"] == version
    key = "observation.images.wrist_cam_l"
    numbers = [read_number(frame[key]) for frame in dataset.episode(0).frames([key])]
    assert numbers == list(range(60))


@pytest.mark.parametrize("codec", ["depth12", "grey8"])
def test_depth(samples, tmp_path, codec):
    facts = samples(seconds=1, depth=True, cameras=1)
    mapping = {
        "fps": 30,
        "features": {
            "observation.state": {"topic": "/sensors_data_raw", "field": "joint_data.joint_q"},
            "observation.depth": {"topic": facts.depths[0], "kind": "depth", "codec": codec},
        },
    }
    from penstock.conversion.settings import from_json

    report = penstock.convert(facts.path, tmp_path / "out", from_json(mapping), **QUIET)
    assert report.ok, report.text()
    frame = next(iter(Dataset(tmp_path / "out").episode(0).frames()))
    picture = frame["observation.depth"]
    assert picture.shape[:2] == (48, 256)
    assert picture.dtype == (np.uint16 if codec == "depth12" else np.uint8)


def test_depth_of_a_kuavo_in_12_bits(samples, tmp_path):
    """What the command says stands above what the robot's settings imply."""
    config = tmp_path / "Kuavo.yaml"
    config.write_text("dataset: {use_depth: true, which_arm: right, eef_type: leju_claw}\n")
    take = samples(seconds=1, depth=True).path
    options = {"config": config, "depth_codec": "depth12", **QUIET}
    report = penstock.convert(take, tmp_path / "out", **options)
    assert report.ok, report.text()
    frame = next(iter(Dataset(tmp_path / "out").episode(0).frames()))
    assert frame["observation.depth_h"].dtype == np.uint16


def test_raw_pictures_and_resize(samples, tmp_path):
    facts = samples(seconds=1, raw_images=True, cameras=1)
    mapping = {
        "fps": 30,
        "features": {
            "action": {"topic": "/joint_cmd", "field": "joint_q", "align": "linear"},
            "observation.images.a": {"topic": facts.cameras[0], "kind": "color"},
            "observation.images.b": {
                "topic": facts.cameras[0],
                "kind": "color",
                "resize": [128, 24],
            },
        },
    }
    from penstock.conversion.settings import from_json

    report = penstock.convert(facts.path, tmp_path / "out", from_json(mapping), **QUIET)
    assert report.ok, report.text()
    frame = next(iter(Dataset(tmp_path / "out").episode(0).frames()))
    assert frame["observation.images.a"].shape == (48, 256, 3)
    assert frame["observation.images.b"].shape == (24, 128, 3)


def test_workers_do_not_change_the_dataset(samples, tmp_path):
    bags = [samples(seconds=2, seed=seed).path for seed in range(4)]
    one = penstock.convert(bags, tmp_path / "one", **QUIET)
    plenty = {**QUIET, "memory": "8GB"}  # this process counts as well
    two = penstock.convert(bags, tmp_path / "two", workers=2, **plenty)
    assert one.ok
    assert two.ok
    assert two.workers == 2
    assert one.total_episodes == 4
    assert same_dataset(tmp_path / "one", tmp_path / "two") == []


def test_resume_skips_what_is_committed_and_refuses_other_settings(samples, tmp_path):
    bags = [samples(seconds=2, seed=seed).path for seed in range(3)]
    whole = penstock.convert(bags, tmp_path / "whole", **QUIET)
    out = tmp_path / "out"
    penstock.convert(bags[:1], out, **QUIET)
    with pytest.raises(UsageError, match="--resume"):
        penstock.convert(bags, out, **QUIET)
    with pytest.raises(UsageError, match="fps"):
        penstock.convert(bags, out, resume=True, fps=10, **QUIET)
    again = penstock.convert(bags, out, resume=True, **QUIET)
    assert again.ok
    assert again.skipped == bags[:1]
    assert len(again.bags) == 2
    assert Dataset(out).info["total_episodes"] == whole.total_episodes
    third = penstock.convert(bags, out, resume=True, **QUIET)
    assert third.skipped == bags
    assert third.account.frames_out == 0


def test_a_bag_is_known_by_its_content(samples, tmp_path):
    first, second = samples(seconds=2).path, samples(seconds=2, seed=1).path
    same, other = tmp_path / "renamed.bag", tmp_path / first.name
    shutil.copy(first, same)
    shutil.copy(second, other)
    assert fingerprint(same) == fingerprint(first)
    assert fingerprint(other) != fingerprint(first)


def test_append_adds_episodes(samples, tmp_path):
    out = tmp_path / "out"
    penstock.convert(samples(seconds=2).path, out, **QUIET)
    before = Dataset(out).episode(0).columns()
    report = penstock.convert(samples(seconds=2, seed=1).path, out, append=True, **QUIET)
    assert report.ok, report.text()
    dataset = Dataset(out)
    assert [episode.length for episode in dataset.episodes] == [60, 60]
    after = dataset.episode(0).columns()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    with pytest.raises(UsageError, match="fps"):
        penstock.convert(samples(seconds=2, seed=2).path, out, append=True, fps=10, **QUIET)


def test_overwrite_replaces_only_a_dataset(samples, tmp_path):
    out = tmp_path / "out"
    penstock.convert(samples(seconds=2).path, out, **QUIET)
    report = penstock.convert(samples(seconds=2, seed=1).path, out, overwrite=True, **QUIET)
    assert report.total_episodes == 1
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    for mode in ({}, {"overwrite": True}, {"resume": True}, {"append": True}):
        with pytest.raises(UsageError, match="precious"):
            penstock.convert(samples(seconds=2).path, precious, **mode, **QUIET)
    assert (precious / "thesis.txt").read_text() == "years of work"
    assert [p.name for p in precious.iterdir() if not p.name.startswith(".")] == ["thesis.txt"]


def test_a_failed_bag_never_leaks_into_the_next_episode(samples, tmp_path):
    good, other = samples(seconds=2).path, samples(seconds=2, seed=1).path
    cut = tmp_path / "cut.bag"
    cut.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    report = penstock.convert([good, cut, other], tmp_path / "out", **QUIET)
    assert list(report.failed) == [cut]
    assert "--salvage" in report.failed[cut]
    alone = penstock.convert([good, other], tmp_path / "alone", **QUIET)
    assert alone.ok
    assert same_dataset(tmp_path / "out", tmp_path / "alone") == []


def test_salvage_recovers_what_there_is_and_says_so(samples, tmp_path):
    good = samples(seconds=2).path
    cut = tmp_path / "cut.bag"
    cut.write_bytes(good.read_bytes()[: good.stat().st_size * 3 // 4])
    report = penstock.convert(cut, tmp_path / "out", salvage=True, **QUIET)
    assert report.ok, report.text()
    assert 30 < report.frames_out < 60
    assert "recovered" in report.bags[0].salvage


def test_salvage_may_be_added_on_resume(samples, tmp_path):
    """A damaged bag fails, and the error says so: pass --salvage."""
    good = samples(seconds=2).path
    cut = tmp_path / "cut.bag"
    cut.write_bytes(good.read_bytes()[: good.stat().st_size * 3 // 4])
    report = penstock.convert([good, cut], tmp_path / "out", **QUIET)
    assert "--salvage" in report.failed[cut]
    report = penstock.convert([good, cut], tmp_path / "out", resume=True, salvage=True, **QUIET)
    assert report.ok, report.text()
    assert (len(report.bags), report.skipped, report.total_episodes) == (1, [good], 2)


def test_episodes_that_came_from_elsewhere(samples, tmp_path):
    """A dataset may hold episodes of other programs that use our writer."""
    first, second = samples(seconds=2).path, samples(seconds=2, seed=1).path
    penstock.convert(first, tmp_path / "out", **QUIET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatasetWriter, "committed", property(lambda self: [{"simulation": 3}]))
        report = penstock.convert(second, tmp_path / "out", append=True, **QUIET)
    assert report.ok


def test_a_bag_that_an_earlier_version_did_in_part_is_not_done_twice(samples, tmp_path):
    first, second = samples(seconds=2).path, samples(seconds=2, seed=1).path
    penstock.convert(first, tmp_path / "out", **QUIET)
    with pytest.MonkeyPatch.context() as patch:
        source = {"fingerprint": fingerprint(second), "part": 0, "parts": 3}
        patch.setattr(DatasetWriter, "committed", property(lambda self: [source]))
        report = penstock.convert(second, tmp_path / "out", append=True, **QUIET)
    assert "1 of its 3 episodes" in report.failed[second]
    assert report.total_episodes == 1


def test_an_interrupt_says_how_to_go_on(samples, tmp_path, monkeypatch, capfd):
    from penstock.conversion import run

    def jobs(*_):
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_jobs", jobs)
    words = ["convert", str(samples(seconds=2).path), str(tmp_path / "out")]
    assert main(words) == 130
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"penstock: interrupted: 0 of 1 bags are in {tmp_path / 'out'}; go on with --resume"
    )


def test_one_bag_with_parts_of_it_committed_is_completed(samples, tmp_path):
    bag = samples(seconds=2).path
    report = penstock.convert(bag, tmp_path / "out", split_frames=25, **QUIET)
    assert [e.length for e in Dataset(tmp_path / "out").episodes] == [25, 25, 10]
    assert report.ok


def test_two_writers(samples, tmp_path):
    from penstock.core.files import FolderLock

    out = tmp_path / "out"
    penstock.convert(samples(seconds=2).path, out, **QUIET)
    with FolderLock(out), pytest.raises(LockHeld, match="is being written by"):
        penstock.convert(samples(seconds=2, seed=1).path, out, append=True, **QUIET)


def test_nothing_to_convert(tmp_path):
    with pytest.raises(DataError, match="holds no bag"):
        penstock.convert(tmp_path, tmp_path / "out", **QUIET)
    with pytest.raises(DataError, match="does not exist"):
        penstock.convert(tmp_path / "nothing.bag", tmp_path / "out", **QUIET)
    assert not (tmp_path / "out").exists()


def test_the_command_converts_reports_and_checks(samples, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    bag = str(samples(seconds=2).path)
    out = str(tmp_path / "out")
    assert main(["convert", bag, out, "--json", "split_frames=40"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["frames_in"] == 60
    assert facts["frames_in"] == facts["frames_out"] + sum(facts["dropped"].values())
    assert facts["episodes"] == 2
    page = Path(facts["report"]).read_text()
    assert "Memory over time" in page
    assert "data:image/jpeg;base64," in page
    assert main(["doctor", out]) == 0
    assert "ok" in capsys.readouterr().out
    assert main(["info", out]) == 0
    assert "LeRobot dataset v3.0" in capsys.readouterr().out
    assert main(["convert", bag, out]) == 2
    assert "--resume" in capsys.readouterr().err


def test_the_command_with_the_robots_settings_needs_no_paths(
    samples, tmp_path, capsys, monkeypatch
):
    from .test_kuavo import YAML

    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    bags = tmp_path / "bags"
    bags.mkdir()
    shutil.copy(samples(seconds=2).path, bags / "take.bag")
    config = tmp_path / "Kuavo.yaml"
    config.write_text(YAML.replace("/data/bags/task", str(bags)).replace("width: 640", "width: 64"))
    words = ["dataset.use_depth=false", "dataset.sample_drop=0", "dataset.resize.height=48"]
    assert main(["convert", "--config", str(config), *words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["out"] == str(tmp_path / "v1" / "lerobot")
    assert (facts["frames_in"], facts["frames_out"]) == (60, 20)
    assert main(["convert", "--config", str(config), "dataset.trainhz=3"]) == 2
    assert "did you mean 'dataset.train_hz'" in capsys.readouterr().err


def test_info_shows_a_bag_and_writes_its_mapping(samples, tmp_path, capsys):
    bag = str(samples(seconds=2).path)
    target = tmp_path / "map.yaml"
    assert main(["info", bag, "--write-map", str(target)]) == 0
    text = capsys.readouterr().out
    assert "/sensors_data_raw" in text
    assert "guess at 30 fps" in text
    assert main(["info", bag, "--write-map", str(target)]) == 2
    report = penstock.convert(bag, tmp_path / "out", target, **QUIET)
    assert report.ok
    assert report.frames_out == 60


def test_a_dry_run_predicts_and_writes_nothing(samples, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    bag = str(samples(seconds=4).path)
    assert main(["convert", bag, str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "out").exists()
    assert facts["frames_out"] == 120
    report = penstock.convert(bag, tmp_path / "out", **QUIET)
    real = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*.mp4"))
    assert report.frames_out == facts["frames_out"]
    assert 0.5 < facts["size_bytes"] / real < 2.0


def test_no_torch_is_imported(samples, tmp_path):
    program = (
        "import sys, penstock\n"
        f"penstock.convert({str(samples(seconds=2).path)!r}, {str(tmp_path / 'out')!r},"
        " progress='quiet')\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ})


def test_going_on_keeps_the_version_of_the_dataset(samples, tmp_path):
    first, second = samples(seed=1), samples("other.bag", seed=2)
    out = tmp_path / "out"
    penstock.convert(first.path, out, version="v2.1", check=False, progress="quiet")
    penstock.convert(second.path, out, append=True, check=False, progress="quiet")
    assert (Dataset(out).version, len(Dataset(out))) == ("v2.1", 2)
    with pytest.raises(UsageError, match="version"):
        penstock.convert(second.path, out, append=True, version="v3.0", progress="quiet")


def test_a_recording_that_was_taken_while_it_was_made_is_not_taken_twice(samples, tmp_path):
    whole = samples(seed=3)
    bags, out = tmp_path / "bags", tmp_path / "out"
    bags.mkdir()
    data = Path(whole.path).read_bytes()
    (bags / "take.bag.active").write_bytes(data[: len(data) * 2 // 3])
    penstock.convert(bags, out, salvage=True, check=False, progress="quiet")
    (bags / "take.bag.active").unlink()
    (bags / "take.bag").write_bytes(data)
    report = penstock.convert(bags, out, append=True, check=False, progress="quiet")
    assert "take.bag.active" in report.failed[bags / "take.bag"]
    assert "--overwrite" in report.text()
    assert len(Dataset(out)) == 1


def test_bags_that_a_setting_leaves_out_are_counted(samples, tmp_path):
    paths = [samples(f"{k}.bag", seed=k).path for k in range(3)]
    config = tmp_path / "kuavo.yaml"
    config.write_text("rosbag:\n  num_used: 1\ndataset:\n  eef_type: leju_claw\n")
    report = penstock.convert(paths, tmp_path / "out", config=config, check=False, progress="quiet")
    assert (report.unused, len(report.bags)) == (2, 1)
    assert "2 bags, by the setting rosbag.num_used" in report.text()
    assert report.to_json()["unused"] == 2


@pytest.fixture
def bytes_read(monkeypatch):
    """Counts what is read from recordings from now on."""
    real, count = Source.read, [0]

    def counted(self, pos, size_bytes, what="a record"):
        count[0] += size_bytes
        return real(self, pos, size_bytes, what)

    monkeypatch.setattr(Source, "read", counted)
    return count


def test_the_header_clock_reads_a_compressed_bag_once(samples, tmp_path, bytes_read):
    """Its stamps lie in the messages: finding out about the features must not read them, too."""
    take = samples("take.mcap", kind="mcap", compression="zstd", seconds=12).path
    with open_bag(take) as bag:
        mapping = replace(guess_mapping(bag), clock="header")
    bytes_read[0] = 0
    penstock.convert(take, tmp_path / "out", mapping, codec="copy", progress="quiet")
    assert bytes_read[0] <= 1.4 * take.stat().st_size


def test_a_damaged_recording_is_searched_once(samples, tmp_path, bytes_read):
    """Describing and converting share what was found, for which all of the file was read."""
    take = samples(seconds=12).path
    with open_bag(take) as bag:
        mapping = guess_mapping(bag)
    cut = tmp_path / "cut.bag"
    cut.write_bytes(take.read_bytes()[: take.stat().st_size * 9 // 10])
    bytes_read[0] = 0
    out = tmp_path / "out"
    report = penstock.convert(cut, out, mapping, codec="copy", salvage=True, progress="quiet")
    assert report.bags[0].salvage
    assert bytes_read[0] <= 2.5 * cut.stat().st_size
