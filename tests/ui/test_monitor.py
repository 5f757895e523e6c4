"""Timers, their statistics against numpy, and the sinks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import MissingExtra, StorageError, UsageError
from penstock.ui import monitor as monitor_module
from penstock.ui.monitor import JsonlSink, PerformanceMonitor, TensorBoardSink, WandbSink

seconds = st.floats(0, 1e4, allow_nan=False)


@settings(deadline=None)
@given(
    series=st.dictionaries(st.text(min_size=1), st.lists(seconds, min_size=1, max_size=50)),
    window=st.none() | st.integers(1, 60),
    history=st.integers(1, 60),
)
def test_stats_equal_numpy(
    series: dict[str, list[float]], window: int | None, history: int
) -> None:
    monitor = PerformanceMonitor(history=history)
    for name, times in series.items():
        for t in times:
            monitor.record(name, t)
    kept = {
        name: np.array(times[-min(history, window or history) :]) for name, times in series.items()
    }
    total_s = sum(times.sum() for times in kept.values())
    stats = monitor.get_stats(window)
    assert stats.keys() == series.keys()
    for name, times in kept.items():
        expected = {
            "mean": times.mean(),
            "std": times.std(),
            "min": times.min(),
            "max": times.max(),
            "count": len(times),
            "total": times.sum(),
            "last": times[-1],
            "p50": np.percentile(times, 50),
            "p90": np.percentile(times, 90),
            "p99": np.percentile(times, 99),
            "share": times.sum() / total_s if total_s else 0.0,
        }
        assert stats[name] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_timer_measures_its_block() -> None:
    monitor = PerformanceMonitor()
    with monitor.timer("sleep"):
        time.sleep(0.02)
    stats = monitor.get_stats()["sleep"]
    assert stats["count"] == 1
    assert 0.02 <= stats["last"] < 5


def test_nested_and_reentered_timers_each_count_their_whole_length() -> None:
    monitor = PerformanceMonitor()
    same = monitor.timer("x")
    with monitor.timer("outer"), same:
        time.sleep(0.01)
        with same, monitor.timer("x"):
            time.sleep(0.01)
    inner, middle, whole = sorted(monitor._timings["x"])
    assert 0.01 <= inner <= middle < whole
    assert whole >= 0.02
    assert monitor.get_stats()["outer"]["total"] >= whole


def test_an_exception_is_timed_and_passes_through() -> None:
    monitor = PerformanceMonitor()
    with pytest.raises(KeyError), monitor.timer("x"):
        raise KeyError
    assert monitor.get_stats()["x"]["count"] == 1


def test_threads_lose_nothing() -> None:
    monitor = PerformanceMonitor(history=100_000)
    together = threading.Barrier(5, timeout=20)

    def work(number: int) -> None:
        together.wait()
        for i in range(2000):
            with monitor.timer("shared"), monitor.timer(f"{i % 50}"):
                pass

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    together.wait()
    while any(thread.is_alive() for thread in threads):
        monitor.get_summary(window=10)  # reading while others write
    stats = monitor.get_stats()
    assert stats["shared"]["count"] == 8000
    assert len(stats) == 51
    assert sum(s["count"] for s in stats.values()) == 16_000


def test_history_is_bounded() -> None:
    monitor = PerformanceMonitor(history=3)
    for t in (9.0, 1.0, 2.0, 3.0):
        monitor.record("x", t)
    assert monitor.get_stats()["x"]["max"] == 3.0
    assert monitor.get_stats(window=2)["x"]["mean"] == 2.5
    monitor.reset()
    assert monitor.get_stats() == {}


def test_summary_is_a_table() -> None:
    monitor = PerformanceMonitor()
    assert monitor.get_summary().startswith("Performance Summary")
    for t in (0.04015, 0.04300, 0.05234):
        monitor.record("policy_training", t)
    monitor.record("env_step", 0.0015)
    _, columns, training, step = monitor.get_summary().splitlines()
    assert columns.split() == ["timer", "mean", "±", "min", "max", "p50", "p99", "share"]
    assert training.split() == (
        ["policy_training", "45.16", "5.21", "40.15", "52.34", "43.00", "52.15", "98.9%"]
    )
    assert step.split()[:2] == ["env_step", "1.50"]
    assert step.endswith(" 1.1%")


def test_timer_is_cheap() -> None:
    # The real cost is below 1 µs; the bound leaves room for a busy machine.
    monitor = PerformanceMonitor()
    best_s = math.inf
    for _ in range(20):
        start_s = time.perf_counter()
        for _ in range(1000):
            with monitor.timer("x"):
                pass
        best_s = min(best_s, time.perf_counter() - start_s)
    assert best_s / 1000 < 10e-6


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="history of 0"):
        PerformanceMonitor(history=0)
    with pytest.raises(UsageError, match="window of 0"):
        PerformanceMonitor().get_stats(window=0)


def test_log_writes_mean_seconds_to_all_sinks(tmp_path: Path) -> None:
    paths = [tmp_path / "new" / "a.jsonl", tmp_path / "b.jsonl"]
    paths[1].write_text('{"step": 0}\n')
    sinks = [JsonlSink(path) for path in paths]
    monitor = PerformanceMonitor(sinks=sinks)
    monitor.record("rollout", 9.0)
    monitor.record("rollout", 0.25)
    monitor.record("rollout", 0.75)
    monitor.log(step=5, window=2)
    expected = {"step": 5, "perf/rollout": 0.5}
    assert [json.loads(line) for line in paths[0].read_text().splitlines()] == [expected]
    monitor.log(step=6)
    assert len(paths[1].read_text().splitlines()) == 3  # appended, and flushed before close
    for sink in sinks:
        sink.close()
        sink.close()


def test_jsonl_stays_valid_json(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write({"loss": math.nan, "best": math.inf, "n": np.float32(2)}, step=1)
    sink.close()
    text = (tmp_path / "m.jsonl").read_text()
    assert json.loads(text) == {"step": 1, "loss": None, "best": None, "n": 2.0}


def test_a_full_disk_is_named_once() -> None:
    """What could not be written is not tried again at the end, where it would hide the cause."""
    sink = JsonlSink("/dev/full")
    with pytest.raises(StorageError, match="cannot write /dev/full: No space left"):
        sink.write({"loss": 1.0}, 1)
    sink.close()


def test_tensorboard_sink_writes_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    # In a process of its own: these packages warn on import, and warnings are errors here.
    code = f"""
