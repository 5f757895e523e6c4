"""What a dataset is to be, and what it holds: the two files that a build goes by.

```
.penstock/plan.json         the plan: features, settings, the recordings in their order
.penstock/units/            units that are committed and not built yet, and notes of failures
.penstock/claims/           who makes which unit, where several machines do
meta/penstock/built.jsonl   what the LeRobot files hold: a line of totals, then a line per unit
meta/penstock/stats/        the statistics of the units, to be merged with those of later ones
```
What is below meta/ belongs to the dataset and travels with it: where every episode came from, and
the size and checksum of every file. What is below .penstock/ is work under way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from isal import isal_zlib
from typing_extensions import Self

from penstock.dataset.layout import FORMATS, PRIVATE_FOLDER, Feature, FileLimits, Spec, own_features
from penstock.dataset.tables import inside
from penstock.dataset.unit import MALFORMED, Digest, UnitRecord, parse_json
from penstock.errors import CorruptFile, DataError, UsageError
from penstock.objects import ObjectPath

LOCK_NAME = ".penstock.lock"
PLAN = f"{PRIVATE_FOLDER}/plan.json"
REPLACED_PLAN = f"{PRIVATE_FOLDER}/plan.replaced.json"
UNITS = f"{PRIVATE_FOLDER}/units"
REPLACED_UNITS = f"{PRIVATE_FOLDER}/units.replaced"
CLAIMS = f"{PRIVATE_FOLDER}/claims"
BUILT = "meta/penstock/built.jsonl"
STATS_FOLDER = "meta/penstock/stats"
TOTAL_STATS = f"{STATS_FOLDER}/_total.pack"
_FORMAT = 2  # 1 was settings.json beside a journal
# May change on a resume: which recordings can be read, not what they become; and datasets of
# before know no joints.
_FREE = ("settings.salvage", "settings.joints", "format", "bags", "replaces")
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Plan:
    """What a dataset is to be.

    Attributes:
        settings: JSON of whoever makes the units; compared when it goes on.
        bags: The recordings by fingerprint; the place of one is the position of its unit.
        replaces: The LeRobot files there are of another dataset, which the first build replaces.
    """

    spec: Spec
    settings: dict[str, Any] = field(default_factory=dict)
    bags: list[str] = field(default_factory=list)
    replaces: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        spec = self.spec
        return {
            "format": _FORMAT,
            "version": spec.version,
            "fps": spec.fps,
            "robot_type": spec.robot_type,
            "limits": asdict(spec.limits),
            "features": {name: feature.to_json() for name, feature in spec.features.items()},
            "settings": json.loads(json.dumps(self.settings)),
            "bags": self.bags,
            "replaces": self.replaces,
        }

    def to_bytes(self) -> bytes:
        """Return the content of plan.json."""
        return json.dumps(self.to_json(), indent=1).encode()

    @classmethod
    def read(cls, path: Path | ObjectPath) -> Self:
        """Read plan.json, or settings.json of earlier versions."""
        try:
            content = parse_json(path.read_bytes())
            features = {n: Feature.from_json(n, f) for n, f in content["features"].items()}
            if content["version"] not in FORMATS or type(content["fps"]) is not int:
                raise ValueError(f"version {content['version']!r}, fps {content['fps']!r}")
            spec = Spec(
                features,
                content["fps"],
                content["robot_type"],
                content["version"],
                FileLimits(**content["limits"]),
            )
            bags = [str(each) for each in content.get("bags", [])]
            replaces = bool(content.get("replaces", False))
            return cls(spec, dict(content["settings"]), bags, replaces)
        except (*MALFORMED, OSError) as error:
            raise CorruptFile(f"{path} is damaged ({error})") from error
        except DataError as error:
            raise CorruptFile(f"{path} is damaged: {error}") from error


@dataclass(frozen=True)
class Base:
    """Episodes that no unit knows: others made them, or an earlier version of penstock.

    None of their files is ever changed.

    Attributes:
        next_file: Number of the next new file: "data", "episodes", "videos/<key>".
        info: The info.json found.
        sources: Where they came from, as far as that is known.
    """

    episodes: int = 0
    frames: int = 0
    tasks: list[str] = field(default_factory=list)
    next_file: dict[str, int] = field(default_factory=dict)
    info: dict[str, Any] | None = None
    sources: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read it; a value of the wrong kind raises what Python raises for it."""
        return cls(
            int(value["episodes"]),
            int(value["frames"]),
            [str(task) for task in value["tasks"]],
            {str(kind): int(number) for kind, number in value["next_file"].items()},
            None if value["info"] is None else dict(value["info"]),
            [dict(source) for source in value["sources"]],
        )


