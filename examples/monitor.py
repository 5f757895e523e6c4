"""See where the time of a training loop goes: timers, a table, and numbers for your plots.

    python examples/monitor.py

The same numbers go to TensorBoard or Weights & Biases: sinks=[TensorBoardSink("tensorboard")].
"""

import json
import time
from pathlib import Path

from penstock import PerformanceMonitor
from penstock.ui.monitor import JsonlSink

sink = JsonlSink("perf.jsonl")
monitor = PerformanceMonitor(history=1000, sinks=[sink])  # memory stays bounded

for iteration in range(1, 41):
    with monitor.timer("collect"):
        time.sleep(0.004)
    with monitor.timer("update"):
        total = sum(i * i for i in range(20_000))
    if iteration % 10 == 0:
        with monitor.timer("evaluation"):
            time.sleep(0.01)
        monitor.log(iteration, window=10)  # perf/collect, perf/update, ... in seconds
sink.close()

print(monitor.get_summary(window=100))
update = monitor.get_stats()["update"]
print(f"update: {update['p99'] * 1e3:.1f} ms at worst 1 in 100, {update['share']:.0%} of the time")
print("last row:", json.loads(Path("perf.jsonl").read_text().splitlines()[-1]))
