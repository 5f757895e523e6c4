"""Which files are bags, and which reader opens them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from penstock.bags.limits import Limits
from penstock.bags.reader import Bag
from penstock.bags.source import ZSTD_MAGIC
from penstock.core.files import storage_error
from penstock.errors import DataError, UnknownFormat
from penstock.objects import ObjectPath, as_object, is_object

_MAGICS = {b"#ROSBAG": "bag", b"\x89MCAP": "mcap", b"SQLite format 3\0": "db3"}

_FILE_NAME = re.compile(r".*\.(bag|bag\.active|db3|mcap|db3\.zstd|mcap\.zstd)")
_OBJECT_NAME = re.compile(r"[^.].*\.(bag|mcap)")
_PART_NAME = re.compile(r".*\.(db3|mcap|db3\.zstd|mcap\.zstd)")
METADATA = "metadata.yaml"


def natural_key(path: Path) -> list[tuple[bool, int, str]]:
    """Order names as people do: take_2 before take_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def open_bag(
    path: Path | str,
    *,
    salvage: bool = False,
    limits: Limits | None = None,
    scratch: Path | None = None,
) -> Bag:
    """Open a recording of any kind.

    Args:
        path: A .bag, .bag.active, .db3 or .mcap file, one of the latter two compressed as .zstd,
            or the folder of a ROS 2 bag, with or without its metadata.yaml. Several split files
            are one bag.
        salvage: Read what can be read of a damaged bag; see `Bag.salvage` for what was found.
        limits: What the bag may ask for; None for the defaults. See `Limits.for_memory`.
        scratch: Where temporary files go for as long as it is open: a bag that is compressed as a
            whole, decompressed, and what `Bag.header_stamps` keeps; None for the system's folder.

    Raises:
        UnknownFormat: It is no bag.
        CorruptFile: It is damaged; the message says whether `salvage` may help.
        LimitExceeded: It asks for more than the limits.
    """
    path, limits = to_path(path), limits or Limits()
    kind = "folder" if path.is_dir() else _kind(path)
    if kind == "bag":
        from penstock.bags.ros1 import Ros1Bag

        return Ros1Bag(path, limits, salvage, scratch)
    if kind == "mcap":
        from penstock.bags.mcap import McapBag

        return McapBag(path, limits, salvage, scratch)
    if kind != "folder" and as_object(path) is not None:
        raise DataError(f"{path}: .bag and .mcap are read from object storage; copy it to a disk")
    if kind == "db3":
        from penstock.bags.sqlite import SqliteBag

        return SqliteBag(path, limits, salvage, scratch)
    from penstock.bags.folder import JoinedBag, folder_parts

    parts = folder_parts(path, salvage) if kind == "folder" else [path]
    return JoinedBag(path, parts, limits, salvage, scratch)


def find_bags(paths: Sequence[Path | str]) -> list[Path]:
    """Return the bags among files and folders, in natural order, each once.

    A folder is either a ROS 2 bag or a folder of bags (files and ROS 2 bag folders). The folders in
    it hold what they hold when they are named themselves; it is not searched any deeper.

    Raises:
        DataError: A path does not exist, or holds no bag.
    """
    found: dict[Path, Path] = {}
    for path in map(to_path, paths):
        here = _bags_in(path)
        if not here:
            raise DataError(f"{path} holds no bag (.bag, .db3, .mcap or a ROS 2 bag folder)")
        for bag in here:
            found.setdefault(bag.resolve(), bag)
    if not found:
        raise DataError("no bag was given; pass files or folders of .bag, .db3 or .mcap")
    return sorted(found.values(), key=natural_key)


def to_path(path: Path | str) -> Path:
    """Return a path of this machine, or of object storage, which is read like one."""
    if isinstance(path, str) and is_object(path):
        return cast(Path, ObjectPath(path))
    return cast(Path, path) if as_object(path) is not None else Path(path)


def parts_of(folder: Path) -> list[Path]:
    """Return the database files in a folder, in natural order; the uncompressed of twins."""
    names = [p for p in _entries(folder) if p.is_file() and _PART_NAME.fullmatch(p.name)]
    plain = {p.name for p in names}
    return [p for p in names if p.suffix != ".zstd" or p.stem not in plain]


def is_split(names: Sequence[str], stem: str) -> bool:
    """Tell whether files are named as a recorder names the parts of one bag: take_0, take_1, …."""
    bare = sorted(name.partition(".")[0] for name in names)
    return len(names) > 1 and bare == sorted(f"{stem}_{number}" for number in range(len(names)))


def _bags_in(path: Path) -> list[Path]:
    try:
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise DataError(f"{path} does not exist; check the path")
    except OSError as error:
        raise storage_error("read", path, error) from error
    remote = as_object(path)
    if remote is not None:
        return _objects_in(remote)
    if _is_bag(path):
        return [path]
    found = _files_in(path)
    for entry in _entries(path):
        if entry.is_dir() and not entry.name.startswith("."):
            files = _files_in(entry)
            one = len(files) == 1 and parts_of(entry)  # a ROS 2 bag without its metadata.yaml
            found += [entry] if one or _is_bag(entry) else files
    return found


def _is_bag(folder: Path) -> bool:
    """Tell whether a folder is one bag: its recorder says so, or was killed and named the parts."""
    return (folder / METADATA).is_file() or is_split(
        [part.name for part in parts_of(folder)], folder.name
    )


def _files_in(folder: Path) -> list[Path]:
    """Return the files of a folder that are bags by their names."""
    files = (entry for entry in _entries(folder) if entry.is_file())
    return [f for f in files if _FILE_NAME.fullmatch(f.name) and not f.name.startswith(".")]


def _objects_in(folder: ObjectPath) -> list[Any]:
    """Return the bags in a folder of object storage, by one listing."""
    found = [entry for entry in folder.iterdir() if entry.is_file()]
    if any(entry.name == METADATA for entry in found):
        raise DataError(f"{folder} is a ROS 2 bag of several files: copy it to a disk")
    return [entry for entry in found if _OBJECT_NAME.fullmatch(entry.name)]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=natural_key)
    except OSError as error:
        raise storage_error("read", folder, error) from error


def _kind(path: Path) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise storage_error("read", path, error) from error
    for magic, kind in _MAGICS.items():
        if head.startswith(magic):
            return kind
    if head.startswith(ZSTD_MAGIC) and path.suffix == ".zstd":
        return "zstd"
    what = "is empty" if not head else "is not a bag"
    raise UnknownFormat(f"{path}: it {what}; .bag (2.0), .db3 and .mcap files can be read")
