"""A folder that grows by segments and changes only by one atomic rename.

`replay.pack` is the manifest: the state, and the ordered list of the segments that belong to it,
each with its digest. Segments are published first, the manifest after them, and only then are the
files removed that it no longer lists. So whenever the process dies, the last manifest and all of
its segments are there; what else lies in the folder is swept by the next writer.

`save_blocks` saves a buffer that is in use: what it holds is cut into blocks, and a save writes
only those that no segment holds as they are now.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.files import TEMPORARY_PREFIX, FolderLock, make_folder, storage_error, sweep
from penstock.core.pack import Item, PackReader, PackWriter
from penstock.errors import CorruptFile, DataError, StorageError, UnknownFormat, UsageError

MANIFEST = "replay.pack"
KIND = "replay"
SEGMENT_KIND = "replay-segment"
_SEGMENT = re.compile(r"segment_([0-9]{6,18})\.pack")
_SEGMENT_BYTES = 64 << 20
_MOST_SEGMENTS = 48
_SPARE_ROUNDS = 8  # for what other threads change while a save is under way
_NONSENSE = (LookupError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError)


def need(condition: Any, problem: str) -> None:
    """Refuse what is read, unless a condition holds."""
    if not condition:
        raise CorruptFile(f"this makes no sense: {problem}")


@contextmanager
def taking_in(what: object, *nonsense: type[Exception]) -> Iterator[None]:
    """Turn whatever a state that was not made here raises into a DataError that names it."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{what} cannot be loaded: {error}") from error
    except _NONSENSE + nonsense as error:
        raise CorruptFile(f"{what} cannot be loaded: it makes no sense ({error!r})") from error


def open_pack(path: Path, kind: str, what: str) -> PackReader:
    """Open a pack of some kind; close it yourself. `what` it is stands in messages."""
    try:
        pack = PackReader(path)
    except (FileNotFoundError, NotADirectoryError):
        problem = f"{path.parent} holds no {what}: there is no {path.name}"
        raise UnknownFormat(problem) from None
    except OSError as error:
        raise storage_error("read", path, error) from error
    if pack.index.kind != kind:
        pack.close()
        raise UnknownFormat(f"{path} is a {pack.index.kind!r}, not a {what}")
    return pack


class LogReader(ExitStack):
    """What was committed last, for reading. Nothing it returns was not verified.

    No lock is taken: a writer may commit meanwhile. A segment that it removed is then reported as
    such, and reading once more gives the new state. A log of another holder is refused.

    Attributes:
        state: What `commit` was given; alike `segments`, and `names`, of its own arrays.
        digest: Identifies this very commit; see `SegmentLog.digest`.
    """

    def __init__(self, folder: Path | str, holder: str | None = None) -> None:
        super().__init__()
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        self._pack = self.enter_context(open_pack(path, KIND, "saved replay"))
        self.digest, self.names = self._pack.index.digest, self._pack.names
        try:
            with taking_in(path):
                self._read(self._pack.index.meta)
            if holder not in (None, self.holder):
                raise UnknownFormat(
                    f"{folder} was saved by {self.holder!r}, not by {holder!r}; load it with what "
                    "wrote it"
                )
        except BaseException:
            self.close()
            raise

    def _read(self, meta: Mapping[str, Any]) -> None:
        self.holder, self.next = str(meta["holder"]), int(meta["next"])
        self.state: dict[str, Any] = meta["state"]
        self.digests = {str(one["name"]): str(one["digest"]) for one in meta["segments"]}
        self.segments = list(self.digests)
        whole = isinstance(self.state, dict) and len(self.digests) == len(meta["segments"])
        # A name from a file never leaves the folder of that file.
        need(whole and all(map(_SEGMENT.fullmatch, self.digests)), "its list of segments")

    def item(self, name: str) -> NDArray[Any]:
        """Read one of the manifest's own arrays."""
        if name not in self._pack.index.entries:
            raise CorruptFile(f"{self._pack.path} is damaged: it holds no {name!r}")
        return self._pack.read(name)

    def ints(self, *names: str) -> list[NDArray[np.int64]]:
        """Read tables of numbers, all with one number per block."""
        tables = {name: self.item(name) for name in names}
        (size,) = {table.size for table in tables.values()}
        for name, table in tables.items():
            need(table.dtype == np.int64 and table.shape == (size,), f"its table {name!r}")
        segment = tables.get("segment", np.empty(0))
        need(((segment >= 0) & (segment < len(self.digests))).all(), "a block is in no segment")
        return list(tables.values())

    def open_segment(self, name: str) -> PackReader:
        """Open a segment and check that it is the file that was committed; close it yourself."""
        if name not in self.digests:
            raise UsageError(f"{self.folder} lists no segment {name!r}")
        path = self.folder / name
        try:
            segment = PackReader(path)
        except FileNotFoundError:
            with LogReader(self.folder) as now:
                if now.digest != self.digest:
                    raise StorageError(
                        f"{self.folder} was saved again while it was read; load it once more"
                    ) from None
            raise CorruptFile(
                f"{path} is missing, and {MANIFEST} needs it; put it back, or use another copy"
            ) from None
        except UnknownFormat as error:
            raise CorruptFile(f"{path} is damaged: {error}") from error
        except OSError as error:
            raise storage_error("read", path, error) from error
        if segment.index.digest != self.digests[name] or segment.index.kind != SEGMENT_KIND:
            segment.close()
            raise CorruptFile(f"{path} is not the segment that {MANIFEST} was written with")
        return segment

    def verify(self) -> Iterator[tuple[str, str]]:
        """Decode everything in little memory; yield (file, problem) for whatever is wrong."""
        for tensor, problem in self._pack.verify():
            yield MANIFEST, f"{tensor}: {problem}"
        for name in self.segments:
            try:
                with self.open_segment(name) as segment:
                    for tensor, problem in segment.verify():
                        yield name, f"{tensor}: {problem}"
            except (DataError, StorageError) as error:
                yield name, str(error)


