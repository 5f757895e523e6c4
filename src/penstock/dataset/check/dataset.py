"""The whole check: info, checksums, records, files, videos, rows, statistics."""

from __future__ import annotations

import contextvars
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from penstock.core.files import TEMPORARY_PREFIX, owner_is_dead
from penstock.dataset import layout, metadata
from penstock.dataset.adopt import JOURNAL, journal_records
from penstock.dataset.check.findings import Checkup, Report
from penstock.dataset.check.rows import RowCheck, StatsInOrder
from penstock.dataset.check.stats import StatsCheck, wrong_quantiles
from penstock.dataset.check.videos import Decode, VideoCheck, VideoJob, video_jobs
from penstock.dataset.metadata import EpisodeRecord, Info, Stats
from penstock.dataset.plan import BUILT, Built
from penstock.dataset.stats import PictureStats
from penstock.dataset.tables import inside
from penstock.dataset.unit import Digest, file_digest, json_digest
from penstock.errors import DataError, UsageError
from penstock.ui.progress import Progress

_REMOVE = "remove it"
_MEANT = "nothing, if it was meant to change; else copy the dataset again"


def check(
    path: str | os.PathLike[str],
    decode: Decode = "all",
    progress: Progress | None = None,
    workers: int = 1,
) -> Checkup:
    """Check a dataset.

    Args:
        path: Its folder.
        decode: "all" decodes every picture; "sample" three of each episode and camera.
        progress: Is told the bytes of each file that is done.
        workers: Videos that are decoded at the same time.

    Returns:
        What is wrong, and how much was looked at.

    Raises:
        UsageError: There is no folder of that name, or a setting is wrong.
    """
    root = Path(path)
    if decode not in get_args(Decode) or workers < 1:
        raise UsageError(
            f"decode is {decode!r}, workers is {workers}: use all or sample, 1 or more"
        )
    if not root.is_dir():
        raise UsageError(f"there is no folder {root}")
    report = Report()
    try:
        info = metadata.read_info(root)
    except DataError as error:
        report.error(layout.INFO_PATH, str(error))
        return report.checkup()
    _Examination(root, info, decode, progress, workers, report).run()
    return report.checkup()


