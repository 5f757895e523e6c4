"""The decision alone: hand-made measurements, and what must never turn around."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.advisor import (
    Advice,
    CodecMeasure,
    KeyMeasure,
    Limits,
    Machine,
    Measurements,
    decide,
)
from penstock.advisor.decide import parse_rate
from penstock.errors import UsageError

MB = 10**6


def key(
    name="x",
    size=100 * MB,
    stored=3.0,
    memory=2.0,
    speed=500.0 * MB,
    batch=None,
    delta=None,
    **more,
):
    def codec(ratio):
        return None if ratio is None else CodecMeasure("c", ratio, speed, 2 * speed)

    values = {
        "path": (name,),
        "writer": "rollouts",
        "dtype": "float32",
        "shape": (1000, size // 4000),
        "raw_bytes": size,
        "memory_bytes": size,
        "sampled_bytes": size,
        "stored": codec(stored),
        "memory": codec(memory),
        "batch": codec(batch),
        "delta": codec(delta),
        "bound": 4.0,
    }
    return KeyMeasure(**(values | more))


def measured(*keys, on_disk=True, frames=1000, **more):
    values = {
        "kind": "rollouts" if on_disk else "TensorDict",
        "where": "rollouts" if on_disk else "",
        "frames": frames,
        "environments": 0,
        "overhead_bytes": 0,
        "disk_bytes": 0,
        "keys": list(keys) or [key()],
        "machine": Machine(2, 16 * 10**9, 5e9, 200e6),
    }
    return Measurements(**(values | more))


def verdict(measurements, **limits):
    return decide(measurements, Limits(**limits)).verdict


def advice(measurements, **limits):
    limits = Limits(**limits)
    return Advice(measurements, limits, decide(measurements, limits))


def test_what_lies_on_a_disk_and_shrinks_is_compressed():
    assert verdict(measured()) == "B"


def test_what_hardly_shrinks_is_left_alone():
    assert verdict(measured(key(stored=1.29))) == "A"
    assert verdict(measured(key(stored=1.301))) == "B"


def test_the_whole_counts_not_the_keys():
    noise, zeros = key("noise", 90 * MB, 1.0), key("zeros", 10 * MB, 100.0)
    decision = decide(measured(noise, zeros), Limits())
    assert decision.verdict == "A"
    assert decision.pays == ("zeros",)
    assert "only zeros would gain" in advice(measured(noise, zeros)).why[1]


def test_headers_count():
    assert verdict(measured(key(size=1000, stored=3.0), overhead_bytes=2000)) == "A"


def test_what_is_in_memory_and_fits_is_left_alone():
    data = measured(on_disk=False)
    assert verdict(data) == "A"
    assert verdict(data, memory=200 * MB, reuse=4) == "A"
    assert verdict(data, bandwidth=10.0 * MB) == "B"


def test_what_does_not_fit_is_compressed_in_memory():
    assert verdict(measured(), memory=99 * MB) == "C"
    assert verdict(measured(on_disk=False), memory=99 * MB) == "C"
    assert verdict(measured(), memory=100 * MB) == "B"


def test_what_does_not_fit_compressed_either_spills():
    assert not decide(measured(), Limits(memory=60 * MB)).spill
    spilled = advice(measured(), memory=59 * MB)
    assert spilled.decision.spill
    assert 'spill_dir="spill"' in spilled.settings[0]
    assert "spill_dir" in spilled.why[1]


def test_what_neither_fits_nor_shrinks_needs_another_remedy():
    found = advice(measured(key(stored=1.0, memory=1.0)), memory=10 * MB)
    assert found.verdict == "A"
    assert "at most 100 frames, a spill_dir, or more memory" in found.why[1]


@pytest.mark.parametrize("memory", [1.1, 2.0, 5.0])
def test_batches_are_compressed_as_batches_first(memory):
    found = advice(measured(key(memory=memory, batch=3.0), environments=10), memory=50 * MB)
    assert (found.verdict, found.ratio) == ("C", pytest.approx(3.0))
    assert (found.decision.form, found.decision.fits) == ("batch", True)
    assert found.settings[0] == (
        f"CompressedDataCollector(collector, compression_level=1, cache_bytes={16_666_666})"
    )
    assert found.settings[1].startswith("DictReplayBuffer(") is (memory >= 1.3)
    assert "as compressed batches they take 33.3 MB" in found.why[1]


def test_batches_that_hardly_shrink_leave_the_buffer():
    found = advice(measured(key(memory=2.0, batch=1.2), environments=10), memory=60 * MB)
    assert (found.verdict, found.ratio, found.decision.form) == ("C", pytest.approx(2.0), "buffer")
    assert found.settings[0].startswith("DictReplayBuffer(")


def test_batches_that_do_not_fit_compressed_either():
    found = advice(measured(key(batch=3.0), environments=10), memory=33 * MB)
    assert not found.decision.fits
    assert "keep fewer of them, or a replay buffer with a spill_dir" in found.why[1]


def checkpoints(stored, delta, on_disk=True):
    weights = key("w", stored=stored, delta=delta, memory=None, writer="checkpoint")
    return measured(weights, on_disk=on_disk, frames=0, delta_every=10 if delta else 0)


@pytest.mark.parametrize(
    ("stored", "delta", "verdict_", "every"),
    [
        (1.2, 1.25, "A", 0),
        (1.25, 1.31, "B", 10),  # reaches what full ones do not
        (1.2, 3.0, "B", 10),
        (1.5, 1.6, "B", 0),  # a chain of files for 7 % is not worth it
        (1.5, 1.7, "B", 10),
        (1.4, 1.2, "B", 0),
    ],
)
def test_differences_between_checkpoints(stored, delta, verdict_, every):
    found = advice(checkpoints(stored, delta))
    assert (found.verdict, found.decision.delta_every) == (verdict_, every)
    expected = delta if every else stored
    assert found.decision.ratio_stored == pytest.approx(expected)
    assert ("delta_every=10" in found.settings[0]) is bool(every)
    assert ("checkpoint_delta_every=10" in found.settings[1]) is bool(every)
    assert "note:" not in found.text()


def test_of_one_checkpoint_differences_are_unknown():
    found = advice(checkpoints(1.2, None))
    assert (found.verdict, found.decision.ratio_delta) == ("A", None)
    assert found.settings[0] == 'AsyncCheckpointSaver("checkpoints", compress=False)'
    [note] = found.to_json()["notes"]
    assert "delta_every" in note
    assert f"note: {note}" in found.text()


def test_of_a_small_device_the_smaller_batch_is_named_first():
    found = advice(measured(environments=100), device_memory=25 * MB)
    assert found.verdict == "C"
    assert "first try a batch of 25 environments x 10 steps" in found.why[1]


def test_a_fast_link_needs_no_compression():
    even = decide(measured(), Limits(bandwidth=1e6)).break_even.bandwidth_bytes_s
    # r = 3, c = 500 MB/s, d = 1 GB/s: (1 - 1/3) / (1/500 + 1/1000) MB/s
    assert even == pytest.approx(2 / 3 / (1 / 500 + 1 / 1000) * MB)
    assert verdict(measured(), bandwidth=even * 1.01) == "A"
    assert verdict(measured(), bandwidth=even * 0.99) == "B"


def test_at_the_break_even_both_ways_take_equally_long():
    decision = decide(measured(), Limits(reuse=3))
    b, c, d, r = decision.break_even.bandwidth_bytes_s, 500 * MB, 1000 * MB, 3
    assert 1 / b == pytest.approx(1 / c + 1 / (r * b) + 3 / d)


def test_the_uses_up_to_which_it_pays():
    decision = decide(measured(), Limits(bandwidth=100.0 * MB))
    n = decision.break_even.uses
    saved = (1 - 1 / 3) / (100 * MB) - 1 / (500 * MB)
    assert n / (1000 * MB) <= saved < (n + 1) / (1000 * MB)


keys = st.builds(
    key,
    size=st.integers(1000, 10**9),
    stored=st.floats(0.9, 50),
    memory=st.none() | st.floats(0.9, 50),
    batch=st.none() | st.floats(0.9, 50),
    delta=st.none() | st.floats(0.9, 50),
    speed=st.floats(1e6, 1e10),
)
data = st.builds(
    lambda items, on_disk: measured(
        *(dataclasses.replace(k, path=(str(i),)) for i, k in enumerate(items)),
        on_disk=on_disk,
        delta_every=10 if any(k.delta for k in items) else 0,
        notes=["one"],
    ),
    st.lists(keys, min_size=1, max_size=4),
    st.booleans(),
)
sizes = st.none() | st.integers(1, 10**10)
limits = st.builds(
    Limits,
    memory=sizes,
    bandwidth=st.none() | st.floats(1e3, 1e11),
    reuse=st.none() | st.integers(1, 100),
    device_memory=sizes,
)


@settings(max_examples=60)
@given(data, limits, st.floats(0.01, 1))
def test_less_memory_keeps_c(found, given_, share):
    if given_.memory is None or decide(found, given_).verdict != "C":
        return
    less = dataclasses.replace(given_, memory=max(1, int(given_.memory * share)))
    assert decide(found, less).verdict == "C"


@settings(max_examples=60)
@given(data, limits, st.floats(0.01, 1))
def test_a_slower_link_keeps_b(found, given_, share):
    if given_.bandwidth is None or decide(found, given_).verdict != "B":
        return
    slower = dataclasses.replace(given_, bandwidth=given_.bandwidth * share)
    assert decide(found, slower).verdict == "B"


@settings(max_examples=60)
@given(data, limits, st.floats(1, 10))
def test_a_higher_ratio_keeps_b(found, given_, factor):
    if decide(found, given_).verdict != "B":
        return

    def raised(codec):
        return codec and dataclasses.replace(codec, ratio=codec.ratio * factor)

    better = [
        dataclasses.replace(k, stored=raised(k.stored), delta=raised(k.delta)) for k in found.keys
    ]
    assert decide(dataclasses.replace(found, keys=better), given_).verdict == "B"


@settings(max_examples=60)
@given(data, limits, st.integers(1, 100))
def test_more_uses_never_raise_the_break_even(found, given_, more):
    before = decide(found, given_).break_even
    after = decide(found, dataclasses.replace(given_, reuse=before.reuse + more)).break_even
    assert after.bandwidth_bytes_s <= before.bandwidth_bytes_s


@settings(max_examples=60)
@given(data, limits)
def test_the_answer_goes_to_json_and_depends_on_nothing_else(found, given_):
    one, other = (Advice(found, given_, decide(found, given_)) for _ in range(2))
    assert one.text() == other.text()
    text = json.dumps(one.to_json(), allow_nan=False)
    assert json.loads(text)["verdict"] in "ABC"
    assert len(one.why) == 3
    assert all("\n" not in line for line in [*one.why, *one.settings])


def test_the_text_fits_a_screen():
    many = measured(*(key(f"key{number}", size=MB * (50 - number)) for number in range(40)))
    text = advice(many).text()
    assert len(text.splitlines()) < 30
    assert "30 more" in text
    assert text.startswith("B: compress what is stored, 3.00x smaller")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1Gb/s", 125e6),
        ("100Mb/s", 12.5e6),
        ("125MB/s", 125e6),
        ("1.5 GB/s", 1.5e9),
        ("8kbps", 1000.0),
        ("1MiB/s", 2.0**20),
        ("2000", 2000.0),
        (2000, 2000.0),
    ],
)
def test_bandwidths(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["fast", "", "1G", "-1Gb/s", "0Gb/s", 0, -5, math.nan, math.inf, True, None, "1 Gb / s"]
)
def test_nonsense_bandwidths(text):
    with pytest.raises(UsageError, match="not a bandwidth"):
        parse_rate(text)


@pytest.mark.parametrize(
    "limit",
    [{"memory": -1}, {"memory": "x"}, {"memory": 0}, {"reuse": 0}, {"reuse": 1.5},
     {"device_memory": "1 parsec"}, {"memory": True}],
)  # fmt: skip
def test_nonsense_limits_are_named(limit):
    values = {"memory": None, "bandwidth": None, "reuse": None, "device_memory": None} | limit
    with pytest.raises(UsageError, match=next(iter(limit))):
        Limits.parse(**values)
