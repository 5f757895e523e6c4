"""Samples of recordings, topic by topic, and of LeRobot datasets, feature by feature."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.advisor.sample import Key, Sampled, Source, spread
from penstock.bags import open_bag
from penstock.bags.reader import Bag, Topic
from penstock.core.pack import DTYPES
from penstock.dataset.layout import Feature
from penstock.dataset.reader import Dataset
from penstock.errors import DataError, LimitExceeded

Array = NDArray[Any]

_MOST_MESSAGES = 2000
_TOPIC_BYTES = 256 << 10  # the least that is looked at
_EPISODES = 8
_PLACES, _PICTURES = 4, 4  # of each camera: where, and how many there
_INDEXES = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_CODED = ("compressed", "h264", "h265", "video")


def bag_source(where: Path, budget: int) -> Source:
    """Sample the messages of every topic; of a damaged recording, those that can be read.

    Raises:
        DataError: Nothing of it can be read.
    """
    try:
        return _bag_source(where, budget, salvage=False)
    except LimitExceeded:
        raise
    except DataError:
        return _bag_source(where, budget, salvage=True)


def _bag_source(where: Path, budget: int, *, salvage: bool) -> Source:
    """Take runs of messages from all over the recording."""
    with open_bag(where, salvage=salvage) as bag:
        source = Source("recording", str(where), disk_bytes=bag.size_bytes)
        wanted: dict[str, NDArray[np.int64]] = {}
        topics = [topic for topic in bag.topics.values() if topic.count]
        for topic in topics:
            wanted[topic.name] = _ordinals(bag, topic, max(_TOPIC_BYTES, budget // len(topics)))
        runs: dict[str, list[bytes]] = {topic.name: [] for topic in topics}
        for message in bag.read(wanted, wanted):
            runs[message.topic].append(bytes(message.data))
        for topic in topics:
            taken = runs[topic.name]
            size = topic.size_bytes
            if size is None:
                size = int(sum(map(len, taken)) / max(1, len(taken)) * topic.count)
            note = _note(bag, topic, taken[0]) if taken else ""
            key = Key((topic.name,), "recording", topic.type, (topic.count,), size, size, note=note)
            words = np.frombuffer(b"".join(taken), np.uint8)
            if words.size:
                key.samples.append(Sampled(words))
            source.keys.append(key)
        if bag.compression not in ("none", ""):
            source.kind = f"recording, compressed with {bag.compression}"
        if bag.salvage is not None:
            source.notes.append(f"it is damaged, only a part was looked at ({bag.salvage})")
        return source


def _ordinals(bag: Bag, topic: Topic, budget: int) -> NDArray[np.int64]:
    if topic.size_bytes is not None:
        mean = topic.size_bytes / topic.count
    else:
        first = next(iter(bag.read([topic.name], {topic.name: np.zeros(1, np.int64)})))
        mean = len(first.data)
    count = int(min(_MOST_MESSAGES, max(4, budget // max(1.0, mean))))
    run = max(1, count // 16)
    rows = spread(topic.count, run, max(1, count // run))
    return np.concatenate([np.arange(some.start, some.stop) for some in rows])


def _note(bag: Bag, topic: Topic, data: bytes) -> str:
    """Say of a topic that its messages are compressed pictures."""
    try:
        encoding = bag.decoder(topic.name).image(data).encoding
    except DataError:  # no picture
        encoding = topic.type.rpartition("/")[2]
        coded = any(word in encoding.lower() for word in _CODED)
        return f"already compressed ({encoding})" if coded else ""
    if topic.type.endswith("CompressedImage"):
        return f"already compressed ({encoding})"
    return f"raw pictures ({encoding})"


def dataset_source(where: Path, budget: int) -> Source:
    """Sample a dataset: its columns, and of its cameras some pictures; videos stay as they are."""
    dataset = Dataset(where)
    frames = dataset.total_frames
    source = Source("LeRobot dataset", str(where), frames)
    files = [path for path in where.rglob("*") if path.is_file() and not path.is_symlink()]
    source.disk_bytes = sum(path.stat().st_size for path in files)
    if not frames:
        return source
    columns = {
        name: feature
        for name, feature in dataset.features.items()
        if not feature.is_picture and feature.dtype in DTYPES
    }
    raw = sum(frames * _size(feature) for feature in columns.values())
    names = {episode.data_file for episode in dataset.episodes}
    stored = sum((where / name).stat().st_size for name in names)
    pictures = [n for n, f in dataset.features.items() if f.is_picture and f.dtype != "video"]
    ratio = None if pictures else raw / max(1, stored)  # pictures in the rows hide the numbers
    for name, feature in columns.items():
        size = frames * _size(feature)
        shape = (frames, *feature.shape)
        held = 0 if name in _INDEXES else size
        key = Key((name,), "dataset", feature.dtype, shape, size, held, stored_ratio=ratio)
        key.note = "index" if name in _INDEXES else ""
        source.keys.append(key)
    _sample_columns(dataset, source, budget)
    for name in dataset.camera_keys:
        source.keys.append(_camera(dataset, name, max(0, stored - raw) // max(1, len(pictures))))
    return source


def _size(feature: Feature) -> int:
    return math.prod(feature.shape) * DTYPES[feature.dtype].words.itemsize


def _sample_columns(dataset: Dataset, source: Source, budget: int) -> None:
    numbers = spread(len(dataset.episodes), 1, _EPISODES)
    chosen = [k for some in numbers for k in range(some.start, some.stop)]
    row = sum(key.raw_bytes for key in source.keys) / dataset.total_frames
    keep = max(1, int(budget // len(chosen) // max(1.0, row)))
    names = [key.path[0] for key in source.keys]
    for number in chosen:
        found = dataset.episode(number).columns(names)
        for key in source.keys:
            values = found[key.path[0]]
            rows = spread(len(values), max(1, keep // 4), 4)
            words = np.concatenate([values[some] for some in rows])
            words = words.astype(DTYPES[key.dtype].words, copy=False)
            frames = None if key.note == "index" else words.reshape(len(words), *key.shape[1:])
            key.samples.append(Sampled(words, frames))


def _camera(dataset: Dataset, name: str, size: int) -> Key:
    feature = dataset.features[name]
    if feature.dtype == "video":
        videos = {episode.videos[name].file for episode in dataset.episodes}
        size = sum((dataset.path / file).stat().st_size for file in videos)
        note = f"already compressed ({(feature.info or {}).get('video.codec', 'video')})"
    else:
        note = "already compressed (PNG or JPEG)"
    frames = []
    for some in spread(len(dataset.episodes), 1, _PLACES):
        for number in range(some.start, some.stop):
            episode = dataset.episode(number)
            for place in spread(episode.length, _PICTURES, max(1, _PLACES // len(dataset))):
                stop = min(place.stop, place.start + _PICTURES)
                frames += [f[name] for f in episode.frames([name], place.start, stop)]
    pictures = np.stack(frames)
    held = dataset.total_frames * pictures[0].nbytes
    shape = (dataset.total_frames, *pictures.shape[1:])
    key = Key((name,), "dataset", pictures.dtype.name, shape, size, held, note=note)
    key.samples.append(Sampled(pictures, pictures))
    return key
