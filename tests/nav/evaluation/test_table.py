"""Rates and intervals, against numbers worked out by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from penstock.nav.evaluation.crossing import Flights, Outcome
from penstock.nav.evaluation.table import interval, student, summarise, text


def flights(outcomes: list[list[Outcome]], times: float = 25.0, decisions: int = 0) -> Flights:
    flat = [kind for world in outcomes for kind in world]
    world = [index for index, kinds in enumerate(outcomes) for _ in kinds]
    outcome = torch.tensor(flat, dtype=torch.int8)
    return Flights(
        seeds=tuple(range(7, 7 + len(outcomes))),
        world=torch.tensor(world),
        outcome=outcome,
        time_s=torch.arange(len(flat)) + times,
        reach_goal=outcome == Outcome.SUCCESS,
        path=None,
        decisions=decisions,
        interventions=decisions // 4,
        period_s=0.096,
    )


S, B, D, T = Outcome.SUCCESS, Outcome.STATIC, Outcome.DYNAMIC, Outcome.TIMEOUT


def test_an_interval_worked_out_by_hand() -> None:
    # Deviations 0.05, -0.05, 0.15, -0.15: variance 0.05 / 3, standard error 0.0645497.
    mean, low, high = interval([0.8, 0.7, 0.9, 0.6], 0.0, 1.0)
    assert mean == pytest.approx(0.75)
    assert low == pytest.approx(0.75 - 3.1824 * 0.0645497, abs=1e-5)
    assert high == pytest.approx(0.75 + 3.1824 * 0.0645497, abs=1e-5)


def test_an_interval_of_rates_stays_between_0_and_1() -> None:
    assert interval([1.0, 0.9], 0.0, 1.0)[2] == 1.0
    assert interval([0.0, 0.1], 0.0, 1.0)[1] == 0.0
    assert interval([0.5, 0.5, 0.5], 0.0, 1.0) == (0.5, 0.5, 0.5)
    assert interval([0.4], 0.0, 1.0) == (0.4, None, None)


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.7062), (7, 2.3646), (10, 2.2281), (11, 2.2010), (15, 2.1314), (30, 2.0423)],
)
def test_the_quantiles_are_those_of_the_tables(freedom: int, value: float) -> None:
    assert student(freedom) == pytest.approx(value, abs=3e-4)


def test_the_quantile_tends_to_that_of_the_normal_distribution() -> None:
    assert student(10**9) == pytest.approx(1.959964, abs=1e-6)


def test_worlds_count_and_not_drones() -> None:
    # A world of four drones and one of two: the mean is of the worlds' rates.
    summary = summarise(flights([[S, S, S, B], [D, T]]))
    success = summary["rates"]["success"]
    assert success["mean"] == pytest.approx(0.375)
    assert (success["worst"], success["worst_seed"]) == (0.0, 8)
    assert summary["rates"]["static"]["worst"] == 0.25
    assert summary["rates"]["dynamic"]["worst_seed"] == 8
    assert [world["timeout"] for world in summary["worlds"]] == [0.0, 0.5]
    for world in summary["worlds"]:
        assert math.isclose(sum(world[kind.name.lower()] for kind in Outcome), 1.0)


def test_times_are_of_successes() -> None:
    summary = summarise(flights([[S, B, S], [D, D, S]], times=20.0))
    assert summary["time_to_goal_s"]["median"] == 22.0  # of 20, 22, 25
    assert summary["time_to_goal_s"]["mean"] == 23.0  # of the worlds' medians, 21 and 25
    nobody = summarise(flights([[B, B]]))
    assert set(nobody["time_to_goal_s"].values()) == {None}


def test_a_summary_is_json() -> None:
    summary = summarise(flights([[S, B], [S, S]], decisions=200))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["shield"] == {"decisions": 200, "interventions": 50, "share": 0.25}


def test_the_table_says_everything() -> None:
    said = text(
        {
            "policy": summarise(flights([[S, S, S, B], [S, D, S, S], [T, S, S, S]])),
            "policy + shield": summarise(flights([[S] * 4] * 3, decisions=100)),
        }
    )
    head, alone, shielded, *notes = said.splitlines()
    for word in ("success", "static", "dynamic", "height", "time-out", "to goal", "reach_goal"):
        assert word in head
    assert alone.split()[:3] == ["policy", "75.0", "75.0"]
    assert "8.3 (0-44)" in alone  # a quarter in one world of three
    assert shielded.split()[3:5] == ["100.0", "100.0"]
    assert shielded.split()[-1] == "25.0"
    assert any("Only 3 worlds: the intervals are wide" in note for note in notes)
    assert "3 unseen worlds (map seeds 7 to 9), 4 drones" in said


def test_eight_worlds_are_enough_and_one_has_no_interval() -> None:
    assert "Only" not in text({"policy": summarise(flights([[S, B]] * 8))})
    one = text({"policy": summarise(flights([[S, B]]))})
    assert "Only 1 world:" in one
    assert "50.0" in one
    assert "(" not in one.splitlines()[1]
