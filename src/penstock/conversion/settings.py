"""Mappings from outside: JSON values, YAML files, `key=value` words; every mistake is named."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from penstock.conversion.mapping import Camera, Mapping, Source, TableRow, Vector
from penstock.core.files import storage_error
from penstock.errors import UsageError
from penstock.ui.suggestions import did_you_mean

_Record = TypeVar("_Record")
_Words = dict[str, Any]

_MAX_YAML_BYTES: Final = 4 * 2**20
_MOST_OTHERWISE: Final = 8
_BY_NAME: Final = re.compile(r"([^\[\]]+)\[([^\[\]]*[^\[\]0-9][^\[\]]*)\]")
_VECTOR_KEYS: Final = {entry.name for entry in fields(Vector)}
_SOURCE_KEYS: Final = {entry.name for entry in fields(Source)} | {"topic", "frame"}


def from_json(content: AnyMapping[str, Any], where: str = "mapping") -> Mapping:
    """Build a mapping from JSON or YAML values.

    Raises:
        UsageError: A key or value is wrong; says which, where, and what was probably meant.
    """
    values = dict(content)
    described = values.get("features")
    if not isinstance(described, AnyMapping) or not described:
        raise UsageError(f"{where} has no features: list at least one under `features:`")
    values["features"] = {
        str(name): _feature(entry, f"{where}: feature {name!r}")
        for name, entry in described.items()
    }
    if _is_number(values.get("timeline"), float):  # a fixed rate, which is that of the frames
        if values["timeline"] != values.get("fps"):
            raise UsageError(f"{where}: timeline is {values['timeline']}, and fps is not: set fps")
        values["timeline"] = "rate"
    table = values.get("table") or ()
    values["table"] = load_table(Path(table)) if isinstance(table, str) else _rows(table, where)
    return build(Mapping, values, where)


def _feature(entry: Any, where: str) -> Vector | Camera:
    if not isinstance(entry, AnyMapping):
        raise UsageError(f"{where} is {entry!r}: describe it by topic and field")
    values = dict(entry)
    kind = values.pop("feature", None)
    if kind == "camera" or (kind is None and "kind" in values):
        return build(Camera, values, where)
    sources, each = values.pop("sources", None), f"{where}, source "
    if sources is None:  # the short form: one source, its keys beside the feature's
        sources, each = [{key: values.pop(key) for key in [*values] if key not in _VECTOR_KEYS}], ""
    if not isinstance(sources, Sequence) or isinstance(sources, str):
        raise UsageError(f"{where}: sources is {sources!r}: give a list")
    built: list[Source] = []
    for number, source in enumerate(sources, 1):
        here = f"{each}{number}" if each else where
        if not isinstance(source, AnyMapping):
            raise UsageError(f"{here} is {str(source)[:80]!r}: give topic and field")
        several = source.get("field")
        for field in several if isinstance(several, list) else [several]:
            one = source if field is None else {**source, "field": field}
            built.append(build(Source, one, here))
    return build(Vector, {**values, "sources": tuple(built)}, where)


def _rows(table: Any, where: str) -> tuple[TableRow, ...]:
    if not isinstance(table, Sequence) or not all(isinstance(row, AnyMapping) for row in table):
        raise UsageError(f"{where}: a table is a list of rows with bag, start, end and task")
    return tuple(build(TableRow, row, f"{where}: row {n}") for n, row in enumerate(table, 1))


def _camera_words(values: _Words, where: str) -> None:
    if "topic" in values:
        values["topics"] = (values.pop("topic"),)


def _source_words(values: _Words, where: str) -> None:
    """Turn the short words of a source into its own: topic, position[arm_*], frame."""
    if where.count("otherwise.") > _MOST_OTHERWISE:
        raise UsageError(f"{where[:80]}…: too many sources that stand in for each other")
    _camera_words(values, where)
    by_name = _BY_NAME.fullmatch(str(values.get("field", "")))
    if by_name is not None:
        values["field"] = by_name[1]
        values["joints"] = [name.strip() for name in by_name[2].split(",")]
    if "frame" in values:
        pair = values.pop("frame")
        named = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not named or not all(isinstance(name, str) and name for name in pair):
            raise UsageError(f"{where}: frame is {pair!r}: give two names, [parent, child]")
        values["field"] = ">".join(pair)


def _row_words(values: _Words, where: str) -> None:
    for key in [*values]:
        value, name = values.pop(key), str(key).strip()
        if value not in (None, ""):
            values[f"{name}_s" if name in ("start", "end") else name] = value


# How people write a record, turned into its own keys; and words that are right beside its keys.
_PREPARE: Final[dict[type, Callable[[_Words, str], None]]] = {
    Source: _source_words,
    Camera: _camera_words,
    TableRow: _row_words,
}
_ALSO: Final[dict[type, set[str]]] = {Source: _SOURCE_KEYS | _VECTOR_KEYS, Camera: {"topic"}}


def build(
    kind: type[_Record], content: AnyMapping[str, Any], where: str, section: str = ""
) -> _Record:
    """Build a dataclass from JSON or YAML values; keys and types are checked by its fields.

    Args:
        kind: The dataclass; its fields may be dataclasses themselves.
        content: The values.
        where: For messages: the file, and the part of it.
        section: For messages: what stands before the keys, such as "dataset.".
    """
    values = dict(content)
    if kind in _PREPARE:
        _PREPARE[kind](values, where + section)
    hints = get_type_hints(kind)
    known = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    built: _Words = {}
    for key, value in values.items():
        name = f"{section}{key}"
        if key not in known:
            hint = did_you_mean(name, [section + it for it in (*known, *_ALSO.get(kind, ()))])
            raise UsageError(f"{where} has an unknown key {name!r}: {hint}")
        built[key] = _convert(value, hints[key], where, name)
    for name, entry in known.items():
        required = entry.default is NO_DEFAULT and entry.default_factory is NO_DEFAULT
        if required and name not in built:
            raise UsageError(f"{where} lacks {'topic' if name == 'topics' else name!r}: add it")
    return kind(**built)


def _convert(value: Any, hint: Any, where: str, key: str) -> Any:
    """Return the value of a key as its type hint wants it, or say what is wrong with it."""
    options, origin = get_args(hint), get_origin(hint)
    if origin in (Union, UnionType):  # always: or None
        return None if value is None else _convert(value, options[0], where, key)
    if origin is Literal:
        if value not in options or isinstance(value, bool):
            raise UsageError(f"{where}: {key} is {value!r}: {did_you_mean(value, options)}")
        return value
    if isinstance(hint, type) and is_dataclass(hint):
        if isinstance(value, AnyMapping):
            return build(hint, value, where, f"{key}.")
        shown = str(value)[:80]
        raise UsageError(f"{where}: {key} is {shown!r}: give it as keys, such as topic: /name")
    if origin is dict or (origin is tuple and is_dataclass(options[0])):
        return value  # built before
    if origin is tuple:
        return _tuple(value, options[0], f"{where}: {key}")
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    if not (isinstance(value, str) if hint is str else _is_number(value, hint)):
        raise UsageError(f"{where}: {key} is {value!r}: give {words[hint]}")
    return hint(value)


def _tuple(value: Any, kind: type, where: str) -> tuple[Any, ...]:
    if kind is str:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
            raise UsageError(f"{where} is {value!r}: give a list of names")
    else:
        pair = isinstance(value, Sequence) and len(value) == 2
        if not pair or not all(_is_number(v, kind) for v in value):
            raise UsageError(f"{where} is {value!r}: give two numbers, such as [0, 10]")
    return tuple(kind(each) for each in value)


def _is_number(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, int)
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


def set_word(content: _Words, key: str, value: Any) -> None:
    """Change one setting of a mapping's JSON: fps, features.action, features.action.topic."""
    section, _, rest = key.partition(".")
    if section not in ("features", "episodes", "tasks") or not rest:
        content[key] = value
        return
    inner = content[section] = dict(content.get(section) or {})
    name, _, setting = rest.rpartition(".")
    if section != "features" or rest in inner or isinstance(value, AnyMapping) or value is None:
        inner[rest] = value
        if section == "features" and value is None:
            del inner[rest]
        return
    feature = inner[name] = dict(inner.get(name) or {})
    changed = feature
    if feature.get("sources") and setting in _SOURCE_KEYS - {"tolerance_s"}:
        if len(feature["sources"]) != 1:
            raise UsageError(
                f"{key}: {name} has {len(feature['sources'])} sources: give all of it, such as "
                f"features.{name}={{topic: /name, field: data}}, or edit a map"
            )
        changed = dict(feature["sources"][0])
        feature["sources"] = [changed]
    if setting == "topic":
        changed.pop("topics", None)
    changed[setting] = value


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
        rows: list[_Words] = list(csv.DictReader(text.lstrip("\ufeff").splitlines()))
    except csv.Error as error:
        raise UsageError(f"{path} is not CSV: {error}") from error
    for number, row in enumerate(rows, 1):
        if None in row:
            raise UsageError(f"{path}: row {number} has more columns than the first line has names")
        for key in row:
            if key.strip().removesuffix("_s") in ("start", "end") and row[key]:
                row[key] = parse_value(row[key])
    return _rows(rows, str(path))


def load_yaml(path: Path) -> _Words:
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


def _parse_yaml(path: Path | None, text: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def parse_value(text: str) -> Any:
    """Read the value of a `key=value` word as YAML: 10, true, null, [0, 1500], text."""
    try:
        return _parse_yaml(None, text)
    except UsageError:
        return text
