"""Codecs: exact round trips, the bound of the lossy one, and garbage that is only ever refused."""

from __future__ import annotations

import itertools
import json
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from penstock.core.codecs import (
    Codec,
    Delta,
    Layout,
    Lz4,
    Planes,
    Quantize,
    Raw,
    Zstd,
    from_config,
    zstd,
)
from penstock.errors import CorruptFile, UnsupportedValue, UsageError

QUICK = settings(deadline=None, max_examples=150)
DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
PLAIN: list[Codec] = [
    Raw(),
    Lz4(),
    Lz4(9),
    Zstd(),
    Zstd(1),
    Zstd(19),
    *(Planes("zstd", level) for level in (0, 1, 2, 3)),
    Planes("lz4"),
]
CODECS = [*PLAIN, *(Delta(inner) for inner in PLAIN), Delta()]
plain_codecs = st.sampled_from(PLAIN)
codecs = st.sampled_from(CODECS)


def label(codec: Codec) -> str:
    return json.dumps(codec.config())


def encoded(codec: Codec, values: NDArray[Any], base: NDArray[Any] | None = None) -> bytes:
    return b"".join(codec.encode(values, base))


def bits(values: NDArray[Any]) -> bytes:
    """The bytes themselves: NaN payloads and the sign of zero count."""
    return values.tobytes()


