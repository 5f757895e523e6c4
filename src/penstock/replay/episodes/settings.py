"""What a replay buffer was told: checked once, and small enough to be saved with it."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock.core.memory import parse_bytes
from penstock.errors import CorruptFile, UsageError
from penstock.replay.episodes.records import MODES
from penstock.replay.episodes.schema import Key, KeyPath, as_path, as_paths, known, show
from penstock.replay.frames import CODEC_NAMES
from penstock.ui.suggestions import did_you_mean

_DEFAULT_ALPHA = 0.6
_EVICTIONS = ("fifo", "lru")


@dataclass(frozen=True)
class Settings:
    """The settings of a `DictReplayBuffer`, in its order of keys."""

    max_size: int | None
    max_bytes: int | None
    paths: tuple[KeyPath, ...]
    codecs: tuple[str, ...]
    modes: tuple[str, ...]
    block_frames: int
    eviction: str
    next_paths: tuple[KeyPath, ...]
    alpha: float | None

    @classmethod
    def check(
        cls,
        *,
        max_size: int | None,
        max_bytes: int | str | None,
        keys: Iterable[Key],
        img_compressed: bool,
        codecs: str | Mapping[Key, str] | None,
        mode: str | Mapping[Key, str],
        block_frames: int,
        eviction: str,
        next_keys: Iterable[Key],
        priority: bool | float,
        spill_dir: str | os.PathLike[str] | None,
    ) -> Settings:
        """Check what the user gave.

        Raises:
            UsageError: Something is not as `DictReplayBuffer` says.
        """
        paths = as_paths(keys)
        if not paths:
            raise UsageError("keys is empty; name what an episode holds")
        if max_size is not None and _whole("max_size", max_size) < 1:
            raise UsageError(f"max_size is {max_size}; give the most frames to hold, at least 1")
        limit = None if max_bytes is None else parse_bytes(max_bytes)
        if limit == 0 or (max_size is None and (limit is None or spill_dir is not None)):
            raise UsageError("nothing bounds the buffer; give max_size, or max_bytes of at least 1")
        if spill_dir is not None and limit is None:
            raise UsageError("spill_dir needs max_bytes: the memory to use before the disk")
        if _whole("block_frames", block_frames) < 1:
            raise UsageError(f"block_frames is {block_frames}; give at least 1")
        if eviction not in _EVICTIONS:
            raise UsageError(f"eviction is {eviction!r}; {did_you_mean(eviction, _EVICTIONS)}")
        alpha: float | None = None
        if priority is not False:
            alpha = _DEFAULT_ALPHA if priority is True else float(priority)
            if not 0 <= alpha <= 1:
                raise UsageError(f"priority is {priority}; give the exponent, from 0 to 1")
        next_paths = as_paths(next_keys)
        for path in next_paths:
            known(path, paths, "next_keys")
        settings = cls(
            None if max_size is None else int(max_size),
            limit,
            tuple(paths),
            _per_key("codecs", codecs, paths, CODEC_NAMES, "auto" if img_compressed else "raw"),
            _per_key("mode", mode, paths, MODES, "frame"),
            int(block_frames),
            eviction,
            tuple(next_paths),
            alpha,
        )
        for made in settings.made_paths():
            clash = next((p for p in paths if p[: len(made)] == made or made[: len(p)] == p), None)
            if clash is not None:
                raise UsageError(f"the key {show(clash)} is in the way of {show(made)} of a batch")
        return settings

    def made_paths(self) -> list[KeyPath]:
        """Keys that every batch has beside those stored."""
        made: list[KeyPath] = [("next", *path) for path in self.next_paths]
        if made:
            made.append(("next", "valid"))
        if self.alpha is not None:
            made += [("index",), ("weight",)]
        return made

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able settings."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Settings:
        """Rebuild settings; raises what Python or the checks raise if they make no sense."""
        paths = [tuple(path) for path in record["paths"]]
        settings = cls.check(
            max_size=record["max_size"],
            max_bytes=record["max_bytes"],
            keys=paths,
            img_compressed=False,
            codecs=dict(zip(paths, record["codecs"], strict=True)),
            mode=dict(zip(paths, record["modes"], strict=True)),
            block_frames=record["block_frames"],
            eviction=record["eviction"],
            next_keys=[tuple(path) for path in record["next_paths"]],
            priority=False if record["alpha"] is None else float(record["alpha"]),
            spill_dir=None,
        )
        if len(record) != len(settings.to_json()):
            raise CorruptFile("settings of a newer penstock; upgrade it")
        return settings


def natural(what: str, value: Any, least: int = 1) -> int:
    """Return a whole number.

    Raises:
        UsageError: It is none, or less than the least.
    """
    number = _whole(what, value)
    if number < least:
        raise UsageError(f"{what} is {value}; give at least {least}")
    return number


def _whole(what: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{what} is {value!r}, which is not a whole number") from None


def _per_key(
    what: str,
    given: str | Mapping[Key, str] | None,
    paths: list[KeyPath],
    names: tuple[str, ...],
    default: str,
) -> tuple[str, ...]:
    if given is None or isinstance(given, str):
        chosen = [default if given is None else given] * len(paths)
    else:
        chosen = [default] * len(paths)
        for key, name in given.items():
            chosen[known(as_path(key), paths, what)] = name
    for name in chosen:
        if name not in names:
            raise UsageError(f"{what}: there is no {name!r}; {did_you_mean(name, names)}")
    return tuple(chosen)
