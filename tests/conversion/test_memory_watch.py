"""The watch over the memory of a conversion."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from penstock.conversion import memory
from penstock.conversion.memory import MemoryWatch


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll with a limit that only a hang reaches."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never became true"
        time.sleep(0.001)


def test_watch_measures_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with MemoryWatch(interval_s=0.001) as watch:
        wait_until(lambda: len(watch.samples) >= 5)
    assert set(threading.enumerate()) == before
    times = [t for t, _ in watch.samples]
    assert times == sorted(times)
    assert watch.peak_bytes == max(size for _, size in watch.samples)
    assert watch.peak_bytes > 1_000_000


def test_watch_stops_at_once() -> None:
    start_s = time.monotonic()
    with MemoryWatch(interval_s=60) as watch:
        pass
    assert time.monotonic() - start_s < 20
    assert watch.peak_bytes > 0
    assert len(watch.samples) == 2  # a curve, however short the block


def test_watch_thins_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter(range(10_000))
    monkeypatch.setattr(memory, "rss_bytes", lambda tree: next(sizes))
    monkeypatch.setattr(memory, "highest_rss_bytes", lambda: 0)
    with MemoryWatch(interval_s=60) as watch:
        for _ in range(8999):
            watch._sample()
    assert 900 <= len(watch.samples) <= 2000
    gaps = {b - a for (_, a), (_, b) in zip(watch.samples, watch.samples[1:], strict=False)}
    assert len(gaps) == 1  # even over the whole run
    assert watch.peak_bytes == 8999


def test_a_peak_between_two_samples_counts() -> None:
    with MemoryWatch(interval_s=60) as watch:
        spike = bytearray(300 << 20)
        spike[:] = b"x" * len(spike)
        del spike
    assert watch.peak_bytes > 300 << 20


def test_watch_error_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = OSError("no /proc")

    def fail_in_the_background(tree: bool) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise failure
        return 1

    monkeypatch.setattr(memory, "rss_bytes", fail_in_the_background)
    with pytest.raises(OSError, match="no /proc") as caught, MemoryWatch(interval_s=0) as watch:
        watch._thread.join(20)
    assert caught.value is failure
    with pytest.raises(KeyError), MemoryWatch(interval_s=0) as watch:  # the block's own error
        watch._thread.join(20)
        raise KeyError
