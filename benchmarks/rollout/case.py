"""The case `rollout`: keeping batches of experience, on disk and in memory."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks import Case, Row, Settings
from benchmarks.experience import flights
from benchmarks.measure import clock, find_row, interleave, judge_peers, time_rows
from benchmarks.rollout.claims import (
    measure_costs,
    measure_keys,
    measure_sizes,
    measure_training,
    saving_share,
    scale_sizes,
)
from benchmarks.rollout.proposal import ProposedRollouts
from penstock.rollouts.compressed import CompressedDataCollector
from penstock.rollouts.storage import RolloutStorage

OURS = "penstock"
PROPOSED = "pickle + LZ4-9 (proposal)"
_KEY = ("agents", "observation", "state")
_EPOCHS, _MINIBATCHES = 4, 16
_UPDATE_S = (0.05, 0.1)  # what the proposal says that training on such a batch takes
_NOISE_M = 0.02
_LEAST = {"clean": 3.6, "noisy": 3.0}


def run(settings: Settings) -> list[Row]:
    """Measure saving, loading and compressing on one batch of flights, clean and noisy."""
    rows: list[Row] = []
    for name, noise_m in (("clean", 0.0), ("noisy", _NOISE_M)):
        data = flights(settings.envs, noise_m=noise_m)
        rows += _on_disk(name, data, settings)
        rows += measure_keys(name, data, settings)
        ratios = {who: find_row(rows, f"size, {name}", who).value for who in (OURS, PROPOSED)}
        rows += scale_sizes(name, data, ratios)
    data = flights(settings.envs)
    in_memory = _in_memory(data, settings)
    save_s = {
        who: find_row(rows, "durable save, clean", who).value / 1e3 for who in (OURS, PROPOSED)
    }
    return [
        *rows,
        *in_memory,
        *measure_sizes(data),
        *measure_costs(data, settings),
        *measure_training(data, in_memory[-1].value / 1e3, settings),
        *saving_share(save_s, settings.envs),
    ]


def _on_disk(name: str, data: TensorDict, settings: Settings) -> list[Row]:
    folder = settings.work / f"rollouts-{name}"
    storage = RolloutStorage(folder)
    arrays = {"/".join(_parts(key)): data[key].numpy() for key in data.keys(True, True)}
    flat = {key.rpartition("/")[2]: array for key, array in arrays.items()}
    np.savez(folder / "arrays.npz", **flat)
    raw = sum(array.nbytes for array in flat.values())
    with ProposedRollouts(folder / "arrays.npz", folder / "proposal.lz4") as proposed:
        save = interleave(
            {
                OURS: lambda: clock(lambda: storage.save(data, 1)),
                PROPOSED: lambda: proposed.ask("save"),
            },
            settings.repeats,
            f"save, {name}",
        )
        turns = {
            "load": (lambda: storage.load(1), "load", 3.0),
            "load one env": (lambda: storage.load(1, envs=len(data) // 2), "env", None),
            "load one key": (lambda: storage.load(1, keys=[_KEY]), "key", None),
        }
        loads = {
            what: interleave(
                {
                    OURS: lambda action=ours: clock(action),  # type: ignore[misc]
                    PROPOSED: lambda word=theirs: proposed.ask(word),  # type: ignore[misc]
                },
                settings.repeats * 3,
                f"{what}, {name}",
            )
            for what, (ours, theirs, _) in turns.items()
        }
    stored = storage.path(1).stat().st_size
    rows = judge_peers(time_rows(f"durable save, {name}", save, OURS), {PROPOSED: 14.0})
    whole = loads["load"][OURS].median
    for what, timings in loads.items():
        bar = turns[what][2]
        found = time_rows(f"{what}, {name}", timings, OURS)
        if bar is not None:
            found = judge_peers(found, {PROPOSED: bar})
        else:
            share = timings[OURS].median / whole
            found[0] = replace(
                found[0], bar=f"<= 1/8 of the load ({share:.3f})", met=share <= 1 / 8
            )
        rows += found
    ratio, least = raw / stored, _LEAST[name]
    size = f"size, {name}"
    theirs = raw / proposed.path.stat().st_size
    rows.append(Row(size, OURS, ratio, "x smaller", bar=f">= {least}", met=ratio >= least))
    rows.append(Row(size, PROPOSED, theirs, "x smaller", ratio=theirs / ratio))
    return rows


def _parts(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _in_memory(data: TensorDict, settings: Settings) -> list[Row]:
    """Compress a batch, and decode it in minibatches over four epochs, as PPO would."""
    collector = CompressedDataCollector([], compression_level=1)
    order = [torch.randperm(data.numel(), generator=_generator(k)) for k in range(_EPOCHS)]
    flat = data.reshape(-1)

    def plain() -> float:
        return clock(lambda: [flat[part] for epoch in order for part in epoch.chunk(_MINIBATCHES)])

    def compressed() -> float:
        def work() -> None:
            batch = collector.compress(data)
            for epoch in order:
                for part in epoch.chunk(_MINIBATCHES):
                    batch.minibatch(part)

        return clock(work)

    timings = interleave(
        {OURS: compressed, "as it is": plain}, max(2, settings.repeats // 2), "a PPO batch"
    )
    what = f"a PPO batch, {_EPOCHS} epochs of {_MINIBATCHES} minibatches"
    batch = collector.compress(data)
    extra_s = timings[OURS].median - timings["as it is"].median
    worth = extra_s < 0.05 * statistics.mean(_UPDATE_S)
    verdict = "worth it" if worth else "not worth it: train on the batch as it is"
    saved = (sum(value.nbytes for value in _leaves(data)) - batch.nbytes) / 1e6
    return [
        *time_rows(what, timings, OURS),
        Row("memory saved for one PPO batch", OURS, saved, "MB", ratio=batch.ratio),
        Row(
            "time lost to compressing a PPO batch",
            verdict,
            extra_s * 1e3,
            "ms",
            n=len(timings[OURS].seconds),
        ),
    ]


def _leaves(data: TensorDict) -> list[torch.Tensor]:
    return [data[key] for key in data.keys(True, True)]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CASE = Case(
    name="rollout",
    claim="the original proposal: lidar gets 3-5x smaller, everything 2.5-4x (70 % of the "
    "disk); compressing training batches costs more than it brings",
    peers=("pickle + LZ4-9 (proposal), not fsynced, in a process of its own",),
    data="{envs} environments x 32 steps of flights among 350 columns and 80 moving obstacles; "
    f"noisy: {_NOISE_M * 100:.0f} cm on every ray that hits",
    run=run,
)
