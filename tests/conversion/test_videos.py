"""Cameras that send a video: no frame is lost, shifted or shown with the wrong row."""

from __future__ import annotations

import random
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

import penstock
from penstock.bags import open_bag
from penstock.conversion.settings import from_json
from penstock.dataset.reader import Dataset
from penstock.errors import DataError
from penstock.media.packets import PacketDecoder, is_key

from ..bags.damage import mutate
from .videos import (
    ENCODERS,
    HEIGHT,
    PERIOD_NS,
    START_NS,
    WIDTH,
    Packet,
    decoded,
    encode,
    number_in,
    record,
)

QUIET = {"progress": "quiet", "memory": "1GB"}
COPIES = int(av.__version__.split(".")[0]) >= 17
needs_copies = pytest.mark.skipif(not COPIES, reason="av before 17 cannot copy packets")
COPY_OR_NOT = [pytest.param("copy", marks=needs_copies), "h264"]
KEY = "observation.images.cam"


def convert(path: Any, out: Path, **settings: Any) -> Any:
    features = {
        "observation.state": {"topic": "/state", "field": "n"},
        KEY: {"topic": "/cam", "kind": "color"},
    }
    mapping = from_json({"fps": 30, "features": features, "timeline_hz": 30.0, **settings})
    return penstock.convert(path, out, mapping, **QUIET)


def frames_of(out: Path) -> list[tuple[int, int]]:
    """Return, for each frame of all episodes, the number of its row and that in its picture."""
    dataset = Dataset(out)
    found = []
    for index in range(len(dataset)):
        for frame in dataset.episode(index).frames():
            found.append((round(float(frame["observation.state"])), number_in(frame[KEY])))
    return found


def units_of(packet: bytes) -> list[bytes]:
    return [unit.rstrip(b"\0") for unit in packet.split(b"\0\0\1")[1:]]


def stored_packets(out: Path) -> list[bytes]:
    """Return the packets of the videos of a dataset."""
    found = []
    for path in sorted(out.glob("videos/**/*.mp4")):
        with av.open(str(path)) as container:
            found += [bytes(packet) for packet in container.demux(video=0) if packet.size]
    return found


def stored_units(packet: bytes) -> list[bytes]:
    """Return the units of a packet as mp4 has them: each behind its length."""
    units = []
    while packet:
        length = int.from_bytes(packet[:4], "big")
        units.append(packet[4 : 4 + length].rstrip(b"\0"))
        packet = packet[4 + length :]
    return units


def placed(packets: list[Packet]) -> list[tuple[int, Packet]]:
    return list(enumerate(packets))


@pytest.mark.skipif(COPIES, reason="av from 17 on copies packets")
def test_what_this_av_cannot_copy_is_refused(tmp_path):
    path = record(tmp_path / "a.mcap", "h264", placed(encode("h264", 90)))
    with pytest.raises(DataError, match="needs av 17 or newer: use h264"):
        convert(path, tmp_path / "out", codec="copy")


@pytest.mark.parametrize("encoding", ["protobuf", "json", "cdr", "cdr of sensor_msgs"])
@pytest.mark.parametrize("codec", COPY_OR_NOT)
def test_every_encoding(tmp_path, encoding, codec):
    path = record(tmp_path / "a.mcap", "h264", placed(encode("h264", 90)), encoding)
    report = convert(path, tmp_path / "out", codec=codec)
    assert report.ok, report.text()
    assert frames_of(tmp_path / "out") == [(n, n) for n in range(90)]


@pytest.mark.parametrize("encoding", ["protobuf", "json", "cdr"])
def test_stamps_without_a_header(tmp_path, encoding):
    """Foxglove's messages have a timestamp of their own: a pause that only it knows is kept."""
    packets = encode("h264 with B-frames", 90)
    late = [(k, Packet(p.data, p.shows + 30 * (p.shows > 50), p[2])) for k, p in placed(packets)]
    path = record(tmp_path / "a.mcap", "h264", late, encoding)
    with open_bag(path) as bag:
        stamps = bag.header_stamps(["/cam"])["/cam"]
    assert [round((t - START_NS) / PERIOD_NS) for t in stamps] == [p.shows for _, p in late]
    report = convert(path, tmp_path / "out", clock="header")
    assert report.ok, report.text()
    assert [n for _, n in frames_of(tmp_path / "out")][:50] == list(range(50))