class SegmentLog(ExitStack):
    """The one writer of a log: in a new or empty folder, or in that of a log of the same holder.

    Closing it removes what was appended and never committed, and lets go of the folder. A folder
    that is refused was not changed.

    Attributes:
        digest: Identifies the committed manifest; "" before the first commit. Who saved here before
            compares it: if it differs, somebody else committed since, and the segments are theirs.
    """

    def __init__(self, folder: Path | str, holder: str = "replay") -> None:
        super().__init__()
        folder = Path(folder)
        self.folder, self._holder, self.digest = folder, holder, ""
        self._committed: dict[str, str] = {}
        self._appended: dict[str, str] = {}
        self._next, self._open = 0, True
        try:
            make_folder(folder)
            known = (folder / MANIFEST).exists()
            for name in [] if known else sorted(os.listdir(folder)):  # but for what a dead one left
                ours = _SEGMENT.fullmatch(name) or name.startswith(TEMPORARY_PREFIX)
                if not ours and name != ".penstock.lock":
                    raise UsageError(
                        f"{folder} holds something else ({name}); choose a new or empty folder"
                    )
        except OSError as error:
            raise storage_error("write", folder, error) from error
        self._lock = self.enter_context(FolderLock(folder))
        try:
            sweep(folder)  # it is the lock's holder who decides what is left over
            if (folder / MANIFEST).exists():
                with LogReader(folder) as reader:
                    if reader.holder != holder:
                        raise UsageError(
                            f"{folder} holds a replay saved by {reader.holder!r}, not by "
                            f"{holder!r}; choose another folder"
                        )
                    self._committed, self._next = reader.digests, reader.next
                    self.digest = reader.digest
            self._remove_unlisted()
        except BaseException:
            self.close()
            raise
        self.callback(self._end)

    @property
    def segments(self) -> list[str]:
        """Names in the committed manifest, in order."""
        return list(self._committed)

    def append(self, items: Sequence[Item], meta: dict[str, Any]) -> str:
        """Publish a segment, durably, and return its name; it counts when `commit` keeps it."""
        self._check_open()
        name = f"segment_{self._next:06d}.pack"
        self._next += 1
        with PackWriter(self.folder / name, kind=SEGMENT_KIND, meta=meta) as pack:
            pack.write(items)
        self._appended[name] = pack.index.digest
        return name

    def commit(
        self, state: dict[str, Any], items: Sequence[Item] = (), *, keep: Iterable[str]
    ) -> None:
        """Make a new state the log's own, atomically; then remove what it no longer needs.

        `items` are small arrays that belong to the state, `keep` the segments that it needs, in
        order. If the disk refuses, the last committed state stays.
        """
        self._check_open()
        known = self._committed | self._appended
        names = list(keep)
        missing = [name for name in names if name not in known]
        if missing or len(set(names)) != len(names):
            raise UsageError(f"{self.folder}: cannot keep {missing or names}: unknown or twice")
        kept = {name: known[name] for name in names}
        meta = {
            "holder": self._holder,
            "state": state,
            "segments": [{"name": name, "digest": digest} for name, digest in kept.items()],
            "next": self._next,
        }
        with PackWriter(self.folder / MANIFEST, kind=KIND, meta=meta) as pack:
            pack.write(items)
        self.digest = pack.index.digest
        self._committed, self._appended = kept, {}
        self._remove_unlisted()

    def _end(self) -> None:
        self._open = False
        self._remove_unlisted()

    def _remove_unlisted(self) -> None:
        try:
            names = os.listdir(self.folder)
        except OSError:  # the folder is gone: then there is nothing to remove
            return
        for name in names:
            if _SEGMENT.fullmatch(name) and name not in self._committed:
                with suppress(OSError):  # what stays is removed by the next writer
                    os.unlink(self.folder / name)

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError(f"{self.folder}: this log was closed; open it again")


