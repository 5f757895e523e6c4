"""The alignment against slow, obvious references."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.conversion.align import (
    MISSING,
    SECOND_NS,
    camera_slots,
    gaps,
    in_order,
    inside,
    match,
    rate_slots,
)

stamps = st.lists(st.integers(0, 60), max_size=40).map(lambda v: np.array(v, np.int64))
rising = st.sets(st.integers(0, 200), min_size=1, max_size=40).map(
    lambda v: np.array(sorted(v), np.int64)
)
frames = st.lists(st.integers(-20, 220), min_size=1, max_size=30).map(
    lambda v: np.array(sorted(v), np.int64)
)


def longest_rise(values):
    best = [1] * len(values)
    for i in range(len(values)):
        for j in range(i):
            if values[j] < values[i]:
                best[i] = max(best[i], best[j] + 1)
    return max(best, default=0)


@given(stamps)
def test_the_most_messages_that_rise_are_kept_and_the_rest_is_counted(times):
    found = in_order(times)
    assert np.all(np.diff(found.times) > 0)
    assert len(set(found.ordinals.tolist())) == len(found.ordinals)
    assert np.array_equal(times[found.ordinals], found.times)
    assert len(found.times) >= longest_rise(times.tolist())
    assert len(found.times) + found.duplicates + found.disordered == len(times)


def test_one_wild_stamp_costs_one_message():
    times = np.arange(100, dtype=np.int64) * 33
    times[50] = 10**12
    found = in_order(times)
    assert len(found.times) == 99
    assert found.disordered == 1


def test_messages_that_are_only_late_in_the_file_are_put_where_they_belong():
    times = np.arange(200, dtype=np.int64) * 33
    order = np.argsort(np.where(np.arange(200) % 7 == 3, times + 100, times), kind="stable")
    found = in_order(times[order])
    assert np.array_equal(found.times, times)
    assert np.array_equal(order[found.ordinals], np.arange(200))
    assert (found.duplicates, found.disordered) == (0, 0)


def test_a_clock_that_was_set_back_costs_the_shorter_side():
    times = np.arange(300, dtype=np.int64) * 33_000_000
    times[200:] -= 500_000_000
    found = in_order(times)
    assert len(found.times) == 300 - 15
    assert found.disordered + found.duplicates == 15


def test_of_two_equal_stamps_the_first_stays():
    found = in_order(np.array([1, 2, 2, 3], np.int64))
    assert found.ordinals.tolist() == [0, 1, 3]
    assert (found.duplicates, found.disordered) == (1, 0)


@given(rising, frames, st.sampled_from(["nearest", "hold"]), st.integers(0, 50))
def test_one_message_per_frame_as_a_search_over_all_finds_it(times, at, how, tolerance):
    topic = in_order(times)
    found = match(topic, at, how, tolerance)
    for place, frame in enumerate(at.tolist()):
        if how == "hold":
            candidates = [t for t in times.tolist() if t <= frame]
            best = max(candidates, default=None)
        else:
            best = min(times.tolist(), key=lambda t: (abs(t - frame), t))
        if best is None or abs(best - frame) > tolerance:
            assert found.before[place] == MISSING
        else:
            assert times[found.before[place]] == best
            assert found.skew_ns[place] == best - frame
        assert found.after[place] == found.before[place]


@given(rising, frames)
def test_linear_takes_the_two_messages_around_and_their_weights_give_the_time(times, at):
    found = match(in_order(times), at, "linear", 1e9)
    for place, frame in enumerate(at.tolist()):
        if frame < times[0] or frame > times[-1]:
            assert found.before[place] == MISSING
            continue
        before, after = times[found.before[place]], times[found.after[place]]
        weight = found.weight[place]
        assert before <= frame <= after
        assert before + weight * (after - before) == pytest.approx(frame)
        assert not [t for t in times.tolist() if before < t < after]


@pytest.mark.parametrize("fps", [5, 10, 15, 20, 25, 29, 30])
def test_any_ratio_of_rates_gives_that_many_frames_at_those_times(fps):
    times = np.rint(np.arange(901) * SECOND_NS / 30).astype(np.int64)
    slots = camera_slots(times, 30.0, fps)
    assert len(slots.times) == 30 * fps + 1
    assert MISSING not in slots.picks
    assert len(np.unique(slots.picks)) == len(slots.picks)
    error_s = np.abs(slots.times - np.arange(len(slots.times)) * SECOND_NS / fps) / SECOND_NS
    assert error_s.max() <= 0.5 / 30 + 1e-6
    assert len(slots.picks) + slots.skipped == 901


def test_a_rate_above_the_cameras_repeats_pictures():
    times = np.rint(np.arange(31) * SECOND_NS / 30).astype(np.int64)
    slots = camera_slots(times, 30.0, 60)
    assert len(slots.picks) == 61
    assert MISSING not in slots.picks
    assert len(np.unique(slots.picks)) == 31


@given(st.integers(0, 2**32 - 1), st.sampled_from([10, 15, 30]))
@settings(max_examples=40)
def test_jitter_and_drift_lose_no_picture(seed, fps):
    rng = np.random.default_rng(seed)
    hz = 30 * (1 + rng.uniform(-0.01, 0.01))
    times = np.arange(1200) / hz + rng.uniform(-0.2, 0.2, 1200) / hz
    slots = camera_slots((times * SECOND_NS).astype(np.int64), 30.0, fps)
    assert MISSING not in slots.picks
    assert np.all(np.diff(slots.picks) == 30 // fps)


def test_a_missed_picture_leaves_a_hole_and_no_shift():
    whole = np.rint(np.arange(100) * SECOND_NS / 30).astype(np.int64)
    slots = camera_slots(np.delete(whole, [40, 41]), 30.0, 30)
    assert len(slots.picks) == 100
    assert np.flatnonzero(slots.picks == MISSING).tolist() == [40, 41]
    assert np.abs(slots.times - whole).max() < 1000


def test_at_a_lower_rate_a_neighbour_stands_in_for_a_missed_picture():
    whole = np.rint(np.arange(100) * SECOND_NS / 30).astype(np.int64)
    slots = camera_slots(np.delete(whole, [30]), 30.0, 10)
    assert MISSING not in slots.picks
    assert len(slots.picks) == 34


def test_a_fixed_rate_goes_from_the_start_to_the_end():
    slots = rate_slots(5, 5 + SECOND_NS, 4)
    assert slots.times.tolist() == [5 + k * SECOND_NS // 4 for k in range(5)]
    assert len(rate_slots(10, 5, 30).times) == 0


@given(rising, frames, st.integers(1, 60))
def test_frames_inside_holes(times, at, longest):
    holes = gaps(times, longest)
    found = inside(holes, at)
    for place, frame in enumerate(at.tolist()):
        expected = any(a < frame < b and b - a > longest for a, b in pairwise(times))
        assert found[place] == expected
