"""The documentation says what is so: names that are logged, links, commands and their options."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from penstock.commands import VERBS
from penstock.conversion.robots.kuavo import KuavoSettings
from penstock.errors import MissingExtra
from penstock.nav.config import load_config
from penstock.samples import write_sample

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TINY = [
    "env.num_envs=16",
    "env.maps=1",
    "env.num_obstacles=10",
    "env_dyn.num_obstacles=8",
    "env.max_episode_length=30",  # episodes end
    "algo.training_frame_num=8",
    "algo.minibatches=2",
    "algo.epochs=1",
    "max_iterations=2",
    "save_interval=1",
    "rollout_save_interval=2",
    "processes=1",
    "tensorboard=False",
    "wandb.mode=disabled",
]


# ---------------------------------------------------------------------- names


def names_in(text: str) -> set[str]:
    """The code spans in the first cells of the tables."""
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def section(title: str) -> set[str]:
    """The names in one section of metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    parts = {part.split("\n", 1)[0]: part for part in text.split("\n## ")[1:]}
    return names_in(parts[title])


def run(*words: str) -> int:
    return cli.main(list(words))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_PROGRESS", "quiet")
        patch.chdir(tmp_path_factory.mktemp("docs"))
        yield Path.cwd()


@pytest.fixture(scope="module")
def trained(place: Path) -> set[str]:
    """All names that short trainings log, with each collector."""
    import torch

    threads = torch.get_num_threads()
    seen: set[str] = set()
    for kind in ("sync", "pipelined"):
        eyes = ["eval_interval=2", "eval_worlds=1", "eval_drones=4"] if kind == "sync" else []
        words = [*TINY, f"name={kind}", f"collector={kind}", *(eyes or ["eval_interval=0"])]
        assert run("train", *words) == 0
        for line in (place / "runs" / kind / "metrics.jsonl").read_text().splitlines():
            seen |= json.loads(line).keys()
    torch.set_num_threads(threads)
    return seen


def test_training_logs_what_is_documented(trained: set[str]) -> None:
    documented = section("penstock train")
    assert trained - documented == set()
    assert documented - trained == {"stats/<name>"}  # of other environments


