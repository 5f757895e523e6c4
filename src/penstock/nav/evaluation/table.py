"""What flights amount to: rates with intervals over worlds, and the table that compares pilots.

Drones of one world share its obstacles, so they are no independent trials: worlds are. A rate is
the mean of the worlds' rates, and its interval is Student's over worlds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.nav.evaluation.crossing import Flights, Outcome
from penstock.ui.report import text_table

RATES = ("success", "static", "dynamic", "height", "timeout", "reach_goal")
ENOUGH_WORLDS = 8  # worlds differ by 40 points: fewer of them say little

# The 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom.
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_Z = 1.959964  # of the normal distribution


def summarise(flights: Flights) -> dict[str, Any]:
    """Return rates and times as plain numbers, fit for JSON.

    Of each world its rates and the median time to the goal; of each of `RATES` the mean, the 95 %
    interval (None for one world) and the worst; the median time of all successes, mean and interval
    over the medians of the worlds; what the shield did.
    """
    worlds = [_world(flights, index) for index in range(len(flights.seeds))]
    seeds = [world["seed"] for world in worlds]
    rates = {}
    for name in RATES:
        values = [world[name] for world in worlds]
        mean, low, high = interval(values, 0.0, 1.0)
        better_high = name in ("success", "reach_goal")
        worst = min(values) if better_high else max(values)
        where = {"worst": worst, "worst_seed": seeds[values.index(worst)]}
        rates[name] = {"mean": mean, "low": low, "high": high, **where}
    medians = [world["time_to_goal_s"] for world in worlds if world["time_to_goal_s"] is not None]
    mean, low, high = interval(medians, 0.0, math.inf) if medians else (None, None, None)
    median = _median(flights.time_s[flights.outcome == Outcome.SUCCESS])
    counts = {"decisions": flights.decisions, "interventions": flights.interventions}
    share = flights.interventions / max(flights.decisions, 1)
    return {
        "worlds": worlds,
        "rates": rates,
        "time_to_goal_s": {"median": median, "mean": mean, "low": low, "high": high},
        "shield": counts | {"share": share} if flights.decisions else None,
    }


def interval(values: Sequence[float], least: float, most: float) -> tuple[Any, Any, Any]:
    """Return the mean of independent values and its 95 % interval by Student's t, cut at its ends.

    A single value says nothing of the interval: None.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return mean, None, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = student(count - 1) * math.sqrt(variance / count)
    return mean, max(least, mean - half), min(most, mean + half)


def student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t: from a table, then by its expansion in 1 / n."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    first = (_Z**3 + _Z) / 4
    second = (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    third = (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384
    return _Z + first / freedom + second / freedom**2 + third / freedom**3


def cells(results: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of the table of pilots, from what `summarise` returned of each."""
    columns = ["pilot, %", "success", "worst", "static", "dynamic", "height", "time-out", "to goal"]
    columns += ["reach_goal", "shielded"]
    rows = []
    for name, summary in results.items():
        rates, times, shield = summary["rates"], summary["time_to_goal_s"], summary["shield"]
        parts = [_percent(rates[rate]) for rate in RATES]
        worst = f"{rates['success']['worst'] * 100:.1f}"
        to_goal = "-" if times["median"] is None else f"{times['median']:.1f} s"
        shielded = "-" if shield is None else f"{shield['share'] * 100:.1f}"
        rows.append([name, parts[0], worst, *parts[1:5], to_goal, parts[5], shielded])
    return columns, rows


def text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table that compares pilots, as plain text, and what its columns mean."""
    notes = "\n".join(footnotes(results))
    return f"{text_table(*cells(results))}\n\n{notes}"


def stress_cells(stress: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of the table of disturbances, from what `summarise` returned.

    That is by disturbance, of which "none" is one, and by pilot.
    """
    pilots = list(stress["none"])
    rows = []
    for kind, results in stress.items():
        row = [kind]
        for pilot in pilots:
            rate, calm = (each[pilot]["rates"]["success"] for each in (results, stress["none"]))
            row.append(_percent(rate))
            points = 100 * (rate["mean"] - calm["mean"])
            row.append("" if kind == "none" else f"{points:+.1f}")
        rows.append(row)
    columns = ["success under, %"]
    for pilot in pilots:
        columns += [pilot, "points"]
    return columns, rows


def footnotes(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say what was flown, and what the columns mean."""
    worlds = next(iter(results.values()))["worlds"]
    count = len(worlds)
    seeds = f"{worlds[0]['seed']} to {worlds[-1]['seed']}" if count > 1 else str(worlds[0]["seed"])
    lines = [
        f"Crossings of {count} unseen world{'s' * (count > 1)} (map seeds {seeds}), "
        f"{worlds[0]['drones']} drones in each, deterministic.",
        "Means over worlds, with 95 % intervals over worlds where there are two or more.",
        "worst: the success of the worst world. static, dynamic, height, time-out: how the others "
        "ended.",
        "to goal: median time of the successes. shielded: decisions that the shield exchanged.",
        "reach_goal: NavRL's own measure, at the target in the last step of the whole episode.",
    ]
    if count < ENOUGH_WORLDS:
        lines.append(
            f"Only {count} world{'s' * (count > 1)}: the intervals are wide, fly "
            f"{ENOUGH_WORLDS} or more for a claim."
        )
    return lines


def _percent(rate: Mapping[str, Any]) -> str:
    mean = f"{rate['mean'] * 100:.1f}"
    if rate["low"] is None or rate["low"] == rate["high"]:
        return mean
    return f"{mean} ({rate['low'] * 100:.0f}-{rate['high'] * 100:.0f})"


def _world(flights: Flights, index: int) -> dict[str, Any]:
    here = flights.world == index
    outcome, count = flights.outcome[here], int(here.sum())
    shares = {kind.name.lower(): int((outcome == kind).sum()) / count for kind in Outcome}
    return {
        "seed": flights.seeds[index],
        "drones": count,
        **shares,
        "reach_goal": int(flights.reach_goal[here].sum()) / count,
        "time_to_goal_s": _median(flights.time_s[here][outcome == Outcome.SUCCESS]),
    }


def _median(values: torch.Tensor) -> float | None:
    return float(values.double().quantile(0.5)) if values.numel() else None
