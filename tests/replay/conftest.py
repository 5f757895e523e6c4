"""What the tests of the buffers share."""

import signal

import pytest


@pytest.fixture
def interruptible():
    """Let Ctrl-C raise, as in a program of a user; in the background of a shell it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
