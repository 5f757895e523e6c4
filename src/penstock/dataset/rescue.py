"""Bring back what a killed lerobot recording left on the disk (v3.0).

lerobot keeps the footers of its parquet files, and the records of up to ten episodes, in memory
until the session ends. What a kill leaves: rows of every saved episode, in files without a footer;
videos, into which an episode is joined as a whole; pictures of episodes that were not encoded yet;
an info.json that counts more than the records tell. So episodes are told by their rows, and found
in the videos by counting frames. The original is only read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.files import temporary_path
from penstock.core.interrupt import check_stop
from penstock.dataset import layout, metadata
from penstock.dataset.edit import Edits, edit
from penstock.dataset.footer import add_footer, readable_rows
from penstock.dataset.layout import AUTO_FEATURES, V30
from penstock.dataset.metadata import Info
from penstock.dataset.swap import new_target
from penstock.dataset.tables import Table
from penstock.errors import DataError, PenstockError, UsageError
from penstock.media.images import ImageDecoder
from penstock.media.video import VideoSettings, VideoWriter, open_video

_PLACE = re.compile(r"chunk-(\d+)/file-(\d+)\.\w+$")
_MOST_TASKS = 1 << 16
_STREAMED = "_streaming.mp4"  # encoded while it is recorded
_BEGINNING = 4096
_AT_ONCE = 1 << 20
_OPEN_ERRORS = (pa.ArrowException, OSError, ValueError)


@dataclass
class RescueReport:
    """What came back into the dataset `out`, and what did not.

    Attributes:
        lost: Per episode or file that did not come back, why.
        notes: What was mended.
    """

    out: str
    episodes: int = 0
    frames: int = 0
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Lay it out for the terminal."""
        lines = [
            f"dataset        {self.out}: {self.episodes} episodes, {self.frames} frames came back"
        ]
        lines += [f"mended         {note}" for note in self.notes]
        lines += [f"LOST           {loss}" for loss in self.lost]
        return "\n".join(lines)


@dataclass
class _Episode:
    """What is known of an episode.

    Attributes:
        tasks: Their numbers.
        place: Chunk and number of its data file.
        spans: Per camera, chunk and number of the video file, and the first frame in it.
    """

    index: int
    length: int
    tasks: list[int]
    place: tuple[int, int]
    spans: dict[str, tuple[int, int, int]] = field(default_factory=dict)


