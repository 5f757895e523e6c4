"""The data path of robot learning: memory stays bounded, training never stalls, nothing is lost.

The public names are looked up on first use, so that `import penstock` costs nothing: neither torch
nor numpy is imported until a name needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.advisor import advise
    from penstock.checkpoints.load import (
        load_checkpoint,
        load_metadata,
        to_safetensors,
        to_torch,
    )
    from penstock.checkpoints.model import (
        format_checkpoint_name,
        get_model_size,
        print_model_info,
        rng_state,
        set_rng_state,
    )
    from penstock.checkpoints.saver import AsyncCheckpointSaver
    from penstock.conversion.run import convert
    from penstock.errors import PenstockError
    from penstock.replay.episodes.buffer import DictReplayBuffer
    from penstock.replay.episodes.index import PrefixSum
    from penstock.replay.images import (
        compress_image,
        compress_image_seq,
        decompress_image,
        decompress_image_seq,
    )
    from penstock.replay.torchrl.sampler import PrioritySampler, PrioritySliceSampler
    from penstock.replay.torchrl.storage import CompressedStorage
    from penstock.rollouts.collect import PipelinedDataCollector
    from penstock.rollouts.compressed import CompressedDataCollector
    from penstock.rollouts.lerobot import export
    from penstock.rollouts.storage import RolloutStorage
    from penstock.rollouts.transform import CompressedLidarTransform
    from penstock.ui.monitor import PerformanceMonitor

__version__ = "0.1.0"

__all__ = [
    "AsyncCheckpointSaver",
    "CompressedDataCollector",
    "CompressedLidarTransform",
    "CompressedStorage",
    "DictReplayBuffer",
    "PenstockError",
    "PerformanceMonitor",
    "PipelinedDataCollector",
    "PrefixSum",
    "PrioritySampler",
    "PrioritySliceSampler",
    "RolloutStorage",
    "__version__",
    "advise",
    "compress_image",
    "compress_image_seq",
    "convert",
    "decompress_image",
    "decompress_image_seq",
    "export",
    "format_checkpoint_name",
    "get_model_size",
    "load_checkpoint",
    "load_metadata",
    "print_model_info",
    "rng_state",
    "set_rng_state",
    "to_safetensors",
    "to_torch",
]

_HOMES = {
    "AsyncCheckpointSaver": "penstock.checkpoints.saver",
    "CompressedDataCollector": "penstock.rollouts.compressed",
    "CompressedLidarTransform": "penstock.rollouts.transform",
    "CompressedStorage": "penstock.replay.torchrl.storage",
    "DictReplayBuffer": "penstock.replay.episodes.buffer",
    "PenstockError": "penstock.errors",
    "PerformanceMonitor": "penstock.ui.monitor",
    "PipelinedDataCollector": "penstock.rollouts.collect",
    "PrefixSum": "penstock.replay.episodes.index",
    "PrioritySampler": "penstock.replay.torchrl.sampler",
    "PrioritySliceSampler": "penstock.replay.torchrl.sampler",
    "RolloutStorage": "penstock.rollouts.storage",
    "advise": "penstock.advisor",
    "compress_image": "penstock.replay.images",
    "compress_image_seq": "penstock.replay.images",
    "convert": "penstock.conversion.run",
    "decompress_image": "penstock.replay.images",
    "decompress_image_seq": "penstock.replay.images",
    "export": "penstock.rollouts.lerobot",
    "format_checkpoint_name": "penstock.checkpoints.model",
    "get_model_size": "penstock.checkpoints.model",
    "load_checkpoint": "penstock.checkpoints.load",
    "load_metadata": "penstock.checkpoints.load",
    "print_model_info": "penstock.checkpoints.model",
    "rng_state": "penstock.checkpoints.model",
    "set_rng_state": "penstock.checkpoints.model",
    "to_safetensors": "penstock.checkpoints.load",
    "to_torch": "penstock.checkpoints.load",
}
_TORCH_ALONE = ("penstock.checkpoints.", "penstock.rollouts.storage")


def __getattr__(name: str) -> Any:
    """Import a public name on first use.

    Raises:
        MissingExtra: The name needs a package of the extra `torch` or `rl`, which is not installed.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "torchrl", "tensordict", "numba"):
            raise
        from penstock.errors import MissingExtra

        torch_alone = error.name == "torch" and _HOMES[name].startswith(_TORCH_ALONE)
        raise MissingExtra(error.name, "torch" if torch_alone else "rl") from error
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    """List the public names beside the module's own."""
    return sorted({*globals(), *__all__})
