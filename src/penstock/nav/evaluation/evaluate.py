"""Evaluate one run: four pilots over the same unseen worlds, a table and a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.core.files import make_folder, publish_bytes
from penstock.errors import UsageError
from penstock.nav.evaluation import page, picture, rerun_file
from penstock.nav.evaluation.crossing import FIRST_WORLD, Flights, Pilot, fly, straight
from penstock.nav.evaluation.pilot import Navigator, run_folder
from penstock.nav.evaluation.table import summarise
from penstock.nav.shield import Shield
from penstock.nav.simulation.task import CROSSING_M, EDGE_M, STRESS, Disturbances, Settings
from penstock.ui.progress import Progress

RESERVED = 500_000  # map seeds from here on are for training, and for choosing checkpoints
RESULT = "evaluation.json"
PICTURE = "flights.png"
PAGE = "report.html"


def evaluate(
    path: str | os.PathLike[str],
    *,
    checkpoint: str = "best",
    worlds: int = 8,
    drones: int = 256,
    first_world: int = FIRST_WORLD,
    shield: bool = True,
    stress: bool = False,
    margins: tuple[float, float] | None = None,
    changes: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    rerun: str | os.PathLike[str] | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Fly a run's policy and a straight line across unseen worlds, with and without the shield.

    Args:
        path: A run or a checkpoint: as for `Navigator.load`, as is the name of the checkpoint.
        checkpoint: Its name.
        worlds: How many; fewer than 8 say little.
        drones: In each world.
        first_world: Map seed of the first; the others follow.
        shield: Whether to fly with the shield, too.
        stress: Also fly the policy under each of `STRESS`: noise, latency, wind and mass.
        margins: Of the shield, see `Shield`.
        changes: Other settings than the run's, by the names of `Settings`.
        out: Folder for evaluation.json, flights.png and report.html; by default RUN/evaluation.
        rerun: Also write the flights of flights.png, those of the last pilot, for the viewer.
        threads: By default 2, or as many as there are cores.

    Returns:
        What is in evaluation.json: "results" by pilot as `summarise` says them, "stress" by
        disturbance and pilot (None without), and what was flown.

    Raises:
        PenstockError: There is no such run, it has trained on these worlds, or a value is wrong;
            rerun is asked for and not installed; or the results cannot be written.
    """
    for name, count in (("worlds", worlds), ("drones", drones)):
        if count < 1:
            raise UsageError(f"{name} is {count}; give at least 1")
    if rerun is not None:
        rerun_file.require()
    navigator = Navigator.load(path, checkpoint, "off")
    seeds = range(first_world, first_world + worlds)
    _check_unseen(seeds, navigator)
    # Undisturbed, even if it was trained under disturbances: those are flown for the stress table.
    settings = navigator.settings.with_(**{"disturbances": Disturbances(), **(changes or {})})
    Shield.for_task(settings, margins)  # a wrong margin is said before anything is flown
    folder = Path(out) if out is not None else _beside(path)
    make_folder(folder)

    pilots: list[tuple[str, Pilot, bool]] = []
    for name, pilot in (("straight", straight), ("policy", navigator.pilot)):
        pilots.append((name, pilot, False))
        if shield:
            pilots.append((f"{name} + shield", pilot, True))
    own = [each for each in pilots if each[1] is navigator.pilot]
    harder = [kind for kind in STRESS if stress and STRESS[kind].any]
    plan = [("none", each) for each in pilots] + [(k, each) for k in harder for each in own]
    summaries: dict[str, dict[str, Any]] = {kind: {} for kind in ("none", *harder)}
    with Progress(len(plan) * worlds * settings.episode_steps, "evaluate", "steps") as bar:
        for kind, (name, pilot, shielded) in plan:
            bar.note(name if kind == "none" else f"{name}, {kind}")
            calm = kind == "none"
            task = settings if calm else settings.with_(disturbances=STRESS[kind])
            flown = fly(
                pilot,
                task,
                seeds,
                drones,
                shield=Shield.for_task(task, margins) if shielded else None,
                record=calm and name == pilots[-1][0],
                threads=threads or min(2, os.cpu_count() or 1),
                progress=bar,
            )
            summaries[kind][name] = summarise(flown)
            if flown.path is not None:
                flights = flown
    results, last = summaries["none"], pilots[-1][0]
    under = {kind: {n: each[n] for n, *_ in own} for kind, each in summaries.items()}
    drawn = _drawn(flights, settings, last, results[last])
    publish_bytes(folder / PICTURE, drawn)
    files = {"result": RESULT, "picture": PICTURE, "report": PAGE}
    files = {kind: str(folder / name) for kind, name in files.items()}
    if rerun is not None:
        files["rerun"] = str(rerun_file.write(flights, settings, rerun))
    noted = navigator.metadata
    result = {
        "checkpoint": str(navigator.path),
        **{key: noted.get(key) for key in ("iteration", "frames", "validation")},
        "settings": asdict(settings.with_(num_envs=drones * worlds, maps=worlds)),
        "seeds": list(seeds),
        "drones": drones,
        "margins": None if margins is None else list(margins),
        "results": results,
        "stress": under if stress else None,
        "files": files,
    }
    page.build(result, drawn, run_folder(path) / "metrics.jsonl").write(folder / PAGE)
    publish_bytes(folder / RESULT, json.dumps(result, indent=2, allow_nan=False).encode())
    return result


def _check_unseen(seeds: Sequence[int], navigator: Navigator) -> None:
    """Refuse worlds that the policy was trained or chosen on, as far as the checkpoint tells."""
    given = f"worlds {seeds[0]} to {seeds[-1]}"
    if seeds[0] < 0 or seeds[-1] >= RESERVED:
        raise UsageError(
            f"{given}: map seeds from {RESERVED} on are for training and validation, and none is "
            f"negative; use --first-world {FIRST_WORLD}"
        )
    mine = navigator.settings
    spans: list[Any] = [
        [mine.map_seed, mine.map_seed + mine.maps - 1],
        navigator.metadata.get("map_seeds"),
    ]
    for span in spans:
        known = isinstance(span, list | tuple) and len(span) == 2
        if known and int(span[0]) <= seeds[-1] and seeds[0] <= int(span[1]):
            raise UsageError(
                f"{given}: the run trained on worlds {span[0]} to {span[1]}, so success there says "
                f"nothing; use --first-world {int(span[1]) + 1}"
            )


def _beside(path: str | os.PathLike[str]) -> Path:
    """Return the evaluation folder of a run, named as briefly as the user named the run."""
    folder = run_folder(path) / "evaluation"
    brief = not Path(path).is_absolute() and folder.is_relative_to(Path.cwd())
    return folder.relative_to(Path.cwd()) if brief else folder


def _drawn(flights: Flights, settings: Settings, name: str, summary: Mapping[str, Any]) -> bytes:
    count, rate = len(flights.seeds), summary["rates"]["success"]
    title = (
        f"{name.capitalize()}: {2 * EDGE_M:.0f} m across {count} unseen world{'s' * (count > 1)}"
    )
    words = [f"{rate['mean'] * 100:.1f} % reach the goal"]
    if rate["low"] is not None:
        words[0] += f" (95 % interval over worlds: {rate['low'] * 100:.0f} to "
        words[0] += f"{rate['high'] * 100:.0f} %)"
    words.append(f"{settings.num_obstacles} boxes")
    if settings.dynamic_obstacles:
        words.append(f"{settings.dynamic_obstacles} moving obstacles")
    words.append(f"{len(flights.world) // count} drones on a front of {CROSSING_M:.0f} m")
    return picture.draw(flights, settings, title, ", ".join(words))