def rescue(path: Path | str, out: Path | str, like: Path | str | None = None) -> RescueReport:
    """Write a new dataset of every episode whose bytes reached the disk.

    Args:
        path: What the killed session left; it is only read.
        out: The new dataset.
        like: Another dataset of the same features, if info.json itself is cut.

    Raises:
        UsageError: `out` exists, or the format is another one.
        DataError: Nothing can be brought back.
    """
    root = Path(os.path.realpath(path))
    target = new_target(out, root)
    try:
        info = metadata.read_info(root)
    except DataError as error:
        if like is None and not root.is_dir():
            raise
        if like is None:
            hint = "if it is cut, give a dataset of the same features: --like OTHER"
            raise type(error)(f"{error}; {hint}") from error
        info = metadata.read_info(Path(like))
    if info.format is not V30:
        version = info.format.version
        raise UsageError(f"{root} is {version}: rescue is for v3.0; run penstock doctor on it")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = temporary_path(target.parent)
    try:
        (scratch / root.name).mkdir(parents=True)
        return _Rescue(root, scratch / root.name, info, RescueReport(str(target))).run(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Rescue:
    """One rescue: `scratch` becomes a dataset of everything; an edit takes the good out of it."""

    def __init__(self, root: Path, scratch: Path, info: Info, report: RescueReport) -> None:
        self._root, self._scratch, self._info, self._report = root, scratch, info, report
        self._fps = info.fps
        self._videos: dict[str, list[tuple[tuple[int, int], int]]] = {}  # places, whole frames

    def run(self, target: Path) -> RescueReport:
        report = self._report
        episodes = list(self._rows())
        if not episodes:
            raise DataError(f"no rows of an episode reached the disk in {self._root}")
        counted = self._info.raw["total_episodes"]
        if counted > len(episodes):
            report.lost.append(
                f"info.json counts {counted} episodes: rows of {len(episodes)} are there"
            )
        tasks = self._tasks(1 + max(number for one in episodes for number in one.tasks))
        for key in self._info.video_keys:
            self._copy_videos(key)
        known: dict[int, Mapping[str, metadata.VideoSpan]] = {}  # as far as records can be read
        with suppress(DataError):
            for record in metadata.read_episodes(self._root, self._info):
                known[record.index] = record.videos
        for key in self._info.video_keys:
            self._find(key, episodes, known)
        bad = [one.index for one in episodes if len(one.spans) < len(self._info.video_keys)]
        if len(bad) == len(episodes):
            raise DataError(f"no episode in {self._root} has all its pictures: nothing came back")
        self._note_unfinished(len(episodes))
        self._write(episodes, tasks)
        made = edit(self._scratch, Edits(delete=bad), out=target)
        report.episodes, report.frames = made.episodes, made.frames
        return report

    def _rows(self) -> Iterator[_Episode]:
        """Copy the data files, mend them, and tell the episodes by their rows."""
        features = {n: f for n, f in self._info.features.items() if f.dtype != "video"}
        fields = [pa.field(name, layout.arrow_type(feature)) for name, feature in features.items()]
        hugging = layout.arrow_schema(self._info.features, "v3.0").metadata
        schema = pa.schema(fields, hugging)
        shapes = [
            None if len(feature.shape) < 2 or feature.is_picture else feature.size
            for feature in features.values()
        ]
        number = 0
        for source in sorted(self._root.glob("data/*/*.parquet")):
            check_stop()
            name = source.relative_to(self._root).as_posix()
            copy, place = self._copied(source), _place(name)
            if not _opens(copy):
                rows = add_footer(copy, schema, shapes)
                self._report.notes.append(f"{name} had no footer: {rows} rows found")
            if place is None or not (rows := self._readable(copy, name)):
                copy.unlink()
                continue
            for one in self._episodes(name, place, rows):
                if one.index != number:
                    self._report.lost.append(f"{name}: episode {one.index} follows on {number - 1}")
                    return
                yield one
                number += 1

    def _copied(self, source: Path) -> Path:
        copy = self._scratch / source.relative_to(self._root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        return copy

    def _linked(self, source: Path, name: str) -> None:
        """Give a file that is only read a second name; it may be most of the disk."""
        target = self._scratch / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source.resolve(), target)
        except OSError:
            shutil.copyfile(source, target)

    def _readable(self, copy: Path, name: str) -> int:
        """Leave out row groups that cannot be read; return the rows that are left."""
        rows = readable_rows(copy)
        with suppress(*_OPEN_ERRORS), pq.ParquetFile(copy, pre_buffer=False) as file:
            if rows == file.metadata.num_rows:
                return rows
            self._report.lost.append(f"{name}: {file.metadata.num_rows - rows} rows are damaged")
            whole = copy.with_suffix(".whole")
            done = 0
            with pq.ParquetWriter(whole, file.schema_arrow, compression="snappy") as writer:
                for number in range(file.num_row_groups):
                    if done >= rows:
                        break
                    done += file.metadata.row_group(number).num_rows
                    writer.write_table(file.read_row_group(number, use_threads=False))
            whole.replace(copy)
            return rows
        self._report.lost.append(f"{name}: no rows can be read")
        return 0

    def _episodes(self, name: str, place: tuple[int, int], rows: int) -> Iterator[_Episode]:
        columns = ("episode_index", "frame_index", "task_index")
        wanted = {column: AUTO_FEATURES[column] for column in columns}
        with Table(self._scratch, name) as table:
            pieces = list(table.batches(wanted, 0, rows))
        numbers, frames, tasks = (np.concatenate([p[c] for p in pieces]) for c in columns)
        starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
        for start, stop in zip(starts, [*starts[1:], rows], strict=True):
            index = int(numbers[start])
            if not np.array_equal(frames[start:stop], np.arange(stop - start)):
                self._report.lost.append(f"{name}: the rows of episode {index} are out of order")
                return
            own = list(dict.fromkeys(tasks[start:stop].tolist()))
            if not 0 <= min(own) <= max(own) < _MOST_TASKS:
                self._report.lost.append(f"{name}: episode {index} has the task {max(own)}")
                return
            yield _Episode(index, int(stop - start), own, place)

    def _tasks(self, count: int) -> list[str]:
        """Return the task texts; a text that did not reach the disk is replaced by its number."""
        found: list[str] = []
        with suppress(DataError):
            found = metadata.read_tasks(self._root, V30)
        if not found:
            schema = pa.schema([("task_index", pa.int64()), ("task", pa.string())])
            with suppress(PenstockError, OSError):
                if add_footer(self._copied(self._root / V30.tasks), schema):
                    found = metadata.read_tasks(self._scratch, V30)
        for number in range(len(found), count):
            self._report.lost.append(f"the text of task {number}; relabel it with penstock edit")
            found.append(f"task {number}")
        return found

    def _copy_videos(self, key: str) -> None:
        found = []
        for source in sorted(self._root.glob(f"videos/{key}/*/*.mp4")):
            check_stop()
            name = source.relative_to(self._root).as_posix()
            copied_from = _copied_from(source)
            if copied_from is not None:
                source = copied_from
                self._report.notes.append(f"{name} was being copied: taken from {source}")
            place, frames = _place(name), whole_frames(source)
            if place is None or not frames:
                self._report.lost.append(f"{name}: it holds no video that can be read")
                continue
            self._linked(source, name)
            found.append((place, frames))
        self._videos[key] = found

    def _find(
        self,
        key: str,
        episodes: Sequence[_Episode],
        known: Mapping[int, Mapping[str, metadata.VideoSpan]],
    ) -> None:
        """Tell where each episode lies in the videos of a camera, and make what is missing."""
        frames = dict(self._videos[key])
        places = list(frames)
        at, used = 0, 0
        last = episodes[-1].index
        for one in episodes:
            span = known.get(one.index, {}).get(key)
            place = None if span is None else _place(span.file)
            if span is not None and place in frames:
                at, used = places.index(place), round(span.from_s * self._fps)
            elif at < len(places) and used >= frames[places[at]]:
                at, used = at + 1, 0  # the file is used up: the next one begins
            if at < len(places) and used + one.length <= frames[places[at]]:
                one.spans[key] = (*places[at], used)
                used += one.length
                continue
            made = self._from_rest(key, one, one.index == last)
            if isinstance(made, str):
                self._report.lost.append(f"episode {one.index}: {made}")
            else:
                one.spans[key] = (*made, 0)

    def _from_rest(self, key: str, one: _Episode, last: bool) -> tuple[int, int] | str:
        """Make the video of an episode from what waited to be joined or encoded; or say why not."""
        names = [f"{key}_{one.index:03d}.mp4", *([f"{key}{_STREAMED}"] if last else [])]
        for source in (each for name in names for each in sorted(self._root.glob(f"tmp*/{name}"))):
            if whole_frames(source) == one.length:
                place, target = self._new_video(key)
                shutil.copyfile(source, target)
                self._report.notes.append(f"episode {one.index}: {key} from {source.name}")
                return place
        folder = self._root / "images" / key / f"episode-{one.index:06d}"
        pictures = [folder / f"frame-{k:06d}.png" for k in range(one.length)]
        there = sum(picture.is_file() for picture in pictures)
        if there < one.length:
            return f"of {one.length} pictures of {key}, {there} are there, and no whole video"
        place, target = self._new_video(key)
        _, height, width = self._info.features[key].picture_size
        known = self._info.features[key].info or {}
        settings = VideoSettings("av1" if known.get("video.codec") == "av1" else "h264")
        writer = VideoWriter(target, settings, int(self._fps), width, height, one.length)
        decoder = ImageDecoder()
        try:
            with writer:
                for picture in pictures:
                    check_stop()
                    writer.encode(decoder.png(picture.read_bytes()))
        except (DataError, UsageError, OSError) as error:
            return f"{key} cannot be made from its pictures ({error})"
        self._report.notes.append(f"episode {one.index}: {key} encoded from {one.length} pictures")
        return place

    def _new_video(self, key: str) -> tuple[tuple[int, int], Path]:
        taken = [place for place, _ in self._videos[key]]
        chunk, number = max(taken, default=(0, -1))
        number += 1
        if number >= self._info.chunks_size:
            chunk, number = chunk + 1, 0
        self._videos[key].append(((chunk, number), 0))
        target = self._scratch / V30.video_path(key, chunk, number)
        target.parent.mkdir(parents=True, exist_ok=True)
        return (chunk, number), target

    def _note_unfinished(self, saved: int) -> None:
        for folder in sorted(self._root.glob("images/*/episode-*")):
            number = folder.name.removeprefix("episode-")
            if number.isdigit() and int(number) >= saved:
                count = len(list(folder.iterdir()))
                self._report.lost.append(
                    f"episode {int(number)} was being recorded: {count} pictures of "
                    f"{folder.parent.name}; its rows were only in memory"
                )

        for video in sorted(self._root.glob(f"tmp*/*{_STREAMED}")):
            if not whole_frames(video):
                self._report.lost.append(
                    f"episode {saved} was being recorded: {video.name} has no table of its frames"
                )

    def _write(self, episodes: Sequence[_Episode], tasks: Sequence[str]) -> None:
        """Write the metadata of everything, the lost episodes included: they are taken out next."""
        lengths = np.array([one.length for one in episodes])
        ends = np.cumsum(lengths)
        # An episode without a video gets the place of another: it is taken out next.
        spare = {
            key: (*(places[0][0] if places else (0, 0)), 0) for key, places in self._videos.items()
        }
        columns = layout.record_columns(
            lengths,
            ends - lengths,
            [[tasks[number] for number in one.tasks] for one in episodes],
            [one.place for one in episodes],
            {key: [one.spans.get(key, place) for one in episodes] for key, place in spare.items()},
            self._fps,
        )
        columns["episode_index"] = [one.index for one in episodes]
        target = self._scratch / layout.episodes_path(0, 0)
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), target)
        pq.write_table(layout.tasks_table(tasks), self._scratch / V30.tasks)
        info = {
            **self._info.raw,
            "total_episodes": len(episodes),
            "total_frames": int(ends[-1]),
            "total_tasks": len(tasks),
            "splits": {"train": f"0:{len(episodes)}"},
        }
        (self._scratch / layout.INFO_PATH).write_text(json.dumps(info), encoding="utf-8")


