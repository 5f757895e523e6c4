"""The case `checkpoint`: what saving costs, what it saves, and what it survives."""

from __future__ import annotations

import os
import warnings

import torch

from benchmarks import Case, Extra, Row, Settings
from benchmarks.checkpoint.claims import conclude, measure_levels
from benchmarks.checkpoint.durable import measure_durable, measure_load
from benchmarks.checkpoint.faults import measure_faults
from benchmarks.checkpoint.memory import measure_memory
from benchmarks.checkpoint.peers import has_zipnn
from benchmarks.checkpoint.stall import measure_inflation, measure_small, measure_stall
from benchmarks.checkpoint.state import nbytes, trained
from benchmarks.measure import torch_threads


def run(settings: Settings) -> list[Row]:
    """Measure everything about checkpoints on one trained state."""
    random_state = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            # DCP says at every call that there is no process group: so it is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            return _measure(settings)
    finally:
        torch.set_rng_state(random_state)


def _measure(settings: Settings) -> list[Row]:
    with torch_threads(os.cpu_count() or 1):
        learner = trained(settings.hidden, settings.train_steps)
    rows = [
        *measure_stall(learner, settings),
        *measure_small(settings),
        *measure_inflation(learner, settings),
        *measure_memory(settings),
        *measure_durable(learner, settings),
        *measure_load(learner, settings),
        *measure_faults(settings),
    ]
    state = learner.state()
    return [*rows, *measure_levels(state), *conclude(rows, nbytes(state), settings)]


CASE = Case(
    name="checkpoint",
    claim="the original proposal: deepcopy and a queue hold training up for less than 1 ms, "
    "LZ4 makes 70 MB of 200 MB (65 % saved), differences save 30-50 % more",
    peers=(
        "torch.save",
        "torch.distributed.checkpoint (DCP)",
        "deepcopy + queue + LZ4-9 (proposal)",
        "clone (Lightning's way)",
        "safetensors",
        "ZipNN",
    ),
    data="actor and critic, 3 hidden layers of {hidden}, with Adam moments, after {train_steps} "
    "real steps of clipped PPO; stalls with 1 torch thread",
    run=run,
    extras=(Extra("ZipNN", "pip install penstock[bench]", has_zipnn),),
)
