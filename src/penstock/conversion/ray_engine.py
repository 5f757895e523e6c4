"""Bags on a Ray cluster: one task per bag, which commits its unit into the shared folder.

Only the small record of what came of a bag travels back. A task is safe to repeat: where a worker
or node dies, Ray runs it again elsewhere, and a unit that is there already stays as it is. If the
driver dies, its tasks end, and `--resume` goes on.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock import __version__
from penstock.conversion.memory import give_back_at_once
from penstock.conversion.one_bag import Advance, Job, Outcome, outcome_of
from penstock.core.interrupt import check_stop
from penstock.core.threads import CORES
from penstock.dataset.plan import PLAN, UNITS
from penstock.dataset.unit import RECORD
from penstock.errors import MissingExtra, PenstockError, StorageError

RAY_AUTO: Final = "auto"
_ANSWER_S: Final = 5.0
_PER_CPU: Final = 2  # tasks in flight: one runs, one waits
_RETRIES: Final = 10  # of a bag whose worker or node died
_POLL_S: Final = 0.5
_LOOK_S: Final = 3.0  # between two looks at the nodes
_TELL_S: Final = 1.0  # between two messages of a worker
_SEEN_S: Final = 60.0  # until another machine's unit must be seen: caches of network file systems
_SKEWS: Final = 200


class RayCluster:
    """A connection to a Ray cluster, made by the `with` block unless the program has one.

    Args:
        address: Of its head, such as "10.0.0.5:6379"; "auto" for the one that the environment
            names or this machine runs, and without one a cluster on this machine alone.
    """

    def __init__(self, address: str = RAY_AUTO) -> None:
        try:
            import ray
        except ImportError:
            raise MissingExtra("ray", "ray") from None
        self._ray: Any = ray
        self._address = address
        self._own = False
        self._stack = ExitStack()
        self._looked_s = 0.0
        self.nodes, self.cpus = 0, 0

    def __enter__(self) -> RayCluster:
        if not self._ray.is_initialized():
            address = _reachable(self._address)
            self._own = True
            # Ray prints what it knows of lost nodes: not among the results.
            self._stack.enter_context(redirect_stdout(sys.stderr))
            logging.getLogger("ray").setLevel(logging.ERROR)  # one display is enough
            try:
                self._ray.init(
                    address or "local",
                    log_to_driver=False,
                    logging_level="ERROR",
                    configure_logging=False,
                    **({} if address else {"num_cpus": CORES, "include_dashboard": False}),
                )
            except (OSError, RuntimeError, ValueError) as error:
                self._stack.close()
                reason = " ".join(str(error).split())[:200]
                raise StorageError(
                    f"the Ray cluster at {address or 'this machine'} refuses ({reason}): "
                    "RAY_AUTH_MODE and the token must be those of the cluster"
                ) from error
        self.look()
        return self

    def __exit__(self, *_: object) -> None:
        if self._own:
            self._ray.shutdown()
        self._stack.close()

    def look(self) -> None:
        """Count the nodes and their processors, now and then."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = time.monotonic()
            alive = [node for node in self._ray.nodes() if node["Alive"]]
            usable = [node for node in alive if node["Resources"].get("CPU", 0) >= 1]
            self.nodes = len(usable)
            self.cpus = int(sum(node["Resources"]["CPU"] for node in usable))

    def run_jobs(
        self, jobs: Iterable[Job], memory_bytes: int, advance: Advance
    ) -> Generator[tuple[Job, Outcome], None, None]:
        """Convert bags; yield each with its outcome, as they are done. Close it to stop the tasks.

        Args:
            jobs: One per bag; the first ones are begun first.
            memory_bytes: Asked for each.
            advance: Told of bytes and frames as they are done.
        """
        ray = self._ray
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        totals = (
            ray.remote(_Totals)
            .options(num_cpus=0, max_restarts=-1, scheduling_strategy=here)
            .remote()
        )
        convert = ray.remote(_convert).options(
            num_cpus=1, memory=memory_bytes, max_retries=_RETRIES, scheduling_strategy="SPREAD"
        )
        waiting = iter(jobs)
        running: dict[Any, Job] = {}
        try:
            while True:
                self.look()
                while len(running) < max(self.cpus, 1) * _PER_CPU:
                    job = next(waiting, None)
                    if job is None:
                        break
                    running[convert.remote(job, __version__, totals)] = job
                if not running:
                    return
                done, _ = ray.wait(list(running), num_returns=1, timeout=_POLL_S)
                for reference in done:
                    job = running.pop(reference)
                    yield job, self._outcome(job, reference)
                with suppress(ray.exceptions.RayError):
                    advance(*ray.get(totals.take.remote(), timeout=_POLL_S))
                check_stop()
        finally:
            for reference in running:
                with suppress(ray.exceptions.RayError):
                    ray.cancel(reference, force=True)
            ray.kill(totals)

    def _outcome(self, job: Job, reference: Any) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())[:200]
            return PenstockError(
                f"{job.bag}: its worker was lost {_RETRIES + 1} times ({type(error).__name__}: "
                f"{reason}): it may need more --memory; go on with --resume"
            )
        deadline_s = time.monotonic() + _SEEN_S
        while not isinstance(outcome, PenstockError):
            if (job.units / job.record.key / RECORD).is_file():
                break
            if time.monotonic() > deadline_s:
                return StorageError(
                    f"{job.bag} was converted, and its unit is not in {job.units}: give a folder "
                    "for the dataset that all nodes share"
                )
            time.sleep(_POLL_S)
        return outcome


