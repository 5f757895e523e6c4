"""Store a sample by the writers themselves, and read from the files what became of it.

What a file's index says of the sample is what the whole data will become. Checkpoints of a series
are stored twice: full, and those between keyframes as differences, as `delta_every` would do it.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.advisor.model import CodecMeasure, Machine
from penstock.advisor.sample import Group, Source, nbytes, spread
from penstock.advisor.timing import codec_name, raw, timed
from penstock.core.codecs import Codec, Delta, Planes
from penstock.core.pack import Entry, Item, PackReader, PackWriter

Array = NDArray[Any]

ROLLOUT_LEVEL = 9  # the default of RolloutStorage
CHECKPOINT_LEVEL = 2  # the default of AsyncCheckpointSaver

_PLAIN_BYTES = 4096  # smaller tensors of a checkpoint are stored as they are
_WORTH_IT = 0.9  # a saver stores a difference if it is at least so much smaller
_TIMED_BYTES = 2 << 20
_TIMED_BLOCKS = 256
_BLOCK_HEADER_BYTES = 24  # per block in the header of a pack


@dataclass(frozen=True)
class Stored:
    """What storing makes of each key, by its number in the source.

    Attributes:
        codecs: As the writer stores it; a checkpoint in full.
        differences: Of a series of checkpoints: keyframes in full, the others as differences.
        overhead_bytes: Headers of all files.
    """

    codecs: dict[int, CodecMeasure]
    differences: dict[int, CodecMeasure]
    overhead_bytes: int


@dataclass
class _Sum:
    """What all samples of a key came to, each weighted by what it stands for."""

    raw_bytes: float = 0.0
    coded_bytes: float = 0.0
    codec: Codec | None = None
    blocks: list[Array] = field(default_factory=list)
    bases: list[Array] = field(default_factory=list)

    def add(self, raw_bytes: int, coded_bytes: int, weight: float) -> None:
        self.raw_bytes += raw_bytes * weight
        self.coded_bytes += coded_bytes * weight

    def measure(self, machine: Machine) -> CodecMeasure:
        ratio = self.raw_bytes / max(1.0, self.coded_bytes)
        speed = raw(machine)
        if self.codec is not None:
            speed = timed(codec_name(self.codec), self.codec, self.blocks, self.bases)
        return CodecMeasure(speed.name, ratio, speed.encode_bytes_s, speed.decode_bytes_s)


def store(source: Source, machine: Machine) -> Stored:
    """Write the groups of a source into a temporary folder, and measure."""
    sums: dict[int, _Sum] = {}
    overhead = 0.0
    files: Counter[str] = Counter()
    for group in source.groups:
        files[group.writer] += group.files  # type: ignore[assignment]
    with tempfile.TemporaryDirectory(prefix="penstock-advise-") as folder:
        paths = [Path(folder) / f"{number}.pack" for number in range(len(source.groups))]
        for path, group in zip(paths, source.groups, strict=True):
            _write(path, source, group)
            with PackReader(path) as pack:
                header = pack.index.header_bytes
                for key, words in group.items:
                    entry = pack.entry(str(key))
                    found = sums.setdefault(key, _Sum())
                    found.add(words.nbytes, entry.stored_bytes, group.files)
                    per_file = source.keys[key].raw_bytes / max(1.0, files[group.writer])
                    more = per_file / entry.block_bytes - entry.blocks
                    header += int(_BLOCK_HEADER_BYTES * max(0.0, more))
                    if entry.codec.id != "raw":
                        found.codec = entry.codec
                        found.blocks += _some_blocks(pack, entry, len(source.groups))
                overhead += header * group.files
        codecs = {key: found.measure(machine) for key, found in sums.items()}
        differences = _differences(source, paths, codecs, machine)
    return Stored(codecs, differences, int(overhead))


def _write(path: Path, source: Source, group: Group) -> None:
    if group.writer == "rollouts":
        from penstock.rollouts.file import write_rollout
        from penstock.rollouts.structure import Axes, Batch, Leaf

        leaves = [
            Leaf(str(key), source.keys[key].path, source.keys[key].dtype, np.ascontiguousarray(w))
            for key, w in group.items
        ]
        children = [
            [list(source.keys[key].path), {"kind": "tensor", "item": str(key), "device": "cpu"}]
            for key, _ in group.items
        ]
        node = {"kind": "dict", "v": children}
        write_rollout(path, Batch(node, leaves), Axes(*group.axes), 0, ROLLOUT_LEVEL)
        return
    _write_state(path, source, group, Planes(level=CHECKPOINT_LEVEL))


def _write_state(
    path: Path, source: Source, group: Group, codec: Codec, base: PackReader | None = None
) -> None:
    items = [
        Item(
            str(key),
            np.ascontiguousarray(words),
            source.keys[key].dtype,
            codec if _is_coded(source, key) else None,
        )
        for key, words in group.items
    ]
    with PackWriter(path, kind="checkpoint", meta=group.meta, base=base) as writer:
        writer.write(items)


def _is_coded(source: Source, key: int) -> bool:
    """Tell whether a tensor is compressed: by its own size, not that of the sample."""
    return nbytes(source.keys[key].dtype, source.keys[key].shape) >= _PLAIN_BYTES


def _differences(
    source: Source, paths: Sequence[Path], full: dict[int, CodecMeasure], machine: Machine
) -> dict[int, CodecMeasure]:
    """Measure checkpoints stored as differences, their keyframes included."""
    sums: dict[int, _Sum] = {}
    for path, group in zip(paths, source.groups, strict=True):
        if not group.share:
            continue
        with PackReader(path) as pack:
            sizes = {key: pack.entry(str(key)).stored_bytes for key, _ in group.items}
        if group.base is not None:
            with PackReader(paths[group.base]) as base:
                sizes |= _smaller(source, group, path, base, sizes, sums)
        for key, words in group.items:
            sums.setdefault(key, _Sum()).add(words.nbytes, sizes[key], group.share)
    found = {}
    for key, one in sums.items():
        measured = one.measure(machine)
        if one.codec is not None:  # a keyframe is read for it, both ways
            decode = full[key].decode_bytes_s
            speeds = (
                1 / (1 / measured.encode_bytes_s + 1 / decode),
                1 / (1 / measured.decode_bytes_s + 1 / decode),
            )
            found[key] = CodecMeasure(measured.name, measured.ratio, *speeds)
        else:
            speed = full[key]
            speeds = speed.encode_bytes_s, speed.decode_bytes_s
            found[key] = CodecMeasure(speed.name, measured.ratio, *speeds)
    return found


def _smaller(
    source: Source,
    group: Group,
    path: Path,
    base: PackReader,
    full: dict[int, int],
    sums: dict[int, _Sum],
) -> dict[int, int]:
    """Return the sizes of the tensors that a saver would store as differences."""
    target = path.with_suffix(".delta")
    _write_state(target, source, group, Delta(Planes(level=CHECKPOINT_LEVEL)), base)
    with PackReader(target) as pack:
        coded = [key for key, _ in group.items if _is_coded(source, key)]
        found = {key: pack.entry(str(key)).stored_bytes for key in coded}
        found = {key: size for key, size in found.items() if size < full[key]}
        before = sum(full[key] for key in coded)
        if before - sum(full[key] - size for key, size in found.items()) > _WORTH_IT * before:
            return {}
        for key in found:
            entry = pack.entry(str(key))
            one = sums.setdefault(key, _Sum())
            one.codec = entry.codec
            one.blocks += _some_blocks(pack, entry, len(source.groups))
            one.bases += _some_blocks(base, entry, len(source.groups))
    return found


def _some_blocks(pack: PackReader, entry: Entry, groups: int) -> list[Array]:
    most = min(_TIMED_BLOCKS, max(1, _TIMED_BYTES // groups // entry.block_bytes))
    return [
        pack.read_block(entry.name, block)
        for some in spread(entry.blocks, 1, most)
        for block in range(some.start, some.stop)
    ]