class Block(NamedTuple):
    """What a buffer holds of one block now: its bytes, and what changes when the block does."""

    size: int
    version: Hashable = 0


class Place(NamedTuple):
    """Where a saved block lies: its segment, its place in there, and which version it is."""

    segment: str
    number: int
    version: Hashable = 0


@dataclass(frozen=True)
class Saved:
    """What the last save left in a folder: what the next one need not write again."""

    folder: Path
    digest: str  # of that very commit
    places: dict[int, Place] = field(default_factory=dict)  # of each block
    sizes: dict[str, int] = field(default_factory=dict)  # bytes that segments were written with


class Content(Protocol):
    """What `save_blocks` asks a buffer for, while it has the buffer's lock."""

    def blocks(self, some: Sequence[int] | None = None) -> Mapping[int, Block]:
        """Return all blocks there are, in order; or those of some that are still there."""

    def copy(self, blocks: Sequence[int]) -> list[Item]:
        """Return the content of blocks for a segment."""

    def state(self, blocks: Mapping[int, Block]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return all that is not in blocks: JSON, and tables."""


def save_blocks(
    content: Content,
    lock: threading.RLock,
    folder: str | os.PathLike[str],
    holder: str,
    saved: Saved | None,
) -> Saved:
    """Write the blocks that a folder lacks, then commit the state of one moment.

    Segments of which less than half lives are written anew, and the smaller half of them when there
    are many: so a folder is never much more than twice the buffer. The manifest gets two tables
    more, "segment" and "place": where each block lies. The lock of the buffer is held only while
    something is copied out of it. `saved` is what the last call returned, or None.
    """
    where = Path(folder)
    with SegmentLog(where, holder) as log:
        places: dict[int, Place] = {}
        sizes: dict[str, int] = {}

        def append(blocks: Mapping[int, Block], items: list[Item]) -> None:
            if not blocks:
                return
            name = log.append(items, {"blocks": len(blocks)})
            sizes[name] = sum(block.size for block in blocks.values())
            for number, (k, block) in enumerate(blocks.items()):
                places[k] = Place(name, number, block.version)

        with lock:
            blocks = content.blocks()
        # Only if nobody else has saved there since: the names of segments alone prove nothing.
        if saved and saved.folder == where.resolve() and saved.digest == log.digest:
            places.update(_worth_keeping(saved, blocks))
            sizes.update(saved.sizes)
        for some in _segments_of(_missing(blocks, places)):
            with lock:
                here = content.blocks(some)
                items = content.copy(list(here))
            append(here, items)
        # What others changed meanwhile, until nothing is missing, and at last all that is.
        for last in (*[False] * _SPARE_ROUNDS, True):
            with lock:
                blocks = content.blocks()
                missing = _missing(blocks, places)
                some = list(missing) if last else next(_segments_of(missing), [])
                items = content.copy(some)
                if complete := len(some) == len(missing):
                    state, tables = content.state(blocks)  # of this very moment
            append({k: blocks[k] for k in some}, items)
            if complete:
                break
        places = {k: places[k] for k in blocks}
        keep = sorted({place.segment for place in places.values()})
        numbers = {name: number for number, name in enumerate(keep)}
        tables["segment"] = np.array([numbers[p.segment] for p in places.values()], np.int64)
        tables["place"] = np.array([place.number for place in places.values()], np.int64)
        log.commit(state, [Item(name, values) for name, values in tables.items()], keep=keep)
        return Saved(where.resolve(), log.digest, places, {name: sizes[name] for name in keep})


def _worth_keeping(saved: Saved, blocks: Mapping[int, Block]) -> dict[int, Place]:
    """Return the places that are right, without segments that are mostly dead, or too many."""
    missing = _missing(blocks, saved.places)
    kept = {k: p for k, p in saved.places.items() if k in blocks and k not in missing}
    live = dict.fromkeys(saved.sizes, 0)
    for k, place in kept.items():
        live[place.segment] += blocks[k].size
    good = [name for name, size in live.items() if size and 2 * size >= saved.sizes[name]]
    if len(good) > _MOST_SEGMENTS:  # the smaller half becomes one: each block moves rarely
        good = sorted(good, key=live.__getitem__)[len(good) // 2 :]
    return {k: place for k, place in kept.items() if place.segment in good}


def _missing(blocks: Mapping[int, Block], places: Mapping[int, Place]) -> dict[int, Block]:
    return {
        k: block
        for k, block in blocks.items()
        if k not in places or places[k].version != block.version
    }


def _segments_of(blocks: Mapping[int, Block]) -> Iterator[list[int]]:
    """Yield blocks in groups of about one segment, each at least one."""
    some: list[int] = []
    total = 0
    for k, block in blocks.items():
        if some and total + block.size > _SEGMENT_BYTES:
            yield some
            some, total = [], 0
        some.append(k)
        total += block.size
    if some:
        yield some
