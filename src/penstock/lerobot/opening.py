"""Open a folder for writing a dataset: create, go on, add to, or replace; and recover it first."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.core.files import publish_bytes, sweep, sync_folder
from penstock.errors import CorruptFile, DataError, UsageError
from penstock.lerobot import layout
from penstock.lerobot.episode import read_stats
from penstock.lerobot.journal import Base, Journal, Record
from penstock.lerobot.layout import PRIVATE_FOLDER, Feature, FileLimits
from penstock.lerobot.state import (
    Spec,
    State,
    info_bytes,
    make_folders,
    publish_if_changed,
    publish_tasks,
    stats_bytes,
)

Mode = Literal["create", "resume", "append", "overwrite"]
LOCK_NAME = ".penstock.lock"
SETTINGS = f"{PRIVATE_FOLDER}/settings.json"
# May change: which bags can be read, not what they become; and datasets of before know no joints.
_FREE = ("settings.salvage", "settings.joints")
JOURNAL = f"{PRIVATE_FOLDER}/journal.jsonl"
STAGING = f"{PRIVATE_FOLDER}/staging"
_FORMAT = 1
_NUMBERED = re.compile(r"chunk-(\d+)/file-(\d+)\.(?:parquet|mp4)")


@dataclass
class Opened:
    """A dataset ready for the next commit."""

    spec: Spec
    journal: Journal
    state: State


def is_empty(root: Path) -> bool:
    """Whether a folder holds nothing but what an interrupted beginning leaves."""
    if (root / SETTINGS).exists():
        return False
    return all(entry.name in (LOCK_NAME, PRIVATE_FOLDER) for entry in root.iterdir())


def is_dataset(root: Path) -> bool:
    """Whether a folder is a LeRobot dataset, or one that penstock has begun."""
    return (root / layout.INFO_PATH).is_file() or (root / SETTINGS).is_file()


def settings_json(spec: Spec, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what settings.json holds."""
    return {
        "format": _FORMAT,
        "version": spec.version,
        "fps": spec.fps,
        "robot_type": spec.robot_type,
        "limits": asdict(spec.limits),
        "features": {name: feature.to_json() for name, feature in spec.features.items()},
        "settings": json.loads(json.dumps(settings)),
    }


def create(root: Path, spec: Spec, settings: Mapping[str, Any], base: Base | None = None) -> Opened:
    """Begin a dataset in an empty folder; settings.json comes last and makes it one."""
    make_folders(root / PRIVATE_FOLDER)
    begun = base or Base()
    journal = Journal.create(root / JOURNAL, [begun.to_record()])
    write_settings(root, spec, settings)
    stats = read_stats(root / PRIVATE_FOLDER / begun.stats) if begun.stats else {}
    return Opened(spec, journal, State.begin(begun, stats))


def write_settings(root: Path, spec: Spec, settings: Mapping[str, Any]) -> None:
    """Publish settings.json."""
    publish_bytes(root / SETTINGS, json.dumps(settings_json(spec, settings), indent=1).encode())


