"""The whole conversion: bags in, one LeRobot dataset out, committed bag by bag."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock.bags import Bag
from penstock.conversion.claims import Claims
from penstock.conversion.features import Joints, describe
from penstock.conversion.mapping import Mapping
from penstock.conversion.memory import MemoryWatch, fitting_workers, give_back_at_once
from penstock.conversion.one_bag import Job, Outcome
from penstock.conversion.plan import Plan as PlannedBag
from penstock.conversion.plan import plan_bag
from penstock.conversion.ray_engine import RayCluster
from penstock.conversion.recordings import Recording, fingerprint, look_at, size_of
from penstock.conversion.report import Report
from penstock.conversion.request import Paths, Request, make_request
from penstock.conversion.workers import run_jobs
from penstock.core.interrupt import check_stop, interruptible, not_stopped
from penstock.dataset.check import check
from penstock.dataset.layout import INFO_PATH, Feature
from penstock.dataset.metadata import read_info
from penstock.dataset.plan import BUILT, CLAIMS, Built, Plan, check_same
from penstock.dataset.unit import RECORD, UnitRecord, make_key, write_failure_note
from penstock.dataset.writer import DatasetWriter, read_plan
from penstock.errors import DataError, PenstockError, StorageError, UsageError
from penstock.ui.progress import Progress

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
        out: The folder of the dataset, here or in object storage (s3://bucket/folder).
        map: A mapping, or its YAML file; None guesses one from what the bags have in common.
        settings: See `make_request`: memory, workers, progress, resume, codec, ….

    Raises:
        PenstockError: Nothing could be converted; bags that fail one by one are in the report.

    Example:
        report = penstock.convert("bags/", "dataset", memory="512MB")
        print(report.frames_out, report.failed)
    """
    return run_request(make_request(bags, out, map, **settings))


def run_request(request: Request) -> Report:
    """Convert; a signal stops it at the next message, and what is done is kept."""
    give_back_at_once()
    return interruptible(lambda: _run(request))


def _run(request: Request) -> Report:
    start_s = time.perf_counter()
    report = Report(request.target, request.mapping, shard=request.shard, unused=request.unused)
    report.left_out = request.left_out
    report.memory_limit_bytes = request.memory_bytes
    with MemoryWatch() as watch:
        with request.opened:
            if request.shard is None:
                _make_dataset(request, report)
            else:
                _make_shard(request, report)
        report.wall_s = time.perf_counter() - start_s
        if request.check and request.shard is None:
            if request.remote is not None:
                request.remote.fetch_all()
            size_bytes = size_of(request.out)
            with Progress(size_bytes, "check", "bytes", request.progress) as progress:
                checkup = check(request.out, "sample", progress)
                progress.update(size_bytes)  # metadata
            report.findings, report.checked = checkup.findings, checkup.checked
            report.training = checkup.notes
    report.peak_bytes, report.memory = watch.peak_bytes, watch.samples
    if request.ray is not None:  # the limit is that of each bag, wherever it was converted
        report.peak_bytes = max((bag.peak_bytes for bag in report.bags), default=0)
    return report


def _make_dataset(request: Request, report: Report) -> None:
    recordings = look_at(request.bags)
    with _open_writer(request, recordings) as writer:
        try:
            _make_units(request, writer, recordings, report)
        except KeyboardInterrupt as stop:
            with not_stopped():
                writer.build()  # a dataset can be had at any time
            done = len(report.bags) + len(report.skipped)
            stop.args = (
                f"{done} of {len(request.bags)} bags are in {request.target}; go on with --resume",
            )
            raise
        if writer.total_episodes == 0:
            reasons = list(report.failed.values())
            more = f" (and {len(reasons) - 1} more bags failed)" if len(reasons) > 1 else ""
            raise DataError(f"nothing was converted: {reasons[0] if reasons else 'no bag'}{more}")
        try:
            writer.build()
        except KeyboardInterrupt as stop:
            stop.args = ("every bag is made; go on with --resume",)
            raise
        writer.clear_units()
        report.total_episodes, report.total_frames = writer.total_episodes, writer.total_frames


def _make_units(
    request: Request, writer: DatasetWriter, recordings: Sequence[Recording], report: Report
) -> None:
    """Make the units of all bags that are not in the dataset."""
    done, partly = _done_before(writer.committed)
    writer.position_of([each.fingerprint for each in recordings])
    first: dict[str, Path] = {}
    todo: list[Recording] = []
    taken = {str(source.get("bag")) for source in writer.committed}
    for each in recordings:
        known, path = each.fingerprint, each.path
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
            todo.append(each)
        first.setdefault(known, path)
    units = _UnitMaker(request, writer.plan, report, len(todo))
    if request.ray is None:
        units.make(todo, map(units.job, todo))
        return
    with RayCluster(request.ray) as cluster:
        report.workers = cluster.cpus
        longest_first = sorted(todo, key=lambda each: each.size_bytes, reverse=True)
        units.make(todo, map(units.job, longest_first), cluster=cluster)


