"""Videos: every frame in its place, true colours, the same bytes each time, packets copied."""

from __future__ import annotations

import os
import runpy
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest

from penstock.errors import CorruptFile, DataError, StorageError, UsageError
from penstock.media.depth import DepthCoding
from penstock.media.encodings import ImageMessage
from penstock.media.images import ImageDecoder, to_rgb
from penstock.media.remux import Clip, coding, join
from penstock.media.video import VideoSettings, VideoWriter, read_video

s = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "dataset" / "staging.py")))
W, H, FRAMES = 128, 96, 23
DEPTH = np.clip(np.linspace(0, 12000, W * H), 0, 65535).astype(np.uint16).reshape(H, W)


def write(path: Path, codec: str, first: int = 0, frames: int = FRAMES, fps: int = 30) -> dict:
    writer = VideoWriter(path, VideoSettings(codec), fps, W, H, frames)
    decoder = ImageDecoder()
    for number in range(first, first + frames):
        data = s.jpeg(s.picture(number, W, H))
        if codec == "copy":
            writer.copy(data)
        elif codec == "depth12":
            writer.encode(np.roll(DEPTH, number, axis=1))
        else:
            writer.encode(decoder.jpeg(data))
    return writer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has the scheduling that matters")
@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_no_thread_becomes_a_real_time_one(tmp_path: Path, codec: str) -> None:
    """SVT-AV1 asks for that when root runs it: everything else on the machine would wait."""

    def policies() -> set[int]:
        names = os.listdir("/proc/self/task")
        return {os.sched_getscheduler(int(name)) for name in names}

    writer = VideoWriter(tmp_path / "a.mp4", VideoSettings(codec), 30, W, H)
    writer.encode(s.picture(0, W, H))
    assert policies() == {os.SCHED_OTHER}
    writer.encode(s.picture(1, W, H))
    writer.close()
    assert policies() == {os.SCHED_OTHER}


@pytest.mark.parametrize(
    ("codec", "name", "pix_fmt"),
    [("h264", "h264", "yuv420p"), ("av1", "av1", "yuv420p"), ("copy", "mjpeg", "yuvj420p")],
)
def test_every_frame_is_found_by_its_number(
    tmp_path: Path, codec: str, name: str, pix_fmt: str
) -> None:
    path = tmp_path / "a.mp4"
    info = write(path, codec)
    assert s.header_of(path) == (FRAMES, 30, name)
    assert (info["video.codec"], info["video.pix_fmt"], info["video.fps"]) == (name, pix_fmt, 30)
    assert [s.number_of(frame) for frame in read_video(path)] == list(range(FRAMES))
    for start in range(FRAMES):
        (frame,) = read_video(path, start, 1)
        assert s.number_of(frame) == start
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        ticks = [packet.pts for packet in container.demux(stream) if packet.size]
        assert ticks == [512 * i for i in range(FRAMES)]
        assert stream.time_base == Fraction(1, 15360)
        if codec != "copy":
            context = stream.codec_context
            assert (context.color_range, context.colorspace) == (1, 6)  # limited, BT.601


@pytest.mark.parametrize("codec", ["h264", "av1", "copy", "depth12"])
def test_the_same_frames_give_the_same_bytes(tmp_path: Path, codec: str) -> None:
    for name in "ab":
        write(tmp_path / name, codec, frames=7)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("codec", ["h264", "av1", "copy", "depth12"])
def test_joining_copies_packets_exactly(tmp_path: Path, codec: str) -> None:
    lengths, paths, first = (7, 1, 10), [], 0
    for number, length in enumerate(lengths):
        paths.append(tmp_path / f"{number}.mp4")
        write(paths[-1], codec, first, length, fps=10)
        first += length
    assert len({coding(path) for path in paths}) == 1
    clips = [Clip(path, 0, length) for path, length in zip(paths, lengths, strict=True)]
    join(clips, tmp_path / "all.mp4", 10)
    assert s.header_of(tmp_path / "all.mp4")[:2] == (18, 10)
    parts = [frame for path in paths for frame in read_video(path)]
    whole = list(read_video(tmp_path / "all.mp4"))
    assert all(np.array_equal(a, b) for a, b in zip(parts, whole, strict=True))
    assert np.array_equal(next(read_video(tmp_path / "all.mp4", 13, 1)), parts[13])
    assert coding(tmp_path / "all.mp4") == coding(paths[0])
    # Pieces of a file that was joined before give the same bytes as the files it was made of.
    again = [Clip(tmp_path / "all.mp4", 0, 7), Clip(tmp_path / "all.mp4", 7, 1), clips[2]]
    join(again, tmp_path / "again.mp4", 10)
    assert (tmp_path / "again.mp4").read_bytes() == (tmp_path / "all.mp4").read_bytes()
    with pytest.raises(CorruptFile, match="only 10 are there"):
        join([Clip(tmp_path / "all.mp4", 8, 99)], tmp_path / "x", 10)
    assert not (tmp_path / "x").exists()
    for path in (paths[2], tmp_path / "all.mp4"):  # players can start before they have it all
        data = path.read_bytes()
        assert data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize("kind", ["420", "422", "444"])
