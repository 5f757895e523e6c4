"""Both back ends, from the same state with the same actions, do the same."""

import numpy as np
import pytest
import torch

from penstock.nav.simulation.simulator import Simulator
from penstock.nav.simulation.task import Settings

STEPS = 200
DRONES = 64
CASES = [
    {"drone": "hummingbird", "reward": "navrl"},
    {"drone": "fast", "reward": "shifted", "maps": 3},
    {"drone": "hummingbird", "reward": "shifted", "dynamic_obstacles": 0, "substeps": 1},
]


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: torch's threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drive(sim, generator):
    """Actions that lead into the field, not round it."""
    action = torch.rand(sim.num_envs, 3, generator=generator)
    action[:, 0] = 0.6 + 0.4 * action[:, 0]
    return action


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['drone']}-{case['reward']}")
def test_steps_agree(case):
    config = Settings(num_envs=DRONES, episode_seconds=25.0, crossing_share=0.7, **case)
    generator = torch.Generator().manual_seed(1)
    finished = rays = 0
    counted = {"collision_static": 0, "collision_dynamic": 0, "collision_height": 0}
    with Simulator(config, 5, "numba", threads=1) as fast, Simulator(config, 9, "torch") as slow:
        fast.reset()
        # Into the field at once: otherwise it takes hundreds of steps of 0.016 s to see a box.
        fast.rows[:, :2] *= 0.75
        for step in range(STEPS):
            slow.load_state_dict(fast.state_dict())
            action = drive(fast, generator)
            obs, reward, terminated, truncated, info = fast.step(action)
            other, other_reward, other_terminated, other_truncated, other_info = slow.step(action)
            # A beam that grazes an edge may be decided either way by the last bit.
            apart = (obs["lidar"] - other["lidar"]).abs().flatten(1)
            grazed = (apart > 2e-3).any(1)
            rays += int((apart > 2e-3).sum())
            assert torch.equal(terminated, other_terminated), step
            assert torch.equal(truncated, other_truncated), step
            for name in counted:
                assert torch.equal(getattr(info, name), getattr(other_info, name)), (step, name)
                counted[name] += int(getattr(info, name).sum())
            assert torch.equal(info.reach_goal, other_info.reach_goal)
            assert torch.equal(info.finished, other_info.finished)
            assert torch.equal(info.episode_length, other_info.episode_length)
            assert torch.equal(info.final_index, other_info.final_index)
            for name in ("state", "direction", "dynamic_obstacle"):
                torch.testing.assert_close(obs[name], other[name], atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(reward[~grazed], other_reward[~grazed], atol=5e-4, rtol=1e-5)
            torch.testing.assert_close(info.position, other_info.position, atol=2e-5, rtol=0)
            torch.testing.assert_close(fast.rows[:, :32], slow.rows[:, :32], atol=2e-4, rtol=1e-5)
            assert torch.equal(fast.progress, slow.progress)
            finished += len(info.finished)
    assert rays < 1e-5 * STEPS * DRONES * 144
    assert finished > 20
    assert counted["collision_static"] > 5
    assert counted["collision_dynamic"] > 2 or not config.dynamic_obstacles


def test_the_number_of_threads_changes_nothing():
    config = Settings(num_envs=37, num_obstacles=100)
    states = []
    for threads in (1, 2, 3):
        generator = torch.Generator().manual_seed(0)
        with Simulator(config, 2, "numba", threads=threads) as sim:
            sim.reset()
            for _ in range(60):
                obs, reward, *_ = sim.step(drive(sim, generator))
            states.append([sim.rows.clone(), obs["lidar"].clone(), reward.clone()])
    for other in states[1:]:
        for mine, yours in zip(states[0], other, strict=True):
            assert torch.equal(mine, yours)


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_a_state_continues_bit_for_bit(backend):
    config = Settings(
        num_envs=40, maps=2, new_map_every=1, episode_seconds=1.5, num_obstacles=20, drone="fast"
    )
    generator = torch.Generator().manual_seed(4)
    actions = [torch.rand(40, 3, generator=generator) for _ in range(60)]
    with Simulator(config, 1, backend, threads=1) as first:
        first.reset()
        for action in actions[:30]:
            first.step(action)
        state = first.state_dict()
        before = {name: value.clone() for name, value in first.observe().items()}
        expected = [first.step(action) for action in actions[30:]][-1]
        seeds = [world.seed for world in first.worlds]
        assert max(seeds) > 2, "the maps should have changed on the way"
        with Simulator(config, 77, backend, threads=2) as second:
            second.load_state_dict(state)
            for name, value in second.observe().items():
                assert torch.equal(value, before[name])
            found = [second.step(action) for action in actions[30:]][-1]
            for name in expected[0]:
                assert torch.equal(found[0][name], expected[0][name])
            assert torch.equal(found[1], expected[1])
            assert torch.equal(first.rows, second.rows)
            assert [world.seed for world in second.worlds] == seeds
            np.testing.assert_equal(first.obstacles.position, second.obstacles.position)
