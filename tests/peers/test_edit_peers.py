"""The real lerobot, 0.4.4 and 0.6.1, loads what an edit leaves, of its own datasets and of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from penstock.dataset.check import check
from penstock.dataset.edit import Edits, edit
from penstock.dataset.reader import Dataset

from .peer import HERE, PROJECT, environment, lerobot_reads
from .test_peers import hand, make_golden, own_features, write

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]
BESIDE = PROJECT / ".venv-peers-312" / "bin" / "python"


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    """The same kind of episodes, written by lerobot (v3.0, v2.1) and by us."""
    from penstock.dataset.writer import DatasetWriter

    folder = tmp_path_factory.mktemp("originals")
    found = {mode: make_golden(folder / mode, mode) for mode in ("video", "image", "v21")}
    source = Dataset(hand.make_dataset(folder / "made"))
    for version in ("v3.0", "v2.1"):
        found[version] = folder / version
        features = own_features(source, ("matrix",))
        with DatasetWriter(found[version], features, 30, "tester", version=version) as writer:
            write(writer, source, "h264")
    return found


def values(root: Path) -> dict[str, np.ndarray]:
    """Return what lerobot must find, as our reader sees it."""
    dataset = Dataset(root)
    cameras = dataset.camera_keys
    rows: dict[str, list[np.ndarray]] = {}
    for episode in dataset.episodes:
        for frame in episode.frames():
            for name, value in frame.items():
                if name == "task":
                    rows.setdefault("task", []).append(np.array(value))
                elif name in cameras:
                    mean = value.reshape(-1, value.shape[-1]).mean(0) / 255
                    rows.setdefault(f"mean/{name}", []).append(mean)
                else:
                    rows.setdefault(f"vec/{name}", []).append(np.asarray(value))
    found = {name: np.stack(each) for name, each in rows.items()}
    return found | {"lengths": np.array([len(episode) for episode in dataset.episodes])}


EDITS = {
    "delete": Edits(delete=[1]),
    "trim": Edits(trim={0: (2, None), 2: (0, 5)}),
    "split": Edits(split={0: [4]}),
    "merge": Edits(),
}


@pytest.mark.parametrize("what", EDITS)
@pytest.mark.parametrize("kind", ["video", "image", "v21", "v3.0", "v2.1"])
def test_lerobot_reads_what_an_edit_leaves(originals, tmp_path, kind, what) -> None:
    root = Path(shutil.copytree(originals[kind], tmp_path / "edited"))
    edit(root, EDITS[what], others=[originals[kind]] if what == "merge" else ())
    result = check(root)
    assert result.errors == [], result.text()
    np.savez(tmp_path / "expect.npz", **values(root))
    old = Dataset(root).version == "v2.1"
    lerobot_reads(root, tmp_path / "expect.npz", old=old)
    if not old:
        newer_lerobot_reads(root, tmp_path / "expect.npz")


def newer_lerobot_reads(root: Path, expect: Path) -> None:
    python = Path(os.environ.get("PENSTOCK_BESIDE_PYTHON", BESIDE))
    if not python.exists():
        pytest.fail(f"{python} is missing: run `make test-peers`")
    done = subprocess.run(
        [python, HERE / "check_dataset.py", root, "--expect", expect],
        env=environment(old=False),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr[-3000:]
    verdict = json.loads(done.stdout)
    assert verdict["ok"], json.dumps(verdict, indent=1)[:5000]