@dataclass
class _Examination:
    root: Path
    info: Info
    decode: Decode
    progress: Progress | None
    workers: int
    report: Report

    def run(self) -> None:
        self.stats = StatsCheck(self.info.format, self.info.features, self.report)
        self._check_info()
        self._check_digests()
        tasks = self._read_tasks()
        records = self._read_records(tasks)
        if records is None or tasks is None:
            return
        self.report.count("episodes", len(records))
        jobs = video_jobs(records)
        self._check_files(records, jobs)
        pictures = self._check_videos(jobs)
        self._check_rows(tasks, records, pictures)

    def _check_info(self) -> None:
        raw, format_ = self.info.raw, self.info.format
        total = raw["total_episodes"]
        expected = {
            "splits": {"train": f"0:{total}"} if total else raw["splits"],
            "total_chunks": -(-total // self.info.chunks_size),
            "total_videos": total * len(self.info.video_keys),
        }
        for name, value in expected.items():
            if name in {"splits", *format_.info_keys} and raw[name] != value:
                what = f"{name} is {str(raw[name])[:80]}, not {value}"
                self.report.warning(layout.INFO_PATH, what, "correct it")
        usual = {"data_path": format_.data_template, "video_path": format_.video_template}
        for name, template in usual.items():
            if raw[name] not in (None, template):
                what = f"{name} is unusual: lerobot merges datasets by the usual one"
                self.report.warning(layout.INFO_PATH, what, "none")
        self.report.count("features", len(self.info.features))

    def _check_digests(self) -> None:
        """Compare the files that penstock wrote with the checksums that it noted.

        A codec hides most of what happens to its bytes: only a checksum tells that a video is
        what was written.
        """
        try:
            built = Built.read(self.root)
        except DataError as error:
            self.report.error(BUILT, str(error))
            return
        raw = self.info.raw
        if built is None:
            digests, where = dict(_journal_digests(self.root)), JOURNAL
        elif (raw["total_episodes"], raw["total_frames"]) != (built.episodes, built.frames):
            self.report.warning(
                layout.INFO_PATH,
                f"it counts {raw['total_episodes']} episodes, and penstock built {built.episodes}: "
                "another program has changed the dataset, and its checksums say nothing",
                "nothing, if that was meant",
            )
            return
        else:
            digests, where = built.files, BUILT
        for name, digest in digests.items():
            self._check_digest(name, digest, where)

    def _check_digest(self, name: str, digest: Digest, where: str) -> None:
        try:
            path = inside(self.root, name)
        except DataError:
            self.report.error(where, f"it names {name[:80]!r}, which is not in the dataset")
            return
        # Small files that people and other programs change with good reason.
        small = {layout.INFO_PATH, layout.V30.stats, layout.V30.tasks, layout.V21.tasks}
        try:
            is_json = name in small and name.endswith(".json") and where == BUILT
            found = json_digest(path.read_bytes()) if is_json else file_digest(path)
        except (OSError, ValueError, RecursionError) as error:
            missing = isinstance(error, FileNotFoundError)
            self.report.error(name, "it is missing" if missing else f"it cannot be read: {error}")
            return
        self.report.count("checksums")
        if found == digest:
            return
        if name in small:
            self.report.warning(name, "it is not what was written", _MEANT)
        elif found[0] != digest[0]:
            self.report.error(name, f"it has {found[0]} bytes, {digest[0]} were written")
        else:
            self.report.error(name, "its bytes are not those that were written")

    def _read_tasks(self) -> list[str] | None:
        name = self.info.format.tasks
        if self.info.raw["total_episodes"] == 0 and not (self.root / name).exists():
            return []
        try:
            tasks = metadata.read_tasks(self.root, self.info.format)
        except DataError as error:
            self.report.error(name, str(error))
            return None
        if len(set(tasks)) < len(tasks):
            self.report.error(name, "a task is there twice")
        return tasks

    def _read_records(self, tasks: Sequence[str] | None) -> list[EpisodeRecord] | None:
        name = self.info.format.episodes
        if self.info.raw["total_episodes"] == 0 and not (self.root / name).exists():
            return []
        try:
            records = list(metadata.read_episodes(self.root, self.info))
        except DataError as error:
            self.report.error(name, str(error))
            return None
        sound = True
        for where, what in metadata.record_problems(self.info, tasks or (), records):
            if tasks is not None:
                sound = sound and where == layout.INFO_PATH
                self.report.error(where, what, "records")
        for record in records:
            if self.info.format.shares_files and record.stated_source != record.source:
                self.report.warning(
                    record.source,
                    f"episode {record.index} says it lies in {record.stated_source}: lerobot "
                    "cannot merge or continue this dataset",
                    "correct meta/episodes/chunk_index and file_index",
                    "place",
                )
        order = list(dict.fromkeys(record.data_file for record in records))
        if order != sorted(order, key=lambda file: Path(file).parts):
            self.report.error(name, "the data files do not come in the order of their names")
        # With records that contradict each other, every row would be reported.
        return records if sound else None

    def _check_files(self, records: Sequence[EpisodeRecord], jobs: Sequence[VideoJob]) -> None:
        """Look at every file of the folder: is it referenced, does it belong to the dataset."""
        known = {record.data_file for record in records} | {job.file for job in jobs}
        cameras: dict[str, list[str]] = {}
        for job in jobs:
            cameras.setdefault(job.file, []).append(job.key)
        for file, keys in cameras.items():
            if len(keys) > 1:
                self.report.error(file, f"it is used by {' and '.join(keys)}")
        for folder, folders, names in os.walk(self.root):
            here = Path(folder).relative_to(self.root)
            if here == Path():
                folders[:] = [f for f in folders if f != layout.PRIVATE_FOLDER and f[0] != "."]
            folders.sort()
            names += [f for f in folders if Path(folder, f).is_symlink()]
            for name in sorted(names):
                self.report.count("files")
                self._check_file((here / name).as_posix(), known)

    def _check_file(self, name: str, known: set[str]) -> None:
        path, base = self.root / name, name.rpartition("/")[2]
        if path.is_symlink():
            try:
                inside(self.root, name)
            except DataError as error:
                self.report.error(name, str(error), todo="put the file itself there")
        elif base.startswith(TEMPORARY_PREFIX):
            owner = base.removeprefix(TEMPORARY_PREFIX).rpartition("-")[0]
            dead = owner_is_dead(owner)
            what = "left behind by a process that died" if dead else "it is being written"
            self.report.warning(name, what, _REMOVE if dead else "wait for the writer")
        elif name in known:
            return
        elif name.startswith("data/") and name.endswith(".parquet"):
            # lerobot reads whatever lies there, and looks frames up by their position.
            self.report.error(name, "no episode refers to it, but lerobot reads it", todo=_REMOVE)
        elif name.startswith("images/"):
            self.report.warning("images", f"{name} is a temporary of lerobot", _REMOVE, "images")
        elif name.startswith(("data/", "videos/")):
            self.report.warning(name, "no episode refers to it", _REMOVE)
        elif re.fullmatch(r"tmp\w{8}/.*", name):
            self.report.warning(name, "a temporary of lerobot", _REMOVE, "temporary")

    def _check_videos(self, jobs: Sequence[VideoJob]) -> dict[str, dict[int, PictureStats]]:
        found: dict[str, dict[int, PictureStats]] = {}

        def one(job: VideoJob) -> dict[int, PictureStats]:
            seen = VideoCheck(self.root, self.info, job, self.report).run(self.decode)
            self._done(job.file)
            return seen

        with ThreadPoolExecutor(self.workers, "doctor") as pool:
            contexts = [contextvars.copy_context() for _ in jobs]  # a signal stops those, too
            every = pool.map(lambda job, own: own.run(one, job), jobs, contexts)
            for job, seen in zip(jobs, every, strict=True):
                found.setdefault(job.key, {}).update(seen)
        return found

    def _check_rows(
        self,
        tasks: Sequence[str],
        records: Sequence[EpisodeRecord],
        pictures: dict[str, dict[int, PictureStats]],
    ) -> None:
        rows = RowCheck(self.root, self.info, tasks, self.decode, self.report)
        stated = StatsInOrder(self.root, self.info, self.report)
        files: dict[str, list[EpisodeRecord]] = {}
        for record in records:
            files.setdefault(record.data_file, []).append(record)
        complete = 0
        for name, inside_it in files.items():
            for record, moments in rows.check_file(name, inside_it):
                complete += 1
                own, of = stated.get(record.index), f"episode {record.index}"
                if own is None:
                    continue
                where = record.source if self.info.format.shares_files else stated.where
                self.stats.form(where, of, own, record.length)
                self.stats.values(where, of, own, moments)
                rows.training.pictures(own)
                for key, by_episode in {**rows.pictures, **pictures}.items():
                    if record.index in by_episode:
                        self.stats.brightness(where, of, key, own, by_episode[record.index])
                self.report.count("episode statistics")
            self._done(name)
        stats: Stats = {}
        whole = self.info.format.stats
        if whole is not None and records:
            try:
                stats = metadata.read_stats(self.root)
            except DataError as error:
                self.report.error(whole, str(error))
        if whole is not None and stats:
            self.stats.form(whole, "the dataset", stats, sum(record.length for record in records))
            if complete == len(records):
                self._compare_totals(whole, stats, rows, pictures)
        if records and complete == len(records):
            rows.training.finish(records, rows.totals, stats)

    def _compare_totals(
        self,
        where: str,
        stats: Stats,
        rows: RowCheck,
        pictures: dict[str, dict[int, PictureStats]],
    ) -> None:
        of = "the dataset"
        self.stats.values(where, of, stats, rows.totals)
        for key, by_episode in {**pictures, **rows.pictures}.items():
            whole = PictureStats()
            for seen in by_episode.values():
                whole.merge(seen)
            if whole.pictures and len(by_episode) == self.info.raw["total_episodes"]:
                self.stats.brightness(where, of, key, stats, whole)
        wrong = [n for n, seen in rows.totals.items() if wrong_quantiles(stats.get(n, {}), seen)]
        if wrong:
            self.report.warning(
                where,
                f"the quantiles of {', '.join(wrong)} are not those of the rows (lerobot averages "
                "the episodes' quantiles)",
                "do not normalise by quantiles, or compute them again",
            )
        self.report.count("dataset statistics")

    def _done(self, name: str) -> None:
        if self.progress is not None:
            self.progress.note(name)
            try:
                self.progress.advance((self.root / name).stat().st_size)
            except OSError:
                return  # missing: a finding says so


def _journal_digests(root: Path) -> Iterator[tuple[str, Digest]]:
    for record in journal_records(root):
        files = record.get("files")
        for name, value in files.items() if isinstance(files, dict) else ():
            by_name = isinstance(value, dict)
            pair: Any = [value.get("size"), value.get("crc32")] if by_name else value
            if isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair):
                yield name, (pair[0], pair[1])
