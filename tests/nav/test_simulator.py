"""Episodes: starts, ends, rewards, memory, and what is refused."""

import math

import numpy as np
import pytest
import torch

from penstock.errors import UsageError
from penstock.nav.simulation.kernels import training_places
from penstock.nav.simulation.simulator import Simulator
from penstock.nav.simulation.task import DRAWS, Reward, Settings

EMPTY = {"num_obstacles": 0, "dynamic_obstacles": 0}


def straight(count, speed=1.0):
    action = torch.full((count, 3), 0.5)
    action[:, 0] = speed
    return action


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_starts_and_targets_are_on_the_edges(share):
    draws = np.random.default_rng(0).random((4000, DRAWS), dtype=np.float32)
    start, target = training_places(draws, share)
    for places in (start, target):
        assert (np.abs(places[:, :2]).max(1) == 24).all()
        assert places[:, 2].min() >= 0.5
        assert places[:, 2].max() <= 2.5
        for edge in (places[:, 0] == 24, places[:, 0] == -24, places[:, 1] == 24):
            assert 0.2 < edge.mean() < 0.3
    opposite = (start[:, :2] == -target[:, :2]) & (np.abs(start[:, :2]) == 24)
    assert opposite.any(1).mean() == pytest.approx(share + (1 - share) / 4, abs=0.03)


def test_evaluation_is_a_front_of_straight_crossings():
    config = Settings(num_envs=8, maps=2, evaluation=True, **EMPTY)
    with Simulator(config, 0) as sim:
        obs = sim.reset()
        position = sim.rows[:, :3]
        assert position[:, 0].tolist() == [-16, -8, 0, 8] * 2
        assert position[:, 1].tolist() == [24] * 8
        assert obs["direction"][:, 0, 1].tolist() == [-48] * 8
        assert obs["state"][:, 4].abs().max() == 0
        first = {name: value.clone() for name, value in obs.items()}
        for name, value in sim.reset().items():
            assert torch.equal(value, first[name])


@pytest.mark.parametrize(("reward", "paid"), [("navrl", 1.0 + math.log(4)), ("shifted", 0.0)])
def test_what_hovering_pays(reward, paid):
    config = Settings(num_envs=3, num_obstacles=0, dynamic_obstacles=0, reward=reward)
    with Simulator(config, 0) as sim:
        sim.reset()
        sim.rows[:, 2] = sim.rows[:, 30:32].mean(1) + 0.8  # off the ground for all beams
        sim.rows[:, 30:32] = sim.rows[:, 2:3]
        _, found, *_ = sim.step(straight(3, 0.5))
    assert found.tolist() == pytest.approx([paid] * 3, abs=1e-4)


def test_dynamic_obstacles_count_as_far_while_there_are_none():
    config = Settings(num_envs=3, num_obstacles=0, dynamic_obstacles=15)
    assert config.dynamic_obstacles == 8
    with Simulator(config, 0) as sim:
        sim.dynamic_active = 7
        assert sim.dynamic_active == 0
        sim.reset()
        sim.rows[:, 2] = sim.rows[:, 30:32] = 2.0
        obs, found, *_ = sim.step(straight(3, 0.5))
        assert found.tolist() == pytest.approx([1.0 + 2 * math.log(4)] * 3, abs=1e-3)
        assert obs["dynamic_obstacle"].abs().max() == 0
        sim.dynamic_active = 100
        assert sim.dynamic_active == 8


def test_a_moving_obstacle_is_seen_and_hit():
    config = Settings(num_envs=3, num_obstacles=0, dynamic_obstacles=8, substeps=1, drone="fast")
    with Simulator(config, 0) as sim:
        sim.reset()
        crowd = sim.obstacles
        crowd.advance()  # goals and speeds are drawn
        crowd.velocity[:] = 0
        crowd.position[:] = (19, 19, 0)
        crowd.position[0, 3] = (1.0, 0.0, 3.0)  # a cuboid of 1 m
        crowd.position[0, 6] = (-2.0, 0.0, 2.5)  # a cylinder of 0.75 m
        crowd.goal[:] = 100
        crowd.velocity[0, 6] = (0.0, 0.5, 0.0)
        sim.rows[:, 22:24] = torch.tensor([0.0, 1.0])  # the goal frame looks along y
        sim.rows[:, :3] = torch.tensor([[0.0, 0.0, 2.0], [0.25, 0.0, 2.3], [10.0, 0.0, 2.0]])
        sim.rows[:, 30:32] = 2.0
        obs, _, terminated, _, info = sim.step(torch.full((3, 3), 0.5), restart=False)
        seen = obs["dynamic_obstacle"]
        far = math.sqrt(2)
        # Along x is to the right of y: -y in the goal frame.
        first = [0, -1 / far, 1 / far, 1, 1, 0, 0, 0, 3, 1]
        assert seen[0, 0].tolist() == pytest.approx(first, abs=1e-3)
        second = [0.004, 1, 0, 2, 0, 0.5, 0, 0, 2, 0]
        assert seen[0, 1].tolist() == pytest.approx(second, abs=5e-3)
        assert seen[0, 2:].abs().max() == 0
        assert seen[2].abs().max() == 0
        assert info.collision_dynamic.tolist() == [False, True, False]
        assert terminated.tolist() == [False, True, False]


