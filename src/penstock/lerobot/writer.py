"""Write a LeRobot dataset episode by episode; what `commit` returned from survives everything.

Every commit leaves a dataset that lerobot can load. The order is: files of the episode,
statistics, tasks, the line of the journal (from here it is committed), info.json. Opening again
rolls forward or back to the last line, removes what no line names, and may be interrupted itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import Self

from penstock.core.files import FolderLock, storage_error, sync_folder
from penstock.errors import DataError, PenstockError, SaverClosed, StorageError, UsageError
from penstock.lerobot import opening
from penstock.lerobot.adopt import adopt, foreign_schema
from penstock.lerobot.batch import BatchPlacement, EpisodeBatch
from penstock.lerobot.commit import Placement
from penstock.lerobot.episode import StagedEpisode
from penstock.lerobot.journal import Record
from penstock.lerobot.layout import (
    AUTO_FEATURES,
    INFO_PATH,
    PRIVATE_FOLDER,
    VERSIONS,
    Feature,
    FileLimits,
    Version,
    check_name,
)
from penstock.lerobot.opening import Mode, Opened
from penstock.lerobot.packing import pack
from penstock.lerobot.state import Spec, State, info_bytes, make_folders, publish_if_changed
from penstock.lerobot.swap import settle, sibling


class DatasetWriter:
    """The one writer of a dataset.

    Args:
        out: The folder of the dataset.
        features: What every frame has; the five automatic features need not be named.
        fps: Frames per second.
        robot_type: Written into info.json.
        version: Of the format.
        mode: "create" a new dataset in an empty folder; "resume" one that was interrupted, with the
            same settings; "append" episodes to one that exists, of any making; "overwrite" one: the
            old is kept aside until the first commit.
        settings: JSON; stored, and compared on "resume".
        limits: How large files may grow.

    Raises:
        LockHeld: Another process writes there.
        UsageError: The folder is not empty, no dataset, or does not fit the features.

    Example:
        with DatasetWriter("out", features, 30, "kuavo4pro", mode="resume") as writer:
            writer.commit(staged, {"bag": "a.bag"})
            writer.finalize()
    """

    def __init__(
        self,
        out: Path | str,
        features: Mapping[str, Feature],
        fps: int,
        robot_type: str | None = None,
        *,
        version: Version = "v3.0",
        mode: Mode = "create",
        settings: Mapping[str, Any] | None = None,
        limits: FileLimits | None = None,
    ) -> None:
        if version not in VERSIONS:
            raise UsageError(f"version {version!r} cannot be written: v3.0 or v2.1")
        if type(fps) is not int or not 0 < fps <= 1000:
            raise UsageError(f"fps must be a whole number of 1 to 1000, not {fps!r}")
        for name in features:
            check_name(name)
        own = {name: feature for name, feature in features.items() if name not in AUTO_FEATURES}
        if not own:
            raise UsageError("a dataset needs at least one feature")
        self.root = Path(os.path.abspath(out))
        self._settings = dict(settings or {})
        self._lock = FolderLock(self.root, opening.LOCK_NAME)
        self._closed = False
        self._unsure = False
        spec = Spec(own, fps, robot_type, version, limits or FileLimits())
        created = not self.root.exists()
        try:
            self._prepare()
            self._opened = self._open(spec, mode)
            self._schema = self._episode_schema()
        except BaseException as error:
            self._lock.release()
            if created:
                with suppress(OSError):
                    (self.root / opening.LOCK_NAME).unlink()
                    self.root.rmdir()
            if isinstance(error, OSError) and not isinstance(error, PenstockError):
                raise storage_error("open", self.root, error) from error
            raise

    @property
    def committed(self) -> list[dict[str, Any]]:
        """The sources of the commits, in their order: one per episode, or per batch of them."""
        records = self._opened.journal.records
        return [record["source"] for record in records if record["kind"] == "episode"]

    @property
    def failures(self) -> list[dict[str, Any]]:
        """What `failed` noted: source and reason."""
        records = self._opened.journal.records
        return [
            {"source": record["source"], "reason": record["reason"]}
            for record in records
            if record["kind"] == "failed"
        ]

    @property
    def total_episodes(self) -> int:
        """Episodes in the dataset."""
        return self._opened.state.episodes

    @property
    def total_frames(self) -> int:
        """Frames in the dataset."""
        return self._opened.state.frames

    @property
    def features(self) -> dict[str, Feature]:
        """The features of the dataset, without the automatic ones."""
        return dict(self._opened.spec.features)

    def staging(self, name: str) -> Path:
        """Return a private folder that does not exist yet, on the disk of the dataset.

        It is removed when the dataset is opened the next time.
        """
        self._check_open()
        check_name(name)
        path = self.root / opening.STAGING / name
        try:
            make_folders(path.parent)
            if path.exists():
                shutil.rmtree(path)
        except OSError as error:
            raise storage_error("write", path, error) from error
        return path

    def commit(self, staged: StagedEpisode | Path | str, source: Mapping[str, Any]) -> int:
        """Add a staged episode, durably; its folder is removed.

        Args:
            staged: The episode, or its folder.
            source: JSON that says where it came from; see `committed`.

        Returns:
            The number of the episode.

        Raises:
            StorageError: Nothing was added; the staged episode is untouched.
        """
        self._check_open()
        episode = staged if isinstance(staged, StagedEpisode) else StagedEpisode.open(staged)
        self._check_episode(episode)
        placement = self._placement()
        where = str(episode.folder)
        record = self._add(placement, lambda: placement.place(episode, dict(source)), where)
        shutil.rmtree(episode.folder, ignore_errors=True)
        return int(record["episode"])

    def commit_many(self, batch: EpisodeBatch, source: Mapping[str, Any]) -> range:
        """Add many episodes of numbers, durably, as one: all of them, or none.

        Args:
            batch: The episodes; they need not be staged.
            source: JSON that says where they came from; one entry of `committed`.

        Returns:
            The numbers of the episodes.

        Raises:
            UsageError: They do not fit the dataset.
            StorageError: Nothing was added.
        """
        self._check_open()
        batch.check(self._opened.spec.features)
        first = self._opened.state.episodes
        placement = self._placement()
        self._add(
            placement, lambda: placement.place_many(batch, dict(source)), f"a batch of {self.root}"
        )
        return range(first, first + len(batch.lengths))

    def _placement(self) -> BatchPlacement:
        """Return what puts one episode or many into the dataset as it is now."""
        return BatchPlacement(self.root, self._opened.spec, self._opened.state, self._schema)

    def _add(
        self, placement: Placement, place: Callable[[], tuple[Record, State]], what: str
    ) -> Record:
        """Place something, write its line, and let info.json follow; or take it all back."""
        opened = self._opened
        before, size = opened.state, opened.journal.size_bytes
        count = len(opened.journal.records)
        try:
            record, after = place()
            opened.journal.append(record)
            publish_if_changed(self.root / INFO_PATH, info_bytes(opened.spec, after))
        except BaseException as error:
            self._undo(placement, size, count)
            if isinstance(error, pa.ArrowException | MemoryError | TypeError | ValueError):
                raise DataError(f"{what} cannot be committed ({error})") from error
            if isinstance(error, OSError) and not isinstance(error, PenstockError):
                raise storage_error("write", self.root, error) from error
            raise
        opened.state = after
        with suppress(OSError):
            if before.stats_file and before.stats_file != after.stats_file:
                (self.root / PRIVATE_FOLDER / before.stats_file).unlink()
        shutil.rmtree(sibling(self.root, "replaced"), ignore_errors=True)
        return record

    def failed(self, source: Mapping[str, Any], reason: str) -> None:
        """Note, durably, that something could not become an episode."""
        self._check_open()
        record = {"kind": "failed", "source": dict(source), "reason": reason}
        self._opened.journal.append(record)

    def finalize(self) -> bool:
        """Pack the single files of the episodes into large ones (v3.0), in one step.

        Returns:
            False if the file system allows no hard links or no folder beside this one: the dataset
            is complete, but in many small files.
        """
        self._check_open()
        opened = self._opened
        self._unsure = True  # until it is known which folder is in place
        packed = pack(self.root, opened.spec, opened.journal.records, opened.state)
        if packed:
            self._opened = opening.load(self.root, opened.spec)
        self._unsure = False
        return packed is not None

    def close(self) -> None:
        """Let the folder go; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        try:
            replaced = sibling(self.root, "replaced")
            if replaced.is_dir() and self.total_episodes == 0:
                # Nothing came of it: the dataset that was to be overwritten comes back.
                shutil.rmtree(self.root)
                os.rename(replaced, self.root)
                sync_folder(self.root.parent)
            else:
                shutil.rmtree(self.root / opening.STAGING, ignore_errors=True)
        except OSError as error:
            raise storage_error("close", self.root, error) from error
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self) -> None:
        """Make the folder if it must be made, and take its lock."""
        old = sibling(self.root, "old")
        if not self.root.exists() and old.is_dir():
            settle(self.root)
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"{self.root} is a file; give a folder")
        make_folders(self.root)
        self._lock.acquire()
        settle(self.root)

    def _open(self, spec: Spec, mode: Mode) -> Opened:
        root = self.root
        if opening.is_empty(root):
            shutil.rmtree(root / PRIVATE_FOLDER, ignore_errors=True)
            return opening.create(root, spec, self._settings)
        if mode == "create":
            raise UsageError(
                f"{root} is not empty: --resume goes on, --append adds to it, --overwrite "
                "replaces it"
            )
        if not opening.is_dataset(root):
            raise UsageError(f"{root} is not empty and no LeRobot dataset: choose another folder")
        if mode == "overwrite":
            return self._replace(spec)
        if not (root / opening.SETTINGS).is_file():
            if mode == "resume":
                raise UsageError(f"{root} was not written by penstock: add to it with --append")
            base, found = adopt(root, spec)
            return opening.create(root, found, self._settings, base)
        stored, content = opening.read_settings(root)
        if mode == "resume":
            given = opening.settings_json(spec, self._settings)
            opening.check_same(root, content, given)
        else:
            self._check_same_kind(stored, spec)
            opening.write_settings(root, stored, self._settings)
        return opening.load(root, stored)

    def _check_same_kind(self, stored: Spec, given: Spec) -> None:
        for what in ("version", "fps"):
            a, b = getattr(stored, what), getattr(given, what)
            if a != b:
                raise UsageError(f"{self.root} has {what} {a}, and the new episodes have {b}")
        opening.check_fits(self.root, stored.features, given.features)

    def _replace(self, spec: Spec) -> Opened:
        """Move the dataset aside and begin a new one; see `close` and `commit` for its end."""
        replaced = sibling(self.root, "replaced")
        if replaced.is_dir() and (self.root / INFO_PATH).exists():
            shutil.rmtree(replaced)
        if replaced.is_dir():
            shutil.rmtree(self.root)  # an overwriting that never got to its first commit
        else:
            os.rename(self.root, replaced)
        os.mkdir(self.root)
        sync_folder(self.root.parent)
        lock = FolderLock(self.root, opening.LOCK_NAME)
        lock.acquire()
        self._lock.release()
        self._lock = lock
        return opening.create(self.root, spec, self._settings)

    def _episode_schema(self) -> Any:
        opened = self._opened
        if opened.state.base.episodes and opened.spec.version == "v3.0":
            return foreign_schema(self.root, opened.state.base)
        return None

    def _check_episode(self, staged: StagedEpisode) -> None:
        spec, state = self._opened.spec, self._opened.state
        if staged.fps != spec.fps:
            raise UsageError(f"{staged.folder} has {staged.fps} fps, and the dataset {spec.fps}")
        opening.check_fits(self.root, spec.features, staged.features)
        for key in spec.video_keys:
            known = spec.features[key].info or state.infos.get(key)
            for name in ("video.codec", "video.height", "video.width"):
                a, b = (known or {}).get(name), staged.infos[key].get(name)
                if known and a is not None and a != b:
                    raise UsageError(
                        f"{key!r}: {name} is {a} in the dataset and {b} in the episode"
                    )

    def _undo(self, placement: Placement, size: int, count: int) -> None:
        """Take back a commit that failed: its line first, since a line must not outlive its files.

        The line is cut off even if nobody knows of it: an interrupt may come when it is written and
        not yet counted.
        """
        opened = self._opened
        self._unsure = True  # until it is known that there is no line
        with suppress(StorageError, OSError):
            opened.journal.truncate(size)
            del opened.journal.records[count:]
            placement.undo()
            opening.publish_meta(self.root, opened.spec, opened.state)
            self._unsure = False

    def _check_open(self) -> None:
        if self._closed:
            raise SaverClosed(f"{self.root}: this writer was closed already")
        if self._unsure:
            raise SaverClosed(f"{self.root}: a change of it failed; open it again to go on")
