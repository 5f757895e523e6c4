"""The whole conversion: bags in, one LeRobot dataset out, committed bag by bag."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from penstock.bags import Limits, find_bags, open_bag
from penstock.conversion import kuavo
from penstock.conversion.budget import BASE_BYTES, MemoryWatch, encoder_bytes
from penstock.conversion.features import Joints, describe
from penstock.conversion.guess import guess_mapping, only
from penstock.conversion.mapping import Camera, Mapping
from penstock.conversion.one_bag import Job
from penstock.conversion.plan import plan_bag
from penstock.conversion.report import BagReport, Report
from penstock.conversion.settings import from_json, load_map, parse_value, set_word
from penstock.conversion.workers import Outcome, run_jobs
from penstock.core.files import storage_error
from penstock.core.interrupt import interruptible
from penstock.core.memory import format_bytes, give_back_at_once, parse_bytes, rss_bytes
from penstock.dataset import doctor
from penstock.dataset.layout import INFO_PATH, VERSIONS, Feature, Version
from penstock.dataset.metadata import read_info
from penstock.dataset.unit import UnitRecord, make_key
from penstock.dataset.writer import DatasetWriter, read_plan
from penstock.errors import DataError, PenstockError, StorageError, UsageError
from penstock.ui.progress import Mode, Progress
from penstock.ui.suggestions import did_you_mean

DEFAULT_MEMORY: Final = "512MB"
_QUEUE_BYTES: Final = 16 * 2**20  # hundreds of pictures: more would only be more memory
_LEAST_QUEUE_BYTES: Final = 4 * 2**20


_LEAST_MEMORY: Final = 200 * 10**6
_LEAST_MEMORY_TEXT: Final = "200MB"

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
OpenMode = Literal["create", "resume", "append", "overwrite"]


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for, checked; see `make_request`."""

    bags: list[Path]
    out: Path
    mapping: Mapping
    version: Version = "v3.0"
    memory_bytes: int = 512 * 10**6
    workers: int = 1
    mode: OpenMode = "create"
    salvage: bool = False
    check: bool = True
    progress: Mode | None = None


_MOST_LOOKED_AT: Final = 200  # bags, before a mapping is guessed


def convert(
    bags: Paths,
    out: str | os.PathLike[str],
    map: str | os.PathLike[str] | Mapping | None = None,
    **settings: Any,
) -> Report:
    """Convert recordings into a LeRobot dataset, in bounded memory.

    Args:
        bags: Bags (.bag, .db3, .mcap, ROS 2 folders) or folders of them.
        out: The folder of the dataset.
        map: A mapping, or its YAML file; None guesses one from the first bag.
        settings: See `make_request`: memory, workers, progress, resume, codec, ….

    Raises:
        PenstockError: Nothing could be converted; bags that fail one by one are in the report.

    Example:
        report = penstock.convert("bags/", "dataset", memory="512MB")
        print(report.frames_out, report.failed)
    """
    return carry_out(make_request(bags, out, map, **settings))


