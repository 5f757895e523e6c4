"""The words of `penstock evaluate`, turned into one call."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import UsageError
from penstock.nav.evaluation import table
from penstock.nav.evaluation.evaluate import evaluate
from penstock.ui.suggestions import did_you_mean

# Named as for `penstock train`; None are no settings of the simulator.
KEYS = {
    "shield": None,
    "margins": None,
    "env.num_obstacles": "num_obstacles",
    "env_dyn.num_obstacles": "dynamic_obstacles",
    "env.drone": "drone",
    "sim.substeps": "substeps",
}


@dataclass(frozen=True)
class Evaluated:
    """What came of an evaluation."""

    result: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Always: a policy that crashes is a result."""
        return True

    def to_json(self) -> dict[str, Any]:
        """Return what is in evaluation.json."""
        return self.result

    def text(self) -> str:
        """Return the table, and where the files are."""
        result = self.result
        trained = []
        if result["iteration"] is not None:
            trained.append(f"iteration {result['iteration']}")
        if result["frames"] is not None:
            trained.append(f"{result['frames'] / 1e6:.1f} M frames")
        if result["validation"] is not None:
            trained.append(f"validation {result['validation'] * 100:.1f} %")
        setting = result["settings"]
        lines = [
            f"{result['checkpoint']}" + (f" ({', '.join(trained)})" if trained else ""),
            f"{setting['num_obstacles']} boxes, {setting['dynamic_obstacles']} moving obstacles, "
            f"{setting['drone']} drone, a decision every {setting['substeps'] * 16} ms",
            "",
            table.text(result["results"]),
            "",
        ]
        return "\n".join(lines + [f"{name}: {path}" for name, path in result["files"].items()])


def run(arguments: argparse.Namespace) -> Evaluated:
    """Carry out what the words ask for.

    Args:
        arguments: words (RUN and key=value), checkpoint, worlds, drones, first_world, out, rerun.

    Raises:
        UsageError: A word is wrong.
        PenstockError: As `evaluate` says.
    """
    paths = [word for word in arguments.words if "=" not in word]
    if len(paths) != 1:
        raise UsageError(
            f"evaluate needs one run, and was given {len(paths)}: penstock evaluate RUN [key=value]"
        )
    chosen = _chosen([word for word in arguments.words if "=" in word])
    result = evaluate(
        paths[0],
        checkpoint=arguments.checkpoint,
        worlds=arguments.worlds,
        drones=arguments.drones,
        first_world=arguments.first_world,
        out=arguments.out,
        rerun=arguments.rerun,
        **chosen,
    )
    return Evaluated(result)


def _chosen(words: Sequence[str]) -> dict[str, Any]:
    """Turn key=value into keywords of `evaluate`."""
    chosen: dict[str, Any] = {"changes": {}}
    for word in words:
        key, _, value = word.partition("=")
        key = key.strip().lstrip("+")
        if key not in KEYS:
            raise UsageError(f"unknown setting {key!r}; {did_you_mean(key, KEYS)}")
        name = KEYS[key]
        if key == "shield":
            if value not in ("on", "off"):
                raise UsageError(f"shield={value!r}; use on or off")
            chosen["shield"] = value == "on"
        elif key == "margins":
            chosen["margins"] = _margins(value)
        elif key == "env.drone":
            chosen["changes"][name] = value
        else:
            chosen["changes"][name] = _natural(key, value)
    return chosen


def _natural(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{key}={value!r}; give a whole number") from None


def _margins(value: str) -> tuple[float, float]:
    try:
        dynamic, static = (float(part) for part in value.strip("[]() ").split(","))
    except ValueError:
        raise UsageError(
            f"margins={value!r}; give metres from moving and from static obstacles: 0.10,0.05"
        ) from None
    return dynamic, static
