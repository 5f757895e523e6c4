"""RolloutStorage: batches of experience as files, one per iteration."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import Self

from penstock.core.files import make_folder, storage_error, sweep
from penstock.core.memory import format_bytes, whole_number
from penstock.core.pack import PackReader
from penstock.core.reuse import ReusedMemory
from penstock.core.threads import poll
from penstock.core.writes import SaveHandle, Write, WriteQueue, close_after
from penstock.errors import DataError, PenstockError, UnknownFormat, UsageError
from penstock.rollouts.file import KIND, NAME, OpenRollouts, check_level, write_rollout
from penstock.rollouts.structure import Axes, Batch, Leaf, find_axes, take_apart


class RolloutStorage:
    """Save rollouts to a folder and read them back, whole or in part.

    A file appears under its name only when it is whole and durable; nothing in it is pickled, and
    everything that is read is verified. Tensors of shape [env, time, …] are stored with time last,
    where they compress best, in blocks of a few environments.

    `requires_grad` is not kept. Reading one environment decodes one block per key.

    Args:
        save_dir: The folder; created if missing. Several processes may save different iterations.
        compression_level: 0 stores as it is, 1 to 9 are fast, 10 to 16 smaller. All are lossless.
        keep_last: Keep so many of the highest iterations (and the one just saved); None keeps all.
        background: Write in a thread: `save` copies the data and returns a `SaveHandle`.
        max_pending_bytes: What pending saves may hold in memory; `save` waits beyond it.
        time_dim: Which of the first two axes is time; a TensorDict axis named "time" goes first.
        verbose: Say each save on stderr.
        handle_signals: With `background`, finish pending saves on SIGINT and SIGTERM.

    Example:
        storage = RolloutStorage("runs/x/rollouts")
        storage.save(data, iteration=100)
        lidar = storage.load(100, keys=[("agents", "observation", "lidar")], envs=slice(0, 8))
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        compression_level: int = 9,
        *,
        keep_last: int | None = None,
        background: bool = False,
        max_pending_bytes: int = 256 << 20,
        time_dim: int = 1,
        verbose: bool = False,
        handle_signals: bool = True,
    ) -> None:
        self._level = check_level(compression_level)
        self._keep_last = None if keep_last is None else whole_number("keep_last", keep_last, 1)
        whole_number("max_pending_bytes", max_pending_bytes, 1)
        if type(time_dim) is not int or time_dim not in (0, 1):
            raise UsageError(f"time_dim={time_dim!r}: time is axis 0 or axis 1")
        self._time_dim = time_dim
        self._verbose = verbose
        self.save_dir = make_folder(save_dir)
        self._swept = False
        self._memory = ReusedMemory()
        self._open = OpenRollouts(self._memory)
        self._queue: WriteQueue | None = None
        if background:
            name, what = "penstock-rollouts", "rollout(s)"
            self._queue = WriteQueue(
                name, max_pending_bytes, what=what, handle_signals=handle_signals
            )

    def path(self, iteration: int) -> Path:
        """Return where the rollout of an iteration is, or would be."""
        return self.save_dir / f"rollout_{whole_number('iteration', iteration, 0):06d}.pack"

    def save(self, data: Any, iteration: int) -> Path | SaveHandle:
        """Save a rollout; one of the same iteration is replaced once the new one is durable.

        Args:
            data: A TensorDict, or nested dicts of tensors, arrays, numbers and strings.
            iteration: Its number.

        Returns:
            The path; with `background` a handle, whose `wait()` returns the path. An earlier save
            that failed is raised here, too.
        """
        number = whole_number("iteration", iteration, 0)
        path = self.path(number)
        batch = take_apart(data)
        axes = find_axes(data, batch, self._time_dim)
        if self._queue is None:
            self._write(path, batch, axes, number)
            return path

        def prepare() -> Write:
            copy = Batch(batch.node, [self._copied(leaf) for leaf in batch.leaves])
            return lambda: self._write(path, copy, axes, number)

        return self._queue.put(path, sum(leaf.nbytes for leaf in batch.leaves), prepare)

    def load(
        self,
        iteration: int,
        device: str | torch.device = "cpu",
        keys: Iterable[Any] | None = None,
        envs: Any = None,
        steps: Any = None,
    ) -> Any:
        """Load a rollout, or a part of it, all of which is verified.

        Args:
            iteration: Its number.
            device: Where the tensors go; arrays stay arrays.
            keys: Keys, tuples or prefixes of tuples; None for all.
            envs: A number, a slice, or a list, array or tensor of numbers or booleans; None for
                all. A single number removes the axis.
            steps: The same for time. Both together select rows and columns: `envs`, then `steps`.

        Returns:
            A TensorDict if one was saved, else dicts, with the same keys. Of dicts, tensors that do
            not begin with the shape [env, time] are returned whole.
        """
        number = whole_number("iteration", iteration, 0)
        path = self.path(number)
        if (queue := self._queue) is not None:
            poll(lambda: not queue.pending(path), None)
        target = _device(device)
        try:
            return self._open.open(path).read(target, keys, envs, steps)
        except FileNotFoundError:
            raise self._missing(number) from None

    def iterations(self) -> list[int]:
        """Return the numbers of the rollouts there are, in order."""
        try:
            names = os.listdir(self.save_dir)
        except OSError as error:
            raise storage_error("list", self.save_dir, error) from error
        found = {int(match[1]) for name in names if (match := NAME.fullmatch(name))}
        return sorted(number for number in found if self.path(number).name in names)

    def iterate(self, **options: Any) -> Iterator[tuple[int, Any]]:
        """Yield one iteration after another, and its data; `options` as for `load`.

        What is removed meanwhile is left out.
        """
        for number in self.iterations():
            try:
                data = self.load(number, **options)
            except UsageError:
                if self.path(number).exists():
                    raise
                continue
            yield number, data

    def latest(self) -> int | None:
        """Return the highest iteration there is."""
        return max(self.iterations(), default=None)

    def prune(self, keep_last: int) -> list[int]:
        """Remove all rollouts but those of the highest iterations; return what was removed.

        Files that are not rollouts are left alone, whatever their name.
        """
        return self._prune(whole_number("keep_last", keep_last, 0))

    def __len__(self) -> int:
        return len(self.iterations())

    def __contains__(self, iteration: object) -> bool:
        return iteration in self.iterations()

    def wait(self, timeout: float | None = None) -> bool:
        """Return True when all saves are durable, False after `timeout` seconds.

        A save that failed is raised, once.
        """
        return self._queue is None or self._queue.wait(timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Finish pending saves, as `wait`; loading goes on to work. Safe to call twice."""
        self._open.close()
        return self._queue is None or self._queue.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_after(self.close, error)

    def _write(self, path: Path, batch: Batch, axes: Axes, number: int) -> dict[str, Any]:
        if not self._swept:
            sweep(self.save_dir)
            self._swept = True
        begin = time.perf_counter()
        stats = write_rollout(path, batch, axes, number, self._level)
        stats["write_s"] = time.perf_counter() - begin
        if self._keep_last is not None:
            self._prune(self._keep_last, spared=path)
        if self._verbose:
            raw, stored = stats["raw_bytes"], stats["stored_bytes"]
            sys.stderr.write(
                f"[penstock] saved {path.name}: {format_bytes(stored)} of {format_bytes(raw)} "
                f"({raw / stored:.2f}x) in {stats['write_s']:.2f} s\n"
            )
        return stats

    def _copied(self, leaf: Leaf) -> Leaf:
        """Copy a leaf, since the caller may overwrite it as soon as `save` returns."""
        values = leaf.words()
        memory = self._memory.array(values.shape, values.dtype)
        np.copyto(memory, values)
        return Leaf(leaf.item, leaf.key, leaf.dtype, memory)

    def _prune(self, keep_last: int, spared: Path | None = None) -> list[int]:
        removed = []
        for number in self.iterations()[: -keep_last or None]:
            path = self.path(number)
            if path == spared or not _is_rollout(path):
                continue
            self._open.close()  # an open file keeps its room on the disk
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise storage_error("remove", path, error) from error
            removed.append(number)
        return removed

    def _missing(self, number: int) -> PenstockError:
        pickled = self.save_dir / f"rollout_{number:06d}.lz4"
        if pickled.exists():
            return UnknownFormat(
                f"{pickled} is a pickle, which could run code and is never read; load it with the "
                "program that wrote it, and save it again"
            )
        numbers = self.iterations()
        there = f"there are {len(numbers)}, from {numbers[0]} to {numbers[-1]}" if numbers else ""
        return UsageError(f"no rollout {number} in {self.save_dir}: {there or 'it is empty'}")


def _device(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # torch has no class for this
        reason = str(error).splitlines()[0]
        raise UsageError(f"device={device!r} cannot be used: {reason}") from None


def _is_rollout(path: Path) -> bool:
    with suppress(OSError, DataError), PackReader(path) as pack:
        return pack.index.kind == KIND
    return False
