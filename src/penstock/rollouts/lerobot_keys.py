"""Which keys of a rollout become which features of a LeRobot dataset.

("agents", "observation", "state")      observation.state
("observation",)                        observation.state
(…, "action")                           action
(…, "reward"), ("next", "reward")       next.reward; alike done, terminated, truncated
anything else                           its names, joined by dots
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.dataset.layout import AUTO_FEATURES, DTYPES, Feature
from penstock.errors import UsageError
from penstock.rollouts.structure import Key
from penstock.ui.suggestions import did_you_mean

DONE = "next.done"
FLAGS = ("done", "terminated", "truncated")
_RESULTS = ("reward", *FLAGS)
_WIDENED = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_MOST_DIMENSIONS = 5


@dataclass(frozen=True)
class Leaf:
    """What one frame of a key is: its type, by the pack's name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def feature(self) -> Feature:
        """Return the feature that holds it exactly."""
        dtype = "float32" if self.dtype in _WIDENED else self.dtype
        shape = self.shape or (1,)
        if len(shape) > _MOST_DIMENSIONS:
            first = shape[: _MOST_DIMENSIONS - 1]
            shape = (*first, math.prod(shape[len(first) :]))
        return Feature(dtype, shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one frame of the feature."""
        return math.prod(self.shape) * np.dtype(self.feature.dtype).itemsize


@dataclass
class Plan:
    """What is written, and what is not.

    Attributes:
        columns: The key of each feature.
        leaves: What a frame of each key is, of those that are read.
        flags: The keys that say where an episode ends; any of them does.
        makes_done: `next.done` is written though there is no such key: any of the flags.
        shifted: Keys left out since they are the next frame of another; see `check_shifted`.
        left_out: Keys that are not written, and why.
    """

    columns: dict[str, Key]
    leaves: dict[Key, Leaf]
    flags: list[Key]
    makes_done: bool = False
    shifted: dict[Key, Key] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def features(self) -> dict[str, Feature]:
        """The features of the dataset."""
        found = {name: self.leaves[key].feature for name, key in self.columns.items()}
        return found | ({DONE: Feature("bool", (1,))} if self.makes_done else {})

    @property
    def widened(self) -> dict[str, str]:
        """Features that hold their numbers in a wider type, and in which they were."""
        return {
            name: self.leaves[key].dtype
            for name, key in self.columns.items()
            if self.leaves[key].dtype in _WIDENED
        }

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame of everything that is read."""
        return sum(self.leaves[key].nbytes for key in self.keys_read())

    def keys_read(self) -> list[Key]:
        """Return every key that is read."""
        return list(
            dict.fromkeys(
                [*self.columns.values(), *self.flags, *self.shifted, *self.shifted.values()]
            )
        )


def make_plan(
    leaves: Mapping[Key, Leaf], odd: Mapping[Key, str], asked: Sequence[str | Key] | None
) -> Plan:
    """Decide what is written.

    Args:
        leaves: The keys of a rollout that have one frame per environment and step.
        odd: The other keys, and what is odd about them.
        asked: Features, dotted keys, or tuples of names; None for all.

    Raises:
        UsageError: A key that is asked for is not there, or cannot be written; nothing is left; or
            two keys would have one name.
    """
    good = {key: leaf for key, leaf in leaves.items() if not _problem(leaf)}
    bad = dict(odd) | {key: problem for key, leaf in leaves.items() if (problem := _problem(leaf))}
    names = feature_names(good)
    chosen = names if asked is None else _asked(asked, names, bad)
    flags = flags_of(good)
    plan = Plan({name: key for key, name in chosen.items()}, dict(good), flags)
    if asked is None:
        plan.left_out = {dotted(key): why for key, why in bad.items()}
        plan.shifted = {
            key: key[1:]
            for key in good
            if key[0] == "next" and key[-1] not in _RESULTS and good.get(key[1:]) == good[key]
        }
    wants_done = asked is None or any(word in (DONE, "done", ("done",)) for word in asked)
    plan.makes_done = bool(flags) and DONE not in names.values() and wants_done
    if not plan.columns and not plan.makes_done:
        raise UsageError("the rollout has no key that a dataset can hold")
    return plan


def _problem(leaf: Leaf) -> str:
    """Say why a key cannot be written; nothing if it can."""
    if not math.prod(leaf.shape):
        return f"its frames are empty: {leaf}"
    return "" if leaf.feature.dtype in DTYPES else f"LeRobot has no {leaf.dtype}"


def flags_of(leaves: Mapping[Key, Leaf]) -> list[Key]:
    """Return the keys that say, with one value per frame, that an episode ended with the step.

    What TorchRL's collectors store under "next" is the state after the step; the same names outside
    of it are then the state before.
    """
    found = [k for k, leaf in leaves.items() if k[-1] in FLAGS and math.prod(leaf.shape) == 1]
    return [key for key in found if key[0] == "next"] or found


def feature_names(keys: Iterable[Key]) -> dict[Key, str]:
    """Return the name of the feature of each key.

    Raises:
        UsageError: Two keys would have the same.
    """
    keys = list(keys)
    wanted = {key: _lerobot_name(key) for key in keys}
    if "action" not in wanted.values():
        wanted |= {key: "action" for key in keys if key[-1] == "action_normalized"}
    owners: dict[str, Key] = {}
    # Of two rewards the one after the step has the name, and else the outermost.
    for key in sorted(keys, key=lambda key: (key[0] != "next", len(key))):
        owners.setdefault(wanted[key], key)
    names = {key: wanted[key] if owners[wanted[key]] == key else dotted(key) for key in keys}
    names = {key: f"rollout.{n}" if n in AUTO_FEATURES else n for key, n in names.items()}
    seen: dict[str, Key] = {}
    for key, name in names.items():
        if name in seen:
            raise UsageError(
                f"{seen[name]!r} and {key!r} would both be the feature {name!r}; rename one, or "
                "choose by keys"
            )
        seen[name] = key
    return names


def dotted(key: Key) -> str:
    """Return a key as one name, without what a feature's name cannot have."""
    text = ".".join(str(part) for part in key)
    return text.replace("/", "_").replace("\\", "_").strip(".")


def _lerobot_name(key: Key) -> str:
    after, own = ("next.", key[1:]) if key[0] == "next" and len(key) > 1 else ("", key)
    if own[-1] in _RESULTS:
        return f"next.{own[-1]}"
    if own[-1] == "action":
        return f"{after}action"
    if own in (("observation",), ("state",)):
        return f"{after}observation.state"
    if own == ("lidar",):
        return f"{after}observation.lidar"
    if "observation" in own[:-1]:
        own = own[own.index("observation") :]
    return after + dotted(own)


def _asked(
    asked: Sequence[str | Key], names: Mapping[Key, str], bad: Mapping[Key, str]
) -> dict[Key, str]:
    """Return the keys that are asked for."""
    if isinstance(asked, str | tuple):
        raise UsageError(f"keys={asked!r}: give a list of keys, as [{asked!r}]")
    chosen: set[Key] = set()
    for word in asked:
        problem = next((f"{w!r}: {why}" for w, why in bad.items() if _is(word, w)), None)
        found = {key for key, name in names.items() if _is(word, key) or word == name}
        if not found and word in ("done", DONE, ("done",)) and flags_of_names(names):
            continue  # it is made of the flags
        if not found:
            known = [*names.values(), *map(dotted, names)]
            hint = problem or did_you_mean(dotted(_path(word)), list(dict.fromkeys(known)))
            raise UsageError(f"no key {word!r} in this rollout can be written: {hint}")
        chosen |= found
    return {key: name for key, name in names.items() if key in chosen}


def flags_of_names(names: Iterable[Key]) -> bool:
    """Tell whether a key is named like one that ends episodes."""
    return any(key[-1] in FLAGS for key in names)


def _path(word: str | Key) -> Key:
    return word if isinstance(word, tuple) else (word,)


def _is(word: str | Key, key: Key) -> bool:
    """Tell whether a word means a key: by its tuple or the beginning of it, or with dots."""
    if isinstance(word, tuple):
        return key[: len(word)] == word
    text = dotted(key)
    return text == word or text.startswith(f"{word}.")
