"""Protobuf messages, read by the descriptors that an MCAP file carries.

Both the descriptors and the messages are read straight from the wire format: no class is made and
no code is generated, and every length is checked against the bytes there are.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags.limits import Limits
from penstock.bags.reader import Topic
from penstock.bags.tree import MOST_VALUES, STEP, Data, Node, Tree, TreeLayout
from penstock.errors import DataError, LimitExceeded

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
# By the number of a type in a descriptor: as it is called here, and for `struct` if it is fixed.
_FIXED: Final = {
    1: ("float64", "<d"),
    2: ("float32", "<f"),
    6: ("uint64", "<Q"),
    7: ("uint32", "<I"),
    15: ("int32", "<i"),
    16: ("int64", "<q"),
}
_VARINTS: Final = {
    3: "int64",
    4: "uint64",
    5: "int32",
    8: "bool",
    13: "uint32",
    14: "int32",  # an enumeration
    17: "int32",
    18: "int64",
}
_ZIGZAG: Final = (17, 18)
_STRING, _MESSAGE, _BYTES = 9, 11, 12
_OPTIONAL, _REPEATED = 1, 3
_TIMES: Final = {
    ".google.protobuf.Timestamp": "time",
    ".google.protobuf.Duration": "duration",
    ".foxglove.Timestamp": "time",
    ".foxglove.Duration": "duration",
}
_MOST_FIELDS: Final = 20_000
_CUT: Final = "the message is cut"


def varint(data: memoryview, pos: int, stop: int) -> tuple[int, int]:
    """Return an unsigned number of 64 bits, and the position behind it."""
    found = shift = 0
    while pos < stop and shift < 70:
        byte = data[pos]
        pos += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found & 0xFFFFFFFFFFFFFFFF, pos
        shift += 7
    raise DataError(_CUT)


def wire_fields(data: memoryview, pos: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number and wire type of each field, and where its value begins and ends."""
    while pos < stop:
        tag, pos = varint(data, pos, stop)
        number, kind = tag >> 3, tag & 7
        start = pos
        if kind == _VARINT:
            _, pos = varint(data, pos, stop)
        elif kind == _LENGTH:
            length, start = varint(data, pos, stop)
            pos = start + length
        elif kind in (_FIXED64, _FIXED32):
            pos += 8 if kind == _FIXED64 else 4
        else:
            raise DataError("it holds a group, or is damaged")
        if pos > stop or number == 0:
            raise DataError(_CUT)
        yield number, kind, start, pos


class _Field:
    """A field as its descriptor says."""

    __slots__ = ("default", "kind", "name", "node", "number", "optional", "repeated", "type_name")

    def __init__(self, data: memoryview, start: int, stop: int) -> None:
        self.name = self.type_name = ""
        self.number = self.kind = 0
        self.repeated = self.optional = False
        self.default = 0.0
        self.node: Node | None = None
        for number, kind, a, b in wire_fields(data, start, stop):
            if number in (1, 6, 7) and kind == _LENGTH:
                text = _text(data, a, b)
                if number == 1:
                    self.name = text
                elif number == 6:
                    self.type_name = text
                else:
                    self.default = _number(text)
            elif number in (3, 4, 5, 17) and kind == _VARINT:
                value, _ = varint(data, a, b)
                if number == 3:
                    self.number = value
                elif number == 4:
                    self.repeated = value == _REPEATED
                elif number == 5:
                    self.kind = value
                else:
                    self.optional = bool(value)


