"""Edit a LeRobot dataset: which episodes, which of their frames, under which task and names.

An edit is a build from parts of datasets. Rows are copied, packets of videos are copied, and files
that stay as they are get a second name; a picture is decoded only where a codec is changed, where
v2.1 needs a video that begins between key frames, and for the statistics of a shortened episode.
The result is made beside the dataset and exchanged for it in one step; what was there before stays
beside it for `undo`.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.files import FolderLock, storage_error, sync_folder
from penstock.core.interrupt import check_stop
from penstock.dataset import layout, metadata
from penstock.dataset.adopt import spec_of
from penstock.dataset.build import Build, Source, runs, sources_in
from penstock.dataset.layout import Feature, Spec, check_name
from penstock.dataset.plan import LOCK_NAME, TOTAL_STATS, UNITS, Base, Built, Plan, check_fits
from penstock.dataset.reader import Dataset
from penstock.dataset.reader import Episode as DatasetEpisode
from penstock.dataset.sinks import PictureSink
from penstock.dataset.stats import (
    AnyStats,
    PictureStats,
    join_stats,
    known_picture_stats,
    picture_stride,
    sample_indices,
    write_stats,
)
from penstock.dataset.swap import exchange, new_target, replacing, settle, sibling, take_over_units
from penstock.dataset.tables import Table, inside, reading
from penstock.dataset.unit import RECORD, Episode, NumberColumns, UnitRecord, make_key, stats_table
from penstock.dataset.writer import read_plan
from penstock.errors import CorruptFile, DataError, StorageError, UsageError
from penstock.media.depth import DepthCoding
from penstock.media.remux import Clip, begins_alone, coding
from penstock.media.video import VideoSettings
from penstock.ui.progress import Progress

_SCRATCH = f"{layout.PRIVATE_FOLDER}/scratch"


@dataclass(frozen=True, slots=True)
class Piece:
    """Frames of an episode [start, stop) that become an episode."""

    dataset: int
    episode: int
    start: int
    stop: int
    task: str

    @property
    def frames(self) -> int:
        """How many it has."""
        return self.stop - self.start


@dataclass(frozen=True)
class Edits:
    """What to do with the episodes and features of a dataset; numbers are those before the edit.

    Attributes:
        delete: Episodes to remove.
        keep: The only episodes to keep; None for all.
        trim: Per episode the first frame to keep, and one past the last; None for its end.
        split: Per episode the frames at which a new episode begins.
        cut: Per episode the frames to take out, as ranges of the first and one past the last; what
            lies before and behind become episodes.
        relabel: Per episode its new task; None stands for every other.
        drop: Features to remove.
        rename: Features to rename, old name to new.
        codec: What to store the videos as; None for as they are.
    """

    delete: Sequence[int] = ()
    keep: Sequence[int] | None = None
    trim: Mapping[int, tuple[int, int | None]] = field(default_factory=dict)
    split: Mapping[int, Sequence[int]] = field(default_factory=dict)
    cut: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    relabel: Mapping[int | None, str] = field(default_factory=dict)
    drop: Sequence[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    codec: str | None = None

    def pieces(self, dataset: Dataset, number: int = 0) -> list[Piece]:
        """Return the episodes that are left, in their order."""
        named = [*self.delete, *(self.keep or ()), *self.trim, *self.split, *self.cut]
        for index in [*named, *(i for i in self.relabel if i is not None)]:
            dataset.episode(index)  # says which there are
        keep = set(range(len(dataset)) if self.keep is None else self.keep) - set(self.delete)
        found = []
        for index in sorted(keep):
            episode = dataset.episode(index)
            start, end = self.trim.get(index, (0, None))
            stop = episode.length if end is None else end
            begins, out = self.split.get(index, ()), self.cut.get(index, ())
            inside_it = all(start < begin < stop for begin in begins)
            inside_it = inside_it and all(start <= first < end <= stop for first, end in out)
            if not (inside_it and 0 <= start < stop <= episode.length):
                without = f" without {', '.join(f'{a}:{b}' for a, b in out)}" if out else ""
                split = f" split at {list(begins)}" if begins else ""
                raise UsageError(
                    f"episode {index} has the frames 0 to {episode.length - 1}: "
                    f"{start}:{stop}{without}{split} is not possible"
                )
            task = self.relabel.get(index, self.relabel.get(None))
            if task is None and len(episode.tasks) > 1:
                raise UsageError(
                    f"episode {index} of {dataset.path} has {len(episode.tasks)} tasks, and an "
                    "edit keeps one: relabel it, or delete it"
                )
            task = episode.tasks[0] if task is None else task
            places = sorted({start, stop, *begins, *chain.from_iterable(out)})
            found += [
                Piece(number, index, a, b, task)
                for a, b in pairwise(places)
                if not any(first <= a < end for first, end in out)
            ]
        return found


@dataclass(frozen=True)
class EditReport:
    """What an edit did to the dataset `out`: what there was, and what there is.

    Attributes:
        files: Files of rows and pictures that it has.
        kept_files: How many of them are as they were.
        encoded: Videos of episodes that had to be encoded again.
        dry_run: Nothing was written.
    """

    out: str
    episodes_before: int
    frames_before: int
    episodes: int
    frames: int
    files: int = 0
    kept_files: int = 0
    encoded: int = 0
    dry_run: bool = False


def edit(
    path: Path | str,
    edits: Edits,
    *,
    others: Sequence[Path | str] = (),
    out: Path | str | None = None,
    dry_run: bool = False,
) -> EditReport:
    """Edit a dataset of any making, in place or into another.

    Args:
        path: The dataset.
        edits: What to do.
        others: Datasets whose episodes come behind; they are not changed.
        out: A new folder for the result; None for the dataset itself.
        dry_run: Only say what would come of it.

    Raises:
        UsageError: An episode, frame or feature is not there, or nothing would be left.
        StorageError: The disk refuses; the dataset is as before.
    """
    root = Path(os.path.realpath(path))
    target = root if out is None else new_target(out, root, *others)
    metadata.read_info(root)  # or it is none, and nothing is left there
    if dry_run:
        return replace(_Work(root, others, edits, target).report(), dry_run=True)
    # What is only read may be on a disk that cannot be written.
    with FolderLock(root, LOCK_NAME) if target == root else nullcontext():
        if target == root:
            settle(root)
            if next((root / UNITS).glob(f"*/{RECORD}"), None):
                raise UsageError(f"{root} has units that are not built yet: penstock build {root}")
        work = _Work(root, others, edits, target)
        with replacing(target, root) as new:
            made = _EditBuild(work, new)
            made.run()
            work.check_same()
            shutil.rmtree(new / _SCRATCH, ignore_errors=True)
        if target == root:
            take_over_units(new, root)
            _keep_for_undo(new, root)
        return replace(
            work.report(), files=made.files, kept_files=made.kept_files, encoded=made.encoded
        )


def undo(path: Path | str) -> EditReport:
    """Put back what was there before the last edit; again to take that back.

    Raises:
        UsageError: There is nothing to put back, or it was changed since.
    """
    root = Path(os.path.realpath(path))
    before = sibling(root, "undo")
    if not before.is_dir():
        raise UsageError(f"{root} was not edited since it was built: there is nothing to undo")
    with FolderLock(root, LOCK_NAME) as lock:
        for name, (size, _) in (Built.read(before) or Built()).files.items():
            if name.startswith(("data/", "videos/")) and (before / name).stat().st_size != size:
                raise UsageError(f"{before / name} was changed since: it cannot be put back")
        now, then = Dataset(root), Dataset(before)
        built = Built.read(root)
        if built and (built.episodes, built.frames) != (len(now), now.total_frames):
            raise UsageError(f"{root} was added to since it was edited: undo would take that away")
        report = EditReport(str(root), len(now), now.total_frames, len(then), then.total_frames)
        exchange(before, root)
        take_over_units(before, root)
        lock.acquire()
        return report


def _keep_for_undo(old: Path, root: Path) -> None:
    """Keep what was there before; a kill before this leaves nothing to undo, and no harm."""
    before = sibling(root, "undo")
    shutil.rmtree(before, ignore_errors=True)
    try:
        os.rename(old, before)
        sync_folder(root.parent)
    except OSError as error:
        raise storage_error("edit", root, error) from error


class _Work:
    """What an edit is made of: the datasets, the pieces, and what comes of them."""

    def __init__(
        self, root: Path, others: Sequence[Path | str], edits: Edits, target: Path
    ) -> None:
        self.root, self.edits, self.target = root, edits, target
        self.datasets = [Dataset(path) for path in (root, *others)]
        self._versions = [_version(dataset) for dataset in self.datasets]
        self.stored = read_plan(root)
        self.spec = self.stored.spec if self.stored else spec_of(root)
        self.features = self.datasets[0].features  # unlike the plan, they know their codecs
        for other in self.datasets[1:]:
            check_fits(other.path, self.spec, spec_of(other.path))
            for name, feature in self.features.items():
                if not feature.same_coding(other.features[name].info):
                    raise UsageError(
                        f"{name!r} of {other.path} codes its distances in another way than {root}"
                    )
        self.pieces: list[Piece] = []
        for number, dataset in enumerate(self.datasets):
            self.pieces += (Edits() if number else edits).pieces(dataset, number)
        if not self.pieces:
            raise UsageError(f"nothing would be left of {root}: to remove it, delete the folder")
        self.names = self._names()
        if edits.codec is not None:
            VideoSettings(edits.codec)  # type: ignore[arg-type] # or it says which there are
            if not any(map(self.reencodes, self.features)):
                raise UsageError(f"{root} has no video that {edits.codec} is for")

    def check_same(self) -> None:
        """See that nobody has exchanged a dataset that was read, or added to it."""
        for dataset, version in zip(self.datasets, self._versions, strict=True):
            if _version(dataset) != version:
                raise StorageError(f"{dataset.path} was changed meanwhile: do the edit again")

    def _names(self) -> dict[str, str]:
        """Return the features of the result, and what they were called."""
        features = self.spec.features
        for name in (*self.edits.drop, *self.edits.rename):
            if name not in features:
                raise UsageError(f"{self.root} has no feature {name!r}: {', '.join(features)}")
        new = [self.edits.rename.get(n, n) for n in features if n not in self.edits.drop]
        for name in new:
            check_name(name)
            if name in layout.AUTO_FEATURES or new.count(name) > 1:
                raise UsageError(f"{name!r} cannot be a feature's name: it is taken")
        if not new:
            raise UsageError(f"no feature would be left of {self.root}")
        return {self.edits.rename.get(n, n): n for n in features if n not in self.edits.drop}

    def reencodes(self, name: str) -> bool:
        """Whether a feature is to be stored with another codec: depth12 is for depth only."""
        feature, codec = self.features[name], self.edits.codec
        is_video = codec is not None and feature.dtype == "video"
        return is_video and feature.is_depth == (codec == "depth12")

    def report(self) -> EditReport:
        return EditReport(
            str(self.target),
            sum(len(dataset) for dataset in self.datasets),
            sum(dataset.total_frames for dataset in self.datasets),
            len(self.pieces),
            sum(piece.frames for piece in self.pieces),
        )


def _version(dataset: Dataset) -> tuple[int, int, int]:
    found = (dataset.path / layout.INFO_PATH).stat()
    return dataset.path.stat().st_ino, found.st_size, found.st_mtime_ns


class _EditBuild(Build):
    def __init__(self, work: _Work, new: Path) -> None:
        self._work, self._to = work, new
        self.encoded = self.kept_files = 0
        features = {name: work.spec.features[was] for name, was in work.names.items()}
        for name, feature in features.items():
            if work.reencodes(work.names[name]):
                features[name] = replace(feature, info=None)
        spec = replace(work.spec, features=features)
        self._shown: dict[tuple[int, str], dict[str, Any]] = {}  # statistics of what was decoded
        infos: dict[str, dict[str, Any]] = {}
        in_place = work.target == work.root
        inputs = [_Input(dataset, work.spec) for dataset in work.datasets]
        tasks = list(dict.fromkeys(piece.task for piece in work.pieces))
        same_tasks = tasks == work.datasets[0].tasks[: len(tasks)]
        same_names = work.names == {name: name for name in work.spec.features}
        self._inputs = inputs
        sources = []
        progress = Progress(len(work.pieces), "edit", "episodes", last_line=False)
        for number, piece in enumerate(work.pieces):
            progress.advance()
            source = self._source(number, piece, spec, infos)
            was = work.datasets[piece.dataset].episode(piece.episode)
            stays = in_place and piece.dataset == 0 and piece.frames == was.length
            if stays and not any(map(work.reencodes, work.features)):
                same = same_names and same_tasks and piece.task == was.tasks[0]
                source = replace(source, index=piece.episode, rows_stay=same)
            sources.append(source)
        progress.close()
        owners = [(p.dataset, inputs[p.dataset].owners[p.episode]) for p in work.pieces]
        records = _records(inputs, owners, sources)
        stored = work.stored or Plan(spec)
        bags = [str(r.source.get("fingerprint", f"unit {r.position}")) for r in records]
        left = [bag for bag in stored.bags if bag not in bags and not bag.startswith("unit ")]
        plan = Plan(spec, stored.settings, [*bags, *left])
        built = inputs[0].built
        known = built.infos
        infos |= {n: known[was] for n, was in work.names.items() if was in known and n not in infos}
        super().__init__(
            work.root,
            new,
            plan,
            Base(),
            inputs[0].records if in_place else (),
            records,
            sources,
            built.files if in_place else {},
            infos,
        )

    def _source(
        self, number: int, piece: Piece, spec: Spec, infos: dict[str, dict[str, Any]]
    ) -> Source:
        """Return where an episode of the result lies now; encode its videos if it must be."""
        work, given = self._work, self._inputs[piece.dataset]
        old = given.sources[piece.episode]
        known = old.episode
        whole, share = piece.frames == known.frames, piece.frames / known.frames
        clips: dict[str, Clip] = {}
        shown: dict[str, tuple[int, str]] = {}
        for name, was in work.names.items():
            if was not in old.clips:
                continue
            clip, (size, how) = old.clips[was], known.videos[was]
            clip = Clip(clip.path, clip.first + piece.start, piece.frames)
            clips[name], shown[name] = clip, (int(size * share), how)
            anew = work.reencodes(was)
            whole_file = not spec.format.shares_files
            if anew or (whole_file and not begins_alone(clip, spec.fps)):
                clips[name], shown[name], info = self._encode(number, name, clip)
                if anew:
                    infos.setdefault(name, info)
        step, began, ended = 1_000_000_000 // spec.fps, known.start_ns, known.end_ns
        if began is not None:
            ended = ended if whole else began + (piece.stop - 1) * step
            began += piece.start * step
        size_bytes = int(known.size_bytes * share)
        episode = Episode(piece.frames, piece.task, began, ended, size_bytes, shown)
        return Source(episode, old.rows, old.first_row + piece.start, clips)

    @property
    def files(self) -> int:
        """Files of rows and pictures."""
        return sum(name.startswith(("data/", "videos/")) for name in self._files)

    def _keep(self, path: Path, target: str) -> None:
        super()._keep(path, target)
        self.kept_files += 1

    def _link_rest(self) -> None:
        if self._work.target == self._work.root:
            super()._link_rest()

    def _column_of(self, name: str) -> str:
        return self._work.names[name]

    def _encode(
        self, number: int, camera: str, clip: Clip
    ) -> tuple[Clip, tuple[int, str], dict[str, Any]]:
        piece = self._work.pieces[number]
        was = self._work.names[camera]
        feature, fps = self._work.features[was], self._work.spec.fps
        if feature.is_depth:
            settings = VideoSettings("depth12", depth=DepthCoding.from_info(feature.info))
        else:
            is_av1 = (feature.info or {}).get("video.codec") == "av1"
            codec = self._work.edits.codec or ("av1" if is_av1 else "h264")
            settings = VideoSettings(codec)  # type: ignore[arg-type]
        scratch = self._to / _SCRATCH
        scratch.mkdir(parents=True, exist_ok=True)
        path = scratch / f"{camera}-{number:06d}.mp4"
        episode = self._work.datasets[piece.dataset].episode(piece.episode)
        sink = PictureSink(path, feature, settings, fps, clip.frames)
        try:
            for frame in episode.frames([was], piece.start, piece.stop):
                check_stop()
                sink.add_frame(frame[was])
            sink.close()
        except BaseException:
            sink.abandon()
            raise
        self.encoded += 1
        self._shown[number, camera] = sink.stats.to_json()
        size = path.stat().st_size, coding(path)
        return Clip(path, 0, clip.frames), size, dict(sink.info or {})

    @cached_property
    def _counted(self) -> tuple[dict[str, AnyStats], pa.Table]:
        """The statistics of all frames, and those of every episode; from the rows."""
        features = self._spec.features
        summed = {n: f for n, f in features.items() if not f.is_picture and f.has_stats}
        numbers = NumberColumns(summed, self._lengths)
        old = {self._work.names[name]: feature for name, feature in summed.items()}
        old["episode_index"] = layout.AUTO_FEATURES["episode_index"]
        indices = np.array([piece.episode for piece in self._work.pieces])
        ends, done = np.cumsum(self._lengths), 0
        for first, stop in runs(self._sources) if summed else ():
            check_stop()
            with Table(first.rows.parent, first.rows.name) as table:
                for batch in table.batches(old, first.first_row, stop):
                    rows = np.arange(done, done + len(batch["episode_index"]))
                    expected = indices[np.searchsorted(ends, rows, side="right")]
                    if not np.array_equal(batch["episode_index"], expected):
                        raise CorruptFile(
                            f"{first.rows} has other rows than those of episode {expected[0]} "
                            "where they should be; run `penstock doctor` on the dataset"
                        )
                    numbers.add({name: batch[self._work.names[name]] for name in summed})
                    done += len(rows)
        pictures = [name for name, feature in features.items() if feature.is_picture]
        shown = {name: self._picture_stats(name) for name in pictures}
        total: dict[str, AnyStats] = dict(numbers.totals)
        for name, episodes in shown.items():
            whole = PictureStats.of(features[name])
            whole.prior = reduce(lambda joined, one: join_stats(one, joined), episodes)
            total[name] = whole
        return total, stats_table(features, len(self._sources), numbers.stats, shown)

    def _picture_stats(self, camera: str) -> list[dict[str, Any]]:
        """Return the statistics of a camera in every episode: as they were, or counted anew."""
        was = self._work.names[camera]
        feature = self._spec.features[camera]
        known = [given.picture_stats(was, feature) for given in self._inputs]
        found = []
        for number, piece in enumerate(self._work.pieces):
            episode = self._work.datasets[piece.dataset].episode(piece.episode)
            stats = self._shown.get((number, camera))
            if stats is None and piece.frames == episode.length:
                stats = known[piece.dataset].get(piece.episode)
            if stats is None:
                check_stop()
                stats = _counted(episode, was, feature, piece.start, piece.stop)
            found.append(stats)
        return found

    def _info(self) -> dict[str, Any]:
        return {**self._work.datasets[0].info, **super()._info()}  # what else it says, stays

    def _episode_stats(self) -> Iterator[pa.Table]:
        yield self._counted[1]

    def _total_stats(self) -> tuple[dict[str, AnyStats], int]:
        total = self._counted[0]
        write_stats(self._new / TOTAL_STATS, total)
        return total, len(self._records)


class _Input:
    """A dataset that episodes are taken from."""

    def __init__(self, dataset: Dataset, spec: Spec) -> None:
        self.dataset = dataset
        self.records = dataset.records
        built = Built.read(dataset.path) or Built()
        known = [episode.frames for unit in built.units for episode in unit.episodes]
        if known != [record.length for record in self.records[built.base.episodes :]]:
            built = Built(Base(len(self.records)))
        self.built = built
        episodes = [self._episode(record) for record in self.records[: built.base.episodes]]
        self.owners: list[int | None] = [None] * len(episodes)
        for number, unit in enumerate(built.units):
            episodes += unit.episodes
            self.owners += [number] * len(unit.episodes)
        self.sources = list(sources_in(dataset.path, spec.fps, self.records, episodes))

    def _episode(self, record: metadata.EpisodeRecord) -> Episode:
        """Return what a unit would say of an episode that none knows."""
        videos = {}
        for camera, span in record.videos.items():
            size, frames, how = self._file(span.file)
            videos[camera] = int(size * record.length / frames), how
        size, frames, _ = self._file(record.data_file)
        share = int(size * record.length / frames)
        return Episode(record.length, record.tasks[0], None, None, share, videos)

    @cached_property
    def _in_file(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for record in self.records:
            counts[record.data_file] += record.length
            for span in record.videos.values():
                counts[span.file] += record.length
        return counts

    @cache  # noqa: B019 - as long as the edit
    def _file(self, name: str) -> tuple[int, int, str]:
        """Return the size of a file, the frames that episodes have in it, and how it is coded."""
        path = inside(self.dataset.path, name)
        with reading(self.dataset.path, name):
            size = path.stat().st_size
        return size, self._in_file[name], coding(path) if path.suffix == ".mp4" else ""

    def picture_stats(self, camera: str, feature: Feature) -> dict[int, dict[str, Any]]:
        """Return the statistics of a camera by episode, as far as the dataset has them whole."""
        found: dict[int, dict[str, Any]] = {}
        with suppress(DataError):
            for index, stats in self.dataset.episode_stats([camera]):
                with suppress(ValueError, IndexError):
                    frames = self.records[index].length
                    found[index] = known_picture_stats(stats.get(camera, {}), feature, frames)
        return found


def _records(
    inputs: Sequence[_Input], owners: Sequence[tuple[int, int | None]], sources: Sequence[Source]
) -> list[UnitRecord]:
    """Return where the episodes are from, unit by unit.

    A unit that has lost all its episodes stays known: its recording is not converted again.
    """
    of: dict[tuple[int, int | None], list[Episode]] = {}
    for owner, made in zip(owners, sources, strict=True):
        of.setdefault(owner, []).append(made.episode)
    found: list[UnitRecord] = []
    keys: set[str] = set()
    for number, given in enumerate(inputs):
        named = {"dataset": given.dataset.path.name}
        others = of.get((number, None))
        first = [UnitRecord(make_key(named, number), 0, named, others)] if others else []
        units = [
            replace(u, episodes=of.get((number, k), [])) for k, u in enumerate(given.built.units)
        ]
        for unit in [*first, *units]:
            key = unit.key if unit.key not in keys else make_key(unit.key, len(found))
            keys.add(key)
            found.append(replace(unit, key=key, position=len(found)))
    return found


def _counted(
    episode: DatasetEpisode, camera: str, feature: Feature, start: int, stop: int
) -> dict[str, Any]:
    """Count the pictures of some frames, as a conversion does."""
    channels, height, width = feature.picture_size
    if channels not in (1, 3):
        raise UsageError(
            f"{camera!r} has pictures of {channels} channels, whose statistics cannot be counted: "
            f"leave episode {episode.index} whole"
        )
    stats = PictureStats.of(feature)
    stride = picture_stride(height, width)
    wanted = set(sample_indices(stop - start).tolist())
    for number, frame in enumerate(episode.frames([camera], start, stop)):
        if number in wanted:
            pixels = frame[camera][::stride, ::stride]
            if channels == 1 and pixels.ndim == 3:  # grey, which the reader gives as RGB
                stats.depth, pixels = False, pixels[..., :1]
            stats.add(np.ascontiguousarray(pixels))
    return stats.to_json()
