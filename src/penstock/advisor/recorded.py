"""Samples of recordings, topic by topic, and of LeRobot datasets, feature by feature."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.advisor.decide import CodecMeasure, KeyMeasure
from penstock.advisor.sample import Source, joined, nbytes, positions, some_of, spread
from penstock.bags import open_bag
from penstock.bags.reader import Bag, Topic
from penstock.core.pack import DTYPES
from penstock.dataset.layout import Feature
from penstock.dataset.reader import Dataset
from penstock.errors import DataError, LimitExceeded

_MOST_MESSAGES = 2000
_MESSAGE_RUNS = 16
_TOPIC_BYTES = 256 << 10  # the least that is looked at
_EPISODES, _EPISODE_RUNS = 8, 4
_PLACES, _PICTURES = 4, 4  # of each camera: where, and how many there
_INDEXES = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_CODED = ("compressed", "h264", "h265", "video")


def bag_source(where: Path, budget: int) -> Source:
    """Sample the messages of every topic; of a damaged recording, those that can be read."""
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
        topics = [topic for topic in bag.topics.values() if topic.count]
        share = max(_TOPIC_BYTES, budget // max(1, len(topics)))
        chosen = {topic.name: _ordinals(bag, topic, share) for topic in topics}
        messages: dict[str, list[bytes]] = {topic.name: [] for topic in topics}
        for message in bag.read(chosen, chosen):
            messages[message.topic].append(bytes(message.data))
        for topic in topics:
            taken, size = messages[topic.name], topic.size_bytes
            if size is None:
                size = int(sum(map(len, taken)) / max(1, len(taken)) * topic.count)
            key = KeyMeasure((topic.name,), "recording", topic.type, (topic.count,), size, size)
            key.note = _note(bag, topic, taken[0]) if taken else ""
            words = np.frombuffer(b"".join(taken), np.uint8)
            source.add_piece(key, words)
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
    run = max(1, count // _MESSAGE_RUNS)
    return np.array(positions(spread(topic.count, run, max(1, count // run))), np.int64)


def _note(bag: Bag, topic: Topic, data: bytes) -> str:
    """Say of a topic that its messages are compressed pictures."""
    try:
        encoding = bag.decoder(topic.name).image(data).encoding
    except DataError:  # no picture
        encoding = topic.type.rpartition("/")[2]
        coded = any(word in encoding.lower() for word in _CODED)
        return f"already compressed ({encoding})" if coded else ""
    coded = topic.type.endswith("CompressedImage")
    return f"{'already compressed' if coded else 'raw pictures'} ({encoding})"


def dataset_source(where: Path, budget: int) -> Source:
    """Sample a dataset: its columns, and of its cameras some pictures; videos stay as they are."""
    dataset = Dataset(where)
    source = Source("LeRobot dataset", str(where), dataset.total_frames)
    files = [path for path in where.rglob("*") if path.is_file() and not path.is_symlink()]
    source.disk_bytes = sum(path.stat().st_size for path in files)
    if not source.frames:
        return source
    keys = [
        _column(name, feature, source.frames)
        for name, feature in dataset.features.items()
        if not feature.is_picture and feature.dtype in DTYPES
    ]
    raw = sum(key.raw_bytes for key in keys)
    names = {episode.data_file for episode in dataset.episodes}
    stored = sum((where / name).stat().st_size for name in names)
    pictures = sum(f.is_picture and f.dtype != "video" for f in dataset.features.values())
    row_bytes = max(1, raw // source.frames)
    episodes = some_of(dataset.episodes, _EPISODES)
    run = max(1, budget // len(episodes) // row_bytes // _EPISODE_RUNS)
    for key in keys:
        source.add_key(key)
        if not pictures:  # in the rows, they hide the numbers
            key.stored = CodecMeasure("parquet", raw / max(1, stored), 0.0, 0.0)
    for episode in episodes:
        columns = episode.columns([key.path[0] for key in keys])
        for key in keys:
            values = columns[key.path[0]]
            words = joined(values, spread(len(values), run, _EPISODE_RUNS))
            words = words.astype(DTYPES[key.dtype].words, copy=False)
            frames = words.reshape(len(words), *key.shape[1:]) if key.memory_bytes else None
            source.add_piece(key, words, frames)
    for name in dataset.camera_keys:
        _add_camera(source, dataset, name, max(0, stored - raw) // max(1, pictures))
    return source


def _column(name: str, feature: Feature, frames: int) -> KeyMeasure:
    shape = (frames, *feature.shape)
    size, index = nbytes(feature.dtype, shape), name in _INDEXES
    held, note = (0, "index") if index else (size, "")
    return KeyMeasure((name,), "dataset", feature.dtype, shape, size, held, note)


def _add_camera(source: Source, dataset: Dataset, name: str, size: int) -> None:
    feature = dataset.features[name]
    coded = "PNG or JPEG"
    if feature.dtype == "video":
        videos = {episode.videos[name].file for episode in dataset.episodes}
        size = sum((dataset.path / file).stat().st_size for file in videos)
        coded = (feature.info or {}).get("video.codec", "video")
    frames = []
    for episode in some_of(dataset.episodes, _PLACES):
        for some in spread(episode.length, _PICTURES, max(1, _PLACES // len(dataset))):
            stop = min(some.stop, some.start + _PICTURES)
            frames += [frame[name] for frame in episode.frames([name], some.start, stop)]
    pictures = np.stack(frames)
    shape = (dataset.total_frames, *pictures.shape[1:])
    held = nbytes(pictures.dtype.name, shape)
    note = f"already compressed ({coded})"
    key = KeyMeasure((name,), "dataset", pictures.dtype.name, shape, size, held, note)
    source.add_piece(key, pictures, pictures)
