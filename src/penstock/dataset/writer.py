"""Make a LeRobot dataset: units are committed one by one, and the LeRobot files built from them.

A unit that was committed survives everything. `build` puts what is committed into the dataset, in
the order of the units' positions; until then the dataset is as it was before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from typing_extensions import Self

from penstock.core.files import FolderLock, make_folder, publish_bytes, storage_error, sweep
from penstock.dataset import metadata
from penstock.dataset.adopt import OLD_SETTINGS, adopt, journal_sources, spec_of
from penstock.dataset.build import build
from penstock.dataset.layout import (
    INFO_PATH,
    PRIVATE_FOLDER,
    VERSIONS,
    Feature,
    FileLimits,
    Spec,
    Version,
    check_name,
    own_features,
)
from penstock.dataset.plan import (
    CLAIMS,
    LOCK_NAME,
    PLAN,
    REPLACED_PLAN,
    REPLACED_UNITS,
    STATS_FOLDER,
    UNITS,
    Base,
    Built,
    Plan,
    check_fits,
    check_same,
)
from penstock.dataset.remote import RemoteDataset
from penstock.dataset.swap import settle, sibling
from penstock.dataset.tables import inside
from penstock.dataset.unit import (
    MALFORMED,
    RECORD,
    Episode,
    Unit,
    UnitRecord,
    UnitWriter,
    failure_name,
    file_digest,
    make_key,
    move_units,
    remove_unit,
)
from penstock.errors import SaverClosed, StorageError, UsageError
from penstock.media.video import VideoSettings
from penstock.objects import ObjectPath, is_object

Mode = Literal["create", "resume", "append", "overwrite"]
_FOLDERS = (LOCK_NAME, UNITS, REPLACED_UNITS, STATS_FOLDER)


def is_empty(root: Path) -> bool:
    """Whether a folder holds nothing but what an interrupted beginning leaves."""
    if any((root / name).exists() for name in (PLAN, OLD_SETTINGS)):
        return False
    if any((root / UNITS).glob(f"*/{RECORD}")):
        return False  # somebody lost the plan, but not the work
    return all(entry.name in (LOCK_NAME, PRIVATE_FOLDER) for entry in root.iterdir())


def read_plan(root: Path | ObjectPath) -> Plan | None:
    """Read the plan of a dataset, of this version or an earlier one; None if it has none."""
    if isinstance(root, ObjectPath):
        return Plan.read(root / PLAN) if (root / PLAN).is_file() else None
    for name in (PLAN, OLD_SETTINGS):
        if (root / name).is_file():
            return Plan.read(inside(root, name))
    return None


def _begun_plan(root: Path, out: Path | str | ObjectPath | RemoteDataset) -> Plan:
    plan = read_plan(root)
    if plan is None:
        raise UsageError(f"{out} holds no units: convert recordings into it first")
    return plan


class DatasetWriter:
    """The one writer of a dataset.

    Args:
        out: The folder of the dataset; s3://bucket/folder or the like in object storage, or that
            opened by the caller, who then closes it.
        features: What every frame has; the five automatic features need not be named.
        fps: Frames per second.
        robot_type: Written into info.json.
        version: Of the format.
        mode: "create" a new dataset in an empty folder; "resume" one that was interrupted, with the
            same settings; "append" episodes to one that exists, of any making; "overwrite" one: the
            old stays in place until the first build.
        settings: JSON; stored, and compared on "resume".
        limits: How large files may grow.
        bags: The recordings of a new dataset by fingerprint, in their order; see `position_of`.

    Raises:
        LockHeld: Another process writes there.
        UsageError: The folder is not empty, no dataset, or does not fit the features.

    Example:
        with DatasetWriter("out", features, 30, "kuavo4pro", mode="resume") as writer:
            with writer.unit({"bag": "a.bag"}, [Episode(300, "pick")]) as unit:
                unit.add_rows(columns)
                unit.commit()
            writer.build()
    """

    def __init__(
        self,
        out: Path | str | ObjectPath | RemoteDataset,
        features: Mapping[str, Feature],
        fps: int,
        robot_type: str | None = None,
        *,
        version: Version = "v3.0",
        mode: Mode = "create",
        settings: Mapping[str, Any] | None = None,
        limits: FileLimits | None = None,
        bags: Sequence[str] = (),
    ) -> None:
        if version not in VERSIONS:
            raise UsageError(f"version {version!r} cannot be written: v3.0 or v2.1")
        if type(fps) is not int or not 0 < fps <= 1000:
            raise UsageError(f"fps must be a whole number of 1 to 1000, not {fps!r}")
        for name in features:
            check_name(name)
        own = own_features(features)
        if not own:
            raise UsageError("a dataset needs at least one feature")
        spec = Spec(own, fps, robot_type, version, limits or FileLimits())
        plan = Plan(spec, dict(settings or {}), list(dict.fromkeys(bags)))
        self._start(out, plan, mode)

    @classmethod
    def reopen(cls, out: Path | str | ObjectPath) -> Self:
        """Open a dataset that penstock has begun, to build what is committed.

        Raises:
            UsageError: There is none, or none of penstock's.
        """
        this = cls.__new__(cls)
        if not is_object(out):
            root = Path(os.path.realpath(str(out)))
            # Between the two renames of an exchange the dataset is beside its place.
            _begun_plan(root if root.is_dir() else sibling(root, "old"), out)
        this._start(out, None, "resume")
        return this

    def _start(
        self, out: Path | str | ObjectPath | RemoteDataset, given: Plan | None, mode: Mode
    ) -> None:
        self._stack = ExitStack()
        self._remote = out if isinstance(out, RemoteDataset) else None
        if is_object(out):
            self._remote = self._stack.enter_context(RemoteDataset(ObjectPath(str(out))))
        # A link to a dataset stays one.
        self.root = self._remote.folder if self._remote else Path(os.path.realpath(str(out)))
        self._lock = FolderLock(self.root, LOCK_NAME)
        self._closed = False
        self._opened: dict[str, Unit] = {}
        self._last: UnitWriter | None = None
        created = not self.root.exists()
        try:
            self._prepare()
            if given is None:
                self._restore()
            self.plan = self._open(given, mode) if given else _begun_plan(self.root, out)
            self._built = self._read_built()
            self._sweep_units()
            self._next = max([len(self.plan.bags), *(r.position + 1 for r in self.records)])
        except BaseException as error:
            self._lock.release()
            self._stack.close()
            if created:
                with suppress(OSError):
                    (self.root / LOCK_NAME).unlink()
                    self.root.rmdir()
            if isinstance(error, OSError):
                raise storage_error("open", self.root, error) from error
            raise

    @property
    def units(self) -> Path | ObjectPath:
        """The folder that units are committed to, by this process or any other."""
        return self.root / UNITS if self._remote is None else self._remote.units

    @property
    def records(self) -> list[UnitRecord]:
        """The units that are built or committed, in the order of their episodes."""
        found = [*self._built.units, *(unit.record for unit in self._waiting())]
        return sorted(found, key=lambda record: record.position)

    @property
    def built_units(self) -> int:
        """How many units are in the LeRobot files."""
        return len(self._built.units)

    @property
    def committed(self) -> list[dict[str, Any]]:
        """Where all episodes came from, as far as that is known, in their order."""
        return [*self._built.base.sources, *(record.source for record in self.records)]

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The notes of failures that no other try has mended: source and reason."""
        found = []
        mended = {failure_name(record.key) for record in self.records}  # brings the notes, too
        for path in sorted((self.root / UNITS).glob(failure_name("*"))):
            with suppress(OSError, *MALFORMED):
                if path.name not in mended and path.is_file():
                    note = json.loads(path.read_bytes())
                    found.append({"source": dict(note["source"]), "reason": str(note["reason"])})
        return found

    @property
    def total_episodes(self) -> int:
        """Episodes that are built or committed."""
        return self._built.base.episodes + sum(len(record.episodes) for record in self.records)

    @property
    def total_frames(self) -> int:
        """Frames that are built or committed."""
        return self._built.base.frames + sum(record.frames for record in self.records)

    def position_of(self, fingerprints: Sequence[str]) -> dict[str, int]:
        """Give recordings their places in the dataset: those that have one keep it.

        Args:
            fingerprints: Of recordings, in the order that new ones get.
        """
        self._check_open()
        bags = self.plan.bags
        known = set(bags)
        if new := dict.fromkeys(each for each in fingerprints if each not in known):
            # Units that were made without a fingerprint have their places, too.
            taken = [f"unit {number}" for number in range(len(bags), self._next)]
            bags = [*bags, *taken, *new]
            self._write_plan(replace(self.plan, bags=bags))
            self._next = len(bags)
        # A merged dataset may hold a recording twice: the first place is the one.
        return {each: place for place, each in reversed(list(enumerate(bags)))}

    def unit(
        self,
        source: Mapping[str, Any],
        episodes: Sequence[Episode],
        videos: Mapping[str, VideoSettings] | None = None,
    ) -> UnitWriter:
        """Begin a unit behind all others.

        Args:
            source: JSON that says where it comes from; see `committed`.
            episodes: Their lengths and tasks.
            videos: How each camera is stored.
        """
        self._check_open()
        if self._last is not None and self._last.free_position == self._next - 1:
            self._next -= 1
        position = self._next
        record = UnitRecord(make_key(source, position), position, dict(source), list(episodes))
        spec = self.plan.spec
        self._last = UnitWriter(self.units, record, spec.features, spec.fps, videos)
        self._next = position + 1
        return self._last

    def build(self) -> bool:
        """Put all that is committed into the LeRobot files.

        Returns:
            Whether there was anything to do.

        Raises:
            UsageError: A unit does not fit the dataset.
            StorageError: The disk refuses; the dataset is as before, and the units are kept.
        """
        self._check_open()
        settle(self.root)  # what an error behind an exchange left
        units = self._waiting()
        fetch = None
        if self._remote is not None:
            fetch = self._remote.fetch
            fetch(path for unit in units for path in unit.folder.iterdir())
        if not units:
            return False
        self._check_units(units)
        built, stats = self._built, None
        if built.base.info is not None and not built.units:
            if self._remote is not None:
                self._remote.fetch_all()
            base, stats = adopt(self.root, built.base.sources)
            built = replace(built, base=base)
        try:
            result = build(self.root, self.plan, built, units, stats, fetch)
            if self._remote is not None:
                self._remote.push_build({record.key for record in result.units})
        finally:
            # Also after an error: it may have come behind the exchange.
            self._lock.acquire()  # where there are no hard links, it is another file now
            self.plan = read_plan(self.root) or self.plan
            self._built = self._read_built()
            for record in self._built.units:
                self._opened.pop(record.key, None)
                self._next = max(self._next, record.position + 1)
        return True

    def clear_units(self) -> None:
        """Remove what workers of other machines left, once all recordings of the plan are built.

        Nobody here can tell whether they are dead: but whatever they make, it is there already.
        """
        known = {record.source.get("fingerprint") for record in self._built.units}
        if self.plan.bags and known.issuperset(self.plan.bags):
            shutil.rmtree(self.root / UNITS, ignore_errors=True)
            if self._remote is not None:
                self._remote.units.delete_folder()

    def close(self) -> None:
        """Let the folder go; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._restore()
            sweep(self.root / UNITS)  # of workers that died
        except OSError as error:
            raise storage_error("close", self.root, error) from error
        finally:
            self._lock.release()
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self) -> None:
        """Make the folder if it must be made, take its lock, and settle what a kill left."""
        if not self.root.exists() and sibling(self.root, "old").is_dir():
            settle(self.root)
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"{self.root} is a file; give a folder")
        # Before the work, not after it: the build makes a folder beside this one.
        if os.path.ismount(self.root):
            raise UsageError(f"{self.root} is a whole disk: give a folder on it")
        if self.root.exists() and not os.access(self.root.parent, os.W_OK):
            raise StorageError(
                f"cannot write {self.root.parent}: it is read-only, or not yours; a dataset is "
                "built beside the old one: give a folder where that can be"
            )
        make_folder(self.root)
        for name in _FOLDERS:
            inside(self.root, name)  # what is written or removed below them is ours
        self._lock.acquire()
        settle(self.root)

    def _open(self, given: Plan, mode: Mode) -> Plan:
        root = self.root
        if is_empty(root):
            for path in (root / PRIVATE_FOLDER).glob("*"):
                if path.is_dir() and path != root / CLAIMS:  # we may be one of many machines
                    shutil.rmtree(path, ignore_errors=True)
                elif path.is_file():
                    path.unlink()
            return self._write_plan(given)
        self._restore()
        if not any((root / name).is_file() for name in (INFO_PATH, PLAN, OLD_SETTINGS)):
            raise UsageError(f"{root} is not empty and no LeRobot dataset: choose another folder")
        if mode == "create":
            raise UsageError(
                f"{root} is not empty: --resume goes on, --append adds to it, --overwrite "
                "replaces it"
            )
        if mode == "overwrite" and self._remote is not None:
            url = self._remote.url
            raise UsageError(f"{url} is not empty: remove it first, or write to another folder")
        if mode == "overwrite":
            return self._overwrite(given)
        stored = read_plan(root)
        if stored is None:
            if mode == "resume":
                raise UsageError(f"{root} was not written by penstock: add to it with --append")
            found = spec_of(root)
            check_fits(root, found, given.spec)
            return self._write_plan(replace(given, spec=found))
        if mode == "resume":
            built = Built.read(root)
            if built.base.episodes if built else (root / INFO_PATH).is_file():
                # Limits and the like are those of the dataset that was added to.
                check_fits(root, stored.spec, given.spec)
                given = replace(given, spec=stored.spec)
            check_same(root, stored, given)
            if stored.settings == given.settings:
                return stored
        else:
            check_fits(root, stored.spec, given.spec)
        return self._write_plan(replace(stored, settings=given.settings))

    def _overwrite(self, given: Plan) -> Plan:
        """Begin anew; what is there stays until the first build replaces it."""
        plan, replaced = self.root / PLAN, self.root / REPLACED_PLAN
        if plan.is_file() and Plan.read(plan).replaces:
            shutil.rmtree(self.root / UNITS, ignore_errors=True)
        else:
            if plan.is_file():
                publish_bytes(replaced, plan.read_bytes())
            else:
                replaced.unlink(missing_ok=True)
            if (self.root / UNITS).is_dir():
                os.rename(self.root / UNITS, self.root / REPLACED_UNITS)
        return self._write_plan(replace(given, replaces=True))

    def _restore(self) -> None:
        """Where nothing came of overwriting, let the dataset have its plan and units again."""
        plan = read_plan(self.root)
        if plan is not None and plan.replaces:
            if self._unit_folders():
                return
            shutil.rmtree(self.root / UNITS, ignore_errors=True)
            if (self.root / REPLACED_PLAN).is_file():
                os.replace(self.root / REPLACED_PLAN, self.root / PLAN)
            else:
                (self.root / PLAN).unlink()
        if (self.root / REPLACED_UNITS).is_dir():
            move_units(self.root / REPLACED_UNITS, self.root / UNITS)

    def _write_plan(self, plan: Plan) -> Plan:
        make_folder(self.root / PRIVATE_FOLDER)
        publish_bytes(self.root / PLAN, plan.to_bytes())
        if self._remote is not None:
            self._remote.push(PLAN)
        self.plan = plan
        return plan

    def _read_built(self) -> Built:
        """Return what the LeRobot files hold; all is the base's if others changed them since."""
        built = None if self.plan.replaces else Built.read(self.root)
        if self.plan.replaces or not (built or (self.root / INFO_PATH).is_file()):
            return Built()
        info = metadata.read_info(self.root).raw
        episodes, frames = info["total_episodes"], info["total_frames"]
        if built is None:
            return Built(
                Base(episodes, frames, info=info, sources=journal_sources(self.root, episodes))
            )
        same = (episodes, frames) == (built.episodes, built.frames)
        for name, digest in built.files.items():
            if same and name.startswith(self.plan.spec.format.episodes):
                path = inside(self.root, name)
                same = path.is_file() and file_digest(path) == digest
        sources = [*built.base.sources, *(unit.source for unit in built.units)]
        return built if same else Built(Base(episodes, frames, info=info, sources=sources))

    def _unit_folders(self) -> list[Path]:
        if self._remote is not None:
            self._remote.pull_units()
        found = (path.parent for path in (self.root / UNITS).glob(f"*/{RECORD}"))
        return sorted(path for path in found if not path.name.startswith("."))

    def _waiting(self) -> list[Unit]:
        """Return the units that are committed and not built; they never change."""
        # A worker that did not know of the build may make one of these again.
        built = {record.key for record in self._built.units}
        folders = [path for path in self._unit_folders() if path.name not in built]
        for path in folders:
            if path.name not in self._opened:
                self._opened[path.name] = Unit.open(path)
        return [self._opened[path.name] for path in folders]

    def _sweep_units(self) -> None:
        """Remove what dead workers left, and units that are in the dataset already."""
        sweep(self.root)
        sweep(self.root / PRIVATE_FOLDER)
        shutil.rmtree(self.root / PRIVATE_FOLDER / "staging", ignore_errors=True)  # of format 1
        sweep(self.root / UNITS)
        for record in self._built.units if (self.root / UNITS).is_dir() else ():
            remove_unit(self.root / UNITS / record.key)

    def _check_units(self, units: Sequence[Unit]) -> None:
        """Refuse what does not fit the dataset, or each other."""
        spec = self.plan.spec
        infos = dict(self._built.infos)
        infos |= {key: spec.features[key].info or {} for key in spec.video_keys if key not in infos}
        places = {record.position: record.key for record in self._built.units}
        for unit in sorted(units, key=lambda unit: unit.record.position):
            try:
                if unit.fps != spec.fps:
                    raise UsageError(f"it has {unit.fps} fps, and the dataset {spec.fps}")
                other = places.setdefault(unit.record.position, unit.record.key)
                if other != unit.record.key:
                    raise UsageError(f"position {unit.record.position} is that of {other}")
                check_fits(self.root, spec, replace(spec, features=unit.features))
                for key in spec.video_keys:
                    infos[key] = infos[key] or unit.infos.get(key, {})
                    for name in ("video.codec", "video.height", "video.width"):
                        a, b = infos[key].get(name), unit.infos.get(key, {}).get(name)
                        if a is not None and a != b:
                            raise UsageError(f"{key!r}: {name} is {a} in the dataset, and {b} here")
                    stored = replace(spec.features[key], info=infos[key])
                    if not stored.same_coding(unit.infos.get(key)):
                        raise UsageError(f"{key!r} codes its distances in another way")
            except UsageError as error:
                raise UsageError(
                    f"{unit.folder} does not fit: {error}; remove it, or write to another folder"
                ) from error

    def _check_open(self) -> None:
        if self._closed:
            raise SaverClosed(f"{self.root}: this writer was closed already")
