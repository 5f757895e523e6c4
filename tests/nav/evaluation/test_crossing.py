"""Crossings: outcomes that must be so, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.errors import UsageError
from penstock.nav.evaluation.crossing import Flights, Outcome, deterministic_pilot, fly, straight
from penstock.nav.networks import Policy
from penstock.nav.shield import Shield
from penstock.nav.simulation.simulator import Observation
from penstock.nav.simulation.task import Settings
from penstock.ui.progress import Progress

EMPTY = Settings(num_obstacles=0, dynamic_obstacles=0, drone="fast", reward="shifted")
FULL = Settings(drone="fast", reward="shifted", episode_seconds=20.0)


def outcomes(flights: Flights) -> set[Outcome]:
    return {Outcome(kind) for kind in flights.outcome.tolist()}


def same(a: Flights, b: Flights) -> bool:
    names = ("world", "outcome", "time_s", "reach_goal", "path")
    counters = (a.seeds, a.decisions, a.interventions) == (b.seeds, b.decisions, b.interventions)
    return counters and all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def constant(*action: float) -> object:
    return lambda obs: torch.tensor(action).expand(len(obs["state"]), 3)


def test_flights_are_the_same_bits_for_any_number_of_threads() -> None:
    pilot = deterministic_pilot(Policy("fast", seed=3))
    short = FULL.with_(episode_seconds=10.0)
    shield = Shield.for_task(short)
    one = fly(pilot, short, [7, 8, 9], 8, shield=shield, record=True)
    again = fly(pilot, short, [7, 8, 9], 8, shield=Shield.for_task(short), record=True)
    two = fly(pilot, short, [7, 8, 9], 8, shield=shield, record=True, threads=2)
    assert same(one, again)
    assert same(one, two)
    assert one.interventions > 0
    assert shield.decisions == one.decisions + two.decisions


def test_threads_of_torch_change_nothing() -> None:
    pilot = deterministic_pilot(Policy("fast", seed=3))
    short = FULL.with_(episode_seconds=5.0)
    one = fly(pilot, short, [7], 64, record=True)
    torch.set_num_threads(2)
    two = fly(pilot, short, [7], 64, record=True)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert same(one, two)


def test_seeds_need_not_follow_each_other() -> None:
    whole = fly(straight, FULL, [7, 8, 9, 10], 6, record=True)
    some = fly(straight, FULL, [10, 7], 6, record=True)
    assert some.seeds == (10, 7)
    assert whole.path is not None
    assert some.path is not None
    for index, world in ((0, 3), (1, 0)):
        assert torch.equal(some.path[some.world == index], whole.path[whole.world == world])


def test_straight_crosses_where_nothing_stands() -> None:
    flights = fly(straight, EMPTY, [7, 8], 16)
    assert outcomes(flights) == {Outcome.SUCCESS}
    assert bool(flights.reach_goal.all())
    assert flights.path is None
    assert (flights.decisions, flights.interventions) == (0, 0)
    assert 24.0 < float(flights.time_s.min()) <= float(flights.time_s.max()) < 26.0  # 48 m, 2 m/s


@pytest.mark.parametrize(
    ("boxes", "moving", "kind"), [(350, 0, Outcome.STATIC), (0, 160, Outcome.DYNAMIC)]
)
def test_a_crash_is_of_the_kind_that_is_there(boxes: int, moving: int, kind: Outcome) -> None:
    settings = EMPTY.with_(num_obstacles=boxes, dynamic_obstacles=moving)
    flights = fly(straight, settings, [7], 32)
    assert kind in outcomes(flights)
    assert outcomes(flights) <= {kind, Outcome.SUCCESS}
    crashed = flights.outcome == kind
    assert not bool(flights.reach_goal[crashed].any())
    assert float(flights.time_s[crashed].max()) < 25.0


@pytest.mark.parametrize("up", [0.0, 1.0])
def test_leaving_the_flight_levels(up: float) -> None:
    flights = fly(constant(0.5, 0.5, up), EMPTY, [7], 4, record=True)  # type: ignore[arg-type]
    assert outcomes(flights) == {Outcome.HEIGHT}
    assert flights.path is not None
    height = float(flights.path[0, -1, 2])
    assert height < 0.2 if up == 0.0 else height > 4.0


def test_hovering_runs_out_of_time() -> None:
    settings = EMPTY.with_(episode_seconds=3.0)
    flights = fly(constant(0.5, 0.5, 0.5), settings, [7], 4)  # type: ignore[arg-type]
    assert outcomes(flights) == {Outcome.TIMEOUT}
    assert flights.time_s.tolist() == pytest.approx([settings.episode_steps * 0.096] * 4)


def test_reach_goal_is_asked_at_the_end_only() -> None:
    forward = constant(1.0, 0.5, 0.5)  # through the target, and on
    flights = fly(forward, EMPTY, [7], 4, record=True)  # type: ignore[arg-type]
    # The front of the starts is a little narrower than that of the targets: not all hit theirs.
    assert Outcome.SUCCESS in outcomes(flights)
    assert not bool(flights.reach_goal.any())


def test_a_crash_after_the_goal_stays_a_success() -> None:
    ahead = straight

    def pilot(obs: Observation) -> Tensor:
        there = (obs["state"][:, 3:4] < 0.45).expand(-1, 3)
        return torch.where(there, torch.tensor([0.5, 0.5, 1.0]), ahead(obs))

    flights = fly(pilot, EMPTY, [7], 4, record=True)
    assert outcomes(flights) == {Outcome.SUCCESS}
    assert not bool(flights.reach_goal.any())
    assert flights.path is not None
    assert float(flights.path[:, -1, 2].max()) < 2.6  # a path ends with its outcome


def test_a_path_stays_where_the_flight_ended() -> None:
    flights = fly(straight, FULL, [7], 8, record=True)
    assert flights.path is not None
    assert flights.path.shape == (8, FULL.episode_steps, 3)
    for path, time_s in zip(flights.path, flights.time_s.tolist(), strict=True):
        end = round(time_s / flights.period_s) - 1
        assert torch.equal(path[end:], path[end].expand_as(path[end:]))
        assert not torch.equal(path[end - 1], path[end])


def test_the_shield_is_asked_until_the_outcome_only() -> None:
    flights = fly(straight, EMPTY, [7], 8, shield=Shield.for_task(EMPTY))
    steps = (flights.time_s / flights.period_s).round().long()
    assert flights.decisions == int(steps.sum())
    assert flights.interventions == 0


def test_the_shield_helps() -> None:
    alone = fly(straight, FULL, [7], 16)
    shielded = fly(straight, FULL, [7], 16, shield=Shield.for_task(FULL))
    crashed = (Outcome.STATIC, Outcome.DYNAMIC)
    counts = [sum((f.outcome == kind).sum() for kind in crashed) for f in (alone, shielded)]
    assert counts[1] < counts[0] / 2


def test_the_pilot_sees_only_drones_in_the_air() -> None:
    seen: list[int] = []
    ahead = straight

    def pilot(obs: Observation) -> Tensor:
        seen.append(len(obs["state"]))
        return ahead(obs)

    fly(pilot, FULL, [7], 16)
    assert seen[0] == 16
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 16


def test_progress_ends_at_the_same_number_however_flights_end() -> None:
    for pilot in (constant(0.5, 0.5, 1.0), constant(0.5, 0.5, 0.5)):
        settings = EMPTY.with_(episode_seconds=2.0)
        with Progress(mode="quiet") as progress:
            fly(pilot, settings, [7, 8, 11], 2, progress=progress)  # type: ignore[arg-type]
        assert progress.done == 3 * settings.episode_steps


def test_an_error_of_the_pilot_comes_through() -> None:
    def pilot(obs: Observation) -> Tensor:
        raise ValueError("no idea")

    for threads in (1, 2):
        with pytest.raises(ValueError, match="no idea"):
            fly(pilot, EMPTY, [7, 8], 2, threads=threads)


@pytest.mark.parametrize(
    ("seeds", "drones", "threads", "said"),
    [
        ([], 4, 1, r"the map seeds are \[\]"),
        ([7, 7], 4, 1, "none of them twice"),
        ([7], 0, 1, "drones is 0"),
        ([7], 4, 0, "threads 0"),
        ([-1], 4, 1, "map_seed is -1"),
    ],
)
def test_nonsense_is_refused(seeds: list[int], drones: int, threads: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        fly(straight, EMPTY, seeds, drones, threads=threads)
