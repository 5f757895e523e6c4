"""Encode a captured state and publish it: full, or as a difference to a keyframe."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from penstock import __version__
from penstock.checkpoints import folder
from penstock.checkpoints.capture import Capture, Part
from penstock.core.codecs import Codec, Delta, Planes
from penstock.core.files import sweep
from penstock.core.handle import SaveHandle
from penstock.core.pack import Item, PackReader, PackWriter
from penstock.core.tree import Json
from penstock.errors import DataError

_PLAIN_BYTES = 4096  # smaller tensors are stored as they are: nothing to gain
_PROBE_BYTES = 128 * 1024
_WORTH_IT = 0.9  # a delta must be at least 10 % smaller than the full checkpoint
_NICE = 5  # training comes first


@dataclass
class Job:
    """One save on its way to the disk."""

    capture: Capture
    handle: SaveHandle
    compress: bool
    metadata: Json
    metric: float | None
    started: bool = False
    asked_at: float = field(default_factory=time.time)

    @property
    def path(self) -> Path:
        """Where the checkpoint will be."""
        return self.handle.path


@dataclass(frozen=True)
class _Keyframe:
    path: Path
    digest: str


class Publisher:
    """Writes jobs, one after another, and keeps the folder in order. Used by one thread.

    Args:
        level: Of the byte-plane codec.
        delta_every: A keyframe every so many saves, differences between; 0 for keyframes only.
        keep_last: Newest checkpoints to keep; None keeps all.
        keep_best: How many of the best by metric to keep besides, and which way is better.
    """

    def __init__(
        self,
        level: int,
        delta_every: int,
        keep_last: int | None,
        keep_best: tuple[int, Literal["max", "min"]] | None,
    ) -> None:
        self._level = level
        self._delta_every = delta_every
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._keyframe: _Keyframe | None = None
        self._deltas = 0
        self._sequences: dict[Path, int] = {}

    def write(self, job: Job) -> PackWriter:
        """Encode a state into a durable temporary file; it has no name yet."""
        self._enter(job.path.parent)
        base = self._open_base(job)
        if base is not None:
            with base:
                try:
                    codecs = self._delta_codecs(job, base)
                    if codecs is not None:
                        return self._encode(job, codecs, base)
                except DataError:
                    self._keyframe = None  # it does not verify: never build on it again
        return self._encode(job, {}, None)

    def _encode(self, job: Job, deltas: dict[str, Codec], base: PackReader | None) -> PackWriter:
        writer = PackWriter(job.path, kind=folder.KIND, meta=self._meta(job), base=base, nice=_NICE)
        try:
            writer.add_all(
                [
                    Item(part.name, values, part.dtype, self._codec(job, part, deltas))
                    for part, values in _parts(job.capture)
                ]
            )
            writer.sync()
        except BaseException:
            writer.abandon()
            raise
        return writer

    def commit(self, job: Job, writer: PackWriter) -> list[Path]:
        """Give the checkpoint its name, move `latest`, and only then remove what may go."""
        folder.keep_base(job.path)
        writer.publish()
        folder.move_latest(job.path)
        if writer.index.base is None:
            self._keyframe = _Keyframe(job.path, writer.index.digest)
            self._deltas = 0
        else:
            self._deltas += 1
        return folder.prune(job.path.parent, self._keep_last, self._keep_best)

    def _enter(self, where: Path) -> None:
        """On the first save into a folder: clean up after dead writers, go on with the count."""
        if where not in self._sequences:
            sweep(where)
            self._sequences[where] = max((s.sequence for s in folder.list_saved(where)), default=0)
        self._sequences[where] += 1

    def _meta(self, job: Job) -> dict[str, Any]:
        return {
            "state": job.capture.description,
            "metadata": job.metadata,
            "metric": job.metric,
            "sequence": self._sequences[job.path.parent],
            "managed": self._keep_last is not None or self._keep_best is not None,
            "saved_at": job.asked_at,
            "written_by": f"penstock {__version__}",
        }

    def _open_base(self, job: Job) -> PackReader | None:
        key = self._keyframe
        if key is None or not job.compress or self._deltas + 1 >= self._delta_every:
            return None
        if key.path.parent != job.path.parent or key.path == job.path:
            return None
        try:
            base = PackReader(key.path)
        except (OSError, DataError):
            return None  # gone or damaged: this checkpoint stands on its own
        if base.index.digest == key.digest:
            return base
        base.close()
        return None

    def _delta_codecs(self, job: Job, base: PackReader) -> dict[str, Codec] | None:
        """Choose the tensors to store as differences; None when that is not worth it.

        Both ways are tried on a sample of every large tensor.
        """
        chosen: dict[str, Codec] = {}
        full_bytes = delta_bytes = 0.0
        delta = Delta(Planes(level=self._level))
        for part, words in _parts(job.capture):
            entry = base.index.entries.get(part.name)
            if part.nbytes < _PLAIN_BYTES or entry is None:
                continue
            if (entry.dtype, entry.shape) != (part.dtype, part.shape):
                continue
            full, difference = self._probe(words.reshape(-1), base, part, delta)
            full_bytes += full * part.nbytes
            delta_bytes += min(full, difference) * part.nbytes
            if difference < full:
                chosen[part.name] = delta
        return chosen if chosen and delta_bytes <= _WORTH_IT * full_bytes else None

    def _probe(
        self, words: NDArray[Any], base: PackReader, part: Part, delta: Delta
    ) -> tuple[float, float]:
        """Return the shares of the original size that full and difference take on a sample."""
        entry = base.entry(part.name)
        number = entry.blocks // 2
        start = entry.block_range(number)[0] // words.itemsize
        reference = base.read_block(part.name, number)[: _PROBE_BYTES // words.itemsize]
        sample = words[start : start + reference.size]
        full = sum(map(len, delta.inner.encode(sample)))
        difference = sum(map(len, delta.encode(sample, reference)))
        return full / sample.nbytes, difference / sample.nbytes

    def _codec(self, job: Job, part: Part, deltas: dict[str, Codec]) -> Codec | None:
        if not job.compress or part.nbytes < _PLAIN_BYTES:
            return None
        return deltas.get(part.name) or Planes(level=self._level)


def _parts(capture: Capture) -> list[tuple[Part, NDArray[Any]]]:
    return [(part, capture.values(part)) for part in capture.parts]
