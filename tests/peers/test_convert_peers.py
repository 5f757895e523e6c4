"""Whole conversions, read by the real lerobot: every frame, by both of its video back ends.

Of every frame the numbers are those of the recording, the pictures those of its JPEGs as libjpeg
decodes them, and the number that is written into each picture is the one it should be.
"""

from __future__ import annotations

from contextlib import closing
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

import penstock
from penstock.bags import open_bag
from penstock.conversion.settings import from_json
from penstock.dataset.check import check
from penstock.dataset.layout import QUANTILES
from penstock.dataset.reader import Dataset
from penstock.media.depth import DepthCoding
from penstock.media.images import ImageDecoder, to_rgb
from penstock.samples import expected_action, expected_state, read_number, write_sample
from penstock.samples.kuavo import Messages
from penstock.samples.writers import new_writer

from .peer import lerobot_reads

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

FPS, STATE_HZ, SPLIT = 30, 100, 25
SECONDS = (2.0, 0.5, 0.7)  # the last one is appended
LENGTHS = [25, 25, 10, 15, 21]
TASK = "stack the cups"
CAMERAS = [f"observation.images.{name}" for name in ("head", "left", "right")]
DEPTH = "observation.depth"
DEPTH_RANGE_MM = (0, 1500)
QUIET = {"progress": "quiet", "memory": "1GB"}
# How far pixels may be off in the mean, of 255: noise goes, chroma is scaled by another filter, and
# lerobot's readers of videos round down, which alone is 1 in green.
ERRORS = {"h264": 5, "av1": 6, "copy": 1.6, "png": 1}
VERSIONS = ["v3.0", "v2.1"]


@pytest.fixture(scope="module")
def bags(tmp_path_factory) -> list:
    """Three recordings of three cameras, the first also with depth."""
    folder = tmp_path_factory.mktemp("bags")
    size = {"width": 256, "height": 48, "camera_hz": FPS, "state_hz": STATE_HZ}
    return [
        write_sample(folder / f"{n}.bag", seconds=seconds, cameras=3, depth=True, seed=n, **size)
        for n, seconds in enumerate(SECONDS)
    ]


def mapping(facts, codec: str, cameras: int = 3, depth_codec: str | None = None):
    """Numbers of two topics, and pictures."""
    features = {
        "observation.state": {"topic": "/sensors_data_raw", "field": "joint_data.joint_q"},
        "action": {"topic": "/joint_cmd", "field": "joint_q", "select": [12, 26]},
    }
    for name, topic in list(zip(CAMERAS, facts.cameras, strict=True))[:cameras]:
        features[name] = {"topic": topic, "kind": "color"}
    if depth_codec:
        settings = {"codec": depth_codec, "depth_range_mm": list(DEPTH_RANGE_MM)}
        features[DEPTH] = {"topic": facts.depths[0], "kind": "depth", **settings}
    timeline = {"timeline": facts.cameras[0], "split_frames": SPLIT}
    return from_json({"fps": FPS, "codec": codec, "task": TASK, "features": features, **timeline})


def convert(bags: list, out: Path, chosen, version: str) -> Path:
    """Two recordings, split and packed; the third appended."""
    paths = [facts.path for facts in bags]
    report = penstock.convert(paths[:2], out, chosen, version=version, **QUIET)
    assert report.ok, report.text()
    report = penstock.convert(paths[2], out, chosen, version=version, append=True, **QUIET)
    assert report.ok, report.text()
    result = check(out)
    assert result.findings == [], result.text()
    return out


def messages(facts, topic: str) -> list:
    with open_bag(facts.path) as bag:
        decoder = bag.decoder(topic)
        return [decoder.image(message.data) for message in bag.read([topic])]


def expected(bags: list, cameras: int = 3) -> dict[str, np.ndarray]:
    """What every frame must hold, by the formulas of the sample and the files in the bag."""
    state, action = [], []
    for seconds in SECONDS:
        frame_s = np.arange(round(seconds * FPS)) / FPS
        message_s = np.rint(frame_s * STATE_HZ) / STATE_HZ  # the nearest message
        state.append(expected_state(message_s).astype(np.float32))
        action.append(expected_action(message_s)[:, 12:26].astype(np.float32))
    found = {
        "lengths": np.array(LENGTHS),
        "vec/observation.state": np.concatenate(state),
        "vec/action": np.concatenate(action),
        "task": np.array([TASK] * sum(LENGTHS)),
    }
    for camera, name in list(enumerate(CAMERAS))[:cameras]:
        files = [
            bytes(image.data) for facts in bags for image in messages(facts, facts.cameras[camera])
        ]
        found[f"jpeg/{name}"] = padded(files)
        found[f"number/{name}"] = numbers()
    return found


def padded(files: list[bytes]) -> np.ndarray:
    longest = max(map(len, files))
    rows = [np.frombuffer(file.ljust(longest, b"\0"), np.uint8) for file in files]
    return np.stack(rows)