def test_evaluation_json(trained: set[str], place: Path, capsys: pytest.CaptureFixture) -> None:
    capsys.readouterr()
    assert run("evaluate", "runs/sync", "--worlds", "1", "--drones", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((place / "runs/sync/evaluation/evaluation.json").read_text())
    documented = section("penstock evaluate")
    assert found.keys() - documented == set()
    for result in found["results"].values():
        assert {f"results.*.{name}" for name in result} - documented == set()
        assert result["rates"].keys() - documented == set()


def test_export_doctor_and_advise(trained: set[str], capsys: pytest.CaptureFixture) -> None:
    commands = [
        ("export", "runs/sync", "flights"),
        ("doctor", "flights"),
        ("advise", "runs/sync/rollouts"),
    ]
    for words in commands:
        capsys.readouterr()
        assert run(*words, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found.keys() - section(f"penstock {words[0]}") == set()


def test_convert_report(place: Path, capsys: pytest.CaptureFixture) -> None:
    write_sample(place / "a.bag", seconds=1, width=64, height=48, cameras=1, state_hz=50)
    documented = section("penstock convert")
    capsys.readouterr()
    for more in ([], ["--dry-run"]):
        assert run("convert", "a.bag", "dataset", "--map", mapping(place), "--json", *more) == 0
        found = json.loads(capsys.readouterr().out)
        assert found.keys() - documented == set()
        for bag in found.get("bags", []):
            assert bag.keys() - documented == set()


def mapping(place: Path) -> str:
    path = place / "map.yaml"
    text = "fps: 10\nfeatures:\n  observation.images.h:\n    kind: color\n"
    path.write_text(text + "    topic: /cam_h/color/image_raw/compressed\n")
    return str(path)


def test_monitor_and_saver_and_collector(tmp_path: Path) -> None:
    import torch

    from penstock import AsyncCheckpointSaver, PerformanceMonitor, PipelinedDataCollector

    monitor = PerformanceMonitor()
    monitor.record("x", 1.0)
    assert monitor.get_stats()["x"].keys() - section("PerformanceMonitor") == set()
    with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
        saver.save_async({"a": torch.zeros(3)}, "a.pt").wait()
        stats = saver.get_stats()
    documented = section("AsyncCheckpointSaver.get_stats()")
    assert stats.keys() - documented == set()
    assert {f"blocked.{name}" for name in stats["blocked"]} - documented == set()
    assert documented - stats.keys() <= {"blocked.call", "blocked.barrier"}
    with PipelinedDataCollector([]) as collector:
        assert collector.stats().keys() == section("PipelinedDataCollector.stats()")


def test_a_missing_name_would_be_noticed() -> None:
    assert names_in("| `a`, `b` | of `c` |\n|---|---|\ntext `d`\n") == {"a", "b"}
    assert "nothing/of/this" not in section("penstock train")


def kuavo_defaults() -> dict[str, Any]:
    """All keys of Kuavo's settings file, with their defaults."""
    found: dict[str, Any] = {}
    for section, values in asdict(KuavoSettings()).items():
        for key, value in values.items():
            if isinstance(value, dict):
                found |= {f"{section}.{key}.{name}": each for name, each in value.items()}
            else:
                found[f"{section}.{key}"] = list(value) if isinstance(value, tuple) else value
    return found


def test_kuavo_settings() -> None:
    text = (ROOT / "docs" / "kuavo.md").read_text(encoding="utf-8")
    documented = {name for name in names_in(text) if re.fullmatch(r"(rosbag|dataset)[.\w]+", name)}
    documented |= {"dataset.resize.height"}  # written as `.height`
    assert documented == set(kuavo_defaults())
    for key, value in kuavo_defaults().items():
        shown = {True: "true", False: "false"}.get(value, value) if type(value) is bool else value
        if value is not None and "resize" not in key:
            assert f"| `{key}` | {shown} |" in text


# ---------------------------------------------------------------------- links


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    plain = re.sub(r"[`*]", "", heading.lstrip("#").strip()).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def broken_links(page: Path) -> list[str]:
    found = []
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text):
        if "://" in link:
            continue
        name, _, part = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists():
            found.append(link)
        elif part and target.suffix == ".md":
            lines = target.read_text(encoding="utf-8").splitlines()
            if part not in {anchor(line) for line in lines if line.startswith("#")}:
                found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_imports(page: Path) -> None:
    for line in code_in(page.read_text(encoding="utf-8")):
        for name in re.findall(r"(?<![\w/])(?:examples|src/penstock)/[\w/.]+\w", line):
            assert (ROOT / name).exists(), name
        for module, names in re.findall(r"from (penstock[.\w]*) import ([\w, ]+)", line):
            try:
                home = importlib.import_module(module)
            except MissingExtra:  # of other libraries: tests/peers has these
                continue
            assert [
                name for name in re.split(r", *", names.strip()) if not hasattr(home, name)
            ] == []


def missing_sources(text: str) -> list[str]:
    """Names in backquotes that are paths, but not of what is there: in the root or the package."""
    named = set(re.findall(r"`((?:[\w.]+/)+(?:[\w.]+\.py)?)`", text))
    homes = (ROOT, ROOT / "src/penstock", ROOT / "src/penstock/core")
    return sorted(name for name in named if not any((home / name).exists() for home in homes))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md", "docs/glossary.md"])
def test_sources_that_are_named(name: str) -> None:
    assert missing_sources((ROOT / name).read_text(encoding="utf-8")) == []


def tree_of(page: str) -> Iterator[tuple[str, str]]:
    """Yield what the tree of the architecture names: a folder, and a module or folder in it."""
    tree = page[page.index("```\nsrc/penstock/\n") :].split("```")[1]
    folder = ""
    for line in tree.split("\ntests/")[0].splitlines()[2:]:
        if not line.startswith("   "):
            folder = f"{line.split()[0]}" if line.split()[0].endswith("/") else ""
        for name in re.findall(r"(?<![\w/.(])(?:\w+/)*\w+(?:\.py|/)(?=[\s:,)]|$)", line):
            yield folder, name


def test_the_tree_of_the_architecture() -> None:
    package = ROOT / "src" / "penstock"
    named = list(tree_of((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))
    assert len(named) > 150
    for folder, name in named:
        found = (package / name).exists() or any((package / folder).rglob(name.rstrip("/")))
        assert found, f"{folder} {name}"
    told = {name.rpartition("/")[2] for _, name in named}
    modules = {path.name for path in package.rglob("*.py")} - {"__init__.py", "__main__.py"}
    commands = {f"{verb}.py" for verb in VERBS}  # a file per verb
    kernels = {path.name for path in (package / "core" / "kernels").glob("*.py")}
    robots = {path.name for path in (package / "conversion" / "robots").glob("*.py")}
    integrations = {path.name for path in (package / "integrations").glob("*.py")}
    assert sorted(modules - told - commands - kernels - robots - integrations) == []


def test_a_source_that_is_gone_would_be_noticed() -> None:
    assert missing_sources("`core/gone.py` `core/files.py` `nowhere/` `nav/` `x.py`") == [
        *("core/gone.py", "nowhere/"),
    ]


def test_a_broken_link_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n[x](no.md) [y](#a-b-c) [z](#nowhere) [w](page.md#a-b-c)\n")
    assert broken_links(page) == ["no.md", "#nowhere"]


# ---------------------------------------------------------------------- commands


def code_in(text: str) -> list[str]:
    """Lines of code blocks, and code spans."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [*"\n".join(blocks).splitlines(), *re.findall(r"`([^`\n]+)`", rest)]


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of every `penstock VERB …`."""
    for line in code_in(text):
        for found in re.findall(r"(?<![\w./-])(?<!from )penstock +([a-z][^#;|&]*)", line):
            yield found.replace('"', "").replace("'", "").split()


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """The help of each verb."""
    found: dict[str, str] = {}
    for verb in VERBS:
        with contextlib.redirect_stdout(io.StringIO()) as page:
            run(verb, "--help")
        found[verb] = page.getvalue()
    return found


def wrong_words(words: list[str], helps: dict[str, str]) -> list[str]:
    """What of a command does not exist."""
    verb = words[0].rstrip(".,:)")
    if verb not in helps:
        return [verb]
    flags = [word.split("=")[0].strip("[].,:)") for word in words if word.startswith(("-", "[-"))]
    wrong = [flag for flag in flags if flag and not re.search(rf"{flag}\b", helps[verb])]
    settings = [word for word in words[1:] if re.fullmatch(r"[a-z_.]+=[^…<>]+", word)]
    if verb == "train":
        load_config(settings)
    if verb == "convert":
        keys = {word.split("=")[0] for word in settings}
        dotted = {key for key in keys if "." in key and not key.startswith("features.")}
        wrong += sorted(dotted - set(kuavo_defaults()))
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands(page: Path, helps: dict[str, str]) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = [
        (" ".join(words), bad) for words in commands_in(text) if (bad := wrong_words(words, helps))
    ]
    assert wrong == []
    alone = [span.split()[0].split("=")[0] for span in code_in(text) if re.match(r"--\w", span)]
    assert [flag for flag in alone if not any(flag in help_ for help_ in helps.values())] == []


def test_a_wrong_command_would_be_noticed(helps: dict[str, str]) -> None:
    (words,) = commands_in(
        "```\npenstock convert bags/ out --no-such dataset.no_such=1   # why\n```"
    )
    assert wrong_words(words, helps) == ["--no-such", "dataset.no_such"]
    assert wrong_words(["fly", "away"], helps) == ["fly"]
    assert list(commands_in("```python\nfrom penstock import advise\n```")) == []
