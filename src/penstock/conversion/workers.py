"""Bags in parallel: a few processes, each converting one bag after the other.

A worker writes its own temporary folder only, and commits by one rename, so it may be killed at any
moment. It ends by itself when whoever started it is gone. What comes of a bag does not depend on
the number of workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from penstock.conversion.memory import give_back_at_once
from penstock.conversion.one_bag import Advance, Job, Outcome, outcome_of
from penstock.conversion.recordings import OpenRecording
from penstock.core.interrupt import check_stop
from penstock.errors import PenstockError

_STOPPING = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.1


def run_jobs(
    jobs: Iterable[Job], workers: int, advance: Advance, opened: OpenRecording
) -> Generator[tuple[Job, Outcome], None, None]:
    """Convert bags; yield each with its outcome, as they are done. Close it to stop the workers.

    Args:
        jobs: One per bag.
        workers: Processes; 1 works in this one.
        advance: Told of bytes and frames as they are done.
        opened: The recording that this process has looked at.
    """
    if workers == 1:
        for job in jobs:
            yield job, outcome_of(job, advance, opened)
        return
    opened.close()
    yield from _Pool(workers, advance).run(jobs)


class _Worker:
    """One process, and the bag that it is at."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process, self.pipe = process, pipe
        self.job: Job | None = None


class _Pool:
    """Processes that convert bags."""

    def __init__(self, workers: int, advance: Advance) -> None:
        self._count = workers
        self._advance = advance
        # spawn: a forked child would share locks and threads that it cannot use.
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Outcome]]:
        waiting = iter(jobs)
        try:
            while True:
                for worker in self._free():
                    worker.job = next(waiting, None)
                    if worker.job is not None:
                        with contextlib.suppress(OSError):  # it is dead: `_receive` notices
                            worker.pipe.send(worker.job)
                busy = [worker for worker in self._workers if worker.job is not None]
                if not busy:
                    return
                for pipe in wait([worker.pipe for worker in busy], _POLL_S):
                    worker = next(each for each in busy if each.pipe is pipe)
                    outcome = self._receive(worker)
                    if outcome is not None:
                        job, worker.job = worker.job, None
                        assert job is not None
                        yield job, outcome
                check_stop()
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.join()
                worker.pipe.close()

    def _free(self) -> Iterator[_Worker]:
        """Yield the workers without a job; those that died are replaced."""
        self._workers = [each for each in self._workers if each.job or each.process.is_alive()]
        yield from [worker for worker in self._workers if worker.job is None]
        while len(self._workers) < self._count:
            self._workers.append(self._start())
            yield self._workers[-1]
            if self._workers[-1].job is None:
                return  # there was nothing left to do

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(theirs, os.getpid()), name="penstock-convert"
        )
        resource_tracker.ensure_running()  # starting it takes every signal off the mask
        # The worker inherits the mask, so that a signal does not meet it while it imports.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return _Worker(process, ours)

    def _receive(self, worker: _Worker) -> Outcome | None:
        """Take one message; return the outcome if the bag is done."""
        try:
            kind, content = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            assert worker.job is not None
            return PenstockError(
                f"{worker.job.bag}: its worker ended with code {worker.process.exitcode}; it may "
                "have run out of memory: use fewer workers, and go on with --resume"
            )
        if kind == "advance":
            self._advance(*content)
            return None
        outcome: Outcome = content
        return outcome


def _work(pipe: Connection, parent: int) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    give_back_at_once()
    send: Callable[[tuple[str, Any]], None] = pipe.send

    def advance(size_bytes: int, frames: int) -> None:
        if os.getppid() != parent:
            os._exit(1)
        send(("advance", (size_bytes, frames)))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            send(("done", outcome_of(pipe.recv(), advance)))
