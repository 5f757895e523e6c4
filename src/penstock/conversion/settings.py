"""Mappings from outside: JSON values, YAML files, `key=value` words; every mistake is named."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from penstock.conversion.mapping import (
    Camera,
    Events,
    Mapping,
    Source,
    TableRow,
    Tasks,
    Vector,
)
from penstock.core.files import storage_error
from penstock.errors import UsageError
from penstock.ui.suggestions import did_you_mean

_MAX_YAML_BYTES: Final = 4 * 2**20
_BY_NAME: Final = re.compile(r"([^\[\]]+)\[([^\[\]]*[^\[\]0-9][^\[\]]*)\]")
_OF_SOURCES: Final = {f.name for f in fields(Source)} - {"tolerance_s"} | {"topic", "frame"}


def from_json(content: AnyMapping[str, Any], where: str = "mapping") -> Mapping:
    """Build a mapping from JSON or YAML values.

    Raises:
        UsageError: A key or value is wrong; says which, where, and what was probably meant.
    """
    values = dict(content)
    described = values.pop("features", None)
    if not isinstance(described, AnyMapping) or not described:
        raise UsageError(f"{where} has no features: list at least one under `features:`")
    features = {
        str(name): _feature(entry, f"{where}: feature {name!r}")
        for name, entry in described.items()
    }
    if _is_number(values.get("timeline"), float):  # a fixed rate, which is that of the frames
        if values["timeline"] != values.get("fps"):
            raise UsageError(f"{where}: timeline is {values['timeline']}, and fps is not: set fps")
        values["timeline"] = "rate"
    parts: dict[str, Any] = {}
    for key, kind in (("episodes", Events), ("tasks", Tasks)):
        part = values.pop(key, None)
        if part is not None and not isinstance(part, AnyMapping):
            raise UsageError(f"{where}: {key} is {part!r}: give it as keys, such as topic: /name")
        if part is not None:
            parts[key] = kind(**_fit(kind, dict(part), f"{where}: {key}"))
    table = values.pop("table", None) or ()
    parts["table"] = load_table(Path(table)) if isinstance(table, str) else _rows(table, where)
    return Mapping(features=features, **parts, **_fit(Mapping, values, where, skip={"features"}))


def _rows(table: Any, where: str) -> tuple[TableRow, ...]:
    if not isinstance(table, Sequence) or not all(isinstance(row, AnyMapping) for row in table):
        raise UsageError(f"{where}: a table is a list of rows with bag, start, end and task")
    rows = []
    for number, row in enumerate(table, 1):
        values = {str(key).strip(): value for key, value in row.items() if value not in (None, "")}
        for short in ("start", "end"):  # as people write them
            if short in values:
                values[f"{short}_s"] = values.pop(short)
        rows.append(TableRow(**_fit(TableRow, values, f"{where}: row {number}")))
    return tuple(rows)


def _feature(entry: Any, where: str) -> Vector | Camera:
    if not isinstance(entry, AnyMapping):
        raise UsageError(f"{where} is {entry!r}: describe it by topic and field")
    values = dict(entry)
    kind = values.pop("feature", None)
    if kind == "camera" or (kind is None and "kind" in values):
        if "topic" in values:
            values["topics"] = (values.pop("topic"),)
        return Camera(**_fit(Camera, values, where))
    if "sources" not in values:  # the short form: one source, its keys beside the feature's
        wide = {f.name for f in fields(Vector)}
        own = ({f.name for f in fields(Source)} | {"topic", "frame"}) - wide
        unknown = next((key for key in values if key not in own | wide), None)
        if unknown is not None:
            hint = did_you_mean(unknown, own | wide)
            raise UsageError(f"{where} has an unknown key {unknown!r}: {hint}")
        values["sources"] = [{key: values.pop(key) for key in list(values) if key in own}]
    if not isinstance(values["sources"], Sequence) or isinstance(values["sources"], str):
        raise UsageError(f"{where}: sources is {values['sources']!r}: give a list")
    values["sources"] = tuple(
        source
        for number, entry in enumerate(values["sources"], 1)
        for source in _sources(entry, f"{where}, source {number}")
    )
    return Vector(**_fit(Vector, values, where, skip={"sources"}))


def _sources(entry: Any, where: str) -> Iterator[Source]:
    """Yield a source for each of its fields."""
    several = entry.get("field") if isinstance(entry, AnyMapping) else None
    if not isinstance(several, list):
        several = [several]
    for field in several:
        yield _source(entry if field is None else {**entry, "field": field}, where)


def set_word(content: dict[str, Any], key: str, value: Any) -> None:
    """Change one setting of a mapping's JSON: fps, features.action, features.action.topic.

    Raises:
        UsageError: There is no one place for it.
    """
    section, _, rest = key.partition(".")
    if section not in ("features", "episodes", "tasks") or not rest:
        content[key] = value
        return
    inner = dict(content.get(section) or {})
    content[section] = inner
    name, _, setting = rest.rpartition(".")
    if section != "features" or rest in inner or isinstance(value, AnyMapping) or value is None:
        inner[rest] = value
        if section == "features" and value is None:
            del inner[rest]
        return
    feature = dict(inner.get(name) or {})
    sources = feature.get("sources")
    if sources and setting in _OF_SOURCES:
        if len(sources) != 1:
            raise UsageError(
                f"{key}: {name} has {len(sources)} sources: give all of it, such as "
                f"features.{name}={{topic: /name, field: data}}, or edit a map"
            )
        source = {k: v for k, v in sources[0].items() if setting != "topic" or k != "topics"}
        feature["sources"] = [{**source, setting: value}]
    else:
        topic = {k: v for k, v in feature.items() if setting != "topic" or k != "topics"}
        feature = {**topic, setting: value}
    inner[name] = feature


def _source(entry: Any, where: str, depth: int = 0) -> Source:
    if not isinstance(entry, AnyMapping) or depth > 8:
        raise UsageError(f"{where} is {str(entry)[:80]!r}: give topic and field")
    values = dict(entry)
    if "topic" in values:
        values["topics"] = (values.pop("topic"),)
    match = _BY_NAME.fullmatch(str(values.get("field", "")))
    if match is not None:
        values["field"] = match[1]
        values["joints"] = [name.strip() for name in match[2].split(",")]
    if "frame" in values:
        pair = values.pop("frame")
        named = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not named or not all(isinstance(name, str) and name for name in pair):
            raise UsageError(f"{where}: frame is {pair!r}: give two names, [parent, child]")
        values["field"] = ">".join(pair)
    if values.get("otherwise") is not None:
        values["otherwise"] = _source(values["otherwise"], f"{where}, otherwise", depth + 1)
    return Source(**_fit(Source, values, where, skip={"otherwise"}))


def _fit(
    kind: type, values: dict[str, Any], where: str, skip: Collection[str] = ()
) -> dict[str, Any]:
    """Check keys and types against a dataclass; turn lists into tuples."""
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}
    fitted: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise UsageError(f"{where} has an unknown key {key!r}: {did_you_mean(key, known)}")
        fitted[key] = value if key in skip else _convert(value, hints[key], f"{where}: {key}")
    for name, entry in known.items():
        required = entry.default is NO_DEFAULT and entry.default_factory is NO_DEFAULT
        if required and name not in fitted and name not in skip:
            label = "topic" if name == "topics" else name
            raise UsageError(f"{where} lacks {label!r}: add it")
    return fitted


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Return the value as its type hint wants it, or say what is wrong with it."""
    options = get_args(hint)
    if value is None and type(None) in options:
        return None
    text = str(hint)
    if text.startswith("typing.Literal") or (options and str(options[0]).startswith("typing.Lit")):
        choices = get_args(options[0]) if type(None) in options else options
        if value not in choices:
            raise UsageError(f"{where} is {value!r}: {did_you_mean(value, choices)}")
        return value
    if "tuple[str" in text:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, Sequence) or not all(isinstance(v, str) for v in items):
            raise UsageError(f"{where} is {value!r}: give a list of names")
        return tuple(items)
    if "tuple[int" in text or "tuple[float" in text:
        number = int if "tuple[int" in text else float
        if (
            not isinstance(value, Sequence)
            or len(value) != 2
            or not all(_is_number(v, number) for v in value)
        ):
            raise UsageError(f"{where} is {value!r}: give two numbers, such as [0, 10]")
        return tuple(number(v) for v in value)
    for kind, words in ((bool, "true or false"), (int, "a whole number"), (float, "a number")):
        if hint is kind or (kind in options):
            if not _is_number(value, kind):
                raise UsageError(f"{where} is {value!r}: give {words}")
            return kind(value)
    if not isinstance(value, str):
        raise UsageError(f"{where} is {value!r}: give a text")
    return value


