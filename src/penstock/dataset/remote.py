"""A dataset in object storage, and the folder of this machine that stands for it.

The folder has plan, records and metadata in full; rows and pictures have their names and sizes,
and their content once it is fetched. A build works on the folder, and then goes to the storage:

```
.penstock/units/<key>/…      a unit, complete once its unit.json is there
.penstock/new/…              files of a build on their way into the dataset
.penstock/new.json           what is to become of them: from here on the build is done
```
A first build puts its files in their places, info.json last. Later ones replace files: they are
put aside until all of them and new.json are there, and then copied by the storage. Whoever opens
the dataset next completes that, or forgets what has no new.json. There are no locks in object
storage: one process may build at a time; units may be made by any number.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from typing_extensions import Self

from penstock.core.files import make_folder, storage_error, sweep, temporary_path
from penstock.core.threads import parallel_map
from penstock.dataset.layout import INFO_PATH, PRIVATE_FOLDER
from penstock.dataset.plan import LOCK_NAME, PLAN, UNITS
from penstock.dataset.unit import MALFORMED, RECORD, parse_json
from penstock.errors import CorruptFile
from penstock.objects import ObjectFile, ObjectPath

_NEW = f"{PRIVATE_FOLDER}/new"
_MANIFEST = f"{PRIVATE_FOLDER}/new.json"
_PARTS = ("data/", "videos/", "meta/")  # of a LeRobot dataset
_MOST_BYTES = 1 << 30  # of a file of metadata
_BUFFER_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 20  # of a file that is read by ranges
_AT_ONCE = 16  # most of their time requests wait for the storage
T = TypeVar("T")


class RemoteDataset:
    """A dataset in object storage; a context manager, which removes what stands for it here.

    If it may be changed, an interrupted build is completed.

    Attributes:
        url: Where it lies.
        units: Where its units are committed.
        folder: What stands for it here.
    """

    def __init__(self, url: ObjectPath, changes: bool = True) -> None:
        self.url, self.units, self._changes = url, url / UNITS, changes
        temporary = Path(tempfile.gettempdir())
        sweep(temporary)  # what a kill left
        scratch = temporary_path(temporary)
        self.folder = scratch / "dataset"
        try:
            scratch.mkdir(mode=0o700)
            self.folder.mkdir()
        except OSError as error:
            raise storage_error("create", scratch, error) from error
        self._closing = weakref.finalize(self, _remove, scratch, os.getpid())
        self._sizes: dict[str, int] = {}  # what is in the storage
        # Files here that are there have times that no new file has: those stay with them when they
        # are moved, linked or copied.
        self._origin: dict[int, str] = {}
        self._absent: set[int] = set()  # those whose content is not here
        self._ranged: dict[Path, _Blocks] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        try:
            self.pull()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pull(self) -> None:
        """See what is there, complete an interrupted build, and let the folder stand for it."""
        self._sizes = self._list()
        if _MANIFEST in self._sizes and self._changes:
            self._complete()
            self._sizes = self._list()
        elif self._changes and any(name.startswith(f"{_NEW}/") for name in self._sizes):
            (self.url / _NEW).delete_folder()
        # Without info.json it is what an interrupted first build has left.
        aside = (f"{_NEW}/", f"{UNITS}/", *(_PARTS if INFO_PATH not in self._sizes else ()))
        self._bring(name for name in self._sizes if not name.startswith(aside))
        self.pull_units()

    def pull_units(self) -> None:
        """Take over the units that were committed since."""
        found = self._list(UNITS)
        whole = {name.removesuffix(RECORD) for name in found if name.endswith(f"/{RECORD}")}
        self._sizes |= found
        new = []
        for name in found:
            is_new = not (self.folder / name).exists()
            if is_new and (name.count("/") == 2 or f"{name.rpartition('/')[0]}/" in whole):
                new.append(name)
        self._bring(sorted(new, key=lambda name: name.endswith(f"/{RECORD}")))

    def fetch(self, paths: Iterable[Path]) -> None:
        """Bring the content of files that only have their names here."""
        wanted = {}
        for path in paths:
            mark = path.stat().st_mtime_ns
            if mark in self._absent:
                wanted[mark] = path

        def download(mark: int) -> None:
            (self.url / self._origin[mark]).download(wanted[mark])
            os.utime(wanted[mark], ns=(mark, mark))

        _each(download, list(wanted))
        self._absent -= set(wanted)

    def fetch_all(self) -> None:
        """Bring the content of everything."""
        self.fetch(_files(self.folder))

    def open(self, path: Path) -> BinaryIO:
        """Open a file of the folder, whose content comes by ranges as it is read.

        What was read stays in the folder, so memory and traffic are bounded by what is looked at.
        """
        with self._lock:
            mark = path.stat().st_mtime_ns
            if mark not in self._absent:
                return path.open("rb")
            if path not in self._ranged:
                self._ranged[path] = _Blocks(path, self.url / self._origin[mark])
            blocks = self._ranged[path]
        return cast("BinaryIO", io.BufferedReader(_RangedFile(blocks), _BUFFER_BYTES))

    def push(self, *names: str) -> None:
        """Put small files of the folder into the storage, or remove them where they are gone."""
        for name in names:
            path = self.folder / name
            if path.exists():
                (self.url / name).upload(path)
                self._sizes[name] = path.stat().st_size
            elif name in self._sizes:
                (self.url / name).delete()
                del self._sizes[name]

    def push_build(self, built: set[str]) -> None:
        """Put the LeRobot files of the folder, which hold these units, into the storage."""
        aside = (f"{UNITS}/", LOCK_NAME)
        local = {path.relative_to(self.folder).as_posix(): path for path in _files(self.folder)}
        local = {name: path for name, path in local.items() if not name.startswith(aside)}
        origin = {name: self._origin.get(path.stat().st_mtime_ns) for name, path in local.items()}
        changed = {name: path for name, path in local.items() if origin[name] != name}
        gone = [n for n in self._sizes if n.startswith(_PARTS) and n not in local]
        if INFO_PATH in self._sizes:
            _each(lambda name: self._put(changed[name], f"{_NEW}/{name}"), list(changed))
            manifest = json.dumps({"copy": _last(changed), "delete": gone})
            (self.url / _MANIFEST).write_bytes(manifest.encode())
            self._complete()
        else:
            _each(lambda name: (self.url / name).delete(), gone)
            *first, last = _last(changed)
            _each(lambda name: self._put(changed[name], name), first)
            self._put(changed[last], last)
        self._remove_units(built)
        for name, path in changed.items():
            self._mark(path, name, absent=path.stat().st_mtime_ns in self._absent)
        self._sizes |= {name: path.stat().st_size for name, path in local.items()}

    def close(self) -> None:
        """Remove the folder; also done for whoever forgets it."""
        for blocks in self._ranged.values():
            blocks.close()
        self._ranged.clear()
        self._closing()

    def _list(self, below: str = "") -> dict[str, int]:
        """Return the names and sizes of all objects: one call per thousand."""
        folder = self.url / below if below else self.url
        try:
            found = [path for path in folder.rglob("*") if path.is_file()]
        except FileNotFoundError:
            return {}
        return {path.relative_to(self.url): path.info.size for path in found}

    def _bring(self, names: Iterable[str]) -> None:
        """Make files of these names: metadata in full, the others of the right size."""
        small = []
        for name in names:
            path = self.folder / name
            if ".." in path.parts or not path.is_relative_to(self.folder):
                raise CorruptFile(f"{self.url} has an object of the name {name[:200]!r}")
            make_folder(path.parent)
            with path.open("wb") as file:
                file.truncate(self._sizes[name])
            self._mark(path, name, absent=True)
            is_small = self._sizes[name] < _MOST_BYTES
            if is_small and (name.startswith(("meta/", PLAN)) or name.endswith(".json")):
                small.append(path)
        self.fetch(small)

    def _mark(self, path: Path, name: str, absent: bool) -> None:
        """Note that a file is in the storage, under this name."""
        mark = (len(self._origin) + 1) * 1_000_000_000
        self._origin[mark] = name
        if absent:
            self._absent.add(mark)
        os.utime(path, ns=(mark, mark))

    def _put(self, path: Path, target: str) -> None:
        """Put a file into the storage; one that is there under another name is copied there."""
        mark = path.stat().st_mtime_ns
        if mark in self._absent:
            (self.url / self._origin[mark]).copy_to(self.url / target)
        else:
            (self.url / target).upload(path)

    def _complete(self) -> None:
        """Let the files of a build take their places; safe to repeat."""
        try:
            content = parse_json((self.url / _MANIFEST).read_bytes())
            copy, delete = list(map(str, content["copy"])), list(map(str, content["delete"]))
        except MALFORMED as error:
            raise CorruptFile(f"{self.url / _MANIFEST} is damaged ({error})") from error
        there = self._list(_NEW)
        # What is not there any more was copied, and then removed, by a run before.
        todo = [name for name in copy if f"{_NEW}/{name}" in there]

        def put(name: str) -> None:
            (self.url / f"{_NEW}/{name}").copy_to(self.url / name)

        _each(put, [name for name in todo if name != INFO_PATH])
        _each(lambda name: (self.url / name).delete(), delete)
        if INFO_PATH in todo:
            put(INFO_PATH)
        (self.url / _MANIFEST).delete()
        (self.url / _NEW).delete_folder()

    def _remove_units(self, built: set[str]) -> None:
        key_of = {n: Path(n).parts[2] for n in self._sizes if n.startswith(f"{UNITS}/")}
        keys = set(key_of.values())
        if keys <= built:
            self.units.delete_folder()
        else:
            _each(lambda key: (self.units / key).delete_folder(), sorted(keys & built))
        self._sizes = {n: self._sizes[n] for n, key in key_of.items() if key not in built}


def _each(work: Callable[[T], Any], items: Iterable[T]) -> None:
    for _ in parallel_map(work, items, name="storage", helpers=_AT_ONCE):
        pass


def _remove(folder: Path, owner: int) -> None:
    """Remove a folder, unless this is a forked child."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _last(names: Iterable[str]) -> list[str]:
    """Return names in the order in which they may appear: info.json is the last."""
    return sorted(names, key=lambda name: (name == INFO_PATH, name))