def _done_before(sources: Iterable[dict[str, Any]]) -> tuple[set[str], dict[str, str]]:
    """Return the recordings that are in the dataset, and those of which only a part is, and why."""
    from_bags = [source for source in sources if "fingerprint" in source]
    counts = Counter(source["fingerprint"] for source in from_bags)
    # Earlier versions committed every episode of a bag by itself.
    parts = {source["fingerprint"]: source.get("parts", 1) for source in from_bags}
    partly = {
        known: f"an earlier version has put {count} of its {parts[known]} episodes into the "
        "dataset, and was stopped: convert it into a new one"
        for known, count in counts.items()
        if count < parts[known]
    }
    return set(counts) - set(partly), partly


def _open_writer(request: Request, recordings: Sequence[Recording]) -> DatasetWriter:
    """Open the dataset; a new one gets its plan at once, with all bags in their order."""
    joints = _joints_of(read_plan(request.out) if request.mode in ("resume", "append") else None)
    features = _named_as_before(request, _features(request, joints))
    fitting_workers(request.mapping, features, request.memory_bytes, 1)
    return DatasetWriter(
        request.remote or request.out,
        features,
        request.mapping.fps,
        request.mapping.robot_type,
        version=request.version,
        mode=request.mode,
        settings=_settings(request, joints),
        bags=[each.fingerprint for each in recordings],
    )


def _settings(request: Request, joints: Joints) -> dict[str, Any]:
    """Return what the plan keeps of the settings."""
    named = [[topic, name, list(names)] for (topic, name), names in joints.items()]
    return {"mapping": request.mapping.to_json(), "salvage": request.salvage, "joints": named}


def _joints_of(plan: Plan | None) -> Joints:
    """Return the joints of the dataset that goes on, as its settings keep them."""
    try:
        found = plan.settings.get("joints", []) if plan else []
        return {(str(t), str(f)): tuple(map(str, names)) for t, f, names in found}
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"the plan: its joints make no sense ({error})") from error


def _features(request: Request, joints: Joints) -> dict[str, Feature]:
    """Return the features that the first usable bag gives, and add its joints to those known."""
    first: PenstockError | None = None
    for path in request.bags:
        try:
            bag = request.opened.open(path)
            plan = _index_plan(bag, request.mapping)
            features = describe(bag, request.mapping, plan, joints)
            joints |= plan.joints
            return features
        except DataError as error:
            first = first or error
    assert first is not None
    raise first


def _index_plan(bag: Bag, mapping: Mapping) -> PlannedBag:
    """Plan a bag for its features, which its header stamps do not change: these are read once."""
    if mapping.clock == "header":
        with suppress(DataError):
            plan = plan_bag(bag, replace(mapping, clock="bag"))
            plan.episodes.clear()  # by the other clock, they tell nothing
            return plan
    return plan_bag(bag, mapping)


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


