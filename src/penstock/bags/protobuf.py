"""Protobuf messages, read by the descriptors that an MCAP file carries.

Both the descriptors and the messages are read straight from the wire format: no class is made and
no code is generated, and every length is checked against the bytes there are.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags.layout import CUT, MOST_VALUES, Data, Layout, Node, Tree, Wants, is_field_name
from penstock.bags.limits import Limits
from penstock.bags.reader import Topic
from penstock.errors import DataError, LimitExceeded

_VARINT, _FIXED64, _LENGTH, _GROUP, _GROUP_END, _FIXED32 = range(6)
# By the number of a type in a descriptor: as it is called here, and for `struct` if it is fixed.
_FIXED: Final = {
    **{1: ("float64", "<d"), 2: ("float32", "<f"), 6: ("uint64", "<Q")},
    **{7: ("uint32", "<I"), 15: ("int32", "<i"), 16: ("int64", "<q")},
}
_VARINTS: Final = {
    **{3: "int64", 4: "uint64", 5: "int32", 8: "bool", 13: "uint32"},
    **{14: "int32", 17: "int32", 18: "int64"},  # the first is an enumeration
}
_ZIGZAG: Final = (17, 18)
_STRING, _GROUP_TYPE, _MESSAGE, _BYTES = 9, 10, 11, 12
_REPEATED: Final = 3
_TIMES: Final = {
    f".{package}.{name}": kind
    for package in ("google.protobuf", "foxglove")
    for name, kind in (("Timestamp", "time"), ("Duration", "duration"))
}
_WRAPPER: Final = re.compile(r"\.google\.protobuf\.(Double|Float|U?Int\d\d|Bool)Value")
_MOST_FIELDS: Final = 20_000
_MOST_GROUPS: Final = 100  # within each other


def wire_fields(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield number and wire type of each field, and its value: a varint, or the bytes of others.

    A group, which proto2 and editions may write, is given as the message that it is.
    """
    pos, stop = 0, len(data)
    while pos < stop:
        tag, pos = _varint(data, pos)
        kind = tag & 7
        value: Any
        if kind == _VARINT:
            value, pos = _varint(data, pos)
        else:
            if kind == _LENGTH:
                length, pos = _varint(data, pos)
            elif kind in (_FIXED64, _FIXED32):
                length = 8 if kind == _FIXED64 else 4
            elif kind == _GROUP:
                length = _group_bytes(data, pos)
            else:
                raise DataError("it is damaged: it holds a field of no kind")
            value = data[pos : pos + length]
            pos += length
            if kind == _GROUP:
                kind, pos = _LENGTH, _varint(data, pos)[1]
        if pos > stop or tag < 8:
            raise DataError(CUT)
        yield tag >> 3, kind, value


def _group_bytes(data: memoryview, start: int) -> int:
    """Return the length of a group that begins here, without the tag that ends it."""
    pos, open_groups = start, 1
    while open_groups <= _MOST_GROUPS:
        before = pos
        tag, pos = _varint(data, pos)
        kind = tag & 7
        if kind == _GROUP_END:
            open_groups -= 1
            if not open_groups:
                return before - start
        elif kind == _GROUP:
            open_groups += 1
        elif kind == _VARINT:
            pos = _varint(data, pos)[1]
        elif kind == _LENGTH:
            length, pos = _varint(data, pos)
            pos += length
        else:
            pos += 8 if kind == _FIXED64 else 4
    raise DataError(f"its groups are nested deeper than {_MOST_GROUPS}")


def _varint(data: memoryview, pos: int) -> tuple[int, Any]:
    """Return an unsigned number of 64 bits, and the position behind it."""
    found = shift = 0
    for byte in data[pos : pos + 10]:
        pos += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found & 0xFFFFFFFFFFFFFFFF, pos
        shift += 7
    raise DataError(CUT)


class _Record:
    """The fields of a descriptor, by their numbers."""

    def __init__(self, data: memoryview) -> None:
        self._values: dict[tuple[int, bool], list[Any]] = {}
        for number, kind, value in wire_fields(data):
            if kind in (_VARINT, _LENGTH):
                self._values.setdefault((number, kind == _LENGTH), []).append(value)

    def number(self, number: int) -> int:
        return int(self._values.get((number, False), [0])[-1])

    def has(self, number: int) -> bool:
        return (number, False) in self._values

    def text(self, number: int) -> str:
        return _text(self._values.get((number, True), [b""])[-1])

    def many(self, number: int) -> list[memoryview]:
        return self._values.get((number, True), [])