@pytest.mark.parametrize("reward", ["navrl", "shifted"])
def test_the_target(reward):
    config = Settings(num_envs=2, reward=reward, drone="fast", **EMPTY)
    with Simulator(config, 0) as sim:
        sim.reset()
        sim.rows[0, :3] = sim.rows[0, 27:30]
        _, found, terminated, truncated, info = sim.step(straight(2, 0.5))
        assert info.reach_goal.tolist() == [True, False]
        ends = reward == "shifted"
        assert terminated.tolist() == [ends, False]
        assert not truncated.any()
        assert (float(found[0] - found[1]) > 15) == ends
        assert info.finished.tolist() == ([0] if ends else [])


def test_truncation_shows_the_last_observation():
    config = Settings(num_envs=4, episode_seconds=0.096 * 5, **EMPTY)
    assert config.episode_steps == 5
    with Simulator(config, 0) as sim, Simulator(config, 0) as twin:
        sim.reset()
        twin.reset()
        sim.rows[2, 2] = twin.rows[2, 2] = 3.9
        total = torch.zeros(4)
        for step in range(1, 6):
            action = straight(4)
            action[2, 2] = 1.0  # climbs out of the corridor
            obs, reward, terminated, truncated, info = sim.step(action)
            last, *_ = twin.step(action, restart=False)
            if step < 5 and not terminated.any():
                assert info.finished.numel() == 0
                assert info.final["lidar"].shape == (0, 1, 36, 4)
            if terminated.any():
                assert terminated.nonzero().tolist() == [[2]]
                assert info.collision_height.tolist() == [False, False, True, False]
                assert info.final_index.numel() == 0
                twin.restart(torch.tensor([2]))
                twin.load_state_dict(sim.state_dict())
            total += reward
        assert truncated.tolist() == [True, True, False, True]
        assert info.finished.tolist() == info.final_index.tolist() == [0, 1, 3]
        assert info.episode_length.tolist() == [5] * 3
        torch.testing.assert_close(info.episode_return, total[[0, 1, 3]])
        for name, value in info.final.items():
            torch.testing.assert_close(value, last[name][[0, 1, 3]])
        assert obs["state"][:, 5:].abs().max() > 0  # drone 2 flies on
        assert obs["state"][[0, 1, 3], 5:].abs().max() == 0  # the others start again
        assert sim.progress[[0, 1, 3]].tolist() == [0] * 3
        assert float(info.final["state"][:, 5].min()) > 0.3


def test_a_crash_costs_and_starts_again():
    config = Settings(num_envs=64, reward="shifted", evaluation=True, dynamic_obstacles=0)
    with Simulator(config, 0, threads=1) as sim:
        sim.reset()
        crashed = 0
        for _ in range(300):
            _, reward, terminated, _, info = sim.step(straight(64))
            assert torch.equal(reward < -10, terminated & ~info.reach_goal)
            crashed += int(info.collision_static.sum())
            assert sim.progress[terminated].tolist() == [0] * int(terminated.sum())
        assert crashed > 40


def test_observations_go_where_they_are_wanted():
    config = Settings(num_envs=5, num_obstacles=30)
    with Simulator(config, 0, threads=1) as sim:
        rollout = sim.observation_buffer(3)
        rows = [{name: value[t] for name, value in rollout.items()} for t in range(3)]
        sim.reset(rows[0])
        start = rollout["state"][0].clone()
        for t in (1, 2):
            obs, *_ = sim.step(straight(5), rows[t])
            assert obs["lidar"].data_ptr() == rollout["lidar"][t].data_ptr()
        assert torch.equal(rollout["state"][0], start)
        assert (rollout["state"][2, :, 3] < rollout["state"][1, :, 3]).all()
        rows[0]["lidar"] = rows[0]["lidar"].double()
        with pytest.raises(UsageError, match=r"out\['lidar'\] is torch.float64"):
            sim.reset(rows[0])
        del rows[0]["lidar"]
        with pytest.raises(UsageError, match="out has no 'lidar'"):
            sim.reset(rows[0])


def test_a_new_map_truncates_its_drones():
    config = Settings(num_envs=6, maps=3, num_obstacles=10, dynamic_obstacles=8)
    with Simulator(config, 0) as sim:
        sim.reset()
        sim.step(straight(6))
        old = sim.worlds
        sim.renew(1)
        _, _, terminated, truncated, info = sim.step(straight(6))
        assert truncated.tolist() == [False, False, True, True, False, False]
        assert not terminated.any()
        assert info.final_index.tolist() == [2, 3]
        assert [world.seed for world in sim.worlds] == [0, 3, 2]
        assert sim.worlds[0] is old[0]
        _, _, _, truncated, _ = sim.step(straight(6))
        assert not truncated.any()
        with pytest.raises(UsageError, match="world 3 is not one of 3"):
            sim.renew(3)


