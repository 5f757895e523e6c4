"""What advice in tests does not do: measure the disk, and every codec three times."""

from __future__ import annotations

import pytest

from penstock.advisor import Machine, measure, sources


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Measure each codec once, and not the disk: ratios do not depend on them."""
    monkeypatch.setattr(measure, "_ENOUGH_S", 0.0)
    found = Machine(2, 16 * 10**9, 5e9, 200e6)
    monkeypatch.setattr(sources, "measure_machine", lambda where, seconds: found)