@pytest.mark.parametrize("clock", ["bag", "header"])
@pytest.mark.parametrize("codec", COPY_OR_NOT)
@pytest.mark.parametrize("kind", ENCODERS)
def test_every_codec(tmp_path, kind, codec, clock):
    """With B-frames, too: by the stamps of the pictures, or where packets are stamped as sent."""
    packets, name = encode(kind, 150, key_every=40), kind.split()[0]
    path = record(tmp_path / "a.mcap", name, placed(packets))
    report = convert(path, tmp_path / "out", codec=codec, clock=clock)
    assert report.ok, report.text()
    seen = decoded(kind, packets)  # an encoder may have spoilt a picture or two
    assert sum(n != number for n, number in enumerate(seen)) <= 2
    assert frames_of(tmp_path / "out") == list(enumerate(seen))
    if codec == "copy":
        stored = stored_packets(tmp_path / "out")
        if name in ("h264", "h265"):
            assert [stored_units(p) for p in stored] == [units_of(p.data) for p in packets]
        else:  # mp4 has no place for the two bytes that separate the pictures of AV1
            assert stored == [packet.data.removeprefix(b"\x12\0") for packet in packets]


@pytest.mark.parametrize("key_every", [1, 7, 250])
@pytest.mark.parametrize("codec", COPY_OR_NOT)
def test_a_recording_that_starts_late(tmp_path, key_every, codec):
    """Packets before the first key frame show nothing; their frames are not there."""
    packets = encode("h264", 300, key_every)[5:]
    first = next((k for k, packet in enumerate(packets) if packet.is_key), None)
    path = record(tmp_path / "a.mcap", "h264", [(p.shows, p) for p in packets])
    if first is None:
        with pytest.raises(DataError, match="no key frame"):
            convert(path, tmp_path / "out", codec=codec)
        return
    report = convert(path, tmp_path / "out", codec=codec)
    assert report.ok, report.text()
    assert report.account.balanced
    assert frames_of(tmp_path / "out") == [(n, n) for n in range(first + 5, 300)]


@pytest.mark.parametrize("kind", ["h264", "h264 with B-frames", "h265", "h265 with B-frames"])
def test_lost_packets_never_show_a_wrong_picture(tmp_path, kind):
    """What was built on them holds the last good picture, up to the next key frame."""
    packets = encode(kind, 300, key_every=25)
    lost = sorted(random.Random(kind).sample(range(10, 290), 6))
    kept = [(p.shows, p) for k, p in enumerate(packets) if k not in lost]
    path = record(tmp_path / "a.mcap", kind.split()[0], kept)
    report = convert(path, tmp_path / "out", clock="header")
    assert report.ok, report.text()
    frames = frames_of(tmp_path / "out")
    shown = [picture for _, picture in frames]
    right = {row for row, picture in frames if row == picture}
    assert shown == sorted(shown)
    assert all(picture <= row and picture in right for row, picture in frames)
    assert len(right) > 150
    held = sum(row != picture for row, picture in frames)
    assert held == 0 or "cannot be decoded (held)" in report.text()


@pytest.mark.parametrize("kind", ["h264", "h264 with B-frames"])
def test_a_pause_and_fewer_frames(tmp_path, kind):
    packets = encode(kind, 240)
    places = [p.shows + (500 if p.shows >= 100 else 0) for p in packets]
    places = [(k, Packet(p.data, k, p.is_key)) for k, p in zip(places, packets, strict=True)]
    path = record(tmp_path / "a.mcap", "h264", places)
    for fps in (30, 10):
        out = tmp_path / str(fps)
        assert convert(path, out, fps=fps, clock="header").ok
        frames = frames_of(out)
        assert len(frames) >= 240 * fps // 30 - 2
        assert all(row == picture + (500 if picture >= 100 else 0) for row, picture in frames)
    with pytest.raises(DataError, match="codec copy needs each once: use h264"):
        convert(path, tmp_path / "copy", fps=10, codec="copy")


@needs_copies
def test_a_copied_episode_begins_with_a_key_frame(tmp_path):
    path = record(tmp_path / "a.mcap", "h264", placed(encode("h264", 120, key_every=60)))
    with pytest.raises(DataError, match="frame 50, which is no key frame"):
        convert(path, tmp_path / "out", codec="copy", split_frames=50)
    assert convert(path, tmp_path / "three", codec="h264", split_frames=50).ok
    assert frames_of(tmp_path / "three") == [(n, n) for n in range(120)]


@needs_copies
def test_bags_of_several_codecs(tmp_path):
    """Copied, the second fails with its reason; decoded, both are in the dataset."""
    bags = [
        record(tmp_path / f"{kind}.mcap", kind, placed(encode(kind, 60)))
        for kind in ("h264", "h265")
    ]
    report = convert(bags, tmp_path / "copy", codec="copy")
    ((path, reason),) = report.failed.items()
    assert path.name == "h265.mcap"
    assert "is a video of hevc, and codec copy of the dataset needs h264: use h264" in reason
    assert frames_of(tmp_path / "copy") == [(n, n) for n in range(60)]
    assert convert(bags, tmp_path / "both").ok
    assert frames_of(tmp_path / "both") == [(n, n) for n in range(60)] * 2


