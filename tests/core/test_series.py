"""The codec of time series, compiled and in numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.core import series
from penstock.core.codecs import from_config
from penstock.core.series import Series
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
def test_kernel_and_numpy_write_the_same_bytes(words):
    marks, planes = series.take_apart(words)
    slow_marks, slow_planes = series.slow_take_apart(words)
    assert (marks == slow_marks).all()
    assert all((a == b).all() for a, b in zip(planes, slow_planes, strict=True))
    for put in (series.put_together, series.slow_put_together):
        out = np.full_like(words, 77)
        assert put(slow_marks, slow_planes, out)
        assert (out == words).all()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.binary(min_size=5, max_size=5), st.integers(0, 41))
def test_a_bitmap_that_does_not_fit_is_noticed_by_both(size, bitmap, count):
    marks = np.frombuffer(bitmap, np.uint8)[: -(-size // 8)].copy()
    planes = [np.ones(count, np.uint8)] * 4
    fits = int(np.unpackbits(marks).sum()) == count and not (
        np.unpackbits(marks, bitorder="little")[size:].any()
    )
    assert series.put_together(marks, planes, np.empty(size, np.uint32)) == fits
    assert series.slow_put_together(marks, planes, np.empty(size, np.uint32)) == fits


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
