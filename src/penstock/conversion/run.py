"""The whole conversion: bags in, one LeRobot dataset out, committed bag by bag."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock.bags import Limits, open_bag
from penstock.conversion.budget import BASE_BYTES, MemoryWatch, encoder_bytes
from penstock.conversion.claims import Claims
from penstock.conversion.features import Joints, describe
from penstock.conversion.mapping import Camera, Mapping
from penstock.conversion.one_bag import Job
from penstock.conversion.plan import plan_bag
from penstock.conversion.ray_engine import RayCluster
from penstock.conversion.report import BagReport, Report
from penstock.conversion.request import Paths, Request, make_request
from penstock.conversion.workers import Outcome, run_jobs
from penstock.core.files import storage_error
from penstock.core.interrupt import check_stop, interruptible
from penstock.core.memory import format_bytes, give_back_at_once, rss_bytes
from penstock.core.objects import as_object
from penstock.core.threads import parallel_map
from penstock.dataset.check import check
from penstock.dataset.layout import INFO_PATH, Feature
from penstock.dataset.metadata import read_info
from penstock.dataset.plan import BUILT, CLAIMS, UNITS, Built, Plan, check_same
from penstock.dataset.unit import RECORD, UnitRecord, make_key, write_failure_note
from penstock.dataset.writer import DatasetWriter, read_plan
from penstock.errors import DataError, PenstockError, StorageError, UsageError
from penstock.ui.progress import Progress

_QUEUE_BYTES: Final = 16 * 2**20  # hundreds of pictures: more would only be more memory
_LEAST_QUEUE_BYTES: Final = 4 * 2**20
_FINGERPRINTS_AT_ONCE: Final = 16  # most of their time they wait for the storage
_DETAILED: Final = 100  # bags whose pictures and time errors are in the report
_PLAN: Final = "plan"  # the claim of whoever makes it
_LOOK_AGAIN_S: Final = 0.5


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


def carry_out(request: Request) -> Report:
    """Carry a conversion out; a signal stops it at the next message, and what is done is kept."""
    give_back_at_once()
    return interruptible(lambda: _carry_out(request))


def _carry_out(request: Request) -> Report:
    start_s = time.perf_counter()
    report = Report(request.out, request.mapping, shard=request.shard, unused=request.unused)
    report.memory_limit_bytes = request.memory_bytes
    with MemoryWatch() as watch:
        if request.shard is None:
            _write(request, report)
        else:
            _write_shard(request, report)
        report.wall_s = time.perf_counter() - start_s
        if request.check and request.shard is None:
            with Progress(_size(request.out), "check", "bytes", request.progress) as progress:
                checkup = check(request.out, "sample", progress)
            report.findings, report.checked = checkup.findings, checkup.checked
            report.training = checkup.notes
    report.peak_bytes, report.memory = watch.peak_bytes, watch.samples
    if request.ray is not None:  # the limit is that of each bag, wherever it was converted
        report.peak_bytes = max((bag.done.peak_bytes for bag in report.bags), default=0)
    return report


def _write(request: Request, report: Report) -> None:
    fingerprints = _fingerprints(request.bags)
    with _open_writer(request, fingerprints) as writer:
        try:
            _convert_all(request, writer, fingerprints, report)
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
        writer.clear_units()
        report.total_episodes, report.total_frames = writer.total_episodes, writer.total_frames


def _open_writer(request: Request, fingerprints: dict[Path, str]) -> DatasetWriter:
    """Open the dataset; a new one gets its plan at once, with all bags in their order."""
    joints = _joints_of(read_plan(request.out) if request.mode in ("resume", "append") else None)
    features = _named_as_before(request, _features(request, joints))
    _check_memory(request, features)
    return DatasetWriter(
        request.out,
        features,
        request.mapping.fps,
        request.mapping.robot_type,
        version=request.version,
        mode=request.mode,
        settings=_settings(request, joints),
        bags=list(fingerprints.values()),
    )


def _settings(request: Request, joints: Joints) -> dict[str, Any]:
    """Return what the plan keeps of the settings."""
    named = [[topic, name, list(names)] for (topic, name), names in joints.items()]
    return {"mapping": request.mapping.to_json(), "salvage": request.salvage, "joints": named}


def _write_shard(request: Request, report: Report) -> None:
    """Make the units of one part of the bags; whoever comes first makes the plan for all."""
    own = _fingerprints(request.own_bags)
    report.copies = _copies(request, own)
    todo = [path for path in own if path not in report.copies]
    wanted = [own[path] for path in todo]
    with Claims(request.out / CLAIMS) as claims:
        plan = _agreed_plan(request, claims, wanted)
        features = dict(plan.spec.features)
        _check_memory(request, features)
        positions = {known: position for position, known in enumerate(plan.bags)}
        missing = next((path for path in todo if own[path] not in positions), None)
        if missing is not None:
            raise UsageError(
                f"{missing} is not in the plan of {request.out}, which has {len(plan.bags)} bags: "
                "give every shard the same bags, or add bags with --append"
            )
        work = _Work(request, features, plan.settings["joints"], own, positions, len(todo))
        report.workers = work.workers
        committed = _Committed(request.out)

        def free(paths: Sequence[Path], others: list[Path]) -> Iterator[Job]:
            """Yield what nobody makes or has made, and collect what others are making."""
            for path in paths:
                key = work.key(path)
                if key not in committed and not claims.take(key):
                    others.append(path)
                elif key in committed:
                    report.skipped.append(path)
                else:
                    yield work.job(path)

        while todo:
            others: list[Path] = []
            try:
                _work_off(work, todo, free(todo, others), report, claims.release)
            except KeyboardInterrupt as stop:
                done = len(report.bags) + len(report.skipped)
                stop.args = (
                    f"{done} of {len(own)} bags of shard {request.shard} are done; run it again",
                )
                raise
            todo = others
            if todo:  # whoever makes them may die
                check_stop()
                time.sleep(_LOOK_AGAIN_S)


def _copies(request: Request, own: dict[Path, str]) -> dict[Path, Path]:
    """Return which bags are copies of others that come before them, as all shards see it."""
    sizes = {path: _size(path) for path in request.bags}
    alike: dict[int, list[Path]] = {}
    found: dict[Path, Path] = {}
    known = dict(own)
    for path in request.bags:
        before = alike.setdefault(sizes[path], [])
        for other in before if path in own else ():
            if other not in known:
                known[other] = fingerprint(other)
            if known[other] == own[path]:
                found[path] = other
                break
        before.append(path)
    return found


def _agreed_plan(request: Request, claims: Claims, wanted: Sequence[str]) -> Plan:
    """Return the plan that all shards go by, and make it if nobody has.

    Raises:
        UsageError: It was made with other settings.
    """

    def stored() -> Plan | None:
        plan = read_plan(request.out)
        adding = request.mode != "create" and plan is not None
        return None if plan is None or (adding and not set(wanted) <= set(plan.bags)) else plan

    plan = stored()
    while plan is None:
        if not claims.take(_PLAN):
            check_stop()
            time.sleep(_LOOK_AGAIN_S)
            plan = stored()
            continue
        try:
            plan = stored()  # by whoever had the claim before
            if plan is None:
                fingerprints = _fingerprints(request.bags)
                with _open_writer(request, fingerprints) as writer:
                    writer.position_of(list(fingerprints.values()))
                    plan = writer.plan
        finally:
            claims.release(_PLAN)
    spec = replace(
        plan.spec,
        fps=request.mapping.fps,
        robot_type=request.mapping.robot_type,
        version=request.version,
    )
    check_same(request.out, plan, Plan(spec, _settings(request, _joints_of(plan))))
    return plan


class _Committed:
    """The keys of all units that are committed now, whether they are built or not."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._built: set[str] = set()
        self._read_at: tuple[int, int] | None = None

    def __contains__(self, key: str) -> bool:
        if (self._out / UNITS / key / RECORD).is_file():
            return True
        with suppress(FileNotFoundError):
            found = (self._out / BUILT).stat()
            if self._read_at != (found.st_mtime_ns, found.st_ino):
                built = Built.read(self._out)
                self._built = {unit.key for unit in built.units} if built else set()
                self._read_at = found.st_mtime_ns, found.st_ino
        return key in self._built


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


