"""ROS 2 bag folders: one or several files, in the order of their metadata.yaml, as one bag."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags.find import METADATA, open_bag, parts_of
from penstock.bags.limits import Limits
from penstock.bags.reader import Bag, Message, SalvageReport, Selection, join_topics
from penstock.core.codecs import zstd
from penstock.core.files import storage_error, sweep, temporary_path
from penstock.errors import CorruptFile, DataError, LimitExceeded

_METADATA_BYTES: Final = 4 * 10**6
_METADATA_NESTING: Final = 100
_PIECE_BYTES: Final = 1 << 20


class JoinedBag(Bag):
    """Several files that are one recording; ordinals go on from file to file.

    Files compressed as a whole are decompressed into a temporary folder, for as long as the bag
    is open. What a killed process left there is removed by the next one.
    """

    def __init__(
        self,
        path: Path,
        parts: Sequence[Path],
        limits: Limits,
        salvage: bool,
        scratch: Path | None = None,
    ) -> None:
        self.path, self.limits = path, limits
        self._scratch = scratch
        self._temporary: Path | None = None
        self._parts: list[Bag] = []
        self._compressed = any(part.suffix == ".zstd" for part in parts)
        try:
            for part in parts:
                plain = self._decompress(part) if part.suffix == ".zstd" else part
                self._parts.append(open_bag(plain, salvage=salvage, limits=limits, scratch=scratch))
        except BaseException:
            self.close()
            raise
        self.size_bytes = sum(part.stat().st_size for part in parts)
        self.kind = self._parts[0].kind
        self.topics = join_topics(topic for bag in self._parts for topic in bag.topics.values())
        used = [bag for bag in self._parts if bag.message_count]
        self.start_ns = min((bag.start_ns for bag in used), default=0)
        self.end_ns = max((bag.end_ns for bag in used), default=0)
        names = {name for bag in self._parts for name in bag.compression.split("+")}
        self.compression = "zstd" if self._compressed else "+".join(sorted(names))
        self.salvage = _join_reports([bag.salvage for bag in self._parts])

    def times(self, topic: str) -> NDArray[np.int64]:
        """Return the log times of a topic, in file order."""
        self.topic(topic)
        parts = [bag.times(topic) for bag in self._parts if topic in bag.topics]
        return np.concatenate(parts)

    def close(self) -> None:
        """Close the files and remove the temporary ones; safe to call twice."""
        super().close()
        for bag in self._parts:
            bag.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from the files so far."""
        return sum(bag.bytes_read for bag in self._parts)

    def _read(self, selection: Selection) -> Iterator[Message]:
        for bag, part, counts in self._shares(selection):
            yield from bag._checked(bag._read(part), part.expected(counts))

    def _has_near_heads(self, topics: Sequence[str]) -> bool:
        return all(
            bag._has_near_heads([topic for topic in topics if topic in bag.topics])
            for bag in self._parts
        )

    def _read_heads(self, selection: Selection, sizes: Mapping[str, int]) -> Iterator[Message]:
        for bag, part, _ in self._shares(selection):
            yield from bag._read_heads(part, sizes)

    def _shares(self, selection: Selection) -> Iterator[tuple[Bag, Selection, dict[str, int]]]:
        """Yield the files with what is wanted of each, and how many messages each holds."""
        for bag in self._parts:
            counts = {t: bag.topics[t].count for t in selection.topics if t in bag.topics}
            part = selection.part(counts)
            if part is not None:
                yield bag, part, counts

    def _decompress(self, path: Path) -> Path:
        """Write the decompressed file into the temporary folder; its growth is bounded."""
        try:
            if self._temporary is None:
                scratch = self._scratch or Path(tempfile.gettempdir())
                sweep(scratch)
                self._temporary = temporary_path(scratch)
                self._temporary.mkdir(mode=0o700)
            stored_bytes = path.stat().st_size
            most_bytes = max(self.limits.ratio_from_bytes, stored_bytes * self.limits.ratio)
            target = self._temporary / path.stem
            size_bytes = 0
            with path.open("rb") as file, target.open("xb") as out:
                reader = zstd.ZstdFile(file)
                while piece := reader.read(_PIECE_BYTES):
                    size_bytes += len(piece)
                    if size_bytes > most_bytes:
                        raise LimitExceeded(
                            f"{path}: it grows more than {self.limits.ratio}:1 when decompressed; "
                            "raise Limits.ratio if it is meant"
                        )
                    out.write(piece)
        except (zstd.ZstdError, EOFError) as error:
            raise CorruptFile(f"{path} cannot be decompressed ({error})") from error
        except OSError as error:
            raise storage_error("decompress into a temporary folder", path, error) from error
        return target