class ProtobufLayout(TreeLayout):
    """Messages of one protobuf type.

    Args:
        topic: Its definition is a serialised FileDescriptorSet.
        limits: Of the definition.

    Raises:
        DataError: The definition is damaged, or the type is not in it.
    """

    def __init__(self, topic: Topic, limits: Limits) -> None:
        definition = topic.definition
        data = memoryview(definition.encode() if isinstance(definition, str) else definition)
        if len(data) > limits.definition_bytes:
            raise LimitExceeded(f"the definition of {topic.type[:80]!r} is too long")
        self._types: dict[str, list[_Field]] = {}
        self._count = 0
        self._nodes: dict[str, Node] = {}
        self._numbers: dict[int, dict[int, _Field]] = {}
        self._limits = limits
        try:
            for number, kind, a, b in wire_fields(data, 0, len(data)):
                if number == 1 and kind == _LENGTH:
                    self._read_file(data, a, b)
        except DataError as error:
            raise DataError(f"the descriptors of {topic.type[:80]!r} are damaged") from error
        name = f".{topic.type}"
        if name not in self._types:
            raise DataError(f"the type {topic.type[:80]!r} is not among its own descriptors")
        self.root = self._message_node(name, 0)

    def _read_file(self, data: memoryview, start: int, stop: int) -> None:
        package = ""
        messages = []
        for number, kind, a, b in wire_fields(data, start, stop):
            if number == 2 and kind == _LENGTH:
                package = _text(data, a, b)
            elif number == 4 and kind == _LENGTH:
                messages.append((a, b))
        for a, b in messages:
            self._read_type(data, a, b, f".{package}" if package else "", 0)

    def _read_type(self, data: memoryview, start: int, stop: int, scope: str, depth: int) -> None:
        name, fields, inner = "", [], []
        for number, kind, a, b in wire_fields(data, start, stop):
            if kind != _LENGTH:
                continue
            if number == 1:
                name = _text(data, a, b)
            elif number == 2:
                self._count += 1
                fields.append(_Field(data, a, b))
            elif number == 3:
                inner.append((a, b))
        if self._count > _MOST_FIELDS or depth > self._limits.nesting:
            raise LimitExceeded("the descriptors have too many fields")
        full = f"{scope}.{name}"
        self._types[full] = fields
        for a, b in inner:
            self._read_type(data, a, b, full, depth + 1)

    def _message_node(self, name: str, depth: int) -> Node:
        """Return the node of a message type; types may contain themselves."""
        if depth > self._limits.nesting:
            return Node("message", name=name.lstrip("."))
        if name not in self._nodes:
            node = self._nodes[name] = Node("message", name=name.lstrip("."))
            by_number = self._numbers[id(node.fields)] = {}
            for one in self._types.get(name, ()):
                made = self._field_node(one, depth)
                if made is not None and STEP.fullmatch(one.name):
                    node.fields[one.name] = made
                    one.node = made
                    by_number[one.number] = one
        return self._nodes[name]

    def _field_node(self, one: _Field, depth: int) -> Node | None:
        kind = {_STRING: "string", _BYTES: "bytes"}.get(one.kind, _VARINTS.get(one.kind, ""))
        if one.kind in _FIXED:
            kind = _FIXED[one.kind][0]
        if one.kind == _MESSAGE:
            inner = self._message_node(one.type_name, depth + 1)
            kind = _TIMES.get(one.type_name, "message")
            return Node(kind, one.repeated, True, inner.fields, name=inner.name)
        return Node(kind, one.repeated, one.optional, {}, one.default) if kind else None

    def parse(self, data: Data, wanted: frozenset[str]) -> Tree:
        """Return a message as nested dicts."""
        view = memoryview(data)
        self._left = MOST_VALUES
        return self._parse(view, 0, len(view), self.root.fields, {}, wanted, 0)

    def _parse(
        self,
        data: memoryview,
        start: int,
        stop: int,
        fields: dict[str, Node],
        tree: Tree,
        wanted: frozenset[str] | None,
        depth: int,
    ) -> Tree:
        """Add the fields of a message to a dict: a second part of it is merged into the first."""
        by_number = self._numbers.get(id(fields), {})
        if depth > self._limits.nesting:
            raise DataError(f"it is nested deeper than {self._limits.nesting}")
        for number, kind, a, b in wire_fields(data, start, stop):
            one = by_number.get(number)
            if one is None or one.node is None or (wanted is not None and one.name not in wanted):
                continue
            self._left -= 1
            if self._left < 0:
                raise DataError(f"it holds more than {MOST_VALUES} values")
            if one.kind == _MESSAGE:
                if kind == _LENGTH:
                    known = {} if one.repeated else tree.get(one.name, {})
                    inner = self._parse(data, a, b, one.node.fields, known, None, depth + 1)
                    _put(tree, one, inner)
            elif one.kind in (_STRING, _BYTES):
                if kind == _LENGTH:
                    _put(tree, one, _text(data, a, b) if one.kind == _STRING else data[a:b])
            elif kind == _LENGTH:
                if one.repeated:
                    tree.setdefault(one.name, array("d")).frombytes(
                        _packed(data[a:b], one.kind).astype(np.float64).tobytes()
                    )
            elif (one.kind in _FIXED) == (kind != _VARINT):
                value = _one_number(data, a, b, one.kind)
                if value is None:
                    continue
                if one.repeated:
                    tree.setdefault(one.name, array("d")).append(value)
                else:
                    tree[one.name] = value
        return tree


def _put(tree: Tree, one: _Field, value: Any) -> None:
    if one.repeated:
        tree.setdefault(one.name, []).append(value)
    else:
        tree[one.name] = value


def _one_number(data: memoryview, start: int, stop: int, kind: int) -> float | None:
    """Return a number; None if it has the width of another type."""
    if kind in _FIXED:
        layout = _FIXED[kind][1]
        if struct.calcsize(layout) != stop - start:
            return None
        return float(struct.unpack_from(layout, data, start)[0])
    return float(_signed(np.array([varint(data, start, stop)[0]], np.uint64), kind)[0])


def _packed(data: memoryview, kind: int) -> NDArray[Any]:
    """Return the numbers of a packed field."""
    if kind in _FIXED:
        layout = np.dtype(_FIXED[kind][1])
        if len(data) % layout.itemsize:
            raise DataError(_CUT)
        return np.frombuffer(data, layout)
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(raw) and (not len(ends) or ends[-1] != len(raw) - 1):
        raise DataError(_CUT)
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    if len(ends) and int((ends - starts).max()) > 9:
        raise DataError(_CUT)
    found = np.zeros(len(ends), np.uint64)
    for place in range(int((ends - starts).max()) + 1 if len(ends) else 0):
        here = starts + place <= ends
        part = raw[starts[here] + place].astype(np.uint64) & np.uint64(0x7F)
        found[here] |= part << np.uint64(7 * place)
    return _signed(found, kind)


def _signed(raw: NDArray[np.uint64], kind: int) -> NDArray[Any]:
    """Return what varints mean as numbers of a type."""
    if kind not in _ZIGZAG:
        found: NDArray[Any] = raw.astype(_VARINTS[kind])
        return found
    found = (raw >> np.uint64(1)).astype(np.int64)
    found ^= -(raw & np.uint64(1)).astype(np.int64)
    return found


def _text(data: memoryview, start: int, stop: int) -> str:
    return bytes(data[start:stop]).decode("utf-8", "replace")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # the name of an enumerated value, or a text
        return 1.0 if text == "true" else 0.0
