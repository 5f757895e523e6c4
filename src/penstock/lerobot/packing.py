"""Pack the files of single episodes into large ones, and put the result in place at once.

The packed dataset is built beside the old one, from hard links for all that does not change, and
exchanged with it. So a reader sees the one or the other, and a kill at any point leaves one whole.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from penstock.core.files import storage_error, sync_folder
from penstock.errors import PenstockError
from penstock.lerobot import layout, opening
from penstock.lerobot.commit import places
from penstock.lerobot.episode import file_digest
from penstock.lerobot.journal import Journal, Record
from penstock.lerobot.parquet import new_parquet, open_parquet, read_table
from penstock.lerobot.remux import coding, concat
from penstock.lerobot.state import Spec, State, make_folders
from penstock.lerobot.swap import exchange, sibling

_MB = 1 << 20
_ROWS_AT_ONCE = 64
_NOT_POSSIBLE = (errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EROFS)


def pack(root: Path, spec: Spec, records: list[Record], state: State) -> bool | None:
    """Pack what is not packed yet.

    Returns:
        True if the folder was exchanged, False if there was nothing to do, None if the file system
        does not allow it.
    """
    loose = [r for r in records if r["kind"] == "episode" and not r["packed"]]
    if spec.version != "v3.0" or not loose:
        return False
    new = sibling(root, "new")
    try:
        try:
            new.mkdir()
            _link_rest(root, new, {path for record in loose for path in record["files"]})
        except OSError as error:
            if error.errno in _NOT_POSSIBLE:
                shutil.rmtree(new, ignore_errors=True)
                return None
            raise
        packed = _Packing(root, new, spec, state).run(loose)
        by_number = {record["episode"]: record for record in packed}
        lines = [by_number.get(r.get("episode", -1), r) for r in records]
        Journal.create(new / opening.JOURNAL, lines)
        for folder, _, _ in os.walk(new):
            sync_folder(Path(folder))
        old = exchange(new, root)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, PenstockError):
            raise storage_error("pack", root, error) from error
        raise
    shutil.rmtree(old, ignore_errors=True)
    return True


def _link_rest(root: Path, new: Path, left_out: set[str]) -> None:
    """Give every file that stays a second name in the new folder."""
    skipped = {opening.JOURNAL, opening.STAGING, *left_out}
    for folder, folders, names in os.walk(root):
        here = Path(folder).relative_to(root)
        for name in list(folders):
            path = here / name
            if path.as_posix() in skipped:
                folders.remove(name)
            elif (root / path).is_symlink():
                folders.remove(name)
                os.symlink(os.readlink(root / path), new / path)
            else:
                (new / path).mkdir()
        for name in names:
            path = here / name
            if path.as_posix() not in skipped:
                os.link(root / path, new / path, follow_symlinks=False)


class _Packing:
    """One packing of the loose episodes of a dataset."""

    def __init__(self, root: Path, new: Path, spec: Spec, state: State) -> None:
        self._root = root
        self._new = new
        self._spec = spec
        self._state = state

    def run(self, loose: list[Record]) -> list[Record]:
        """Write the packed files; return the new lines of the episodes."""
        records = [{**record, "files": {}, "packed": True, "videos": {}} for record in loose]
        next_file = dict(self._state.next_file)
        for kind, first in self._first_numbers(loose).items():
            next_file[kind] = first
        self._data(loose, records, next_file)
        for key in self._spec.video_keys:
            self._videos(key, loose, records, next_file)
        self._episodes(loose, records, next_file)
        for record in records:
            record["next_file"] = next_file
        return records

    def _first_numbers(self, loose: list[Record]) -> dict[str, int]:
        """The numbers of the first loose files: the packed ones take their place."""
        record = loose[0]
        per_chunk = self._spec.limits.files_per_chunk
        found = {
            kind: record[kind][0] * per_chunk + record[kind][1] for kind in ("data", "episodes")
        }
        for key, (chunk, file, _) in record["videos"].items():
            found[f"videos/{key}"] = chunk * per_chunk + file
        return found

    def _next(self, kind: str, next_file: dict[str, int]) -> tuple[int, int]:
        number = next_file[kind]
        next_file[kind] = number + 1
        return layout.place(number, self._spec.limits.files_per_chunk)

    def _target(self, path: str) -> Path:
        target = self._new / path
        make_folders(target.parent)
        return target

    def _data(self, loose: list[Record], records: list[Record], next_file: dict[str, int]) -> None:
        paths = [layout.data_path("v3.0", *record["data"]) for record in loose]
        for group in self._groups(paths, self._spec.limits.data_mb * _MB):
            where = self._next("data", next_file)
            path = layout.data_path("v3.0", *where)
            target = self._target(path)
            if len(group) == 1:
                os.link(self._root / paths[group[0]], target)
            else:
                _join_tables([self._root / paths[i] for i in group], target)
            self._note(records, group, "data", where, path, target)

    def _videos(
        self, key: str, loose: list[Record], records: list[Record], next_file: dict[str, int]
    ) -> None:
        paths = [layout.video_path("v3.0", key, *record["videos"][key][:2]) for record in loose]
        limit = self._spec.limits.video_mb * _MB

        codings = [coding(self._root / path) for path in paths]
        for group in self._groups(paths, limit, lambda a, b: codings[a] == codings[b]):
            where = self._next(f"videos/{key}", next_file)
            path = layout.video_path("v3.0", key, *where)
            target = self._target(path)
            sources = [self._root / paths[i] for i in group]
            if len(group) == 1:
                os.link(sources[0], target)
            else:
                concat(sources, target, self._spec.fps)
            first = 0
            for i in group:
                records[i]["videos"][key] = [*where, first]
                first += records[i]["frames"]
            records[group[0]]["files"][path] = file_digest(target)

    def _episodes(
        self, loose: list[Record], records: list[Record], next_file: dict[str, int]
    ) -> None:
        paths = [layout.episodes_path(*record["episodes"]) for record in loose]
        for group in self._groups(paths, self._spec.limits.data_mb * _MB):
            where = self._next("episodes", next_file)
            path = layout.episodes_path(*where)
            target = self._target(path)
            for i in group:
                records[i]["episodes"] = list(where)
            self._join_records([paths[i] for i in group], [records[i] for i in group], target)
            records[group[0]]["files"][path] = file_digest(target)

    def _join_records(self, paths: list[str], records: list[Record], target: Path) -> None:
        """Join files of episode records, each with the new places of its episodes."""
        waiting: list[pa.Table] = []
        rows = 0
        schema = read_table(self._root / paths[0]).schema
        with new_parquet(target, schema) as writer:
            for path, record in zip(paths, records, strict=True):
                table = read_table(self._root / path)
                for name, value in places(record, self._spec.fps).items():
                    at = table.schema.get_field_index(name)
                    column = pa.array([value] * table.num_rows, table.schema.field(at).type)
                    table = table.set_column(at, table.schema.field(at), column)
                waiting.append(table)
                rows += table.num_rows
                if rows >= _ROWS_AT_ONCE or path is paths[-1]:
                    writer.write_table(pa.concat_tables(waiting).combine_chunks())
                    waiting, rows = [], 0

    def _note(
        self,
        records: list[Record],
        group: Sequence[int],
        kind: str,
        where: tuple[int, int],
        path: str,
        target: Path,
    ) -> None:
        for i in group:
            records[i][kind] = list(where)
        records[group[0]]["files"][path] = file_digest(target)

    def _groups(
        self,
        paths: list[str],
        limit: int,
        fits: Callable[[int, int], bool] = lambda a, b: True,
    ) -> Iterator[list[int]]:
        """Yield runs of files that go into one, by lerobot's rule: below the limit together."""
        group: list[int] = []
        size = 0
        for i, path in enumerate(paths):
            more = (self._root / path).stat().st_size
            if group and (size + more >= limit or not fits(group[0], i)):
                yield group
                group, size = [], 0
            group.append(i)
            size += more
        if group:
            yield group


def _join_tables(paths: list[Path], target: Path) -> None:
    """Copy row groups into one file, one in memory at a time."""
    with open_parquet(paths[0]) as first:
        schema = first.schema_arrow
    with new_parquet(target, schema) as writer:
        for path in paths:
            with open_parquet(path) as file:
                for number in range(file.num_row_groups):
                    table = file.read_row_group(number)
                    writer.write_table(table, row_group_size=max(table.num_rows, 1))
