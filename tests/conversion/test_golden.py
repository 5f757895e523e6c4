"""Recordings with every kind of trouble: the account is exact, and what comes out is right."""

import re

import numpy as np
import pytest

import penstock
from penstock.bags import open_bag
from penstock.conversion.guess import guess_mapping
from penstock.conversion.plan import plan_bag
from penstock.conversion.settings import from_json
from penstock.dataset.reader import Dataset
from penstock.errors import DataError
from penstock.samples import expected_arm_traj, expected_state, read_number

MAIN = "observation.images.head_cam_h"
RIGHT = "/cam_r/color/image_raw/compressed"


def plan(facts, **settings):
    with open_bag(facts.path) as bag:
        mapping = guess_mapping(bag)
        return plan_bag(bag, from_json({**mapping.to_json(), "timeline": MAIN, **settings}))


# trouble, settings, (in, repeated, out), dropped by reason
GOLDEN = [
    ((), {}, (120, 0, 120), {}),
    ((), {"fps": 20}, (120, 0, 80), {"not needed at this rate": 40}),
    ((), {"fps": 10}, (120, 0, 40), {"not needed at this rate": 80}),
    ((), {"fps": 60}, (120, 119, 239), {}),
    (
        (),
        {"fps": 10, "drop_ends": 10},
        (120, 0, 34),
        {"not needed at this rate": 66, "start or end left out (drop_ends)": 20},
    ),
    (("late_camera",), {}, (120, 0, 90), {f"before the first message of {RIGHT}": 30}),
    (("early_end",), {}, (120, 0, 90), {f"after the last message of {RIGHT}": 30}),
    (("duplicates",), {}, (120, 4, 120), {"duplicate stamp": 4}),
    (("duplicates",), {"hold_s": 0.0, "gap": "drop"}, (120, 0, 116), {"duplicate stamp": 4}),
    (("jump_back",), {}, (120, 0, 105), {"duplicate stamp": 15}),
    (("jump_forward",), {}, (120, 0, 120), {}),
    (("camera_gap",), {}, (60, 0, 60), {}),
    (("camera_gap",), {"gap": "hold"}, (60, 60, 120), {}),
    (("camera_gap",), {"gap": "flag"}, (60, 60, 120), {}),
    (("camera_gap",), {"gap": "split"}, (60, 0, 60), {}),
    (("state_gap",), {}, (120, 0, 66), {"no message of /sensors_data_raw within 0.1 s": 54}),
    (("drop_frames",), {}, (113, 7, 120), {}),
    (("jitter",), {}, (120, 0, 120), {}),
    (("unsorted",), {}, (120, 0, 120), {}),
    (("slow_topic",), {}, (120, 0, 115), {"after the last message of /leju_claw_state": 5}),
    (("header_offset",), {}, (120, 0, 120), {}),
    (("header_offset",), {"clock": "header"}, (120, 0, 120), {}),
    (("old_firmware",), {}, (120, 0, 120), {}),
    (("bad_jpeg",), {}, (120, 0, 120), {}),
    (("nan",), {}, (120, 0, 120), {}),
    (("camera_gap", "late_camera", "duplicates"), {}, None, None),
]


@pytest.mark.parametrize(("trouble", "settings", "counts", "dropped"), GOLDEN)
def test_every_frame_is_accounted_for(samples, trouble, settings, counts, dropped):
    found = plan(samples(trouble=trouble), **settings)
    account = found.account
    assert account.balanced
    assert account.frames_out == len(found.times) == sum(b - a for a, b in found.episodes)
    if counts is not None:
        assert (account.frames_in, account.frames_repeated, account.frames_out) == counts
        assert dict(account.dropped) == dropped


@pytest.mark.parametrize("trouble", ["missing_topic", "empty_topic"])
def test_a_topic_that_says_nothing_fails_the_bag_by_name(samples, trouble):
    facts = samples(trouble=(trouble,))
    whole = samples()
    with open_bag(whole.path) as bag:
        mapping = guess_mapping(bag)
    with open_bag(facts.path) as bag, pytest.raises(DataError, match=facts.affected[trouble]):
        plan_bag(bag, mapping)


def test_a_gap_splits_the_episode_where_it_is(samples):
    found = plan(samples(trouble=("camera_gap",)), gap="split")
    assert found.episodes == [(0, 30), (30, 60)]
    assert plan(samples(), split_frames=50).episodes == [(0, 50), (50, 100), (100, 120)]


def convert(samples, tmp_path, trouble=(), **settings):
    facts = samples(trouble=trouble)
    settings = {"memory": "1GB", "progress": "quiet", "timeline": MAIN, **settings}
    report = penstock.convert(facts.path, tmp_path / "out", **settings)
    assert report.account.balanced
    return facts, report, Dataset(tmp_path / "out")


def frame_times(facts, dataset_plan):
    return (dataset_plan.times - facts.start_ns) / 1e9


