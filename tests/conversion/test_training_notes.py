"""What a trainer should look at, said once, and nothing of it where the data are good."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from mcap.writer import Writer

import penstock
from penstock.conversion.settings import from_json
from penstock.dataset import check as doctor

QUIET = {"progress": "quiet", "memory": "1GB"}
FRAMES = 200
TIME = np.arange(FRAMES + 20) / 30
WAVE = np.stack([np.sin(2 * TIME), np.cos(3 * TIME)], axis=1)


def jpeg(value: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mjpeg") as container:
        stream = container.add_stream("mjpeg", rate=30, options={"qmin": "2", "qmax": "2"})
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuvj420p"
        frame = av.VideoFrame.from_ndarray(value, "rgb24")
        container.mux([*stream.encode(frame), *stream.encode(None)])
    return file.getvalue()


def bag(path: Path, state: Any, action: Any, frames: int = FRAMES, pictures: Any = None) -> Path:
    """Write rows of numbers at 30 Hz as JSON, and pictures if they are given."""
    kind = json.dumps(
        {"type": "object", "properties": {"v": {"type": "array", "items": {"type": "number"}}}}
    )
    image = {"timestamp": {"type": "object"}, "format": {"type": "string"},
             "data": {"type": "string", "contentEncoding": "base64"}}  # fmt: skip
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start()
        numbers = writer.register_schema("Numbers", "jsonschema", kind.encode())
        shown = json.dumps({"type": "object", "properties": image}).encode()
        camera = writer.register_schema("foxglove.CompressedImage", "jsonschema", shown)
        topics = {name: writer.register_channel(name, "json", numbers) for name in ("/s", "/a")}
        cam = writer.register_channel("/cam", "json", camera) if pictures is not None else None
        for k in range(frames):
            t_ns = 10**18 + k * 33_333_333
            for name, rows in (("/s", state), ("/a", action)):
                data = json.dumps({"v": [float(v) for v in rows[k]]}).encode()
                writer.add_message(topics[name], t_ns, data, t_ns)
            if cam is not None:
                text = base64.b64encode(jpeg(pictures(k))).decode()
                data = json.dumps({"format": "jpeg", "data": text}).encode()
                writer.add_message(cam, t_ns, data, t_ns)
        writer.finish()
    return path


def notes(paths: list[Path], out: Path, camera: bool = False) -> list[str]:
    features: dict[str, Any] = {
        "observation.state": {"topic": "/s", "field": "v", "names": ["shoulder", "elbow"]},
        "action": {"topic": "/a", "field": "v"},
    }
    if camera:
        features["observation.images.cam"] = {"topic": "/cam", "kind": "color"}
    mapping = from_json({"fps": 30, "timeline": "/s", "features": features})
    report = penstock.convert(paths, out, mapping, **QUIET)
    assert report.ok, report.text()
    assert not report.findings, report.findings
    for note in report.training:
        assert note.what in report.text()
        assert note in doctor.check(out, "sample").notes
    return [note.what for note in report.training]


def test_good_data_need_no_note(tmp_path):
    path = bag(tmp_path / "a.mcap", WAVE, WAVE[5:])
    assert notes([path], tmp_path / "out") == []


def lagging() -> Any:
    return WAVE[4:], WAVE


def constant() -> Any:
    return np.stack([WAVE[:, 0], np.full(len(WAVE), 3.0)], axis=1), WAVE[5:]


def saturated() -> Any:
    return np.minimum(WAVE, 0.5), WAVE[5:]


def jumping() -> Any:
    state = WAVE.copy()
    state[100] = 0
    state[90, 1], state[91, 1] = -1.0, 1.0
    return state, WAVE[5:]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: (WAVE, WAVE), "the action is the state of the same frame"),
        (lagging, "the action follows the state by 4 frames"),
        (constant, "observation.state [elbow] never changes"),
        (saturated, "observation.state is at its limit"),
        (jumping, "observation.state [elbow] jumps by most of its range"),
    ],
)
def test_what_spoils_a_training(tmp_path, make, said):
    (note,) = notes([bag(tmp_path / "a.mcap", *make())], tmp_path / "out")
    assert said in note


def test_a_gripper_that_is_open_or_shut_needs_no_note(tmp_path):
    state = np.stack([WAVE[:, 0], (WAVE[:, 1] > 0) * 1.0], axis=1)
    assert notes([bag(tmp_path / "a.mcap", state, WAVE[5:])], tmp_path / "out") == []


@pytest.mark.filterwarnings("error")
def test_ranges_without_an_echo(tmp_path):
    """A laser says infinity: that is counted, and is neither a jump nor a wrong statistic."""
    state = WAVE.copy()
    state[:80, 0] = state[::7, 1] = np.inf
    features = {"observation.state": {"topic": "/s", "field": "v"}}
    mapping = from_json({"fps": 30, "timeline": "/s", "features": features})
    path = bag(tmp_path / "a.mcap", state, WAVE[5:])
    report = penstock.convert(path, tmp_path / "out", mapping, **QUIET)
    (finding,) = report.findings
    assert "NaN or infinite" in finding.what
    assert report.training == []


def test_short_episodes(tmp_path):
    paths = [
        bag(tmp_path / f"{k}.mcap", WAVE, WAVE[5:], frames=20 if k == 3 else FRAMES - k)
        for k in range(6)
    ]
    (note,) = notes(paths, tmp_path / "out")
    assert "1 episodes are far shorter than the rest (the first is 3, with 20 frames)" in note


@pytest.mark.parametrize(
    ("pictures", "said"),
    [
        (lambda _: np.zeros((32, 32, 3), np.uint8), {"black", "stands still"}),
        (lambda _: np.full((32, 32, 3), 90, np.uint8), {"stands still"}),
        (lambda k: np.full((32, 32, 3), 20 + k, np.uint8), set()),
    ],
)
def test_cameras(tmp_path, pictures, said):
    path = bag(tmp_path / "a.mcap", WAVE, WAVE[5:], frames=60, pictures=pictures)
    found = notes([path], tmp_path / "out", camera=True)
    assert len(found) == len(said)
    assert all(any(word in note for note in found) for word in said)


def test_the_next_steps_are_said(tmp_path):
    path = bag(tmp_path / "a.mcap", WAVE, WAVE[5:])
    features = {"observation.state": {"topic": "/s", "field": "v"}}
    mapping = from_json({"fps": 30, "timeline": "/s", "features": features})
    report = penstock.convert(path, tmp_path / "my set", mapping, **QUIET)
    assert "lerobot-train --dataset.repo_id=local/my_set" in report.text()
