"""Write rollouts as a LeRobot dataset: the row of each environment, cut where an episode ended.

Values are exact. A block of environments is read, cut and committed at a time, so that memory does
not grow with the rollouts, and a crash loses no more than the block that was under way. Keys become
features:

    ("agents", "observation", "state")      observation.state
    ("observation",)                        observation.state
    (…, "action")                           action
    (…, "reward"), ("next", "reward")       next.reward; alike done, terminated, truncated
    anything else                           its names, joined by dots
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.files import storage_error
from penstock.core.memory import format_bytes
from penstock.core.pack import PackReader
from penstock.core.reuse import ReusedMemory
from penstock.dataset.layout import AUTO_FEATURES, DTYPES, VERSIONS, Feature, Version
from penstock.dataset.unit import Episode
from penstock.dataset.writer import DatasetWriter, is_empty
from penstock.dataset.writer import Mode as OpenMode
from penstock.errors import DataError, UsageError
from penstock.rollouts.file import RolloutFile
from penstock.rollouts.structure import Key, Picked
from penstock.rollouts.tensordicts import TensorDict
from penstock.tensors import DTYPE_NAMES
from penstock.ui.progress import Mode, Progress
from penstock.ui.report import aligned
from penstock.ui.suggestions import did_you_mean

DONE = "next.done"
FLAGS = ("done", "terminated", "truncated")
_RESULTS = ("reward", *FLAGS)
_WIDENED = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_MOST_DIMENSIONS = 5
_MODES: tuple[OpenMode, ...] = ("create", "resume", "overwrite")
_BLOCK_BYTES = 16 << 20
_ROWS_OF_A_BLOCK = 128  # environments that lie together in a file
_CPU = torch.device("cpu")
_NAME = re.compile(r"rollout_(\d{6,})\.pack")
_RANK = re.compile(r"rank_(\d+)")


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


@dataclass(frozen=True)
class Found:
    """One rollout: its file, its number, and the process that saved it."""

    path: Path
    iteration: int
    rank: int = 0


def find_rollouts(path: Path, iterations: Iterable[int] | None) -> list[Found]:
    """Return the rollouts of a file, a folder or a run, in order."""
    if not path.exists():
        raise UsageError(f"{path} does not exist; check the path")
    if path.is_file():
        match = _NAME.fullmatch(path.name)
        found = [Found(path, int(match[1]) if match else 0)]
    else:
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        try:
            found = list(_in_folder(folder, 0))
            for below in folder.iterdir():
                if (match := _RANK.fullmatch(below.name)) and below.is_dir():
                    found += _in_folder(below, int(match[1]))
        except OSError as error:
            raise storage_error("read", folder, error) from error
    if not found:
        raise UsageError(f"there is no rollout in {path}; give a folder with rollout_*.pack files")
    if iterations is not None:
        wanted = set(iterations)
        missing = wanted - {each.iteration for each in found}
        if missing:
            numbers = sorted({each.iteration for each in found})
            raise UsageError(
                f"no rollout {min(missing)} in {path}: there are {len(numbers)}, from "
                f"{numbers[0]} to {numbers[-1]}"
            )
        found = [each for each in found if each.iteration in wanted]
    return sorted(found, key=lambda each: (each.iteration, each.rank))


def _in_folder(folder: Path, rank: int) -> Iterator[Found]:
    for file in folder.iterdir():
        if match := _NAME.fullmatch(file.name):
            yield Found(file, int(match[1]), rank)


@dataclass(frozen=True)
class Leaf:
    """What one frame of a key is: its type, by the pack's name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def feature(self) -> Feature:
        """Return the feature that holds it exactly."""
        dtype = "float32" if self.dtype in _WIDENED else self.dtype
        shape = self.shape or (1,)
        if len(shape) > _MOST_DIMENSIONS:
            first = shape[: _MOST_DIMENSIONS - 1]
            shape = (*first, math.prod(shape[len(first) :]))
        return Feature(dtype, shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one frame of the feature."""
        return math.prod(self.shape) * np.dtype(self.feature.dtype).itemsize


@dataclass
class Plan:
    """What is written, and what is not.

    Attributes:
        columns: The key of each feature.
        leaves: What a frame of each key is, of those that are read.
        flags: The keys that say where an episode ends; any of them does.
        makes_done: `next.done` is written though there is no such key: any of the flags.
        shifted: Keys left out since they are the next frame of another; see `check_shifted`.
        left_out: Keys that are not written, and why.
    """

    columns: dict[str, Key]
    leaves: dict[Key, Leaf]
    flags: list[Key]
    makes_done: bool = False
    shifted: dict[Key, Key] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def features(self) -> dict[str, Feature]:
        """The features of the dataset."""
        found = {name: self.leaves[key].feature for name, key in self.columns.items()}
        return found | ({DONE: Feature("bool", (1,))} if self.makes_done else {})

    @property
    def widened(self) -> dict[str, str]:
        """Features that hold their numbers in a wider type, and in which they were."""
        return {
            name: self.leaves[key].dtype
            for name, key in self.columns.items()
            if self.leaves[key].dtype in _WIDENED
        }

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame of everything that is read."""
        return sum(self.leaves[key].nbytes for key in self.keys_read())

    def keys_read(self) -> list[Key]:
        """Return every key that is read."""
        return list(
            dict.fromkeys(
                [*self.columns.values(), *self.flags, *self.shifted, *self.shifted.values()]
            )
        )


def make_plan(
    leaves: Mapping[Key, Leaf], odd: Mapping[Key, str], asked: Sequence[str | Key] | None
) -> Plan:
    """Decide what is written."""
    good = {key: leaf for key, leaf in leaves.items() if not _problem(leaf)}
    bad = dict(odd) | {key: problem for key, leaf in leaves.items() if (problem := _problem(leaf))}
    names = feature_names(good)
    chosen = names if asked is None else _asked(asked, names, bad)
    flags = flags_of(good)
    plan = Plan({name: key for key, name in chosen.items()}, dict(good), flags)
    if asked is None:
        plan.left_out = {dotted(key): why for key, why in bad.items()}
        plan.shifted = {
            key: key[1:]
            for key in good
            if key[0] == "next" and key[-1] not in _RESULTS and good.get(key[1:]) == good[key]
        }
    wants_done = asked is None or any(word in (DONE, "done", ("done",)) for word in asked)
    plan.makes_done = bool(flags) and DONE not in names.values() and wants_done
    if not plan.columns and not plan.makes_done:
        raise UsageError("the rollout has no key that a dataset can hold")
    return plan


def _problem(leaf: Leaf) -> str:
    """Say why a key cannot be written; nothing if it can."""
    if not math.prod(leaf.shape):
        return f"its frames are empty: {leaf}"
    return "" if leaf.feature.dtype in DTYPES else f"LeRobot has no {leaf.dtype}"


def flags_of(leaves: Mapping[Key, Leaf]) -> list[Key]:
    """Return the keys that say, with one value per frame, that an episode ended with the step.

    What TorchRL's collectors store under "next" is the state after the step; the same names outside
    of it are then the state before.
    """
    found = [k for k, leaf in leaves.items() if k[-1] in FLAGS and math.prod(leaf.shape) == 1]
    return [key for key in found if key[0] == "next"] or found


def feature_names(keys: Iterable[Key]) -> dict[Key, str]:
    """Return the name of the feature of each key."""
    keys = list(keys)
    wanted = {key: _lerobot_name(key) for key in keys}
    if "action" not in wanted.values():
        wanted |= {key: "action" for key in keys if key[-1] == "action_normalized"}
    owners: dict[str, Key] = {}
    # Of two rewards the one after the step has the name, and else the outermost.
    for key in sorted(keys, key=lambda key: (key[0] != "next", len(key))):
        owners.setdefault(wanted[key], key)
    names = {key: wanted[key] if owners[wanted[key]] == key else dotted(key) for key in keys}
    names = {key: f"rollout.{n}" if n in AUTO_FEATURES else n for key, n in names.items()}
    seen: dict[str, Key] = {}
    for key, name in names.items():
        if name in seen:
            raise UsageError(
                f"{seen[name]!r} and {key!r} would both be the feature {name!r}; rename one, or "
                "choose by keys"
            )
        seen[name] = key
    return names


def dotted(key: Key) -> str:
    """Return a key as one name, without what a feature's name cannot have."""
    text = ".".join(str(part) for part in key)
    return text.replace("/", "_").replace("\\", "_").strip(".")


def _lerobot_name(key: Key) -> str:
    after, own = ("next.", key[1:]) if key[0] == "next" and len(key) > 1 else ("", key)
    if own[-1] in _RESULTS:
        return f"next.{own[-1]}"
    if own[-1] == "action":
        return f"{after}action"
    if own in (("observation",), ("state",)):
        return f"{after}observation.state"
    if own == ("lidar",):
        return f"{after}observation.lidar"
    if "observation" in own[:-1]:
        own = own[own.index("observation") :]
    return after + dotted(own)


def _asked(
    asked: Sequence[str | Key], names: Mapping[Key, str], bad: Mapping[Key, str]
) -> dict[Key, str]:
    """Return the keys that are asked for."""
    if isinstance(asked, str | tuple):
        raise UsageError(f"keys={asked!r}: give a list of keys, as [{asked!r}]")
    chosen: set[Key] = set()
    for word in asked:
        problem = next((f"{w!r}: {why}" for w, why in bad.items() if _is(word, w)), None)
        found = {key for key, name in names.items() if _is(word, key) or word == name}
        if not found and word in ("done", DONE, ("done",)) and flags_of_names(names):
            continue  # it is made of the flags
        if not found:
            known = [*names.values(), *map(dotted, names)]
            hint = problem or did_you_mean(dotted(_path(word)), list(dict.fromkeys(known)))
            raise UsageError(f"no key {word!r} in this rollout can be written: {hint}")
        chosen |= found
    return {key: name for key, name in names.items() if key in chosen}


def flags_of_names(names: Iterable[Key]) -> bool:
    """Tell whether a key is named like one that ends episodes."""
    return any(key[-1] in FLAGS for key in names)


def _path(word: str | Key) -> Key:
    return word if isinstance(word, tuple) else (word,)


def _is(word: str | Key, key: Key) -> bool:
    """Tell whether a word means a key: by its tuple or the beginning of it, or with dots."""
    if isinstance(word, tuple):
        return key[: len(word)] == word
    text = dotted(key)
    return text == word or text.startswith(f"{word}.")


@dataclass
class ExportReport:
    """What an export did.

    Attributes:
        out: The dataset.
        episodes: Episodes written in this run.
        frames: Frames written in this run: as many as were read.
        seconds: Wall clock.
        bytes: Of the dataset, with all that was there before.
        total_episodes: Of the dataset.
        total_frames: Of the dataset.
        fps: Of the dataset.
        rollouts: Files that were read.
        skipped_frames: Frames of these rollouts that were there already.
        features: The key of each feature; "" for one that was made.
        cut_by: The keys that say where an episode ends.
        widened: Features whose numbers are float32 now, exactly, and what they were.
        left_out: Keys that are not in the dataset, and why.
    """

    out: Path
    episodes: int = 0
    frames: int = 0
    seconds: float = 0.0
    bytes: int = 0
    total_episodes: int = 0
    total_frames: int = 0
    fps: int = 0
    rollouts: int = 0
    skipped_frames: int = 0
    features: dict[str, str] = field(default_factory=dict)
    cut_by: list[str] = field(default_factory=list)
    widened: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**vars(self), "out": str(self.out), "seconds": round(self.seconds, 3)}

    def text(self) -> str:
        """Return the summary for the terminal."""
        rate = self.episodes / self.seconds if self.seconds else 0.0
        before = f", {self.skipped_frames} were there already" if self.skipped_frames else ""
        cut = ", ".join(self.cut_by) or "nothing: the row of each environment is one episode"
        lines = [
            (
                "dataset",
                f"{self.out}: {self.total_episodes} episodes, {self.total_frames} frames at "
                f"{self.fps} fps, {format_bytes(self.bytes)}",
            ),
            (
                "rollouts",
                f"{self.rollouts} read: {self.frames} frames in, {self.frames} frames out{before}",
            ),
            (
                "episodes",
                f"{self.episodes} in {self.seconds:.1f} s ({rate:.0f} per second), cut by {cut}",
            ),
            ("features", ", ".join(self.features)),
        ]
        lines += [
            ("widened", f"{name}: {dtype} is float32 now, exactly")
            for name, dtype in self.widened.items()
        ]
        lines += [("left out", f"{name}: {why}") for name, why in self.left_out.items()]
        return aligned(lines)
