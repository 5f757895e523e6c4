"""Deleting nav/ leaves the rest working."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src/penstock"
# Commands of nav/ go with it.
OF_NAV = (
    "penstock.commands.train",
    "penstock.commands.evaluate",
    "penstock.demo",
)

CHECK = """
import importlib, pkgutil, sys
import penstock.errors
failed = []
for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
    if not module.name.startswith(OF_NAV) and module.name != "penstock.__main__":
        try:
            importlib.import_module(module.name)
        except penstock.errors.MissingExtra:
            pass  # of a library that is not needed
        except ImportError as error:
            failed.append(f"{module.name}: {error}")
assert not failed, failed
assert penstock.__file__.startswith(sys.argv[1])
for name in penstock.__all__:
    getattr(penstock, name)
from penstock.cli import main
assert main(["--help"]) == 0
from penstock import AsyncCheckpointSaver, load_checkpoint
import torch
with AsyncCheckpointSaver(sys.argv[1]) as saver:
    saver.save_async({"x": torch.ones(3)}, "a.pt").wait()
assert main(["doctor", sys.argv[1] + "/a.pt"]) == 0
assert main(["train"]) != 0
"""


def test_nav_can_be_deleted(tmp_path):
    shutil.copytree(
        SOURCE, tmp_path / "penstock", ignore=shutil.ignore_patterns("nav", "__pycache__", "nav*")
    )
    done = subprocess.run(
        [sys.executable, "-c", f"OF_NAV = {OF_NAV!r}\n{CHECK}", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
