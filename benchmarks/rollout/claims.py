"""What the proposal says of a batch of experience: its bytes, its keys, LZ4 on it, its cost.

Sizes are for 1024 environments x 32 steps, whatever number was measured: each environment takes
the same. Rows marked (computed) follow from measured ones and from the proposal's own numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import lz4.frame
import torch
from tensordict import TensorDict

from benchmarks import Row, Settings
from benchmarks.lz4_levels import measure_lz4
from benchmarks.measure import Timing, clock, interleave, time_rows
from penstock.rollouts.compressed import CompressedDataCollector
from penstock.rollouts.storage import RolloutStorage

OURS = "penstock"
PROPOSED = "proposal, LZ4-9"
PROPOSED_FAST = "proposal, LZ4-1"
ENVS, STEPS, EPOCHS, MINIBATCHES = 1024, 32, 4, 16
_SEEN = ("agents", "observation")
_LIDAR = (*_SEEN, "lidar")
_KEYS = ("lidar", "state", "direction", "dynamic_obstacle")
_ROLLOUTS, _HELD = 1000, 3  # of the proposal's examples
_ITERATION_S = ENVS * STEPS / 10_000  # at the proposal's 10,000 frames/s
_LIMIT_BYTES = 8e9  # of device memory, below which the proposal compresses batches


def measure_sizes(data: TensorDict) -> list[Row]:
    """Count the bytes of a step, of an environment and of a batch."""
    from penstock.nav.config import load_config  # the rest does without nav/

    step = data[0, 0]
    seen_step = step[_SEEN]
    parts = {key: seen_step[key] for key in _KEYS}
    seen = sum(part.nbytes for part in parts.values())
    rest = sum(step[key].nbytes for key in step.keys(True, True)) - seen
    batch = ENVS * STEPS / 1e6
    config = load_config(["algo=navrl", f"env.num_envs={ENVS}"])
    rows = [Row("bytes of a step", key, part.nbytes, "B") for key, part in parts.items()]
    numbers = sum(part.numel() for part in parts.values())
    what = f"a batch of {ENVS} x {STEPS} steps"
    return [
        *rows,
        Row("bytes of a step", "the observation", seen, "B"),
        Row("numbers of a step", "the observation", numbers, "float32"),
        Row(f"observations of one environment, {STEPS} steps", OURS, seen * STEPS / 1e3, "kB"),
        Row(what, "steps", config.frames_per_iteration, "steps"),
        Row(what, "observations", seen * batch, "MB"),
        Row(what, "everything, observations once", (seen + rest) * batch, "MB"),
        Row(what, "everything, next observations too", (2 * seen + rest) * batch, "MB"),
        Row(what, "16 steps instead of 32 (computed)", (seen + rest) * batch / 2, "MB"),
        Row("time added by 20 % less speed (computed)", "training", 100 * (1 / 0.8 - 1), "%"),
        Row("uses of each step in an update", "algo=navrl", config.ppo.epochs, "epochs"),
    ]


def measure_keys(name: str, data: TensorDict, settings: Settings) -> list[Row]:
    """Measure how much smaller each key gets, and how alike neighbouring steps are."""
    rows = []
    for key in _KEYS:
        path = (*_SEEN, key)
        only = data.select(path)
        values = only[path]
        storage = RolloutStorage(settings.work / f"key-{name}-{key}")
        storage.save(only, 1)
        stored = storage.path(1).stat().st_size
        packed = len(lz4.frame.compress(values.numpy().tobytes(), compression_level=9))
        what = f"size, {name}, {key}"
        rows.append(Row(what, OURS, values.nbytes / stored, "x smaller"))
        rows.append(Row(what, PROPOSED, values.nbytes / packed, "x smaller"))
    lidar = data[_LIDAR]
    same = lidar[:, 1:] == lidar[:, :-1]
    still = 100 * float(same.float().mean())
    moved = 100 * float((same & (lidar[:, 1:] != 0)).float().sum() / (lidar[:, 1:] != 0).sum())
    what = f"lidar equal to the step before, {name}"
    rows.append(Row(what, "all rays", still, "%"))
    rows.append(Row(what, "rays that hit", moved, "%"))
    return rows


def scale_sizes(name: str, data: TensorDict, ratios: Mapping[str, float]) -> list[Row]:
    """Say what the ratio makes of the proposal's examples: an environment, a batch, many."""
    raw = sum(data[0][key].nbytes for key in data[0].keys(True, True))
    batch_mb = raw * ENVS / 1e6
    rows = []
    for who, ratio in ({"as it is": 1.0} | dict(ratios)).items():
        stored = batch_mb / ratio
        saved = 100 * (1 - 1 / ratio)
        rows += [
            Row(f"one environment stored, {name}", who, raw / ratio / 1e3, "kB"),
            Row(f"a batch stored, {name}", who, stored, "MB"),
            Row(f"{_ROLLOUTS:,} rollouts stored, {name} (computed)", who, stored, "GB"),
            Row(f"{_HELD} batches held, {name} (computed)", who, _HELD * stored, "MB"),
            Row(f"disk saved, {name}", who, saved, "%"),
        ]
    ours = batch_mb * (1 - 1 / ratios[OURS])
    share = 100 * ours * 1e6 / _LIMIT_BYTES
    rows.append(Row(f"compressing a batch saves, of 8 GB, {name} (computed)", OURS, share, "%"))
    return sorted(rows, key=lambda row: row.what)


