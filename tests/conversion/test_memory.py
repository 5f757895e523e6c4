"""Memory stays below what was asked for, however large the recording is."""

import contextlib
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from penstock.dataset.reader import Dataset
from penstock.samples import write_sample

COMMAND = [sys.executable, "-m", "penstock", "convert"]
ENVIRONMENT = {**os.environ, "PENSTOCK_PROGRESS": "quiet"}
CGROUPS = Path("/sys/fs/cgroup/memory")
SAMPLE = """
import sys
from penstock.samples import write_sample
write_sample(sys.argv[1], size_bytes=int(sys.argv[2]), seconds=1e9, numbered=False)
"""


def make_bag(path: Path, size_bytes: int) -> None:
    """Write a large recording in a process of its own: its memory is not ours."""
    subprocess.run([sys.executable, "-c", SAMPLE, str(path), str(size_bytes)], check=True)


def converted(bag: Path, out: Path, *words: str, cgroup: Path | None = None, timeout_s=100) -> dict:
    """Convert in a process of its own; return its report."""

    def enter():
        if cgroup is not None:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))

    result = subprocess.run(
        [*COMMAND, str(bag), str(out), "--json", *words],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=enter,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, (result.returncode, result.stderr, result.stdout[-2000:])
    return json.loads(result.stdout)


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int):
    """A group whose processes are killed when they use more, page cache that must stay included."""
    if os.geteuid() != 0 or not (CGROUPS / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and the memory controller of cgroup v1")
    group = CGROUPS / f"penstock-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        with contextlib.suppress(OSError):  # without it swapping is possible, and just slower
            (group / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def peak_of(cgroup: Path) -> dict[str, int]:
    """What the group held at most (with page cache), and how often it was at its limit."""
    return {
        "max_usage_mb": int((cgroup / "memory.max_usage_in_bytes").read_text()) // 10**6,
        "failcnt": int((cgroup / "memory.failcnt").read_text()),
    }


@pytest.fixture(scope="module")
def bag(tmp_path_factory):
    """A recording of 150 MB."""
    path = tmp_path_factory.mktemp("large") / "large.bag"
    make_bag(path, 150 * 10**6)
    return path


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("memory", "most_mb"), [("300MB", 330), ("512MB", 400)])
def test_the_limit_is_kept(bag, tmp_path, memory, most_mb):
    facts = converted(bag, tmp_path / "out", "--memory", memory, "--no-check", timeout_s=250)
    assert facts["peak_memory_bytes"] <= most_mb * 1e6, facts
    assert facts["frames_in"] == facts["frames_out"] + sum(facts["dropped"].values())
    assert facts["frames_out"] > 500
    assert len(Dataset(tmp_path / "out")) == 1


@pytest.mark.stress
@pytest.mark.timeout(2900)
@pytest.mark.parametrize(("codec", "size_bytes"), [("h264", 600 * 10**6), ("copy", 5 * 10**9)])
def test_ten_times_the_memory(tmp_path, codec, size_bytes):
    """The kernel kills whoever needs more than 512 MB; 400 MB are asked for."""
    with memory_cgroup(512 * 10**6) as group:
        bag = tmp_path / "large.bag"
        make_bag(bag, size_bytes)
        assert bag.stat().st_size >= size_bytes * 0.95
        words = ("--memory", "400MB", "--codec", codec)
        facts = converted(bag, tmp_path / "out", *words, cgroup=group, timeout_s=2500)
        assert facts["peak_memory_bytes"] <= 440e6, facts
        assert facts["frames_out"] > 0
        assert facts["findings"] == []
        figures = {"codec": codec, "size_bytes": bag.stat().st_size, **peak_of(group)}
        figures |= {k: facts[k] for k in ("peak_memory_bytes", "wall_s", "frames_out")}
        sys.stdout.write(json.dumps(figures) + "\n")


def test_the_sample_is_streamed(tmp_path):
    facts = write_sample(tmp_path / "x.bag", size_bytes=3 * 10**6, seconds=1e9, numbered=False)
    assert 2.5e6 < facts.path.stat().st_size < 6e6
