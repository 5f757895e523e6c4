"""Conversion of recordings, against lerobot's own writer and against copying the bytes.

Every measurement is a process of its own, so that its processor time is all of what it cost:
threads, encoders, start-up. What a process needs before its first frame is measured as well and
taken off: it does not grow with the recording.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import Case, Extra, Row, Settings
from benchmarks.convert.memory import measure_growth, measure_whole
from benchmarks.measure import environment
from penstock.errors import PenstockError
from penstock.samples import write_sample
from penstock.ui.progress import Progress

_SECONDS = 20
_PEERS_PYTHON = Path(".venv-peers/bin/python")
_SHARE = {"h264": 10, "av1": 4, "copy": 80}  # of lerobot's processor time
_COPY_SPEED = 0.6


def _run(settings: Settings) -> list[Row]:
    folder = settings.work / "convert"
    folder.mkdir()
    bag, short = folder / "take.bag", folder / "short.bag"
    frames = write_sample(bag, seconds=_SECONDS, numbered=False).counts[_main()]
    fewer = write_sample(short, seconds=2, numbered=False).counts[_main()]
    repeats = 1 if settings.repeats < 3 else 3
    codecs = list(_SHARE)
    python, has_lerobot = _peers_python(), _has_lerobot()
    cost: dict[str, list[float]] = {codec: [] for codec in codecs}
    cpu_s: dict[str, float] = {}
    speed: dict[str, list[float]] = {"copy": [], "bytes": []}
    peak: dict[str, int] = {}
    with Progress(repeats * (len(codecs) + 1) + has_lerobot, "convert", "runs") as progress:
        for _ in range(repeats):
            for codec in codecs:
                whole = convert_apart(bag, folder / "out", codec)
                start = convert_apart(short, folder / "out", codec)
                cost[codec].append((whole["cpu_s"] - start["cpu_s"]) / (frames - fewer) * 1e3)
                peak[codec] = max(peak.get(codec, 0), whole["peak_bytes"])
                cpu_s[codec] = whole["cpu_s"]
                if codec == "copy":
                    size = bag.stat().st_size - short.stat().st_size
                    speed["copy"].append(size / max(whole["wall_s"] - start["wall_s"], 1e-3) / 1e6)
                progress.advance()
            speed["bytes"].append(_copy_bytes(bag, folder / "bytes"))
            progress.advance()
        peer = _lerobot(python, bag, folder) if has_lerobot else None
        progress.advance(has_lerobot)
    return [
        *_rows(cost, cpu_s, speed, peak, peer, repeats),
        *measure_whole(bag.stat().st_size / frames),
        *measure_growth(folder, convert_apart),
    ]


def _peers_python() -> str:
    return os.environ.get("PENSTOCK_PEERS_PYTHON", str(_PEERS_PYTHON))


def _has_lerobot() -> bool:
    return Path(_peers_python()).exists()


def _main() -> str:
    return "/cam_h/color/image_raw/compressed"


def _rows(
    cost: dict[str, list[float]],
    cpu_s: dict[str, float],
    speed: dict[str, list[float]],
    peak: dict[str, int],
    peer: float | None,
    repeats: int,
) -> list[Row]:
    what = "CPU per frame of 3 cameras"
    rows = []
    for codec, values in cost.items():
        value = statistics.median(values)
        limit = None if peer is None else peer / _SHARE[codec]
        bar = f"<= 1/{_SHARE[codec]} of lerobot" if peer is not None else ""
        met = None if limit is None else value <= limit
        who = f"penstock {codec}"
        rows.append(Row(what, who, value, "ms", repeats, cpu_s=cpu_s[codec], bar=bar, met=met))
    if peer is not None:
        rows.append(Row(what, "lerobot 0.4.4 add_frame + save_episode (av1)", peer, "ms"))
    for codec, size in peak.items():
        bar = "<= 400 MB" if codec == "h264" else ""
        met = size <= 400e6 if bar else None
        rows.append(
            Row("peak memory", f"penstock {codec}", size / 1e6, "MB", repeats, bar=bar, met=met)
        )
    own, plain = statistics.median(speed["copy"]), statistics.median(speed["bytes"])
    rows += [
        Row(
            "speed",
            "penstock copy",
            own,
            "MB/s",
            repeats,
            bar=f">= {_COPY_SPEED:.0%} of copying the bytes",
            met=own >= _COPY_SPEED * plain,
        ),
        Row("speed", "read the bag, write its bytes, fsync", plain, "MB/s", repeats),
    ]
    return rows


def convert_apart(bag: Path, out: Path, codec: str, *words: str) -> dict[str, Any]:
    """Convert in a process of its own; return wall_s, cpu_s and peak_bytes.

    Args:
        bag: The recording.
        out: The dataset; what is there is removed.
        codec: Of the pictures.
        words: `window_frames=N`, if it is to be another one.
    """
    command = [sys.executable, "-m", __name__, str(bag), str(out), codec, *words]
    shutil.rmtree(out, ignore_errors=True)
    return _measure(command)


def _measure(command: list[str]) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_s = time.perf_counter()
    done = subprocess.run(  # noqa: S603  this very module, in this interpreter
        command, capture_output=True, text=True, check=False, env=environment()
    )
    wall_s = time.perf_counter() - start_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise PenstockError(f"{' '.join(command[:4])} failed: {last[0]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    facts = json.loads(done.stdout.strip().splitlines()[-1]) if done.stdout.strip() else {}
    return {"wall_s": wall_s, "cpu_s": cpu_s, "peak_bytes": 0} | facts


def _copy_bytes(bag: Path, target: Path) -> float:
    """Read the bag once and write its bytes once; return MB/s."""
    start_s = time.perf_counter()
    with bag.open("rb", buffering=0) as source, target.open("wb", buffering=0) as sink:
        while block := source.read(1 << 20):
            sink.write(block)
        os.fsync(sink.fileno())
    seconds = time.perf_counter() - start_s
    target.unlink()
    return bag.stat().st_size / seconds / 1e6


def _lerobot(python: str, bag: Path, folder: Path) -> float:
    """Return lerobot's CPU per frame in ms: the same pictures, decoded beforehand."""
    from penstock.bags import open_bag
    from penstock.media.headers import jpeg_body

    pictures = folder / "pictures"
    pictures.mkdir()
    cameras = [f"/cam_{c}/color/image_raw/compressed" for c in "hlr"]
    count = 60
    with open_bag(bag) as opened:
        for message in opened.read(cameras):
            if message.ordinal < count:
                name = f"{cameras.index(message.topic)}-{message.ordinal:04d}.jpg"
                image = opened.decoder(message.topic).image(message.data)
                (pictures / name).write_bytes(jpeg_body(image.data)[0])
    program = folder / "lerobot_writer.py"
    program.write_text(_LEROBOT_PROGRAM)
    many = _measure([python, str(program), str(pictures), str(folder / "many"), "240"])
    few = _measure([python, str(program), str(pictures), str(folder / "few"), "40"])
    return float(many["cpu_s"] - few["cpu_s"]) / 200 * 1e3


