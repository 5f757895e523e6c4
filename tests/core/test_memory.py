"""Sizes as text, and resident memory."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.memory import format_bytes, parse_bytes, rss_bytes
from penstock.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        (1234, 1234),
        ("17B", 17),
        ("2kB", 2_000),
        ("2KB", 2_000),
        ("512MB", 512_000_000),
        ("0.1 GB", 100_000_000),
        ("1KiB", 1024),
        ("1.5 MiB", 1_572_864),
        (" 2gib ", 2**31),
    ],
)
def test_parse_bytes(text: str | int, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("bad", ["", "MB", "-1MB", "12 parsecs", "1e9", "1.5.2GB", -3, True, 1.5])
def test_parse_bytes_names_the_bad_value(bad: object) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(bad)  # type: ignore[arg-type]
    message = str(caught.value)
    assert repr(bad) in message
    assert "512MB" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (1_500_000_000, "1.5 GB"),
        (-2_000_000, "-2.0 MB"),
        (3 * 10**12, "3.0 TB"),
    ],
)
def test_format_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 10**12 - 10**8))
def test_format_is_parsed_back_within_its_rounding(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.051)


def test_rss_counts_children_and_ignores_vanished_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = rss_bytes(tree=False)
    assert alone == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    code = "x = bytearray(60_000_000); print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert rss_bytes(tree=True) > rss_bytes(tree=False) + 60_000_000
        gone = psutil.Process(child.pid)
        child.communicate(b"\n")
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [gone])
    assert rss_bytes(tree=True) == pytest.approx(alone, rel=0.2)
