"""The marker of the tests that need the real lerobot."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "peers: against the real lerobot, run by `make test-peers`")