class _Blocks:
    """An object that is brought block by block into a file of this machine, from any thread."""

    def __init__(self, path: Path, url: ObjectPath) -> None:
        self.path, self.url = path, url
        self.size_bytes = path.stat().st_size
        self._here: set[int] = set()
        self._lock = threading.Lock()
        self._object: ObjectFile | None = None

    def bring(self, first: int, stop: int) -> None:
        """Make sure that these bytes are in the file: neighbouring blocks in one request."""
        with self._lock:
            blocks = range(first // _BLOCK_BYTES, -(-stop // _BLOCK_BYTES))
            missing = [block for block in blocks if block not in self._here]
            # Neighbours have the same difference to their place in the list.
            for _, run in groupby(enumerate(missing), lambda pair: pair[1] - pair[0]):
                wanted = [block for _, block in run]
                start = wanted[0] * _BLOCK_BYTES
                end = min((wanted[-1] + 1) * _BLOCK_BYTES, self.size_bytes)
                if self._object is None:
                    self._object = self.url.open_ranges()
                    if self._object.size_bytes != self.size_bytes:
                        raise CorruptFile(f"{self.url} was replaced meanwhile: open it again")
                data = self._object.read(start, end - start)
                mark = self.path.stat().st_mtime_ns
                with self.path.open("r+b") as file:
                    file.seek(start)
                    file.write(data)
                os.utime(self.path, ns=(mark, mark))
                self._here.update(wanted)

    def close(self) -> None:
        if self._object is not None:
            self._object.close()


class _RangedFile(io.FileIO):
    """A reader of such a file, with a position of its own."""

    def __init__(self, blocks: _Blocks) -> None:
        super().__init__(blocks.path)
        self._blocks, self.name = blocks, str(blocks.url)

    def readinto(self, buffer: Any) -> int:
        """Read on from the position, at most four blocks at once."""
        first = self.tell()
        with memoryview(buffer).cast("B") as view:
            stop = min(first + min(view.nbytes, 4 * _BLOCK_BYTES), self._blocks.size_bytes)
            self._blocks.bring(first, stop)
            return super().readinto(view[: max(stop - first, 0)]) or 0

    def readall(self) -> bytes:
        """Read the rest."""
        self._blocks.bring(self.tell(), self._blocks.size_bytes)
        return super().readall()