@pytest.mark.parametrize("codec", ["h264", "av1", "copy"])
def test_colours_are_those_of_the_jpeg(tmp_path: Path, codec: str, kind: str) -> None:
    """A wrong matrix or range shifts these by 6 to 30 grey levels."""
    bars = np.zeros((H, W, 3), np.uint8)
    for i in range(8):
        bars[: H // 2, i * W // 8 : (i + 1) * W // 8] = (
            255 * (i & 1),
            255 * (i >> 1 & 1),
            i // 4 * 255,
        )
    bars[H // 2 :] = np.linspace(0, 255, W)[None, :, None]
    data = s.jpeg(bars, f"yuvj{kind}p")
    picture = ImageDecoder().jpeg(data)
    expected = to_rgb(picture).astype(float)
    settings = VideoSettings(codec, crf=None if codec == "copy" else 8)
    writer = VideoWriter(tmp_path / "a.mp4", settings, 30, W, H)
    for _ in range(2):
        writer.copy(data) if codec == "copy" else writer.encode(picture)
    writer.close()
    found = next(read_video(tmp_path / "a.mp4")).astype(float)
    inner = np.ones((H, W), bool)  # chroma is half as fine: edges of the bars are left out
    inner[: H // 2, np.abs((np.arange(W) % (W // 8)) - W // 16) > W // 16 - 4] = False
    inner[H // 2 - 2 : H // 2 + 2] = False
    assert np.sqrt(((found - expected)[inner] ** 2).mean()) < 2.5
    with av.open(str(tmp_path / "a.mp4")) as container:  # as other readers convert it
        other = next(container.decode(video=0)).to_ndarray(format="rgb24").astype(float)
    assert np.sqrt(((other - expected)[inner] ** 2).mean()) < 2.5


@pytest.mark.parametrize("kind", ["420", "422", "444", "rgb", "bgr8", "bayer_rggb8"])
def test_pictures_become_neither_darker_nor_tinted(tmp_path: Path, kind: str) -> None:
    """Narrowing the range with FFmpeg alone moves green down by half a step, red and blue up.

    Its short ways from BGR and Bayer make pictures darker and green.
    """
    y, x = np.mgrid[0:H, 0:W]
    waves = [128 + 90 * np.sin(x / 20 + k) * np.cos(y / (15 + 5 * k)) for k in range(3)]
    pixels = np.stack(waves, axis=-1).astype(np.uint8)
    if kind == "rgb":
        frame = None
    elif kind.startswith("b"):
        raw = pixels[..., ::-1] if kind == "bgr8" else pixels[..., :1]
        image = ImageMessage(kind, memoryview(raw.tobytes()), W, H, W * raw.shape[2])
        frame = ImageDecoder().color(image)
    else:
        frame = ImageDecoder().jpeg(s.jpeg(pixels, f"yuvj{kind}p"))
    with VideoWriter(tmp_path / "a.mp4", VideoSettings("h264", crf=1), 30, W, H) as writer:
        writer.encode(pixels if frame is None else frame)
    expected = pixels if frame is None else to_rgb(frame)
    off = next(read_video(tmp_path / "a.mp4")).astype(float) - expected
    assert np.abs(off.mean((0, 1))).max() < 0.25
    assert np.abs(off).mean() < 1


def test_arrays_and_grey_frames_are_taken_too(tmp_path: Path) -> None:
    grey = av.VideoFrame.from_ndarray(np.full((H, W), 200, np.uint8), "gray")
    with VideoWriter(tmp_path / "a.mp4", VideoSettings("h264", crf=5), 30, W, H) as writer:
        writer.encode(np.full((H, W, 3), (200, 100, 50), np.uint8))
        writer.encode(grey)
    first, second = read_video(tmp_path / "a.mp4")
    assert np.abs(first.astype(int) - (200, 100, 50)).max() <= 3
    assert np.abs(second.astype(int) - 200).max() <= 2


def test_depth_comes_back_as_it_was_quantised(tmp_path: Path) -> None:
    info = write(tmp_path / "d.mp4", "depth12", frames=3)
    coded = DepthCoding()
    for number, frame in enumerate(read_video(tmp_path / "d.mp4")):
        depth = np.roll(DEPTH, number, axis=1)
        assert np.array_equal(frame, coded.decode(coded.encode(depth)))
        good = (depth >= 10) & (depth <= 10_000)
        assert np.abs(frame.astype(int) - depth)[good].max() <= 3
    assert info["video.is_depth_map"] and info["is_depth_map"] and info["depth_unit"] == "mm"
    assert DepthCoding.from_info(info) == coded
    assert (info["video.codec"], info["video.channels"]) == ("hevc", 1)


def test_depth_codes_follow_the_published_formula() -> None:
    coded = DepthCoding()
    mm = np.array([0, 10, 500, 1000, 3000, 9999, 10_000, 65535], np.uint16)
    share = (np.log(mm / 1000 + 3.5) - np.log(3.51)) / (np.log(13.5) - np.log(3.51))
    expected = np.rint(share * 4095).clip(0, 4095)
    assert np.abs(coded.encode(mm).astype(int) - expected).max() <= 1
    assert coded.decode(np.array([0, 4095], np.uint16)).tolist() == [10, 10_000]
    with pytest.raises(DataError):
        DepthCoding(depth_min=2, depth_max=1)
    with pytest.raises(DataError):
        DepthCoding.from_info({"video.shift": "much"})


def test_wrong_frames_are_refused(tmp_path: Path) -> None:
    writer = VideoWriter(tmp_path / "a.mp4", VideoSettings("h264"), 30, W, H)
    with pytest.raises(DataError, match="64x48"):
        writer.encode(np.zeros((48, 64, 3), np.uint8))
    with pytest.raises(UsageError):
        writer.encode(np.zeros((H, W), np.uint8))
    with pytest.raises(UsageError):
        writer.copy(s.jpeg(s.picture(1, W, H)))
    with pytest.raises(DataError, match="at least one"):
        writer.close()
    assert not (tmp_path / "a.mp4").exists()
    copier = VideoWriter(tmp_path / "b.mp4", VideoSettings("copy"), 30, W, H)
    with pytest.raises(DataError, match="64x48"):
        copier.copy(s.jpeg(s.picture(1)))
    with pytest.raises(DataError):
        copier.copy(b"no jpeg")
    copier.abandon()
    assert list(tmp_path.iterdir()) == []
    for bad in ({"codec": "vp9"}, {"g": 0}):
        with pytest.raises(UsageError):
            VideoSettings(**bad)
    with pytest.raises(UsageError, match="even"):
        VideoWriter(tmp_path / "c.mp4", VideoSettings("h264"), 30, 127, 96)
    with pytest.raises(StorageError):
        VideoWriter(tmp_path / "no" / "c.mp4", VideoSettings("h264"), 30, W, H)


def test_damaged_videos_are_corrupt_files(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    write(path, "h264")
    data = path.read_bytes()
    with pytest.raises(CorruptFile, match=f"ends at frame {FRAMES}"):
        list(read_video(path, 0, FRAMES + 1))
    for cut in (0, 10, len(data) // 2, data.index(b"moov") + 50):
        path.write_bytes(data[:cut])
        with pytest.raises(CorruptFile):
            list(read_video(path, 0, FRAMES))
    with pytest.raises(CorruptFile):
        coding(tmp_path / "missing.mp4")
    middle = data.index(b"mdat") + 2000
    path.write_bytes(data[:middle] + bytes(600) + data[middle + 600 :])
    with pytest.raises(CorruptFile):
        list(read_video(path, 0, FRAMES))


@pytest.mark.parametrize("read", [coding, lambda path: list(read_video(path))])
def test_a_video_of_no_known_codec_is_a_corrupt_file(tmp_path: Path, read) -> None:
    path = tmp_path / "a.mp4"
    write(path, "h264", frames=3)
    data = path.read_bytes()
    tag = data.rindex(b"avc1")
    path.write_bytes(data[:tag] + b"zzzz" + data[tag + 4 :])
    with pytest.raises(CorruptFile, match="codec is not known"):
        read(path)
