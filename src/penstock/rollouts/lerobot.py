"""Write rollouts as a LeRobot dataset: the row of each environment, cut where an episode ended.

Values are exact. A block of environments is read, cut and committed at a time, so that memory does
not grow with the rollouts, and a crash loses no more than the block that was under way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.pack import PackReader
from penstock.core.reuse import ReusedMemory
from penstock.dataset.layout import VERSIONS, Feature, Version
from penstock.dataset.unit import Episode
from penstock.dataset.writer import DatasetWriter, is_empty
from penstock.dataset.writer import Mode as OpenMode
from penstock.errors import DataError, UsageError
from penstock.rollouts.files import Picked, RolloutFile
from penstock.rollouts.find import Found, find_rollouts
from penstock.rollouts.lerobot_keys import DONE, Leaf, dotted, make_plan
from penstock.rollouts.lerobot_report import ExportReport
from penstock.rollouts.structure import Key
from penstock.rollouts.tensordicts import TensorDict
from penstock.tensors import DTYPE_NAMES
from penstock.ui.progress import Mode, Progress
from penstock.ui.suggestions import did_you_mean

_MODES: tuple[OpenMode, ...] = ("create", "resume", "overwrite")
_BLOCK_BYTES = 16 << 20
_ROWS_OF_A_BLOCK = 128  # environments that lie together in a file
_CPU = torch.device("cpu")


def export(
    rollouts: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    keys: Sequence[str | Key] | None = None,
    envs: Any = None,
    iterations: Iterable[int] | None = None,
    fps: int = 10,
    task: str = "navigate",
    version: Version = "v3.0",
    mode: str = "create",
    progress: Mode | None = None,
) -> ExportReport:
    """Write rollouts as a LeRobot dataset.

    Args:
        rollouts: A folder of rollouts, one of its files, or the folder of a run.
        out: The folder of the dataset.
        keys: Features, dotted keys or tuples of names; None for all. Where episodes end does not
            depend on them.
        envs: The number of environments to take, from the first; or a slice or a list of them.
        iterations: Numbers of rollouts; None for all.
        fps: Steps per second.
        task: What was to be done, of every episode.
        version: Of the format: "v3.0" or "v2.1".
        mode: "create" a new dataset; "resume" one that was interrupted, or add the rollouts that
            have come since; "overwrite" one.
        progress: "rich", "plain" or "quiet"; None chooses by the terminal.

    Returns:
        What was written, and what was left out.

    Raises:
        UsageError: An argument is wrong; nothing was touched.
        DataError: There is no rollout, or one that is damaged or no [environments, steps].

    Example:
        report = penstock.export("runs/x/rollouts", "flights", fps=10)
        print(report.text())
    """
    start_s = time.perf_counter()
    chosen = next((each for each in _MODES if each == mode), None)
    if chosen is None:
        raise UsageError(f"mode is {mode!r}: {did_you_mean(mode, _MODES)}")
    if version not in VERSIONS:
        raise UsageError(f"version is {version!r}: {did_you_mean(version, VERSIONS)}")
    if not isinstance(task, str) or not task.strip():
        raise UsageError(f"task is {task!r}: say what was to be done, such as 'navigate'")
    source = Path(rollouts).absolute()
    target = Path(out).absolute()
    if mode == "overwrite" and target.resolve() in (source.resolve(), *source.resolve().parents):
        raise UsageError(
            f"{source} lies in {target}, which would be deleted: choose another folder"
        )
    if chosen == "create" and target.is_dir() and not is_empty(target):
        raise UsageError(f"{target} is not empty: --resume goes on, --overwrite replaces it")
    files = find_rollouts(source, iterations)
    work = _Export(files, keys, envs)
    report = ExportReport(target, fps=fps, rollouts=len(files))
    with DatasetWriter(
        target,
        work.plan.features,
        fps,
        version=version,
        mode=chosen,
        settings={"export": {"envs": _json_of(envs), "task": task}},
    ) as writer:
        work.run(writer, task, report, progress)
        writer.build()
        report.total_episodes, report.total_frames = writer.total_episodes, writer.total_frames
    report.seconds = time.perf_counter() - start_s
    report.bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return report


class _Export:
    """Rollouts that were looked at, all alike, and the plan for them."""

    def __init__(self, files: Sequence[Found], keys: Sequence[str | Key] | None, envs: Any) -> None:
        self._memory = ReusedMemory()
        self._files = files
        self._envs = slice(0, envs) if type(envs) is int and envs > 0 else envs
        if envs is not None and (isinstance(envs, bool) or (type(envs) is int and envs < 1)):
            raise UsageError(f"envs={envs!r}: give how many environments, at least 1")
        first: dict[Key, Leaf] | None = None
        self.frames = 0
        for found in files:  # all of them, before anything is written
            with RolloutFile(found.path, self._memory) as file:
                leaves, odd = _look(file, found.path)
                self.frames += len(self._positions(file)) * _steps(file)
                if first is None:
                    first = leaves
                    self.plan = make_plan(leaves, odd, keys)
                    self._settle_shifted(file)
                self._check_alike(found.path, first, leaves)

    def run(
        self, writer: DatasetWriter, task: str, report: ExportReport, progress: Mode | None
    ) -> None:
        """Write what is not in the dataset yet."""
        plan = self.plan
        report.features = {name: dotted(key) for name, key in plan.columns.items()}
        if plan.makes_done:
            report.features[DONE] = ""
        report.cut_by = [dotted(key) for key in plan.flags]
        report.widened, report.left_out = plan.widened, plan.left_out
        before: dict[tuple[int, int], dict[str, Any]] = {}
        for source in writer.committed:
            before[source["iteration"], source["rank"]] = source
        with Progress(self.frames, "export", "frames", progress) as bar:
            for found in self._files:
                last = before.get((found.iteration, found.rank))
                with RolloutFile(found.path, self._memory) as file:
                    bar.note(found.path.name)
                    self._one(file, found, last, writer, task, report, bar)

    def _one(
        self,
        file: RolloutFile,
        found: Found,
        last: Mapping[str, Any] | None,
        writer: DatasetWriter,
        task: str,
        report: ExportReport,
        bar: Progress,
    ) -> None:
        """Write one rollout, from where the last commit of it ended."""
        with PackReader(found.path) as pack:
            digest = pack.index.digest
        if last is not None and last["digest"] != digest:
            raise UsageError(
                f"{found.path} is another file than the one exported before: export with "
                "--overwrite, or to another folder"
            )
        positions, steps = self._positions(file), _steps(file)
        done = 0 if last is None else int(last["stop"])
        report.skipped_frames += done * steps
        bar.advance(done * steps)
        for block in self._blocks(file, positions, done):
            values = _read(file, self.plan.keys_read(), positions[block])
            ended = self._ended(values, len(positions[block]), steps)
            for key, other in self.plan.shifted.items():
                if not _is_shifted(values[key], values[other], ended):
                    raise DataError(
                        f"{found.path}: {dotted(key)} is not always the next {dotted(other)}, as "
                        "in the first rollout; name the keys to write"
                    )
            columns, lengths = self._cut(values, ended)
            source = {
                "rollout": found.path.name,
                "iteration": found.iteration,
                "rank": found.rank,
                "digest": digest,
                "start": block.start,
                "stop": block.stop,
            }
            with writer.unit(source, [Episode(length, task) for length in lengths]) as unit:
                unit.add_rows(columns)
                unit.commit()
            report.episodes += len(lengths)
            report.frames += sum(lengths)
            bar.advance(sum(lengths))

    def _cut(
        self, values: Mapping[Key, NDArray[Any]], ended: NDArray[np.bool_]
    ) -> tuple[dict[str, NDArray[Any]], list[int]]:
        """Cut a block into episodes; a row that does not end with one is cut at its end."""
        cuts = ended.copy()
        cuts[:, -1] = True
        lengths = np.diff(np.flatnonzero(cuts.reshape(-1)), prepend=-1).tolist()
        columns = {
            name: _rows(values[key], self.plan.leaves[key].feature)
            for name, key in self.plan.columns.items()
        }
        if self.plan.makes_done:
            columns[DONE] = ended.reshape(-1, 1)
        return columns, lengths

    def _ended(
        self, values: Mapping[Key, NDArray[Any]], count: int, steps: int
    ) -> NDArray[np.bool_]:
        """Tell after which steps an episode ended: (environments, steps)."""
        ended = np.zeros((count, steps), np.bool_)
        for key in self.plan.flags:
            ended |= values[key].reshape(count, steps) != 0
        return ended

    def _settle_shifted(self, file: RolloutFile) -> None:
        """Leave out what is the next frame of another key, all through the first rollout."""
        plan, positions = self.plan, self._positions(file)
        for block in self._blocks(file, positions, 0) if plan.shifted else ():
            wanted = [*plan.shifted, *plan.shifted.values(), *plan.flags]
            values = _read(file, wanted, positions[block])
            ended = self._ended(values, len(positions[block]), _steps(file))
            for key, other in list(plan.shifted.items()):
                if not _is_shifted(values[key], values[other], ended):
                    del plan.shifted[key]
        for key, other in plan.shifted.items():
            plan.columns = {name: own for name, own in plan.columns.items() if own != key}
            plan.left_out[dotted(key)] = (
                f"it is {dotted(other)} of the next frame; that after an episode's last is not kept"
            )

    def _positions(self, file: RolloutFile) -> NDArray[np.int64]:
        size = file.axes.batch[_env_axis(file)]
        return Picked.of("envs", slice(None) if self._envs is None else self._envs, size).positions

    def _blocks(
        self, file: RolloutFile, positions: NDArray[np.int64], start: int
    ) -> Iterator[slice]:
        """Yield blocks of environments that take little memory, at least one at a time."""
        count = max(1, _BLOCK_BYTES // max(1, self.plan.frame_bytes * _steps(file)))
        if count > _ROWS_OF_A_BLOCK:
            count -= count % _ROWS_OF_A_BLOCK
        while start < len(positions):
            stop = min(len(positions), start - start % count + count)
            yield slice(start, stop)
            start = stop

    def _check_alike(
        self, path: Path, first: Mapping[Key, Leaf], leaves: Mapping[Key, Leaf]
    ) -> None:
        for key in self.plan.keys_read():
            if leaves.get(key) != first[key]:
                there = leaves.get(key, "missing")
                raise DataError(
                    f"{path}: {dotted(key)} is {there}, and {first[key]} in the first rollout; "
                    "export them apart (iterations=…), or name the keys to write"
                )


def _env_axis(file: RolloutFile) -> int:
    assert file.axes.env is not None  # seen by `_look`
    return file.axes.env


def _steps(file: RolloutFile) -> int:
    return file.axes.batch[1 - _env_axis(file)]


def _look(file: RolloutFile, path: Path) -> tuple[dict[Key, Leaf], dict[Key, str]]:
    """Return what a frame of each key is, and what is odd about the other keys; nothing is read."""
    axes = file.axes
    if axes.env is None or axes.time is None or 0 in axes.batch:
        raise DataError(
            f"{path}: its batch size {list(axes.batch)} is no [environments, steps]; save rollouts "
            "with these two axes"
        )
    leaves: dict[Key, Leaf] = {}
    odd: dict[Key, str] = {}
    for key, value in _leaves(file.read(_CPU, envs=slice(0, 0)), ()):
        if not isinstance(value, torch.Tensor | np.ndarray):
            odd[key] = f"a {type(value).__name__}, no tensor"
        elif value.ndim < 2 or value.shape[axes.env] or value.shape[axes.time] != _steps(file):
            odd[key] = f"its shape {list(value.shape)} does not begin with [environments, steps]"
        else:
            dtype = (
                DTYPE_NAMES[value.dtype] if isinstance(value, torch.Tensor) else value.dtype.name
            )
            leaves[key] = Leaf(dtype, tuple(value.shape[2:]))
    return leaves, odd


def _leaves(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, TensorDict | dict):
        for name in value.keys():  # noqa: SIM118 - a TensorDict iterates over its steps instead
            below = value.get(name)
            yield from _leaves(below, (*key, *(name if isinstance(name, tuple) else (name,))))
    else:
        yield key, value


def _read(
    file: RolloutFile, keys: Sequence[Key], positions: NDArray[np.int64]
) -> dict[Key, NDArray[Any]]:
    """Read keys of some environments as arrays (environments, steps, …) that LeRobot can hold."""
    found: dict[Key, NDArray[Any]] = {}
    for key, value in _leaves(file.read(_CPU, keys=keys, envs=positions), ()):
        if key not in keys:
            continue  # a key below another, in a dict
        if isinstance(value, torch.Tensor):
            wide = value.is_floating_point() and value.element_size() < 4
            array = (value.float() if wide else value).numpy()
        else:
            array = value.astype(np.float32) if value.dtype == np.float16 else value
        found[key] = array if file.axes.env == 0 else array.swapaxes(0, 1)
    return found


def _rows(values: NDArray[Any], feature: Feature) -> NDArray[Any]:
    """Return the frames of all environments, one behind the other."""
    return np.ascontiguousarray(values).reshape(-1, *feature.shape)


def _is_shifted(following: NDArray[Any], values: NDArray[Any], ended: NDArray[np.bool_]) -> bool:
    """Tell whether each frame is, bit for bit, the next one of the other, inside episodes."""
    inside = ~ended[:, :-1]
    one = np.ascontiguousarray(following[:, :-1][inside])
    other = np.ascontiguousarray(values[:, 1:][inside])
    return one.tobytes() == other.tobytes()


def _json_of(envs: Any) -> Any:
    """Return the choice of environments as JSON, to be compared on a resume."""
    if isinstance(envs, slice):
        return [envs.start, envs.stop, envs.step]
    with suppress(AttributeError):
        return envs.tolist()
    return list(envs) if isinstance(envs, tuple) else envs
