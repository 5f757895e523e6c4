"""The simulator under TorchRL's rules."""

import pytest
import torch
from torchrl.envs.utils import check_env_specs

from penstock.errors import UsageError
from penstock.nav.simulation.env import NavigationEnv
from penstock.nav.simulation.task import Settings

SMALL = {"num_envs": 6, "num_obstacles": 40, "dynamic_obstacles": 16}


def make(**kwargs):
    return NavigationEnv(Settings(episode_seconds=1.0, **SMALL), **kwargs)


@pytest.mark.parametrize("action", ["normalized", "velocity"])
def test_specs(action):
    env = make(action=action)
    check_env_specs(env, seed=0)
    env.close()


def test_keys_and_shapes():
    env = make()
    rollout = env.rollout(12, break_when_any_done=False)
    seen = rollout["agents", "observation"]
    assert {name: tuple(seen[name].shape) for name in seen.keys()} == {  # noqa: SIM118
        "state": (6, 12, 8),
        "lidar": (6, 12, 1, 36, 4),
        "direction": (6, 12, 1, 3),
        "dynamic_obstacle": (6, 12, 5, 10),
    }
    assert rollout["agents", "action_normalized"].shape == (6, 12, 3)
    assert rollout["next", "agents", "reward"].shape == (6, 12, 1)
    assert rollout["next", "truncated"].shape == (6, 12, 1)
    assert rollout["next", "info", "drone_state"].shape == (6, 12, 1, 13)
    assert set(rollout["next", "stats"].keys()) == {
        "return",
        "episode_len",
        "reach_goal",
        "collision",
        "truncated",
    }
    env.close()


def test_ends_are_the_last_observations_and_the_others_fly_on():
    env = make(seed=4)
    rollout = env.rollout(25, break_when_any_done=False)
    done = rollout["next", "done"][..., 0]
    assert rollout["next", "truncated"].sum() > 0
    # The episode is 10 steps; what "next" shows at its end is flying, not waiting at the start.
    length = rollout["next", "stats", "episode_len"][..., 0]
    assert (length[rollout["next", "truncated"][..., 0]] == 10).all()
    for name in ("state", "lidar", "dynamic_obstacle"):
        later = rollout["agents", "observation", name][:, 1:]
        before = rollout["next", "agents", "observation", name][:, :-1]
        assert torch.equal(later[~done[:, :-1]], before[~done[:, :-1]])
    speed = rollout["agents", "observation", "state"][..., 5:].abs().amax(-1)
    assert (speed[:, 1:][done[:, :-1]] == 0).all()
    assert (rollout["next", "agents", "observation", "state"][..., 5:].abs().amax(-1) > 0).all()
    env.close()


def test_seeds_repeat():
    env, twin = make(), make(seed=11)
    env.rollout(7, break_when_any_done=False)
    found = []
    for one in (env, twin):
        one.set_seed(5)
        torch.manual_seed(0)  # TorchRL's random actions come from the global generator
        found.append(one.rollout(15, break_when_any_done=False))
        one.close()
    for key in ("state", "lidar", "dynamic_obstacle"):
        assert torch.equal(
            found[0]["agents", "observation", key], found[1]["agents", "observation", key]
        )
    assert torch.equal(found[0]["next", "agents", "reward"], found[1]["next", "agents", "reward"])


def test_a_velocity_in_the_world_is_that_of_the_goal_frame():
    both = []
    for action in ("normalized", "velocity"):
        env = make(action=action, seed=2)
        data = env.reset()
        if action == "normalized":
            data["agents", "action_normalized"] = torch.tensor([[1.0, 0.5, 0.5]]).repeat(6, 1)
        else:
            ahead = data["agents", "observation", "direction"][:, 0]
            data["agents", "action"] = 2 * ahead / ahead.norm(dim=1, keepdim=True)
        both.append(env.step(data)["next", "agents", "observation", "state"])
        env.close()
    torch.testing.assert_close(both[0], both[1], atol=1e-5, rtol=1e-5)
    assert (both[0][:, 5] > 0.005).all()


def test_an_unknown_action_is_refused():
    with pytest.raises(UsageError, match="action='rotors' is unknown; use one of normalized"):
        make(action="rotors")
