"""Job arrays: shards in any order, repeated, overlapping, killed; the bytes are those of one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock
from penstock.cli import main
from penstock.conversion.claims import Claims
from penstock.dataset.plan import CLAIMS, UNITS
from penstock.errors import UsageError

from .test_convert import same_dataset

pytestmark = pytest.mark.timeout(300)
QUIET = {"progress": "quiet", "memory": "1GB", "check": False}
COMMAND = [sys.executable, "-m", "penstock"]
ENVIRONMENT = {**os.environ, "PENSTOCK_PROGRESS": "quiet"}


@pytest.fixture
def bags(samples, tmp_path):
    """Six recordings, one of them twice under another name, and one that cannot be read."""
    folder = tmp_path / "bags"
    folder.mkdir()
    for number in range(6):
        shutil.copy(samples(seconds=2, seed=number).path, folder / f"take_{number}.bag")
    shutil.copy(folder / "take_1.bag", folder / "take_4_again.bag")
    (folder / "take_2x.bag").write_bytes(b"#ROSBAG V2.0\n")
    return folder


@pytest.fixture
def whole(bags, tmp_path):
    """What one run makes of them."""
    penstock.convert(bags, tmp_path / "whole", workers=1, **QUIET)
    return tmp_path / "whole"


def shard(bags: Path, out: Path, which: str, *words: str) -> subprocess.Popen:
    words = ["convert", str(bags), str(out), "--shard", which, "--memory", "1GB", "--json", *words]
    return subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def report_of(process: subprocess.Popen) -> dict:
    out, err = process.communicate(timeout=240)
    assert process.returncode in (0, 1), err
    return json.loads(out)


def names(report: dict) -> list[str]:
    return [Path(bag["bag"]).name for bag in report["bags"]]


def test_shards_in_any_order_twice_at_once(bags, whole, tmp_path):
    out = tmp_path / "out"
    order = [f"{k}/3" for k in range(3)] * 2 + ["1/2"]
    random.Random(1).shuffle(order)
    running, made = [], []
    for which in order:
        running.append(shard(bags, out, which))
        if len(running) == 3:
            made += names(report_of(running.pop(0)))
    for process in running:
        made += names(report_of(process))
    assert sorted(made) == [f"take_{number}.bag" for number in range(6)]  # none twice
    assert main(["build", str(out)]) == 1  # one bag could not be read
    assert same_dataset(whole, out) == []
    assert (whole / ".penstock/plan.json").read_bytes() == (
        out / ".penstock/plan.json"
    ).read_bytes()
    assert not (out / CLAIMS).exists()


def campaign(bags: Path, out: Path, seed: int, kills: int) -> int:
    """Run shards and kill them at random moments, then all to their end; return the commits."""
    chance = random.Random(seed)
    for _ in range(kills):
        victims = [shard(bags, out, f"{chance.randrange(3)}/3") for _ in range(2)]
        time.sleep(chance.uniform(0.3, 3.0))
        for victim in victims:
            victim.kill()
            victim.communicate()
    seen = len(list((out / UNITS).glob("*/unit.json")))
    for which in chance.sample(["0/3", "1/3", "2/3"], 3):
        report_of(shard(bags, out, which))
    return seen


def test_shards_that_are_killed(bags, whole, tmp_path):
    out = tmp_path / "out"
    campaign(bags, out, 3, 4)
    main(["build", str(out)])
    assert same_dataset(whole, out) == []
    assert [p.name for p in out.iterdir() if p.name.startswith(".penstock-tmp")] == []


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_many_campaigns_of_killed_shards(bags, whole, tmp_path):
    before = 0
    for seed in range(10):
        out = tmp_path / f"out{seed}"
        before += campaign(bags, out, seed, 5)
        main(["build", str(out)])
        assert same_dataset(whole, out) == [], seed
    assert before > 0


def test_a_shard_waits_for_what_another_makes(bags, tmp_path):
    out = tmp_path / "out"
    first = shard(bags, out, "0/1")
    while not list((out / CLAIMS).glob("[!p]*")):
        assert first.poll() is None
        time.sleep(0.002)
    first.send_signal(signal.SIGSTOP)
    second = shard(bags, out, "0/1")
    while len(list((out / UNITS).glob("*/unit.json"))) < 5:
        assert second.poll() is None
        time.sleep(0.01)
    time.sleep(1)
    assert second.poll() is None  # one bag is still claimed
    first.send_signal(signal.SIGCONT)
    reports = [report_of(first), report_of(second)]
    assert sorted(names(reports[0]) + names(reports[1])) == [f"take_{n}.bag" for n in range(6)]


def test_a_signal_stops_a_shard_and_says_how_to_go_on(bags, tmp_path):
    process = shard(bags, tmp_path / "out", "0/1")
    while not list((tmp_path / "out" / UNITS).glob("*/unit.json")):
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 143
    assert "bags of shard 0/1 are done; run it again" in err


def test_shards_build_and_go_on(bags, whole, tmp_path):
    """A build between two shards takes the units away; they are not made again."""
    out = tmp_path / "out"
    first = penstock.convert(bags, out, shard="0/2", **QUIET)
    main(["build", str(out)])
    again = penstock.convert(bags, out, shard="0/2", **QUIET)
    assert len(again.skipped) == len(first.bags)
    assert not again.bags
    second = penstock.convert(bags, out, shard="1/2", workers=2, **QUIET)
    assert "penstock build" in second.text()
    main(["build", str(out)])
    assert same_dataset(whole, out) == []


def test_more_bags_are_added_only_when_asked_for(samples, tmp_path):
    folder, out = tmp_path / "bags", tmp_path / "out"
    folder.mkdir()
    for number in (1, 2):
        shutil.copy(samples(seconds=2, seed=number).path, folder / f"b{number}.bag")
    penstock.convert(folder, out, shard="0/1", **QUIET)
    shutil.copy(samples(seconds=2, seed=3).path, folder / "a.bag")
    with pytest.raises(UsageError, match=r"a\.bag is not in the plan of .* which has 2 bags"):
        penstock.convert(folder, out, shard="0/1", **QUIET)
    with pytest.raises(UsageError, match=r"begun with mapping\.fps|begun with fps"):
        penstock.convert([folder / "b1.bag"], out, shard="0/1", fps=10, **QUIET)
    report = penstock.convert(folder, out, shard="0/1", append=True, **QUIET)
    assert names(report.to_json()) == ["a.bag"]
    main(["build", str(out)])
    penstock.convert([folder / "b1.bag", folder / "b2.bag"], tmp_path / "whole", **QUIET)
    penstock.convert(folder, tmp_path / "whole", append=True, **QUIET)
    assert same_dataset(tmp_path / "whole", out) == []


@pytest.mark.parametrize("text", ["3", "3/3", "a/b", "1/0", "-1/4"])
def test_a_shard_that_makes_no_sense(text, samples, tmp_path):
    with pytest.raises(UsageError, match="shard is"):
        penstock.convert(samples().path, tmp_path / "out", shard=text, **QUIET)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_others_is_left_alone(samples, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        penstock.convert(samples().path, tmp_path / "out", shard="0/1", **QUIET)
    assert [p.name for p in (tmp_path / "out").iterdir() if p.name != ".penstock.lock"] == [
        "mine.txt"
    ]
    with pytest.raises(UsageError, match="exclude each other"):
        penstock.convert(samples().path, tmp_path / "out", shard="0/1", overwrite=True, **QUIET)


def test_a_dry_run_of_a_shard(bags, tmp_path, capsys):
    words = ["convert", str(bags), str(tmp_path / "out"), "--shard", "0/4", "--dry-run", "--json"]
    assert main(words) in (0, 1)
    assert json.loads(capsys.readouterr().out)["episodes"] <= 2
    assert not (tmp_path / "out").exists()


def test_a_claim_of_a_dead_process_is_taken_over_by_one(tmp_path):
    """Many processes race for the claims of a dead one: each claim gets one holder."""
    holder = (
        "import os, sys; from pathlib import Path; from penstock.conversion.claims import Claims\n"
        "claims = Claims(Path(sys.argv[1])); claims.__enter__()\n"
        "for name in map(str, range(50)): assert claims.take(name)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    racer = (
        "import sys, time; from pathlib import Path\n"
        "from penstock.conversion.claims import Claims\n"
        "with Claims(Path(sys.argv[1])) as claims:\n"
        "    print([name for name in map(str, range(50)) if claims.take(name)], flush=True)\n"
        "    sys.stdin.read()\n"
    )
    subprocess.run([sys.executable, "-c", holder, str(tmp_path / "c")], check=False)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", racer, str(tmp_path / "c")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    taken = [
        name for each in racers for name in json.loads(each.stdout.readline().replace("'", '"'))
    ]
    for each in racers:
        each.communicate("")
    assert sorted(taken, key=int) == [str(number) for number in range(50)]


def test_a_claim_of_another_machine_ends_with_its_lease(tmp_path):
    """Another machine's process cannot be asked: its claim holds for as long as it is touched."""
    (tmp_path / "c").mkdir()
    claim = tmp_path / "c" / "a.0"
    claim.write_text("elsewhere-1-1-1")
    with Claims(tmp_path / "c", lease_s=0.5) as claims:
        end_s = time.monotonic() + 1.5
        while time.monotonic() < end_s:
            os.utime(claim)
            assert not claims.take("a")
            time.sleep(0.05)
        while not claims.take("a"):
            assert time.monotonic() < end_s + 5
            time.sleep(0.05)
        assert time.monotonic() > end_s + 0.3
        # The new holder shows that it lives, for as long as it likes.
        with Claims(tmp_path / "c", lease_s=0.5) as others:
            (tmp_path / "c" / "a.1").write_text("elsewhere-2-2-2")
            end_s = time.monotonic() + 1.5
            while time.monotonic() < end_s:
                assert not others.take("a")
                time.sleep(0.1)
