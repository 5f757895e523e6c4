"""Read a LeRobot dataset, v3.0 or v2.1, ours or lerobot's, without lerobot and without torch.

Example:
    dataset = Dataset("out/cups")
    for frame in dataset.episode(0).frames():
        frame["observation.state"], frame["observation.images.head"]   # an array, an RGB picture
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from penstock.dataset import metadata
from penstock.dataset.layout import Feature
from penstock.dataset.metadata import EpisodeRecord, Stats
from penstock.dataset.tables import Columns, Table, inside
from penstock.errors import CorruptFile, DataError, UsageError
from penstock.media.depth import DepthCoding
from penstock.media.images import ImageDecoder
from penstock.media.video import read_video

Frame = dict[str, Any]
_MOST_EXCHANGES = 10
_DOCTOR = "run `penstock doctor` on it"


class Dataset:
    """A dataset on disk. Opening reads the metadata only; pictures and rows stream when asked for.

    Args:
        path: The folder that holds `meta`, `data` and `videos`.
        open_file: Opens files of data and videos, where they are not whole in the folder.

    Attributes:
        path: That folder.
        info: What meta/info.json holds.
        version: "v3.0" or "v2.1".
        fps: Frames per second.
        features: The features by name.
        tasks: The task texts, in the order of their numbers.
        episodes: Every episode, in order.
        records: What the metadata say of each.

    Raises:
        UnknownFormat: There is no dataset.
        DataError: The metadata are damaged, or contradict themselves.
    """

    def __init__(
        self, path: str | os.PathLike[str], open_file: Callable[[Path], BinaryIO] | None = None
    ) -> None:
        self.path = Path(path)
        self._open_file = open_file
        for _ in range(_MOST_EXCHANGES):
            before = self._folder()
            try:
                self._read()
            except DataError:
                if self._folder() == before:
                    raise
            if self._folder() == before:
                break  # otherwise somebody has edited it meanwhile: files of two datasets
        self._opened = before[0]

    def _folder(self) -> tuple[int, int]:
        """Tell the folder from one that takes its place, and that from itself once it is back."""
        try:
            found = self.path.stat()
        except OSError:
            return 0, 0
        return found.st_ino, found.st_ctime_ns

    def _check_same(self) -> None:
        """See that no edit has put another folder here, whose files have the same names.

        Episodes that were added do no harm.
        """
        if self._folder()[0] != self._opened:
            now, known = Dataset(self.path), self.records
            if now.records[: len(known)] != known or now.features != self.features:
                raise DataError(f"{self.path} was edited since it was opened: open it again")
            self._opened = now._opened

    def _read(self) -> None:
        known = metadata.read_info(self.path)
        self._known = known
        self.info: dict[str, Any] = known.raw
        self.version = known.format.version
        self.fps = known.fps
        self.features = known.features
        empty = known.raw["total_episodes"] == 0
        # A writer adds tasks and episodes before info.json counts them: those do not exist yet.
        tasks = [] if empty else metadata.read_tasks(self.path, known.format)
        self.tasks = tasks[: known.raw["total_tasks"]]
        records = [] if empty else list(metadata.read_episodes(self.path, known))
        records = [record for record in records if record.index < known.raw["total_episodes"]]
        for source, problem in metadata.record_problems(known, self.tasks, records):
            raise DataError(f"{source} in {self.path}: {problem}; {_DOCTOR}")
        self.records = records
        starts: dict[str, int] = {}  # the first frame of each data file
        for record in records:
            starts.setdefault(record.data_file, record.from_index)
        self.episodes = [
            Episode(self, record, record.from_index - starts[record.data_file])
            for record in records
        ]

    def __len__(self) -> int:
        return len(self.episodes)

    def __repr__(self) -> str:
        return f"Dataset({str(self.path)!r}, {len(self)} episodes, {self.total_frames} frames)"

    @property
    def total_frames(self) -> int:
        """Return the number of frames of all episodes."""
        return self.episodes[-1].to_index if self.episodes else 0

    @property
    def camera_keys(self) -> list[str]:
        """Return the features that are pictures."""
        return [name for name, feature in self.features.items() if feature.is_picture]

    def episode(self, index: int) -> Episode:
        """Return one episode by its number."""
        if not 0 <= index < len(self.episodes):
            raise UsageError(f"{self.path} has no episode {index}: it has {len(self)}, from 0")
        return self.episodes[index]

    def video(self, name: str) -> Path | BinaryIO:
        """Return a video file by its path in the dataset; the caller closes one that is open."""
        self._check_same()
        path = inside(self.path, name)
        return path if self._open_file is None else self._open_file(path)

    def table(self, name: str) -> Table:
        """Open a data file by its path in the dataset."""
        path = inside(self.path, name)
        table = Table(self.path, name, self._open_file(path) if self._open_file else None)
        self._check_same()
        return table

    def scan(
        self, names: Sequence[str], episodes: Sequence[int] | None = None
    ) -> Iterator[tuple[Episode, Columns]]:
        """Read features of many episodes, in order; neighbours in a data file in one pass.

        Args:
            names: The features; no pictures.
            episodes: Numbers of the episodes; by default all.

        Yields:
            An episode, and some of its rows as `Episode.columns` has them: the rows of an episode
            come in order, in one piece or several.

        Raises:
            UsageError: There is no such episode or feature, or it is a picture.
            DataError: A file is damaged.
        """
        chosen = _choose(self, names, pictures=False)
        numbers = range(len(self)) if episodes is None else episodes
        # Neighbours have the same difference to their place in the list.
        for _, pairs in groupby(
            enumerate(map(self.episode, numbers)),
            lambda pair: (pair[1].data_file, pair[1].index - pair[0]),
        ):
            run = [episode for _, episode in pairs]
            yield from _rows(run, chosen, 0, sum(map(len, run)))

    def stats(self) -> Stats:
        """Read the statistics of the whole dataset (v3.0): feature, then "mean", "std", ….

        Raises:
            UsageError: v2.1 keeps them per episode only; see `episode_stats`.
        """
        if self._known.format.stats is None:
            raise UsageError(
                f"{self.path} is {self.version}, which has statistics per episode only"
            )
        return metadata.read_stats(self.path)

    def episode_stats(self, names: Sequence[str] | None = None) -> Iterator[tuple[int, Stats]]:
        """Read the statistics of every episode, one after the other; of some features, or all."""
        return metadata.read_episode_stats(self.path, self._known, names)


@contextmanager
def reading_video(dataset: Dataset, name: str) -> Iterator[Path | BinaryIO]:
    """Give a video file of a dataset to a reader."""
    source = dataset.video(name)
    if isinstance(source, Path):
        yield source
        return
    with source:
        yield source


class Episode:
    """One episode of a dataset; made by `Dataset`.

    Attributes:
        index: Its number.
        length: How many frames it has.
        tasks: Those that its frames have.
        from_index: The number of its first frame in the dataset.
        to_index: One past the number of its last frame in the dataset.
        data_file: The path of its data file in the dataset.
        videos: Where it lies in the video files, by feature.
    """

    def __init__(self, dataset: Dataset, record: EpisodeRecord, first_row: int) -> None:
        self._dataset = dataset
        self._record = record
        self._first_row = first_row  # of this episode in its data file
        self.index, self.length, self.tasks = record.index, record.length, record.tasks
        self.from_index, self.to_index = record.from_index, record.to_index
        self.data_file, self.videos = record.data_file, record.videos

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Episode({self.index}, {self.length} frames, {list(self.tasks)})"

    def columns(self, names: Sequence[str] | None = None) -> Columns:
        """Read features of all frames into arrays of (frames, *shape).

        A feature of shape (1,) gives (frames,); texts give arrays of str objects.

        Args:
            names: The features; by default all but pictures.

        Raises:
            UsageError: A name is unknown, or is a picture (see `frames` and `image`).
            DataError: The file is damaged.
        """
        features = self._dataset.features
        if names is None:
            names = [name for name, feature in features.items() if not feature.is_picture]
        chosen = _choose(self._dataset, names, pictures=False)
        pieces = [piece for _, piece in _rows([self], chosen, 0, self.length)]
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in chosen}

    def frames(
        self, keys: Sequence[str] | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[Frame]:
        """Read frame after frame, in bounded memory.

        Args:
            keys: The features; by default all.
            start: The first frame.
            stop: One past the last frame; by default the end.

        Yields:
            The features by name, and the text of the frame's task as "task". Pictures are RGB,
            (height, width, 3) of uint8; depth is millimetres, (height, width) of uint16.
        """
        stop = self.length if stop is None else stop
        if not 0 <= start <= stop <= self.length:
            raise UsageError(f"frames {start} to {stop}: episode {self.index} has {self.length}")
        chosen = _choose(self._dataset, self._dataset.features if keys is None else keys)
        rows = {name: feature for name, feature in chosen.items() if feature.dtype != "video"}
        numbers = {**rows, "task_index": self._dataset.features["task_index"]}
        videos = {
            name: self._video(name, start, stop - start)
            for name, feature in chosen.items()
            if feature.dtype == "video"
        }
        decoder = ImageDecoder()
        try:
            for _, batch in _rows([self], numbers, start, stop):
                for row in range(len(batch["task_index"])):
                    frame: Frame = {}
                    for name, feature in chosen.items():
                        if name in videos:
                            frame[name] = next(videos[name])
                        elif feature.dtype == "image":
                            frame[name] = self._decode(decoder, batch[name][row], name)
                        else:
                            frame[name] = batch[name][row]
                    frame["task"] = self._task(int(batch["task_index"][row]))
                    yield frame
        finally:
            for video in videos.values():
                video.close()

    def image(self, key: str, k: int) -> np.ndarray[Any, Any]:
        """Read one picture: camera `key`, frame `k` of the episode."""
        if not 0 <= k < self.length:
            raise UsageError(f"frame {k}: episode {self.index} has {self.length}, from 0")
        if not _choose(self._dataset, [key])[key].is_picture:
            raise UsageError(f"{key!r} is not a picture: use columns()")
        [frame] = self.frames([key], k, k + 1)
        picture: np.ndarray[Any, Any] = frame[key]
        return picture

    def _video(self, key: str, start: int, count: int) -> Generator[Any, None, None]:
        span = self._record.videos[key]
        first = round(span.from_s * self._dataset.fps) + start
        feature = self._dataset.features[key]
        depth = DepthCoding.from_info(feature.info) if feature.is_depth else None
        with reading_video(self._dataset, span.file) as video:
            frames = read_video(video, first, count, depth)
            # A generator: so that it can be closed early.
            with closing(cast("Generator[Any, None, None]", frames)):
                yield from frames

    def _decode(self, decoder: ImageDecoder, data: bytes, key: str) -> np.ndarray[Any, Any]:
        try:
            return decoder.stored(data)
        except DataError as error:
            raise CorruptFile(
                f"{self.data_file} in {self._dataset.path}, {key!r}: {error}"
            ) from error

    def _task(self, number: int) -> str:
        if not 0 <= number < len(self._dataset.tasks):
            raise CorruptFile(
                f"{self.data_file} in {self._dataset.path} names the task {number}; "
                f"there are {len(self._dataset.tasks)}"
            )
        return self._dataset.tasks[number]


def _choose(dataset: Dataset, names: Iterable[str], pictures: bool = True) -> dict[str, Feature]:
    features = dataset.features
    for name in names:
        if name not in features:
            raise UsageError(
                f"{dataset.path} has no feature {name!r}; it has {', '.join(features)}"
            )
        if features[name].is_picture and not pictures:
            raise UsageError(f"{name!r} is a picture: use frames() or image()")
    return {name: features[name] for name in names}


def _rows(
    run: Sequence[Episode], chosen: Mapping[str, Feature], start: int, stop: int
) -> Iterator[tuple[Episode, Columns]]:
    """Read rows start to stop of neighbouring episodes, and see that they are theirs."""
    dataset, name = run[0]._dataset, run[0].data_file
    proof = {key: dataset.features[key] for key in ("episode_index", "index")}
    ends = np.cumsum([len(episode) for episode in run]).tolist()
    first, offset = run[0]._first_row, run[0].from_index
    at, position = 0, start
    with dataset.table(name) as table:
        for batch in table.batches({**chosen, **proof}, first + start, first + stop):
            done, count = 0, len(batch["index"])
            while done < count:
                while position >= ends[at]:
                    at += 1
                part = slice(done, done + min(count - done, ends[at] - position))
                rows = part.stop - part.start
                expected = np.arange(offset + position, offset + position + rows)
                if not (
                    np.array_equal(batch["index"][part], expected)
                    and np.all(batch["episode_index"][part] == run[at].index)
                ):
                    raise CorruptFile(
                        f"{name} in {dataset.path} has other rows than episode "
                        f"{run[at].index} where that should be; {_DOCTOR}"
                    )
                yield run[at], {key: batch[key][part] for key in chosen}
                done, position = part.stop, position + rows
