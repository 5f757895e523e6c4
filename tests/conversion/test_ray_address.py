"""Which Ray cluster is taken: the one that this machine noted, if it answers. Ray is not needed."""

import socket

import pytest

from penstock.conversion.ray_engine import _reachable
from penstock.errors import StorageError


@pytest.fixture
def noted(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    path = tmp_path / "ray" / "ray_current_cluster"
    path.parent.mkdir()
    return path


def test_the_cluster_of_this_machine_is_taken_while_it_answers(noted):
    assert _reachable("auto") is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        noted.write_text(address)
        assert _reachable("auto") == address
    assert _reachable("auto") is None
    with pytest.raises(StorageError, match="check the address"):
        _reachable(address)