def make_request(
    bags: Paths,
    out: str | os.PathLike[str],
    map: str | os.PathLike[str] | Mapping | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    memory: str | int = DEFAULT_MEMORY,
    workers: int = 1,
    resume: bool = False,
    append: bool = False,
    overwrite: bool = False,
    salvage: bool = False,
    version: Version = "v3.0",
    check: bool = True,
    progress: Mode | None = None,
    **settings: Any,
) -> Request:
    """Check what a user asks for, and find the bags.

    Args:
        bags: As for `convert`.
        out: As for `convert`.
        map: As for `convert`.
        config: A Kuavo settings file, instead of `map`.
        overrides: `key=value` words: settings of `config`, or of the mapping.
        memory: Resident memory to stay below, all workers together.
        workers: Bags converted at a time; the dataset does not depend on it.
        resume: Go on with a conversion that was interrupted; what is committed is skipped.
        append: Add episodes to a dataset that exists.
        overwrite: Replace a dataset that exists.
        salvage: Read what can be read of damaged bags.
        version: Of the dataset format: "v3.0" or "v2.1".
        check: Verify the dataset when it is done (of the pictures, a sample is decoded).
        progress: "rich", "plain" or "quiet"; None chooses by the terminal.
        settings: Of the mapping, instead of its own: fps, codec, depth_codec, clock, task, gap,
            split_frames, …; None leaves one alone.

    Raises:
        UsageError: Something is wrong with a setting; nothing was touched.
        DataError: There is no bag, or none that can be opened.
    """
    if sum((resume, append, overwrite)) > 1:
        raise UsageError("resume, append and overwrite exclude each other: choose one")
    if workers < 1:
        raise UsageError(f"workers is {workers}: give at least 1")
    if version not in VERSIONS:
        raise UsageError(f"version is {version!r}: {did_you_mean(version, VERSIONS)}")
    memory_bytes = parse_bytes(memory)
    if memory_bytes < _LEAST_MEMORY:
        raise UsageError(f"memory is {memory!r}: the codecs alone need {_LEAST_MEMORY_TEXT}")
    paths = [bags] if isinstance(bags, str | os.PathLike) else list(bags)
    used = find_bags([Path(path) for path in paths])
    own = kuavo.own_settings(overrides) if config is not None else []
    words = [word.partition("=")[::2] for word in overrides if word not in own]
    if config is not None:
        if map is not None:
            raise UsageError("map and config exclude each other: choose one")
        asked = kuavo.load_kuavo(Path(config), own)
        mapping = asked.mapping
        used = kuavo.choose_used(used, asked.num_used)
    elif map is not None:
        mapping = map if isinstance(map, Mapping) else load_map(Path(map))
    else:
        going_on = _mapping_of(Path(out)) if resume or append else None
        mapping = going_on or _guess(used, salvage, Limits.for_memory(memory_bytes))
    given = {name: value for name, value in settings.items() if value is not None}
    if given or words:
        content = {**mapping.to_json(), **given}
        for key, text in words:
            set_word(content, key, parse_value(text))
        mapping = from_json(content, "the command")
    # Packing exchanges the folder: a relative name would then mean the old one.
    out = Path(out).absolute()
    if overwrite:
        _check_outside(used, out)
    mode: OpenMode = "create"
    if resume or append or overwrite:
        mode = "resume" if resume else "append" if append else "overwrite"
    return Request(
        used, Path(out), mapping, version, memory_bytes, workers, mode, salvage, check, progress
    )


def _check_outside(bags: Sequence[Path], out: Path) -> None:
    """Refuse to replace a folder that holds what is to be converted."""
    for bag in bags:
        if out.resolve() in (bag.resolve(), *bag.resolve().parents):
            raise UsageError(f"{bag} lies in {out}, which would be deleted: move it elsewhere")


def _guess(bags: Sequence[Path], salvage: bool, limits: Limits) -> Mapping:
    """Guess a mapping for what most of the bags have, from the first that has all of it."""
    error: PenstockError | None = None
    topics: dict[Path, set[str]] = {}
    for path in bags[:_MOST_LOOKED_AT]:
        try:
            with open_bag(path, salvage=salvage, limits=limits) as bag:
                topics[path] = {name for name, topic in bag.topics.items() if topic.count}
        except DataError as problem:
            error = error or problem
    counts = Counter(name for names in topics.values() for name in names)
    common = {name for name, count in counts.items() if 2 * count > len(topics)}
    for path in sorted(topics, key=lambda path: len(common - topics[path])):
        try:
            with open_bag(path, salvage=salvage, limits=limits) as bag:
                mapping = guess_mapping(bag)
                # The profile of a robot knows itself which topics stand in for which.
                return mapping if kuavo.is_kuavo(topics[path]) else only(mapping, common)
        except DataError as problem:
            error = error or problem
    assert error is not None  # find_bags returns at least one
    raise error


def _mapping_of(out: Path) -> Mapping | None:
    """Return the mapping of a dataset that goes on; None if it was not made from recordings."""
    with suppress(DataError, UsageError, LookupError, TypeError):
        plan = read_plan(out)
        if plan is not None:
            return from_json(plan.settings["mapping"], str(out))
    return None


def carry_out(request: Request) -> Report:
    """Carry a conversion out; a signal stops it at the next message, and what is done is kept."""
    give_back_at_once()
    return interruptible(lambda: _carry_out(request))


def _carry_out(request: Request) -> Report:
    start_s = time.perf_counter()
    report = Report(request.out, request.mapping)
    report.memory_limit_bytes = request.memory_bytes
    with MemoryWatch() as watch:
        _write(request, report)
        report.wall_s = time.perf_counter() - start_s
        if request.check:
            with Progress(_size(request.out), "check", "bytes", request.progress) as progress:
                checkup = doctor.check(request.out, "sample", progress)
            report.findings, report.checked = checkup.findings, checkup.checked
            report.training = checkup.notes
    report.peak_bytes, report.memory = watch.peak_bytes, watch.samples
    return report