@pytest.mark.parametrize(
    ("trouble", "settings"),
    [
        ((), {}),
        ((), {"fps": 20}),
        (("unsorted",), {}),
        (("drop_frames",), {}),
        (("jump_forward",), {}),
        (("camera_gap",), {"gap": "hold"}),
        (("late_camera",), {"codec": "png"}),
        (("duplicates",), {"codec": "copy"}),
    ],
)
def test_each_frame_has_its_picture_and_its_numbers(samples, tmp_path, trouble, settings):
    facts, report, dataset = convert(samples, tmp_path, trouble, **settings)
    expected = plan(facts, **{k: v for k, v in settings.items() if k != "codec"})
    assert report.ok, report.text()
    assert dataset.episodes[0].length == len(expected.times)
    shown = {key: [] for key in expected.cameras}
    for frame in dataset.episode(0).frames():
        for key in shown:
            shown[key].append(read_number(frame[key]))
    for key, camera in expected.cameras.items():
        assert shown[key] == camera.ordinals.tolist()
    columns = dataset.episode(0).columns()
    assert np.allclose(
        columns["timestamp"], np.arange(len(expected.times)) / dataset.fps, atol=1e-6
    )
    if trouble in ((), ("drop_frames",), ("late_camera",)):
        arms = expected.vectors["observation.state"][0].match
        t_s = (expected.times + arms.skew_ns - facts.start_ns) / 1e9
        want = np.array([expected_state(t, "4pro")[12:19] for t in t_s])
        assert np.allclose(columns["observation.state"][:, :7], want, atol=1e-6)
        command = expected.vectors["action"][0].match
        t_s = (expected.times + command.skew_ns - facts.start_ns) / 1e9
        want = np.array([np.deg2rad(expected_arm_traj(t, "4pro")[:7]) for t in t_s])
        assert np.allclose(columns["action"][:, :7], want, atol=1e-6)


def test_pictures_that_cannot_be_decoded_show_the_one_before(samples, tmp_path):
    facts, report, dataset = convert(samples, tmp_path, ("bad_jpeg",))
    key = "observation.images.head_cam_h"
    numbers = [read_number(frame[key]) for frame in dataset.episode(0).frames([key])]
    want, last = [], None
    for number in range(120):
        last = last if number in facts.bad_pictures else number
        want.append(last)
    first_good = next(n for n in want if n is not None)
    assert numbers == [first_good if n is None else n for n in want]
    assert sum(n for what, n in report.account.notes.items() if "cannot be decoded" in what) == 5
    failed = penstock.convert(
        [facts.path, samples().path], tmp_path / "strict", progress="quiet", bad_pictures="fail"
    )
    assert list(failed.failed) == [facts.path]
    assert failed.total_episodes == 1


def test_nan_is_kept_and_counted_or_held_or_fails(samples, tmp_path):
    facts, report, dataset = convert(samples, tmp_path, ("nan",))
    state = dataset.episode(0).columns(["observation.state"])["observation.state"]
    assert np.isnan(state).any()
    assert any("not finite" in what for what in report.account.notes)
    held = penstock.convert(facts.path, tmp_path / "held", progress="quiet", nonfinite="hold")
    assert held.ok
    columns = Dataset(tmp_path / "held").episode(0).columns(["observation.state"])
    assert np.isfinite(columns["observation.state"]).all()
    with pytest.raises(DataError, match="not finite"):
        penstock.convert(facts.path, tmp_path / "strict", progress="quiet", nonfinite="fail")


@pytest.mark.parametrize(
    ("trouble", "says"),
    [("shape_change", "changes its shape"), ("resolution_change", "set resize")],
)
def test_a_recording_that_changes_fails_and_leaves_nothing(samples, tmp_path, trouble, says):
    good, bad = samples(), samples(trouble=(trouble,))
    report = penstock.convert([bad.path, good.path], tmp_path / "out", progress="quiet")
    assert list(report.failed) == [bad.path]
    assert says in report.failed[bad.path]
    dataset = Dataset(tmp_path / "out")
    assert [episode.length for episode in dataset.episodes] == [120]
    assert not report.ok


def test_another_size_is_mended_by_the_words_of_the_message(samples, tmp_path):
    bad = samples(trouble=("resolution_change",))
    with pytest.raises(DataError, match="--set features") as refused:
        penstock.convert(bad.path, tmp_path / "out", progress="quiet")
    (words,) = re.findall(r"--set (\S+)\)", str(refused.value))
    report = penstock.convert(bad.path, tmp_path / "new", progress="quiet", overrides=[words])
    assert report.ok and report.frames_out == 120


def test_the_flag_marks_the_bridged_frames(samples, tmp_path):
    _, _, dataset = convert(samples, tmp_path, ("camera_gap",), gap="flag")
    flags = dataset.episode(0).columns(["observation.gap"])["observation.gap"].reshape(-1)
    assert flags.tolist() == [0.0] * 30 + [1.0] * 60 + [0.0] * 30
