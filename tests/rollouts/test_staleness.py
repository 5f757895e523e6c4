"""PipelinedDataCollector: how old a batch may be."""

import time

import pytest

from penstock.rollouts.collect import PipelinedDataCollector

from .toys import Fresh, number, wait_started

pytestmark = pytest.mark.usefixtures("no_thread_survives")


def test_strictly_on_policy():
    """With max_staleness=0 a batch is started only when the learner asks for it."""
    base = Fresh(count=6, delay_s=0.005)
    with PipelinedDataCollector(base, prefetch_count=3, max_staleness=0) as collector:
        for i, _ in enumerate(collector):
            time.sleep(0.02)
            assert len(base.started) == i + 1
            if i % 2:
                collector.advance_policy(3)
            assert collector.staleness == 0
        assert collector.stats()["staleness_max"] == 0
        assert collector.stats()["dropped"] == 0


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_default_staleness(prefetch, counts):
    """One update per batch, counted by the learner or not: never more than prefetch_count."""
    found = []
    base = Fresh(count=15)
    with PipelinedDataCollector(base, prefetch_count=prefetch) as collector:
        for _ in collector:
            found.append(collector.staleness)
            wait_started(base, len(found) + prefetch)
            if counts:
                collector.advance_policy()
        stats = collector.stats()
    assert max(found) == prefetch == stats["staleness_max"]
    assert stats["staleness_mean"] == sum(found) / 15
    assert found[0] == 0


@pytest.mark.parametrize("limit", [1, 2])
def test_limited_staleness(limit):
    base = Fresh(count=15)
    with PipelinedDataCollector(base, prefetch_count=5, max_staleness=limit) as collector:
        found = []
        for _ in collector:
            found.append(collector.staleness)
            wait_started(base, len(found) + limit)
        assert max(found) == limit
        assert collector.stats()["dropped"] == 0
        assert len(found) == 15


def test_a_batch_that_got_too_old_is_dropped():
    """The learner updates more often than it did: nothing over the limit is handed out."""
    base = Fresh(count=12)
    with PipelinedDataCollector(base, prefetch_count=2, max_staleness=1) as collector:
        seen = []
        for batch in collector:
            assert collector.staleness <= 1
            seen.append(int(batch["x"][0]))
            if len(seen) <= 4:  # afterwards nothing is started any more while the learner works
                wait_started(base, len(seen) + 1)
            collector.advance_policy(1 if len(seen) < 4 else 4)
        stats = collector.stats()
    assert stats["dropped"] >= 1
    assert stats["dropped"] + len(seen) == 12
    assert stats["dropped"] <= 2  # it learns how many updates a batch brings


def test_a_version_from_outside():
    version = [10]
    base = Fresh(count=4)
    with PipelinedDataCollector(
        base, prefetch_count=1, policy_version=lambda: version[0]
    ) as collector:
        found = []
        for _ in collector:
            wait_started(base, len(found) + 2)
            version[0] += 5
            found.append(collector.staleness)
        assert collector.stats()["version"] == 30
    assert found == [0, 5, 5, 5]


def test_policy_weights_are_passed_on():
    class WithPolicy(Fresh):
        def update_policy_weights_(self, *args, **kwargs):
            self.updates = [*getattr(self, "updates", []), (args, kwargs)]

    base = WithPolicy(count=2)
    with PipelinedDataCollector(base) as collector:
        for _ in collector:
            collector.update_policy_weights_("w", model_id="x")
        assert collector.stats()["version"] == 2
    assert base.updates == [(("w",), {"model_id": "x"})] * 2
    with PipelinedDataCollector([number(1)]) as collector:
        collector.update_policy_weights_()
        assert collector.stats()["version"] == 1
