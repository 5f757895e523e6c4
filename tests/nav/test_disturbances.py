"""Disturbances: what they do to observations and flight, and what they leave alone."""

import pytest
import torch

from penstock.errors import UsageError
from penstock.nav.simulation.kernels import VELOCITY
from penstock.nav.simulation.simulator import Simulator
from penstock.nav.simulation.task import STRESS, Disturbances, Obstacle, Settings, State

CALM = Settings(num_envs=256, maps=2, drone="fast", reward="shifted", crossing_share=1.0)
FIELD = 0.6  # drones start at the edge: so much nearer there is something to see


def disturbed(**strengths):
    return CALM.with_(disturbances=Disturbances(**strengths))


def actions(count, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [0.3 + 0.7 * torch.rand(count, 3, generator=generator) for _ in range(steps)]


def both(settings, steps=20):
    """Fly calm and disturbed from one state; yield what both observe and pay, step by step."""
    with Simulator(CALM, 1, threads=1) as calm, Simulator(settings, 1, threads=1) as other:
        calm.reset()
        other.reset()
        calm.rows[:, :2] *= FIELD
        other.rows.copy_(calm.rows)
        for action in actions(CALM.num_envs, steps):
            true = calm.step(action, restart=False)
            seen = other.step(action, restart=False)
            yield true, seen, calm, other


def test_what_is_observed_is_noisy_and_what_is_judged_is_not():
    errors, lost, beams = [], 0, 0
    for true, seen, calm, other in both(disturbed(range_m=0.05, dropout=0.1)):
        assert torch.equal(true[1], seen[1])  # reward
        assert torch.equal(true[2], seen[2])  # terminated
        assert torch.equal(calm.rows, other.rows)
        assert torch.equal(true[0]["state"], seen[0]["state"])
        hit = (true[0]["lidar"] > 0.3) & (true[0]["lidar"] < 3.7)
        shown, right = seen[0]["lidar"][hit], true[0]["lidar"][hit]
        gone = shown == 0.0
        lost, beams = lost + int(gone.sum()), beams + gone.numel()
        errors.append((shown - right)[~gone])
        free = true[0]["lidar"] == 0.0
        assert (seen[0]["lidar"][free] == 0.0).all()
    error = torch.cat(errors)
    assert abs(float(error.mean())) < 0.002
    assert float(error.std()) == pytest.approx(0.05, rel=0.05)
    assert lost / beams == pytest.approx(0.1, abs=0.01)


def test_obstacles_are_missed_and_ghosts_are_seen():
    there = missed = ghosts = rows = 0
    for true, seen, _, _ in both(disturbed(missed=0.25), 60):
        counts = [
            (each[0]["dynamic_obstacle"][..., Obstacle.PLACE] != 0).any(-1).sum()
            for each in (true, seen)
        ]
        there, missed = there + int(counts[0]), missed + int(counts[0] - counts[1])
    assert there > 1000
    assert missed / there == pytest.approx(0.25, abs=0.05)
    for true, seen, _, _ in both(disturbed(ghosts=0.2), 20):
        before, after = (each[0]["dynamic_obstacle"] for each in (true, seen))
        more = (after != before).any(-1).sum(-1)
        assert (more <= 1).all()
        ghosts, rows = ghosts + int(more.sum()), rows + more.numel()
        assert torch.equal(true[1], seen[1])
    assert ghosts / rows == pytest.approx(0.2, abs=0.03)


def test_the_position_drifts_as_a_walk():
    for step, (true, seen, _, _) in enumerate(both(disturbed(drift_m=0.1), 100), 1):
        if step in (25, 100):
            away = seen[0]["state"][:, State.DISTANCE] - true[0]["state"][:, State.DISTANCE]
            expected = 0.1 * (step * CALM.period_s) ** 0.5
            assert float(away.std()) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("late", [1, 3])
def test_a_late_command_is_the_one_of_before(late):
    given = actions(CALM.num_envs, 12)
    nothing = torch.full_like(given[0], 0.5)
    with (
        Simulator(CALM, 1, threads=1) as calm,
        Simulator(disturbed(latency=late), 1, threads=1) as other,
    ):
        calm.reset()
        other.reset()
        other.rows.copy_(calm.rows)
        for step, action in enumerate(given):
            flown = given[step - late] if step >= late else nothing
            calm.step(flown, restart=False)
            other.step(action, restart=False)
            assert torch.equal(calm.rows, other.rows)


@pytest.mark.parametrize("drone", ["fast", "hummingbird"])
def test_wind_and_mass_push_the_drone_away(drone):
    still = torch.full((CALM.num_envs, 3), 0.5)
    for strengths, axes in (({"wind": 1.0}, slice(0, 2)), ({"mass": 0.1}, slice(2, 3))):
        settings = disturbed(**strengths).with_(drone=drone, num_obstacles=0)
        with Simulator(settings, 0, threads=1) as sim:
            sim.reset()
            for _ in range(30):
                sim.step(still, restart=False)
            pushed = sim.rows[:, VELOCITY][:, axes].norm(dim=1)
        # A controller of gain 2.2 gives way to 1 m/s2, or 10 % of gravity, by about 0.45 m/s.
        assert 0.1 < float(pushed.mean()) < 0.45
        assert float(pushed.max()) < 0.6


def test_none_of_it_is_the_calm_world_and_a_state_goes_on():
    settings = CALM.with_(disturbances=STRESS["all"], episode_seconds=3.0, new_map_every=1)
    given = actions(CALM.num_envs, 60)
    with Simulator(settings, 3, threads=2) as one, Simulator(settings, 9, threads=1) as two:
        one.reset()
        for action in given[:35]:
            one.step(action)
        two.load_state_dict(one.state_dict())
        before = {name: value.clone() for name, value in one.observe().items()}
        for name, value in two.observe().items():
            assert torch.equal(value, before[name]), name
        for action in given[35:]:
            first, second = one.step(action), two.step(action)
        for name, value in first[0].items():
            assert torch.equal(value, second[0][name]), name
        assert torch.equal(one.rows, two.rows)
    for true, seen, calm, other in both(CALM.with_(disturbances=STRESS["all"]), 1):
        other.disturbed = 0.0
        other.restart(torch.arange(CALM.num_envs))  # wind and mass are those of an episode
        other.rows.copy_(calm.rows)
        other.progress.copy_(calm.progress)
        for name, value in other.observe().items():
            assert torch.equal(value, true[0][name]), name
        assert not torch.equal(true[0]["lidar"], seen[0]["direction"])


def test_what_makes_no_sense_is_refused():
    for strengths in ({"range_m": -1.0}, {"dropout": 1.5}, {"latency": 0.5}, {"mass": "heavy"}):
        with pytest.raises(UsageError, match=next(iter(strengths))):
            Disturbances(**strengths)
