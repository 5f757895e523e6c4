"""A real Ray cluster on this machine gives the bytes of one run, whatever dies."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock
from harness import run_campaign
from penstock.cli import main
from penstock.errors import MissingExtra, StorageError, UsageError

from .test_convert import same_dataset

QUIET = {"progress": "quiet", "memory": "400MB", "check": False}
CAMPAIGN = Path(__file__).with_name("ray_campaign.py")
cluster = pytest.mark.cluster


@pytest.fixture
def bags(samples, tmp_path):
    for number in range(5):
        path = samples(seconds=1 + number % 3, seed=number).path
        (tmp_path / "bags").mkdir(exist_ok=True)
        (tmp_path / "bags" / f"take_{number}.bag").symlink_to(path)
    (tmp_path / "bags" / "take_9.bag").write_bytes(b"#ROSBAG V2.0\n")
    return tmp_path / "bags"


@cluster
@pytest.mark.timeout(300)
def test_the_bytes_are_those_of_one_machine(bags, tmp_path):
    report = penstock.convert(bags, tmp_path / "ray", ray=True, **QUIET)
    whole = penstock.convert(bags, tmp_path / "whole", **QUIET)
    assert same_dataset(tmp_path / "whole", tmp_path / "ray") == []
    assert report.failed.keys() == whole.failed.keys() == {bags / "take_9.bag"}
    assert report.account == whole.account
    assert report.peak_bytes < 400e6


@cluster
@pytest.mark.timeout(300)
def test_a_dry_run_predicts_for_the_cluster(bags, tmp_path, capsys):
    words = ["convert", str(bags), str(tmp_path / "out"), "--dry-run", "--json"]
    assert main([*words, "--ray"]) == 1
    assert json.loads(capsys.readouterr().out)["seconds"] > 0
    assert not (tmp_path / "out").exists()


@cluster
@pytest.mark.timeout(300)
def test_a_signal_stops_it_and_builds_what_is_committed(bags, tmp_path):
    out = tmp_path / "out"
    words = ["convert", str(bags), str(out), "--ray", "--memory", "400MB", "--no-check"]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *words], stderr=subprocess.PIPE, text=True
    )
    while not list(out.glob(".penstock/units/*/unit.json")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "go on with --resume" in err.splitlines()[-1]
    assert (out / "meta/info.json").is_file()
    penstock.convert(bags, out, ray=True, resume=True, **QUIET)
    penstock.convert(bags, tmp_path / "whole", **QUIET)
    assert same_dataset(tmp_path / "whole", out) == []


@cluster
@pytest.mark.timeout(900)
def test_nodes_and_driver_are_killed(tmp_path):
    tests = str(Path(__file__).parents[1])
    figures = run_campaign(
        CAMPAIGN, tmp_path / "c", 20, 1, 1, timeout_s=880, PYTHONPATH=tests, PYTHONUNBUFFERED="1"
    )
    assert figures["different"] == [], figures
    assert figures["node_kills"] > 0
    assert figures["bags"] == 20


@cluster
def test_a_cluster_that_is_not_there(bags, tmp_path):
    with pytest.raises(StorageError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 "):
        penstock.convert(bags, tmp_path / "out", ray="127.0.0.1:1", **QUIET)


def test_an_address_that_is_none(samples, tmp_path):
    with pytest.raises(UsageError, match="no address: give --ray behind the paths"):
        penstock.convert(samples().path, tmp_path / "out", ray="bags", **QUIET)
    with pytest.raises(UsageError, match="shard and ray exclude each other"):
        penstock.convert(samples().path, tmp_path / "out", ray=True, shard="0/2", **QUIET)


def test_without_ray_it_says_what_to_install(samples, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r'pip install "penstock\[ray\]"'):
        penstock.convert(samples().path, tmp_path / "out", ray=True, **QUIET)
