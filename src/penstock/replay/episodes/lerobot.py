"""Read a LeRobot dataset into a replay buffer, a window of frames at a time."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.dataset.layout import AUTO_FEATURES
from penstock.dataset.reader import Dataset, Episode, Frame
from penstock.dataset.tables import Columns
from penstock.errors import DataError, UsageError
from penstock.replay.episodes.schema import nested
from penstock.replay.keys import Key, as_path
from penstock.ui.progress import Mode, Progress
from penstock.ui.suggestions import did_you_mean

if TYPE_CHECKING:
    from penstock.replay.episodes.buffer import DictReplayBuffer

DONE = "next.done"
# What a step leads to: LeRobot calls it next.reward, a replay buffer reward.
_RESULTS = ("reward", "done", "terminated", "truncated", "success")
_WINDOW_BYTES = 16 << 20
_WINDOW_FRAMES = 4096


@dataclass(frozen=True)
class Source:
    """Which features of which episodes go into a buffer, and under which keys."""

    dataset: Dataset
    keys: dict[str, Key]  # of each feature; `next.done` may be one that the dataset does not have
    episodes: list[int]

    @classmethod
    def open(
        cls,
        dataset: str | os.PathLike[str] | Dataset,
        keys: Iterable[str] | None,
        episodes: Iterable[int] | None,
        rename: Mapping[str, Key] | None,
    ) -> Source:
        """Check what the user asks for; see `DictReplayBuffer.from_lerobot`."""
        opened = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
        if isinstance(keys, str):
            raise UsageError(f"keys is the text {keys!r}; give a list of features")
        given = _usual(opened) if keys is None else list(keys)
        chosen = [_feature(opened, name) for name in given]
        found: dict[str, Key] = {name: _short(name) for name in chosen}
        for name, key in (rename or {}).items():
            feature = _feature(opened, name)
            if feature not in found:
                hint = did_you_mean(name, found)
                raise UsageError(f"rename: {name!r} is not one of the keys; {hint}")
            found[feature] = key
        numbers = list(range(len(opened))) if episodes is None else list(episodes)
        for number in numbers:
            opened.episode(number)
        if not numbers:
            raise UsageError(f"{opened.path}: there is no episode to read; choose at least one")
        return cls(opened, found, numbers)

    @property
    def frames(self) -> int:
        """Frames of all chosen episodes."""
        return sum(len(self.dataset.episode(number)) for number in self.episodes)

    @property
    def paths(self) -> list[Key]:
        """The keys of the buffer."""
        return list(self.keys.values())

    def fill(self, buffer: DictReplayBuffer, progress: Mode | None) -> None:
        """Add the episodes to a buffer that has these keys."""
        features = self.dataset.features
        cameras = [name for name in self.keys if name in features and features[name].is_picture]
        numbers = [name for name in self.keys if name in features and name not in cameras]
        # An index is always read: it counts the rows where only pictures are asked for.
        pieces = self.dataset.scan(list({*numbers, "index"}), self.episodes)
        with Progress(self.frames, "read", "frames", progress) as bar:
            for number in self.episodes:
                episode = self.dataset.episode(number)
                with buffer.episode() as parts:
                    for part in self._parts(episode, pieces, cameras):
                        parts.extend(nested((as_path(key), value) for key, value in part.items()))
                        bar.advance(len(next(iter(part.values()))))

    def _parts(
        self, episode: Episode, pieces: Iterator[tuple[Episode, Columns]], cameras: list[str]
    ) -> Iterator[dict[Key, NDArray[Any]]]:
        """Yield an episode in windows that take little memory."""
        window = self._window()
        frames = cast("Generator[Frame, None, None]", episode.frames(cameras))
        done = 0
        with closing(frames):
            while done < len(episode):
                _, columns = next(pieces)
                rows = len(columns["index"])
                for start in range(0, rows, window):
                    count = min(window, rows - start)
                    part = {
                        key: columns[name][start : start + count]
                        for name, key in self.keys.items()
                        if name in columns
                    }
                    if cameras:
                        pictures = _stacked(itertools.islice(frames, count), count, cameras)
                        part |= {self.keys[name]: pictures[name] for name in cameras}
                    done += count
                    if DONE in self.keys and DONE not in columns:
                        ends = np.zeros(count, np.bool_)
                        ends[-1] = done == len(episode)
                        part[self.keys[DONE]] = ends
                    yield part

    def _window(self) -> int:
        """Return how many frames are read at a time."""
        frame_bytes = 1
        for name in self.keys:
            feature = self.dataset.features.get(name)
            if feature is not None:
                width = 2 if feature.is_picture else np.dtype(feature.dtype).itemsize
                frame_bytes += width * math.prod(feature.shape)
        return max(1, min(_WINDOW_FRAMES, _WINDOW_BYTES // frame_bytes))


def _usual(dataset: Dataset) -> list[str]:
    """Return the features that are read unless others are asked for."""
    found = [
        name
        for name, feature in dataset.features.items()
        if name not in AUTO_FEATURES and feature.dtype != "string"
    ]
    return found if DONE in found or "done" in found else [*found, DONE]


def _feature(dataset: Dataset, name: str) -> str:
    """Return the feature of a name: its own, or the short one of a step's results."""
    features = dataset.features
    for known in (name, f"next.{name}"):
        if known in features:
            if features[known].dtype == "string":
                raise UsageError(f"{known!r} is text, which a replay buffer cannot hold")
            return known
    if name in ("done", DONE):
        return DONE
    raise UsageError(f"{dataset.path} has no feature {name!r}; {did_you_mean(name, features)}")


def _short(name: str) -> str:
    short = name.removeprefix("next.")
    return short if short in _RESULTS else name


def _stacked(frames: Iterator[Frame], count: int, cameras: list[str]) -> Columns:
    """Return pictures of so many frames as one array per camera."""
    found: Columns = {}
    for row, frame in enumerate(frames):
        for name in cameras:
            picture = frame[name]
            if name not in found:
                found[name] = np.empty((count, *picture.shape), picture.dtype)
            if picture.shape != found[name].shape[1:] or picture.dtype != found[name].dtype:
                raise DataError(
                    f"{name!r} has pictures of {list(picture.shape)} and of "
                    f"{list(found[name].shape[1:])}: a buffer needs them alike"
                )
            found[name][row] = picture
    return found
