"""Checkpoints for the Trainer of transformers: asynchronous, whole, and exact to resume."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.model import rng_state
from penstock.checkpoints.saver import AsyncCheckpointSaver
from penstock.errors import MissingExtra, UsageError

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise MissingExtra("transformers", "transformers") from error


class PenstockCallback(TrainerCallback):  # type: ignore[misc]
    """Saves model, optimizer, schedule, generators and the Trainer's state every `save_steps`.

    Use it instead of the Trainer's own checkpoints: `TrainingArguments(save_strategy="no")`. Only
    the first process writes. Not saved: the scaler of fp16 (bf16 has none), the states of other
    callbacks, and sharded models, which are refused.

    Args:
        directory: Where `checkpoint-<step>.pt` goes.
        save_steps: Save after every so many steps.
        **options: Of `AsyncCheckpointSaver`: keep_last, compress, delta_every and so on.

    Example:
        trainer = Trainer(…, callbacks=[PenstockCallback("runs/x", save_steps=100, keep_last=3)])
        resume(trainer, "runs/x") if Path("runs/x/latest").exists() else trainer.train()
    """

    def __init__(self, directory: str | os.PathLike[str], save_steps: int, **options: Any) -> None:
        if save_steps < 1:
            raise UsageError(f"save_steps={save_steps}: give a whole number, at least 1")
        self._directory, self._save_steps, self._options = Path(directory), save_steps, options
        self._saver: AsyncCheckpointSaver | None = None
        self._due = False

    def on_step_end(self, args: Any, state: Any, control: Any, **training: Any) -> None:
        """Save, unless the Trainer is about to log or evaluate at this step: then after that."""
        self._due = state.is_world_process_zero and state.global_step % self._save_steps == 0
        if not control.should_log and not control.should_evaluate:
            self._save(state, training)

    def on_log(self, args: Any, state: Any, control: Any, **training: Any) -> None:
        """Save, if that waited for the log."""
        if not control.should_evaluate:
            self._save(state, training)

    def on_evaluate(self, args: Any, state: Any, control: Any, **training: Any) -> None:
        """Save, if that waited for the evaluation."""
        self._save(state, training)

    def on_train_end(self, args: Any, state: Any, control: Any, **training: Any) -> None:
        """Finish all saves."""
        if self._saver is not None:
            saver, self._saver = self._saver, None
            saver.shutdown()

    def _save(self, state: Any, training: dict[str, Any]) -> None:
        if not self._due:
            return
        self._due = False
        if self._saver is None:
            self._saver = AsyncCheckpointSaver(self._directory, **self._options)
        whole = {
            "model": training["model"].state_dict(),
            "optimizer": training["optimizer"].state_dict(),
            "scheduler": training["lr_scheduler"].state_dict(),
            "trainer_state": json.loads(json.dumps(dataclasses.asdict(state))),
            "rng": rng_state(),
        }
        self._saver.save_async(whole, f"checkpoint-{state.global_step}.pt")


def resume(trainer: Trainer, path: str | os.PathLike[str]) -> Any:
    """Go on with a training exactly where a checkpoint was made.

    The checkpoint is laid out as the Trainer's own folder for a moment, and its own resume reads
    it, so that epochs, skipped batches and schedules are as ever.

    Args:
        trainer: Made as for the first run.
        path: A checkpoint, or a folder: then the newest that verifies.

    Returns:
        What `trainer.train()` returns.
    """
    whole = load_checkpoint(path)
    if not isinstance(whole, dict) or "trainer_state" not in whole:
        raise UsageError(f"{path} was not saved by PenstockCallback; load it by load_checkpoint")
    generators = dict(whole["rng"])
    generators["cpu"] = generators.pop("torch")
    if "cuda" in generators and trainer.args.world_size == 1:
        generators["cuda"] = generators["cuda"][torch.cuda.current_device()]
    with tempfile.TemporaryDirectory() as folder:
        torch.save(whole["model"], Path(folder, "pytorch_model.bin"))
        torch.save(whole["optimizer"], Path(folder, "optimizer.pt"))
        torch.save(whole["scheduler"], Path(folder, "scheduler.pt"))
        torch.save(generators, Path(folder, "rng_state.pth"))
        Path(folder, "trainer_state.json").write_text(json.dumps(whole["trainer_state"]))
        return trainer.train(resume_from_checkpoint=folder)