def _joints_of(plan: Plan | None) -> Joints:
    """Return the joints of the dataset that goes on, as its settings keep them."""
    if plan is None:
        return {}
    try:
        found = plan.settings.get("joints", [])
        return {(str(t), str(f)): tuple(map(str, names)) for t, f, names in found}
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"the plan: its joints make no sense ({error})") from error


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
    request: Request, writer: DatasetWriter, fingerprints: dict[Path, str], report: Report
) -> None:
    done, partly = _done_before(writer.committed)
    positions = writer.position_of(list(fingerprints.values()))
    first: dict[str, Path] = {}
    todo: list[Path] = []
    taken = {str(source.get("bag")) for source in writer.committed}
    for path in request.bags:
        known = fingerprints[path]
        if known in first:  # a copy under another name is the same recording
            report.copies[path] = first[known]
        elif known in done:
            report.skipped.append(path)
        elif known in partly:
            report.failed[path] = partly[known]
        elif f"{path.name}.active" in taken:
            report.failed[path] = (
                f"its beginning is in the dataset already, salvaged from {path.name}.active: "
                "--overwrite takes the whole, and --append under another name takes it twice"
            )
        else:
            todo.append(path)
        first.setdefault(known, path)
    joints = writer.plan.settings["joints"]
    work = _Work(request, writer.features, joints, fingerprints, positions, len(todo))
    report.workers = work.workers
    if request.ray is None:
        _work_off(work, todo, map(work.job, todo), report)
        return
    with RayCluster(request.ray.address) as cluster:
        report.workers = cluster.cpus
        longest_first = sorted(todo, key=_size, reverse=True)
        _work_off(work, todo, map(work.job, longest_first), report, cluster=cluster)


