"""The figures of the documents: each has one name, one source, and one way to be written.

A page says `<!--stall-->22 ms<!---->`; what stands between the marks is written by
`python -m benchmarks --from docs/bench.json --pages`, and a test compares. So no two pages can
disagree. A figure comes from a row of the stored run, or from a campaign: then its command and its
day are here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import Row
from penstock.core.files import publish_bytes
from penstock.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
_MARK = re.compile(r"<!--([\w.-]+)-->(.*?)<!---->", re.DOTALL)
_FLIGHTS = "penstock evaluate --drones 64, worlds 300,000 to 300,007"
_FLIGHTS_BEFORE = "penstock evaluate, worlds 7 to 14"


@dataclass(frozen=True)
class Measured:
    """A row of the stored run.

    Args:
        case: The case that measures it: `python -m benchmarks CASE`.
        what: The quantity.
        who: The method.
        form: How it is written; the value is multiplied by `scale` before.
        scale: Such as 1e-3 for thousands.
        over: Another method's row by which the value is divided.
    """

    case: str
    what: str
    who: str
    form: str
    scale: float = 1.0
    over: str | None = None


@dataclass(frozen=True)
class Campaign:
    """What a longer campaign found.

    Args:
        text: The figure.
        command: What gave it.
        day: When.
    """

    text: str
    command: str
    day: str


_BATCH = "random batch of 256 depth pictures and 5 small keys"
_BYTES = "memory per depth picture"
_BLOCKED = "blocked, 100 ms before the step"
_LOST = "training time lost in 4 iterations after a save"
_STAGER, _QUEUE = "DCP async_save, DefaultStager", "deepcopy + queue (proposal)"
_SB3 = "sb3-extra-buffers, zstd-3"
_ZIPNN = "torch.save, ZipNN + fsync"
_CPU = "CPU per frame of 3 cameras"
_SIM = "environment, 1024 drones (fast), 350 + 80 obstacles"
_PICKLE = "pickle + LZ4-9 (proposal)"
_FULL, _DELTA = "penstock full", "penstock delta, 10 steps"
_SAVED32, _SAVED16 = "size saved, float32, 202.2 MB", "size saved, bfloat16, 101.1 MB"
_LZ4 = "torch.save, LZ4-9 + fsync (proposal)"

FIGURES: dict[str, Measured | Campaign] = {
    # checkpoints
    "stall": Measured("checkpoint", _BLOCKED, "penstock", "{:.0f} ms"),
    "stall-lazy": Measured("checkpoint", _BLOCKED, "penstock, lazy=True", "{:.2f} ms"),
    "stall-torch": Measured("checkpoint", _BLOCKED, "torch.save", "{:.0f} ms"),
    "stall-dcp": Measured("checkpoint", _BLOCKED, "DCP async_save", "{:.0f} ms"),
    "stall-stager": Measured("checkpoint", _BLOCKED, _STAGER, "{:.0f} ms"),
    "stall-queue": Measured("checkpoint", _BLOCKED, _QUEUE, "{:.0f} ms"),
    "stall-copy": Measured("checkpoint", _BLOCKED, "copy_ into reused buffers", "{:.0f} ms"),
    "lost": Measured("checkpoint", _LOST, "penstock", "{:.0f} ms"),
    "lost-plain": Measured("checkpoint", _LOST, "penstock, compress=False", "{:.0f} ms"),
    "lost-stager": Measured("checkpoint", _LOST, _STAGER, "{:.0f} ms"),
    "lost-torch": Measured("checkpoint", _LOST, "torch.save", "{:.0f} ms"),
    "extra-memory": Measured("checkpoint", "extra peak memory", "penstock, 5 saves", "{:.2f}"),
    "extra-memory-queue": Measured(
        "checkpoint", "extra peak memory", "proposal, queue of 3", "{:.1f}"
    ),
    "saved-f32": Measured("checkpoint", _SAVED32, _FULL, "{:.0f} %"),
    "saved-bf16": Measured("checkpoint", _SAVED16, _FULL, "{:.0f} %"),
    "saved-delta-f32": Measured("checkpoint", _SAVED32, _DELTA, "{:.0f} %"),
    "saved-delta-bf16": Measured("checkpoint", _SAVED16, _DELTA, "{:.0f} %"),
    "saved-lz4-f32": Measured("checkpoint", _SAVED32, _LZ4, "{:.1f} %"),
    "saved-lz4-bf16": Measured("checkpoint", _SAVED16, _LZ4, "{:.1f} %"),
    "saved-zipnn-f32": Measured("checkpoint", _SAVED32, _ZIPNN, "{:.1f} %"),
    "saved-zipnn-bf16": Measured("checkpoint", _SAVED16, _ZIPNN, "{:.1f} %"),
    "durable-zipnn": Measured(
        "checkpoint", "speed to durable disk, float32", _ZIPNN, "{:.0f} MB/s"
    ),
    "durable": Measured("checkpoint", "speed to durable disk, float32", _FULL, "{:.0f} MB/s"),
    "durable-torch": Measured(
        "checkpoint", "speed to durable disk, float32", "torch.save + fsync", "{:.0f} MB/s"
    ),
    "durable-lz4": Measured("checkpoint", "speed to durable disk, float32", _LZ4, "{:.0f} MB/s"),
    "load": Measured("checkpoint", "load, float32", _FULL, "{:.0f} ms"),
    "load-torch": Measured("checkpoint", "load, float32", "torch.load (unverified)", "{:.0f} ms"),
    "wrong-flips": Measured("checkpoint", "silently wrong after a bit flip", "penstock", "{:.0f}"),
    "wrong-flips-torch": Measured(
        "checkpoint", "silently wrong after a bit flip", "torch.save", "{:.0f}"
    ),
    "wrong-flips-safetensors": Measured(
        "checkpoint", "silently wrong after a bit flip", "safetensors", "{:.0f}"
    ),
    "wrong-flips-dcp": Measured("checkpoint", "silently wrong after a bit flip", "DCP", "{:.0f}"),
    # recordings
    "cpu-h264": Measured("convert", _CPU, "penstock h264", "{:.1f} ms"),
    "cpu-av1": Measured("convert", _CPU, "penstock av1", "{:.0f} ms"),
    "cpu-copy": Measured("convert", _CPU, "penstock copy", "{:.1f} ms"),
    "cpu-lerobot": Measured(
        "convert", _CPU, "lerobot 0.4.4 add_frame + save_episode (av1)", "{:.0f} ms"
    ),
    "cpu-lerobot-streaming": Measured(
        "convert", _CPU, "lerobot 0.6.1, streaming (av1)", "{:.0f} ms"
    ),
    "memory-h264": Measured("convert", "peak memory", "penstock h264", "{:.0f} MB"),
    "memory-copy": Measured("convert", "peak memory", "penstock copy", "{:.0f} MB"),
    "memory-av1": Measured("convert", "peak memory", "penstock av1", "{:.0f} MB"),
    "memory-lists": Measured(
        "convert",
        "memory of 10,000 frames of 3 cameras (scaled)",
        "all frames in lists, then np.stack (proposal)",
        "{:.0f} GB",
    ),
    "memory-chunks": Measured(
        "convert", "memory of a chunk, stacked (scaled)", "chunk_size=1000", "{:.1f} GB"
    ),
    "memory-59": Measured(
        "convert", "peak memory by size of the bag", "penstock copy, 59 MB", "{:.0f} MB"
    ),
    "memory-475": Measured(
        "convert", "peak memory by size of the bag", "penstock copy, 475 MB", "{:.0f} MB"
    ),
    "chunk-100": Measured(
        "convert", "processor time, chunk_size=100 against 2000", "penstock copy", "{:.2f}"
    ),
    # replay
    "batch": Measured("replay", _BATCH, "penstock", "{:.2f} ms"),
    "batch-lazy": Measured("replay", _BATCH, "LazyTensorStorage", "{:.2f} ms"),
    "batch-list": Measured("replay", _BATCH, "CompressedListStorage", "{:.0f} ms"),
    "picture": Measured("replay", _BYTES, "penstock", "{:.0f} B"),
    "picture-hc": Measured("replay", _BYTES, "penstock, lz4hc", "{:.0f} B"),
    "picture-hc-times": Measured(
        "replay", _BYTES, "LazyTensorStorage", "{:.0f}", over="penstock, lz4hc"
    ),
    "picture-lazy": Measured("replay", _BYTES, "LazyTensorStorage", "{:.0f} B"),
    "picture-list": Measured("replay", _BYTES, "CompressedListStorage", "{:.0f} B"),
    "picture-noisy": Measured("replay", "memory per noisy depth picture", "penstock", "{:.0f} B"),
    "picture-times": Measured("replay", _BYTES, "LazyTensorStorage", "{:.0f}", over="penstock"),
    "next-batch": Measured("replay", "pictures of 256 transitions", "penstock", "{:.1f} ms"),
    "next-batch-sb3": Measured("replay", "pictures of 256 transitions", _SB3, "{:.1f} ms"),
    "picture-sb3": Measured("replay", "memory per depth picture, beside SB3", _SB3, "{:.0f} B"),
    "episodes-batch": Measured(
        "replay", "DictReplayBuffer, batch of 256 depth pictures", "penstock", "{:.1f} ms"
    ),
    "episodes-batch-lz4": Measured(
        "replay",
        "DictReplayBuffer, batch of 256 depth pictures",
        "proposal, per episode",
        "{:.0f} ms",
    ),
    "sum-tree": Measured(
        "replay", "sum tree of 1,000,000, sample and update 256", "penstock", "{:.2f} ms"
    ),
    "sum-tree-cpprb": Measured(
        "replay", "sum tree of 1,000,000, sample and update 256", "cpprb", "{:.2f} ms"
    ),
    "pictures-lz4": Measured(
        "replay", "compression, depth pictures", "proposal, per frame", "{:.1f}"
    ),
    "pictures-lz4-noisy": Measured(
        "replay", "compression, noisy depth pictures", "proposal, per frame", "{:.1f}"
    ),
    "slices": Measured("replay", "SliceSampler(16), batch of 256", "penstock", "{:.1f} ms"),
    "slices-lazy": Measured(
        "replay", "SliceSampler(16), batch of 256", "LazyTensorStorage", "{:.1f} ms"
    ),
    "threads": Measured(
        "replay", "speed-up by threads, batch of 256", "proposal, per frame", "{:.1f}"
    ),
    # rollouts
    "rollout-save": Measured("rollout", "durable save, clean", "penstock", "{:.0f} ms"),
    "rollout-save-pickle": Measured("rollout", "durable save, clean", _PICKLE, "{:.0f} ms"),
    "rollout-load": Measured("rollout", "load, clean", "penstock", "{:.0f} ms"),
    "rollout-load-pickle": Measured("rollout", "load, clean", _PICKLE, "{:.0f} ms"),
    "rollout-env": Measured("rollout", "load one env, clean", "penstock", "{:.1f} ms"),
    "rollout-key": Measured("rollout", "load one key, clean", "penstock", "{:.1f} ms"),
    "rollout-size": Measured("rollout", "size, clean", "penstock", "{:.1f}"),
    "rollout-size-noisy": Measured("rollout", "size, noisy", "penstock", "{:.1f}"),
    "rollout-size-lz4": Measured("rollout", "size, clean", _PICKLE, "{:.1f}"),
    "rollout-size-lz4-noisy": Measured("rollout", "size, noisy", _PICKLE, "{:.1f}"),
    "lidar-lz4": Measured("rollout", "size, clean, lidar", "proposal, LZ4-9", "{:.1f}"),
    "lidar": Measured("rollout", "size, clean, lidar", "penstock", "{:.1f}"),
    "batch-mb": Measured("rollout", "a batch stored, clean", "as it is", "{:.0f} MB"),
    "batch-mb-lz4": Measured("rollout", "a batch stored, clean", _PICKLE, "{:.1f} MB"),
    "batch-mb-stored": Measured("rollout", "a batch stored, clean", "penstock", "{:.1f} MB"),
    "ppo-lost": Measured(
        "rollout",
        "time lost to compressing a PPO batch",
        "not worth it: train on the batch as it is",
        "{:.0f} ms",
    ),
    "ppo-saved": Measured("rollout", "memory saved for one PPO batch", "penstock", "{:.0f} MB"),
    "compress-batch": Measured("rollout", "compress a batch", "penstock", "{:.0f} ms"),
    "compress-batch-lz4": Measured("rollout", "compress a batch", "proposal, LZ4-9", "{:.0f} ms"),
    "decompress-batch-lz4": Measured(
        "rollout", "decompress a batch", "proposal, LZ4-9", "{:.1f} ms"
    ),
    "lz4-fast": Measured("rollout", "LZ4 compress, lidar", "level 0", "{:.0f} MB/s"),
    "lz4-nine": Measured("rollout", "LZ4 compress, lidar", "level 9", "{:.0f} MB/s"),
    "lz4-nine-gain": Measured("rollout", "LZ4 level 9 against level 0, lidar", "level 9", "{:.2f}"),
    "link": Measured("rollout", "link below which compressing pays", "penstock", "{:.1f} Gb/s"),
    # navigation
    "steps": Measured("nav", _SIM, "penstock, numba, 2 threads", "{:,.0f},000", 1e-3),
    "frames": Measured("nav", "training, algo=fast", "penstock train", "{:,.0f}"),
    "frames-navrl": Measured("nav", "training, algo=navrl", "penstock train", "{:,.0f}"),
    "torchrl-one": Measured(
        "nav",
        "against a plain TorchRL loop, one process and one thread each",
        "penstock, 1 process",
        "{:.2f}",
    ),
    "torchrl-all": Measured(
        "nav",
        "against a plain TorchRL loop (a thread per core)",
        "penstock train, a process per core",
        "{:.2f}",
    ),
    "pause": Measured(
        "nav",
        "training held up per checkpoint, in the loop",
        "penstock, call + barrier",
        "{:.2f} ms",
    ),
    "speed-left": Measured(
        "nav",
        "speed that is left with a checkpoint every iteration",
        "penstock, saving",
        "{:.2f}",
    ),
    "pipelined": Measured(
        "nav",
        "pipelined collection on this machine",
        "penstock, collector=pipelined",
        "{:.2f}",
    ),
    "ahead-waiting": Measured(
        "pipeline", "collecting ahead, waiting (a GPU, a robot)", "penstock", "{:.0f} %"
    ),
    "timer": Measured("monitor", "an empty timer", "penstock", "{:.1f} us"),
    # campaigns
    "kills-convert": Campaign("0 of 303", "tests/conversion/kill_campaign.py", "2026-11-17"),
    "kills-save": Campaign("0 of 200 kills", "make stress", "2026-11-16"),
    "memory-1-4-6": Campaign("243, 252, 246 MB", "penstock convert, h264", "2026-11-16"),
    "memory-lerobot": Campaign("3.6 GB", "lerobot 0.4.4, 1000 frames", "2026-11-16"),
    "fly": Campaign("88.9 %", _FLIGHTS, "2026-11-20"),
    "fly-shield": Campaign("97.3 %", _FLIGHTS, "2026-11-20"),
    "fly-straight": Campaign("86.1 %", _FLIGHTS, "2026-11-20"),
    "fly-boxes": Campaign("90.9 %", _FLIGHTS_BEFORE, "2026-11-16"),
    "fly-boxes-shield": Campaign("97.2 %", _FLIGHTS_BEFORE, "2026-11-16"),
    "delete-32": Campaign("1.2 s", "penstock edit: 32 of 79 episodes, 2 cameras", "2026-11-19"),
}


def pages() -> list[Path]:
    """Return the documents that may hold figures."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def text_of(name: str, result: Mapping[str, Any]) -> str:
    """Write a figure.

    Raises:
        UsageError: There is no such figure, or the run has not measured it.
    """
    if name == "run":
        python, torch = (result["versions"].get(part, "-") for part in ("python", "torch"))
        commit = result.get("commit", "before commits were noted")
        return f"{result['when']}, {commit}; {result['machine']}; Python {python}, torch {torch}"
    if name not in FIGURES:
        raise UsageError(f"there is no figure {name!r}; see benchmarks/figures.py")
    figure = FIGURES[name]
    if isinstance(figure, Campaign):
        return figure.text
    rows = {
        (row["what"], row["who"]): Row(**row)
        for case in result["cases"]
        if case["name"] == figure.case
        for row in case["rows"]
    }
    try:
        value = rows[figure.what, figure.who].value * figure.scale
        if figure.over is not None:
            value /= rows[figure.what, figure.over].value
    except KeyError as error:
        raise UsageError(f"the run has no row {error} for the figure {name!r}") from error
    return figure.form.format(value)


def filled(text: str, result: Mapping[str, Any]) -> str:
    """Return a page with its figures as the run has them."""
    return _MARK.sub(lambda m: f"<!--{m[1]}-->{text_of(m[1], result)}<!---->", text)


def names_in(text: str) -> list[str]:
    """List the figures of a page."""
    return [match[1] for match in _MARK.finditer(text)]


def write_pages(result: Mapping[str, Any]) -> list[Path]:
    """Write the figures of a run into all documents; return those that changed."""
    changed = []
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = filled(before, result)
        if after != before:
            publish_bytes(page, after.encode())
            changed.append(page)
    return changed
