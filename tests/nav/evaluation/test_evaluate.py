"""The whole of `penstock evaluate`, on a run that has learned nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from penstock.commands.base import Outcome
from penstock.commands.parser import build_parser
from penstock.errors import MissingExtra, StorageError, UsageError
from penstock.nav.evaluation.evaluate import evaluate
from penstock.nav.simulation.task import Settings

Save = Callable[..., Path]
FOUR = ["straight", "straight + shield", "policy", "policy + shield"]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")


def run_command(*words: str) -> Outcome:
    parser, commands = build_parser()
    arguments = parser.parse_args(["evaluate", "--worlds", "2", "--drones", "3", *words])
    return commands["evaluate"].run(arguments)


def test_from_end_to_end(save: Save) -> None:
    run = save()
    result = evaluate(run, worlds=2, drones=3)
    assert list(result["results"]) == FOUR
    assert (result["seeds"], result["drones"], result["iteration"]) == ([300_000, 300_001], 3, 12)
    for summary in result["results"].values():
        assert [world["seed"] for world in summary["worlds"]] == [300_000, 300_001]
        assert [world["drones"] for world in summary["worlds"]] == [3, 3]
    assert result["results"]["policy"]["shield"] is None
    assert result["results"]["policy + shield"]["shield"]["decisions"] > 0
    written = run / "evaluation"
    text = (written / "evaluation.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(result))
    assert (written / "flights.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(path.name for path in written.iterdir()) == [
        "evaluation.json",
        "flights.png",
        "report.html",
    ]
    page = (written / "report.html").read_text()
    assert "policy + shield" in page
    assert "data:image/png;base64," in page
    assert evaluate(run, worlds=2, drones=3, threads=1) == result
    assert (written / "evaluation.json").read_text() == text


def test_changes_and_places(save: Save, tmp_path: Path) -> None:
    run = save()
    result = evaluate(
        run / "checkpoints" / "best.pt",
        worlds=1,
        drones=2,
        shield=False,
        changes={"drone": "hummingbird", "num_obstacles": 0, "dynamic_obstacles": 16},
        out=tmp_path / "here" / "there",
    )
    assert list(result["results"]) == ["straight", "policy"]
    flown = result["settings"]
    assert (flown["drone"], flown["num_obstacles"], flown["dynamic_obstacles"]) == (
        "hummingbird",
        0,
        16,
    )
    written = tmp_path / "here" / "there"
    assert {path.name for path in written.iterdir()} >= {"evaluation.json", "report.html"}
    assert not (run / "evaluation").exists()


def test_worlds_that_were_trained_on_are_refused(save: Save, small: Settings) -> None:
    trained = asdict(small.with_(map_seed=0, maps=4))
    run = save(metadata={"settings": trained, "map_seeds": [0, 9]})
    for first in (7, 3):
        with pytest.raises(UsageError, match=r"trained on worlds 0 to \d, .*; use --first-world"):
            evaluate(run, worlds=2, drones=2, first_world=first)
    evaluate(run, worlds=1, drones=2, first_world=10, shield=False)
    for first in (499_999, 1_000_000, -1):
        with pytest.raises(UsageError, match="are for training and validation"):
            evaluate(run, worlds=2, drones=2, first_world=first)


def test_mistakes_are_said_before_anything_is_flown(save: Save, tmp_path: Path) -> None:
    run = save()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"worlds": 0}, "worlds is 0"),
        ({"drones": 0}, "drones is 0"),
        ({"changes": {"drone": "fats"}}, "did you mean 'fast'"),
        ({"changes": {"num_obstacle": 1}}, "did you mean 'num_obstacles'"),
        ({"margins": (0.1, -0.1)}, "static_margin_m is -0.1"),
        ({"checkpoint": "bets.pt"}, "the folder has best.pt"),
    ]
    for keywords, said in cases:
        with pytest.raises(UsageError, match=said):
            evaluate(run, **keywords)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StorageError):
        evaluate(run, out=blocked / "x")
    assert not (run / "evaluation").exists()


def test_rerun_is_missed_first(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rerun", None)
    with pytest.raises(MissingExtra, match="rerun-sdk is not installed"):
        evaluate(save(), rerun="flights.rrd")


def test_the_command(save: Save) -> None:
    run = save()
    words = ["--set", "env_dyn.num_obstacles=16", "--set", "sim.substeps=12"]
    done = run_command(*words, "--margins", "0.2,0.1", str(run))
    assert done.code == 0
    assert done.data["settings"]["dynamic_obstacles"] == 16
    assert done.data["margins"] == [0.2, 0.1]
    text = done.text
    assert "best.pt (iteration 12, 3.0 M frames, validation 25.0 %)" in text
    assert "30 boxes, 16 moving obstacles, fast drone, a decision every 192 ms" in text
    assert "Only 2 worlds" in text
    assert f"picture: {run / 'evaluation' / 'flights.png'}" in text
    for name in FOUR:
        assert name in text


def test_the_command_without_shield(save: Save) -> None:
    done = run_command("--no-shield", "--set", "env.drone=hummingbird", str(save()))
    assert list(done.data["results"]) == ["straight", "policy"]
    assert done.data["settings"]["drone"] == "hummingbird"


def test_the_old_spelling_works_with_a_note(save: Save, capsys: pytest.CaptureFixture) -> None:
    done = run_command(str(save()), "shield=off", "env.drone=hummingbird", "margins=0.2,0.1")
    assert list(done.data["results"]) == ["straight", "policy"]
    assert done.data["settings"]["drone"] == "hummingbird"
    said = capsys.readouterr().err
    assert "--no-shield" in said and "--set env.drone=hummingbird" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "evaluate needs one run.* was given 0"),
        (["a", "b"], "was given 2"),
        (["a", "env.num_obstacle=3"], "did you mean 'env.num_obstacles'"),
        (["a", "shield=maybe"], "use on or off"),
        (["a", "sim.substeps=x"], "give a whole number"),
        (["a", "margins=1"], "give metres from moving and from static obstacles"),
    ],
)
def test_wrong_words(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_command(*words)


def test_stress_is_flown_and_told(save: Save) -> None:
    done = run_command("--stress", "--no-shield", str(save()))
    stress = done.data["stress"]
    assert list(stress) == ["none", "sensors", "late", "wind and mass", "all"]
    assert stress["none"]["policy"] == done.data["results"]["policy"]
    assert all(list(kind) == ["policy"] for kind in stress.values())
    for kind in stress:
        assert f"\n{kind} " in done.text
    page = Path(done.data["files"]["report"]).read_text()
    assert "wind and mass" in page
    assert run_command(str(save())).data["stress"] is None
