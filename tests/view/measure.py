"""Measures the viewer on 10,000 episodes of 3 cameras in a headless Chromium; prints JSON.

    python tests/view/measure.py FOLDER        # the dataset is made there, once

Time of the page, of the first picture, of seeks, and the memory of the server.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.dataset import layout
from penstock.dataset.layout import Feature, FileLimits, Spec

HERE = Path(__file__).parent
tool = SimpleNamespace(**runpy.run_path(str(HERE / "browser.py")))
FPS, LENGTH, PER_FILE, FILES = 30, 60, 100, 100
CAMERAS = [f"observation.images.{name}" for name in ("head", "left", "right")]
VISUAL = {"shape": (480, 640, 3), "names": ["height", "width", "channels"]}
FEATURES = {
    "observation.state": Feature("float32", (14,)),
    "action": Feature("float32", (14,)),
    **{name: Feature("video", **VISUAL, info={"video.codec": "h264"}) for name in CAMERAS},
}


def write_video(path: Path) -> None:
    y, x = np.mgrid[0:480, 0:640]
    fast = {"movflags": "faststart"}  # as lerobot and penstock write them
    with av.open(str(path), "w", format="mp4", options=fast) as out:
        options = {"g": "2", "crf": "23", "preset": "ultrafast"}
        stream = out.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = 640, 480, "yuv420p"
        for k in range(LENGTH * PER_FILE):
            image = np.stack([(x + 3 * k) % 256, (y + k) % 256, (x + y) // 5 % 256], -1)
            frame = av.VideoFrame.from_ndarray(image.astype(np.uint8), "rgb24")
            frame.pts, frame.time_base = k, Fraction(1, FPS)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


def make(root: Path) -> None:
    """Write the dataset: every video file has 100 episodes, and the same content."""
    count = PER_FILE * FILES
    spec = Spec(FEATURES, FPS, "tester", "v3.0", FileLimits())
    info = layout.info_json(spec, count, count * LENGTH, 20)
    (root / "meta").mkdir(parents=True)
    tasks = [f"put cup {n} into the dishwasher" for n in range(20)]
    pq.write_table(layout.tasks_table(tasks), root / layout.V30.tasks)
    write_video(root / "video.mp4")
    schema = layout.arrow_schema(FEATURES, "v3.0")
    records: dict[str, list] = {}
    for file in range(FILES):
        for camera in CAMERAS:
            target = root / layout.V30.video_path(camera, 0, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(root / "video.mp4", target)
        rows = LENGTH * PER_FILE
        k = np.arange(rows)
        state = np.sin(k[:, None] / 20 + np.arange(14)).astype(np.float32)
        episode = file * PER_FILE + k // LENGTH
        columns = {
            "observation.state": pa.array(state.tolist(), pa.list_(pa.float32(), 14)),
            "action": pa.array((state + 0.02).tolist(), pa.list_(pa.float32(), 14)),
            "timestamp": pa.array((k % LENGTH / FPS).astype(np.float32)),
            "frame_index": pa.array(k % LENGTH),
            "episode_index": pa.array(episode),
            "index": pa.array(file * rows + k),
            "task_index": pa.array(episode % 20),
        }
        target = root / layout.V30.data_path(0, file)
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table([columns[f.name] for f in schema], schema=schema), target)
        for n in range(PER_FILE):
            number = file * PER_FILE + n
            one: dict[str, object] = {
                "episode_index": number,
                "tasks": [tasks[number % 20]],
                "length": LENGTH,
                "data/chunk_index": 0,
                "data/file_index": file,
                "dataset_from_index": number * LENGTH,
                "dataset_to_index": (number + 1) * LENGTH,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
            for camera in CAMERAS:
                one[f"videos/{camera}/chunk_index"] = 0
                one[f"videos/{camera}/file_index"] = file
                one[f"videos/{camera}/from_timestamp"] = n * LENGTH / FPS
                one[f"videos/{camera}/to_timestamp"] = (n + 1) * LENGTH / FPS
            for name, value in one.items():
                records.setdefault(name, []).append(value)
    target = root / layout.episodes_path(0, 0)
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(records), target)
    (root / "video.mp4").unlink()
    (root / layout.INFO_PATH).write_text(json.dumps(info))


SHOWN = """new Promise((done) => {
  const cameras = window.penstock.player.cameras;
  const look = () => {
    const ready = cameras.every((c) => c.video
      ? !c.video.seeking && c.wanted === null && c.video.readyState >= 2 : !c.busy);
    ready ? done(performance.now()) : setTimeout(look, 1);
  };
  look();
})"""


def measure(root: Path) -> dict[str, object]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "penstock", "view", str(root), "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        opened = time.perf_counter() - began
        with tempfile.TemporaryDirectory() as profile, tool.Browser(Path(profile)) as browser:
            found = look(browser, url)
            found["problems"] = browser.problems
        found["open_s"] = round(opened, 2)
        memory = psutil.Process(server.pid).memory_info()
        found["server_mb"] = round(memory.rss / 1e6)
        with open(f"/proc/{server.pid}/status") as status:
            peak = next(line for line in status if line.startswith("VmHWM"))
        found["server_peak_mb"] = round(int(peak.split()[1]) * 1024 / 1e6)
        return found
    finally:
        server.terminate()
        server.wait()


def timed(browser: SimpleNamespace, code: str) -> float:
    """Return the milliseconds from a call to the pictures of all cameras."""
    head = "(async () => { const a = performance.now();"
    return browser.run(f"{head} {code}; return await {SHOWN} - a; }})()")


def look(browser: SimpleNamespace, url: str) -> dict[str, object]:
    pages, pictures = [], []
    for _ in range(5):
        browser.open("about:blank")
        browser.open(url)
        browser.wait("document.querySelectorAll('.row').length > 10")
        page = "performance.getEntriesByType('navigation')[0].loadEventEnd"
        browser.wait(f"{page} > 0")
        pages.append(browser.run(f"Math.max({page}, window.penstock.list.drawn ?? 0)"))
        browser.wait("performance.getEntriesByName('opened').length > 0")
        pictures.append(browser.run("performance.getEntriesByName('opened')[0].startTime"))
    seeks, episodes = [], []
    chance = random.Random(1)
    for _ in range(100):
        t = chance.randrange(LENGTH) / FPS
        seeks.append(timed(browser, f"window.penstock.player.seek({t})"))
    for _ in range(60):
        n = chance.randrange(PER_FILE * FILES)
        browser.run("performance.clearMarks()")
        began = browser.run(
            f"(() => {{ const a = performance.now(); window.penstock.open({n}); return a; }})()"
        )
        browser.wait("performance.getEntriesByName('opened').length > 0")
        opened = browser.run("performance.getEntriesByName('opened')[0].startTime")
        episodes.append(opened - began)
    for order in ("length", "task", "findings", "index"):
        browser.run(f"window.penstock.list.change({{order: '{order}', down: true}})")
    return {
        "page_ms": round(max(pages)),
        "first_picture_ms": round(max(pictures)),
        "seek_p50_ms": round(statistics.median(seeks)),
        "seek_p95_ms": round(sorted(seeks)[94]),
        "episode_p50_ms": round(statistics.median(episodes)),
        "episode_p95_ms": round(sorted(episodes)[56]),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if not folder.exists():
        make(folder)
    sys.stdout.write(json.dumps(measure(folder), indent=2) + "\n")
