"""Finding one field in serialised messages, without decoding the rest.

ROS 1 packs values one after the other. CDR (ROS 2) starts with four bytes that tell the byte order,
and aligns every value to its size, counted from behind those four bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import unpack_from
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags.definitions import NUMBERS, Field, load_types
from penstock.bags.limits import Limits
from penstock.bags.reader import Topic
from penstock.errors import DataError

HEADER: Final = "std_msgs/msg/Header"

TIMES: Final = {
    "builtin_interfaces/msg/Time": "time",
    "builtin_interfaces/msg/Duration": "duration",
}
_STEP: Final = re.compile(r"([A-Za-z][A-Za-z0-9_]*)(?:\[([0-9]{1,9})\])?")
_MOST_LISTED: Final = 2000
_MOST_KNOWN: Final = 64
_MOST_KNOWN_BYTES: Final = 1 << 16

_STAMP_BYTES: Final = 12

Data = bytes | memoryview
# Moves a position in a message behind a value.
Skip = Callable[["Reader", int], int]


class Reader:
    """The bytes of one message."""

    __slots__ = ("aligned", "order", "size", "view")

    def __init__(self, data: Data, cdr: bool) -> None:
        view = memoryview(data)
        self.aligned = cdr
        self.order = "<"
        if cdr:
            if len(view) < 4 or view[0] != 0 or view[1] > 1:
                raise DataError("the message is not plain CDR")
            self.order = "<" if view[1] else ">"
            view = view[4:]
        self.view = view
        self.size = len(view)

    def align(self, pos: int, size: int) -> int:
        """Move to where a value of a size may begin."""
        return (pos + size - 1) & -size if self.aligned else pos

    def count(self, pos: int) -> tuple[int, int]:
        """Return a length, and the position behind it."""
        pos = self.align(pos, 4)
        (found,) = unpack_from(self.order + "I", self.view, pos)
        return found, pos + 4


@dataclass(frozen=True, slots=True)
class _Node:
    """A value in a message: how to pass over it, and the least bytes that it takes."""

    field: Field
    skip: Skip
    least_bytes: int


class RosLayout:
    """The fields of a ROS message type, as they lie in its serialised messages.

    Args:
        topic: The topic, with the definition of its type.
        limits: Of the definition.

    Raises:
        DataError: The type is not defined, or hostile.
    """

    def __init__(self, topic: Topic, limits: Limits) -> None:
        self.root, self.cdr = topic.type, topic.encoding == "cdr"
        self.types = load_types(topic.type, str(topic.definition), topic.encoding, limits)
        self._skips: dict[str, tuple[Skip, int]] = {}

    def leaves(self, root: str | None = None, prefix: str = "") -> Iterator[tuple[str, str]]:
        """Yield the paths of all numbers and times, and the text of their types."""
        for field in self.types[root or self.root]:
            path = prefix + field.name
            if field.type in TIMES:
                yield path, field.text.replace(field.type, TIMES[field.type])
            elif field.type in NUMBERS:
                yield path, field.text
            elif not field.is_base:
                if field.size is not None:
                    path += "[0]"
                yield from self.leaves(field.type, path + ".")

    def find(self, path: str) -> Callable[[Data], NDArray[np.float64]]:
        """Return a function from a message to the numbers at a path.

        Raises:
            DataError: There are no numbers at that path; the message names those there are.
        """
        steps, field = self._plan(path)
        read = self._numbers(field, path)

        def vector(data: Data) -> NDArray[np.float64]:
            try:
                reader, pos = self._reach(steps, data)
                found: list[NDArray[np.float64]] = []
                if read(reader, pos, found) > reader.size:
                    raise DataError("the message is cut")
            except struct.error:
                raise DataError("the message is cut") from None
            return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0)])

        return vector

    def find_names(self, path: str) -> Callable[[Data], tuple[str, ...]] | None:
        """Return a function from a message to the names of the numbers at a path.

        They are the texts of the field "name" beside an array, as in JointState. None if there is
        no such field, or no array.
        """
        path = path.rpartition("[")[0] if path.endswith("]") else path  # one item has its array's
        head, dot, _ = path.rpartition(".")
        beside = f"{head}{dot}name"
        if head.endswith("]"):  # a point of a JointTrajectory, whose names stand above the points
            beside = f"{head.rpartition('.')[0]}.joint_names".lstrip(".")
        try:
            steps, field = self._plan(beside)
            _, numbers = self._plan(path)
        except DataError:
            return None
        if field.type != "string" or field.size is None or numbers.size is None:
            return None
        skip = self._node(field).skip
        known: dict[tuple[int, bytes], tuple[str, ...]] = {}

        def names(data: Data) -> tuple[str, ...]:
            try:
                reader, start = self._reach(steps, data)
                stop = skip(reader, start)
                if stop > reader.size:
                    raise DataError("the message is cut")
                key = start % 4, bytes(reader.view[start:stop])  # where it begins moves the padding
                found = known.get(key)
                if found is None:
                    found = _texts(reader, start, field.size or 0)
                    if len(known) < _MOST_KNOWN and len(key[1]) < _MOST_KNOWN_BYTES:
                        known[key] = found
                return found
            except struct.error:
                raise DataError("the message is cut") from None

        return names

    def find_texts(
        self, path: str, names: tuple[str, ...]
    ) -> Callable[[Data], list[tuple[str, ...]]]:
        """Return a function from a message to some texts of every item of a list.

        Args:
            path: Of the list; "" for the message itself.
            names: The paths of the texts within an item.

        Raises:
            DataError: There are no such texts.
        """
        lead, field = self._plan(path) if path else ([], Field("", self.root))
        if bool(path) != (field.size is not None):
            raise DataError(f"{path!r} is no list")
        plans = [self._plan(name, field.type) for name in names]
        if any(found.type != "string" or found.size is not None for _, found in plans):
            raise DataError(f"{path!r} has no texts {', '.join(names)}")
        skip = self._node(Field("", field.type)).skip

        def texts(data: Data) -> list[tuple[str, ...]]:
            try:
                reader, pos = self._reach(lead, data)
                count = 1 if field.size is None else field.size
                if count < 0:
                    count, pos = reader.count(pos)
                if count > reader.size:
                    raise DataError("the message is cut")
                items = []
                for _ in range(count):
                    items.append(tuple(_text_at(reader, pos, steps) for steps, _ in plans))
                    pos = skip(reader, pos)
                return items
            except struct.error:
                raise DataError("the message is cut") from None

        return texts

    def find_bytes(self, path: str) -> Callable[[Data], memoryview]:
        """Return a function from a message to the bytes of a text or an array of bytes.

        Raises:
            DataError: There is none at that path.
        """
        steps, field = self._plan(path)
        text = field.type == "string" and field.size is None
        if not text and (NUMBERS.get(field.type) not in ("u1", "i1") or field.size != -1):
            raise DataError(f"{path!r} is {field.text}, not bytes")

        def blob(data: Data) -> memoryview:
            try:
                reader, pos = self._reach(steps, data)
                length, pos = reader.count(pos)
            except struct.error:
                raise DataError("the message is cut") from None
            if length > reader.size - pos:
                raise DataError(f"{path} has {length} bytes, but the message only {reader.size}")
            found = reader.view[pos : pos + length]
            return found[:-1] if text and length and not found[-1] else found

        return blob

    def stamp_reader(self) -> tuple[Callable[[Data], int] | None, int | None]:
        """Return the function from a message to its header stamp, and the bytes that it needs.

        None if there is no header; None bytes for the whole message.
        """
        fields = self.types[self.root]
        header = next((f for f in fields if f.type == HEADER and f.size is None), None)
        stamps = [f.name for f in fields if f.name in ("timestamp", "stamp") and f.size is None]
        kinds = {f.name: f.type for f in fields}
        path = f"{header.name}.stamp" if header else next(iter(stamps), "")
        if header is None and TIMES.get(kinds.get(path, "")) != "time":  # Foxglove has no header
            return None, None
        cdr = self.cdr
        if fields[0] is header:
            # Four bytes (the number in ROS 1, the byte order in CDR) come before the stamp.
            def first(data: Data) -> int:
                big_endian = cdr and len(data) > 1 and not data[1] & 1
                try:
                    sec, nsec = unpack_from(">II" if big_endian else "<II", data, 4)
                except struct.error:
                    raise DataError("a message is too short for its header") from None
                return int(sec) * 10**9 + int(nsec)

            return first, _STAMP_BYTES
        seconds, parts = self.find(f"{path}.sec"), self.find(f"{path}.nanosec")

        return lambda data: int(seconds(data)[0]) * 10**9 + int(parts(data)[0]), None

    def _reach(self, steps: list[Skip], data: Data) -> tuple[Reader, int]:
        """Return a reader of a message, and the position to which some moves lead."""
        reader = Reader(data, self.cdr)
        pos = 0
        for step in steps:
            pos = step(reader, pos)
        return reader, pos

    def _plan(self, path: str, root: str | None = None) -> tuple[list[Skip], Field]:
        """Return the moves that lead to the value at a path, and what it is."""
        steps: list[Skip] = []
        kind, field = root or self.root, Field("", root or self.root)
        for part in path.split("."):
            match = _STEP.fullmatch(part)
            names = {f.name: f for f in self.types.get(kind, ())}
            if match is None or match[1] not in names:
                raise DataError(f"there is no field {path!r}")
            for before in self.types[kind]:
                if before.name == match[1]:
                    break
                steps.append(self._node(before).skip)
            field = names[match[1]]
            if match[2] is not None:
                steps.append(self._item(field, int(match[2]), path))
                field = Field(field.name, field.type)
            kind = "" if field.is_base or field.size is not None else field.type
        return steps, field

    def _item(self, field: Field, index: int, path: str) -> Skip:
        """Return the move to one item of an array."""
        if field.size is None or 0 <= field.size <= index:
            raise DataError(f"there is no item {index} in {path!r} ({field.text})")
        node = self._node(Field(field.name, field.type))
        width = np.dtype(NUMBERS[field.type]).itemsize if field.type in NUMBERS else 0

        def move(reader: Reader, pos: int) -> int:
            count = field.size or 0
            if count < 0:
                count, pos = reader.count(pos)
            if index >= count:
                raise DataError(f"{path!r} has only {count} items")
            if width:
                return reader.align(pos, width) + index * width
            for _ in range(index):
                pos = node.skip(reader, pos)
                if pos > reader.size:
                    raise DataError("the message is cut")
            return pos

        return move

    def _node(self, field: Field) -> _Node:
        one, least_bytes = self._one(field.type)
        if field.size is None:
            return _Node(field, one, least_bytes)
        fixed = field.size
        width = np.dtype(NUMBERS[field.type]).itemsize if field.type in NUMBERS else 0

        def skip(reader: Reader, pos: int) -> int:
            count = fixed
            if fixed < 0:
                count, pos = reader.count(pos)
            if width:
                return reader.align(pos, width) + count * width if count else pos
            if least_bytes == 0:  # items without a byte: there is nothing to pass over
                return pos
            if count * least_bytes > reader.size - pos:
                raise DataError("the message is cut")
            for _ in range(count):
                pos = one(reader, pos)
                if pos > reader.size:
                    raise DataError("the message is cut")
            return pos

        return _Node(field, skip, 4 if fixed < 0 else fixed * (width or least_bytes))

    def _one(self, kind: str) -> tuple[Skip, int]:
        """Return the move behind one value of a type, and the least bytes that it takes."""
        if kind in NUMBERS:
            width = np.dtype(NUMBERS[kind]).itemsize
            return lambda reader, pos: reader.align(pos, width) + width, width
        if kind == "string":
            return _skip_string, 4
        if kind not in self.types:
            raise DataError(f"values of type {kind} cannot be read")
        return self._message(kind)

    def _message(self, kind: str) -> tuple[Skip, int]:
        if kind not in self._skips:
            nodes = [self._node(field) for field in self.types[kind]]
            skips = [node.skip for node in nodes]
            least_bytes = sum(node.least_bytes for node in nodes)
            empty_bytes = 1 if self.cdr and not nodes else 0  # an empty CDR struct is one byte

            def skip(reader: Reader, pos: int) -> int:
                for one in skips:
                    pos = one(reader, pos)
                return pos + empty_bytes

            self._skips[kind] = skip, least_bytes + empty_bytes
        return self._skips[kind]

    def _numbers(
        self, field: Field, path: str
    ) -> Callable[[Reader, int, list[NDArray[np.float64]]], int]:
        """Return a function that appends the numbers of a value, and moves behind it."""
        if field.type in NUMBERS:
            return _read_numbers(field)
        if field.type == "string" or field.is_base:
            raise DataError(f"{path!r} is {field.text}, not numbers")
        inner = [self._numbers(f, f"{path}.{f.name}") for f in self.types[field.type]]
        seconds = field.type in TIMES
        least_bytes = self._one(field.type)[1]

        def one(reader: Reader, pos: int, found: list[NDArray[np.float64]]) -> int:
            if seconds:
                pos = reader.align(pos, 4)
                sec, nsec = unpack_from(reader.order + "iI", reader.view, pos)
                found.append(np.array([sec + nsec * 1e-9]))
                return pos + 8
            for read in inner:
                pos = read(reader, pos, found)
            return pos

        if field.size is None:
            return one
        fixed = field.size

        def many(reader: Reader, pos: int, found: list[NDArray[np.float64]]) -> int:
            count = fixed
            if fixed < 0:
                count, pos = reader.count(pos)
            if least_bytes == 0:
                return pos
            if count * least_bytes > reader.size - pos:
                raise DataError("the message is cut")
            for _ in range(count):
                pos = one(reader, pos, found)
            return pos

        return many


def _read_numbers(field: Field) -> Callable[[Reader, int, list[NDArray[np.float64]]], int]:
    code = NUMBERS[field.type]
    width = np.dtype(code).itemsize
    fixed = 1 if field.size is None else field.size

    def read(reader: Reader, pos: int, found: list[NDArray[np.float64]]) -> int:
        count = fixed
        if fixed < 0:
            count, pos = reader.count(pos)
        if count == 0:
            found.append(np.empty(0))
            return pos
        pos = reader.align(pos, width)
        stop = pos + count * width
        if stop > reader.size:
            raise DataError("the message is cut")
        values = np.frombuffer(reader.view, reader.order + code, count, pos)
        found.append(values.astype(np.float64))
        return stop

    return read


def _texts(reader: Reader, pos: int, fixed: int) -> tuple[str, ...]:
    count = fixed
    if fixed < 0:
        count, pos = reader.count(pos)
    found = []
    for _ in range(count):
        found.append(_text_at(reader, pos, []))
        pos = _skip_string(reader, pos)
    return tuple(found)


def _text_at(reader: Reader, pos: int, steps: list[Skip]) -> str:
    for step in steps:
        pos = step(reader, pos)
    length, pos = reader.count(pos)
    if length > reader.size - pos:
        raise DataError("the message is cut")
    return bytes(reader.view[pos : pos + length]).rstrip(b"\0").decode("utf-8", "replace")


def _skip_string(reader: Reader, pos: int) -> int:
    length, pos = reader.count(pos)
    return pos + length
