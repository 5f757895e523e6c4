"""The codec of time series, compiled and in numpy."""

import contextlib
import struct
import zlib
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.core.codecs import Series, from_config, series
from penstock.core.codecs.base import UNSIGNED
from penstock.errors import CorruptFile, UsageError

DTYPES = [np.uint8, np.int16, np.float16, np.float32, np.int64, np.float64, np.complex64, bool]


def round_trip(values, codec=None):
    codec = codec or Series()
    data = b"".join(bytes(part) for part in codec.encode(values))
    out = np.empty_like(values)
    from_config(codec.config()).decode(memoryview(data), out)
    assert out.tobytes() == values.tobytes()
    return data


@pytest.mark.parametrize("level", [0, 1, 2, 9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 63, 1000])
def test_every_type_comes_back(level, dtype, count):
    rng = np.random.default_rng(count)
    values = rng.integers(0, 255, count * np.dtype(dtype).itemsize, dtype=np.uint8)
    values = (
        values.view(np.bool_ if dtype is bool else dtype)
        if dtype is not bool
        else (values[:count] > 128)
    )
    values = values.copy()
    values[rng.random(values.size) < 0.5] = 0
    round_trip(values, Series(level))
    round_trip(np.zeros(count, dtype), Series(level))


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from([np.uint16, np.uint32, np.uint64]),
        st.integers(0, 70),
        elements=st.one_of(st.just(0), st.integers(0, 2**16 - 1)),
        fill=st.just(0),
    )
)
def test_kernel_and_numpy_mean_the_same(words):
    for encode in (Series(1).encode, lambda words: series._encode_slowly(words, 2)):
        for decode in (Series(1).decode, series._decode_slowly):
            out = np.full_like(words, 77)
            decode(memoryview(b"".join(encode(words))), out)
            assert (out == words).all()


def raw_series(marks, planes):
    """Write a series by hand, nothing compressed."""
    parts = [struct.pack("<I", planes[0].size)]
    for piece in (marks, *planes):
        parts += [struct.pack("<BI", 0, piece.size), piece.tobytes()]
    return b"".join(parts)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.binary(min_size=5, max_size=5), st.integers(0, 41))
def test_a_bitmap_that_does_not_fit_is_noticed_by_both(size, bitmap, count):
    marks = np.frombuffer(bitmap, np.uint8)[: -(-size // 8)].copy()
    planes = [np.ones(count, np.uint8)] * 4
    fits = int(np.unpackbits(marks).sum()) == count and not (
        np.unpackbits(marks, bitorder="little")[size:].any()
    )
    data = memoryview(raw_series(marks, planes))
    for decode in (Series().decode, series._decode_slowly):
        out = np.empty(size, np.uint32)
        with contextlib.nullcontext() if fits else pytest.raises(CorruptFile):
            decode(data, out)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_decode_alike_with_and_without_kernels(data):
    """Damage of any kind: both refuse it, or both give the same."""
    values = np.where(np.arange(100) % 3 == 0, np.arange(100) + 1000, 0).astype(np.float32)
    good = b"".join(map(bytes, Series(data.draw(st.sampled_from([1, 2]))).encode(values)))
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    bad = bad[: data.draw(st.integers(0, len(bad)))] if data.draw(st.booleans()) else bad
    found = []
    for decode in (Series().decode, series._decode_slowly):
        out = np.empty(100, np.uint32)
        try:
            decode(memoryview(bytes(bad)), out)
            found.append(out.tobytes())
        except CorruptFile:
            found.append(None)
    assert found[0] == found[1]


@pytest.mark.skipif(find_spec("numba") is None, reason="numba compiles this call")
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("dtype", [np.uint16, np.float32, np.float64])
def test_blocks_are_decoded_turned_and_checked_in_one_call(level, dtype):
    rng = np.random.default_rng(0)
    rows = (rng.random((9, 5, 16)) * (rng.random((9, 5, 16)) < 0.5) * 100).astype(dtype)
    codec = Series(level)
    cut = [rows[:4], rows[4:8], rows[8:]]
    coded = [b"".join(map(bytes, codec.encode(part.reshape(-1)))) for part in cut]
    crcs = [zlib.crc32(part.tobytes()) for part in cut]
    data = np.frombuffer(b"".join(coded), np.uint8)
    sizes, counts = [len(part) for part in coded], [part.size for part in cut]
    out = np.empty(rows.size, UNSIGNED[rows.itemsize])
    assert codec.decode_blocks(data, sizes, counts, crcs, (5, 16), out)
    assert (out.view(dtype).reshape(9, 16, 5) == rows.transpose(0, 2, 1)).all()
    assert codec.decode_blocks(data, sizes, counts, [-1] * 3, (0, 0), out)
    assert (out.view(dtype).reshape(rows.shape) == rows).all()
    crcs[1] ^= 1
    assert not codec.decode_blocks(data, sizes, counts, crcs, (5, 16), out)


def test_lidar_over_time_gets_much_smaller_than_with_planes_alone():
    from penstock.core.codecs import Planes

    rng = np.random.default_rng(0)
    distance = 2 + np.cumsum(rng.normal(0, 0.003, (200, 32)), axis=1)
    distance[rng.random(200) < 0.6] = 0
    values = distance.astype(np.float32).reshape(-1)
    planes = sum(memoryview(part).nbytes for part in Planes().encode(values))
    assert len(round_trip(values)) < 0.9 * planes


def test_damage_is_noticed_or_changes_the_values():
    values = np.where(np.arange(400) % 3 == 0, np.arange(400), 0).astype(np.float32)
    data = bytearray(round_trip(values))
    silent = 0
    for at in range(len(data)):
        for bit in (0, 7):
            data[at] ^= 1 << bit
            out = np.empty_like(values)
            try:
                Series().decode(memoryview(bytes(data)), out)
                silent += out.tobytes() == values.tobytes()  # the pack's checksum finds the others
            except CorruptFile:
                pass
            data[at] ^= 1 << bit
    # An unused header bit of a zstd frame may be the same data; hardly any is.
    assert silent <= len(data) // 20


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 8, b"\0" * 9, b"\1\0\0\0\xff\xff\0\0"])
def test_nonsense_is_refused(data):
    with pytest.raises(CorruptFile):
        Series().decode(memoryview(data), np.empty(100, np.float32))


def test_level_is_checked():
    with pytest.raises(UsageError, match="level"):
        Series(level=99)
