"""`info` and `doctor` on rollouts and saved replay buffers."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from penstock import inspect
from penstock.cli import main
from penstock.inspect import doctor
from penstock.replay.episodes.buffer import DictReplayBuffer
from penstock.replay.torchrl.storage import CompressedStorage
from penstock.rollouts.storage import RolloutStorage


@pytest.fixture
def rollouts(tmp_path):
    storage = RolloutStorage(tmp_path / "rollouts")
    for iteration in (0, 100):
        data = {"agents": {"lidar": torch.zeros(16, 8, 36)}, "reward": torch.ones(16, 8, 1)}
        storage.save(TensorDict(data, batch_size=[16, 8]), iteration)
    return tmp_path / "rollouts"


@pytest.fixture
def episodes(tmp_path):
    buffer = DictReplayBuffer(1000, ["pixels", ("state", "speed")], img_compressed=True, seed=0)
    for number in range(3):
        pixels = np.full((20, 32, 32), number, np.uint8)
        buffer.add({"pixels": pixels, "state": {"speed": np.ones((20, 2), np.float32)}})
    buffer.save(tmp_path / "dict")
    return tmp_path / "dict"


@pytest.fixture
def storage(tmp_path):
    buffer = TensorDictReplayBuffer(storage=CompressedStorage(100), batch_size=8)
    pixels = torch.zeros(50, 32, 32, dtype=torch.uint8)
    buffer.extend(TensorDict({"pixels": pixels, "reward": torch.ones(50, 1)}, batch_size=[50]))
    buffer.storage.dumps(tmp_path / "torchrl")
    return tmp_path / "torchrl"


def test_info_of_a_folder_of_rollouts(rollouts):
    facts = inspect.describe(rollouts)
    assert [item["iteration"] for item in facts["rollouts"]] == [0, 100]
    assert facts["rollouts"][0]["batch"] == [16, 8]
    text = inspect.text(facts)
    assert "folder of rollouts" in text
    assert "rollout_000100.pack" in text
    assert "16x8" in text


def test_info_of_one_rollout_says_nothing_of_checkpoints(rollouts, capsys):
    assert main(["info", str(rollouts / "rollout_000100.pack")]) == 0
    text = capsys.readouterr().out
    assert "penstock rollout" in text
    assert "lidar" in text
    assert "sequence" not in text


def test_info_of_a_dict_replay_buffer(episodes):
    facts = inspect.describe(episodes)
    assert (facts["episodes_held"], facts["frames"]) == (3, 60)
    assert facts["raw_bytes"] == 60 * (1024 + 8)
    text = inspect.text(facts)
    assert "state.speed" in text
    assert "60 in 3 episodes" in text


def test_info_of_a_torchrl_storage(storage):
    facts = inspect.describe(storage)
    assert facts["frames"] == 50
    assert {key["key"] for key in facts["keys"]} >= {"pixels", "reward"}
    assert "CompressedStorage" in inspect.text(facts)


@pytest.mark.parametrize("kind", ["rollouts", "episodes", "storage"])
def test_doctor_finds_what_is_damaged(kind, request, capsys):
    where = request.getfixturevalue(kind)
    assert main(["doctor", str(where)]) == 0
    assert "ok: verified" in capsys.readouterr().out
    for file in sorted(where.glob("*.pack")):
        good = file.read_bytes()
        for at in (len(good) // 3, len(good) - 1):
            bad = bytearray(good)
            bad[at] ^= 4
            file.write_bytes(bad)
            assert main(["doctor", str(where)]) == 1, (file, at)
            assert file.name in capsys.readouterr().out
        file.write_bytes(good)
    assert main(["doctor", str(where)]) == 0


def test_doctor_misses_a_segment_that_is_gone(episodes, capsys):
    segment = next(episodes.glob("segment_*"))
    segment.unlink()
    assert main(["doctor", str(episodes)]) == 1
    assert segment.name in capsys.readouterr().out
    assert segment.name in inspect.text(inspect.describe(episodes))


def test_a_damaged_manifest_is_one_line(episodes, capsys):
    (episodes / "replay.pack").write_bytes(b"nonsense")
    assert main(["info", str(episodes)]) == 3
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert [finding.path for finding in doctor.check(episodes)] == [str(episodes / "replay.pack")]


def test_info_imports_no_torch(rollouts, episodes):
    import subprocess
    import sys

    code = (
        "import sys; from penstock.cli import main; "
        f"main(['info', {str(rollouts)!r}, {str(episodes)!r}]); "
        f"main(['doctor', {str(rollouts)!r}, {str(episodes)!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