class _UnitMaker:
    """Makes units of recordings as a plan wants them, and reports them.

    Args:
        request: What the user asks for.
        plan: Of the dataset; has all of the recordings.
        report: Gets what came of each.
        bags: How many there are to do.
    """

    def __init__(self, request: Request, plan: Plan, report: Report, bags: int) -> None:
        self._request, self._report = request, report
        self._features = dict(plan.spec.features)
        self._joints = _joints_of(plan)
        self._positions = {known: position for position, known in enumerate(plan.bags)}
        self._settings = (
            request.mapping.to_json(),
            {name: feature.to_json() for name, feature in self._features.items()},
        )
        self._workers = 1  # on a cluster the memory is that of each bag
        if request.ray is None:
            wanted = min(request.workers, max(bags, 1))
            self._workers = fitting_workers(
                request.mapping, self._features, request.memory_bytes, wanted
            )
        report.workers = self._workers

    def key(self, recording: Recording) -> str:
        """Return the key of the unit that a recording becomes."""
        return make_key(recording.fingerprint, *self._settings)

    def job(self, recording: Recording) -> Job:
        """Return what a worker needs to make it."""
        source = {
            "bag": recording.path.name,
            "fingerprint": recording.fingerprint,
            "size_bytes": recording.size_bytes,
        }
        position = self._positions[recording.fingerprint]
        return Job(
            recording.path,
            self._request.mapping,
            self._features,
            self._request.units,
            UnitRecord(self.key(recording), position, source, []),
            self._request.memory_bytes // self._workers,
            self._request.salvage,
            self._joints,
        )

    def make(
        self,
        todo: Sequence[Recording],
        jobs: Iterable[Job],
        finished: Callable[[str], None] = lambda key: None,
        cluster: RayCluster | None = None,
    ) -> None:
        """Convert, and report in the order of `todo`, whichever was done first."""
        request = self._request
        sizes = {each.path: each.size_bytes for each in todo}
        outcomes: dict[Path, Outcome] = {}
        try:
            with Progress(sum(sizes.values()), "convert", "bytes", request.progress) as progress:
                meter = _Meter(progress, len(todo), cluster)
                if cluster is None:
                    done = run_jobs(jobs, self._workers, meter, request.opened)
                else:
                    done = cluster.run_jobs(jobs, request.memory_bytes, meter)
                with closing(done):
                    for job, outcome in done:
                        if isinstance(outcome, StorageError):
                            raise outcome  # the disk is full: no other bag will fare better
                        key, failed = job.record.key, isinstance(outcome, PenstockError)
                        if isinstance(outcome, PenstockError):
                            write_failure_note(job.units, key, job.record.source, str(outcome))
                        elif len(outcomes) > _DETAILED:
                            outcome = replace(outcome, previews={}, skew_ms={})
                        finished(key)
                        outcomes[job.bag] = outcome
                        meter.finished(sizes[job.bag], failed)
        finally:
            for path, outcome in ((p, outcomes[p]) for p in sizes if p in outcomes):
                if isinstance(outcome, PenstockError):
                    self._report.failed[path] = str(outcome).removeprefix(f"{path}: ")
                else:
                    self._report.add(outcome)


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
        """Count a bag that is done."""
        self._done_bytes += size_bytes
        self._read_bytes = 0
        self._done += 1
        self._failed += failed
        self(0, 0)


def _make_shard(request: Request, report: Report) -> None:
    """Make the units of one part of the bags; whoever comes first makes the plan for all."""
    own = look_at(request.own_bags)
    report.copies = _copies(request, own)
    todo = [each for each in own if each.path not in report.copies]
    with Claims(request.out / CLAIMS) as claims:
        plan = _agreed_plan(request, claims, {each.fingerprint for each in todo})
        planned = set(plan.bags)
        missing = next((each.path for each in todo if each.fingerprint not in planned), None)
        if missing is not None:
            raise UsageError(
                f"{missing} is not in the plan of {request.target}, which has {len(plan.bags)} "
                "bags: give every shard the same bags, or add bags with --append"
            )
        units = _UnitMaker(request, plan, report, len(todo))
        committed = _Committed(request)

        def free(bags: Sequence[Recording], others: list[Recording]) -> Iterator[Job]:
            """Yield what nobody makes or has made, and collect what others are making."""
            for each in bags:
                key = units.key(each)
                if key not in committed and not claims.take(key):
                    others.append(each)
                elif key in committed:
                    report.skipped.append(each.path)
                else:
                    yield units.job(each)

        while todo:
            others: list[Recording] = []
            try:
                units.make(todo, free(todo, others), claims.release)
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


def _copies(request: Request, own: Sequence[Recording]) -> dict[Path, Path]:
    """Return which bags are copies of others that come before them, as all shards see it."""
    known = {each.path: each.fingerprint for each in own}
    own_paths = set(known)
    alike: dict[int, list[Path]] = {}
    found: dict[Path, Path] = {}
    for path in request.bags:
        before = alike.setdefault(size_of(path), [])
        for other in before if path in own_paths else ():
            if other not in known:
                known[other] = fingerprint(other)
            if known[other] == known[path]:
                found[path] = other
                break
        before.append(path)
    return found


def _agreed_plan(request: Request, claims: Claims, wanted: set[str]) -> Plan:
    """Return the plan that all shards go by, and make it if nobody has."""

    def stored() -> Plan | None:
        plan = read_plan(request.out)
        lacks_some = plan is not None and not wanted.issubset(plan.bags)
        return None if request.mode != "create" and lacks_some else plan

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
                recordings = look_at(request.bags)
                with _open_writer(request, recordings) as writer:
                    writer.position_of([each.fingerprint for each in recordings])
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

    def __init__(self, request: Request) -> None:
        self._out, self._units = request.out, request.units
        self._built: set[str] = set()
        self._read_at: tuple[int, int] | None = None

    def __contains__(self, key: str) -> bool:
        if (self._units / key / RECORD).is_file():
            return True
        with suppress(FileNotFoundError):
            found = (self._out / BUILT).stat()
            if self._read_at != (found.st_mtime_ns, found.st_ino):
                built = Built.read(self._out)
                self._built = {unit.key for unit in built.units} if built else set()
                self._read_at = found.st_mtime_ns, found.st_ino
        return key in self._built