@dataclass(frozen=True)
class Built:
    """What the LeRobot files of a dataset hold.

    Units are in the order of their episodes; the first `folded` of them are summed up in one file
    of statistics.
    """

    base: Base = field(default_factory=Base)
    units: list[UnitRecord] = field(default_factory=list)
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: list[str] = field(default_factory=list)
    folded: int = 0
    files: dict[str, Digest] = field(default_factory=dict)

    @property
    def episodes(self) -> int:
        """Episodes, those of the base included."""
        return self.base.episodes + sum(len(unit.episodes) for unit in self.units)

    @property
    def frames(self) -> int:
        """Frames, those of the base included."""
        return self.base.frames + sum(unit.frames for unit in self.units)

    def to_bytes(self) -> bytes:
        """Return the content of built.jsonl: every line begins with its own CRC-32."""
        head = {
            "format": _FORMAT,
            "base": asdict(self.base),
            "infos": self.infos,
            "tasks": self.tasks,
            "folded": self.folded,
            "files": self.files,
            "units": len(self.units),
        }
        return b"".join(_line(value) for value in [head, *map(asdict, self.units)])

    @classmethod
    def read(cls, root: Path) -> Self | None:
        """Read it; None if the dataset has none.

        Raises:
            CorruptFile: A line fails its checksum, or one is missing.
        """
        path = inside(root, BUILT)
        if not path.is_file():
            return None
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError(f"{path.stat().st_size} bytes")
            with path.open("rb") as file:
                head = parse_line(file.readline())
                units = [UnitRecord.from_json(parse_line(line)) for line in file]
            if head["format"] != _FORMAT or head["units"] != len(units):
                raise ValueError(f"format {head['format']}, {len(units)} of {head['units']} units")
            files = {str(name): (int(a), int(b)) for name, (a, b) in head["files"].items()}
            folded = int(head["folded"])
            if not 0 <= folded <= len(units):
                raise ValueError(f"{folded} of {len(units)} units are summed up")
            tasks = [str(task) for task in head["tasks"]]
            infos = {str(name): dict(info) for name, info in head["infos"].items()}
            return cls(Base.from_json(head["base"]), units, infos, tasks, folded, files)
        except (*MALFORMED, OSError, UsageError) as error:
            raise CorruptFile(f"{path} is damaged ({error})") from error


def _line(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %s\n" % (isal_zlib.crc32(text), text)


def parse_line(line: bytes) -> Any:
    """Return the JSON of a line that begins with its CRC-32; a ValueError if it is not whole."""
    crc, _, text = line.rstrip(b"\n").partition(b" ")
    if crc != b"%08x" % isal_zlib.crc32(text) or not line.endswith(b"\n"):
        raise ValueError("a line fails its checksum")
    return parse_json(text)


def check_same(root: Path, stored: Plan, given: Plan) -> None:
    """Refuse to go on with other settings; the error names the first that differs."""

    def compare(before: Any, now: Any, path: str) -> None:
        if path in _FREE:
            return
        if isinstance(before, dict) and isinstance(now, dict):
            for key in {**before, **now}:
                compare(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
        elif before != now:
            raise UsageError(
                f"{root} was begun with {path} = {_short(before)}, and not {_short(now)}: "
                "resume with the same settings, or write to another folder"
            )

    compare(stored.to_json(), given.to_json(), "")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"


def check_fits(root: Path, stored: Spec, given: Spec) -> None:
    """Refuse to add episodes of another kind; the error names the first thing that differs."""
    for what in ("version", "fps"):
        a, b = getattr(stored, what), getattr(given, what)
        if a != b:
            raise UsageError(f"{root} has {what} {a}, and the new episodes have {b}")
    mine, theirs = own_features(stored.features), own_features(given.features)
    for name in [*mine, *theirs]:
        if name not in theirs or name not in mine:
            where = "the dataset has" if name in mine else "the new episodes have"
            raise UsageError(f"{root}: only {where} the feature {name!r}")
        one, other = _kind(mine[name]), _kind(theirs[name])
        for what in one:
            if one[what] != other.get(what):
                raise UsageError(
                    f"{root}: {what} of {name!r} is {_short(one[what])} in the dataset and "
                    f"{_short(other.get(what))} in the new episodes"
                )


def _kind(feature: Feature) -> dict[str, Any]:
    """Return what must be the same in both; names of a picture's axes are a matter of taste."""
    if feature.is_picture:
        return {"dtype": feature.dtype, "shape": list(feature.picture_size)}
    return {"dtype": feature.dtype, "shape": list(feature.shape), "names": feature.names}
