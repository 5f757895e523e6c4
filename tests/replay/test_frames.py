"""Frames to bytes and back, by every codec."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptFile, UsageError
from penstock.replay import frames as module
from penstock.replay.frames import (
    BitFrames,
    GradientFrames,
    Lz4Frames,
    MixedFrames,
    NarrowFrames,
    RawFrames,
    SparseFrames,
    ZstdFrames,
    choose_codec,
    frame_codec,
)

RNG = np.random.default_rng(7)


def pictures(count=40, noise=0.0, side=84):
    rows, columns = np.mgrid[0:side, 0:side]
    out = np.empty((count, side, side), np.uint8)
    for t in range(count):
        depth = 255 - np.clip((rows - 30) * 3.5, 0, 200)
        depth = np.where(abs(columns - (t * 2) % side) < 12, 60 + 0.2 * columns, depth)
        out[t] = np.clip(depth + RNG.normal(0, noise, depth.shape), 0, 255)
    return out


def decoded(codec, data, lengths, which):
    data = np.ascontiguousarray(data)
    starts = (np.cumsum(lengths) - lengths).astype(np.uint64) + np.uint64(data.ctypes.data)
    out = np.empty((len(which), codec.size), np.uint8)
    codec.decode(starts[which], lengths[which], out)
    return out


def codecs_for(size):
    found = [RawFrames(size), ZstdFrames(size), Lz4Frames(size), Lz4Frames(size, level=0)]
    for row in (3, 84):
        if row < size:
            found += [Lz4Frames(size, row), BitFrames(size, row), MixedFrames(size, row)]
    found += [BitFrames(size), MixedFrames(size)]
    if size % 4 == 0:
        found += [SparseFrames(size), NarrowFrames(size), NarrowFrames(size, 1, size // 8, 1)]
        found += [GradientFrames(size, row) for row in (1, 5, 21) if row <= size // 4]
    return found


KINDS = {
    "zeros": lambda n, size: np.zeros((n, size), np.uint8),
    "noise": lambda n, size: RNG.integers(0, 256, (n, size), dtype=np.uint8),
    "small": lambda n, size: RNG.integers(0, 3, (n, size), dtype=np.uint8),
    "sparse": lambda n, size: (
        RNG.integers(1, 256, (n, size), dtype=np.uint8)
        * np.repeat(RNG.random((n, -(-size // 4))) < 0.2, 4, axis=1)[:, :size]
    ),
    "ramp": lambda n, size: np.tile(np.arange(size) % 251, (n, 1)).astype(np.uint8),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 4, 63, 64, 65, 576, 7056])
def test_every_codec_gives_everything_back(kind, size):
    frames = KINDS[kind](9, size)
    which = np.array([8, 0, 3, 3, 5])
    for codec in codecs_for(size):
        data, lengths = codec.encode(frames)
        assert lengths.sum() == data.size <= frames.size
        again = frame_codec(codec.config())
        assert (decoded(again, data, lengths, which) == frames[which]).all(), codec.config()


ODD = [-0.0, float("nan"), float("inf"), -1.0, 256.0, 0.3, 1e-40, 1e30, 254.99998]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 255]),
    st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from(ODD))),
)
def test_floats_that_are_bytes_and_those_that_are_not(scale, seed, odd):
    """Whatever is in a frame comes back bit for bit, and a frame of bytes is kept as bytes."""
    values = np.random.default_rng(seed).integers(0, 256, (12, 80)).astype(np.float32)
    values /= np.float32(scale)
    for frame, value in odd:
        values[frame, 7] = value
    frames = values.view(np.uint8)
    for codec in (NarrowFrames(320, scale), NarrowFrames(320, scale, 8, 1)):
        data, lengths = codec.encode(frames)
        assert (decoded(codec, data, lengths, np.arange(12)) == frames).all()
        good = np.isin(np.arange(12), [frame for frame, _ in odd], invert=True)
        assert (lengths[good] <= 80).all()


@pytest.mark.parametrize("scale", [1, 255])
def test_every_byte_is_widened_as_a_division_would(scale):
    levels = np.arange(256, dtype=np.float32)[None] / np.float32(scale)
    codec = NarrowFrames(1024, scale)
    _, exact = codec.narrowed(levels.view(np.uint8))
    assert exact.all()
    data, lengths = codec.encode(np.repeat(levels, 2, axis=0).view(np.uint8))
    assert (decoded(codec, data, lengths, np.arange(2)).view(np.float32) == levels).all()


def test_float_pictures_are_kept_as_bytes():
    small = choose_codec(pictures()).encode(pictures().reshape(40, -1))[1].sum()
    for values in (pictures() / np.float32(255), pictures().astype(np.float32)):
        codec = choose_codec(values)
        assert codec.id == "narrow"
        assert codec.encode(values.reshape(40, -1).view(np.uint8))[1].sum() < 1.2 * small
    assert choose_codec(pictures() * np.float32(0.37)).id == "lz4"
    for level in (0, 1):  # black or white frames first: nothing is known of the others
        assert choose_codec(np.full((40, 84, 84), level, np.float32)).id != "narrow"


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 200), st.integers(0, 12), st.binary(min_size=1, max_size=600))
def test_any_bytes_come_back(size, count, content):
    flat = np.resize(np.frombuffer(content, np.uint8), size * count)
    frames = flat.reshape(count, size)
    for codec in codecs_for(size):
        data, lengths = codec.encode(frames)
        assert (decoded(codec, data, lengths, np.arange(count)) == frames).all()


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_nonsense_never_leaves_its_memory(data):
    """Random bytes decode to something or are refused; nothing beyond the frame is touched."""
    size = data.draw(st.sampled_from([4, 64, 100, 576]))
    codec = data.draw(st.sampled_from(codecs_for(size)))
    junk = np.frombuffer(data.draw(st.binary(min_size=1, max_size=size)), np.uint8).copy()
    guarded = np.full((3, size), 0xA5, np.uint8)
    try:
        codec.decode(np.array([junk.ctypes.data], np.uint64), np.array([junk.size]), guarded[1:2])
    except CorruptFile as error:
        assert codec.id in str(error)
    assert (guarded[0] == 0xA5).all()
    assert (guarded[2] == 0xA5).all()


@pytest.mark.parametrize("length", [0, -1, 577, 10_000])
def test_a_wrong_length_is_refused(length):
    memory = np.zeros(10_000, np.uint8)
    for codec in codecs_for(576):
        with pytest.raises(CorruptFile):
            codec.decode(
                np.array([memory.ctypes.data], np.uint64),
                np.array([length]),
                np.empty((1, 576), np.uint8),
            )


def test_auto_takes_what_suits_the_data():
    assert choose_codec(pictures()).config() == {"id": "mixed", "size": 84 * 84, "row": 84}
    lidar = np.where(RNG.random((50, 36, 4)) < 0.6, 0, RNG.random((50, 36, 4))).astype(np.float32)
    assert choose_codec(lidar).id == "sparse"
    assert choose_codec(RNG.random((50, 100))).id == "raw"
    assert choose_codec(np.zeros((50, 3), np.float32)).id == "raw"  # too small to be worth it


@pytest.mark.parametrize(("wanted", "noise"), [("lz4hc", 0.0), ("auto", 1.5)])
def test_smaller_than_zlib_on_depth(wanted, noise):
    import zlib

    frames = pictures(noise=noise)
    codec = choose_codec(frames, wanted)
    used = codec.encode(frames.reshape(len(frames), -1))[1].sum()
    assert used < sum(len(zlib.compress(frame.tobytes(), 3)) for frame in frames)


def test_later_frames_may_be_of_another_scene():
    """What was chosen from clean pictures is as small on others as what is chosen for them."""
    codec = choose_codec(pictures())
    rows, columns = np.mgrid[0:84, 0:84]
    curved = (rows * columns // 40 + np.arange(20)[:, None, None]).astype(np.uint8)
    for frames in (pictures(noise=1.5), curved, pictures().transpose(0, 2, 1).copy()):
        flat = frames.reshape(len(frames), -1)
        used = codec.encode(flat)[1].sum()
        for name in ("lz4", "bits"):
            other = choose_codec(frames, name).encode(flat)[1].sum()
            assert used <= 1.02 * other + len(frames)


def test_auto_takes_a_third_of_clean_depth_at_most():
    frames = pictures()
    used = choose_codec(frames).encode(frames.reshape(len(frames), -1))[1].sum()
    assert used * 3 < frames.size


@pytest.mark.parametrize("least", [3.0, 1.2])
def test_depth_in_metres(least):
    """Float32 that are no bytes: smooth surfaces, and with noise on every value."""
    rows, columns = np.mgrid[0:84, 0:84]
    clean = np.stack([2 + 0.01 * rows + 0.1 * np.sin(columns / 20 + t) for t in range(20)])
    noise = RNG.normal(0, 0.02, clean.shape) if least < 2 else 0
    sample = (clean + noise).astype(np.float32)
    codec = choose_codec(sample)
    _, lengths = codec.encode(sample.reshape(20, -1).view(np.uint8))
    assert codec.id == "gradient"
    assert sample.nbytes > least * lengths.sum()


@pytest.mark.parametrize("layout", ["chw", "hwc"])
def test_colour_pictures_find_the_row_above(layout):
    grey = pictures(20, side=64)
    stacked = np.stack([grey, grey // 2, grey // 3], axis=1)
    sample = stacked if layout == "chw" else np.ascontiguousarray(stacked.transpose(0, 2, 3, 1))
    codec = choose_codec(sample)
    assert codec.config()["row"] == (64 if layout == "chw" else 192)


def test_a_name_is_obeyed_or_refused():
    sample = pictures(5)
    for name in ("raw", "lz4", "bits", "sparse", "zstd"):
        assert choose_codec(sample, name).id == name
    with pytest.raises(UsageError, match="did you mean 'lz4'"):
        choose_codec(sample, "lz5", "obs")
    with pytest.raises(UsageError, match="sparse cannot hold"):
        choose_codec(np.zeros((5, 3), np.uint8), "sparse", "obs")
    config = choose_codec(sample, "lz4").config()
    assert frame_codec(config).config() == config


@pytest.mark.parametrize(
    "config",
    [{}, {"id": "x"}, {"id": "lz4"}, {"id": "lz4", "size": -1}, {"id": "lz4", "size": "4"},
     {"id": "sparse", "size": 3}, {"id": "raw", "size": 4, "more": 1}, {"id": "raw", "size": True},
     {"id": "gradient", "size": 8, "row": 0}, {"id": "gradient", "size": 6}],
)  # fmt: skip
def test_settings_from_a_file_are_checked(config):
    with pytest.raises(CorruptFile):
        frame_codec(config)


def test_names_are_complete():
    assert set(module.CODEC_NAMES) == {"auto", "lz4hc", *module._KINDS}