def read_settings(root: Path) -> tuple[Spec, dict[str, Any]]:
    """Read settings.json."""
    path = root / SETTINGS
    try:
        content = json.loads(path.read_bytes())
        features = {n: Feature.from_json(n, f) for n, f in content["features"].items()}
        spec = Spec(
            features,
            content["fps"],
            content["robot_type"],
            content["version"],
            FileLimits(**content["limits"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{path} is damaged ({error})") from error
    return spec, content


def check_same(root: Path, stored: Any, given: Any, path: str = "") -> None:
    """Refuse to go on with other settings; the error names the first that differs."""
    if path in _FREE:
        return
    if isinstance(stored, dict) and isinstance(given, dict):
        for key in [*stored, *(key for key in given if key not in stored)]:
            below = f"{path}.{key}" if path else str(key)
            check_same(root, stored.get(key), given.get(key), below)
    elif stored != given:
        raise UsageError(
            f"{root} was begun with {path} = {_short(stored)}, and not {_short(given)}: "
            "resume with the same settings, or write to another folder"
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"


def check_fits(root: Path, have: Mapping[str, Feature], given: Mapping[str, Feature]) -> None:
    """Refuse to add episodes of other features; the error names the first that differs."""
    auto = layout.AUTO_FEATURES
    mine = {name: feature for name, feature in have.items() if name not in auto}
    theirs = {name: feature for name, feature in given.items() if name not in auto}
    for name in [*mine, *theirs]:
        if name not in theirs or name not in mine:
            where = "the dataset" if name in mine else "the new episodes"
            raise UsageError(f"{root}: only {where} have the feature {name!r}")
        a, b = mine[name], theirs[name]
        for what, x, y in (
            ("dtype", a.dtype, b.dtype),
            ("shape", _size(a), _size(b)),
            ("names", a.names if not a.is_picture else None, b.names if not b.is_picture else None),
        ):
            if x != y:
                raise UsageError(
                    f"{root}: {what} of {name!r} is {_short(x)} in the dataset and {_short(y)} in "
                    "the new episodes"
                )


def _size(feature: Feature) -> list[int]:
    return list(feature.picture_size if feature.is_picture else feature.shape)


def load(root: Path, spec: Spec) -> Opened:
    """Open a dataset of ours and bring it to its last commit."""
    journal = Journal.open(root / JOURNAL)
    if not journal.records or journal.records[0].get("kind") != "base":
        raise CorruptFile(f"{journal.path} is damaged: it has no beginning")
    try:
        state = State.begin(Base.from_record(journal.records[0]), {})
        for record in journal.records[1:]:
            state = state.after(record)
    except (KeyError, TypeError) as error:
        raise CorruptFile(f"{journal.path} is damaged: {error} is missing") from error
    recover(root, spec, state, journal.records)
    if state.stats_file:
        state.stats.update(read_stats(root / PRIVATE_FOLDER / state.stats_file))
    if state.episodes > state.base.episodes or not state.episodes:
        publish_meta(root, spec, state)
    return Opened(spec, journal, state)


def publish_meta(root: Path, spec: Spec, state: State) -> None:
    """Write whichever of the small files is not what the journal says; info.json last.

    Without an episode a dataset of ours has no info.json: one may be left of a first commit that
    was taken back.
    """
    info = root / layout.INFO_PATH
    if not state.episodes:
        if state.base.info is not None:
            publish_if_changed(info, info_bytes(spec, state))
        elif info.exists():
            info.unlink()
            sync_folder(info.parent)
        return
    if spec.version == "v3.0":
        publish_if_changed(root / layout.STATS_PATH, stats_bytes(spec, state))
        publish_tasks(root, state.tasks)
    publish_if_changed(info, info_bytes(spec, state))


def recover(root: Path, spec: Spec, state: State, records: list[Record]) -> None:
    """Remove what no line of the journal names; check that the rest is there. Idempotent."""
    needed: dict[str, int] = {}
    for record in records:
        if record.get("kind") == "episode":
            needed |= {path: size for path, (size, _) in record["files"].items()}
    for path, size in needed.items():
        try:
            found = (root / path).stat().st_size
        except OSError as error:
            raise CorruptFile(f"{root / path} is missing ({error.strerror})") from error
        if found != size:
            raise CorruptFile(f"{root / path} has {found} bytes, and {size} were committed")
    # What names files goes before the files, so that a reader never looks for one in vain.
    for name, size in state.sizes.items():
        with suppress(FileNotFoundError):
            if (root / name).stat().st_size > size:
                os.truncate(root / name, size)
    for path in _ours(root, spec, state):
        if path not in needed:
            (root / path).unlink()
    private = root / PRIVATE_FOLDER
    for pack in private.glob("stats-*.pack"):
        if pack.name != state.stats_file:
            pack.unlink()
    shutil.rmtree(root / STAGING, ignore_errors=True)
    for folder, folders, _ in os.walk(root):
        folders[:] = [name for name in folders if not os.path.islink(os.path.join(folder, name))]
        sweep(Path(folder))


def _ours(root: Path, spec: Spec, state: State) -> list[str]:
    """Return the files of episodes that lie behind what was there before the journal."""
    found: list[str] = []
    if spec.version == "v2.1":
        # Episodes are placed in order, and a commit may place many: those behind the last line.
        per_chunk, number = spec.limits.files_per_chunk, state.episodes
        while True:
            names = [layout.data_path("v2.1", number // per_chunk, number)]
            names += [
                layout.video_path("v2.1", k, number // per_chunk, number) for k in spec.video_keys
            ]
            there = [name for name in names if (root / name).exists()]
            if not there:
                # The last first, so that a kill in between leaves no hole behind which some stay.
                return found[::-1]
            found += there
            number += 1
    kinds = {"episodes": layout.EPISODES_FOLDER, "data": "data"}
    kinds |= {f"videos/{key}": f"videos/{key}" for key in spec.video_keys}
    for kind, folder in kinds.items():
        first = state.base.next_file.get(kind, 0)
        for number, path in numbered(root, folder, spec.limits.files_per_chunk):
            if number >= first:
                found.append(path)
    return found


def numbered(root: Path, folder: str, per_chunk: int) -> list[tuple[int, str]]:
    """Return the chunk/file files of a folder of v3.0, with their numbers."""
    found = []
    for path in (root / folder).glob("chunk-*/file-*"):
        relative = path.relative_to(root).as_posix()
        match = _NUMBERED.fullmatch(relative.removeprefix(folder + "/"))
        if match:
            chunk, file = int(match[1]), int(match[2])
            found.append((chunk * per_chunk + file, relative))
    return sorted(found)


def check_version(value: object, root: Path) -> layout.Version:
    """Return the version of a dataset that can be added to."""
    for version in layout.VERSIONS:
        if value == version:
            return version
    raise DataError(
        f"{root} is a LeRobot dataset of version {value!r}: v3.0 and v2.1 can be added to"
    )
