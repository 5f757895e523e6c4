"""The ways of saving that are compared: each blocks the training thread in its own manner.

The proposal's way and Lightning's are written anew here, from their descriptions.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import os
import queue
import shutil
import threading
from pathlib import Path
from typing import Any

import lz4.frame
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.checkpoint.state import Learner, map_tensors, tensors
from penstock.checkpoints.saver import AsyncCheckpointSaver

PROPOSED_LEVEL = 9


class Method:
    """One way of saving a state during training."""

    def save(self, state: Any) -> None:
        """What the training thread must do when a save is due."""
        raise NotImplementedError

    def before_step(self) -> None:
        """What it must do before it may change the tensors."""

    def settle(self) -> None:
        """Wait until nothing is left to do in the background, and drop what was written."""

    def close(self) -> None:
        """End the background work."""


class TorchSave(Method):
    """torch.save, in the training thread, without fsync."""

    def __init__(self, work: Path) -> None:
        self._path = work / "sync.pt"

    def save(self, state: Any) -> None:
        """Write the file."""
        torch.save(state, self._path)

    def settle(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


class DcpAsync(Method):
    """torch.distributed.checkpoint.async_save in one process.

    Args:
        work: Where it writes.
        staged: Into memory that is kept: the best mode of its `DefaultStager` without a GPU.
    """

    def __init__(self, work: Path, staged: bool = False) -> None:
        self._path = work / f"dcp-{staged}"
        self._future: Any = None
        self._stager = DefaultStager(StagingOptions(False, True, False, False)) if staged else None

    def save(self, state: Any) -> None:
        """Stage the state; a thread of torch writes it."""
        writer = FileSystemWriter(self._path)
        self._future = async_save(
            state, storage_writer=writer, no_dist=True, async_stager=self._stager
        )

    def settle(self) -> None:
        """Wait for the writer."""
        if self._future is not None:
            self._future.result()
            self._future = None
        shutil.rmtree(self._path, ignore_errors=True)

    def close(self) -> None:
        """Free the staging memory."""
        if self._stager is not None:
            self._stager.close()


class ProposedQueue(Method):
    """deepcopy, a bounded queue, and a thread that compresses: the proposal's way.

    Args:
        work: Where the thread writes; None drops the copies. Whatever the thread does lies outside
            the blocked time, and LZ4-9 takes many seconds per save.
        level: Of LZ4.
    """

    def __init__(self, work: Path | None = None, level: int = PROPOSED_LEVEL) -> None:
        self._work = work
        self._level = level
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=3)
        self._thread = threading.Thread(target=self._run, name="proposal-writer", daemon=False)
        self._thread.start()

    def save(self, state: Any) -> None:
        """Copy everything, and queue the copy."""
        self._queue.put(copy.deepcopy(state))

    def settle(self) -> None:
        """Wait for the thread."""
        self._queue.join()

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (state := self._next()) is not None:
            if self._work is not None:
                proposed_write(state, self._work / "proposal.pt.lz4", self._level)
            del state
            self._queue.task_done()

    def _next(self) -> Any:
        while threading.main_thread().is_alive():  # a benchmark that failed must still end
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=0.5)
        return None


class Clone(Method):
    """A fresh clone of every tensor in the training thread: Lightning's algorithm."""

    def __init__(self) -> None:
        self._kept: Any = None

    def save(self, state: Any) -> None:
        """Clone."""
        self._kept = map_tensors(state, lambda tensor: tensor.detach().clone())

    def settle(self) -> None:
        """Drop the clone."""
        self._kept = None


class Reused(Method):
    """copy_ into buffers that are kept: the least that an eager copy costs."""

    def __init__(self, state: Any) -> None:
        self._buffers = [torch.zeros_like(tensor) for tensor in tensors(state)]

    def save(self, state: Any) -> None:
        """Copy."""
        for buffer, tensor in zip(self._buffers, tensors(state), strict=True):
            buffer.copy_(tensor.detach())


class Penstock(Method):
    """AsyncCheckpointSaver; everything that may hold up the training thread is counted."""

    def __init__(
        self, work: Path, learner: Learner, compress: bool = True, lazy: bool = False
    ) -> None:
        self.saver = AsyncCheckpointSaver(
            work / f"penstock-{compress}-{lazy}",
            optimizers=[learner.optimizer],
            compress=compress,
            lazy=lazy,
            handle_signals=False,
        )

    def save(self, state: Any) -> None:
        """Ask for the checkpoint."""
        self.saver.save_async(state, "stall.pt")

    def before_step(self) -> None:
        """Run the barrier, as the optimizer's hook would."""
        self.saver.barrier()

    def settle(self) -> None:
        """Wait until it is durable."""
        self.saver.wait()

    def close(self) -> None:
        """End the threads."""
        self.saver.shutdown()


def proposed_write(state: Any, path: Path, level: int = PROPOSED_LEVEL) -> None:
    """Write a state as the proposal does: pickle in memory, compress in memory, write."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = lz4.frame.compress(buffer.getvalue(), compression_level=level)
    write_durably(path, data)


def has_zipnn() -> bool:
    """Tell whether ZipNN is there."""
    return importlib.util.find_spec("zipnn") is not None


def zipnn_write(state: Any, path: Path, dtype: str) -> None:
    """Write what torch.save makes of a state through ZipNN, told the type of most of its bytes."""
    from zipnn import ZipNN

    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_durably(path, ZipNN(bytearray_dtype=dtype).compress(bytearray(buffer.getbuffer())))


def torch_save_durably(state: Any, path: Path) -> None:
    """torch.save, then fsync."""
    torch.save(state, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