@dataclass(slots=True)
class _Field:
    """A field as its descriptor says; `kind` is the number of its type."""

    name: str
    kind: int
    node: Node
    is_wrapper: bool = False
    is_key: bool = False


class ProtobufLayout(Layout):
    """Messages of one protobuf type; its definition is a serialised FileDescriptorSet."""

    def __init__(self, topic: Topic, limits: Limits) -> None:
        super().__init__()
        definition = topic.definition
        data = memoryview(definition.encode() if isinstance(definition, str) else definition)
        if len(data) > limits.definition_bytes:
            raise LimitExceeded(f"the definition of {topic.type[:80]!r} is too long")
        self._limits = limits
        self._types: dict[str, list[_Record]] = {}
        self._maps: set[str] = set()
        self._count = self._left = 0
        self._nodes: dict[str, Node] = {}
        self._numbers: dict[int, dict[int, _Field]] = {}  # by the fields of a type, by number
        try:
            for file in map(_Record, _Record(data).many(1)):
                package = file.text(2)
                for kind in file.many(4):
                    self._read_type(_Record(kind), f".{package}" if package else "", 0)
        except DataError as error:
            raise DataError(f"the descriptors of {topic.type[:80]!r} are damaged") from error
        name = f".{topic.type}"
        if name not in self._types:
            raise DataError(f"the type {topic.type[:80]!r} is not among its own descriptors")
        self.root = self._message_node(name, 0)

    def _read_type(self, kind: _Record, scope: str, depth: int) -> None:
        fields = kind.many(2)
        self._count += len(fields)
        if self._count > _MOST_FIELDS or depth > self._limits.nesting:
            raise LimitExceeded("the descriptors have too many fields")
        name = f"{scope}.{kind.text(1)}"
        self._types[name] = [_Record(one) for one in fields]
        options = kind.many(7)
        if options and _Record(options[-1]).number(7):  # an item of a map
            self._maps.add(name)
        for inner in kind.many(3):
            self._read_type(_Record(inner), name, depth + 1)

    def _message_node(self, name: str, depth: int) -> Node:
        """Return the node of a message type; types may contain themselves."""
        if depth > self._limits.nesting:
            return Node("message", name=name.lstrip("."))
        if name not in self._nodes:
            node = self._nodes[name] = Node("message", name=name.lstrip("."))
            by_number = self._numbers[id(node.fields)] = {}
            for one in self._types.get(name, ()):
                inner, field = self._field_node(one, depth), one.text(1)
                if inner is None or not is_field_name(field):
                    continue
                is_key = name in self._maps and field == "key"
                if is_key:
                    inner = Node("string")  # the name of its value, also where it is a number
                elif _WRAPPER.fullmatch(name):  # it is there to be missing
                    inner = replace(inner, optional=True, default=float("nan"))
                node.fields[field] = inner
                wrapped = _WRAPPER.fullmatch(one.text(6)) is not None
                by_number[one.number(3)] = _Field(field, one.number(5), inner, wrapped, is_key)
        return self._nodes[name]

    def _field_node(self, one: _Record, depth: int) -> Node | None:
        kind, type_name = one.number(5), one.text(6)
        size = -1 if one.number(4) == _REPEATED else None
        if kind in (_MESSAGE, _GROUP_TYPE):
            inner = self._message_node(type_name, depth + 1)
            text = _TIMES.get(type_name, "message")
            return Node(text, size, True, inner.fields, name=inner.name)
        names = {_STRING: "string", _BYTES: "bytes", **_VARINTS}
        text = _FIXED[kind][0] if kind in _FIXED else names.get(kind, "")
        if not text:
            return None
        if one.has(9) and size is None:  # one of several, or `optional` in proto3: it may be unset
            return Node(text, size, True, {}, float("nan"))
        return Node(text, size, False, {}, _number(one.text(7)))

    def parser(self, wants: Wants) -> Callable[[Data], Tree]:
        """Return a function from a message to nested dicts of the wanted fields."""

        def parse(data: Data) -> Tree:
            self._left = MOST_VALUES
            return self._add(memoryview(data), self.root.fields, {}, wants, 0)

        return parse

    def _add(
        self, data: memoryview, fields: dict[str, Node], tree: Tree, wants: Wants | None, depth: int
    ) -> Tree:
        """Add the fields of a message to a dict: a second part of it is merged into the first."""
        by_number = self._numbers.get(id(fields), {})
        if depth > self._limits.nesting:
            raise DataError(f"it is nested deeper than {self._limits.nesting}")
        for number, wire, raw in wire_fields(data):
            one = by_number.get(number)
            if one is None or (wants is not None and one.name not in wants):
                continue
            self._left -= 1
            if self._left < 0:
                raise DataError(f"it holds more than {MOST_VALUES} values")
            kind, many = one.kind, one.node.size is not None
            value: Any
            if one.is_key:
                if kind == _STRING:
                    tree[one.name] = _text(raw) if wire == _LENGTH else ""
                elif (key := _one_number(raw, wire, kind)) is not None:
                    tree[one.name] = f"{key:.0f}"
            elif kind in (_MESSAGE, _GROUP_TYPE, _STRING, _BYTES):
                if wire != _LENGTH:
                    continue
                if kind in (_MESSAGE, _GROUP_TYPE):
                    known = {} if many else tree.get(one.name, {})
                    if one.is_wrapper:  # the number that it holds is not written if it is 0
                        known.setdefault("value", 0.0)
                    inner = wants and wants[one.name]
                    value = self._add(raw, one.node.fields, known, inner, depth + 1)
                else:
                    value = _text(raw) if kind == _STRING else raw
                if many:
                    tree.setdefault(one.name, []).append(value)
                else:
                    tree[one.name] = value
            elif wire == _LENGTH:
                if many:
                    packed = _packed(raw, kind).astype(np.float64)
                    tree.setdefault(one.name, array("d")).frombytes(packed.tobytes())
            else:
                value = _one_number(raw, wire, kind)
                if many and value is not None:
                    tree.setdefault(one.name, array("d")).append(value)
                elif value is not None:
                    tree[one.name] = value
        return tree


