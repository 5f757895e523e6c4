"""The compiled simulator and the reference, from the same state with the same actions."""

import numpy as np
import pytest
import torch

from penstock.nav.simulation.simulator import Simulator
from penstock.nav.simulation.task import Settings
from penstock.nav.simulation.world import Maps

from .reference import Outcome, Reference

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


class Slow:
    """The reference, put into the state of a simulator before each step."""

    def __init__(self, fast):
        count = fast.num_envs
        self.engine = Reference(fast.settings, torch.from_numpy(fast.world_of))
        self.engine.set_maps(Maps(fast.worlds, fast.settings.lidar_range_m))
        self.seen = fast.observation_buffer()
        none = torch.zeros(count, dtype=torch.bool)
        self.outcome = Outcome(
            torch.zeros(count),
            none,
            none.clone(),
            torch.zeros(count, 4).bool(),
            torch.zeros(count, 3),
        )

    def load(self, fast):
        self.rows, self.progress = fast.rows.clone(), fast.progress.clone()

    def step(self, action, fast):
        self.engine.set_obstacles(fast.obstacles, fast.dynamic_active)
        self.engine.step(action, self.rows, self.progress, self.seen, self.outcome)
        return self.seen


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
    with Simulator(config, 5, threads=1) as fast:
        fast.reset()
        slow = Slow(fast)
        # Into the field at once: otherwise it takes hundreds of steps of 0.016 s to see a box.
        fast.rows[:, :2] *= 0.75
        for step in range(STEPS):
            action = drive(fast, generator)
            slow.load(fast)
            obs, reward, terminated, truncated, info = fast.step(action, restart=False)
            other = slow.step(action, fast)
            # A beam that grazes an edge may be decided either way by the last bit.
            apart = (obs["lidar"] - other["lidar"]).abs().flatten(1)
            grazed = (apart > 2e-3).any(1)
            rays += int((apart > 2e-3).sum())
            found = slow.outcome
            assert torch.equal(terminated, found.terminated), step
            assert torch.equal(truncated, found.truncated), step
            for number, name in enumerate([*counted, "reach_goal"]):
                happened = getattr(info, name)
                assert torch.equal(happened, found.flags[:, number]), (step, name)
                if name in counted:
                    counted[name] += int(happened.sum())
            for name in ("state", "direction", "dynamic_obstacle"):
                torch.testing.assert_close(obs[name], other[name], atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(reward[~grazed], found.reward[~grazed], atol=5e-4, rtol=1e-5)
            torch.testing.assert_close(info.position, found.position, atol=2e-5, rtol=0)
            torch.testing.assert_close(fast.rows[:, :32], slow.rows[:, :32], atol=2e-4, rtol=1e-5)
            assert torch.equal(fast.progress, slow.progress)
            finished += len(info.finished)
            fast.restart(info.finished)
    assert rays < 1e-5 * STEPS * DRONES * 144
    assert finished > 20
    assert counted["collision_static"] > 5
    assert counted["collision_dynamic"] > 2 or not config.dynamic_obstacles


def test_the_number_of_threads_changes_nothing():
    config = Settings(num_envs=37, num_obstacles=100)
    states = []
    for threads in (1, 2, 3):
        generator = torch.Generator().manual_seed(0)
        with Simulator(config, 2, threads=threads) as sim:
            sim.reset()
            for _ in range(60):
                obs, reward, *_ = sim.step(drive(sim, generator))
            states.append([sim.rows.clone(), obs["lidar"].clone(), reward.clone()])
    for other in states[1:]:
        for mine, yours in zip(states[0], other, strict=True):
            assert torch.equal(mine, yours)


def test_a_state_continues_bit_for_bit():
    config = Settings(
        num_envs=40, maps=2, new_map_every=1, episode_seconds=1.5, num_obstacles=20, drone="fast"
    )
    generator = torch.Generator().manual_seed(4)
    actions = [torch.rand(40, 3, generator=generator) for _ in range(60)]
    with Simulator(config, 1, threads=1) as first:
        first.reset()
        for action in actions[:30]:
            first.step(action)
        state = first.state_dict()
        before = {name: value.clone() for name, value in first.observe().items()}
        expected = [first.step(action) for action in actions[30:]][-1]
        seeds = [world.seed for world in first.worlds]
        assert max(seeds) > 2, "the maps should have changed on the way"
        with Simulator(config, 77, threads=2) as second:
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
