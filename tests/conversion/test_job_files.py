"""The job files of docs/cluster.md, run as their services run them: with the variables they set."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import penstock
from penstock.cli import main

from .test_convert import same_dataset

pytestmark = pytest.mark.timeout(300)
PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
PARTS = 3


def block(language: str) -> str:
    """Return the one block of a language in the page."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return found


def slurm(index: int) -> tuple[list[str], dict[str, str]]:
    script = block("bash")
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    cpus = re.search(r"--cpus-per-task=(\d+)", script)[1]
    variables = {
        "SLURM_ARRAY_TASK_ID": str(index),
        "SLURM_ARRAY_TASK_COUNT": str(PARTS),
        "SLURM_CPUS_PER_TASK": cpus,
    }
    return ["bash", "-c", script], variables


def kubernetes(index: int) -> tuple[list[str], dict[str, str]]:
    spec = YAML(typ="safe", pure=True).load(block("yaml"))["spec"]
    assert spec["completionMode"] == "Indexed"
    (container,) = spec["template"]["spec"]["containers"]
    (words,) = container["args"]
    assert f"/{spec['completions']}" in words
    words = words.replace(f"/{spec['completions']}", f"/{PARTS}")
    return [*container["command"], words], {"JOB_COMPLETION_INDEX": str(index)}


def aws_batch(index: int) -> tuple[list[str], dict[str, str]]:
    job = json.loads(block("json"))
    *shell, words = job["containerOverrides"]["command"]
    size = job["arrayProperties"]["size"]
    assert 2 <= size <= 10_000
    assert f"/{size}" in words
    words = words.replace(f"/{size}", f"/{PARTS}")
    return [*shell, words], {"AWS_BATCH_JOB_ARRAY_INDEX": str(index)}


@pytest.mark.parametrize("service", [slurm, kubernetes, aws_batch])
def test_the_job_file_converts(service, samples, tmp_path):
    bags, out, mapping = tmp_path / "bags", tmp_path / "out", tmp_path / "map.yaml"
    bags.mkdir()
    for number in range(4):
        shutil.copy(samples(seconds=2, seed=number).path, bags / f"take_{number}.bag")
    assert main(["info", str(bags / "take_0.bag"), "--write-map", str(mapping)]) == 0
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "penstock").write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
    (commands / "penstock").chmod(0o755)
    for index in reversed(range(PARTS)):
        words, variables = service(index)
        environment = {
            **os.environ,
            **variables,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PENSTOCK_PROGRESS": "quiet",
            "BAGS": str(bags),
            "OUT": str(out),
            "MAP": str(mapping),
        }
        result = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    assert main(["build", str(out)]) == 0
    penstock.convert(bags, tmp_path / "whole", mapping, progress="quiet", memory="1GB", check=False)
    assert same_dataset(tmp_path / "whole", out) == []
