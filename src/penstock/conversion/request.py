"""What a user asks of a conversion, checked before anything is touched."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from penstock.bags import Limits, find_bags
from penstock.conversion import robots
from penstock.conversion.guess import guess_mapping, restrict
from penstock.conversion.mapping import Mapping
from penstock.conversion.ray_engine import RAY_AUTO
from penstock.conversion.recordings import OpenRecording
from penstock.conversion.settings import from_json, load_map, parse_value, set_word
from penstock.core.memory import parse_bytes
from penstock.dataset.layout import INFO_PATH, VERSIONS, Version
from penstock.dataset.metadata import read_info
from penstock.dataset.plan import UNITS
from penstock.dataset.remote import RemoteDataset
from penstock.dataset.writer import read_plan
from penstock.errors import DataError, PenstockError, UsageError
from penstock.objects import ObjectPath, is_object
from penstock.ui.progress import Mode
from penstock.ui.suggestions import did_you_mean

DEFAULT_MEMORY: Final = "512MB"
_LEAST_MEMORY: Final = "200MB"
_MOST_LOOKED_AT: Final = 200  # bags, before a mapping is guessed

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
OpenMode = Literal["create", "resume", "append", "overwrite"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One of the equal parts of a job array; the first has index 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read `3/100`."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()) or int(count) < 1:
            raise UsageError(f"shard is {text!r}: give its index and how many there are: 3/100")
        if int(index) >= int(count):
            raise UsageError(
                f"shard is {text!r}: they count from 0/{count} to {int(count) - 1}/{count}"
            )
        return cls(int(index), int(count))


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for, checked; see `make_request`."""

    bags: list[Path]
    out: Path
    mapping: Mapping
    opened: OpenRecording  # the last one is still open
    version: Version = "v3.0"
    memory_bytes: int = 512 * 10**6
    workers: int = 1
    mode: OpenMode = "create"
    salvage: bool = False
    check: bool = True
    progress: Mode | None = None
    shard: Shard | None = None
    ray: str | None = None  # the address of a Ray cluster, or "auto" for the one that is there
    unused: int = 0  # bags that a setting leaves out
    remote: RemoteDataset | None = None  # the dataset in object storage for which `out` stands
    left_out: tuple[str, ...] = ()  # topics that the guess does not take

    @property
    def target(self) -> Path | ObjectPath:
        """Where the dataset is, as the user names it."""
        return self.out if self.remote is None else self.remote.url

    @property
    def units(self) -> Path | ObjectPath:
        """Where units are committed."""
        return self.out / UNITS if self.remote is None else self.remote.units

    @property
    def own_bags(self) -> list[Path]:
        """The bags that this run is to convert: all, or those of its shard."""
        return self.bags if self.shard is None else self.bags[self.shard.index :: self.shard.count]


def robot_words(words: Sequence[str]) -> list[str]:
    """Return the `key=value` words that are settings of a robot's own file: with a section."""
    sections = {word: word.partition("=")[0].partition(".")[::2] for word in words}
    own = ("features", "episodes", "tasks")
    return [word for word, (section, rest) in sections.items() if rest and section not in own]


