"""PipelinedDataCollector: collect the next batches while the learner works on this one."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from penstock.core.writes import close_after
from penstock.errors import SaverClosed, UsageError
from penstock.rollouts.ahead import Ahead, Ready

_LOG = logging.getLogger("penstock")


class PipelinedDataCollector:
    """Iterate over a collector in a background thread, a few batches ahead of the learner.

    A batch that the collector will overwrite is copied before the learner gets it. Collectors do
    not say whether they reuse their memory, so the first `prefetch_count + 2` batches are always
    copied, and their originals kept to compare with; if no two of them share memory, later ones are
    handed over as they are. (A TorchRL collector made with `return_same_td=True` is believed at
    once.) Only memory that is used again after more batches than that goes unnoticed: then a batch
    is safe as long as the learner works on it, not longer.

    Staleness is counted in policy versions: how many updates came between the start of a batch's
    collection and its hand-out. Call `advance_policy` (or `update_policy_weights_`) after each
    update; if the learner calls neither while it has a batch, asking for the next batch counts as
    one update. With one update per batch staleness is `prefetch_count` at most. The policy is not
    locked: a collector that shares its weights with the learner sees updates in mid-batch.

    Leaving a loop early keeps what was collected: the next loop goes on from there. After the
    collector has ended, or failed, the next loop starts it anew. Several loops at a time share the
    batches.

    Args:
        base_collector: Any iterable of TensorDicts (tensors, dicts, lists and tuples of them, too);
            other objects are passed on as they are. It is only ever used in one thread at a time.
        device: Where batches go, in the background; None leaves them where they are.
        prefetch_count: Batches collected or being collected ahead of the learner.
        max_bytes: Bytes of the batches ahead; a larger batch is collected alone. None for no limit.
        max_staleness: Hand out nothing older than this many versions. 0 is strictly on-policy:
            collection starts only when the learner asks. A batch that got too old, because the
            learner updated more often than before, is dropped and counted.
        policy_version: Returns the version, instead of the count kept here.

    Attributes:
        base_collector: The collector.
        staleness: Of the batch handed out last.

    Example:
        with PipelinedDataCollector(Collector(env, policy, frames_per_batch=4096)) as collector:
            for data in collector:
                train(data)
                collector.advance_policy()
    """

    def __init__(
        self,
        base_collector: Iterable[Any],
        device: str | torch.device | None = None,
        prefetch_count: int = 2,
        *,
        max_bytes: int | None = None,
        max_staleness: int | None = None,
        policy_version: Callable[[], int] | None = None,
    ) -> None:
        _check("prefetch_count", prefetch_count, 1)
        if max_bytes is not None:
            _check("max_bytes", max_bytes, 1)
        if max_staleness is not None:
            _check("max_staleness", max_staleness, 0)
        if not isinstance(base_collector, Iterable):
            raise UsageError(
                f"base_collector is a {type(base_collector).__name__}, which cannot be iterated"
            )
        self.base_collector = base_collector
        self.staleness = 0
        self._ahead = Ahead(
            base_collector,
            None if device is None else torch.device(device),
            prefetch_count,
            max_bytes,
            max_staleness,
            policy_version,
        )
        # The thread does not hold this object: one that is forgotten stops its thread.
        weakref.finalize(self, self._ahead.stop).atexit = False

    def __iter__(self) -> Iterator[Any]:
        if self._ahead.stopped:
            raise SaverClosed("this collector was shut down; make a new one")
        self._ahead.start()
        while (ready := self._ahead.take()) is not None:
            self.staleness = ready.staleness
            yield _unpack(ready)

    def advance_policy(self, versions: int = 1) -> None:
        """Say that the policy was updated."""
        _check("versions", versions, 0)
        self._ahead.advance(versions)

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Update the collector's copy of the policy, if it has one, and count the version."""
        update = getattr(self.base_collector, "update_policy_weights_", None)
        if update is not None:
            update(*args, **kwargs)
        self._ahead.advance(1)

    def stats(self) -> dict[str, Any]:
        """Return counts and times.

        `batches` handed out, `staleness_mean`, `staleness_max`, `dropped` (too old), `cloned`,
        `reuses_memory` (whether the collector does), `queued`, `queued_bytes`, `peak_bytes`,
        `version`, `collect_s` (time in the collector), `wait_s` (time the learner waited).
        """
        return self._ahead.stats()

    def shutdown(self, timeout: float | None = 30.0) -> bool:
        """Stop collecting and shut the collector down, in the thread that used it.

        Args:
            timeout: How long to wait for the collector to finish its step; None for ever.

        Returns:
            False if it was still in a step: then the thread ends, and shuts the collector down, as
            soon as that step returns, and the interpreter does not exit before.

        Raises:
            Exception: What the collector's own `shutdown` raised.
        """
        self._ahead.stop(shut_base=True)
        if not self._ahead.join(timeout):
            _LOG.warning(
                "the collector is still in a step after %s s; its thread ends with that step",
                timeout,
            )
            return False
        self._ahead.shut_down_base()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close_after(self.shutdown, error)

    def __reduce__(self) -> Any:
        raise UsageError("a collector belongs to its process; make a new one in the other process")


def _unpack(ready: Ready) -> Any:
    """Give the batch away, so that no name here keeps it alive while the learner works."""
    batch, ready.batch = ready.batch, None
    return batch


def _check(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise UsageError(f"{name}={value!r}: give a whole number, at least {least}")