def _write(request: Request, report: Report) -> None:
    fingerprints = {path: fingerprint(path) for path in request.bags}
    joints = _joints_of(request)
    features = _named_as_before(request, _features(request, joints))
    _check_memory(request, features)
    named = [[topic, name, list(names)] for (topic, name), names in joints.items()]
    with DatasetWriter(
        request.out,
        features,
        request.mapping.fps,
        request.mapping.robot_type,
        version=request.version,
        mode=request.mode,
        settings={
            "mapping": request.mapping.to_json(),
            "salvage": request.salvage,
            "joints": named,
        },
    ) as writer:
        try:
            _convert_all(request, writer, features, named, fingerprints, report)
        except KeyboardInterrupt as stop:
            writer.build()  # a dataset can be had at any time
            done = len(report.bags) + len(report.skipped)
            stop.args = (
                f"{done} of {len(request.bags)} bags are in {request.out}; go on with --resume",
            )
            raise
        if writer.total_episodes == 0:
            reasons = list(report.failed.values())
            more = f" (and {len(reasons) - 1} more bags failed)" if len(reasons) > 1 else ""
            raise DataError(f"nothing was converted: {reasons[0] if reasons else 'no bag'}{more}")
        writer.build()
        report.total_episodes, report.total_frames = writer.total_episodes, writer.total_frames


def _largest_camera(request: Request, features: dict[str, Feature]) -> tuple[int, str]:
    """Return what the camera that takes the most memory takes, and what it is."""
    cameras = [(0, "no camera")]
    for name, feature in request.mapping.features.items():
        if isinstance(feature, Camera):
            _, height, width = features[name].picture_size
            codec = request.mapping.codec_of(feature)
            what = f"{name} ({width}x{height} as {codec})"
            cameras.append((encoder_bytes(codec, width, height), what))
    return max(cameras)


def _check_memory(request: Request, features: dict[str, Feature]) -> None:
    """Refuse a limit that cannot be kept: the largest camera must fit, the others may wait."""
    needed, what = _largest_camera(request, features)
    floor = BASE_BYTES + _LEAST_QUEUE_BYTES + needed
    if request.memory_bytes < floor:
        raise UsageError(
            f"memory is {format_bytes(request.memory_bytes)}, and {what} needs "
            f"{format_bytes(floor)}: raise --memory, or give the camera a resize"
        )


def _joints_of(request: Request) -> Joints:
    """Return the joints of the dataset that goes on, as its settings keep them."""
    plan = read_plan(request.out) if request.mode in ("resume", "append") else None
    if plan is None:
        return {}
    try:
        found = plan.settings.get("joints", [])
        return {(str(t), str(f)): tuple(map(str, names)) for t, f, names in found}
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"the plan of {request.out}: its joints make no sense ({error})") from error


def _features(request: Request, joints: Joints) -> dict[str, Feature]:
    """Return the features that the first usable bag gives, and add its joints to those known."""
    first: PenstockError | None = None
    for path in request.bags:
        try:
            limits = Limits.for_memory(request.memory_bytes)
            with open_bag(path, salvage=request.salvage, limits=limits) as bag:
                plan = plan_bag(bag, request.mapping)
                features = describe(bag, request.mapping, plan, joints)
                joints |= plan.joints
                return features
        except DataError as error:
            first = first or error
    assert first is not None
    raise first


def _named_as_before(request: Request, features: dict[str, Feature]) -> dict[str, Feature]:
    """Take over the order of the joints, or their lack of names, from the dataset that goes on."""
    if request.mode in ("create", "overwrite") or not (request.out / INFO_PATH).is_file():
        return features
    before = read_info(request.out).features
    found = dict(features)
    for name, feature in features.items():
        names = before[name].names if name in before else feature.names
        if feature.is_picture or not (names is None or isinstance(names, list)):
            continue
        if names is None or (isinstance(feature.names, list) and set(names) == set(feature.names)):
            found[name] = replace(feature, names=names)
    return found