def make_request(
    bags: Paths,
    out: str | os.PathLike[str],
    map: str | os.PathLike[str] | Mapping | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    memory: str | int = DEFAULT_MEMORY,
    workers: int = 1,
    resume: bool = False,
    append: bool = False,
    overwrite: bool = False,
    salvage: bool = False,
    version: Version | None = None,
    check: bool = True,
    progress: Mode | None = None,
    shard: str | None = None,
    ray: str | bool = False,
    **settings: Any,
) -> Request:
    """Check what a user asks for, and find the bags.

    Args:
        bags: As for `convert`.
        out: As for `convert`.
        map: As for `convert`.
        config: The settings file of a robot (Kuavo's), instead of `map`.
        overrides: `key=value` words: settings of `config`, or of the mapping.
        memory: Resident memory to stay below, all workers together.
        workers: Bags converted at a time; the dataset does not depend on it.
        resume: Go on with a conversion that was interrupted; what is committed is skipped.
        append: Add episodes to a dataset that exists.
        overwrite: Replace a dataset that exists.
        salvage: Read what can be read of damaged bags.
        version: Of the dataset format: "v3.0" or "v2.1"; None for that of the dataset that is
            gone on with, or v3.0.
        check: Verify the dataset when it is done (of the pictures, a sample is decoded).
        progress: "rich", "plain" or "quiet"; None chooses by the terminal.
        shard: "3/100" makes the units of one part of the bags, for a job array; `penstock build`
            makes the dataset when all are done.
        ray: True converts on the Ray cluster that is there, or one of this machine; a text is the
            address of one. `memory` is then that of each bag, and `workers` has no meaning.
        settings: Of the mapping, instead of its own: fps, codec, depth_codec, clock, task, gap,
            split_frames, …; None leaves one alone.

    Raises:
        UsageError: Something is wrong with a setting; nothing was touched.
        DataError: There is no bag, or none that can be opened.
    """
    for words in (
        {"resume": resume, "append": append, "overwrite": overwrite},
        {"shard": shard, "overwrite": overwrite},
        {"shard": shard, "ray": ray},
        {"map": map, "config": config},
    ):
        given = [name for name, value in words.items() if value]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} exclude each other: choose one")
    part = None if shard is None else Shard.parse(shard)
    if ray and ray is not True and ray != RAY_AUTO and ":" not in str(ray):
        raise UsageError(
            f"ray is {ray!r}, which is no address: give --ray behind the paths, or --ray=HOST:PORT"
        )
    if workers < 1:
        raise UsageError(f"workers is {workers}: give at least 1")
    if is_object(out) and overwrite:
        raise UsageError(f"{out}: --overwrite is for folders: remove it there, or use a new name")
    remote = None
    if is_object(out):
        remote = RemoteDataset(ObjectPath(str(out)))
        remote.pull()
        out = remote.folder
    goes_on = resume or append or part is not None
    version = version or (_version_of(Path(out)) if goes_on else "v3.0")
    if version not in VERSIONS:
        raise UsageError(f"version is {version!r}: {did_you_mean(version, VERSIONS)}")
    try:
        memory_bytes = parse_bytes(memory)
    except UsageError as error:
        raise UsageError(f"memory: {error}") from None
    if memory_bytes < parse_bytes(_LEAST_MEMORY):
        raise UsageError(f"memory is {memory!r}: the codecs alone need {_LEAST_MEMORY}")
    paths = [bags] if isinstance(bags, str | os.PathLike) else list(bags)
    used = find_bags([os.fspath(path) if not is_object(path) else str(path) for path in paths])
    found = len(used)
    own = robot_words(overrides) if config is not None else []
    mapping: Mapping | None = None
    if config is not None:
        asked = robots.load_config(Path(config), own)
        mapping = asked.mapping
        used = asked.choose(used) if asked.choose else used
    elif map is not None:
        mapping = map if isinstance(map, Mapping) else load_map(Path(map))
    elif goes_on:
        mapping = _mapping_of(Path(out))
    speaking: list[str] = []
    # Packing exchanges the folder: a relative name would then mean the old one.
    out = Path(out).absolute()
    there = next(folder for folder in out.parents if folder.is_dir())
    opened = OpenRecording(salvage, Limits.for_memory(memory_bytes), there)
    if mapping is None:
        mapping, speaking = _guess(used, opened)
    mapping = _changed(mapping, settings, [word for word in overrides if word not in own])
    if overwrite:
        _check_outside(used, out)
    mode: OpenMode = "append" if append else "overwrite" if overwrite else "create"
    return Request(
        used,
        out,
        mapping,
        opened,
        version,
        memory_bytes,
        workers,
        "resume" if resume else mode,
        salvage,
        check,
        progress,
        part,
        (RAY_AUTO if ray is True else str(ray)) if ray else None,
        found - len(used),
        remote,
        tuple(name for name in speaking if name not in mapping.topics),
    )


def _changed(mapping: Mapping, settings: dict[str, Any], words: Sequence[str]) -> Mapping:
    """Return the mapping with settings of the call and words of the command instead of its own."""
    given = {name: value for name, value in settings.items() if value is not None}
    if not given and not words:
        return mapping
    content = {**mapping.to_json(), **given}
    for word in words:
        key, _, text = word.partition("=")
        set_word(content, key, parse_value(text))
    return from_json(content, "the command")


def _version_of(out: Path) -> Version:
    """Return the version of the dataset in a folder; v3.0 if there is none."""
    plan = read_plan(out)
    if plan is not None:
        return plan.spec.version
    return read_info(out).format.version if (out / INFO_PATH).is_file() else "v3.0"


def _check_outside(bags: Sequence[Path], out: Path) -> None:
    """Refuse to replace a folder that holds what is to be converted."""
    for bag in bags:
        if out.resolve() in (bag.resolve(), *bag.resolve().parents):
            raise UsageError(f"{bag} lies in {out}, which would be deleted: move it elsewhere")


def _guess(bags: Sequence[Path], opened: OpenRecording) -> tuple[Mapping, list[str]]:
    """Guess a mapping for what most of the bags have, from the first that has all of it.

    Returns:
        The mapping, and the topics of that bag that have messages.
    """
    error: PenstockError | None = None
    topics: dict[Path, set[str]] = {}
    for path in bags[:_MOST_LOOKED_AT]:
        try:
            bag = opened.open(path)
            topics[path] = {name for name, topic in bag.topics.items() if topic.count}
        except DataError as problem:
            error = error or problem
    counts = Counter(name for names in topics.values() for name in names)
    common = {name for name, count in counts.items() if 2 * count > len(topics)}
    everywhere = set[str]().union(*topics.values()).intersection(*topics.values())
    for path in sorted(topics, key=lambda path: len(common - topics[path])):
        try:
            bag = opened.open(path)
            mapping = guess_mapping(bag)
            # The profile of a robot knows itself which topics stand in for which.
            known = robots.recognise(topics[path]) is not None
            speaking = [name for name in bag.topics if name in topics[path]]
            return (mapping if known else restrict(mapping, common, everywhere)), speaking
        except DataError as problem:
            error = error or problem
    assert error is not None  # find_bags returns at least one
    raise error


def _mapping_of(out: Path) -> Mapping | None:
    """Return the mapping of a dataset that goes on; None if it was not made from recordings."""
    with suppress(DataError, UsageError, LookupError, TypeError):
        plan = read_plan(out)
        if plan is not None:
            return from_json(plan.settings["mapping"], str(out))
    return None