def test_the_guess_takes_it(tmp_path):
    path = record(tmp_path / "a.mcap", "h265", placed(encode("h265", 60)))
    report = penstock.convert(path, tmp_path / "out", **QUIET)
    assert report.ok, report.text()
    picture = next(iter(Dataset(tmp_path / "out").episode(0).frames()))[KEY]
    assert picture.shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0\0\1", b"\0\0\1\x65\x88", bytes(range(256)), b"\xff" * 99],
    ids=["empty", "a start code", "a unit", "bytes", "ones"],
)
@pytest.mark.parametrize("codec", ["h264", "h265", "av1", "vp9", "theora"])
def test_bytes_that_are_no_video(tmp_path, codec, data):
    path = record(tmp_path / "a.mcap", codec, [(n, Packet(data, n, False)) for n in range(5)])
    with pytest.raises(DataError, match=r"a.mcap: /cam.*(key frame|packet)"):
        convert(path, tmp_path / "out")


def test_damaged_packets_give_held_pictures_or_their_own(tmp_path):
    """Whatever happens to the bytes: every row is there, and no traceback."""
    chance = random.Random(5)
    packets = []
    for place, packet in placed(encode("h264", 200, key_every=20)):
        data = bytearray(packet.data)
        if place > 5 and chance.random() < 0.2:
            data[chance.randrange(5, len(data))] ^= 1 << chance.randrange(8)
        packets.append((place, Packet(bytes(data), packet.shows, is_key("h264", data))))
    path = record(tmp_path / "a.mcap", "h264", packets)
    report = convert(path, tmp_path / "out")
    assert report.ok, report.text()
    assert [row for row, _ in frames_of(tmp_path / "out")] == list(range(200))


def test_a_size_beyond_any_camera_is_refused_before_it_is_given_memory(tmp_path):
    encoder = av.CodecContext.create("libx264", "w")
    encoder.width, encoder.height, encoder.pix_fmt = 8192, 4096, "yuv420p"
    encoder.time_base, encoder.options = Fraction(1, 30), {"preset": "ultrafast"}
    frame = av.VideoFrame(8192, 4096, "yuv420p")
    frame.pts = 0
    (data,) = [bytes(p) for p in [*encoder.encode(frame), *encoder.encode(None)]]
    path = record(tmp_path / "a.mcap", "h264", [(n, Packet(data, n, True)) for n in range(3)])
    with pytest.raises(DataError, match="/cam: the packet cannot be decoded"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize("kind", ["h264 with B-frames", "h265", "av1", "vp9"])
def test_hostile_packets(kind):
    """Pictures or one clear error, whatever the bytes; a number is given at most once."""
    codec = kind.split()[0]
    packets = encode(kind, 40, key_every=10)
    for case in range(60):
        rng = np.random.default_rng([7, case])
        decoder, numbers = PacketDecoder(codec), []
        for number, packet in enumerate(packets):
            data = mutate(packet.data, rng) if rng.random() < 0.2 else packet.data
            with suppress(DataError):
                numbers += [n for n, _ in decoder.decode(number, data)]
        with suppress(DataError):
            numbers += [n for n, _ in decoder.flush()]
        assert set(numbers) <= set(range(40))
        assert len(numbers) == len(set(numbers))


@pytest.mark.stress
@needs_copies
@pytest.mark.parametrize("kind", ENCODERS)
def test_campaign_of_many_frames(tmp_path, kind):
    """100,000 frames in all: random key frames, late starts, holes, both ways of storing them."""
    done = 0
    for seed in range(6):
        chance = random.Random(f"{kind} {seed}")
        count = 2800
        key_every = chance.choice([1, 5, 30, 120])
        packets = encode(kind, count, key_every)
        late = chance.randrange(0, 40) if key_every < 120 else 0
        pauses = np.cumsum(np.array([chance.random() < 0.002 for _ in range(count)]) * 90)
        by_show = kind.endswith("B-frames")
        kept = packets[late:]
        start = next(k for k, packet in enumerate(kept) if packet.is_key)
        floor = kept[start].shows
        places = [
            (p.shows + int(pauses[p.shows]), Packet(p.data, p.shows + int(pauses[p.shows]), p[2]))
            for p in kept
        ]
        path = record(tmp_path / f"{seed}.mcap", kind.split()[0], places)
        seen = decoded(kind, packets)
        truth = {p.shows + int(pauses[p.shows]): seen[p.shows] for p in packets}
        for codec in ("h264", "copy"):
            out = tmp_path / f"{seed}-{codec}"
            report = convert(path, out, codec=codec, clock="header" if by_show else "bag")
            assert report.ok, report.text()
            frames = frames_of(out)
            assert [truth[row] for row, _ in frames] == [picture for _, picture in frames]
            assert len(frames) >= sum(p.shows >= floor for p in kept[start:]) - 2
            done += len(frames)
    assert done > 6 * 2 * 2700
