"""Robots that penstock knows: how a recording is recognised, and what its topics mean.

A robot is one file in this folder, with a `ROBOT`; docs/conversion.md shows one. It knows the
units of its messages (as scale and offset of a source), its clock, and which topics stand in for
which; whatever robot is not here is mapped by the messages themselves (guess.py).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.bags import Bag
from penstock.conversion.mapping import Clock, Mapping
from penstock.errors import UsageError


@dataclass(frozen=True, slots=True)
class RobotConfig:
    """What a robot's own settings file asks for.

    Attributes:
        mapping: What the dataset holds.
        bags: The folder of the bags, if the file names one.
        out: Where the dataset goes, if it names that.
        choose: Chooses among the bags; None for all of them.
    """

    mapping: Mapping
    bags: Path | None = None
    out: Path | None = None
    choose: Callable[[Sequence[Path]], list[Path]] | None = None


@dataclass(frozen=True, slots=True)
class Robot:
    """A robot that penstock knows.

    Attributes:
        name: Of the robot.
        is_recorded_in: Tells its recordings by the topics that have messages.
        mapping: Returns the mapping of a recording; the second argument is the rate of the camera
            with the most pictures.
        clock: "bag" or "header" if the robot's stamps are known; None looks for bursts.
        load_config: Reads the robot's own settings file, with `key=value` words on top; None if
            it has none.
    """

    name: str
    is_recorded_in: Callable[[Collection[str]], bool]
    mapping: Callable[[Bag, int], Mapping]
    clock: Clock | None = None
    load_config: Callable[[Path, Sequence[str]], RobotConfig] | None = None


def known_robots() -> list[Robot]:
    """Return the robots of this folder."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").ROBOT for name in names]


def recognise(topics: Collection[str]) -> Robot | None:
    """Return the robot that a recording with messages on these topics is of; None for another."""
    return next((robot for robot in known_robots() if robot.is_recorded_in(topics)), None)


def load_config(path: Path, words: Sequence[str] = ()) -> RobotConfig:
    """Read the settings file of a robot: of the one whose file it is like.

    Raises:
        UsageError: It is like none; says what is wrong with it for the first.
    """
    problem: UsageError | None = None
    for robot in known_robots():
        try:
            if robot.load_config is not None:
                return robot.load_config(path, words)
        except UsageError as error:
            problem = problem or error
    raise problem or UsageError(f"{path}: no robot has a settings file: use --map")
