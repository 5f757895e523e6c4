"""`advise`: what the data is, a sample of it, the measurement, and the answer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.advisor import arrays, show
from penstock.advisor.decide import Decision, decide
from penstock.advisor.machine import measure_machine
from penstock.advisor.measure import measure_source
from penstock.advisor.model import Limits, Measurements
from penstock.advisor.sample import Source
from penstock.advisor.settings import settings_for
from penstock.core.files import storage_error
from penstock.errors import CorruptFile, UnknownFormat, UsageError
from penstock.inspect import checkpoint, dataset, recording, replay, run

_BYTES_PER_S = 4 << 20  # what is looked at per second that it may take
_LEAST_BYTES, _MOST_BYTES = 4 << 20, 64 << 20


@dataclass(frozen=True)
class Advice:
    """An answer, and everything it rests on.

    Attributes:
        measurements: What was measured.
        limits: What the user has.
        decision: What follows from both.
    """

    measurements: Measurements
    limits: Limits
    decision: Decision

    @property
    def verdict(self) -> str:
        """A (don't compress), B (compress what is stored) or C (compress in memory too)."""
        return self.decision.verdict

    @property
    def ratio(self) -> float:
        """How many times smaller the data gets in the form advised."""
        return self.decision.ratio

    @cached_property
    def why(self) -> list[str]:
        """Three lines that explain the verdict."""
        return show.why(self.measurements, self.limits, self.decision)

    @cached_property
    def settings(self) -> list[str]:
        """Lines to type: Python, or commands that begin with "penstock "."""
        return settings_for(self.measurements, self.limits, self.decision)

    def text(self) -> str:
        """Lay it out for the terminal."""
        return show.text(self.measurements, self.limits, self.decision, self.settings)

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON document."""
        return show.as_json(self.measurements, self.limits, self.decision, self.settings)


def advise(
    data: Any,
    *,
    memory: str | int | None = None,
    bandwidth: str | float | None = None,
    reuse: int | None = None,
    device_memory: str | int | None = None,
    seconds: float = 10.0,
) -> Advice:
    """Measure a sample of the data, and say whether to compress it: A no, B stored, C in memory.

    Args:
        data: The path of a recording, a LeRobot dataset, rollouts, a training run, a checkpoint, a
            saved replay buffer, an .npz or .safetensors file; or a TensorDict, or nested dicts of
            arrays and tensors.
        memory: What there is for the data, such as "2GB".
        bandwidth: Of the link that it crosses, such as "1Gb/s" (bits) or "125MB/s" (bytes).
        reuse: How often each byte is used after it has crossed.
        device_memory: What there is for the data on the device.
        seconds: About how long it may take. More looks at more.

    Raises:
        UsageError: A limit makes no sense, or there is nothing to measure.
        DataError: The file is damaged, or of no known kind.

    Example:
        print(advise("runs/x/rollouts", memory="4GB", bandwidth="1Gb/s").text())
    """
    limits = Limits.parse(memory, bandwidth, reuse, device_memory)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise UsageError(f"seconds={seconds!r}: give how long it may take, above 0")
    budget = int(min(_MOST_BYTES, max(_LEAST_BYTES, seconds * _BYTES_PER_S)))
    source = arrays.check_some(open_source(data, budget))
    where = Path(source.where) if source.where else None
    machine = measure_machine(where, min(1.0, seconds / 10))
    measurements = measure_source(source, machine, seconds / 2)
    return Advice(measurements, limits, decide(measurements, limits))


def open_source(data: Any, budget: int) -> Source:
    """Find out what the data is and take a sample of about `budget` bytes.

    Raises:
        UsageError: It is nothing that can be looked into.
        DataError: It is damaged.
    """
    if isinstance(data, str | os.PathLike):
        where = Path(data)
        try:
            return _open_path(where, budget)
        except OSError as error:
            raise storage_error("read", where, error) from error
    if hasattr(data, "storage") or hasattr(data, "max_size"):
        from penstock.advisor.saved import storage_source

        return storage_source(getattr(data, "storage", data), budget)
    if isinstance(data, Mapping) or arrays.leaves_of(data):
        return arrays.dict_source(data, budget)
    raise UsageError(
        f"advise takes a path, a TensorDict, a dict of arrays or a replay buffer of TorchRL, not "
        f"{type(data).__name__}"
    )


def _open_path(where: Path, budget: int) -> Source:
    if not where.exists():
        raise UsageError(f"{where} does not exist; check the path")
    if dataset.is_dataset(where):
        from penstock.advisor.recorded import dataset_source

        return dataset_source(where, budget)
    if recording.is_bag(where):
        from penstock.advisor.recorded import bag_source

        return bag_source(where, budget)
    from penstock.advisor import saved, states

    if (where / "buffer_metadata.json").is_file():  # what `dumps` of a TorchRL buffer leaves
        where /= "storage"
    if (where / "storage_metadata.json").is_file():
        return saved.memmap_source(where, budget)
    if replay.is_replay(where):
        return saved.replay_source(where, budget)
    if run.is_run(where):
        return saved.run_source(where, budget)
    if replay.is_rollouts(where):
        return saved.rollout_source(where, budget)
    if where.is_dir():
        return states.checkpoints_source(where, budget)
    return _open_file(where, budget)


def _open_file(where: Path, budget: int) -> Source:
    from penstock.advisor import saved, states

    if where.suffix == ".npz":
        return _arrays_source("npz file", where, arrays.npz_leaves(where), budget)
    kind = checkpoint.classify(where)
    if kind == "pack":
        with checkpoint.open_pack(where) as pack:
            is_rollout = pack.index.kind == "rollout"
        return (saved.rollout_source if is_rollout else states.checkpoint_source)(where, budget)
    if kind == "safetensors":
        leaves = arrays.safetensors_leaves(where)
        return _arrays_source("safetensors file", where, leaves, budget)
    if kind in ("torch", "pickle", "lz4"):
        return states.checkpoint_source(where, budget)
    if kind == "damaged":
        raise CorruptFile(f"{where} is damaged: its beginning or end is not that of a checkpoint")
    raise UnknownFormat(
        f"{where} is no file that advise reads; give a recording, dataset, rollout, checkpoint, "
        ".npz or .safetensors"
    )


def _arrays_source(kind: str, where: Path, leaves: arrays.Leaves, budget: int) -> Source:
    source = Source(kind, str(where), disk_bytes=where.stat().st_size)
    if leaves:
        arrays.add_leaves(source, leaves, budget)
    return source