def measure_costs(data: TensorDict, settings: Settings) -> list[Row]:
    """Measure LZ4 on a batch, and training on it as the proposal's compressed collector would."""
    arrays = [data[key].numpy() for key in data.keys(True, True)]
    plain = b"".join(array.tobytes() for array in arrays)
    scale = ENVS / len(data)  # to a batch of 1024 environments
    packed = {level: lz4.frame.compress(plain, compression_level=level) for level in (1, 9)}
    collector = CompressedDataCollector([], compression_level=1)
    batch = collector.compress(data)
    copied = bytearray(len(plain))

    def copy() -> None:
        copied[:] = plain

    rounds = max(2, settings.repeats // 2)
    there = interleave(
        {
            PROPOSED: lambda: clock(lambda: lz4.frame.compress(plain, compression_level=9)),
            PROPOSED_FAST: lambda: clock(lambda: lz4.frame.compress(plain, compression_level=1)),
            OURS: lambda: clock(lambda: collector.compress(data)),
            "copy in memory": lambda: clock(copy),
        },
        rounds,
        "compress a batch",
        warm_up=False,
    )
    back = interleave(
        {
            PROPOSED: lambda: clock(lambda: lz4.frame.decompress(packed[9])),
            PROPOSED_FAST: lambda: clock(lambda: lz4.frame.decompress(packed[1])),
            OURS: lambda: clock(batch.decompress),
        },
        rounds,
        "decompress a batch",
    )
    ratios = {PROPOSED: len(plain) / len(packed[9]), PROPOSED_FAST: len(plain) / len(packed[1])}
    ratios[OURS] = batch.ratio
    rows = [
        *_scaled("compress a batch", there, scale),
        *_scaled("decompress a batch", back, scale),
        *_break_even(len(plain) / 1e6, there, back, ratios),
    ]
    lidar = data[_LIDAR].numpy()
    return rows + measure_lz4("lidar", lidar.tobytes(), rounds)


def _scaled(what: str, timings: Mapping[str, Timing], scale: float) -> list[Row]:
    for timing in timings.values():
        timing.seconds = [seconds * scale for seconds in timing.seconds]
        timing.cpu_s = [seconds * scale for seconds in timing.cpu_s]
    return time_rows(what, timings, OURS)


def _break_even(
    size_mb: float,
    there: Mapping[str, Timing],
    back: Mapping[str, Timing],
    ratios: Mapping[str, float],
) -> list[Row]:
    """Say below which bandwidth a batch arrives earlier when it is compressed.

    Plain takes size / B, compressed size / (ratio B) and the work at both ends: equal at
    B = size (1 - 1/ratio) / (compress + decompress).
    """
    rows = []
    for who, ratio in ratios.items():
        work_s = there[who].median + back[who].median
        gigabit_s = size_mb * 8e-3 * (1 - 1 / ratio) / work_s
        rows.append(Row("link below which compressing pays", who, gigabit_s, "Gb/s"))
    return rows


def measure_training(data: TensorDict, ours_s: float, settings: Settings) -> list[Row]:
    """Time the proposal's compressed collector under PPO: lidar per environment and minibatch.

    Args:
        data: A batch.
        ours_s: What penstock's compressed collector loses on it.
        settings: How much to measure.
    """
    lidar = data[_LIDAR]
    scale = ENVS / len(lidar)
    order = [
        torch.randperm(lidar[:, :, 0].shape[:2].numel(), generator=_generator(epoch))
        for epoch in range(EPOCHS)
    ]
    flat = lidar.reshape(-1, *lidar.shape[2:])

    def plain() -> None:
        for epoch in order:
            for part in epoch.chunk(MINIBATCHES):
                flat[part]

    def lossless() -> None:
        packed = [lz4.frame.compress(env.numpy().tobytes(), compression_level=1) for env in lidar]
        for epoch in order:
            for part in epoch.chunk(MINIBATCHES):
                _minibatch(packed, part, lidar.shape[1:])

    turns = {"as it is": lambda: clock(plain), PROPOSED_FAST: lambda: clock(lossless)}
    timings = interleave(turns, 2, "the proposal's PPO batch", warm_up=False)
    lost_s = (timings[PROPOSED_FAST].median - timings["as it is"].median) * scale
    what = "time lost to compressing a PPO batch, its lidar"
    rows = [Row(what, PROPOSED_FAST, lost_s * 1e3, "ms", n=2)]
    for who, seconds in ((PROPOSED_FAST, lost_s), (OURS, ours_s * scale)):
        share = 100 * seconds / (_ITERATION_S + seconds)
        what = "training speed lost to compressing batches, at 10,000 frames/s (computed)"
        rows.append(Row(what, who, share, "%"))
    return rows


def _minibatch(packed: list[bytes], chosen: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    cache: dict[int, torch.Tensor] = {}
    steps = []
    for index in chosen.tolist():
        env, step = divmod(index, shape[0])
        if env not in cache:
            raw = bytearray(lz4.frame.decompress(packed[env]))
            cache[env] = torch.frombuffer(raw, dtype=torch.float32).view(shape)
        steps.append(cache[env][step])
    return torch.stack(steps)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def saving_share(save_s: Mapping[str, float], envs: int) -> list[Row]:
    """Say what a rollout saved every 100 iterations costs training, at the proposal's speed."""
    what = "training time lost to saving one rollout in 100 (computed)"
    return [
        Row(what, who, 100 * seconds * ENVS / envs / (100 * _ITERATION_S), "%")
        for who, seconds in save_s.items()
    ]
