"""Small helpers around a training state: file names, sizes of models, random generators."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch

from penstock.tensors import tensor_bytes


def format_checkpoint_name(
    iteration: int | str, prefix: str = "checkpoint", suffix: str = ".pt", **values: float
) -> str:
    """Name a checkpoint: (1000, reward=1.5) gives "checkpoint_1000_reward1.5.pt".

    Args:
        iteration: A number, or a word such as "final".
        prefix: What the name starts with.
        suffix: The ending.
        values: Figures to carry in the name, with 4 significant digits.
    """
    figures = "".join(f"_{name}{value:.4g}" for name, value in values.items())
    return f"{prefix}_{iteration}{figures}{suffix}"


def get_model_size(model: torch.nn.Module) -> dict[str, Any]:
    """Count the parameters and bytes of a model; shared tensors count once."""
    parameters = list(model.parameters())
    buffers = list(model.buffers())
    size_bytes = sum(tensor_bytes(tensor) for tensor in parameters + buffers)
    return {
        "parameters": sum(tensor.numel() for tensor in parameters),
        "trainable": sum(tensor.numel() for tensor in parameters if tensor.requires_grad),
        "buffers": sum(tensor.numel() for tensor in buffers),
        "size_bytes": size_bytes,
        "size_mb": size_bytes / 1e6,
    }


def print_model_info(model: torch.nn.Module, name: str = "model") -> None:
    """Print the size of a model and of its direct parts."""
    rows = [(name, model), *((f"  {part}", child) for part, child in model.named_children())]
    for label, module in rows:
        size = get_model_size(module)
        sys.stdout.write(
            f"{label:<24}: {size['parameters']:>12,} parameters "
            f"({size['trainable']:,} trainable), {size['size_mb']:.2f} MB\n"
        )


def rng_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's global generators."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` returned, so that every generator goes on as it would have."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([device.cpu() for device in state["cuda"]])
