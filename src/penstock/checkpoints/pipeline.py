"""The two background threads of a saver: one copies, one encodes and publishes."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable

from penstock.checkpoints.capture import Capture
from penstock.checkpoints.publish import Job, Publisher
from penstock.checkpoints.queue import SaveQueue
from penstock.core.background import Background
from penstock.core.files import storage_error
from penstock.core.handle import SaveHandle, poll
from penstock.core.memory import format_bytes
from penstock.core.pack import PackWriter
from penstock.errors import PenstockError, StorageError

_LOG = logging.getLogger("penstock")
_COPIER_LINGER_S = (
    60.0  # longer than most saves are apart: waking a thread is cheaper than starting
)


class Pipeline:
    """Carries jobs from the training thread to the disk.

    Two threads, so that a state is copied at once even while the one before is being written.

    Args:
        queue: The pending saves.
        publisher: Encodes and publishes.
        note_torn: Told of each capture that is discarded; returns what to say of it, if anything.
        nudge: Called between jobs (see `SignalGuard.nudge`).
        verbose: Say each save on stderr.

    Attributes:
        last_path: The newest durable checkpoint.
    """

    def __init__(
        self,
        queue: SaveQueue,
        publisher: Publisher,
        note_torn: Callable[[Capture], str | None],
        nudge: Callable[[], None],
        *,
        verbose: bool,
    ) -> None:
        self._queue = queue
        self._publisher = publisher
        self._note_torn = note_torn
        self._nudge = nudge
        self._verbose = verbose
        self._captures: deque[Capture] = deque()
        self._failures: deque[SaveHandle] = deque()
        self._copier = Background("penstock-copier", self._copy_one, linger_s=_COPIER_LINGER_S)
        self._writer = Background("penstock-writer", self._write_one)
        self.last_path: str | None = None

    def submit(self, job: Job) -> None:
        """Take over a job; returns at once."""
        self._queue.put(job)
        self._captures.append(job.capture)
        self._copier.poke()  # which pokes the writer: one thread to wake here, not two

    def take_failure(self) -> PenstockError | None:
        """Return a failure that nobody has been told of; the caller raises it."""
        while self._failures:
            handle = self._failures.popleft()
            if not handle.reported:
                handle.reported = True
                return handle.error
        return None

    def close(self) -> None:
        """End the threads when their work is done."""
        self._copier.close()
        self._writer.close()

    def _copy_one(self) -> bool:
        try:
            capture = self._captures.popleft()
        except IndexError:
            return False
        self._writer.poke()
        capture.help()
        return True

    def _write_one(self) -> bool:
        self._nudge()
        job = self._queue.first()
        if job is None:
            return False
        try:
            self._write(job)
        except PenstockError as error:
            self._fail(job, error)
        except OSError as error:
            self._fail(job, storage_error("write", job.path, error))
        except Exception as error:  # a defect of ours must reach the caller, too
            _LOG.exception("saving %s failed", job.path)
            failure = StorageError(f"cannot save {job.path}: {error!r}")
            failure.__cause__ = error
            self._fail(job, failure)
        finally:
            self._queue.remove(job)
        return True

    def _write(self, job: Job) -> None:
        capture = job.capture
        while not capture.copied:
            capture.help()
            time.sleep(0.0005)
        if capture.failure is not None:
            raise capture.failure
        begin = time.perf_counter()
        writer = self._publisher.write(job)
        try:
            written_s = time.perf_counter() - begin
            poll(capture.settle, None)
            if capture.verdict == "torn":
                self._discard(job)
                return
            begin = time.perf_counter()
            self._publisher.commit(job, writer)
            written_s += time.perf_counter() - begin
        finally:
            writer.abandon()
        self._finish(job, writer, written_s)

    def _finish(self, job: Job, writer: PackWriter, written_s: float) -> None:
        raw = job.capture.nbytes
        stored = writer.index.header_bytes + writer.index.data_bytes
        delta = writer.index.base is not None
        job.handle.stats = {
            "raw_bytes": raw,
            "stored_bytes": stored,
            "delta": delta,
            "write_s": written_s,
        }
        self.last_path = str(job.path)
        self._queue.count(
            saved=1,
            deltas=int(delta),
            raw_bytes=raw,
            stored_bytes=stored,
            write_us=int(written_s * 1e6),
        )
        job.handle.finish("saved")
        if self._verbose:
            sys.stderr.write(
                f"[penstock] saved {job.path.name}: {format_bytes(stored)} of {format_bytes(raw)}"
                f"{' (delta)' if delta else ''} in {written_s:.2f} s\n"
            )

    def _discard(self, job: Job) -> None:
        problem = self._note_torn(job.capture)
        if problem:
            _LOG.warning(problem)
        self._queue.count(discarded=1)
        job.handle.finish("discarded")

    def _fail(self, job: Job, error: PenstockError) -> None:
        _LOG.error("%s", error)
        self._queue.count(failed=1)
        job.handle.finish("failed", error)
        self._failures.append(job.handle)  # last: whoever finds it must find the error in it