def folder_parts(path: Path, salvage: bool) -> list[Path]:
    """Return the files of a ROS 2 bag folder, with or without a metadata.yaml."""
    parts = _listed_parts(path, salvage) if (path / METADATA).is_file() else parts_of(path)
    if not parts:
        raise DataError(f"{path} is not a ROS 2 bag folder: it holds no .db3 or .mcap file")
    kinds = {part.name.removesuffix(".zstd").rpartition(".")[2] for part in parts}
    if len(kinds) > 1:
        raise DataError(f"{path} holds both .db3 and .mcap files; pass one of them")
    return parts


def _listed_parts(folder: Path, salvage: bool) -> list[Path]:
    """Return the files that metadata.yaml names, in its order.

    Behind them those that are named alike: a recorder that was killed lists the last ones never.
    """
    try:
        names = _file_names(folder / METADATA)
        parts = [_find_part(folder, name) for name in names]
    except CorruptFile:
        if not salvage:
            raise
        return parts_of(folder)
    missing = [name for name, part in zip(names, parts, strict=True) if part is None]
    if missing and not salvage:
        raise CorruptFile(
            f"{folder}: {METADATA} names the file {missing[0]!r}, which is missing; pass --salvage "
            "to read the others"
        )
    listed = [part for part in parts if part is not None]
    series = {_series(part) for part in listed}
    return listed + [p for p in parts_of(folder) if p not in listed and _series(p) in series]


def _series(part: Path) -> str:
    """Return the name of a split file without its number; the whole name if it has none."""
    stem = part.name.partition(".")[0]
    head, _, number = stem.rpartition("_")
    return head if number.isdigit() else stem


def _find_part(folder: Path, name: str) -> Path | None:
    # Old versions wrote the folder in front; whatever stands there, only this folder is read.
    base = PurePosixPath(name).name
    for candidate in (base, f"{base}.zstd", base.removesuffix(".zstd")):
        if candidate and (folder / candidate).is_file():
            return folder / candidate
    return None


def _file_names(path: Path) -> list[str]:
    from ruamel.yaml import YAML

    try:
        if path.stat().st_size > _METADATA_BYTES:
            raise LimitExceeded(f"{path} is larger than {_METADATA_BYTES} bytes")
        data = path.read_bytes()
        if max(data.count(b"["), data.count(b"{")) > len(data) // 8 + _METADATA_NESTING:
            raise ValueError("nested too deep")  # the parser would need minutes
        found: Any = YAML(typ="safe").load(data)
        names = found["rosbag2_bagfile_information"]["relative_file_paths"]
        good = isinstance(names, list) and all(isinstance(n, str) and "\0" not in n for n in names)
    except OSError as error:
        raise storage_error("read", path, error) from error
    except LimitExceeded:
        raise
    except Exception as error:  # a YAML parser fails in many ways
        reason = " ".join(str(error).split())[:120]
        raise CorruptFile(f"{path} cannot be understood ({reason}); pass --salvage") from error
    if not good or not names:
        raise CorruptFile(f"{path} names no files; pass --salvage to read those there are")
    return list(dict.fromkeys(names))


def _join_reports(reports: Sequence[SalvageReport | None]) -> SalvageReport | None:
    found = [report for report in reports if report is not None]
    if not found:
        return None
    return SalvageReport(
        "; ".join(dict.fromkeys(report.reason for report in found)),
        sum(report.messages for report in found),
        sum(report.chunks for report in found),
        sum(report.damaged_chunks for report in found),
        sum(report.skipped_bytes for report in found),
    )