def _convert_all(
    request: Request,
    writer: DatasetWriter,
    features: dict[str, Feature],
    joints: list[Any],
    fingerprints: dict[Path, str],
    report: Report,
) -> None:
    done, partly = _done_before(writer)
    positions = writer.position_of(list(fingerprints.values()))
    first: dict[str, Path] = {}
    todo: list[Path] = []
    for path in request.bags:
        known = fingerprints[path]
        if known in first:  # a copy under another name is the same recording
            report.copies[path] = first[known]
        elif known in done:
            report.skipped.append(path)
        elif known in partly:
            report.failed[path] = partly[known]
        else:
            todo.append(path)
        first.setdefault(known, path)
    workers = report.workers = _fitting_workers(request, features, len(todo))
    described = {name: feature.to_json() for name, feature in features.items()}
    mapping = request.mapping.to_json()

    def job(path: Path) -> Job:
        known = fingerprints[path]
        source = {"bag": path.name, "fingerprint": known, "size_bytes": _size(path)}
        record = UnitRecord(make_key(known, mapping, described), positions[known], source, [])
        return Job(
            path,
            mapping,
            described,
            writer.units,
            record,
            queue_bytes(request, workers),
            request.memory_bytes // workers,
            request.salvage,
            joints=joints,
        )

    outcomes: dict[Path, Outcome] = {}
    try:
        with Progress(sum(map(_size, todo)), "convert", "bytes", request.progress) as progress:
            meter = _Meter(progress)
            for each, outcome in run_jobs(map(job, todo), workers, meter):
                if isinstance(outcome, StorageError):
                    raise outcome  # the disk is full: no other bag will fare better
                if isinstance(outcome, PenstockError):
                    writer.failed(each.record.key, each.record.source, str(outcome))
                outcomes[each.bag] = outcome
                meter.finished(_size(each.bag))
    finally:
        # In the order of the dataset, whichever was done first.
        for path in [path for path in todo if path in outcomes]:
            outcome = outcomes[path]
            if isinstance(outcome, PenstockError):
                report.failed[path] = str(outcome).removeprefix(f"{path}: ")
            else:
                report.add(BagReport(path, _size(path), outcome))


def _done_before(writer: DatasetWriter) -> tuple[set[str], dict[str, str]]:
    """Return the recordings that are in the dataset, and those of which only a part is, and why."""
    counts: Counter[str] = Counter()
    parts: dict[str, int] = {}
    for source in writer.committed:
        if "fingerprint" in source:  # or it is not from a bag: somebody else's episodes
            counts[source["fingerprint"]] += 1
            # Earlier versions committed every episode of a bag by itself.
            parts[source["fingerprint"]] = source.get("parts", 1)
    partly = {
        known: f"an earlier version has put {count} of its {parts[known]} episodes into the "
        "dataset, and was stopped: convert it into a new one"
        for known, count in counts.items()
        if count < parts[known]
    }
    return set(counts) - set(partly), partly


def queue_bytes(request: Request, workers: int) -> int:
    """Return what may wait between reading and encoding in each worker."""
    spare = request.memory_bytes // workers - BASE_BYTES
    return max(min(spare, _QUEUE_BYTES), _LEAST_QUEUE_BYTES)


def _fitting_workers(request: Request, features: dict[str, Feature], bags: int) -> int:
    """Return how many workers fit the memory; the parent process counts as well."""
    each = BASE_BYTES + _LEAST_QUEUE_BYTES + _largest_camera(request, features)[0]
    fitting = max(int((request.memory_bytes - rss_bytes()) // each), 1)
    return min(request.workers, max(bags, 1), fitting)


class _Meter:
    """Turns bytes and frames of the workers into one bar over the sizes of the bags."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done_bytes = 0  # of finished bags
        self._read_bytes = 0  # of bags under way
        self._frames = 0
        self._start_s = time.monotonic()

    def __call__(self, size_bytes: int, frames: int) -> None:
        self._read_bytes += size_bytes
        self._frames += frames
        rate = self._frames / max(time.monotonic() - self._start_s, 1e-3)
        self._progress.note(f"{self._frames} frames, {rate:.0f} frames/s")
        shown = self._done_bytes + self._read_bytes
        self._progress.update(min(shown, self._progress.total or shown))

    def finished(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._read_bytes = 0
        self(0, 0)


def fingerprint(path: Path) -> str:
    """Name a recording by its content: its size, and 64 samples of 64 KiB of each file.

    Reading all of a 50 GB bag to tell that it is done already would take longer than the user
    has patience for; two recordings that agree in size and in all samples are taken for one.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    block = 64 * 1024
    for file in files:
        try:
            size = file.stat().st_size
            digest.update(f"{size}\n".encode())
            with file.open("rb") as stream:
                for k in range(64):
                    stream.seek(max(size - block, 0) * k // 63)
                    digest.update(stream.read(block))
                    if size <= block:
                        break
        except OSError as error:
            raise storage_error("read", file, error) from error
    return digest.hexdigest()


def _size(path: Path) -> int:
    with suppress(OSError):
        if path.is_dir():
            return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return path.stat().st_size
    return 0
