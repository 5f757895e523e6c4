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
_PICTURES = 60  # of each camera, again and again
_FIRST = "lerobot 0.4.4 add_frame + save_episode (av1)"
_PEERS = {  # the interpreter that has it, and what it is told besides its defaults
    _FIRST: (".venv-peers/bin/python", "{}"),
    "lerobot 0.6.1, streaming (av1)": (
        ".venv-peers-312/bin/python",
        '{"streaming_encoding": true, "image_writer_threads": 0}',
    ),
}
_SHARE = {"h264": 10, "av1": 4, "copy": 80}  # of lerobot 0.4.4's processor time
_COPY_SPEED = 0.6


def _run(settings: Settings) -> list[Row]:
    folder = settings.work / "convert"
    folder.mkdir()
    bag, short = folder / "take.bag", folder / "short.bag"
    frames = write_sample(bag, seconds=_SECONDS, numbered=False).counts[_main()]
    fewer = write_sample(short, seconds=2, numbered=False).counts[_main()]
    repeats = 1 if settings.repeats < 3 else 3
    codecs = list(_SHARE)
    present = {who: peer for who, peer in _PEERS.items() if Path(peer[0]).exists()}
    peers: dict[str, float] = {}
    cost: dict[str, list[float]] = {codec: [] for codec in codecs}
    cpu_s: dict[str, float] = {}
    speed: dict[str, list[float]] = {"copy": [], "bytes": []}
    peak: dict[str, int] = {}
    with Progress(repeats * (len(codecs) + 1) + len(present), "convert", "runs") as progress:
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
        pictures = _unpack(bag, folder / "pictures")
        for who, (python, options) in present.items():
            peers[who] = _lerobot(python, options, pictures)
            progress.advance()
    return [
        *_rows(cost, cpu_s, speed, peak, peers, repeats),
        *measure_whole(bag.stat().st_size / frames),
        *measure_growth(folder, convert_apart),
    ]


def _has_all() -> bool:
    return all(Path(python).exists() for python, _ in _PEERS.values())


def _main() -> str:
    return "/cam_h/color/image_raw/compressed"


def _rows(
    cost: dict[str, list[float]],
    cpu_s: dict[str, float],
    speed: dict[str, list[float]],
    peak: dict[str, int],
    peers: dict[str, float],
    repeats: int,
) -> list[Row]:
    what = "CPU per frame of 3 cameras"
    rows = [Row(what, who, value, "ms") for who, value in peers.items()]
    for codec, values in cost.items():
        value = statistics.median(values)
        bar = f"<= 1/{_SHARE[codec]} of lerobot 0.4.4" if _FIRST in peers else ""
        met = value <= peers[_FIRST] / _SHARE[codec] if bar else None
        who = f"penstock {codec}"
        rows.append(Row(what, who, value, "ms", repeats, cpu_s=cpu_s[codec], bar=bar, met=met))
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


def _unpack(bag: Path, pictures: Path) -> Path:
    """Write the first JPEGs of each camera as files."""
    from penstock.bags import open_bag
    from penstock.media.headers import jpeg_body

    pictures.mkdir()
    cameras = [f"/cam_{c}/color/image_raw/compressed" for c in "hlr"]
    with open_bag(bag) as opened:
        for message in opened.read(cameras):
            if message.ordinal < _PICTURES:
                name = f"{cameras.index(message.topic)}-{message.ordinal:04d}.jpg"
                image = opened.decoder(message.topic).image(message.data)
                (pictures / name).write_bytes(jpeg_body(image.data)[0])
    return pictures


def _lerobot(python: str, options: str, pictures: Path) -> float:
    """Return lerobot's CPU per frame in ms: the same pictures, decoded beforehand."""
    program, out = pictures.parent / "lerobot_writer.py", pictures.parent / "lerobot"
    program.write_text(_LEROBOT_PROGRAM)
    cpu_s = []
    for frames in ("40", "240"):
        shutil.rmtree(out, ignore_errors=True)
        command = [python, str(program), str(pictures), str(out), frames, options]
        cpu_s.append(_measure(command)["cpu_s"])
    return float(cpu_s[1] - cpu_s[0]) / 200 * 1e3


# Runs with lerobot's own Python: its public API, no network.
_LEROBOT_PROGRAM = """
import json, os, sys
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
options = {"image_writer_threads": 4} | json.loads(sys.argv[4])
data = LeRobotDataset.create("a/b", 30, features, root=out, use_videos=True, **options)
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
    peers=("lerobot 0.4.4", "lerobot 0.6.1, streaming", "copying the bytes"),
    data=f"a Kuavo-like ROS 1 bag of {_SECONDS} s, 3 JPEG cameras of 640x480 at 30 Hz",
    run=_run,
    extras=(Extra("lerobot 0.4.4 and 0.6.1", "make peers beside", _has_all),),
)

if __name__ == "__main__":
    _main_program(*sys.argv[1:])
