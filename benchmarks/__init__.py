"""Benchmarks: every claim and every peer, side by side, in one run on this machine.

A case, one folder each, states the claim it checks and who it is compared with; running it gives
rows. measure.py times, experience.py makes data, runner.py adds machine and versions, stored.py
keeps a run, compare.py sets two beside each other, figures.py writes them into the documents.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import UsageError
from penstock.ui.suggestions import did_you_mean


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Args:
        work: Scratch folder on the disk that is to be measured.
        hidden: Width of the networks; 2048 makes a state of about 200 MB.
        train_steps: Real optimizer steps before anything is measured.
        rounds: Repetitions of the stall measurements.
        repeats: Repetitions of the other timings.
        faults: Damaged files handed to penstock.
        peer_faults: Damaged files of each kind handed to each peer.
        phase_s: Time without mutation before each optimizer step.
        episodes: Episodes of 500 depth pictures in a replay buffer.
        entries: Of the sum tree.
        envs: Environments of a rollout, 32 steps each.
        batches: Collected one after another in the pipeline.
    """

    work: Path
    hidden: int = 2048
    train_steps: int = 220
    rounds: int = 15
    repeats: int = 7
    faults: int = 1000
    peer_faults: int = 25
    phase_s: float = 0.1
    episodes: int = 24
    entries: int = 1_000_000
    envs: int = 1024
    batches: int = 16


@dataclass(frozen=True)
class Row:
    """One measured figure.

    Args:
        what: The quantity.
        who: The method it was measured on.
        value: The median of `n` measurements.
        unit: Of the value.
        n: How many measurements.
        p90: 90th percentile, for times.
        ratio: The value divided by penstock's.
        cpu_s: Processor seconds per measurement, background work included (median).
        bar: What was promised of it, in words.
        met: Whether the measurement keeps the promise; None if there is none.
    """

    what: str
    who: str
    value: float
    unit: str
    n: int = 1
    p90: float | None = None
    ratio: float | None = None
    cpu_s: float | None = None
    bar: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Extra:
    """A peer that need not be installed.

    Args:
        name: Of the peer.
        install: The command that brings it.
        present: Whether it is there.
    """

    name: str
    install: str
    present: Callable[[], bool]


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Args:
        name: What the user types.
        claim: The claim that is checked, and the document that makes it.
        peers: What it is compared with.
        data: What it is measured on.
        run: Measures and returns the rows.
        extras: Those of the peers that may be missing.
    """

    name: str
    claim: str
    peers: tuple[str, ...]
    data: str
    run: Callable[[Settings], list[Row]]
    extras: tuple[Extra, ...] = ()

    def missing(self) -> list[str]:
        """Say of each peer that is missing how to get it."""
        return [
            f"{extra.name} is missing: {extra.install}"
            for extra in self.extras
            if not extra.present()
        ]


NAMES = ("checkpoint", "convert", "replay", "rollout", "nav", "pipeline", "monitor")


def find_case(name: str) -> Case:
    """Return a case; only its own module is imported, with the peers it needs.

    Raises:
        UsageError: There is no such case.
    """
    if name not in NAMES:
        raise UsageError(f"there is no case {name!r}; {did_you_mean(name, NAMES)}")
    found: Case = importlib.import_module(f"benchmarks.{name}.case").CASE
    return found
