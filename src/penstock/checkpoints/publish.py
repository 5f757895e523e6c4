"""Encode a snapshot and publish it: full, or as a difference to a keyframe."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from penstock import __version__
from penstock.checkpoints import folder
from penstock.checkpoints.folder import RunFolder
from penstock.checkpoints.lazy import LazyCapture
from penstock.checkpoints.snapshot import Snapshot, StagedTensor
from penstock.core.codecs import Codec, Delta, Planes
from penstock.core.pack import Item, PackReader, PackWriter
from penstock.core.threads import poll
from penstock.core.tree import Json
from penstock.errors import DataError, SnapshotDiscarded

_PLAIN_BYTES = 4096  # smaller tensors are stored as they are: nothing to gain
_PROBE_BYTES = 128 * 1024
NICE = 5  # training comes first, ...
ENCODERS_NICE = 19  # ... most of all before the encoding, which is most of the work
_WORTH_IT = 0.9  # a delta must be at least 10 % smaller than the full checkpoint


@dataclass
class Job:
    """One save on its way to the disk."""

    snapshot: Snapshot
    capture: LazyCapture | None  # what is still being copied, if the saver is lazy
    target: RunFolder
    name: str
    compress: bool
    metadata: Json
    metric: float | None
    asked_at: float = field(default_factory=time.time)

    @property
    def path(self) -> Path:
        """Where the file will be."""
        return self.target.path / self.name


class Publisher:
    """Writes jobs, one after another, in one thread: a keyframe, then differences to it.

    `patient` tells whether nobody waits for a file: then the training has the cores first.
    """

    def __init__(self, level: int, delta_every: int, patient: Callable[[], bool]) -> None:
        self._level = level
        self._patient = patient
        self._delta_every = delta_every
        self._keyframe: tuple[Path, str] | None = None  # and its digest
        self._deltas = 0

    def publish(self, job: Job) -> dict[str, Any]:
        """Encode, make durable, give the name, move `latest`; only then remove what may go.

        Raises:
            SnapshotDiscarded: The lazy tensors were changed while they were copied.
        """
        if job.capture is not None:
            job.capture.finish()
        begin = time.perf_counter()
        job.snapshot.devices.fetch()
        writer = self._write(job)
        try:
            written_s = time.perf_counter() - begin
            if job.capture is not None:
                poll(job.capture.settle, None)
                if job.capture.torn:
                    raise SnapshotDiscarded(f"{job.path} was discarded: {job.capture.problem()}")
            begin = time.perf_counter()
            job.target.keep_base(job.path)
            writer.publish()
            folder.move_latest(job.path)
        finally:
            writer.abandon()
        delta = writer.index.base is not None
        self._deltas = self._deltas + 1 if delta else 0
        if not delta:
            self._keyframe = (job.path, writer.index.digest)
        complaint = None
        try:
            job.target.prune(job.path)
        except OSError as error:  # the checkpoint is safe; what should have gone is still there
            complaint = f"cannot remove old checkpoints of {job.path.parent}: {error}"
        return {
            "complaint": complaint,
            "raw_bytes": sum(staged.nbytes for staged in job.snapshot.description[1]),
            "stored_bytes": writer.index.header_bytes + writer.index.data_bytes,
            "delta": delta,
            "write_s": written_s + time.perf_counter() - begin,
        }

    def _write(self, job: Job) -> PackWriter:
        """Encode a state into a durable temporary file; it has no name yet."""
        meta = {
            "state": job.snapshot.description[0],
            "metadata": job.metadata,
            "metric": job.metric,
            "saved_at": job.asked_at,
            "written_by": f"penstock {__version__}",
            **job.target.next_meta(job.path.name),
        }
        base = self._open_base(job)
        if base is not None:
            try:
                if deltas := self._deltas_of(job, base):
                    return self._encode(job, meta, deltas, base)
            except DataError:
                self._keyframe = None  # it does not verify: never build on it again
            finally:
                with suppress(OSError):  # nothing depends on it, and a writer may be on its way
                    base.close()
        return self._encode(job, meta, {}, None)

    def _encode(
        self, job: Job, meta: dict[str, Any], deltas: dict[str, Codec], base: PackReader | None
    ) -> PackWriter:
        items = []
        for staged, values in _tensors(job.snapshot):
            small = staged.nbytes < _PLAIN_BYTES or not job.compress
            codec = None if small else deltas.get(staged.name) or Planes(level=self._level)
            items.append(Item(staged.name, values, staged.dtype, codec))
        nice, patient = ENCODERS_NICE, self._patient
        writer = PackWriter(
            job.path, kind=folder.KIND, meta=meta, base=base, nice=nice, patient=patient
        )
        writer.write(items)
        return writer

    def _open_base(self, job: Job) -> PackReader | None:
        if self._keyframe is None or not job.compress or self._deltas + 1 >= self._delta_every:
            return None
        path, digest = self._keyframe
        if path.parent != job.path.parent or path == job.path:
            return None
        with suppress(OSError, DataError):  # gone or damaged: this checkpoint stands on its own
            base = PackReader(path)
            if base.index.digest == digest:
                return base
            base.close()
        return None

    def _deltas_of(self, job: Job, base: PackReader) -> dict[str, Codec]:
        """Choose the tensors to store as differences; none when that is not worth it.

        Both ways are tried on a sample of every large tensor.
        """
        chosen: dict[str, Codec] = {}
        full_bytes = delta_bytes = 0.0
        delta = Delta(Planes(level=self._level))
        for staged, words in _tensors(job.snapshot):
            entry = base.index.entries.get(staged.name)
            alike = entry and (entry.dtype, entry.shape) == (staged.dtype, staged.shape)
            if staged.nbytes < _PLAIN_BYTES or not alike:
                continue
            full, difference = _probe(words.reshape(-1), base, staged.name, delta)
            full_bytes += full * staged.nbytes
            delta_bytes += min(full, difference) * staged.nbytes
            if difference < full:
                chosen[staged.name] = delta
        return chosen if delta_bytes <= _WORTH_IT * full_bytes else {}


def _probe(words: NDArray[Any], base: PackReader, name: str, delta: Delta) -> tuple[float, float]:
    """Return the shares of the original size that full and difference take on a sample."""
    entry = base.entry(name)
    block = entry.blocks // 2
    start = block * entry.block_bytes // words.itemsize
    reference = base.read_block(name, block)[: _PROBE_BYTES // words.itemsize]
    sample = words[start : start + reference.size]
    full = sum(map(len, delta.inner.encode(sample)))
    difference = sum(map(len, delta.encode(sample, reference)))
    return full / sample.nbytes, difference / sample.nbytes


def _tensors(snapshot: Snapshot) -> list[tuple[StagedTensor, NDArray[Any]]]:
    return [(staged, snapshot.values(staged)) for staged in snapshot.description[1]]
