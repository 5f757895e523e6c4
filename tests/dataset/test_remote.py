"""Datasets in object storage, on a real S3 server with faults: whole, or one line."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from object_store import CREDENTIALS, s3_server
from penstock import objects
from penstock.commands.build import build
from penstock.dataset.check import check
from penstock.dataset.remote import RemoteDataset
from penstock.dataset.writer import DatasetWriter
from penstock.errors import PenstockError, StorageError, UsageError
from penstock.inspect import describe
from penstock.view import show

s = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("staging.py"))))
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
VERSIONS = ["v3.0", "v2.1"]
ODD = "out #1/with space"  # signs that mean something in a URL


@pytest.fixture(scope="module")
def server():
    with s3_server() as both:
        yield both


@pytest.fixture
def bucket(server, monkeypatch):
    """The proxy, and a boto3 client that goes past it."""
    proxy, _ = server
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setattr(objects, "_PAUSE_S", 0.01)
    proxy.fault = lambda number, line: None
    proxy.clear()
    import boto3

    url = f"http://127.0.0.1:{proxy.target}"
    client = boto3.client("s3", endpoint_url=url)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="bucket"):
        for each in page.get("Contents", []):
            client.delete_object(Bucket="bucket", Key=each["Key"])
    yield SimpleNamespace(proxy=proxy, client=client)
    proxy.fault = lambda number, line: None


def objects_of(bucket, folder: str = "out") -> dict[str, bytes]:
    found = {}
    for page in bucket.client.get_paginator("list_objects_v2").paginate(
        Bucket="bucket", Prefix=f"{folder}/"
    ):
        for each in page.get("Contents", []):
            body = bucket.client.get_object(Bucket="bucket", Key=each["Key"])["Body"].read()
            if not each["Key"].endswith("/"):  # what stands for a folder
                found[each["Key"].removeprefix(f"{folder}/")] = body
    return found


def dataset_of(bucket, folder: str = "out") -> dict[str, bytes]:
    every = objects_of(bucket, folder)
    return {name: data for name, data in every.items() if not name.startswith(".penstock")}


def download(bucket, root: Path) -> Path:
    for name, data in dataset_of(bucket).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", ["out", ODD])
def test_the_same_bytes_as_on_a_disk(tmp_path, bucket, version, folder):
    for count in (3, 5):  # the second goes on, in the same files
        s.write_dataset(tmp_path / "local", count, version=version, mode="resume")
        s.write_dataset(f"s3://bucket/{folder}", count, version=version, mode="resume")
        assert dataset_of(bucket, folder) == s.files_of(tmp_path / "local")
    left = [name for name in objects_of(bucket, folder) if name.startswith(".penstock")]
    assert left == [".penstock/plan.json"]
    if folder == "out":
        assert check(download(bucket, tmp_path / "copy")).findings == []


def test_workers_commit_and_anyone_builds(tmp_path, bucket):
    url = objects.ObjectPath("s3://bucket/out")
    with s.open_writer("s3://bucket/out") as writer:
        for position in (2, 0, 1):
            s.worker(writer.units, position, position)
        assert len(writer.records) == 3
    assert "meta/info.json" not in objects_of(bucket)
    with DatasetWriter.reopen(url) as writer:
        assert writer.build()
    with s.open_writer(tmp_path / "local") as writer:
        for position in range(3):
            s.worker(writer.units, position, position)
        writer.build()
    assert dataset_of(bucket) == s.files_of(tmp_path / "local")
    with pytest.raises(UsageError, match="holds no units"):
        DatasetWriter.reopen("s3://bucket/none")
    with pytest.raises(UsageError, match="not empty"):
        s.open_writer("s3://bucket/out", "overwrite")


def test_build_and_info(bucket):
    with s.open_writer("s3://bucket/out") as writer:
        s.commit(writer, 0)
    report = build("s3://bucket/out")
    assert (report.out, report.episodes, report.added) == ("s3://bucket/out", 1, 1)
    bucket.proxy.clear()
    facts = describe("s3://bucket/out")
    assert (facts["path"], facts["episodes"]) == ("s3://bucket/out", 1)
    assert facts["size_bytes"] == sum(map(len, objects_of(bucket).values()))
    assert not [line for line in bucket.proxy.requests if ".mp4" in line]
    with pytest.raises(UsageError, match="no LeRobot dataset"):
        describe("s3://bucket/none")


def test_files_that_stay_are_neither_read_nor_written(tmp_path, bucket):
    s.write_dataset("s3://bucket/out", 4, version="v2.1")
    bucket.proxy.clear()
    s.write_dataset("s3://bucket/out", 5, version="v2.1", mode="resume")
    moved = [line for line in bucket.proxy.requests if "episode_000" in line]
    assert all("episode_000004" in line for line in moved), moved
    heads = [line.split()[1] for line in bucket.proxy.requests if line.startswith("HEAD")]
    reads = [line.split()[1] for line in bucket.proxy.requests if line.startswith("GET")]
    folders = {f"/bucket/out/.penstock/{name}" for name in ("new", "units")}
    assert set(heads) <= set(reads) | folders  # only of what is read, and of what is removed


def test_listing_costs_one_call_per_thousand(bucket, server):
    _, put = server
    for number in range(300):
        put(f"out/.penstock/units/{number:016x}/rows.parquet", b"x")
    bucket.proxy.clear()
    with RemoteDataset(objects.ObjectPath("s3://bucket/out")) as remote:
        assert len(bucket.proxy.requests) <= 6, bucket.proxy.requests
        assert list(remote.folder.rglob("*.parquet")) == []  # units without a record do not exist
    assert not remote.folder.exists()


def test_names_that_lead_out_are_refused(tmp_path, bucket, server):
    _, put = server
    put("out/../../up", b"x")
    with pytest.raises(PenstockError), RemoteDataset(objects.ObjectPath("s3://bucket/out")):
        pass


@pytest.mark.parametrize("fault", ["503", "reset"])
def test_faults_are_passed(tmp_path, bucket, fault):
    bucket.proxy.fault = lambda number, line: fault if number % 5 == 0 else None
    s.write_dataset("s3://bucket/out", 3)
    bucket.proxy.fault = lambda number, line: None
    s.write_dataset(tmp_path / "local", 3)
    assert dataset_of(bucket) == s.files_of(tmp_path / "local")


@pytest.mark.parametrize("first", [0, 2])
def test_a_storage_that_stops_at_any_write_loses_nothing(tmp_path, bucket, monkeypatch, first):
    """From some write on all fail; then another goes on: committed units are there, or built."""
    monkeypatch.setattr(objects, "_ATTEMPTS", 1)
    monkeypatch.setattr(objects, "_SDK_ATTEMPTS", 1)
    objects._connect.cache_clear()
    s.write_dataset(tmp_path / "local", 4, mode="resume")
    whole = s.files_of(tmp_path / "local")
    stopped = 0
    for allowed in range(0, 200, 3):
        for key in [f"out/{name}" for name in objects_of(bucket)]:
            bucket.client.delete_object(Bucket="bucket", Key=key)
        if first:
            s.write_dataset("s3://bucket/out", first)
        bucket.proxy.clear()
        writes = []

        def fault(number, line, writes=writes, allowed=allowed):
            if line.startswith(("PUT", "POST", "DELETE")):
                writes.append(line)
                return "503" if len(writes) > allowed else None
            return None

        told: list[str] = []
        bucket.proxy.fault = fault
        try:
            s.write_dataset("s3://bucket/out", 4, mode="resume", tell=told.append)
            done = True
        except StorageError as error:
            assert "\n" not in str(error)
            assert "s3://bucket/out" in str(error)
            stopped, done = stopped + 1, False
        bucket.proxy.fault = lambda number, line: None
        committed = {int(line.split()[1]) for line in told if line.startswith("committed")}
        info = objects_of(bucket).get("meta/info.json")
        assert info is None or json.loads(info)["total_episodes"] in (first, 3, 4)
        with s.open_writer("s3://bucket/out", "resume") as writer:
            there = {record.source["number"] for record in writer.records}
        assert committed <= there
        s.write_dataset("s3://bucket/out", 4, mode="resume")
        assert dataset_of(bucket) == whole
        if done:
            break
    assert done
    assert stopped > 3
    objects._connect.cache_clear()


def test_an_upload_that_breaks_off_is_not_seen(tmp_path, bucket, monkeypatch):
    """A large file goes in parts: the second one fails for good."""
    monkeypatch.setattr(objects, "_ATTEMPTS", 1)
    large = tmp_path / "large"
    large.write_bytes(os.urandom(25 << 20))
    bucket.proxy.fault = lambda number, line: "reset" if "partNumber=2" in line else None
    target = objects.ObjectPath("s3://bucket/out/large")
    with pytest.raises(StorageError, match="cannot write s3://bucket/out/large"):
        target.upload(large)
    assert objects_of(bucket) == {}
    bucket.proxy.fault = lambda number, line: None
    target.upload(large)
    assert objects_of(bucket)["large"] == large.read_bytes()
    target.download(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == large.read_bytes()


def test_a_dataset_is_viewed_by_ranges(tmp_path, bucket):
    """Rows and pictures as on a disk; of the files only what is looked at is asked for."""
    s.write_dataset(tmp_path / "local", 3)
    s.write_dataset("s3://bucket/out", 3)
    local, far = (show.open_source(str(at)) for at in (tmp_path / "local", "s3://bucket/out"))
    try:
        bucket.proxy.clear()
        assert [row.size for row in far.rows] == [row.size for row in local.rows]
        for number in range(3):
            one, other = local.open(number), far.open(number)
            assert other.notes == one.notes
            for curve in range(len(one.curves)):
                a, b = one.points(curve), other.points(curve)
                assert (a.high == b.high).all()
            for camera in range(len(one.cameras)):
                assert other.picture(camera, 1, 64) == one.picture(camera, 1, 64)
                if one.cameras[camera].mode == "video":
                    with other.video(camera) as file:
                        assert file.read() == one.video(camera).read_bytes()
            assert other.events() == one.events()
        files = {line.split()[1] for line in bucket.proxy.requests}
        size = sum(len(d) for n, d in dataset_of(bucket).items() if n.startswith(("data", "video")))
        assert files
        assert bucket.proxy.body_bytes <= 1.2 * size + 100_000  # nothing twice
    finally:
        local.close()
        far.close()
    viewer = show.open_viewer("s3://bucket/out", None, str(tmp_path / "marks.yaml"))
    viewer.close()
    assert viewer.check.findings.state == "absent"  # nobody was told that it is sound, or not
