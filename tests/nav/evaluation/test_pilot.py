"""Navigator: which checkpoint it reads, what it refuses, and where it flies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import CorruptFile, DataError, PenstockError, UnknownFormat, UsageError
from penstock.nav.evaluation.crossing import fly
from penstock.nav.evaluation.pilot import Navigator, run_folder
from penstock.nav.networks import Policy
from penstock.nav.simulation.simulator import Observation, Simulator
from penstock.nav.simulation.task import Settings

Save = Callable[..., Path]


def seen(settings: Settings, drones: int = 4) -> Observation:
    """What drones see that have flown a second."""
    with Simulator(settings.with_(num_envs=drones, maps=1, evaluation=True), threads=1) as sim:
        sim.reset()
        for _ in range(10):
            obs = sim.step(torch.tensor([[0.9, 0.6, 0.5]]).expand(drones, 3))[0]
        return {name: value.clone() for name, value in obs.items()}


def weights(navigator: Navigator) -> torch.Tensor:
    return navigator.policy.critic.weight


def test_any_way_to_a_checkpoint(save: Save, small: Settings) -> None:
    run = save()
    for path in (run, run / "checkpoints", run / "checkpoints" / "best.pt"):
        navigator = Navigator.load(path)
        assert navigator.settings == small
        assert navigator.path == run / "checkpoints" / "best.pt"
        assert navigator.metadata["iteration"] == 12
        assert torch.equal(weights(navigator), Policy("fast", seed=0).critic.weight)
        assert not navigator.policy.bf16  # the same figures on every processor
        assert run_folder(path) == run


def test_best_latest_or_a_name(save: Save) -> None:
    run = save("checkpoint_1.pt", seed=1)
    first = Navigator.load(run)  # no best yet: the newest
    assert first.path is not None
    assert first.path.name == "checkpoint_1.pt"
    save("best.pt", seed=2)
    save("checkpoint_2.pt", seed=3)
    for name, seed in (("best", 2), ("latest", 3), ("checkpoint_1.pt", 1)):
        found = Navigator.load(run, name)
        assert torch.equal(weights(found), Policy("fast", seed=seed).critic.weight)


def test_a_damaged_newest_one_is_passed_over(save: Save) -> None:
    run = save("checkpoint_1.pt", seed=1)
    save("checkpoint_2.pt", seed=2)
    file = run / "checkpoints" / "checkpoint_2.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.warns(UserWarning, match="fell back"):
        assert Navigator.load(run, "latest").metadata["iteration"] == 12
    with pytest.raises(CorruptFile):
        Navigator.load(run, "checkpoint_2.pt")


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    policy = Policy("fast").state_dict()
    state: dict[str, Any] = {"ppo": {"policy": dict(policy), "preset": "fast"}}
    change(state)
    return state


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"model": {"w": torch.zeros(2)}}, "holds no navigation policy"),
        ({"ppo": {"progress": 1.0, "policy": 3}}, "holds no navigation policy"),
        (broken(lambda s: s["ppo"].update(preset="quick")), "the unknown network 'quick'"),
        (broken(lambda s: s["ppo"].update(preset="navrl")), "another network than 'navrl'"),
        (
            broken(lambda s: s["ppo"]["policy"].pop("critic.weight")),
            r"critic.weight is missing there, \[1, 128\] here",
        ),
        (
            broken(lambda s: s["ppo"]["policy"].update({"critic.weight": torch.zeros(1, 9)})),
            r"critic.weight is \[1, 9\] there",
        ),
        (
            broken(lambda s: s["ppo"]["policy"].update(more=torch.zeros(1))),
            r"more is \[1\] there, missing here",
        ),
        (
            broken(lambda s: s["ppo"]["policy"]["critic.bias"].fill_(torch.nan)),
            "critic.bias is not finite",
        ),
    ],
)
def test_another_network_is_refused(save: Save, state: Any, said: str) -> None:
    run = save(state=state)
    with pytest.raises(DataError, match=said) as caught:
        Navigator.load(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (None, "does not say its navigation settings"),
        ({"settings": [1]}, "does not say its navigation settings"),
        ({"settings": {"wings": 2}}, "no setting 'wings'"),
        ({"settings": {"reward": {"fame": 1.0}}}, "no setting 'fame'"),
        ({"settings": {"num_envs": -1}}, "num_envs is -1"),
        ({"settings": {"lidar_beams": 3}}, "cannot be used"),
    ],
)
def test_settings_that_cannot_be_used(save: Save, metadata: Any, said: str) -> None:
    with pytest.raises(UnknownFormat, match=said):
        Navigator.load(save(metadata=metadata))


def test_files_that_are_no_checkpoints(tmp_path: Path, save: Save) -> None:
    run = save()
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    plain = tmp_path / "plain.pt"
    torch.save({"ppo": {}}, plain)
    for file in (text, plain):
        with pytest.raises(UnknownFormat, match="not written by penstock"):
            Navigator.load(file)
    cases: list[tuple[Path, str, str]] = [
        (tmp_path / "runs" / "none", "best", "there is no run"),
        (tmp_path / "none", "best", "there is no checkpoint"),
        (run, "checkpoint_9.pt", "the folder has best.pt"),
        (run, "../best.pt", "is a path"),
    ]
    shutil.copytree(run, tmp_path / "empty")
    for file in (tmp_path / "empty" / "checkpoints").iterdir():
        file.unlink()
    cases.append((tmp_path / "empty", "best", "there is no checkpoint in"))
    for path, checkpoint, said in cases:
        with pytest.raises(PenstockError, match=said) as caught:
            Navigator.load(path, checkpoint)
        assert "\n" not in str(caught.value)


def test_words_of_the_shield(save: Save) -> None:
    run = save()
    with pytest.raises(UsageError, match=r"shield='onn' is unknown; did you mean 'on'\?"):
        Navigator.load(run, shield="onn")
    with pytest.raises(UsageError, match="dynamic_margin_m is -1"):
        Navigator.load(run, margins=(-1.0, 0.0))
    shield = Navigator.load(run, margins=(0.2, 0.1)).shield
    assert shield is not None
    assert (shield.settings.dynamic_margin_m, shield.settings.static_margin_m) == (0.2, 0.1)


def test_velocities_are_in_the_world(save: Save, small: Settings) -> None:
    navigator = Navigator.load(save(), shield="off")
    obs = seen(small)
    obs["direction"][:] = torch.tensor([0.0, -48.0, 0.0])
    action, velocity = navigator.action(obs), navigator.velocity(obs)
    goal = (action * 2 - 1) * small.action_limit
    # They cross towards -y: that is the x axis of their goal frame.
    turned = torch.stack([goal[:, 1], -goal[:, 0], goal[:, 2]], 1)
    assert torch.allclose(velocity, turned, atol=1e-6)
    obs["direction"] = torch.zeros(4, 1, 3)  # a target overhead
    assert torch.allclose(navigator.velocity(obs), goal, atol=1e-6)
    assert navigator.interventions == navigator.decisions == 0


def test_the_shield_counts(save: Save, small: Settings) -> None:
    navigator = Navigator.load(save())
    obs = seen(small)
    obs["lidar"][:, :, :3] = obs["lidar"][:, :, -3:] = 3.5  # a wall, half a metre ahead
    free = Navigator.load(save(), shield="off").action(obs)
    action = navigator.action(obs, height=torch.full((4,), 2.0))
    assert (action[:, 0] < free[:, 0]).all()
    assert (navigator.decisions, navigator.interventions) == (4, 4)


def test_axes_of_length_1_do_not_matter(save: Save, small: Settings) -> None:
    navigator = Navigator.load(save())
    obs = seen(small)
    other = {
        "state": obs["state"][:, None],
        "lidar": obs["lidar"][:, 0],
        "direction": obs["direction"][:, 0],
        "dynamic_obstacle": obs["dynamic_obstacle"][:, None],
    }
    height = torch.full((4,), 2.0)
    assert torch.equal(navigator.velocity(obs, height), navigator.velocity(other, height))


def test_bad_observations(save: Save, small: Settings) -> None:
    navigator = Navigator.load(save(), shield="off")
    obs = seen(small)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"lidar": None}, r"has no 'lidar'; give \[n, 1, 36, 4\]"),
        ({"state": torch.zeros(4, 7)}, r"'state' is \[4, 7\]; give \[n, 8\]"),
        ({"state": torch.zeros(8)}, r"'state' is \[8\]"),
        ({"dynamic_obstacle": torch.full((4, 5, 10), torch.nan)}, "not finite"),
        ({"direction": torch.zeros(4, 2)}, "'direction' is"),
    ]
    for change, said in cases:
        with pytest.raises(UsageError, match=said):
            navigator.velocity({k: v for k, v in (obs | change).items() if v is not None})


def test_its_policy_flies(save: Save, small: Settings) -> None:
    navigator = Navigator.load(save())
    flights = fly(navigator.pilot, navigator.settings, [7], 2)
    assert flights.outcome.numel() == 2
