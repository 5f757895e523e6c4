"""Recordings in object storage, on a real S3 server with faults: read by ranges, or one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from object_store import CREDENTIALS, s3_server
from penstock import cli
from penstock.bags import find_bags, open_bag
from penstock.commands.build import build
from penstock.dataset.remote import RemoteDataset
from penstock.errors import StorageError, UsageError
from penstock.lerobot import Dataset
from penstock.objects import ObjectPath

from .test_convert import same_dataset

QUIET = {"progress": "quiet", "memory": "1GB", "check": False}
LARGE = {"seconds": 6, "width": 640, "height": 480, "cameras": 2, "state_hz": 100}


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("moto")
    with s3_server() as both:
        yield both


@pytest.fixture
def proxy(server, monkeypatch):
    proxy, _ = server
    proxy.fault = lambda number, line: None
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    proxy.clear()
    return proxy


@pytest.fixture(scope="module")
def stored(server, samples):
    """Recordings on disk and in the bucket."""
    _, put = server
    found = {}
    for name, settings in {
        "a.bag": {"kind": "bag"},
        "b.mcap": {"kind": "mcap", "compression": "zstd"},
        "c.bag": {"kind": "bag", "compression": "lz4", "seed": 3},
    }.items():
        path = samples(name, **LARGE, **settings).path
        put(f"bags/{name}", path.read_bytes())
        found[name] = path
    return found


@pytest.mark.timeout(300)
def test_from_storage_to_storage(server, proxy, samples, tmp_path, capsys):
    """The least, in every run of the tests; the others are run by `make test-cluster`."""
    small = samples("small.mcap", kind="mcap", seconds=2, cameras=1, width=64, height=48).path
    server[1]("small/small.mcap", small.read_bytes())
    out = "s3://bucket/small-out"
    proxy.fault = lambda number, line: "503" if number % 9 == 0 else None
    assert penstock.convert("s3://bucket/small", out, **{**QUIET, "check": True}).ok
    assert len(penstock.convert("s3://bucket/small", out, resume=True, **QUIET).skipped) == 1
    penstock.convert(small, tmp_path / "local", **QUIET)
    with RemoteDataset(ObjectPath(out)) as remote:
        remote.fetch_all()
        assert same_dataset(tmp_path / "local", remote.folder, origin=False) == []
    proxy.fault = lambda number, line: None
    assert cli.main(["doctor", out]) == 0
    assert "\nok: verified" in capsys.readouterr().out
    ObjectPath(f"{out}/data/chunk-000/file-000.parquet").write_bytes(b"PAR1 and nothing else")
    assert cli.main(["doctor", out]) == 1
    assert f"{out}/data" in capsys.readouterr().out
    assert cli.main(["doctor", "s3://bucket/small"]) == 2


@pytest.mark.parametrize("words", [["edit", "s3://b/set", "undo"], ["card", "s3://b/set"]])
def test_other_verbs_say_what_to_do(words, capsys):
    assert cli.main(words) == 2
    assert "copy it here first" in capsys.readouterr().err


@pytest.mark.cluster
@pytest.mark.timeout(300)
class TestReading:
    def test_the_same_frames_as_from_a_disk(self, proxy, stored, tmp_path):
        report = penstock.convert("s3://bucket/bags", tmp_path / "remote", **QUIET)
        penstock.convert(list(stored.values()), tmp_path / "local", **QUIET)
        assert not report.failed
        assert same_dataset(tmp_path / "local", tmp_path / "remote", origin=False) == []
        again = penstock.convert("s3://bucket/bags/", tmp_path / "remote", resume=True, **QUIET)
        assert len(again.skipped) == 3

    def test_the_task_is_that_of_the_folder(self, proxy, stored, tmp_path):
        tasks = {"table": [{"bag": "bags/b.mcap", "task": "of the table"}]}
        for out, settings in {"folder": {"tasks": {"folder": True}}, "table": tasks}.items():
            penstock.convert("s3://bucket/bags/b.mcap", tmp_path / out, **QUIET, **settings)
        found = [Dataset(tmp_path / out).tasks for out in ("folder", "table")]
        assert found == [["bags"], ["of the table"]]

    @pytest.mark.parametrize("name", ["a.bag", "b.mcap", "c.bag"])
    def test_little_more_is_read_than_is_wanted(self, name, proxy, stored):
        """Against what is read of the same file on a disk: its index and the wanted chunks."""
        wanted = []
        for path in (stored[name], f"s3://bucket/bags/{name}"):
            proxy.clear()
            with open_bag(path) as bag:
                for topic in bag.topics:
                    bag.times(topic)
                for _ in bag.read(list(bag.topics)):
                    pass
                wanted.append(bag.bytes_read)
        assert proxy.body_bytes <= 1.05 * wanted[0]

    def test_one_listing_finds_a_thousand(self, proxy, server):
        _, put = server
        for number in range(60):
            put(f"many/take_{number}.bag", b"#ROSBAG V2.0\n")
        proxy.clear()
        assert len(find_bags(["s3://bucket/many"])) == 60
        assert len(proxy.requests) <= 4, proxy.requests

    @pytest.mark.parametrize("fault", ["503", "reset", "cut", "slow"])
    def test_faults_are_passed(self, fault, proxy, stored, tmp_path):
        """Every fifth request fails: it is asked for again, and nothing is wrong."""
        proxy.fault = lambda number, line: fault if number % 5 == 0 else None
        report = penstock.convert("s3://bucket/bags/b.mcap", tmp_path / "remote", **QUIET)
        proxy.fault = lambda number, line: None
        assert not report.failed
        penstock.convert(stored["b.mcap"], tmp_path / "local", **QUIET)
        assert same_dataset(tmp_path / "local", tmp_path / "remote", origin=False) == []

    def test_a_storage_that_is_gone_is_one_line(self, proxy, stored, tmp_path):
        penstock.convert("s3://bucket/bags/b.mcap", tmp_path / "out", **QUIET)
        proxy.fault = lambda number, line: "503"
        with pytest.raises(StorageError, match=r"cannot read s3://bucket/bags"):
            penstock.convert("s3://bucket/bags", tmp_path / "out", append=True, **QUIET)
        proxy.fault = lambda number, line: None
        assert len(list((tmp_path / "out").rglob(".penstock-tmp-*"))) == 0

    def test_no_secret_is_told(self, proxy, stored, tmp_path):
        """Also not where the storage refuses."""
        words = ["convert", "s3://bucket/none", str(tmp_path / "out"), "--debug"]
        environment = {**os.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
        for fault in (None, "503"):
            proxy.fault = lambda number, line, fault=fault: fault
            result = subprocess.run(
                [sys.executable, "-m", "penstock", *words],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert result.returncode in (3, 4)
            assert "canary" not in result.stdout + result.stderr

    def test_the_memory_holds(self, proxy, server, samples, tmp_path):
        _, put = server
        path = samples("big.mcap", kind="mcap", size_bytes=30_000_000, cameras=3).path
        put("big/big.mcap", path.read_bytes())
        words = ["convert", "s3://bucket/big", str(tmp_path / "out"), "--memory", "250MB"]
        environment = {**os.environ, "PENSTOCK_PROGRESS": "quiet"}
        result = subprocess.run(
            [sys.executable, "-m", "penstock", *words, "--json", "--no-check", "--codec", "copy"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["peak_memory_bytes"] < 250e6


@pytest.mark.cluster
@pytest.mark.timeout(300)
class TestWriting:
    @pytest.mark.parametrize("version", ["v3.0", "v2.1"])
    def test_the_same_dataset_as_on_a_disk(self, version, proxy, stored, tmp_path):
        """Made by two workers, gone on with, added to; every fifth request fails."""
        proxy.fault = lambda number, line: "503" if number % 5 == 0 else None
        out, local = f"s3://bucket/out-{version}", tmp_path / "local"
        bags = [stored["a.bag"], stored["c.bag"]]
        settings = {**QUIET, "check": True, "version": version}
        report = penstock.convert(bags, out, workers=2, **settings)
        assert report.ok, report.findings
        assert str(report.out) == out
        assert len(penstock.convert(bags, out, resume=True, **settings).skipped) == 2
        assert penstock.convert(stored["b.mcap"], out, append=True, **settings).ok
        penstock.convert(bags, local, **QUIET, version=version)
        penstock.convert(stored["b.mcap"], local, append=True, **QUIET)
        with RemoteDataset(ObjectPath(out)) as remote:
            remote.fetch_all()
            assert same_dataset(local, remote.folder) == []

    def test_shards_in_any_order_and_again(self, proxy, stored, tmp_path):
        out, bags = "s3://bucket/shards", list(stored.values())
        for shard in ("1/2", "0/2", "1/2", "0/1"):
            report = penstock.convert(bags, out, shard=shard, **QUIET)
        assert len(report.skipped) == len(bags)
        assert build(out).episodes == len(bags)
        penstock.convert(bags, tmp_path / "local", **QUIET)
        with RemoteDataset(ObjectPath(out)) as remote:
            remote.fetch_all()
            assert same_dataset(tmp_path / "local", remote.folder) == []

    def test_the_command_and_its_card(self, proxy, stored, tmp_path):
        words = ["convert", str(stored["b.mcap"]), "s3://bucket/told", "--card"]
        result = subprocess.run(
            [sys.executable, "-m", "penstock", *words],
            cwd=tmp_path,
            env={**os.environ, "PENSTOCK_PROGRESS": "quiet"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert "s3://bucket/told" in result.stdout
        assert [path.name for path in tmp_path.iterdir()] == ["told.html"]
        assert b"LeRobot" in ObjectPath("s3://bucket/told/README.md").read_bytes()

    def test_a_storage_that_fails_loses_no_unit(self, proxy, stored, tmp_path):
        """Writes fail from the fortieth request on; the same command goes on when it is back."""
        out, bags = "s3://bucket/broken", [stored["a.bag"], stored["b.mcap"]]
        proxy.fault = lambda number, line: "503" if number > 40 and "PUT" in line else None
        with pytest.raises(StorageError, match="s3://bucket/broken"):
            penstock.convert(bags, out, **QUIET)
        proxy.fault = lambda number, line: None
        penstock.convert(bags, out, resume=True, **QUIET)
        penstock.convert(bags, tmp_path / "local", **QUIET)
        with RemoteDataset(ObjectPath(out)) as remote:
            remote.fetch_all()
            assert same_dataset(tmp_path / "local", remote.folder) == []


def test_nothing_is_replaced_there(samples):
    with pytest.raises(UsageError, match=r"s3://bucket/out: --overwrite"):
        penstock.convert(samples().path, "s3://bucket/out", overwrite=True, **QUIET)
    assert not Path("s3:").exists()


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "s3://", "s3:///x"])
def test_a_url_that_names_more_or_less_than_a_bucket(url, tmp_path):
    with pytest.raises(UsageError) as error:
        find_bags([url])
    assert "secret" not in str(error.value)
