"""Datasets that somebody damaged on purpose: nothing outside is touched, and no command hangs."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.dataset import check as doctor
from penstock.dataset import metadata
from penstock.dataset.reader import Dataset
from penstock.errors import DataError, PenstockError

CAMPAIGN = Path(__file__).with_name("hostile_campaign.py")
s = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("staging.py"))))


def campaign(folder: Path, first: int, count: int) -> dict[str, int]:
    command = [sys.executable, str(CAMPAIGN), str(folder), str(first), str(count)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_a_few_damaged_datasets(tmp_path):
    assert campaign(tmp_path, 0, 60) == {"cases": 60, "faults": 0}


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_many_damaged_datasets(tmp_path):
    assert campaign(tmp_path, 1000, 5000) == {"cases": 5000, "faults": 0}


@pytest.mark.parametrize("name", [".penstock", "data", "videos", "meta/penstock", s.CAMERA])
def test_a_folder_that_leads_outside_is_neither_written_nor_emptied(tmp_path, name):
    out, outside = tmp_path / "out", tmp_path / "outside"
    s.write_dataset(out, 2)
    folder = next(path for path in (out / name, out / "videos" / name) if path.exists())
    os.rename(folder, outside)
    folder.symlink_to(outside)
    before = s.files_of(outside)
    with pytest.raises(PenstockError, match="link"):
        s.write_dataset(out, 3, mode="resume")
    assert s.files_of(outside) == before


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_a_fifo_is_no_file(tmp_path, version):
    out = tmp_path / "out"
    s.write_dataset(out, 2, version=version)
    data = min((out / "data").rglob("*.parquet"))
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(DataError, match="no file"):
        Dataset(out).episode(0).columns()
    with pytest.raises(DataError, match="no file"):
        s.write_dataset(out, 3, version=version, mode="resume")
    info = out / "meta" / "info.json"
    info.unlink()
    os.mkfifo(info)
    with pytest.raises(DataError):
        metadata.read_info(out)


def test_a_video_that_does_not_say_its_pixels(tmp_path):
    """FFmpeg then knows no pixel format, and av before 18 ends the process when it is asked."""
    out = tmp_path / "out"
    s.write_dataset(out, 1)
    video = next((out / "videos").rglob("*.mp4"))
    data = bytearray(video.read_bytes())
    at = data.index(b"avcC")
    data[at + 4 : at + 40] = bytes(36)
    video.write_bytes(data)
    assert not doctor.check(out).ok
