"""The public door to LeRobot datasets on disk, v3.0 and v2.1, without lerobot and without torch.

    import penstock.lerobot
    dataset = penstock.lerobot.open("out/cups")

FFmpeg and parquet are imported with the first use of a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.dataset.reader import Dataset

    open = Dataset

__all__ = ["Dataset", "open"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'penstock.lerobot' has no attribute {name!r}")
    from penstock.dataset.reader import Dataset

    globals().update(Dataset=Dataset, open=Dataset)  # the next look-up does not come here
    return Dataset


def __dir__() -> list[str]:
    """List the public names beside the module's own."""
    return sorted({*globals(), *__all__})
