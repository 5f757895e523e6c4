"""Check a LeRobot dataset: every file, every row, every frame; v3.0 and v2.1, ours and lerobot's.

An error means that the data cannot be trusted or that lerobot cannot read them; a warning means
that they can be used, knowing this. Memory does not grow with the length of the episodes.
"""

from __future__ import annotations

import contextvars
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, get_args

from penstock.core.files import TEMPORARY_PREFIX, owner_is_dead
from penstock.dataset import layout, metadata
from penstock.dataset.columns import inside
from penstock.dataset.doctor_digests import check_digests
from penstock.dataset.doctor_rows import RowCheck, StatsInOrder
from penstock.dataset.doctor_stats import StatsCheck
from penstock.dataset.doctor_videos import (
    Brightness,
    Decode,
    VideoJob,
    check_video,
    shared_files,
    video_jobs,
)
from penstock.dataset.findings import Checkup, Finding, Report
from penstock.dataset.metadata import EpisodeRecord, Info
from penstock.dataset.moments import Moments
from penstock.errors import DataError, UsageError

__all__ = ["Checkup", "Finding", "check"]

_COPY = "copy the dataset again, or convert the recordings again"
_CONVERT = "convert the recordings again"
_REMOVE = "remove it"


class ProgressLike(Protocol):
    """What `check` needs of a progress bar: `penstock.ui.progress.Progress` has it."""

    def advance(self, n: int = 1) -> None:
        """Say that n more bytes are done."""

    def note(self, text: str) -> None:
        """Say which file is being looked at."""


