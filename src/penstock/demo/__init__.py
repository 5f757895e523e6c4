"""The tour: from a recording to a dataset, from a simulator to a policy, and what was kept of both.

Every figure is measured in that very run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import time
import warnings
from pathlib import Path

from penstock.core.memory import format_bytes
from penstock.demo import pieces
from penstock.demo.page import Figures, show
from penstock.demo.stage import Stage
from penstock.errors import PenstockError, PenstockWarning

_BAGS, _DATASET, _RUN, _FLIGHTS = "bags", "dataset", "run", "flights"
_PAGES = ("dataset.html", "report.html", "convert.json", "rollout.json", "advise.json")
_PICTURE, _POLICY = "view.png", "policy.onnx"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PROPS = (_BAGS, _DATASET, _RUN, _FLIGHTS, _PICTURE, _POLICY, *_PAGES)


def run(
    out: str | os.PathLike[str],
    minutes: float = 2.0,
    stop_after: float = 0.4,
    seconds: float = 8.0,
    drones: int = 64,
    settings: tuple[str, ...] = (),
    silent: bool = False,
) -> Path:
    """Run the tour and return the path of its report.

    Args:
        out: The folder to make; one that an earlier demo made is used again.
        minutes: Of training.
        stop_after: The share of it after which it is interrupted; at least one iteration.
        seconds: Length of each recording.
        drones: In each world of the evaluation.
        settings: More settings of the training.
        silent: Print nothing.

    Raises:
        UsageError: The folder exists and is not that of a demo.
        PenstockError: A step did not do what it should.
    """
    stage, figures = Stage(out, _PROPS, silent), Figures()
    home = stage.home
    _convert(stage, figures, home, seconds)
    _train(stage, figures, home, minutes, stop_after, settings)
    _evaluate(stage, figures, home, drones)
    _read_back(stage, figures, home)
    _recover(stage, figures, home)
    return show(stage, figures, home / "report.html")


def _convert(stage: Stage, figures: Figures, home: Path, seconds: float) -> None:
    stage.step("A robot records: two takes of a Kuavo-like humanoid, three cameras")
    takes = stage.python(pieces.record, str(home / _BAGS), 2, seconds)
    stage.step("What is in a recording?")
    stage.run("info", takes[0].path)
    stage.step("Make a LeRobot dataset of them, in 256 MB of memory")
    figures.converted = stage.run_json(
        "convert", home / _BAGS, home / _DATASET, "--memory", "256MB", to="convert.json"
    )
    found = figures.converted
    stage.tell(
        f"{found['frames_in']} frames in = {found['frames_out']} out + "
        f"{sum(found['dropped'].values())} dropped; peak memory "
        f"{format_bytes(found['peak_memory_bytes'])} of {format_bytes(found['memory_limit_bytes'])}"
        f"; {found['wall_s']:.1f} s; {home / 'dataset.html'}"
    )
    stage.step("Verify it: every column, every picture")
    stage.run("doctor", home / _DATASET)
    stage.step("Take an episode out, and put it back")
    stage.run("edit", home / _DATASET, "delete", 1)
    stage.run("edit", home / _DATASET, "undo")
    if any(map(shutil.which, _BROWSERS)):
        stage.step("Look at it, beside its recordings: `penstock view` opens this in a browser")
        picture = home / _PICTURE
        stage.run("view", home / _DATASET, "--with", home / _BAGS, "--screenshot", picture)
        figures.view = picture.read_bytes()


def _train(
    stage: Stage,
    figures: Figures,
    home: Path,
    minutes: float,
    stop_after: float,
    settings: tuple[str, ...],
) -> None:
    run = home / _RUN
    metrics = run / "metrics.jsonl"
    stage.step(f"Train the navigation policy for {minutes:g} min, and press Ctrl-C on the way")
    stage.tell("350 boxes; no moving obstacles: those take an hour to learn, not minutes")

    def half_way() -> bool:
        rows = metrics.read_text().splitlines() if metrics.exists() else []
        spent_s = sum(json.loads(row)["perf/iteration"] for row in rows if row.endswith("}"))
        return bool(spent_s > 60 * minutes * stop_after)

    words = ["env_dyn.num_obstacles=0", "eval_interval=20", "rollout_save_interval=10"]
    words += ["save_interval=1", "checkpoint_delta_every=10", *settings]
    stage.interrupt("train", f"run_dir={run}", f"max_minutes={minutes:g}", *words, when=half_way)
    figures.stopped_after = len(metrics.read_text().splitlines())
    stage.step("Go on where it stopped")
    stage.run("train", "--resume", run)
    figures.read_metrics(metrics)


def _evaluate(stage: Stage, figures: Figures, home: Path, drones: int) -> None:
    stage.step("Fly it across 8 worlds it has not seen")
    stage.run("evaluate", home / _RUN, "--drones", drones)
    figures.read_evaluation(home / _RUN / "evaluation")
    if importlib.util.find_spec("onnxscript") is not None:
        stage.step("Export it: numpy and onnxruntime fly it, without torch")
        stage.run("export", home / _RUN, home / _POLICY)
        figures.actions_ms = stage.python(pieces.fly, str(home / _POLICY))


def _read_back(stage: Stage, figures: Figures, home: Path) -> None:
    rollouts = home / _RUN / "rollouts"
    stage.step("Rollouts were kept: what do they weigh, and what does a part of one cost?")
    newest = max(rollouts.glob("rollout_*"))
    figures.rollout = stage.run_json("info", newest, "--top", 100, to="rollout.json")[0]
    stage.tell(figures.rollout_text())
    figures.loads = stage.python(pieces.read_partly, str(rollouts))
    stage.tell(figures.loads_text())
    stage.step("Export them as a LeRobot dataset, and fill a replay buffer from that")
    stage.run("export", rollouts, home / _FLIGHTS, "--envs", 16)
    begin = time.perf_counter()
    buffer, batch = stage.python(pieces.fill_buffer, str(home / _FLIGHTS))
    figures.note_buffer(buffer, batch, time.perf_counter() - begin)
    stage.tell(figures.buffer_text())
    stage.step("Should they be compressed in memory, too, if there were 64 MB for them?")
    figures.advice = stage.run_json("advise", rollouts, "--memory", "64MB", to="advise.json")
    stage.tell(figures.advice_text())


def _recover(stage: Stage, figures: Figures, home: Path) -> None:
    checkpoints = home / _RUN / "checkpoints"
    newest = (checkpoints / "latest").resolve()
    shown = str(checkpoints / newest.name)
    stage.step("Damage the newest checkpoint: one bit")
    middle = stage.python(pieces.flip_a_bit, shown)
    stage.tell(f"byte {middle} of {newest.name} is another one now")
    stage.run("doctor", shown, code=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = stage.python(pieces.load_newest, str(checkpoints))
    words = [str(w.message) for w in caught if issubclass(w.category, PenstockWarning)]
    if not words:
        raise PenstockError("the damaged checkpoint was loaded without a word")
    stage.tell(f"warning: {words[0]}")
    stage.tell(f"loaded iteration {state['iteration']}, verified")
    figures.recovered = int(state["iteration"])