from penstock.ui.monitor import TensorBoardSink
sink = TensorBoardSink({str(tmp_path)!r})
sink.write({{"perf/x": 0.5}}, step=3)
sink.close()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator({str(tmp_path)!r})
events.Reload()
(scalar,) = events.Scalars("perf/x")
print(scalar.step, scalar.value)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "0.5"]


class FakeWriter:
    """Stands for a SummaryWriter or a wandb run that belongs to the caller."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append((metrics, step))

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")

    def finish(self) -> None:
        self.calls.append("finish")


def test_a_given_writer_stays_the_callers() -> None:
    writer, run = FakeWriter(), FakeWriter()
    for sink in (TensorBoardSink(writer), WandbSink(run)):
        sink.write({"a": 1, "b": 2}, step=7)
        sink.close()
    assert writer.calls == [("a", 1.0, 7), ("b", 2.0, 7), "flush"]
    assert run.calls == [({"a": 1.0, "b": 2.0}, 7)]


def test_missing_packages_name_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(monitor_module.importlib, "import_module", refuse)
    with pytest.raises(MissingExtra, match=r"tensorboard .*penstock\[rl\]"):
        TensorBoardSink(tmp_path)
    with pytest.raises(MissingExtra, match=r"wandb .*penstock\[wandb\]"):
        WandbSink()


def test_core_imports_neither_torch_nor_wandb() -> None:
    code = (
        "import sys, penstock.ui.monitor, penstock.core.threads, penstock.core.memory, "
        "penstock.ui.progress; "
        "print([m for m in ('torch', 'wandb', 'tensorboard', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