def check(
    path: str | os.PathLike[str],
    decode: Decode = "all",
    progress: ProgressLike | None = None,
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
        report.error(layout.INFO_PATH, str(error), _COPY)
        return report.checkup()
    _Examination(root, info, decode, progress, workers, report).run()
    return report.checkup()


class _Examination:
    def __init__(
        self,
        root: Path,
        info: Info,
        decode: Decode,
        progress: ProgressLike | None,
        workers: int,
        report: Report,
    ) -> None:
        self.root, self.info, self.decode = root, info, decode
        self.progress, self.workers, self.report = progress, workers, report
        self.stats = StatsCheck(info.version, info.features, report)

    def run(self) -> None:
        self._check_info()
        check_digests(self.root, self.report)
        tasks = self._read_tasks()
        records = self._read_records(tasks)
        if records is None or tasks is None:
            return
        self.report.count("episodes", len(records))
        jobs = video_jobs(self.info, records)
        self._check_files(records, jobs)
        pictures = self._check_videos(jobs)
        self._check_rows(tasks, records, pictures)

    def _check_info(self) -> None:
        raw, where = self.info.raw, layout.INFO_PATH
        total = raw["total_episodes"]
        if total and raw["splits"] != {"train": f"0:{total}"}:
            self.report.warning(
                where, f"splits are {str(raw['splits'])[:80]} with {total} episodes", "correct them"
            )
        usual = {
            "data_path": layout.DATA_TEMPLATES[self.info.version],
            "video_path": layout.VIDEO_TEMPLATES[self.info.version],
        }
        for name, template in usual.items():
            if raw[name] not in (None, template):
                self.report.warning(
                    where, f"{name} is unusual: lerobot merges datasets by the usual one", "none"
                )
        if self.info.version == "v2.1":
            chunks = -(-total // self.info.chunks_size)
            videos = total * len(self.info.video_keys)
            for name, number in (("total_chunks", chunks), ("total_videos", videos)):
                if raw[name] != number:
                    self.report.warning(where, f"{name} is {raw[name]}, not {number}", "correct it")
        self.report.count("features", len(self.info.features))

    def _read_tasks(self) -> list[str] | None:
        name = layout.TASKS_PATH if self.info.version == "v3.0" else layout.TASKS_JSONL
        if self.info.raw["total_episodes"] == 0 and not (self.root / name).exists():
            return []
        try:
            tasks = metadata.read_tasks(self.root, self.info.version)
        except DataError as error:
            self.report.error(name, str(error), _COPY)
            return None
        if len(set(tasks)) < len(tasks):
            self.report.error(name, "a task is there twice", _CONVERT)
        return tasks

    def _read_records(self, tasks: Sequence[str] | None) -> list[EpisodeRecord] | None:
        v3 = self.info.version == "v3.0"
        name = layout.EPISODES_FOLDER if v3 else layout.EPISODES_JSONL
        if self.info.raw["total_episodes"] == 0 and not (self.root / name).exists():
            return []
        try:
            records = list(metadata.read_episodes(self.root, self.info))
        except DataError as error:
            self.report.error(name, str(error), _COPY)
            return None
        sound = True
        for where, what in metadata.record_problems(self.info, tasks or (), records):
            if tasks is not None:
                sound = sound and where == layout.INFO_PATH
                self.report.error(where, what, _CONVERT, "records")
        for record in records:
            if v3 and record.stated_source != record.source:
                self.report.warning(
                    record.source,
                    f"episode {record.index} says it lies in {record.stated_source}: lerobot "
                    "cannot merge or continue this dataset",
                    "correct meta/episodes/chunk_index and file_index",
                    "place",
                )
        order = list(dict.fromkeys(record.data_file for record in records))
        if order != sorted(order, key=lambda file: Path(file).parts):
            self.report.error(
                name, "the data files do not come in the order of their names", _CONVERT
            )
        # With records that contradict each other, every row would be reported.
        return records if sound else None

    def _check_files(self, records: Sequence[EpisodeRecord], jobs: Sequence[VideoJob]) -> None:
        """Look at every file of the folder: is it referenced, does it belong to the dataset."""
        known = {record.data_file for record in records} | {job.file for job in jobs}
        for file, keys in shared_files(jobs).items():
            self.report.error(file, f"it is used by {' and '.join(keys)}", _CONVERT)
        for folder, folders, names in os.walk(self.root):
            here = Path(folder).relative_to(self.root)
            if here == Path():
                folders[:] = [f for f in folders if f != layout.PRIVATE_FOLDER and f[0] != "."]
            folders.sort()
            for link in [f for f in folders if Path(folder, f).is_symlink()]:
                names.append(link)
            for name in sorted(names):
                self.report.count("files")
                self._check_file((here / name).as_posix(), known)

    def _check_file(self, name: str, known: set[str]) -> None:
        path, base = self.root / name, name.rpartition("/")[2]
        if path.is_symlink():
            try:
                inside(self.root, name)
            except DataError as error:
                self.report.error(name, str(error), "put the file itself there")
            return
        if base.startswith(TEMPORARY_PREFIX):
            owner = base.removeprefix(TEMPORARY_PREFIX).rpartition("-")[0]
            dead = owner_is_dead(owner)
            what = "left behind by a process that died" if dead else "it is being written"
            self.report.warning(name, what, _REMOVE if dead else "wait for the writer")
        elif name in known:
            return
        elif name.startswith("data/") and name.endswith(".parquet"):
            # lerobot reads whatever lies there, and looks frames up by their position.
            self.report.error(name, "no episode refers to it, but lerobot reads it", _REMOVE)
        elif name.startswith("images/"):
            self.report.warning("images", f"{name} is a temporary of lerobot", _REMOVE, "images")
        elif name.startswith(("data/", "videos/")):
            self.report.warning(name, "no episode refers to it", _REMOVE)
        elif re.fullmatch(r"tmp\w{8}/.*", name):
            self.report.warning(name, "a temporary of lerobot", _REMOVE, "temporary")

    def _check_videos(self, jobs: Sequence[VideoJob]) -> dict[str, dict[int, Brightness]]:
        found: dict[str, dict[int, Brightness]] = {}

        def one(job: VideoJob) -> dict[int, Brightness]:
            seen = check_video(self.root, self.info, job, self.decode, self.report)
            self._done(job.file)
            return seen

        with ThreadPoolExecutor(self.workers, "doctor") as pool:
            contexts = [contextvars.copy_context() for _ in jobs]  # a signal stops those, too
            for job, seen in zip(
                jobs, pool.map(lambda job, own: own.run(one, job), jobs, contexts), strict=True
            ):
                found.setdefault(job.key, {}).update(seen)
        return found

    def _check_rows(
        self,
        tasks: Sequence[str],
        records: Sequence[EpisodeRecord],
        pictures: dict[str, dict[int, Brightness]],
    ) -> None:
        rows = RowCheck(self.root, self.info, tasks, self.decode, self.report)
        if self.info.version == "v3.0" and records:
            try:
                rows.expect(metadata.read_stats(self.root))
            except DataError as error:
                self.report.error(layout.STATS_PATH, str(error), _COPY)
        stated = StatsInOrder(self.root, self.info, self.report)
        complete: list[int] = []

        def done(record: EpisodeRecord, moments: dict[str, Moments]) -> None:
            complete.append(record.index)
            stats, of = stated.get(record.index), f"episode {record.index}"
            if stats is None:
                return
            where = record.source
            if self.info.version == "v2.1":
                where = layout.EPISODES_STATS_JSONL
            self.stats.form(where, of, stats, record.length)
            self.stats.values(where, of, stats, moments)
            rows.training.pictures(stats)
            for key in {*pictures, *rows.pictures}:
                seen = pictures.get(key, rows.pictures.get(key, {})).get(record.index)
                if seen is not None and seen.pictures:
                    self.stats.brightness(where, of, key, stats, seen)
            self.report.count("episode statistics")

        files: dict[str, list[EpisodeRecord]] = {}
        for record in records:
            files.setdefault(record.data_file, []).append(record)
        for name, inside_it in files.items():
            rows.check_file(name, inside_it, done)
            self._done(name)
        if rows.global_stats:
            frames = sum(record.length for record in records)
            self.stats.form(layout.STATS_PATH, "the dataset", rows.global_stats, frames)
            if len(complete) == len(records):
                self._compare_totals(rows, pictures)
        if records and len(complete) == len(records):
            rows.training.finish(records, rows.totals, rows.global_stats)

    def _compare_totals(self, rows: RowCheck, pictures: dict[str, dict[int, Brightness]]) -> None:
        where, of = layout.STATS_PATH, "the dataset"
        self.stats.values(where, of, rows.global_stats, rows.totals)
        for key, by_episode in {**pictures, **rows.pictures}.items():
            whole = Brightness()
            for seen in by_episode.values():
                whole.merge(seen)
            if whole.pictures and len(by_episode) == self.info.raw["total_episodes"]:
                self.stats.brightness(where, of, key, rows.global_stats, whole)
        wrong = [name for name, shares in rows.shares.items() if shares.wrong()]
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
