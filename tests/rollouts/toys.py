"""Collectors to test with."""

import threading
import time

import torch
from tensordict import TensorDict


def number(value, size=100):
    return TensorDict({"x": torch.full((size,), value)}, batch_size=[size])


class Fresh:
    """Makes new batches; notes when each was started and in which thread."""

    def __init__(self, count=10, delay_s=0.0, size=100):
        self.count, self.delay_s, self.size = count, delay_s, size
        self.started = []
        self.threads = set()
        self.shutdowns = []

    def __iter__(self):
        for i in range(self.count):
            self.started.append(i)
            self.threads.add(threading.current_thread())
            time.sleep(self.delay_s)
            yield number(i, self.size)

    def shutdown(self):
        self.shutdowns.append(threading.current_thread())


def wait_started(base, count):
    """Wait until the collector has begun so many batches (or all that it has)."""
    deadline = time.monotonic() + 20
    while len(base.started) < min(count, base.count):
        assert time.monotonic() < deadline
        time.sleep(0.001)
