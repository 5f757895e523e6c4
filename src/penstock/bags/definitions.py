"""Message definitions: parsed, and refused if hostile, before anything is made from them.

Names are matched against an allow-list; constants and default values are dropped; types must be
defined, must not contain themselves, and must stay within the limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from penstock.bags.idl import UNREADABLE, Field, parse_idl
from penstock.bags.layout import NUMBERS, Node
from penstock.bags.limits import Limits
from penstock.errors import DataError, LimitExceeded

_NAME: Final = r"[A-Za-z][A-Za-z0-9_]*"
_FIELD: Final = re.compile(
    rf"({_NAME}(?:/{_NAME}){{0,3}})(?:<=[0-9]{{1,10}})?(?:\[((?:<=)?[0-9]{{0,10}})\])?"
    rf"[ \t]+({_NAME})(?:[ \t]+[^\n]*)?"
)
_CONSTANT: Final = re.compile(rf"[A-Za-z0-9]+(?:<=[0-9]{{1,10}})?[ \t]+{_NAME}[ \t]*=[^\n]*")
_SEPARATOR: Final = re.compile(r"={3,}")
_TYPE_NAME: Final = re.compile(rf"{_NAME}(?:/{_NAME}){{1,3}}")
_IDL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:/[A-Za-z0-9_]+){0,9}")
_LONGEST_NAME: Final = 255
# Fields of a type with all its sub-messages laid out; no real message comes near.
_MOST_LEAVES: Final = 20_000
_MOST_ARRAY: Final = 2**31

_OTHERS: Final = {"string", "wstring", "wchar", "float128"} | UNREADABLE
_SHORT: Final = {
    "Header": "std_msgs/msg/Header",
    "time": "builtin_interfaces/msg/Time",
    "duration": "builtin_interfaces/msg/Duration",
}
_TIMES: Final = {
    "builtin_interfaces/msg/Time": "time",
    "builtin_interfaces/msg/Duration": "duration",
}


def same_definition(one: str | bytes, other: str | bytes) -> bool:
    """Tell whether two definitions lay messages out alike: comments and the order of parts aside.

    Recorders write them differently for one and the same type (in ROS 1: of the same md5sum).
    """
    if isinstance(one, bytes) or isinstance(other, bytes):
        return one == other
    return one == other or _essence(one) == _essence(other)


def _essence(definition: str) -> tuple[tuple[str, ...], frozenset[tuple[str, ...]]]:
    first, *others = (
        tuple(" ".join(line.split()) for line in map(_without_comment, part) if line.strip())
        for part in _parts(definition)
    )
    return first, frozenset(others)


def _parts(definition: str) -> Iterator[list[str]]:
    """Yield the lines of the type itself, then those of each type that it needs."""
    lines: list[str] = []
    for line in definition.splitlines():
        if _SEPARATOR.fullmatch(line.strip()):
            yield lines
            lines = []
        else:
            lines.append(line)
    yield lines


def _without_comment(line: str) -> str:
    if line.lstrip().startswith(("string ", "wstring ")) and "=" in line.partition("#")[0]:
        return line  # the rest of a constant text is part of it
    return line.partition("#")[0]


Types = dict[str, tuple[Field, ...]]


def load_type(type_name: str, definition: str, encoding: str, limits: Limits) -> Node:
    """Return a message type with all that it contains.

    Args:
        type_name: In ROS 2 spelling.
        definition: From the bag: a .msg text with its dependencies, or IDL. "" takes the type
            from the common ones of ROS.
        encoding: "ros1" or "cdr": which ROS the common types are of.
        limits: Of its size and nesting.

    Raises:
        DataError: It is not understood, incomplete or hostile.
    """
    if len(definition) > limits.definition_bytes:
        raise LimitExceeded(
            f"the definition of {type_name[:80]!r} has {len(definition)} bytes, more than "
            f"{limits.definition_bytes}"
        )
    if is_idl(definition):
        _check_type_name(type_name, _IDL_NAME)
        return _Collector(*parse_idl(definition), encoding, limits).node(type_name, ())
    _check_type_name(type_name)
    found = _parse_msg(definition, type_name) if definition.strip() else {}
    return _Collector(found, {}, encoding, limits).node(type_name, ())


def _parse_msg(text: str, type_name: str) -> Types:
    types: Types = {}
    name = type_name
    fields: list[Field] = []
    lines = iter(text.replace("\r", "").split("\n"))
    for line in lines:
        line = line.strip()
        if _SEPARATOR.fullmatch(line):
            types.setdefault(name, tuple(fields))
            head = next(lines, "").strip()
            if not head.startswith("MSG: "):
                raise DataError(f"the definition of {type_name} has a part without a name")
            name = full_name(head.removeprefix("MSG: ").strip(), "")
            _check_type_name(name)
            fields = []
            continue
        if not line or line.startswith("#") or line.startswith("@") or _CONSTANT.match(line):
            continue
        match = _FIELD.fullmatch(line.partition("#")[0].strip())
        if match is None:
            raise DataError(f"the definition of {name} has a line that is no field: {line[:80]!r}")
        kind, size, field_name = match.groups()
        fields.append(_field(field_name, kind, size, name))
    types.setdefault(name, tuple(fields))
    return types


def _field(name: str, kind: str, size: str | None, owner: str) -> Field:
    if len(name) > _LONGEST_NAME:
        raise DataError(f"the definition of {owner} has a field with a name that is too long")
    if kind not in NUMBERS and kind not in _OTHERS:
        kind = full_name(kind, owner)
        _check_type_name(kind)
    if size is None:
        return Field(name, kind)
    if size == "" or size.startswith("<="):
        return Field(name, kind, -1)
    if int(size) >= _MOST_ARRAY:
        raise LimitExceeded(f"the field {name} of {owner} is an array of {size} items")
    return Field(name, kind, int(size))


def full_name(name: str, owner: str) -> str:
    """Return the full name of a type as it is written in the definition of another."""
    if name in _SHORT:
        return _SHORT[name]
    parts = name.split("/")
    if len(parts) == 1:
        parts = [*owner.split("/")[:-1], name]
    elif len(parts) == 2:
        parts = [parts[0], "msg", parts[1]]
    return "/".join(parts)


def is_idl(text: str) -> bool:
    """Tell whether a definition is written in IDL."""
    head = text.lstrip().partition("\n")
    return (_SEPARATOR.fullmatch(head[0].strip()) is not None and head[2].startswith("IDL: ")) or (
        re.search(r"^[^#\"\n]*\b(module|struct)\s+\w+\s*[{:]", text, re.MULTILINE) is not None
    )


def _from_rosbags(parsed: Any) -> Types:
    """Convert the types of rosbags; their names are checked like all others."""
    from rosbags.interfaces import Nodetype

    types: Types = {}
    for name, (_, fields) in parsed.items():
        found = []
        for field_name, (node, detail) in fields:
            size = None
            if node in (Nodetype.ARRAY, Nodetype.SEQUENCE):
                size = -1 if node == Nodetype.SEQUENCE else detail[1]
                node, detail = detail[0]
            found.append((field_name, node, detail, size))
        types[name] = tuple(
            Field(field_name, detail if node == Nodetype.NAME else detail[0], size)
            for field_name, node, detail, size in found
            if field_name != "structure_needs_at_least_one_member"
        )
    return types


class _Collector:
    """Gathers a type and what it contains, from the bag and else from the common types."""

    def __init__(
        self, found: Types, delimited: dict[str, bool | None], encoding: str, limits: Limits
    ) -> None:
        self._found, self._encoding, self._limits = found, encoding, limits
        self._delimited = delimited
        self._common: Any = None
        self._nodes: dict[str, Node] = {}
        self._leaves: dict[str, int] = {}  # the values of a type laid out

    def node(self, name: str, above: tuple[str, ...]) -> Node:
        """Return a type; none may contain itself."""
        if name in above:
            raise DataError(f"the message type {name} contains itself")
        if len(above) >= self._limits.nesting:
            raise LimitExceeded(
                f"the message type {above[0]} is nested deeper than {self._limits.nesting}"
            )
        if name in self._nodes:
            return self._nodes[name]
        found = Node("message", name=name, delimited=self._delimited.get(name, False))
        leaves = 1
        for field in self._fields(name):
            if not re.fullmatch(_NAME, field.name) or field.name in found.fields:
                raise DataError(f"the message type {name} has a bad field name {field.name[:80]!r}")
            if field.type in NUMBERS or field.type in _OTHERS:
                signed = field.type == "byte" and self._encoding == "ros1"  # in ROS 2 it is not
                inner, each = Node("int8" if signed else field.type, field.size), 1
            else:
                _check_type_name(field.type, _IDL_NAME)
                known = self.node(field.type, (*above, name))
                kind, each = _TIMES.get(field.type, "message"), self._leaves[field.type]
                inner = Node(
                    kind,
                    field.size,
                    fields=known.fields,
                    name=field.type,
                    delimited=known.delimited,
                )
            single = field.type in NUMBERS or field.size is None
            leaves += each * (1 if single else max(field.size or 0, 1))
            if max(leaves, len(self._nodes)) > _MOST_LEAVES:
                raise LimitExceeded(f"the message type {name} has more than {_MOST_LEAVES} fields")
            if field.optional:
                inner = replace(inner, optional=True, default=float("nan"))
            found.fields[field.name] = inner
        self._nodes[name], self._leaves[name] = found, leaves
        return found

    def _fields(self, name: str) -> tuple[Field, ...]:
        if name in self._found:
            return self._found[name]
        if name in _TIMES:
            return Field("sec", "int32"), Field("nanosec", "uint32")
        if self._common is None:
            from rosbags.typesys import Stores, get_typestore

            ros1 = self._encoding == "ros1"
            self._common = get_typestore(Stores.ROS1_NOETIC if ros1 else Stores.ROS2_HUMBLE)
        if name not in self._common.fielddefs:
            raise DataError(
                f"the message type {name} is not defined in the bag and is no common one; its "
                "messages can be copied, but not decoded"
            )
        return _from_rosbags({name: self._common.fielddefs[name]})[name]


def _check_type_name(name: str, pattern: re.Pattern[str] = _TYPE_NAME) -> None:
    if len(name) > _LONGEST_NAME or pattern.fullmatch(name) is None:
        raise DataError(f"a message type has the bad name {name[:80]!r}")
