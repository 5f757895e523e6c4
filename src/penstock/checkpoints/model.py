"""Small helpers around models: file names and sizes."""

from __future__ import annotations

import sys
from typing import Any

import torch


def format_checkpoint_name(
    iteration: int | str,
    prefix: str = "checkpoint",
    suffix: str = ".pt",
    **values: float,
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
    size_bytes = sum(tensor.nbytes for tensor in parameters + buffers)
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