def _is_number(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, int)
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


def load_map(path: Path) -> Mapping:
    """Read a mapping from a YAML file; a table that it names lies beside it."""
    content = load_yaml(path)
    if isinstance(content.get("table"), str):
        content["table"] = str(path.parent / content["table"])
    return from_json(content, str(path))


def load_table(path: Path) -> tuple[TableRow, ...]:
    """Read a table of episodes and tasks: CSV with a line of names, or YAML with a list of rows."""
    text = _read_text(path)
    if path.suffix.lower() in (".yaml", ".yml"):
        return _rows(_parse_yaml(path, text), str(path))
    try:
        rows: list[dict[str, Any]] = list(csv.DictReader(text.lstrip("\ufeff").splitlines()))
    except csv.Error as error:
        raise UsageError(f"{path} is not CSV: {error}") from error
    for number, row in enumerate(rows, 1):
        if None in row:
            raise UsageError(f"{path}: row {number} has more columns than the first line has names")
        for key in row:
            if key.strip().removesuffix("_s") in ("start", "end") and row[key]:
                row[key] = parse_value(row[key])
    return _rows(rows, str(path))


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings; tags that would build objects are refused."""
    content = _parse_yaml(path, _read_text(path))
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds no settings: write `key: value` lines")
    return content


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_YAML_BYTES:
            raise UsageError(f"{path} is larger than {_MAX_YAML_BYTES} bytes: not a settings file")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"there is no settings file {path}: check the path") from None
    except OSError as error:
        raise storage_error("read", path, error) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file: {error.reason}") from error


def _parse_yaml(path: Path, text: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} is not YAML: {reason}") from error


def parse_value(text: str) -> Any:
    """Read the value of a `key=value` word as YAML: 10, true, null, [0, 1500], text."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError):
        return text