def test_seeds():
    config = Settings(num_envs=5, num_obstacles=20)
    with (
        Simulator(config, 1) as first,
        Simulator(config, 1) as second,
        Simulator(config, 2) as other,
    ):
        assert torch.equal(first.reset()["state"], second.reset()["state"])
        assert not torch.equal(first.observe()["state"], other.reset()["state"])
        for _ in range(30):
            first.step(straight(5))
        first.reseed(1)
        assert torch.equal(first.reset()["state"], second.observe()["state"])
        np.testing.assert_array_equal(first.obstacles.position, second.obstacles.position)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 0}, "num_envs is 0; give a whole number, at least 1"),
        ({"num_envs": 2.5}, "num_envs is 2.5"),
        ({"num_obstacles": -1}, "num_obstacles is -1"),
        ({"substeps": 0}, "substeps is 0"),
        ({"substeps": 1000}, "substeps is 1000; give at most 125"),
        ({"maps": 9, "num_envs": 4}, "maps is 9 for 4 drones"),
        ({"episode_seconds": math.nan}, "episode_seconds is nan"),
        ({"lidar_range_m": 50.0}, "lidar_range_m is 50.0; give at most 5"),
        ({"action_limit": 0}, "action_limit is 0"),
        ({"drone": "humingbird"}, "drone='humingbird' is unknown; did you mean 'hummingbird'"),
        ({"reward": "shift"}, "reward='shift' is not a preset; did you mean 'shifted'"),
        ({"crossing_share": 1.5}, "crossing_share is 1.5"),
        ({"lidar_beams": (0, 4)}, r"lidar_beams is \(0, 4\)"),
        ({"lidar_fov_deg": (20.0, -10.0)}, "lidar_fov_deg is"),
        ({"num_env": 3}, "there is no setting 'num_env'; did you mean 'num_envs'"),
    ],
)
def test_settings_that_make_no_sense(changes, message):
    with pytest.raises(UsageError, match=message) as caught:
        Settings().with_(**changes)
    assert "\n" not in str(caught.value)


def test_calls_that_make_no_sense():
    config = Settings(num_envs=3, **EMPTY)
    with pytest.raises(UsageError, match="threads is 0"):
        Simulator(config, threads=0)
    with pytest.raises(UsageError, match="num_obstacles=9999 do not fit"):
        Simulator(config.with_(num_obstacles=9999))
    with Simulator(config) as sim:
        with pytest.raises(UsageError, match="call reset"):
            sim.step(straight(3))
        sim.reset()
        before = sim.state_dict()
        with pytest.raises(UsageError, match=r"action is \[2, 3\]; give \[3, 3\]"):
            sim.step(straight(2))
        for bad in (math.nan, -0.1, 1.5, math.inf):
            action = straight(3)
            action[1, 2] = bad
            with pytest.raises(UsageError, match=r"action\[1, 2\] is "):
                sim.step(action)
        assert torch.equal(sim.rows, before["rows"])
        with (
            Simulator(config.with_(num_envs=4)) as other,
            pytest.raises(UsageError, match="the state is of 3 drones in 1 worlds"),
        ):
            other.load_state_dict(before)


def test_presets():
    assert Settings(reward="navrl").weights == Reward()
    shifted = Settings(reward="shifted").weights
    assert (shifted.collision, shifted.goal, shifted.goal_ends) == (-20, 20, True)


@pytest.mark.parametrize("every", [1, 2, 4, 6])
def test_every_map_gets_the_episodes_it_should(every):
    """Episodes that a new map cuts are neither of the new map nor time-outs."""
    config = Settings(
        num_envs=6, maps=2, episode_seconds=0.096 * 5, new_map_every=every, drone="fast", **EMPTY
    )
    with Simulator(config, 0) as sim:
        sim.reset()
        sim.progress[:] = torch.tensor([0, 2, 4, 0, 0, 0])  # world 0 ends its episodes apart
        ended = [[0], [0]]
        for _ in range(60 * every):
            seeds = sim.map_seeds
            _, _, terminated, truncated, info = sim.step(straight(6, 0.5))
            assert not terminated.any()
            assert not (info.cut & ~truncated).any()
            renewed = [old != new for old, new in zip(seeds, sim.map_seeds, strict=True)]
            for drone in info.finished.tolist():
                world = sim.world_of[drone]
                assert bool(info.cut[drone]) <= renewed[world]
                ended[world][-1] += not info.cut[drone]
            for world in (0, 1):
                if renewed[world]:
                    ended[world].append(0)
        for counts in ended:
            assert len(counts) > 5
            # The map is renewed one step after the last of its episodes; others may end there.
            assert set(counts[:-1]) <= {3 * every, 3 * every + 1, 3 * every + 2}
