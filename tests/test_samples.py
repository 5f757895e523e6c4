"""The synthetic recordings are what they say they are."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from penstock.bags import open_bag
from penstock.errors import DataError, UsageError
from penstock.samples import (
    TROUBLES,
    SampleFacts,
    expected_eef_command,
    expected_eef_state,
    expected_state,
    read_number,
    write_sample,
)

SMALL = {"seconds": 3.0, "cameras": 2, "width": 64, "height": 48, "state_hz": 100}


def sample(folder: Path, name: str = "x.bag", **settings: object) -> SampleFacts:
    return write_sample(folder / name, **{**SMALL, **settings})  # type: ignore[arg-type]


def times_s(facts: SampleFacts, topic: str) -> np.ndarray:
    with open_bag(facts.path) as bag:
        return (bag.times(topic) - facts.start_ns) / 1e9


def stamps_s(facts: SampleFacts, topic: str) -> np.ndarray:
    with open_bag(facts.path) as bag:
        return (bag.header_stamps([topic])[topic] - facts.start_ns) / 1e9


def test_a_recording_without_trouble(tmp_path: Path) -> None:
    facts = sample(tmp_path, depth=True)
    assert facts.counts["/sensors_data_raw"] == facts.counts["/joint_cmd"] == 300
    assert facts.counts[facts.cameras[0]] == facts.counts[facts.depths[1]] == 90
    times = times_s(facts, "/sensors_data_raw")
    np.testing.assert_allclose(times, np.arange(300) / 100, atol=1e-9)
    np.testing.assert_allclose(np.diff(times_s(facts, facts.cameras[1])), 1 / 30, atol=2e-9)


def test_two_writings_are_equal(tmp_path: Path) -> None:
    one = sample(tmp_path, "a.bag", trouble=["jitter"]).path.read_bytes()
    assert one == sample(tmp_path, "b.bag", trouble=["jitter"]).path.read_bytes()
    assert one != sample(tmp_path, "c.bag", trouble=["jitter"], seed=1).path.read_bytes()


@pytest.mark.parametrize("eef", ["leju_claw", "rq2f85", "qiangnao"])
@pytest.mark.parametrize("platform", ["4pro", "5", "5w"])
def test_robots(tmp_path: Path, eef: str, platform: str) -> None:
    facts = sample(tmp_path, eef=eef, platform=platform, cameras=0, seconds=0.1)
    topics = {
        "leju_claw": ("/leju_claw_state", "/leju_claw_command", "data.position"),
        "rq2f85": ("/gripper/state", "/gripper/command", "position"),
        "qiangnao": ("/dexhand/state", "/control_robot_hand_position", "position"),
    }
    state, command, path = topics[eef]
    with open_bag(facts.path) as bag:
        for message in bag.read([state, command, "/sensors_data_raw"]):
            t_s = (message.t_ns - facts.start_ns) / 1e9
            decoder = bag.decoder(message.topic)
            if message.topic == "/sensors_data_raw":
                found = decoder.vector(message.data, "joint_data.joint_q")
                expected = expected_state(t_s, platform)
            elif message.topic == state:
                found = decoder.vector(message.data, path)
                expected = expected_eef_state(t_s, eef)
            elif eef == "qiangnao":
                left = decoder.vector(message.data, "left_hand_position")
                found = np.concatenate([left, decoder.vector(message.data, "right_hand_position")])
                expected = expected_eef_command(t_s, eef)
            else:
                found = decoder.vector(message.data, path)
                expected = expected_eef_command(t_s, eef)
            np.testing.assert_allclose(found, expected, atol=1e-6)


def test_sizes_of_camera_pictures(tmp_path: Path) -> None:
    facts = write_sample(tmp_path / "x.bag", seconds=0.2, cameras=1)
    with open_bag(facts.path) as bag:
        sizes = [len(message.data) for message in bag.read(facts.cameras)]
    assert all(40_000 < size < 80_000 for size in sizes)


def test_a_length_in_bytes(tmp_path: Path) -> None:
    for name, kind in [("x.bag", "bag"), ("x.mcap", "mcap"), ("x", "db3")]:
        facts = sample(tmp_path, name, kind=kind, size_bytes=5_000_000, numbered=False, width=256)
        with open_bag(facts.path) as bag:
            assert 4_000_000 < bag.size_bytes < 7_500_000
    assert facts.t_s > 1


def test_troubles_of_the_cameras(tmp_path: Path) -> None:
    facts = sample(tmp_path, trouble=["late_camera", "early_end", "camera_gap"], seconds=6.0)
    times = times_s(facts, facts.cameras[1])
    assert 1.0 <= times[0] < 1.05 and 4.9 < times[-1] < 5.0
    times = times_s(facts, facts.cameras[0])
    assert np.max(np.diff(times)) == pytest.approx(2.0, abs=0.05)


def test_undecodable_pictures(tmp_path: Path) -> None:
    facts = sample(tmp_path, trouble=["bad_jpeg"])
    codec = av.CodecContext.create("mjpeg", "r")
    bad = []
    with open_bag(facts.path) as bag:
        decoder = bag.decoder(facts.cameras[0])
        for message in bag.read(facts.cameras[:1]):
            try:
                (frame,) = codec.decode(av.Packet(bytes(decoder.image(message.data).data)))
            except (av.error.FFmpegError, ValueError, DataError):
                bad.append(message.ordinal)
                codec = av.CodecContext.create("mjpeg", "r")
            else:
                number = read_number(frame.to_ndarray(format="gray"))
                assert number == message.ordinal
    assert bad == facts.bad_pictures and len(bad) == 5


def test_dropped_frames_and_sizes(tmp_path: Path) -> None:
    facts = sample(tmp_path, trouble=["drop_frames", "resolution_change"])
    assert facts.counts[facts.cameras[0]] == 90 - 5
    assert np.sum(np.diff(times_s(facts, facts.cameras[0])) > 0.05) == 5
    sizes = set()
    codec = av.CodecContext.create("mjpeg", "r")
    with open_bag(facts.path) as bag:
        decoder = bag.decoder(facts.cameras[0])
        for message in bag.read(facts.cameras[:1]):
            codec = av.CodecContext.create("mjpeg", "r")
            (frame,) = codec.decode(av.Packet(bytes(decoder.image(message.data).data)))
            sizes.add((frame.width, frame.height))
    assert sizes == {(64, 48), (32, 24)}


def test_troubles_of_the_clock(tmp_path: Path) -> None:
    back = times_s(sample(tmp_path, "b.bag", trouble=["jump_back"], cameras=0), "/joint_cmd")
    assert np.min(np.diff(back)) == pytest.approx(-0.49)
    forward = times_s(sample(tmp_path, "f.bag", trouble=["jump_forward"], cameras=0), "/joint_cmd")
    assert np.max(np.diff(forward)) == pytest.approx(3600.01)
    twice = times_s(sample(tmp_path, "d.bag", trouble=["duplicates"], cameras=0), "/joint_cmd")
    assert np.sum(np.diff(twice) == 0) == 12
    jitter = times_s(sample(tmp_path, "j.bag", trouble=["jitter"], cameras=0), "/joint_cmd")
    assert 0.0005 < np.abs(jitter - np.arange(300) / 100).max() <= 0.002
    offset = sample(tmp_path, "h.bag", trouble=["header_offset"], cameras=0)
    difference = times_s(offset, "/joint_cmd") - stamps_s(offset, "/joint_cmd")
    np.testing.assert_allclose(difference, 0.05, atol=1e-9)
    late = times_s(sample(tmp_path, "u.bag", trouble=["unsorted"], cameras=0), "/joint_cmd")
    assert np.any(np.diff(late) < 0)
    np.testing.assert_allclose(np.sort(late), np.arange(300) / 100, atol=1e-9)


def test_troubles_of_the_states(tmp_path: Path) -> None:
    gap = times_s(sample(tmp_path, "g.bag", trouble=["state_gap"]), "/sensors_data_raw")
    assert np.max(np.diff(gap)) == pytest.approx(2.0, abs=0.02)
    facts = sample(tmp_path, "s.bag", trouble=["slow_topic", "nan", "shape_change"])
    assert facts.counts[facts.affected["slow_topic"]] == 15
    with open_bag(facts.path) as bag:
        decoder = bag.decoder("/sensors_data_raw")
        states = [
            decoder.vector(message.data, "joint_data.joint_q")
            for message in bag.read(["/sensors_data_raw"])
        ]
    assert {len(state) for state in states} == {28, 26}
    assert sum(bool(np.isnan(state).any()) for state in states) == 5
    missing = sample(tmp_path, "m.bag", trouble=["missing_topic", "empty_topic"])
    with open_bag(missing.path) as bag:
        assert missing.affected["missing_topic"] not in bag.topics
        assert bag.topics[missing.affected["empty_topic"]].count == 0


def test_every_trouble_can_be_written(tmp_path: Path) -> None:
    for name in TROUBLES:
        sample(tmp_path, f"{name}.bag", seconds=2.5, trouble=[name], state_hz=20)


def test_wrong_wishes(tmp_path: Path) -> None:
    for settings in (
        {"trouble": ["boredom"]},
        {"eef": "hook"},
        {"platform": "6"},
        {"cameras": 9},
        {"kind": "zip"},
        {"compression": "rar"},
        {"kind": "mcap", "compression": "bz2"},
        {"trouble": ["jitter"], "size_bytes": 1000},
        {"trouble": ["bad_jpeg"], "cameras": 0},
    ):
        with pytest.raises(UsageError):
            sample(tmp_path, "x.bag", **settings)
        assert not (tmp_path / "x.bag").exists()
    sample(tmp_path, "x.bag", seconds=0.1)
    with pytest.raises(UsageError, match="exists already"):
        sample(tmp_path, "x.bag")
