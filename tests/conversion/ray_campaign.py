"""Kill the nodes and the driver of a real Ray cluster, and look at what they leave.

Usage: ray_campaign.py FOLDER BAGS CAMPAIGNS SEED. Prints one JSON line with the figures. The
cluster has three raylets of one CPU each beside its head; in every campaign raylets are killed by
SIGKILL at random moments, each is replaced by a new one, and once the driver is killed, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from conversion.test_convert import same_dataset
from penstock.samples import write_sample

SMALL = {"width": 256, "height": 48, "state_hz": 100, "camera_hz": 30}
NODES, MOST_KILLS = 3, 6
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


def convert(bags: Path, out: Path, *words: str) -> list[str]:
    command = [sys.executable, "-m", "penstock", "convert", str(bags), str(out), "--no-check"]
    return [*command, "--memory", "400MB", "--json", *words]


def kill_node(cluster: Cluster, chance: random.Random) -> None:
    """Kill a raylet; its workers end with it. Another node takes its place."""
    node = chance.choice(sorted(cluster.worker_nodes, key=id))
    with contextlib.suppress(ProcessLookupError):
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    cluster.worker_nodes.remove(node)
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    cluster.add_node(wait=False, **NODE)


def campaign(cluster: Cluster, bags: Path, out: Path, seed: int) -> tuple[int, dict]:
    """Convert while nodes are killed, and the driver once, with a part of the bags committed."""
    chance = random.Random(seed)
    count = len(list(bags.iterdir()))
    kills, dies_at = 0, chance.randrange(1, count // 2)
    log, told = out.with_suffix(".log"), out.with_suffix(".json")
    while True:
        words = [f"--ray={cluster.address}", *(["--resume"] if out.exists() else [])]
        with log.open("ab") as errors, told.open("wb") as output:
            command = convert(bags, out, *words)
            driver = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        next_s = time.monotonic() + chance.uniform(4, 10)
        while driver.poll() is None:
            units = len(list(out.glob(".penstock/units/*/unit.json")))
            if dies_at and units >= dies_at:
                dies_at = 0
                os.killpg(driver.pid, signal.SIGKILL)
            # One for certain: a quiet machine may be done before the clock says so.
            due = time.monotonic() > next_s or (units > 0 and kills == 0)
            if due and kills < MOST_KILLS:
                kill_node(cluster, chance)
                kills += 1
                next_s = time.monotonic() + chance.uniform(4, 10)
            time.sleep(0.02)
        if driver.returncode >= 0:
            assert driver.returncode == 0, log.read_text()[-3000:]
            assert not dies_at
            return kills, json.loads(told.read_bytes())


def main(folder: Path, count: int, campaigns: int, seed: int) -> None:
    bags = folder / "bags"
    bags.mkdir(parents=True)
    for number in range(count):
        seconds = 2 + (number * 7) % 5
        write_sample(bags / f"take_{number}.bag", seconds=seconds, seed=number, **SMALL)
    whole = folder / "whole"
    subprocess.run(convert(bags, whole), check=True, stdout=subprocess.DEVNULL)
    figures = {"campaigns": 0, "node_kills": 0, "driver_kills": 0, "bags": 0, "different": []}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False},
    )
    try:
        for _ in range(NODES):
            cluster.add_node(**NODE)
        for number in range(campaigns):
            out = folder / f"out{number}"
            kills, report = campaign(cluster, bags, out, seed + number)
            figures["campaigns"] += 1
            figures["node_kills"] += kills
            figures["driver_kills"] += 1
            figures["bags"] += len(report["bags"]) + len(report["skipped"])
            figures["different"] += same_dataset(whole, out)
            left = [p.name for p in out.rglob(".penstock-tmp-*")]
            figures["different"] += left
            sys.stderr.write(json.dumps(figures) + "\n")
    finally:
        for node in cluster.list_all_nodes():
            node.kill_all_processes(check_alive=False, allow_graceful=False)
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
