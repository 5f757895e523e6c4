"""Bags in parallel: each in a process of its own, results in the order of the bags.

A worker never writes outside its staging folder, so it may be killed at any moment. It ends by
itself when whoever started it is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from penstock.conversion.one_bag import Advance, Converted, Job, convert_bag
from penstock.core.signals import signals_postponed
from penstock.errors import PenstockError

Outcome = Converted | PenstockError
_STOPPING = (signal.SIGINT, signal.SIGTERM)


def run_jobs(jobs: Iterable[Job], workers: int, advance: Advance) -> Iterator[tuple[Job, Outcome]]:
    """Convert bags; yield each with its outcome, in the order of the jobs.

    At most one finished bag per worker waits for its turn; until it is taken, no further bag is
    begun, so that the staging folder stays bounded.

    Args:
        jobs: One per bag.
        workers: Processes; 1 works in this one.
        advance: Told of bytes and frames as they are done.
    """
    if workers == 1:
        for job in jobs:
            yield job, _outcome(job, advance)
        return
    yield from _Pool(workers, advance).run(jobs)


def _outcome(job: Job, advance: Advance) -> Outcome:
    try:
        return convert_bag(job, advance)
    except PenstockError as error:
        return error


class _Pool:
    """Processes that convert one bag each."""

    def __init__(self, workers: int, advance: Advance) -> None:
        self._workers = workers
        self._advance = advance
        # spawn: a forked child would share locks and threads that it cannot use.
        self._context = multiprocessing.get_context("spawn")
        self._running: deque[tuple[Job, BaseProcess, Connection]] = deque()
        self._outcomes: dict[int, Outcome] = {}

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Outcome]]:
        waiting = iter(jobs)
        try:
            exhausted = False
            while True:
                while not exhausted and len(self._running) < self._workers:
                    job = next(waiting, None)
                    if job is None:
                        exhausted = True
                    else:
                        self._start(job)
                if not self._running:
                    return
                job, process, pipe = self._running[0]
                outcome = self._wait_for(pipe)
                process.join()
                pipe.close()
                self._running.popleft()
                yield job, outcome
        finally:
            self._stop()

    def _start(self, job: Job) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_work, args=(job, theirs, os.getpid()), name=f"penstock-{job.bag.name}"
        )
        # A signal waits until the worker is known here, or nobody would stop it: in a handler, as
        # another thread may take the signal and only the handler be ours to run. The worker
        # inherits the mask, so that one from the terminal does not meet it while it imports.
        resource_tracker.ensure_running()  # starting it takes every signal off the mask
        with signals_postponed():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
            try:
                process.start()
                self._running.append((job, process, ours))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def _wait_for(self, first: Connection) -> Outcome:
        """Wait for one bag; meanwhile take the progress of all."""
        while id(first) not in self._outcomes:
            open_pipes = [pipe for _, _, pipe in self._running if id(pipe) not in self._outcomes]
            for pipe in wait(open_pipes):
                assert isinstance(pipe, Connection)
                self._receive(pipe)
        return self._outcomes.pop(id(first))

    def _receive(self, pipe: Connection) -> None:
        job, process, _ = next(entry for entry in self._running if entry[2] is pipe)
        try:
            kind, content = pipe.recv()
        except EOFError:
            process.join()
            kind, content = (
                "error",
                PenstockError(
                    f"{job.bag}: its worker ended with code {process.exitcode}; it may have run "
                    "out of memory: use fewer workers"
                ),
            )
        if kind == "advance":
            self._advance(*content)
        else:
            self._outcomes[id(pipe)] = content

    def _stop(self) -> None:
        for _, process, _ in self._running:
            process.kill()
        for _, process, pipe in self._running:
            process.join()
            pipe.close()


def _work(job: Job, pipe: Connection, parent: int) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    send: Callable[[tuple[str, Any]], None] = pipe.send

    def advance(size_bytes: int, frames: int) -> None:
        if os.getppid() != parent:
            os._exit(1)
        send(("advance", (size_bytes, frames)))

    outcome = _outcome(job, advance)
    with contextlib.suppress(BrokenPipeError):
        send(("done", outcome))
