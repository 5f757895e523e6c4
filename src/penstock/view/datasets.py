"""A LeRobot dataset as the viewer shows it, alone or beside the recordings it was made from."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from penstock.dataset.layout import AUTO_FEATURES, Feature
from penstock.dataset.reader import Dataset, Episode, reading_video
from penstock.dataset.remote import RemoteDataset
from penstock.errors import DataError, UsageError
from penstock.inspect.dataset import origin
from penstock.media.images import thumbnail
from penstock.objects import ObjectPath
from penstock.view.model import (
    MOST_EVENTS,
    MOST_POINTS,
    Camera,
    Curve,
    EpisodeView,
    Event,
    Points,
    Row,
    Source,
    pick,
    thin,
)
from penstock.view.pictures import DEPTH_MM, PLAYABLE, Packet, depth_jpeg, packets, plays
from penstock.view.recordings import RecordingEpisode, Recordings

_SAME = 1e-3  # seconds: a timestamp that is off by more is marked


class DatasetSource(Source):
    """A dataset.

    Args:
        path: Its folder, here or in object storage.
        recordings: Those it was made from, to be shown beside it.
    """

    can_mark = True

    def __init__(self, path: Path | ObjectPath, recordings: Recordings | None = None) -> None:
        self.path = str(path)
        self._remote = None
        if isinstance(path, ObjectPath):
            # Metadata come at once, rows and videos by ranges when they are looked at.
            self._remote = RemoteDataset(path, changes=False)
            self._remote.__enter__()
            path = self._remote.folder
            self.can_check = False
        try:
            self.dataset = Dataset(path, self._remote.open if self._remote else None)
        except BaseException:
            self._close_remote()
            raise
        self.kind = f"LeRobot dataset {self.dataset.version}"
        self.rows = [
            Row(e.index, "; ".join(e.tasks), e.length, e.length / self.dataset.fps)
            for e in self.dataset.episodes
        ]
        self._recordings = recordings
        self._origin = origin(path)
        self._firsts = [entry["first_episode"] for entry in self._origin]
        self._depth_mm = self._depth_ranges()

    def open(self, index: int) -> EpisodeView:
        """Open an episode, with its recording if that is known."""
        pick(self.rows, index, "episode")
        episode = self.dataset.episode(index)
        view = DatasetEpisode(self.dataset, episode, self._depth_mm)
        entry = self._entry(index)
        if entry is not None:
            view.notes.append(f"from {entry.get('bag') or entry.get('rollout')}")
        if self._recordings is None:
            return view
        recorded = self._recorded(index, entry)
        if isinstance(recorded, str):
            view.notes.append(recorded)
            return view
        number, offset_s = recorded
        if entry is not None and entry["spans_ns"][index - entry["first_episode"]][0] is not None:
            first, last = entry["spans_ns"][index - entry["first_episode"]]
            hole_s = (last - first) / 1e9 - (episode.length - 1) / self.dataset.fps
            if hole_s > 1.5 / self.dataset.fps:
                view.notes.append(
                    f"the recording has {hole_s:.1f} s that are not in the episode: behind the "
                    "first such hole the two are no longer in step"
                )
        return Both(view, self._recordings.open(number), offset_s)

    def close(self) -> None:
        """Close the recordings, and forget what was brought from object storage."""
        if self._recordings is not None:
            self._recordings.close()
        self._close_remote()

    def _close_remote(self) -> None:
        if self._remote is not None:
            self._remote.close()

    def _entry(self, index: int) -> dict[str, Any] | None:
        at = int(np.searchsorted(self._firsts, index, "right")) - 1
        entry = self._origin[at] if at >= 0 else None
        return entry if entry and index < entry["first_episode"] + entry["episodes"] else None

    def _recorded(self, index: int, entry: dict[str, Any] | None) -> tuple[int, float] | str:
        """Return the recording of an episode, and when it begins there; or why there is none."""
        assert self._recordings is not None
        names = [row.task for row in self._recordings.rows]
        if entry and entry.get("bag"):
            wanted = Path(str(entry["bag"])).name
            if wanted not in names:
                return f"its recording {wanted} is not among those given"
            number = names.index(wanted)
            start_ns, _ = entry["spans_ns"][index - entry["first_episode"]]
            if start_ns is None:
                return number, 0.0
            return number, (start_ns - self._recordings.start_ns(number)) / 1e9
        if len(names) == len(self.rows):
            return index, 0.0
        return "it is not known which recording this is from"

    def _depth_ranges(self) -> dict[str, tuple[int, int]]:
        """Return the range of distances of the depth cameras, from the statistics."""
        names = [name for name, feature in self.dataset.features.items() if _is_depth(feature)]
        stats: dict[str, Any] = {}
        if names and self.dataset.version == "v3.0":
            try:
                stats = self.dataset.stats()
            except DataError:
                stats = {}
        found = {}
        for name in names:
            own = stats.get(name, {})
            low, high = (float(own[q].reshape(-1)[0]) if q in own else 0.0 for q in ("q01", "q99"))
            found[name] = (int(low), int(high)) if 0 <= low < high and high > 100 else DEPTH_MM
        return found


def _is_depth(feature: Feature) -> bool:
    return feature.is_picture and (feature.is_depth or feature.picture_size[0] == 1)


class DatasetEpisode(EpisodeView):
    """An episode of a dataset."""

    def __init__(
        self, dataset: Dataset, episode: Episode, depth_mm: dict[str, tuple[int, int]]
    ) -> None:
        self._dataset, self._episode = dataset, episode
        self._lock = threading.Lock()
        self.fps = float(dataset.fps)
        self.frames, self.seconds = episode.length, episode.length / self.fps
        self.task = "; ".join(episode.tasks)
        self.notes: list[str] = []
        self.cameras = [self._camera(name, depth_mm) for name in dataset.camera_keys]
        numbers = {
            name: feature
            for name, feature in dataset.features.items()
            if not feature.is_picture and feature.dtype != "string" and name not in AUTO_FEATURES
        }
        names = sorted(numbers, key=lambda name: name not in ("observation.state", "action"))
        self.curves = [
            Curve(
                name, "dataset", _labels(numbers[name]), self._under(name, names, dataset.features)
            )
            for name in names
        ]

    @staticmethod
    def _under(name: str, names: list[str], features: dict[str, Feature]) -> int | None:
        state = "observation.state"
        if name == "action" and state in names and features[state].shape == features[name].shape:
            return names.index(state)
        return None

    def _camera(self, name: str, depth_mm: dict[str, tuple[int, int]]) -> Camera:
        feature, fps = self._dataset.features[name], self.fps
        count, depth = self.frames, depth_mm.get(name)
        if feature.dtype == "image":
            return Camera(name, "frames", "dataset", count, fps, 0.0, depth)
        span = self._episode.videos[name]
        codec = (feature.info or {}).get("video.codec")
        video = depth is None and (codec is None or codec in PLAYABLE or codec.startswith("avc"))
        if video:
            try:
                with reading_video(self._dataset, span.file) as file:
                    video = plays(file)
            except DataError as error:
                self.notes.append(str(error))
        if not video:
            return Camera(name, "frames", "dataset", count, fps, 0.0, depth)
        return Camera(name, "video", "dataset", count, fps, span.from_s, None, span.file)

    def video(self, camera: int) -> Path | BinaryIO:
        """Return the file, which holds other episodes, too."""
        name = pick(self.cameras, camera, "camera").name
        if name not in self._episode.videos:
            raise UsageError(f"{name!r} has no video")
        return self._dataset.video(self._episode.videos[name].file)

    def _packets(self, camera: str, first: int, count: int) -> list[Packet]:
        span = self._episode.videos[camera]
        with reading_video(self._dataset, span.file) as file:
            return packets(file, round(span.from_s * self.fps) + first, count)

    def picture(self, camera: int, frame: int, width: int) -> bytes:
        """Decode a frame; a JPEG of the video itself is given as it is."""
        chosen = pick(self.cameras, camera, "camera")
        if not 0 <= frame < self.frames:
            raise UsageError(f"there is no frame {frame}: there are {self.frames}")
        with self._lock:
            if chosen.name in self._episode.videos and chosen.depth_mm is None:
                for packet in self._packets(chosen.name, frame, 1):
                    if packet.jpeg is not None:
                        return packet.jpeg
            pixels = self._episode.image(chosen.name, frame)
            if chosen.depth_mm is not None and pixels.ndim == 2:
                return depth_jpeg(pixels, chosen.depth_mm, width)
            return thumbnail(pixels, width)

    def times(self, camera: int) -> NDArray[np.float64]:
        """Return the times of the frames."""
        return np.arange(pick(self.cameras, camera, "camera").count) / self.fps

    def points(self, curve: int, most: int = MOST_POINTS) -> Points:
        """Read a feature."""
        chosen = pick(self.curves, curve, "curve")
        values = self._episode.columns([chosen.name])[chosen.name]
        return thin(np.arange(self.frames) / self.fps, values, chosen.labels, most)

    def events(self) -> list[Event]:
        """Find frames whose time is off, and pictures that are shown again."""
        times = self._episode.columns(["timestamp"])["timestamp"].astype(np.float64)
        off = times - np.arange(self.frames) / self.fps
        found = [
            Event(k / self.fps, "late", f"timestamp is off by {off[k] * 1000:.0f} ms")
            for k in np.flatnonzero(np.abs(off) > _SAME)[:MOST_EVENTS].tolist()
        ]
        for camera in self.cameras:
            if camera.name in self._episode.videos:
                found += self._repeated(camera)
        return sorted(found, key=lambda event: event.t_s)[:MOST_EVENTS]

    def _repeated(self, camera: Camera) -> list[Event]:
        """Find pictures that are those before: equal JPEGs, or packets that change nothing."""
        try:
            stored = self._packets(camera.name, 0, self.frames)
        except DataError as error:
            return [Event(0.0, "late", str(error))]
        return [
            Event(packet.number / self.fps, "repeated", f"{camera.name}: shown again")
            for before, packet in pairwise(stored)
            if packet.is_still or (packet.jpeg is not None and packet.jpeg == before.jpeg)
        ]


def _labels(feature: Feature) -> tuple[str, ...]:
    names: Any = feature.names
    while isinstance(names, dict) and names:
        names = next(iter(names.values()))
    size = int(np.prod(feature.shape))
    if isinstance(names, list) and len(names) == size and feature.shape != (1,):
        return tuple(str(name)[:60] for name in names)
    return tuple(str(k) for k in range(size)) if size > 1 else ("",)


class Both(EpisodeView):
    """An episode of a dataset, and the part of a recording that it was made from.

    Args:
        made: The episode.
        recorded: The recording.
        offset_s: When the episode begins in it.
    """

    def __init__(self, made: DatasetEpisode, recorded: RecordingEpisode, offset_s: float) -> None:
        self._made, self._recorded, self._offset_s = made, recorded, offset_s
        self.seconds, self.frames, self.fps = made.seconds, made.frames, made.fps
        self.task, self.notes = made.task, [*made.notes, *recorded.notes]
        self.cameras = [*made.cameras, *recorded.cameras]
        shift = len(made.curves)
        self.curves = [*made.curves, *(_shifted(curve, shift) for curve in recorded.curves)]

    def _of(self, number: int, own: int) -> tuple[EpisodeView, int]:
        return (self._made, number) if number < own else (self._recorded, number - own)

    def video(self, camera: int) -> Path | BinaryIO:
        """Return the file of a camera of the dataset."""
        view, number = self._of(camera, len(self._made.cameras))
        return view.video(number)

    def picture(self, camera: int, frame: int, width: int) -> bytes:
        """Return a frame of either."""
        view, number = self._of(camera, len(self._made.cameras))
        return view.picture(number, frame, width)

    def times(self, camera: int) -> NDArray[np.float64]:
        """Return when the frames are, on the time axis of the episode."""
        view, number = self._of(camera, len(self._made.cameras))
        times = view.times(number)
        return times if view is self._made else times - self._offset_s

    def points(self, curve: int, most: int = MOST_POINTS) -> Points:
        """Return a curve of either."""
        view, number = self._of(curve, len(self._made.curves))
        if view is self._made:
            return view.points(number, most)
        window = (self._offset_s, self._offset_s + self.seconds)
        found = self._recorded.points(number, most, window)
        return replace(found, t_s=found.t_s - np.float32(self._offset_s))

    def events(self) -> list[Event]:
        """Return those of both that lie in the episode."""
        recorded = [
            replace(event, t_s=round(event.t_s - self._offset_s, 4))
            for event in self._recorded.events()
        ]
        inside_it = [event for event in recorded if 0 <= event.t_s <= self.seconds]
        return sorted([*self._made.events(), *inside_it], key=lambda e: e.t_s)[:MOST_EVENTS]


def _shifted(curve: Curve, by: int) -> Curve:
    return curve if curve.under is None else replace(curve, under=curve.under + by)
