"""Collect the next batch while the learner works on this one.

    python examples/pipelined.py

It pays when the two wait for different things: a robot or a GPU here, the CPU there.
"""

import time

from tensordict import TensorDictBase
from torchrl.collectors import Collector

from penstock import PipelinedDataCollector
from penstock.nav.simulation.env import NavigationEnv


class SlowEnv(NavigationEnv):
    """Drones that take their time, as real ones do."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        time.sleep(0.005)
        return super()._step(tensordict)


def make() -> Collector:
    """Return a collector of 8 batches, each 16 drones x 20 steps."""
    env = SlowEnv(num_envs=16, num_obstacles=50, dynamic_obstacles=8, maps=1)
    return Collector(env, frames_per_batch=320, total_frames=2560)


for name, collector in (("in turns", make()), ("ahead", PipelinedDataCollector(make()))):
    started, frames = time.perf_counter(), 0
    for data in collector:
        frames += data.numel()
        time.sleep(0.1)  # the learner: imagine a GPU at work on `data`
    print(f"{name:8}: {frames} frames in {time.perf_counter() - started:.2f} s")
    collector.shutdown()
stats = collector.stats()
print(f"collected for {stats['collect_s']:.2f} s, the learner waited {stats['wait_s']:.2f} s of it")
