"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long it takes to make an example says something about the machine, not about the code.
settings.register_profile("penstock", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("penstock")


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is as wide as it is, whatever terminal the tests were started from."""
    monkeypatch.delenv("COLUMNS", raising=False)