def _one_number(raw: Any, wire: int, kind: int) -> float | None:
    """Return a number; None if it has the width of another type."""
    if kind in _FIXED:
        layout = _FIXED[kind][1]
        fits = wire != _VARINT and struct.calcsize(layout) == len(raw)
        return float(struct.unpack(layout, raw)[0]) if fits else None
    if wire != _VARINT:
        return None
    if kind in _ZIGZAG:
        return float((raw >> 1) ^ -(raw & 1))
    return float(np.uint64(raw).astype(_VARINTS[kind])) if raw >> 31 or kind == 8 else float(raw)


def _packed(data: memoryview, kind: int) -> NDArray[Any]:
    """Return the numbers of a packed field."""
    if kind in _FIXED:
        layout = np.dtype(_FIXED[kind][1])
        if len(data) % layout.itemsize:
            raise DataError(CUT)
        return np.frombuffer(data, layout)
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if not len(raw):
        return raw
    starts = np.concatenate(([0], ends[:-1] + 1))
    if not len(ends) or ends[-1] != len(raw) - 1 or int((ends - starts).max()) > 9:
        raise DataError(CUT)
    found = np.zeros(len(ends), np.uint64)
    for place in range(int((ends - starts).max()) + 1):
        here = starts + place <= ends
        part = raw[starts[here] + place].astype(np.uint64) & np.uint64(0x7F)
        found[here] |= part << np.uint64(7 * place)
    if kind not in _ZIGZAG:
        return np.asarray(found, np.uint64).astype(_VARINTS[kind])
    halves, odd = np.divmod(found, np.uint64(2))
    return np.where(odd, -1 - halves.astype(np.int64), halves.astype(np.int64))


def _text(data: Any) -> str:
    return bytes(data).decode("utf-8", "replace")


def _number(text: str) -> float:
    try:
        return float(text or 0)
    except ValueError:  # the name of an enumerated value, or a text
        return 1.0 if text == "true" else 0.0