@st.composite
def bit_patterns(draw: st.DrawFn, max_size: int = 300) -> NDArray[Any]:
    """Any bits of any type, so also signalling NaNs, subnormals and -0.0."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    size = draw(st.sampled_from([0, 1, 2, 3, 7, 8, 63, 64, 65, 255, max_size]))
    how = draw(st.sampled_from(["random", "zeros", "ones", "smooth", "own"]))
    count = size * dtype.itemsize
    if how == "smooth":
        return np.arange(size).astype(dtype)
    if how == "own":
        raw = draw(st.binary(min_size=count, max_size=count))
    elif how == "random":
        raw = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(count)
    else:
        raw = (b"\0" if how == "zeros" else b"\xff") * count
    words = np.frombuffer(raw, np.uint8)
    return words > 127 if dtype.kind == "b" else words.view(dtype)


def check_round_trip(codec: Codec, values: NDArray[Any], base: NDArray[Any] | None) -> None:
    before = bits(values)
    data = encoded(codec, values, base)
    assert bits(values) == before, "encoding changed its input"
    out = np.empty_like(values)
    codec.decode(memoryview(data), out, base)
    assert bits(out) == before


# --- round trips -------------------------------------------------------------------------------


@QUICK
@given(codec=codecs, values=bit_patterns(), base_seed=st.integers(0, 2**32))
def test_every_bit_comes_back(codec: Codec, values: NDArray[Any], base_seed: int) -> None:
    base = None
    if codec.needs_base:
        base = np.frombuffer(np.random.default_rng(base_seed).bytes(values.nbytes), np.uint8)
        base = base.view(np.uint8 if values.dtype.kind == "b" else values.dtype)
    check_round_trip(codec, values, base)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_every_codec_with_every_type(codec: Codec, dtype: str) -> None:
    random = np.random.default_rng(0)
    for size in (0, 1, 5, 1024, 1025):
        raw = random.integers(0, 256, size * np.dtype(dtype).itemsize, np.uint8)
        values = (raw > 127) if dtype == "bool" else raw.view(dtype)
        check_round_trip(codec, values, np.roll(values, 1) if codec.needs_base else None)
        check_round_trip(codec, values, values.copy() if codec.needs_base else None)


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_a_whole_block_of_weights(codec: Codec) -> None:
    values = weights(1 << 18)
    base = values + np.float32(1e-6) if codec.needs_base else None
    check_round_trip(codec, values, base)


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_special_floats_keep_their_payload(codec: Codec) -> None:
    patterns = [0x7FC00001, 0xFFC0BEEF, 0x7F800001, 0x80000000, 0, 0x7F800000, 0xFF800000, 1]
    values = np.array(patterns, np.uint32).view(np.float32)
    check_round_trip(codec, values, values[::-1].copy() if codec.needs_base else None)


@QUICK
@given(data=st.data())
def test_delta_against_any_base(data: st.DataObject) -> None:
    words = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])
    dtype = data.draw(words)
    values = data.draw(hnp.arrays(dtype, 33))
    base = data.draw(hnp.arrays(dtype, 33))
    check_round_trip(Delta(data.draw(plain_codecs)), values, base)


def test_delta_of_equal_arrays_is_tiny_and_of_close_ones_smaller() -> None:
    values = weights(1 << 16)
    full = len(encoded(Planes(), values))
    assert len(encoded(Delta(), values, values.copy())) < values.nbytes // 1000
    close = values * np.float32(1 + 1e-6)
    assert len(encoded(Delta(), close, values)) < 0.7 * full


def test_delta_needs_a_base_of_its_size() -> None:
    values = np.zeros(4, np.float32)
    for base in (None, np.zeros(3, np.float32)):
        with pytest.raises(UsageError, match="base"):
            Delta().encode(values, base)
        with pytest.raises(UsageError, match="base"):
            Delta().decode(memoryview(b""), values, base)


# --- sizes -------------------------------------------------------------------------------------


def weights(count: int) -> NDArray[np.float32]:
    return (np.random.default_rng(1).standard_normal(count) * 0.02).astype(np.float32)


def test_planes_beat_plain_zstd_on_weights() -> None:
    values = weights(1 << 18)
    planes = len(encoded(Planes(), values))
    assert planes < 0.86 * values.nbytes
    for level in (1, 3, 9):
        assert planes < 0.96 * len(encoded(Zstd(level), values))
    words = (values.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16
    assert len(encoded(Planes(), words)) < 0.70 * words.nbytes


@QUICK
@given(codec=plain_codecs, values=bit_patterns())
def test_an_encoding_is_never_much_larger(codec: Codec, values: NDArray[Any]) -> None:
    assert len(encoded(codec, values)) <= values.nbytes + values.nbytes // 100 + 64


# --- the caller's memory -----------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_decode_fills_the_memory_of_the_caller_and_no_more(codec: Codec) -> None:
    values = weights(1001)
    base = values[::-1].copy() if codec.needs_base else None
    arena = np.full(1003, 7, np.float32)
    codec.decode(memoryview(encoded(codec, values, base)), arena[1:1002], base)
    assert bits(arena[1:1002]) == bits(values)
    assert arena[0] == arena[1002] == 7
    if base is not None:
        assert bits(base) == bits(values[::-1])


# --- bounded error -----------------------------------------------------------------------------


@QUICK
@given(
    values=hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        st.integers(0, 60),
        elements=st.floats(-1e4, 1e4, width=16),
    ),
    epsilon=st.floats(1e-6, 1e3),
    inner=plain_codecs,
)
def test_quantize_keeps_its_bound(values: NDArray[Any], epsilon: float, inner: Codec) -> None:
    codec = Quantize(epsilon, inner)
    try:
        data = encoded(codec, values)
    except UnsupportedValue:
        return  # refused, not broken
    out = np.full_like(values, np.nan)
    codec.decode(memoryview(data), out)
    assert np.abs(out.astype(np.float64) - values).max(initial=0.0) <= epsilon


@QUICK
@given(
    values=hnp.arrays(np.float64, st.integers(1, 20), elements=st.floats(allow_nan=False)),
    epsilon=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
)
def test_quantize_keeps_its_bound_at_the_edge(values: NDArray[Any], epsilon: float) -> None:
    try:
        codec = Quantize(epsilon)
        data = encoded(codec, values)
    except (UnsupportedValue, UsageError):
        return
    out = np.empty_like(values)
    codec.decode(memoryview(data), out)
    assert np.abs(out - values).max() <= epsilon


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_quantize_takes_values_between_two_steps(dtype: str) -> None:
    # On a grid of exactly 2 * epsilon the float type's own rounding would break the bound here.
    values = np.linspace(-1, 1, 10_001).astype(dtype)
    out = np.empty_like(values)
    Quantize(0.1).decode(memoryview(encoded(Quantize(0.1), values)), out)
    assert np.abs(out.astype(np.float64) - values).max() <= 0.1


def test_quantize_is_used_and_small() -> None:
    values = weights(1 << 16)
    data = encoded(Quantize(1e-4), values)
    out = np.empty_like(values)
    Quantize(1e-4).decode(memoryview(data), out)
    assert np.abs(out.astype(np.float64) - values).max() <= 1e-4
    assert len(data) < 0.4 * values.nbytes
    wide = values * np.float32(1e4)  # more than 16 bits of steps
    check = np.empty_like(wide)
    Quantize(1e-3).decode(memoryview(encoded(Quantize(1e-3), wide)), check)
    assert np.abs(check.astype(np.float64) - wide).max() <= 1e-3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_quantize_refuses_what_it_cannot_hold(bad: float) -> None:
    with pytest.raises(UnsupportedValue):
        Quantize(1e-3).encode(np.array([0.0, bad]))


def test_quantize_refuses_a_bound_that_the_type_cannot_keep() -> None:
    with pytest.raises(UnsupportedValue, match="cannot keep"):
        Quantize(1.2).encode(np.arange(2048, 4096, 2).astype(np.float16))  # they lie 2 apart
    with pytest.raises(UnsupportedValue, match="floats only"):
        Quantize(1e-3).encode(np.arange(3))


@pytest.mark.parametrize(
    "epsilon", [0, -1.0, float("nan"), float("inf"), 1e308, 10**400, "1"], ids=itertools.count()
)
def test_quantize_refuses_a_senseless_epsilon(epsilon: Any) -> None:
    with pytest.raises(UsageError, match="epsilon"):
        Quantize(epsilon)


# --- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [*CODECS, Quantize(0.5), Quantize(3, Lz4(4))], ids=label)
def test_a_codec_is_rebuilt_from_its_config(codec: Codec) -> None:
    again = from_config(json.loads(json.dumps(codec.config())))
    assert type(again) is type(codec)
    assert again.config() == codec.config()
    assert (again.lossy, again.needs_base) == (codec.lossy, codec.needs_base)


def nested(depth: int) -> dict[str, Any]:
    config: dict[str, Any] = {"id": "raw"}
    for _ in range(depth):
        config = {"id": "delta", "inner": config}
    return config


@pytest.mark.parametrize(
    "config",
    [
        {},
        [],
        "zstd",
        None,
        7,
        {"id": None},
        {"id": "pickle"},
        {"id": ["zstd"]},
        {"id": "raw", "level": 1},
        {"id": "zstd", "level": 0},
        {"id": "zstd", "level": 23},
        {"id": "zstd", "level": "3"},
        {"id": "zstd", "level": 3.0},
        {"id": "zstd", "evil": 1},
        {"id": "lz4", "level": -1},
        {"id": "planes", "inner": "delta", "level": 1},
        {"id": "planes", "inner": {}, "level": 1},
        {"id": "delta"},
        {"id": "delta", "inner": None},
        {"id": "delta", "inner": "raw"},
        {"id": "quantize", "inner": {"id": "raw"}},
        {"id": "quantize", "epsilon": -1, "inner": {"id": "raw"}},
        {"id": "quantize", "epsilon": 10**400, "inner": {"id": "raw"}},
        {"id": "quantize", "epsilon": 1, "inner": {"id": "delta", "inner": {"id": "raw"}}},
        {"id": "delta", "inner": {"id": "quantize", "epsilon": 1, "inner": {"id": "raw"}}},
        nested(2),
        nested(5000),
    ],
    ids=itertools.count(),
)
def test_senseless_settings_are_a_corrupt_file(config: Any) -> None:
    with pytest.raises(CorruptFile):
        from_config(config)


@pytest.mark.parametrize("make", [lambda: Delta(Delta()), lambda: Delta(Quantize(1))])
def test_inner_codecs_are_plain(make: Any) -> None:
    with pytest.raises(UsageError, match="inner"):
        make()


# --- garbage -----------------------------------------------------------------------------------

READERS = [*CODECS, Quantize(0.1), Quantize(1e300, Raw())]


def decode_hostile(codec: Codec, data: bytes, size: int, dtype: str) -> None:
    """Decode bytes from anywhere: fine, or CorruptFile, and nothing else."""
    arena = np.full(size + 2, 1).astype(dtype)
    base = np.zeros(size, dtype) if codec.needs_base else None
    try:
        codec.decode(memoryview(data), arena[1:-1], base)
    except CorruptFile as error:
        assert "\n" not in str(error)
    assert arena[0] == arena[-1] == 1


@settings(deadline=None, max_examples=400)
@given(
    codec=st.sampled_from(READERS),
    data=st.binary(max_size=200),
    size=st.integers(0, 100),
    dtype=st.sampled_from(DTYPES),
)
def test_random_bytes_are_refused(codec: Codec, data: bytes, size: int, dtype: str) -> None:
    decode_hostile(codec, data, size, dtype)


@settings(deadline=None, max_examples=400)
@given(codec=st.sampled_from(READERS), size=st.integers(0, 200), data=st.data())
def test_mutated_encodings_are_refused_or_decoded(
    codec: Codec, size: int, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from(["float16", "float32", "float64"]))
    values = np.linspace(-1, 1, size).astype(dtype)
    mutated = bytearray(encoded(codec, values, np.zeros_like(values)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(mutated) - 1, 0)))
        how = data.draw(st.sampled_from(["flip", "cut", "insert", "huge"]))
        if how == "flip" and mutated:
            mutated[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del mutated[at:]
        elif how == "insert":
            mutated[at:at] = data.draw(st.binary(max_size=9))
        else:
            mutated[at : at + 4] = b"\xff" * 4
    decode_hostile(codec, bytes(mutated), size, dtype)


@pytest.mark.parametrize("codec", READERS, ids=label)
def test_every_truncation_is_refused(codec: Codec) -> None:
    values = np.linspace(-1, 1, 300).astype(np.float32)
    base = np.zeros_like(values) if codec.needs_base else None
    data = encoded(codec, values, base)
    for length in range(len(data)):
        with pytest.raises(CorruptFile):
            codec.decode(memoryview(data)[:length], np.empty_like(values), base)


def zstd_claiming(size_bytes: int) -> bytes:
    """A zstd frame with a content size of 8 bytes in its header, and one empty last block."""
    return struct.pack("<IBQ", 0xFD2FB528, 0xE0, size_bytes) + b"\x01\x00\x00"


def test_a_bomb_is_refused_before_memory_is_taken() -> None:
    bomb = zstd_claiming(10 * 10**9)
    assert zstd.get_frame_info(bomb).decompressed_size == 10 * 10**9
    plane = struct.pack("<4I", *[len(bomb)] * 4) + bomb * 4
    out = np.empty(1000, np.float32)
    attacks = [
        (Zstd(), bomb),
        (Planes(), plane),
        (Delta(Zstd()), bomb),
        (Delta(), plane),
        (Quantize(1, Zstd()), b"\x04" + bomb),
        (Planes(), struct.pack("<4I", *[2**32 - 1] * 4)),
        (Zstd(), zstd.compress(bytes(50_000_000))),
        (Lz4(), b"\xff" * 1000),
    ]
    tracemalloc.start()
    began = time.monotonic()
    try:
        for codec, data in attacks:
            with pytest.raises(CorruptFile):
                codec.decode(memoryview(data), out, np.zeros_like(out))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 5


def test_quantised_integers_are_refused() -> None:
    data = encoded(Quantize(1), np.ones(3))
    with pytest.raises(CorruptFile, match="floats"):
        Quantize(1).decode(memoryview(data), np.empty(3, np.int32))


# --- the GIL -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Zstd(), Planes(), Delta(), Lz4()], ids=label)
def test_other_threads_run_during_a_long_decode(codec: Codec) -> None:
    values = np.resize(weights(1 << 20), 16 << 20)
    base = np.zeros_like(values) if codec.needs_base else None
    data = memoryview(encoded(codec, values, base))
    out = np.empty_like(values)
    # On a noisy machine one try proves little; a decode that held the GIL would fail all of them.
    assert any(others_ran_during(lambda: codec.decode(data, out, base)) for _ in range(10))


def others_ran_during(work: Callable[[], None]) -> bool:
    """Tell whether another thread made steps during most of a call."""
    ticks: list[float] = []
    started, stop = threading.Event(), threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            started.set()
            time.sleep(0.0005)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        started.wait()
        began = time.perf_counter()
        work()
        ended = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    inside = [began, *(t for t in ticks if began < t < ended), ended]
    longest = max(later - earlier for earlier, later in itertools.pairwise(inside))
    return len(inside) > 5 and longest < 0.8 * (ended - began)


# --- layout ------------------------------------------------------------------------------------


@QUICK
@given(data=st.data())
def test_layout_undoes_itself(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    array = np.arange(int(np.prod(shape))).reshape(shape)
    layout = Layout(order)
    stored = array.transpose(order)
    back = layout.undo(stored)
    assert back.shape == array.shape
    assert np.array_equal(back, array)


@pytest.mark.parametrize("order", [(0, 0), (1,), (0, 2), (-1, 0)])
def test_a_layout_is_a_permutation(order: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="permutation"):
        Layout(order)