def whole_frames(path: Path) -> int:
    """Return how many frames of a video are in the file as a whole, from the first one on."""
    if not path.is_file():  # a link to nothing, or a FIFO, which would be waited for
        return 0
    frames, size = 0, path.stat().st_size
    with suppress(DataError), open_video(path) as (container, stream):
        for packet in container.demux(stream):
            if packet.pts is None or not packet.size:
                continue
            if packet.is_corrupt or (packet.pos or 0) + packet.size > size:
                break
            frames += 1
    return frames


def _copied_from(path: Path) -> Path | None:
    """Return the video that lerobot was copying here from the system's temporary folder, if any.

    It joins videos there; on another disk than the dataset's, moving the result is copying it.
    """
    if not path.is_file() or (size := path.stat().st_size) <= _BEGINNING:
        return None
    for whole in sorted(Path(tempfile.gettempdir()).glob("tmp*.mp4")):
        with suppress(OSError):
            if not whole.is_file() or whole.stat().st_size <= size:  # a FIFO would be waited for
                continue
            with path.open("rb") as mine, whole.open("rb") as other:
                if all(
                    part == other.read(len(part)) for part in iter(lambda: mine.read(_AT_ONCE), b"")
                ):
                    return whole
    return None


def _opens(path: Path) -> bool:
    with suppress(*_OPEN_ERRORS), pq.ParquetFile(path, pre_buffer=False):
        return True
    return False


def _place(name: str) -> tuple[int, int] | None:
    match = _PLACE.search(name)
    return (int(match[1]), int(match[2])) if match else None
