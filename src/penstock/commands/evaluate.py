"""`penstock evaluate`: fly a trained policy across unseen worlds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from penstock.commands.base import Command, Outcome, natural, note_renamed
from penstock.errors import UsageError
from penstock.ui.suggestions import did_you_mean

# Named as for `penstock train`.
SETTINGS = {
    "env.num_obstacles": "num_obstacles",
    "env_dyn.num_obstacles": "dynamic_obstacles",
    "env.drone": "drone",
    "sim.substeps": "substeps",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN", help="a run, or a checkpoint")
    parser.add_argument(
        "--checkpoint", default="best", metavar="NAME", help="best (default), latest or a file name"
    )
    parser.add_argument(
        "--worlds", type=natural, default=8, metavar="N", help="unseen worlds (default 8)"
    )
    parser.add_argument(
        "--drones", type=natural, default=256, metavar="N", help="drones in each (default 256)"
    )
    parser.add_argument(
        "--first-world", type=natural, default=300_000, metavar="N", help="its map seed (300000)"
    )
    parser.add_argument(
        "--stress", action="store_true", help="also under noise, latency, wind and another mass"
    )
    parser.add_argument("--no-shield", action="store_true", help="only the pilots without it")
    parser.add_argument(
        "--margins",
        type=_margins,
        metavar="M,M",
        help="of the shield: from moving and static obstacles",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another task than the run's: " + ", ".join(SETTINGS),
    )
    parser.add_argument("--out", metavar="DIR", help="where to write (default RUN/evaluation)")
    parser.add_argument(
        "--rerun", metavar="FILE", help="also write the flights for the rerun viewer"
    )


def _run(arguments: argparse.Namespace) -> Outcome:
    path = _run_of(arguments)
    changes = _changes(arguments.set)
    from penstock.nav.evaluation.evaluate import evaluate

    result = evaluate(
        path,
        checkpoint=arguments.checkpoint,
        worlds=arguments.worlds,
        drones=arguments.drones,
        first_world=arguments.first_world,
        shield=not arguments.no_shield,
        stress=arguments.stress,
        margins=arguments.margins,
        out=arguments.out,
        rerun=arguments.rerun,
        changes=changes,
    )
    return Outcome(_text(result), result)


def _run_of(arguments: argparse.Namespace) -> str:
    """Return the run; settings that stand beside it, as they did once, become options."""
    paths = [word for word in arguments.words if "=" not in word]
    for word in arguments.words:
        key, equals, value = word.partition("=")
        if key == "shield" and equals:
            note_renamed("shield=off", "--no-shield")
            if value not in ("on", "off"):
                raise UsageError(f"shield={value!r}; use on or off")
            arguments.no_shield = value == "off"
        elif key == "margins" and equals:
            note_renamed("margins=", "--margins")
            try:
                arguments.margins = _margins(value)
            except argparse.ArgumentTypeError as error:
                raise UsageError(str(error)) from None
        elif equals:
            note_renamed(word, f"--set {word}")
            arguments.set.append(word.lstrip("+"))
    if len(paths) != 1:
        raise UsageError(f"evaluate needs one run, such as runs/x, and was given {len(paths)}")
    return str(paths[0])


def _changes(words: Sequence[str]) -> dict[str, Any]:
    """Turn key=value into settings of the simulator."""
    changes: dict[str, Any] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in SETTINGS:
            raise UsageError(f"unknown setting {key!r}; {did_you_mean(key, SETTINGS)}")
        if key != "env.drone" and not value.isdecimal():
            raise UsageError(f"{key}={value!r}; give a whole number")
        changes[SETTINGS[key]] = value if key == "env.drone" else int(value)
    return changes


def _margins(text: str) -> tuple[float, float]:
    try:
        dynamic, static = (float(part) for part in text.strip("[]() ").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give metres from moving and from static obstacles: 0.10,0.05"
        ) from None
    return dynamic, static


def _text(result: dict[str, Any]) -> str:
    """Return the table, and where the files are."""
    from penstock.nav.evaluation import table
    from penstock.ui.report import text_table

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
    if result["stress"] is not None:
        lines += [text_table(*table.stress_cells(result["stress"])), ""]
    return "\n".join(lines + [f"{name}: {path}" for name, path in result["files"].items()])


COMMAND = Command(
    "fly a trained policy across unseen worlds",
    "Deterministic 48 m crossings in worlds that were not trained on: success, collisions, "
    "time-outs and time to goal, with 95 % intervals over worlds, of four pilots: straight ahead "
    "and the policy, each alone and with the safety shield. Writes evaluation.json, flights.png "
    "and report.html into RUN/evaluation.",
    "penstock evaluate runs/x --worlds 16 --set env_dyn.num_obstacles=80",
    _add_arguments,
    _run,
    usage="penstock evaluate [options] RUN",
    interruptible=True,
)
