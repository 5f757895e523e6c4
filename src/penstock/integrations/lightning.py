"""Checkpoints for Lightning's Trainer: asynchronous, verified, without pickle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.model import rng_state, set_rng_state
from penstock.checkpoints.saver import AsyncCheckpointSaver
from penstock.core.writes import SaveHandle
from penstock.errors import MissingExtra

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import CheckpointIO
except ImportError as error:
    raise MissingExtra("lightning", "lightning") from error


class PenstockCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Lets every checkpoint of a Trainer be written in the background.

    `ModelCheckpoint` decides when to save and what to remove, as ever; `fit(ckpt_path=…)` takes a
    file, or a folder: then the newest checkpoint that verifies. What a ModelCheckpoint removes
    stays until all that was saved before is durable, so that a crash never finds none.

    Hyper-parameters and states of callbacks must be plain values: numbers, strings, lists, dicts,
    tensors, arrays. Anything else raises UnsupportedValue with its name. `load_from_checkpoint`
    wants a torch file: `penstock.to_torch(path, out)` writes one.

    Args:
        compress: Compress losslessly.

    Example:
        Trainer(plugins=[PenstockCheckpointIO()], callbacks=[RandomStates()])
    """

    def __init__(self, compress: bool = True) -> None:
        self._compress = compress
        self._saver: AsyncCheckpointSaver | None = None
        self._last: SaveHandle | None = None
        self._removals: list[tuple[Path, SaveHandle | None]] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Copy a checkpoint; it is written in the background.

        Raises:
            UnsupportedValue: Something in it cannot be stored without pickle.
            StorageError: An earlier checkpoint could not be written.
        """
        file = Path(path).absolute()
        if self._saver is None:
            self._saver = AsyncCheckpointSaver(file.parent, compress=self._compress)
        self._removals = [removal for removal in self._removals if removal[0] != file]
        self._last = self._saver.save_async(checkpoint, file)
        self._remove()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Load a checkpoint, of penstock or of torch; no code of it is ever run."""
        if self._saver is not None:
            self._saver.wait()
        known = isinstance(map_location, str | torch.device)
        return load_checkpoint(path, map_location if known else "cpu")

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint as soon as what was saved before is durable."""
        self._removals.append((Path(path).absolute(), self._last))
        self._remove()

    def teardown(self) -> None:
        """Finish all saves and removals."""
        if self._saver is not None:
            saver, self._saver = self._saver, None
            saver.shutdown()
        self._remove()

    def _remove(self) -> None:
        waiting: list[tuple[Path, SaveHandle | None]] = []
        for file, after in self._removals:
            if after is None or after.status == "saved":
                file.unlink(missing_ok=True)
            elif not after.done():
                waiting.append((file, after))
        self._removals = waiting  # after a save that failed, the old checkpoint stays


class RandomStates(Callback):  # type: ignore[misc]
    """Keeps the random generators in the checkpoints, which Lightning alone does not."""

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of Python's, numpy's and torch's generators."""
        return rng_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states until the fit starts."""
        self._state = state_dict

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the states back, before the data loaders draw from them."""
        if self._state is not None:
            set_rng_state(self._state)
            self._state = None