# Runs with lerobot's own Python: its public API, its defaults, no network.
_LEROBOT_PROGRAM = """
import os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
from pathlib import Path
import numpy as np
from PIL import Image
from lerobot.datasets.lerobot_dataset import LeRobotDataset
pictures, out, frames = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
names = ["observation.images.h", "observation.images.l", "observation.images.r"]
axes = ["height", "width", "channels"]
features = {name: {"dtype": "video", "shape": (480, 640, 3), "names": axes} for name in names}
features["observation.state"] = {"dtype": "float32", "shape": (16,), "names": None}
features["action"] = {"dtype": "float32", "shape": (16,), "names": None}
data = LeRobotDataset.create("a/b", 30, features, root=out, use_videos=True,
                             image_writer_threads=4)
loaded = {}
for k in range(frames):
    frame = {"task": "t"}
    for camera, name in enumerate(names):
        key = (camera, k % 60)
        if key not in loaded:
            file = pictures / f"{camera}-{k % 60:04d}.jpg"
            loaded[key] = np.asarray(Image.open(file).convert("RGB"))
        frame[name] = loaded[key]
    frame["observation.state"] = np.full(16, k, np.float32)
    frame["action"] = np.full(16, k, np.float32)
    data.add_frame(frame)
data.save_episode()
data.finalize()
"""


def _main_program(bag: str, out: str, codec: str, *words: str) -> None:
    from penstock.conversion.run import convert

    more: dict[str, Any] = {
        name: int(value) for name, _, value in (word.partition("=") for word in words)
    }
    report = convert(bag, out, codec=codec, progress="quiet", **more)
    sys.stdout.write(json.dumps({"peak_bytes": report.peak_bytes, "wall_s": report.wall_s}))


CASE = Case(
    name="convert",
    claim="convert bags in constant memory, far cheaper than lerobot's own writer "
    "(the original proposal: 60 GB peak for a 10 GB bag)",
    peers=("lerobot 0.4.4 (in .venv-peers: make peers)", "copying the bytes"),
    data=f"a Kuavo-like ROS 1 bag of {_SECONDS} s, 3 JPEG cameras of 640x480 at 30 Hz",
    run=_run,
    extras=(Extra("lerobot 0.4.4", "make peers, or set PENSTOCK_PEERS_PYTHON", _has_lerobot),),
)

if __name__ == "__main__":
    _main_program(*sys.argv[1:])
