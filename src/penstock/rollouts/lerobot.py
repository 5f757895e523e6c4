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
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from penstock.core.files import storage_error
from penstock.core.memory import format_bytes
from penstock.core.reuse import ReusedMemory
from penstock.dataset.layout import AUTO_FEATURES, DTYPES, VERSIONS, Feature, Version
from penstock.dataset.unit import Episode
from penstock.dataset.writer import DatasetWriter, is_empty
from penstock.dataset.writer import Mode as OpenMode
from penstock.errors import DataError, UsageError
from penstock.rollouts.file import NAME, RolloutFile
from penstock.rollouts.structure import Key, Picked, as_path
from penstock.tensors import tensor_over
from penstock.ui.progress import Mode, Progress
from penstock.ui.report import aligned
from penstock.ui.suggestions import did_you_mean

DONE = "next.done"
FLAGS = ("done", "terminated", "truncated")
_RESULTS = ("reward", *FLAGS)
_DONE_WORDS = ("done", DONE, ("done",))
_KNOWN = {
    ("observation",): "observation.state",
    ("state",): "observation.state",
    ("lidar",): "observation.lidar",
}
_WIDENED = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_MOST_DIMENSIONS = 5
_MODES = ("create", "resume", "overwrite")
_BLOCK_BYTES = 16 << 20
_ROWS_OF_A_BLOCK = 128  # environments that lie together in a file
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

    Example:
        report = penstock.export("runs/x/rollouts", "flights", fps=10)
        print(report.text())
    """
    start_s = time.perf_counter()
    for name, value, known in (("mode", mode, _MODES), ("version", version, VERSIONS)):
        if value not in known:
            raise UsageError(f"{name} is {value!r}: {did_you_mean(value, known)}")
    if not isinstance(task, str) or not task.strip():
        raise UsageError(f"task is {task!r}: say what was to be done, such as 'navigate'")
    source = Path(rollouts).absolute()
    target = Path(out).absolute()
    if mode == "overwrite" and target.resolve() in (source.resolve(), *source.resolve().parents):
        raise UsageError(
            f"{source} lies in {target}, which would be deleted: choose another folder"
        )
    if mode == "create" and target.is_dir() and not is_empty(target):
        raise UsageError(f"{target} is not empty: --resume goes on, --overwrite replaces it")
    files = find_rollouts(source, iterations)
    work = _Export(files, keys, envs)
    report = ExportReport(target, fps=fps, rollouts=len(files))
    with DatasetWriter(
        target,
        work.features,
        fps,
        version=version,
        mode=cast("OpenMode", mode),
        settings={"export": {"envs": _json_of(envs), "task": task}},
    ) as writer:
        work.run(writer, task, report, progress)
        writer.build()
        report.total_episodes, report.total_frames = writer.total_episodes, writer.total_frames
    report.seconds = time.perf_counter() - start_s
    report.bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return report


class _Export:
    """Rollouts that were looked at, all alike, and what of them is written."""

    def __init__(self, files: Sequence[Found], keys: Sequence[str | Key] | None, envs: Any) -> None:
        if isinstance(envs, bool) or (type(envs) is int and envs < 1):
            raise UsageError(f"envs={envs!r}: give how many environments, at least 1")
        self._memory = ReusedMemory()
        self._files = files
        self._envs = slice(envs) if envs is None or type(envs) is int else envs
        self.frames = 0
        self._leaves: dict[Key, Leaf] = {}
        for found in files:  # all of them, before anything is written
            with _Rollout(found.path, self._memory, self._envs) as file:
                self.frames += len(file.positions) * file.steps
                if not self._leaves:
                    self._choose(file, keys)
                    self._settle_shifted(file)
                for key in self._keys_read():
                    if file.leaves.get(key) != self._leaves[key]:
                        there = file.leaves.get(key, "missing")
                        raise DataError(
                            f"{found.path}: {dotted(key)} is {there}, and {self._leaves[key]} in "
                            "the first rollout; export them apart (iterations=…), or name the keys"
                        )

    def _choose(self, file: _Rollout, asked: Sequence[str | Key] | None) -> None:
        """Decide, from the first rollout, what is written."""
        good = {key: leaf for key, leaf in file.leaves.items() if not leaf.problem}
        bad = file.odd | {key: leaf.problem for key, leaf in file.leaves.items() if leaf.problem}
        names = feature_names(good)
        flags = [k for k, leaf in good.items() if k[-1] in FLAGS and math.prod(leaf.shape) == 1]
        # What TorchRL's collectors store under "next" is the state after the step; the same names
        # outside of it are then the state before.
        self.flags = [key for key in flags if key[0] == "next"] or flags
        chosen = names if asked is None else _asked(asked, names, bad)
        self.columns = {name: key for key, name in chosen.items()}
        self._leaves = good
        self.left_out: dict[str, str] = {}  # keys that are not written, and why
        self.shifted: dict[Key, Key] = {}  # those that are the next frame of another
        if asked is None:
            self.left_out = {dotted(key): why for key, why in bad.items()}
            after = [key for key in good if key[0] == "next" and key[-1] not in _RESULTS]
            self.shifted = {key: key[1:] for key in after if good.get(key[1:]) == good[key]}
        wants_done = asked is None or any(word in _DONE_WORDS for word in asked)
        # It is then written though there is no such key: any of the flags.
        self.makes_done = bool(flags) and DONE not in names.values() and wants_done
        if not self.columns and not self.makes_done:
            raise UsageError("the rollout has no key that a dataset can hold")

    @property
    def features(self) -> dict[str, Feature]:
        """The features of the dataset."""
        found = {name: self._leaves[key].feature for name, key in self.columns.items()}
        return found | ({DONE: Feature("bool", (1,))} if self.makes_done else {})

    def _keys_read(self) -> list[Key]:
        keys = (*self.columns.values(), *self.flags, *self.shifted, *self.shifted.values())
        return list(dict.fromkeys(keys))

    def run(
        self, writer: DatasetWriter, task: str, report: ExportReport, progress: Mode | None
    ) -> None:
        """Write what is not in the dataset yet, from where the last commit ended."""
        for name, key in self.columns.items():
            report.features[name] = dotted(key)
            if (dtype := self._leaves[key].dtype) in _WIDENED:
                report.widened[name] = dtype
        report.features |= {DONE: ""} if self.makes_done else {}
        report.cut_by, report.left_out = list(map(dotted, self.flags)), self.left_out
        before = {(source["iteration"], source["rank"]): source for source in writer.committed}
        with Progress(self.frames, "export", "frames", progress) as bar:
            for found in self._files:
                bar.note(found.path.name)
                last = before.get((found.iteration, found.rank))
                with _Rollout(found.path, self._memory, self._envs) as file:
                    if last is not None and last["digest"] != file.digest:
                        raise UsageError(
                            f"{found.path} is another file than the one exported before: export "
                            "with --overwrite, or to another folder"
                        )
                    done = 0 if last is None else int(last["stop"])
                    report.skipped_frames += done * file.steps
                    bar.advance(done * file.steps)
                    for source, columns, lengths in self._units(file, found, done):
                        with writer.unit(source, [Episode(n, task) for n in lengths]) as unit:
                            unit.add_rows(columns)
                            unit.commit()
                        report.episodes += len(lengths)
                        report.frames += sum(lengths)
                        bar.advance(sum(lengths))

    def _units(
        self, file: _Rollout, found: Found, done: int
    ) -> Iterator[tuple[dict[str, Any], dict[str, NDArray[Any]], list[int]]]:
        """Yield blocks of environments, cut into episodes: source, columns, lengths."""
        features = self.features
        for block, values, ended in self._blocks(file, self._keys_read(), done):
            for key, other in self.shifted.items():
                if not _is_shifted(values[key], values[other], ended):
                    raise DataError(
                        f"{found.path}: {dotted(key)} is not always the next {dotted(other)}, as "
                        "in the first rollout; name the keys to write"
                    )
            cuts = ended.copy()
            cuts[:, -1] = True  # a row that does not end with an episode is cut at its end
            lengths = np.diff(np.flatnonzero(cuts), prepend=-1).tolist()
            columns = {
                name: np.ascontiguousarray(values[key]).reshape(-1, *features[name].shape)
                for name, key in self.columns.items()
            }
            if self.makes_done:
                columns[DONE] = ended.reshape(-1, 1)
            source = {"rollout": found.path.name, "iteration": found.iteration, "rank": found.rank}
            source |= {"digest": file.digest, "start": block.start, "stop": block.stop}
            yield source, columns, lengths

    def _settle_shifted(self, file: _Rollout) -> None:
        """Leave out what is the next frame of another key, all through the first rollout."""
        wanted = [*self.shifted, *self.shifted.values(), *self.flags]
        for _, values, ended in self._blocks(file, wanted, 0) if self.shifted else ():
            for key, other in list(self.shifted.items()):
                if not _is_shifted(values[key], values[other], ended):
                    del self.shifted[key]
        self.columns = {name: key for name, key in self.columns.items() if key not in self.shifted}
        for key, other in self.shifted.items():
            self.left_out[dotted(key)] = (
                f"it is {dotted(other)} of the next frame; that after an episode's last is not kept"
            )

    def _blocks(
        self, file: _Rollout, keys: Sequence[Key], start: int
    ) -> Iterator[tuple[slice, dict[Key, NDArray[Any]], NDArray[np.bool_]]]:
        """Read blocks of environments that take little memory; yield which, what, and the ends."""
        read = [self._leaves[key].feature for key in self._keys_read()]
        frame_bytes = sum(math.prod(one.shape) * np.dtype(one.dtype).itemsize for one in read)
        count = max(1, _BLOCK_BYTES // max(1, frame_bytes * file.steps))
        if count > _ROWS_OF_A_BLOCK:
            count -= count % _ROWS_OF_A_BLOCK
        while start < len(file.positions):
            stop = min(len(file.positions), start - start % count + count)
            values = file.arrays(keys, file.positions[start:stop])
            ended = np.zeros((stop - start, file.steps), np.bool_)
            for key in self.flags:
                ended |= values[key].reshape(ended.shape) != 0
            yield slice(start, stop), values, ended
            start = stop


class _Rollout(RolloutFile):
    """A rollout of [environments, steps]; what a frame of each key is, or what is odd about it."""

    def __init__(self, path: Path, memory: ReusedMemory, envs: Any) -> None:
        super().__init__(path, memory)
        env, time = self.axes.env, self.axes.time
        if env is None or time is None or 0 in self.axes.batch:
            self.close()
            raise DataError(
                f"{path}: its batch size {list(self.axes.batch)} is no [environments, steps]; save "
                "rollouts with these two axes"
            )
        self.positions = Picked.of("envs", envs, self.axes.batch[env]).positions
        self.steps = self.axes.batch[time]
        self.leaves: dict[Key, Leaf] = {}
        self.odd: dict[Key, str] = {}
        for key, entry in self.entries.items():
            if entry is None:
                self.odd[key] = "no tensor"
            elif self.axes.cover(entry.shape):
                self.leaves[key] = Leaf(entry.dtype, entry.shape[2:])
            else:
                shape = list(entry.shape)
                self.odd[key] = f"its shape {shape} does not begin with [environments, steps]"

    def arrays(self, keys: Sequence[Key], envs: NDArray[np.int64]) -> dict[Key, NDArray[Any]]:
        """Read keys of some environments as arrays [env, time, …] that LeRobot can hold."""
        found: dict[Key, NDArray[Any]] = {}
        for key in keys:
            array, dtype = self.read_words(key, envs), self.leaves[key].dtype
            if dtype in _WIDENED:
                array = tensor_over(array, dtype).float().numpy()
            found[key] = array if self.axes.env == 0 else array.swapaxes(0, 1)
        return found


def _is_shifted(following: NDArray[Any], values: NDArray[Any], ended: NDArray[np.bool_]) -> bool:
    """Tell whether each frame is, bit for bit, the next one of the other, inside episodes."""
    inside = ~ended[:, :-1]
    return following[:, :-1][inside].tobytes() == values[:, 1:][inside].tobytes()


def _json_of(envs: Any) -> Any:
    """Return the choice of environments as JSON, to be compared on a resume."""
    if isinstance(envs, slice):
        return [envs.start, envs.stop, envs.step]
    with suppress(AttributeError):
        return envs.tolist()
    return list(envs) if isinstance(envs, tuple) else envs


class Found(NamedTuple):
    """One rollout: its file, its number, and the process that saved it."""

    path: Path
    iteration: int
    rank: int = 0


def find_rollouts(path: Path, iterations: Iterable[int] | None) -> list[Found]:
    """Return the rollouts of a file, a folder or a run, in order."""
    if not path.exists():
        raise UsageError(f"{path} does not exist; check the path")
    if path.is_file():
        match = NAME.fullmatch(path.name)
        found = [Found(path, int(match[1]) if match else 0)]
    else:
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        try:
            ranks = [(int(m[1]), f) for f in folder.iterdir() if (m := _RANK.fullmatch(f.name))]
            folders = [(0, folder), *((rank, f) for rank, f in ranks if f.is_dir())]
            files = [(file, rank) for rank, f in folders for file in f.iterdir()]
        except OSError as error:
            raise storage_error("read", folder, error) from error
        found = [Found(f, int(m[1]), rank) for f, rank in files if (m := NAME.fullmatch(f.name))]
    if not found:
        raise UsageError(f"there is no rollout in {path}; give a folder with rollout_*.pack files")
    numbers = sorted({each.iteration for each in found})
    wanted = set(numbers if iterations is None else iterations)
    if missing := wanted.difference(numbers):
        raise UsageError(
            f"no rollout {min(missing)} in {path}: there are {len(numbers)}, from {numbers[0]} to "
            f"{numbers[-1]}"
        )
    chosen = (each for each in found if each.iteration in wanted)
    return sorted(chosen, key=lambda each: (each.iteration, each.rank))


class Leaf(NamedTuple):
    """What one frame of a key is: its type, by the pack's name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def feature(self) -> Feature:
        """Return the feature that holds it exactly."""
        dtype = "float32" if self.dtype in _WIDENED else self.dtype
        first, rest = self.shape[: _MOST_DIMENSIONS - 1], self.shape[_MOST_DIMENSIONS - 1 :]
        return Feature(dtype, (*first, *([math.prod(rest)] if rest else [])) or (1,))

    @property
    def problem(self) -> str:
        """Say why it cannot be written; nothing if it can."""
        if not math.prod(self.shape):
            return f"its frames are empty: {self}"
        return "" if self.feature.dtype in DTYPES else f"LeRobot has no {self.dtype}"


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
    first = {name: key for key, name in reversed(names.items())}
    for key, name in names.items():
        if first[name] != key:
            raise UsageError(
                f"{first[name]!r} and {key!r} would both be the feature {name!r}; rename one, or "
                "choose by keys"
            )
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
    if own in _KNOWN:
        return after + _KNOWN[own]
    if "observation" in own[:-1]:
        own = own[own.index("observation") :]
    return after + dotted(own)