def numbers() -> np.ndarray:
    return np.concatenate([np.arange(round(seconds * FPS)) for seconds in SECONDS])


def save(path: Path, values: dict[str, np.ndarray]) -> Path:
    np.savez(path, **values)
    return path


def check_statistics(root: Path, values: dict[str, np.ndarray], cameras: list[str]) -> None:
    """Compare stats.json with numpy over all rows, and over all pictures as decoded."""
    dataset = Dataset(root)
    if dataset.version == "v3.0":
        stats = dataset.stats()
        for name in ("observation.state", "action"):
            rows = values[f"vec/{name}"].astype(np.float64)
            for key, share in QUANTILES.items():
                exact = np.quantile(rows, share, axis=0)
                np.testing.assert_allclose(stats[name][key], exact, rtol=1e-6, atol=1e-9)
            np.testing.assert_allclose(stats[name]["mean"], rows.mean(0), rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(stats[name]["std"], rows.std(0), rtol=1e-9)
    for camera in cameras:
        whole = []
        for (_, of_episode), episode in zip(dataset.episode_stats(), dataset.episodes, strict=True):
            pixels = np.stack([f[camera] for f in episode.frames([camera])]).reshape(-1, 3) / 255
            compare(of_episode[camera], pixels)
            whole.append(pixels)
        if dataset.version == "v3.0":
            compare(stats[camera], np.concatenate(whole))


def check_lossless(root: Path, files: np.ndarray) -> None:
    """Compare what we read with the JPEGs, pixel by pixel."""
    decoder, position = ImageDecoder(), 0
    for episode in Dataset(root).episodes:
        for frame in episode.frames(CAMERAS[:1]):
            wanted = to_rgb(decoder.jpeg(files[position].tobytes().rstrip(b"\0")))
            assert np.array_equal(frame[CAMERAS[0]], wanted)
            position += 1
    assert position == sum(LENGTHS)


def compare(stats: dict[str, np.ndarray], pixels: np.ndarray) -> None:
    assert np.all(stats["std"] > 0.05)
    assert stats["std"].shape == (3, 1, 1)
    np.testing.assert_allclose(stats["mean"].reshape(3), pixels.mean(0), rtol=0.02)
    np.testing.assert_allclose(stats["std"].reshape(3), pixels.std(0), rtol=0.02)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("codec", ["h264", "av1", "copy", "png"])
def test_lerobot_reads_every_frame_of_a_conversion(bags, tmp_path, codec, version) -> None:
    root = convert(bags, tmp_path / "out", mapping(bags[0], codec), version)
    values = expected(bags)
    expect = save(tmp_path / "x.npz", values)
    verdict = lerobot_reads(root, expect, "--error", ERRORS[codec], old=version == "v2.1")
    for backend in ("torchcodec", "pyav"):
        found = verdict["backends"][backend]
        assert (found["frames"], found["lengths"]) == (96, LENGTHS)
        assert set(found["pictures"]) == set(CAMERAS)
    check_statistics(root, values, CAMERAS[:1])
    if codec in ("copy", "png"):
        check_lossless(root, values[f"jpeg/{CAMERAS[0]}"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("codec", ["grey8", "depth12"])
def test_lerobot_reads_depth(bags, tmp_path, codec, version) -> None:
    """0.4.4 knows no 12-bit depth: it shows the upper 8 bits of the codes, in 3 channels."""
    chosen = mapping(bags[0], "h264", 1, codec)
    root = convert(bags, tmp_path / "out", chosen, version)
    decoder = ImageDecoder()
    depth = np.stack(
        [decoder.depth_mm(image) for facts in bags for image in messages(facts, facts.depths[0])]
    )
    values = expected(bags, 1)
    if codec == "grey8":
        share = (depth - DEPTH_RANGE_MM[0]) / (DEPTH_RANGE_MM[1] - DEPTH_RANGE_MM[0])
        values[f"pic/{DEPTH}"] = np.rint(255 * share.clip(0, 1)).astype(np.uint8)
        values[f"number/{DEPTH}"] = numbers()
    else:
        values[f"pic/{DEPTH}"] = (DepthCoding().encode(depth) >> 4).astype(np.uint8)
        position = 0
        for episode in Dataset(root).episodes:
            for frame in episode.frames([DEPTH]):
                found, wanted = frame[DEPTH].astype(int), depth[position].astype(int)
                assert frame[DEPTH].dtype == np.uint16
                # A step of the codes is log(13.5/3.51)/4095 of d + 3.5 m; rounding twice adds.
                bound = (wanted + 3500) * np.log(13.5 / 3.51) / 4095 / 2 + 0.5
                assert np.all(np.abs(found - wanted) <= bound)
                assert read_number(found, 750) == numbers()[position]
                position += 1
        assert position == 96
    expect = save(tmp_path / "x.npz", values)
    verdict = lerobot_reads(root, expect, "--error", 5, old=version == "v2.1")
    assert set(verdict["backends"]) == {"torchcodec", "pyav"}


@pytest.mark.parametrize("codec", ["h264", "copy"])
def test_lerobot_merges_two_conversions(bags, tmp_path, codec) -> None:
    chosen = mapping(bags[0], codec, 1)
    one, two = (convert(bags, tmp_path / name, chosen, "v3.0") for name in ("one", "two"))
    expect = save(tmp_path / "x.npz", expected(bags, 1))
    merged = tmp_path / "merged"
    words = ("--error", ERRORS[codec], "--merge", two, "--merged", merged)
    verdict = lerobot_reads(one, expect, *words)
    assert verdict["backends"]["torchcodec"]["lengths"] == LENGTHS * 2
    result = check(merged)
    assert result.errors == [], result.text()
    assert len(Dataset(merged)) == 2 * len(LENGTHS)


def bars(number: int, width: int = 256, height: int = 96) -> np.ndarray:
    """Saturated colours and a grey ramp below the number, which is not compared in colour."""
    pixels = np.zeros((height, width, 3), np.uint8)
    for bit in range(16):
        pixels[:16, bit * 16 : (bit + 1) * 16] = 255 * (number >> bit & 1)
    for bar in range(8):
        colour = (255 * (bar & 1), 255 * (bar >> 1 & 1), 255 * (bar >> 2))
        pixels[16:64, bar * width // 8 : (bar + 1) * width // 8] = colour
    pixels[64:] = np.linspace(0, 255, width)[None, :, None]
    return pixels


def jpeg(pixels: np.ndarray, subsampling: str) -> bytes:
    encoder = av.CodecContext.create("mjpeg", "w")
    encoder.height, encoder.width, encoder.pix_fmt = *pixels.shape[:2], f"yuvj{subsampling}p"
    encoder.time_base, encoder.qmin, encoder.qmax = Fraction(1, 30), 2, 2
    frame = av.VideoFrame.from_ndarray(pixels, "rgb24").reformat(
        format=encoder.pix_fmt, dst_colorspace="ITU601", dst_color_range="JPEG"
    )
    frame.pts = 0
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


def colour_bag(path: Path, frames: int = 20) -> dict[str, list[bytes]]:
    """Write a recording of three cameras that look at colour bars, each in another subsampling."""
    made = Messages(True, "4pro", "leju_claw", False)
    files = {
        f"/cam{kind}": [jpeg(bars(number), kind) for number in range(frames)]
        for kind in ("420", "422", "444")
    }
    with closing(new_writer(path, "bag", "none", made.store)) as writer:
        handles = {topic: writer.add(topic, "sensor_msgs/msg/CompressedImage") for topic in files}
        for number in range(frames):
            t_ns = 1_700_000_000 * 10**9 + number * 10**9 // 30
            for topic, handle in handles.items():
                data = made.compressed(t_ns, number, "jpeg", files[topic][number])
                writer.write(handle, t_ns, data)
    return files


@pytest.mark.parametrize("codec", ["h264", "av1", "copy"])
def test_colours_are_right_in_lerobot(tmp_path, codec) -> None:
    """A wrong range shifts dark and bright pixels by up to 16, a wrong matrix colours by more.

    Both back ends convert to RGB by rounding down, so that all videos are darker by 1.
    """
    bag = tmp_path / "colours.bag"
    files = colour_bag(bag)
    cameras = dict(zip(CAMERAS, files, strict=True))
    features = {name: {"topic": topic, "kind": "color"} for name, topic in cameras.items()}
    chosen = from_json({"fps": 30, "codec": codec, "timeline": "/cam420", "features": features})
    report = penstock.convert(bag, tmp_path / "out", chosen, **QUIET)
    assert report.ok, report.text()
    # A video has half the colour resolution: the edges of bars are not those of a 4:4:4 JPEG.
    column = np.arange(256) % 32
    inner = np.tile((column >= 4) & (column < 28), (96, 1))
    inner[:20] = inner[60:68] = False
    inner[68:] = True
    values = {"mask": inner}
    for name, topic in cameras.items():
        values[f"jpeg/{name}"] = padded(files[topic])
        values[f"number/{name}"] = np.arange(len(files[topic]))
    verdict = lerobot_reads(tmp_path / "out", save(tmp_path / "x.npz", values), "--error", 4)
    for backend in ("torchcodec", "pyav"):
        for name in CAMERAS:
            facts = verdict["backends"][backend]["pictures"][name]
            for band, shift in facts["shift"].items():
                brightness = np.dot([0.299, 0.587, 0.114], shift)
                assert abs(brightness) < 1.5, (backend, name, band, facts)
                assert np.abs(shift).max() < 2, (backend, name, band, facts)
