"""Small recordings of every kind, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.samples import SampleFacts, write_sample

# name of the file or folder, kind, compression
CONTAINERS = [
    ("plain.bag", "bag", "none"),
    ("lz4.bag", "bag", "lz4"),
    ("bz2.bag", "bag", "bz2"),
    ("folder_db3", "db3", "none"),
    ("messages_db3", "db3", "zstd"),
    ("file_db3", "db3", "zstd_file"),
    ("bare.db3", "db3", "none"),
    ("plain.mcap", "mcap", "none"),
    ("lz4.mcap", "mcap", "lz4"),
    ("zstd.mcap", "mcap", "zstd"),
    ("folder_mcap", "mcap", "zstd"),
]
SMALL = {"seconds": 1.2, "cameras": 2, "width": 256, "height": 192, "state_hz": 100, "depth": True}

Make = Callable[..., SampleFacts]


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SampleFacts]:
    """Give the sample of a container by its name; each is written once."""
    folder = tmp_path_factory.mktemp("samples")
    made: dict[str, SampleFacts] = {}
    kinds = {name: (kind, compression) for name, kind, compression in CONTAINERS}

    def get(name: str) -> SampleFacts:
        if name not in made:
            kind, compression = kinds[name]
            made[name] = write_sample(folder / name, kind=kind, compression=compression, **SMALL)
        return made[name]

    return get


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write a small sample into the test's own folder."""

    def write(name: str, **settings: object) -> SampleFacts:
        return write_sample(tmp_path / name, **{**SMALL, **settings})

    return write