def _reachable(given: str) -> str | None:
    """Return the address of a cluster that answers: the given one, or one that Ray knows of.

    Ray itself would try for ever, also a cluster of this machine that was killed long ago.
    """
    address = os.environ.get("RAY_ADDRESS") or None if given == RAY_AUTO else given
    asked = address is not None
    if address is None:
        noted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray")
        with suppress(OSError):  # where `ray start` notes it
            address = (noted / "ray_current_cluster").read_text().strip() or None
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if address is not None:
            socket.create_connection((host, int(port)), _ANSWER_S).close()
    except (OSError, ValueError) as error:
        if asked:
            raise StorageError(
                f"no Ray cluster answers at {address} ({error}): check the address"
            ) from error
        return None
    return address


class _Totals:
    """Bytes and frames of all workers, since somebody asked last; an actor."""

    def __init__(self) -> None:
        self._size_bytes, self._frames = 0, 0

    def add(self, size_bytes: int, frames: int) -> None:
        self._size_bytes += size_bytes
        self._frames += frames

    def take(self) -> tuple[int, int]:
        found = self._size_bytes, self._frames
        self._size_bytes, self._frames = 0, 0
        return found


def _convert(job: Job, version: str, totals: Any) -> Outcome:
    """Make a unit of one bag; runs on any node."""
    give_back_at_once()
    node = socket.gethostname()
    if version != __version__:
        return PenstockError(
            f"{job.bag}: the node {node} has penstock {__version__}, and the driver {version}: "
            "install the same"
        )
    root = str(job.units).removesuffix(UNITS)
    if not (type(job.units)(root) / PLAN).is_file():
        return StorageError(
            f"the node {node} does not see {root}: give a folder for the dataset that all nodes "
            "share"
        )
    told_s, size_bytes, frames = time.monotonic(), 0, 0

    def advance(more_bytes: int, more_frames: int) -> None:
        nonlocal told_s, size_bytes, frames
        size_bytes, frames = size_bytes + more_bytes, frames + more_frames
        if time.monotonic() - told_s > _TELL_S:
            totals.add.remote(size_bytes, frames)
            told_s, size_bytes, frames = time.monotonic(), 0, 0

    outcome = outcome_of(job, advance)
    totals.add.remote(size_bytes, frames)
    if isinstance(outcome, PenstockError):
        return outcome
    thin = {
        name: values[:: -(-len(values) // _SKEWS) or 1] for name, values in outcome.skew_ms.items()
    }
    return replace(outcome, skew_ms=thin)
