"""Evaluate one run: four pilots over the same unseen worlds, a table and a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.core.files import publish_bytes, storage_error
from penstock.errors import UsageError
from penstock.nav.evaluation import page, picture, rerun_file
from penstock.nav.evaluation.crossing import FIRST_WORLD, Flights, Pilot, fly, straight
from penstock.nav.evaluation.pilot import Navigator, run_folder
from penstock.nav.evaluation.table import summarise
from penstock.nav.shield import Shield
from penstock.nav.simulation.task import CROSSING_M, EDGE_M, STRESS, Disturbances, Settings
from penstock.ui.progress import Mode, Progress

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
    drone: str | None = None,
    changes: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    record: bool = True,
    rerun: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Mode | None = None,
) -> dict[str, Any]:
    """Fly a run's policy and a straight line across unseen worlds, with and without the shield.

    Args:
        path: A run, its folder of checkpoints, or a checkpoint.
        checkpoint: As for `Navigator.load`.
        worlds: How many; fewer than 8 say little.
        drones: In each world.
        first_world: Map seed of the first; the others follow.
        shield: Whether to fly with the shield, too.
        stress: Also fly the policy under each of `STRESS`: noise, latency, wind and mass.
        margins: Of the shield, see `Shield`.
        drone: Another drone than the run's: "hummingbird" or "fast".
        changes: Other settings than the run's, by the names of `Settings`.
        out: Folder for evaluation.json, flights.png and report.html; by default RUN/evaluation.
        record: Draw flights.png, of the last pilot in the table.
        rerun: Also write these flights for the rerun viewer.
        threads: By default 2, or as many as there are cores.
        progress: As for `Progress`.

    Returns:
        What is in evaluation.json: "results" by pilot as `summarise` says them, "stress" by
        disturbance and pilot (None without), and what was flown.

    Raises:
        UsageError: There is no such run, a value is wrong, or the run has trained on these worlds.
        DataError: The checkpoint cannot be used.
        MissingExtra: rerun is asked for and not installed.
        StorageError: The results cannot be written.
    """
    for name, count in (("worlds", worlds), ("drones", drones)):
        if count < 1:
            raise UsageError(f"{name} is {count}; give at least 1")
    if rerun is not None:
        rerun_file.require()
    navigator = Navigator.load(path, checkpoint, "off")
    seeds = range(first_world, first_world + worlds)
    _check_unseen(seeds, navigator)
    chosen = dict(changes or {})
    if drone is not None:
        chosen["drone"] = drone
    # Undisturbed, even if it was trained under disturbances: those are flown for the stress table.
    settings = navigator.settings.with_(**{"disturbances": Disturbances(), **chosen})
    Shield.for_task(settings, margins)  # a wrong margin is said before anything is flown
    folder = Path(out) if out is not None else _beside(path)
    _make(folder)

    pilots: list[tuple[str, Pilot, bool]] = []
    for name, pilot in (("straight", straight(settings)), ("policy", navigator.pilot)):
        pilots.append((name, pilot, False))
        if shield:
            pilots.append((f"{name} + shield", pilot, True))
    harder = {name: kind for name, kind in STRESS.items() if stress and kind.any}
    results: dict[str, Any] = {}
    under: dict[str, Any] | None = {name: {} for name in STRESS} if stress else None
    own = [each for each in pilots if each[1] is navigator.pilot]
    total = (len(pilots) + len(harder) * len(own)) * worlds * settings.episode_steps
    with Progress(total, "evaluate", "steps", progress) as bar:

        def flown(pilot: Pilot, shielded: bool, task: Settings, keep: bool) -> Flights:
            return fly(
                pilot,
                task,
                seeds,
                drones,
                shield=Shield.for_task(task, margins) if shielded else None,
                record=keep,
                threads=threads or min(2, os.cpu_count() or 1),
                progress=bar,
            )

        for name, pilot, shielded in pilots:
            bar.note(name)
            keep = (record or rerun is not None) and name == pilots[-1][0]
            flights = flown(pilot, shielded, settings, keep)
            results[name] = summarise(flights)
            if under is not None and pilot is navigator.pilot:
                under["none"][name] = results[name]
        for kind, disturbances in harder.items():
            for each, pilot, shielded in own:
                bar.note(f"{each}, {kind}")
                task = settings.with_(disturbances=disturbances)
                assert under is not None
                under[kind][each] = summarise(flown(pilot, shielded, task, keep=False))
    files = {"result": str(folder / RESULT)}
    drawn = _drawn(flights, settings, name, results[name]) if record else None
    if drawn is not None:
        files["picture"] = str(folder / PICTURE)
        publish_bytes(folder / PICTURE, drawn)
    files["report"] = str(folder / PAGE)
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
        "stress": under,
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


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error("create", folder, error) from error


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