class _Work:
    """What the bags of a run have in common."""

    def __init__(
        self,
        request: Request,
        features: dict[str, Feature],
        joints: list[Any],
        fingerprints: dict[Path, str],
        positions: dict[str, int],
        bags: int,
    ) -> None:
        self.request = request
        self.units = request.out / UNITS
        # On a cluster the memory is that of each bag.
        self.workers = 1 if request.ray else _fitting_workers(request, features, bags)
        self._features = {name: feature.to_json() for name, feature in features.items()}
        self._mapping = request.mapping.to_json()
        self._joints, self._fingerprints, self._positions = joints, fingerprints, positions

    def key(self, path: Path) -> str:
        """Return the key of the unit that a bag becomes."""
        return make_key(self._fingerprints[path], self._mapping, self._features)

    def job(self, path: Path) -> Job:
        """Return what a worker needs to make it."""
        known = self._fingerprints[path]
        source = {"bag": path.name, "fingerprint": known, "size_bytes": _size(path)}
        return Job(
            path,
            self._mapping,
            self._features,
            self.units,
            UnitRecord(self.key(path), self._positions[known], source, []),
            queue_bytes(self.request, self.workers),
            self.request.memory_bytes // self.workers,
            self.request.salvage,
            joints=self._joints,
        )


def _work_off(
    work: _Work,
    todo: Sequence[Path],
    jobs: Iterable[Job],
    report: Report,
    finished: Callable[[str], None] = lambda key: None,
    cluster: RayCluster | None = None,
) -> None:
    """Convert bags, and report them in the order of the dataset, whichever was done first."""
    outcomes: dict[Path, Outcome] = {}
    try:
        total = sum(map(_size, todo))
        with Progress(total, "convert", "bytes", work.request.progress) as progress:
            meter = _Meter(progress, len(todo), cluster)
            if cluster is None:
                done = run_jobs(jobs, work.workers, meter)
            else:
                done = cluster.run_jobs(jobs, work.request.memory_bytes, meter)
            with closing(done):
                for each, outcome in done:
                    if isinstance(outcome, StorageError):
                        raise outcome  # the disk is full: no other bag will fare better
                    key = each.record.key
                    if isinstance(outcome, PenstockError):
                        write_failure_note(work.units, key, each.record.source, str(outcome))
                    elif len(outcomes) > _DETAILED:
                        outcome = replace(outcome, previews={}, skew_ms={}, memory=[])
                    finished(key)
                    outcomes[each.bag] = outcome
                    meter.finished(_size(each.bag), isinstance(outcome, PenstockError))
    finally:
        for path in [path for path in todo if path in outcomes]:
            outcome = outcomes[path]
            if isinstance(outcome, PenstockError):
                report.failed[path] = str(outcome).removeprefix(f"{path}: ")
            else:
                report.add(BagReport(path, _size(path), outcome))


def _done_before(sources: Iterable[dict[str, Any]]) -> tuple[set[str], dict[str, str]]:
    """Return the recordings that are in the dataset, and those of which only a part is, and why."""
    counts: Counter[str] = Counter()
    parts: dict[str, int] = {}
    for source in sources:
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

    def __init__(self, progress: Progress, bags: int, cluster: RayCluster | None) -> None:
        self._progress, self._bags, self._cluster = progress, bags, cluster
        self._done_bytes = 0  # of finished bags
        self._read_bytes = 0  # of bags under way
        self._frames = 0
        self._done = self._failed = 0
        self._start_s = time.monotonic()

    def __call__(self, size_bytes: int, frames: int) -> None:
        self._read_bytes += size_bytes
        self._frames += frames
        rate = self._frames / max(time.monotonic() - self._start_s, 1e-3)
        words = [f"{self._done}/{self._bags} bags"] if self._bags > 1 else []
        words.append(f"{self._frames} frames, {rate:.0f} frames/s")
        if self._failed:
            words.append(f"{self._failed} failed")
        if self._cluster is not None:
            words.append(f"{self._cluster.nodes} nodes, {self._cluster.cpus} CPUs")
        self._progress.note(", ".join(words))
        shown = self._done_bytes + self._read_bytes
        self._progress.update(min(shown, self._progress.total or shown))

    def finished(self, size_bytes: int, failed: bool) -> None:
        self._done_bytes += size_bytes
        self._read_bytes = 0
        self._done += 1
        self._failed += failed
        self(0, 0)


def _fingerprints(bags: Sequence[Path]) -> dict[Path, str]:
    """Return the fingerprints of bags, in their order."""
    found = parallel_map(fingerprint, bags, name="fingerprint", helpers=_FINGERPRINTS_AT_ONCE)
    return dict(zip(bags, found, strict=True))


def fingerprint(path: Path) -> str:
    """Name a recording by its content: its size, and 64 samples of 64 KiB of each file.

    In object storage: by its name, size and time of upload.

    Reading all of a 50 GB bag to tell that it is done already would take longer than the user
    has patience for; two recordings that agree in size and in all samples are taken for one.
    """
    digest = hashlib.blake2b(digest_size=16)
    remote = as_object(path)
    if remote is not None:  # what the listing told: nothing is read for it
        digest.update(remote.version.encode())
        return digest.hexdigest()
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
