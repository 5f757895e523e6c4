"""The data path of robot learning: memory stays bounded, training never stalls, nothing is lost.

The public names are looked up on first use, so that `import penstock` costs nothing: neither torch
nor numpy is imported until a name needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.checkpoints.load import load_checkpoint, load_metadata
    from penstock.checkpoints.model import (
        format_checkpoint_name,
        get_model_size,
        print_model_info,
    )
    from penstock.checkpoints.rng import rng_state, set_rng_state
    from penstock.checkpoints.saver import AsyncCheckpointSaver
    from penstock.conversion.run import convert
    from penstock.core.monitor import PerformanceMonitor
    from penstock.errors import PenstockError

__version__ = "0.1.0"

__all__ = [
    "AsyncCheckpointSaver",
    "PenstockError",
    "PerformanceMonitor",
    "__version__",
    "convert",
    "format_checkpoint_name",
    "get_model_size",
    "load_checkpoint",
    "load_metadata",
    "print_model_info",
    "rng_state",
    "set_rng_state",
]

_HOMES = {
    "AsyncCheckpointSaver": "penstock.checkpoints.saver",
    "PenstockError": "penstock.errors",
    "PerformanceMonitor": "penstock.core.monitor",
    "convert": "penstock.conversion.run",
    "format_checkpoint_name": "penstock.checkpoints.model",
    "get_model_size": "penstock.checkpoints.model",
    "load_checkpoint": "penstock.checkpoints.load",
    "load_metadata": "penstock.checkpoints.load",
    "print_model_info": "penstock.checkpoints.model",
    "rng_state": "penstock.checkpoints.rng",
    "set_rng_state": "penstock.checkpoints.rng",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use.

    Raises:
        MissingExtra: The name needs torch, which is not installed.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from penstock.errors import MissingExtra

        raise MissingExtra("torch", "rl") from error
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    """List the public names beside the module's own."""
    return sorted({*globals(), *__all__})
