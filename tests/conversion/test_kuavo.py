import math
from pathlib import Path

import pytest
from rosbags.rosbag1 import Reader, Writer

import penstock
from penstock.conversion.mapping import Camera, options
from penstock.conversion.robots import load_config
from penstock.conversion.robots.kuavo import choose_used
from penstock.conversion.settings import from_json
from penstock.dataset.reader import Dataset
from penstock.errors import UsageError

YAML = """
hydra:
  run:
    dir: ./outputs/${now:%Y%m%d_%H%M%S}
rosbag:
  rosbag_dir: /data/bags/task
  num_used: null
  lerobot_dir: v1
  chunk_size: 100
dataset:
  only_arm: true
  eef_type: leju_claw
  which_arm: both
  use_depth: true
  depth_range: [0, 1500]
  task_description: "Pick and Place"
  train_hz: 10
  main_timeline: head_cam_h
  main_timeline_fps: 30
  sample_drop: 10
  dex_dof_needed: 1
  is_binary: false
  delta_action: false
  relative_start: false
  resize:
    width: 640
    height: 480
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "KuavoRosbag2Lerobot.yaml"
    path.write_text(YAML)
    return path


def test_the_file_as_it_is(config):
    found = load_config(config)
    mapping = found.mapping
    assert str(found.bags) == "/data/bags/task"
    assert str(found.out) == "/data/bags/v1/lerobot"
    assert (mapping.fps, mapping.timeline_hz, mapping.drop_ends) == (10, 30.0, 10)
    assert mapping.timeline == "observation.images.head_cam_h"
    assert mapping.task == "Pick and Place"
    assert mapping.robot_type == "kuavo4pro"
    assert mapping.window_frames == 100
    assert list(mapping.features) == [
        "observation.state",
        "action",
        "observation.images.head_cam_h",
        "observation.depth_h",
        "observation.images.wrist_cam_l",
        "observation.depth_l",
        "observation.images.wrist_cam_r",
        "observation.depth_r",
    ]
    depth = mapping.features["observation.depth_h"]
    assert isinstance(depth, Camera)
    assert (mapping.codec_of(depth), depth.depth_range_mm) == ("grey8", (0.0, 1500.0))
    state = mapping.features["observation.state"]
    assert state.names[:8] == (*(f"zarm_l{k}_link" for k in range(1, 8)), "left_claw")
    assert state.names_key == "state_names"
    assert len(state.names) == 16
    assert [source.select for source in state.sources] == [(12, 19), (0, 1), (19, 26), (1, 2)]
    assert from_json(mapping.to_json()) == mapping


@pytest.mark.parametrize(("platform", "first"), [("4pro", 12), ("5", 13), ("5w", 4), ("5W", 4)])
def test_where_the_arms_are(config, platform, first):
    mapping = load_config(config, [f"dataset.platform_type={platform}"]).mapping
    state = mapping.features["observation.state"]
    assert [s.select for s in state.sources][::2] == [(first, first + 7), (first + 7, first + 14)]
    fallback = list(options(mapping.features["action"].sources[0]))[-1]
    assert (fallback.topics, fallback.select) == (("/joint_cmd",), (first, first + 7))


@pytest.mark.parametrize(
    ("eef", "extra", "state", "action", "length"),
    [
        ("leju_claw", [], (1, 2, 0.01), (1, 2, 0.01), 16),
        ("rq2f85", [], (1, 2, 1 / 0.8), (1, 2, 1 / 255), 16),
        ("qiangnao", [], (6, 7, 0.01), (0, 1, 0.01), 16),
        ("qiangnao", ["dataset.dex_dof_needed=6"], (6, 12, 0.01), (0, 6, 0.01), 26),
    ],
)
def test_end_effectors(config, eef, extra, state, action, length):
    mapping = load_config(config, [f"dataset.eef_type={eef}", *extra]).mapping
    for name, (first, after, scale) in (("observation.state", state), ("action", action)):
        right = mapping.features[name].sources[3]
        assert right.select == (first, after)
        assert right.scale == pytest.approx(scale)
        assert len(mapping.features[name].names) == length
    if eef == "qiangnao":
        assert mapping.features["action"].sources[3].field == "right_hand_position"


def test_one_arm_takes_its_camera_and_half_the_numbers(config):
    mapping = load_config(config, ["dataset.which_arm=right", "dataset.use_depth=false"]).mapping
    assert list(mapping.cameras) == [
        "observation.images.head_cam_h",
        "observation.images.wrist_cam_r",
    ]
    state = mapping.features["observation.state"]
    assert [s.select for s in state.sources] == [(19, 26), (1, 2)]
    assert state.names[0] == "zarm_r1_link"


def test_binary_end_effectors_have_the_robots_thresholds(config):
    for eef, limits in (("leju_claw", (50, 50)), ("rq2f85", (0.4, 70)), ("qiangnao", (50, 50))):
        words = [f"dataset.eef_type={eef}", "dataset.is_binary=true"]
        mapping = load_config(config, words).mapping
        found = [mapping.features[n].sources[1].threshold for n in ("observation.state", "action")]
        assert tuple(found) == limits


def test_arm_commands_are_degrees_and_prefer_the_synced_topic(config):
    first, second, third = options(load_config(config).mapping.features["action"].sources[0])
    assert first.topics == ("/kuavo_arm_traj_synced",)
    assert second.topics == ("/kuavo_arm_traj",)
    assert first.scale == second.scale == pytest.approx(math.pi / 180)
    assert third.scale == 1.0
    assert first.fill_gaps is second.fill_gaps is None


def test_walking_adds_its_command_and_the_999_rule(config):
    mapping = load_config(config, ["dataset.only_arm=false", "dataset.train_hz=20"]).mapping
    action = mapping.features["action"]
    assert action.names[-4:] == ("cmd_pos_x", "cmd_pos_y", "cmd_pos_yaw", "ctrl_change_cmd")
    first, second, _ = options(action.sources[0])
    assert first.fill_gaps is None
    assert second.fill_gaps == (pytest.approx(0.075), 999.0)
    assert action.sources[-1].flag_gaps == pytest.approx(0.075)
    assert len(mapping.features["observation.state"].names) == 16


def test_differences_concern_the_arms_only(config):
    words = ["dataset.delta_action=true", "dataset.relative_start=true"]
    mapping = load_config(config, words).mapping
    state, action = mapping.features["observation.state"], mapping.features["action"]
    assert [s.relative_start for s in state.sources] == [True, False, True, False]
    assert [s.delta for s in action.sources] == [True, False, True, False]
    assert action.delta_from == "observation.state"


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("dataset.train_hzz=3", "did you mean 'dataset.train_hz'"),
        ("dataset.eef_type=claw", "leju_claw"),
        ("dataset.which_arm=rihgt", "did you mean 'right'"),
        ("dataset.platform_type=6", "use one of"),
        ("dataset.train_hz=0", "at least 1"),
        ("dataset.is_binary=3", "true or false"),
        ("dataset.depth_range=[5,1]", "nearest, farthest"),
        ("dataset.dex_dof_needed=3", "use one of"),
        ("dataset.resize.width=abc", "whole number"),
        ("rosbag.num_used=0", "at least 1"),
        ("dataset", "write key=value"),
    ],
)
def test_a_wrong_setting_is_named(config, word, says):
    with pytest.raises(UsageError, match=says.replace("[", r"\[")):
        load_config(config, [word])


def test_a_timeline_that_is_not_used_is_refused(config):
    with pytest.raises(UsageError, match="does not use that camera"):
        load_config(config, ["dataset.which_arm=left", "dataset.main_timeline=wrist_cam_r"])


def test_an_unknown_section_is_named(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("datset:\n  train_hz: 3\n")
    with pytest.raises(UsageError, match="unknown key 'datset': did you mean 'dataset'"):
        load_config(path)


def test_drawing_bags_is_the_robots_own(tmp_path):
    bags = [tmp_path / f"{k}.bag" for k in range(10)]
    assert choose_used(bags, None) == bags
    assert choose_used(bags, 20) == bags
    drawn = choose_used(bags, 3)
    assert [bag.stem for bag in drawn] == ["8", "1", "5"]


def without(source: Path, target: Path, *topics: str) -> Path:
    """Copy a bag without some topics."""
    with Reader(source) as reader, Writer(target) as writer:
        kept = {
            c.id: writer.add_connection(
                c.topic, c.msgtype, msgdef=c.msgdef.data, md5sum=c.digest
            )
            for c in reader.connections
            if c.topic not in topics
        }  # fmt: skip
        for connection, t_ns, data in reader.messages():
            if connection.id in kept:
                writer.write(kept[connection.id], t_ns, data)
    return target


def test_it_is_recognised_without_joint_cmd_and_without_hands(samples, tmp_path):
    """The arm command is in degrees: without the profile it would be beside radians."""
    take = samples(seconds=1).path
    whole = penstock.convert(take, tmp_path / "whole", progress="quiet")
    hands = ("/leju_claw_state", "/leju_claw_command")
    for number, gone in enumerate([("/joint_cmd",), ("/joint_cmd", *hands)]):
        bag = without(take, tmp_path / f"{number}.bag", *gone)
        report = penstock.convert(bag, tmp_path / str(number), progress="quiet")
        assert report.ok, report.text()
        assert report.mapping.robot_type == "kuavo4pro"
        frames, wanted = (
            list(Dataset(tmp_path / name).episode(0).frames(["observation.state", "action"]))
            for name in (str(number), "whole")
        )
        names = Dataset(tmp_path / str(number)).features["action"].names
        assert len(next(iter(names.values()))) == (16 if number == 0 else 14)
        assert abs(frames[3]["action"][:7] - wanted[3]["action"][:7]).max() < 1e-6
    assert whole.ok


NEWER = """
rosbag:
  mode: normal
  rosbag_dir: /path/to/rosbags
  target_dir: /path/to/target
  lerobot_dir_resume: /path/to/old
  lerobot_dir_merge: ["/path/to/one", "/path/to/two"]
dataset: {platform_type: "5", eef_type: rq2f85, which_arm: both, train_hz: 10}
"""


def test_the_keys_of_the_newer_files(tmp_path):
    path = tmp_path / "Kuavo.yaml"
    path.write_text(NEWER)
    found = load_config(path)
    assert (found.bags, found.out) == (Path("/path/to/rosbags"), Path("/path/to/target/lerobot"))
    with pytest.raises(UsageError, match="convert BAGS /path/to/old --append"):
        load_config(path, ["rosbag.mode=resume"])
    with pytest.raises(UsageError, match="lerobot-edit-dataset"):
        load_config(path, ["rosbag.mode=merge"])
    with pytest.raises(UsageError, match=r"rosbag.mode is 'rezume'"):
        load_config(path, ["rosbag.mode=rezume"])
