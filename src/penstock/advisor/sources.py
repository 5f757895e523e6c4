"""`advise`: what the data is, a sample of it, the measurement, and the answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock import inspect
from penstock.advisor import checkpoints, recorded
from penstock.advisor.decide import Limits, decide
from penstock.advisor.measure import measure_machine, measure_source
from penstock.advisor.sample import Source
from penstock.advisor.show import Advice
from penstock.core.files import storage_error
from penstock.errors import CorruptFile, MissingExtra, UnknownFormat, UsageError
from penstock.inspect import checkpoint

_Open = Callable[[Path, int], Source]
_WITHOUT_TORCH: dict[str, _Open] = {
    "dataset": recorded.dataset_source,
    "recording": recorded.bag_source,
    "folder": checkpoints.folder_source,
    **dict.fromkeys(("pack", "torch", "pickle", "lz4"), checkpoints.file_source),
}
_BYTES_PER_S = 4 << 20  # what is looked at per second that it may take
_LEAST_BYTES, _MOST_BYTES = 4 << 20, 64 << 20


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
    try:
        source = _open(data, budget)
    except OSError as error:
        where = data if isinstance(data, str | os.PathLike) else "the data"
        raise storage_error("read", where, error) from error
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("torch", "torch") from error
    if not any(key.raw_bytes for key in source.keys):
        raise UsageError(
            f"{source.where or 'the data'} holds nothing to measure: give arrays, tensors, or a "
            "file with some"
        )
    source.machine = measure_machine(source.where, min(1.0, seconds / 10))
    measure_source(source, seconds / 2)
    return Advice(source, limits, decide(source, limits))


def _open(data: Any, budget: int) -> Source:
    """Find out what the data is, and take a sample of about `budget` bytes."""
    if not isinstance(data, str | os.PathLike):
        from penstock.advisor import arrays, saved

        storage = getattr(data, "storage", data)  # of a buffer; tensors have a method of this name
        if hasattr(storage, "max_size"):
            return saved.storage_source(storage, budget)
        return arrays.data_source(data, budget)
    where = Path(data)
    if (where / "buffer_metadata.json").is_file():  # of a buffer of TorchRL, around its storage
        where /= "storage"
    kind: str = inspect.kind_of(where)
    if kind == "file":
        kind = checkpoint.classify(where)
    if kind == "pack" and checkpoint.describe_file(where)["kind"] == "penstock rollout":
        kind = "rollouts"
    if kind == "folder" and (where / "storage_metadata.json").is_file():
        kind = "storage"
    if kind in _WITHOUT_TORCH:
        return _WITHOUT_TORCH[kind](where, budget)
    is_npz = where.suffix == ".npz" and where.is_file()
    if kind == "damaged" and not is_npz:
        raise CorruptFile(f"{where} is damaged: its beginning or end is not that of a checkpoint")
    if kind in ("unknown", "recordings") and not is_npz:
        raise UnknownFormat(
            f"{where} is nothing that advise reads; give one recording, a dataset, rollouts, a "
            "checkpoint, .npz or .safetensors"
        )
    from penstock.advisor import arrays, saved  # these need torch

    sources: dict[str, _Open] = {
        "rollouts": saved.rollouts_source,
        "run": saved.run_source,
        "replay": saved.replay_source,
        "storage": saved.memmap_source,
        "safetensors": arrays.safetensors_source,
    }
    return (arrays.npz_source if is_npz else sources[kind])(where, budget)