def _asked(
    asked: Sequence[str | Key], names: Mapping[Key, str], bad: Mapping[Key, str]
) -> dict[Key, str]:
    """Return the keys that are asked for: by feature, by tuple, or with dots; or how they begin."""
    if isinstance(asked, str | tuple):
        raise UsageError(f"keys={asked!r}: give a list of keys, as [{asked!r}]")

    def means(word: str | Key, key: Key) -> bool:
        if isinstance(word, tuple):
            return key[: len(word)] == word
        return word == names.get(key) or f"{dotted(key)}.".startswith(f"{word}.")

    chosen: set[Key] = set()
    for word in asked:
        found = {key for key in names if means(word, key)}
        chosen |= found
        made = word in _DONE_WORDS and any(key[-1] in FLAGS for key in names)  # of the flags
        if not found and not made:
            known = dict.fromkeys([*names.values(), *map(dotted, names)])
            problem = next((f"{key!r}: {why}" for key, why in bad.items() if means(word, key)), "")
            hint = problem or did_you_mean(dotted(as_path(word)), list(known))
            raise UsageError(f"no key {word!r} in this rollout can be written: {hint}")
    return {key: name for key, name in names.items() if key in chosen}


@dataclass
class ExportReport:
    """What an export did; totals and bytes are of the dataset, with all that was there before."""

    out: Path
    episodes: int = 0  # written in this run
    frames: int = 0  # written in this run: as many as were read
    seconds: float = 0.0
    bytes: int = 0
    total_episodes: int = 0
    total_frames: int = 0
    fps: int = 0
    rollouts: int = 0  # files that were read
    skipped_frames: int = 0  # of these rollouts, there already
    features: dict[str, str] = field(default_factory=dict)  # the key of each; "" for one made
    cut_by: list[str] = field(default_factory=list)  # the keys that say where an episode ends
    widened: dict[str, str] = field(default_factory=dict)  # is float32 now, exactly; what it was
    left_out: dict[str, str] = field(default_factory=dict)  # keys, and why

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**vars(self), "out": str(self.out), "seconds": round(self.seconds, 3)}

    def text(self) -> str:
        """Return the summary for the terminal."""
        rate = self.episodes / self.seconds if self.seconds else 0.0
        before = f", {self.skipped_frames} were there already" if self.skipped_frames else ""
        cut = ", ".join(self.cut_by) or "nothing: the row of each environment is one episode"
        totals = f"{self.total_episodes} episodes, {self.total_frames} frames at {self.fps} fps"
        frames = f"{self.frames} frames in, {self.frames} frames out{before}"
        took = f"{self.episodes} in {self.seconds:.1f} s ({rate:.0f} per second)"
        lines = [
            ("dataset", f"{self.out}: {totals}, {format_bytes(self.bytes)}"),
            ("rollouts", f"{self.rollouts} read: {frames}"),
            ("episodes", f"{took}, cut by {cut}"),
            ("features", ", ".join(self.features)),
        ]
        lines += [("widened", f"{n}: {d} is float32 now, exactly") for n, d in self.widened.items()]
        return aligned([*lines, *(("left out", f"{n}: {why}") for n, why in self.left_out.items())])
