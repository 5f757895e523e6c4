"""Edit a LeRobot dataset: which episodes, which of their frames, under which task and names.

An edit is a build from parts of datasets. Rows are copied, packets of videos are copied, and files
that stay as they are get a second name; a picture is decoded only where a codec is changed, where
v2.1 needs a video that begins between key frames, and for the statistics of a shortened episode.
The result is made beside the dataset and exchanged for it in one step; what was there before stays
beside it for `undo`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.files import FolderLock, storage_error, sync_folder
from penstock.core.interrupt import check_stop
from penstock.dataset import layout, metadata
from penstock.dataset.adopt import spec_of
from penstock.dataset.build import Build, Source, runs, sources_in
from penstock.dataset.layout import Feature, check_name
from penstock.dataset.plan import LOCK_NAME, TOTAL_STATS, UNITS, Base, Built, Plan, Spec, check_fits
from penstock.dataset.reader import Dataset
from penstock.dataset.reader import Episode as DatasetEpisode
from penstock.dataset.sinks import open_sink
from penstock.dataset.stats import (
    AnyStats,
    PictureStats,
    join_stats,
    known_picture_stats,
    picture_stride,
    sample_indices,
    write_stats,
)
from penstock.dataset.swap import exchange, replacing, settle, sibling, take_over_units
from penstock.dataset.tables import Table, inside, reading
from penstock.dataset.unit import (
    RECORD,
    Episode,
    NumberColumns,
    UnitRecord,
    make_key,
    stats_table,
)
from penstock.dataset.writer import read_plan
from penstock.errors import DataError, UsageError
from penstock.media.remux import Clip, coding
from penstock.media.video import VideoSettings, open_video

_SPARE = 600  # frames that a clip may bring along: two of the longest groups
_SCRATCH = f"{layout.PRIVATE_FOLDER}/scratch"


@dataclass(frozen=True, slots=True)
class Piece:
    """Frames of an episode that become an episode.

    Attributes:
        dataset: Which of the datasets it is from.
        episode: Its number there.
        start: The first frame.
        stop: One past the last.
        task: What is done in it.
    """

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
        relabel: Per episode its new task; None stands for every other.
        drop: Features to remove.
        rename: Features to rename, old name to new.
        codec: What to store the videos as; None for as they are.
    """

    delete: Sequence[int] = ()
    keep: Sequence[int] | None = None
    trim: Mapping[int, tuple[int, int | None]] = field(default_factory=dict)
    split: Mapping[int, Sequence[int]] = field(default_factory=dict)
    relabel: Mapping[int | None, str] = field(default_factory=dict)
    drop: Sequence[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    codec: str | None = None

    def pieces(self, dataset: Dataset, number: int = 0) -> list[Piece]:
        """Return the episodes that are left, in their order."""
        named = [*self.delete, *(self.keep or ()), *self.trim, *self.split]
        for index in [*named, *(i for i in self.relabel if i is not None)]:
            dataset.episode(index)  # says which there are
        keep = set(range(len(dataset)) if self.keep is None else self.keep) - set(self.delete)
        found = []
        for index in sorted(keep):
            episode = dataset.episode(index)
            start, end = self.trim.get(index, (0, None))
            stop = episode.length if end is None else end
            cuts = self.split.get(index, ())
            inside_it = all(start < cut < stop for cut in cuts)
            if not (inside_it and 0 <= start < stop <= episode.length):
                raise UsageError(
                    f"episode {index} has the frames 0 to {episode.length - 1}: "
                    f"{start}:{stop} cut at {list(cuts)} is not possible"
                )
            task = self.relabel.get(index, self.relabel.get(None))
            if task is None and len(episode.tasks) > 1:
                raise UsageError(
                    f"episode {index} of {dataset.path} has {len(episode.tasks)} tasks, and an "
                    "edit keeps one: relabel it, or delete it"
                )
            task = task or episode.tasks[0]
            places = sorted({start, stop, *cuts})
            found += [Piece(number, index, a, b, task) for a, b in pairwise(places)]
        return found


@dataclass(frozen=True)
class EditReport:
    """What an edit did.

    Attributes:
        out: The dataset.
        episodes_before: How many there were.
        frames_before: How many there were.
        episodes: How many there are.
        frames: How many there are.
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
    target = root if out is None else Path(os.path.realpath(out))
    if out is not None and target.exists() and (target.is_file() or any(target.iterdir())):
        raise UsageError(f"{target} exists: give a new folder")
    if target != root and target.is_relative_to(root):
        raise UsageError(f"{target} lies in the dataset that is edited: give a folder beside it")
    metadata.read_info(root)  # or it is none, and nothing is left there
    if dry_run:
        return _Work(root, others, edits, target).report(None)
    with FolderLock(root, LOCK_NAME):
        settle(root)
        if next((root / UNITS).glob(f"*/{RECORD}"), None) and target == root:
            raise UsageError(f"{root} has units that are not built yet: penstock build {root}")
        work = _Work(root, others, edits, target)
        with replacing(target, root) as new:
            made = work.build(new)
            made.run()
            shutil.rmtree(new / _SCRATCH, ignore_errors=True)
        if target == root:
            take_over_units(new, root)
            _keep_for_undo(new, root)
        return work.report(made)


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
        built = Built.read(before)
        for name, (size, _) in built.files.items() if built else ():
            if name.startswith(("data/", "videos/")) and (before / name).stat().st_size != size:
                raise UsageError(f"{before / name} was changed since: it cannot be put back")
        now, then = Dataset(root), Dataset(before)
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
        self.stored = read_plan(root)
        self.spec = self.stored.spec if self.stored else spec_of(root)
        for other in self.datasets[1:]:
            check_fits(other.path, self.spec, spec_of(other.path))
        self.pieces = edits.pieces(self.datasets[0])
        for number, other in enumerate(self.datasets[1:], 1):
            self.pieces += Edits().pieces(other, number)
        if not self.pieces:
            raise UsageError(f"nothing would be left of {root}: to remove it, delete the folder")
        self.names = self._names()

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
        return dict(zip(new, [n for n in features if n not in self.edits.drop], strict=True))

    def report(self, made: _EditBuild | None) -> EditReport:
        return EditReport(
            str(self.target),
            sum(len(dataset) for dataset in self.datasets),
            sum(dataset.total_frames for dataset in self.datasets),
            len(self.pieces),
            sum(piece.frames for piece in self.pieces),
            made.files if made else 0,
            made.kept_files if made else 0,
            made.encoded if made else 0,
            made is None,
        )

    def build(self, new: Path) -> _EditBuild:
        features = {
            name: self.spec.features[old]
            if self.edits.codec is None or self.spec.features[old].dtype != "video"
            else replace(self.spec.features[old], info=None)
            for name, old in self.names.items()
        }
        return _EditBuild(self, new, replace(self.spec, features=features))


class _EditBuild(Build):
    """Builds a dataset from pieces of others."""

    def __init__(self, work: _Work, new: Path, spec: Spec) -> None:
        self._work, self._to = work, new
        self.encoded = self.kept_files = 0
        self._pictures = {n: f for n, f in spec.features.items() if f.is_picture}
        self._shown: dict[tuple[int, str], dict[str, Any]] = {}  # statistics of what was decoded
        infos: dict[str, dict[str, Any]] = {}
        in_place = work.target == work.root
        inputs = [_Input(dataset, work.spec) for dataset in work.datasets]
        tasks = list(dict.fromkeys(piece.task for piece in work.pieces))
        same_tasks = tasks == work.datasets[0].tasks[: len(tasks)]
        same_names = all(new == old for new, old in work.names.items())
        same_names = same_names and len(work.names) == len(work.spec.features)
        self._inputs = inputs
        sources = []
        for number, piece in enumerate(work.pieces):
            check_stop()
            source = self._source(number, piece, spec, infos)
            was = work.datasets[piece.dataset].episode(piece.episode)
            stays = in_place and piece.dataset == 0 and piece.frames == was.length
            if stays and not work.edits.codec:
                same = same_names and same_tasks and piece.task == was.tasks[0]
                source = replace(source, index=piece.episode, rows_stay=same)
            sources.append(source)
        owners = [(p.dataset, inputs[p.dataset].owners[p.episode]) for p in work.pieces]
        records = _records(inputs, owners, sources)
        stored = work.stored
        bags = [str(r.source.get("fingerprint", f"unit {r.position}")) for r in records]
        plan = Plan(spec, stored.settings if stored else {}, bags)
        if stored is not None:
            left = [bag for bag in stored.bags if bag not in bags and not bag.startswith("unit ")]
            plan = replace(plan, bags=[*bags, *left])
        built = inputs[0].built
        known = built.infos if built else {}
        infos |= {n: known[was] for n, was in work.names.items() if was in known and n not in infos}
        super().__init__(
            work.root,
            new,
            plan,
            Base(),
            inputs[0].records if in_place else (),
            records,
            sources,
            built.files if built and in_place else {},
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
            spare = _SPARE if not whole or given.has_spare(clip.path) else 0
            clip = Clip(clip.path, clip.first + piece.start, piece.frames, spare)
            clips[name], shown[name] = clip, (int(size * share), how)
            whole_file = not spec.format.shares_files
            if work.edits.codec or (whole_file and not _begins_alone(clip)):
                codec = work.edits.codec or _codec_of(spec.features[name])
                clips[name], shown[name], info = self._encode(number, name, clip, codec, spec)
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
        self, number: int, camera: str, clip: Clip, codec: str, spec: Spec
    ) -> tuple[Clip, tuple[int, str], dict[str, Any]]:
        """Decode frames, and encode them as a video of their own."""
        piece = self._work.pieces[number]
        feature = spec.features[camera]
        was = self._work.names[camera]
        if feature.is_depth and codec != "depth12":
            raise UsageError(f"{was!r} is depth, which {codec} cannot hold: leave it as it is")
        scratch = self._to / _SCRATCH
        scratch.mkdir(parents=True, exist_ok=True)
        path = scratch / f"{camera}-{number:06d}.mp4"
        settings = VideoSettings("depth12" if feature.is_depth else codec)  # type: ignore[arg-type]
        episode = self._work.datasets[piece.dataset].episode(piece.episode)
        sink = open_sink(path, feature, settings, spec.fps, clip.frames)
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

    def _count(self) -> tuple[dict[str, AnyStats], pa.Table]:
        """Return the statistics of all frames, and those of every episode; from the rows."""
        features = self._spec.features
        summed = {n: f for n, f in features.items() if not f.is_picture and f.has_stats}
        numbers = NumberColumns(summed, self._lengths)
        old = {self._work.names[name]: feature for name, feature in summed.items()}
        for first, stop in runs(self._sources) if summed else ():
            check_stop()
            with Table(first.rows.parent, first.rows.name) as table:
                for batch in table.batches(old, first.first_row, stop):
                    numbers.add({name: batch[self._work.names[name]] for name in summed})
        shown = {name: self._picture_stats(name) for name in self._pictures}
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
            if (number, camera) in self._shown:
                found.append(self._shown[number, camera])
                continue
            episode = self._work.datasets[piece.dataset].episode(piece.episode)
            stats = known[piece.dataset].get(piece.episode)
            if stats is None or piece.frames != episode.length:
                check_stop()
                stats = _counted(episode, was, feature, piece.start, piece.stop)
            found.append(stats)
        return found

    @cached_property
    def _counted(self) -> tuple[dict[str, AnyStats], pa.Table]:
        return self._count()

    def _info(self) -> bytes:
        info = json.loads(super()._info())
        # What else the dataset says of itself stays.
        info |= {k: v for k, v in self._work.datasets[0].info.items() if k not in info}
        return json.dumps(info, indent=4, ensure_ascii=False).encode()

    def _episode_stats(self) -> Iterator[pa.Table]:
        yield self._counted[1]

    def _total_stats(self) -> tuple[dict[str, AnyStats], int]:
        total = self._counted[0]
        write_stats(self._new / TOTAL_STATS, total)
        return total, len(self._records)


class _Input:
    """A dataset that episodes are taken from.

    Attributes:
        records: What its metadata say.
        built: What penstock knows of it, if it made it as it is.
        owners: Per episode the number of its unit in `built`; None if there is none.
        sources: Where its episodes lie.
    """

    def __init__(self, dataset: Dataset, spec: Spec) -> None:
        self.dataset = dataset
        self._known = metadata.read_info(dataset.path)
        self.records = list(metadata.read_episodes(dataset.path, self._known))
        self.built = self._read_built()
        episodes: list[Episode] = []
        self.owners: list[int | None] = []
        units = self.built.units if self.built else []
        first = self.built.base.episodes if self.built else len(self.records)
        for record in self.records[:first]:
            episodes.append(self._episode(record))
            self.owners.append(None)
        for number, unit in enumerate(units):
            episodes += unit.episodes
            self.owners += [number] * len(unit.episodes)
        self.sources = list(sources_in(dataset.path, spec.fps, self.records, episodes))

    def _read_built(self) -> Built | None:
        built = Built.read(self.dataset.path)
        if built is None:
            return None
        known = [episode.frames for unit in built.units for episode in unit.episodes]
        now = [record.length for record in self.records]
        return built if now[built.base.episodes :] == known else None

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
    def has_spare(self, path: Path) -> bool:
        """Whether a video has frames that belong to nobody: then others may need them."""
        with open_video(path) as (_, stream):
            name = path.relative_to(self.dataset.path).as_posix()
            return bool(stream.frames != self._in_file[name])

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
            every = metadata.read_episode_stats(self.dataset.path, self._known, [camera])
            for index, stats in every:
                with suppress(ValueError):
                    found[index] = known_picture_stats(stats.get(camera, {}), feature)
        return found


def _records(
    inputs: Sequence[_Input],
    owners: Sequence[tuple[int, int | None]],
    sources: Sequence[Source],
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
        units = given.built.units if given.built else []
        named = {"dataset": given.dataset.path.name}
        origin: list[tuple[int | None, str, dict[str, Any]]] = [
            (None, make_key(named, number), named),
            *((k, unit.key, unit.source) for k, unit in enumerate(units)),
        ]
        for owner_number, key, source in origin:
            episodes = of.get((number, owner_number), [])
            if owner_number is None and not episodes:
                continue
            own = key if key not in keys else make_key(key, len(found))
            keys.add(own)
            found.append(UnitRecord(own, len(found), source, episodes))
    return found


def _begins_alone(clip: Clip) -> bool:
    """Whether a clip can be a video of its own: it begins with a key frame."""
    if clip.first == 0:
        return True
    with open_video(clip.path) as (container, stream):
        rate = stream.average_rate
        container.seek(round(clip.first / rate / stream.time_base), stream=stream)
        packet = next(container.demux(stream))
        return packet.pts is not None and round(packet.pts * stream.time_base * rate) == clip.first


def _codec_of(feature: Feature) -> str:
    """Return the codec of ours that comes nearest to that of a video."""
    codec = (feature.info or {}).get("video.codec")
    return "av1" if codec == "av1" else "copy" if codec == "mjpeg" else "h264"


def _counted(
    episode: DatasetEpisode, camera: str, feature: Feature, start: int, stop: int
) -> dict[str, Any]:
    """Count the pictures of some frames, as a conversion does."""
    _, height, width = feature.picture_size
    stats = PictureStats.of(feature)
    stride = picture_stride(height, width)
    wanted = set(sample_indices(stop - start).tolist())
    for number, frame in enumerate(episode.frames([camera], start, stop)):
        if number in wanted:
            stats.add(np.ascontiguousarray(frame[camera][::stride, ::stride]))
    return stats.to_json()
