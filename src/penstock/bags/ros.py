"""ROS messages: their wanted fields are parsed, and the others passed over.

ROS 1 packs values one after the other. CDR (ROS 2) starts with four bytes that tell the byte order,
and aligns every value to its size, counted from behind those four bytes. Its version 2 (of DDS)
aligns to four bytes, and puts the length before lists of anything but numbers, and before values of
types that may grow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from struct import unpack_from
from typing import Any, Final

import numpy as np

from penstock.bags.definitions import is_idl, load_type
from penstock.bags.layout import CUT, HEADER, MOST_VALUES, NUMBERS, Data, Layout, Node, Tree, Wants
from penstock.bags.limits import Limits
from penstock.bags.reader import Topic
from penstock.errors import DataError

_CODES: Final = {
    **{"u1": "B", "i1": "b", "u2": "H", "i2": "h", "u4": "I", "i4": "i"},
    **{"u8": "Q", "i8": "q", "f4": "f", "f8": "d"},
}
# The second byte of a CDR message: byte order, and the widest alignment. Version 2 has 4 bytes.
_CDR: Final = {0: (">", 8), 1: ("<", 8), 6: (">", 4), 7: ("<", 4)}
_DELIMITED: Final = {8: (">", 4), 9: ("<", 4)}
_LONG_HEAD: Final = 0x3F01  # of an optional value in version 1: its length has four bytes
_STAMP_BYTES: Final = 12
_MOST_KNOWN_BYTES: Final = 1 << 16

# Both move a position in a message behind a value; the second returns it, too.
Skip = Callable[["Reader", int], int]
Parse = Callable[["Reader", int], tuple[Any, int]]


class Reader:
    """The bytes of one message."""

    __slots__ = ("delimited", "left", "order", "size", "view", "widest")

    def __init__(self, data: Data, cdr: bool, may_be_delimited: bool = False) -> None:
        view = memoryview(data)
        self.order, self.widest, self.delimited = "<", 1, False
        if cdr:
            kind = _CDR.get(view[1]) if len(view) >= 4 and not view[0] else None
            if kind is None and may_be_delimited and len(view) >= 4 and not view[0]:
                kind, self.delimited = _DELIMITED.get(view[1]), True
            if kind is None:
                raise DataError(
                    f"the message is not plain CDR (it begins with {view[:4].hex() or 'nothing'})"
                )
            self.order, self.widest = kind
            view = view[4:]
        self.view = view
        self.size = len(view)
        self.left = MOST_VALUES

    def align(self, pos: int, size: int) -> int:
        """Move to where a value of a size may begin."""
        size = min(size, self.widest)
        return (pos + size - 1) & -size

    def count(self, pos: int) -> tuple[int, int]:
        """Return a length, and the position behind it."""
        if self.widest > 1:
            pos = (pos + 3) & -4
        (found,) = unpack_from(self.order + "I", self.view, pos)
        return found, pos + 4

    def items(self, pos: int, size: int | None, least_bytes: int) -> tuple[int, int]:
        """Return how many items begin at a position, and where; no more than can be there."""
        count = size or 0
        if count < 0:
            count, pos = self.count(pos)
        if count * least_bytes > self.size - pos:
            raise DataError(CUT)
        return count, pos

    def behind_length(self, pos: int) -> int:
        """Move behind the length of a list that is not of numbers: version 2 has it twice."""
        return self.count(pos)[1] if self.widest == 4 else pos

    def optional(self, pos: int) -> tuple[int, int | None]:
        """Return where an optional value begins, or is passed, and its bytes where those are told.

        They are 0 if it is not there.
        """
        if self.widest == 4:
            return pos + 1, None if unpack_from("B", self.view, pos)[0] else 0
        pos = (pos + 3) & -4
        kind, length = unpack_from(self.order + "HH", self.view, pos)
        if kind & 0x3FFF != _LONG_HEAD:
            return pos + 4, length
        return pos + 12, unpack_from(self.order + "I", self.view, pos + 8)[0]

    def take(self, count: int) -> None:
        """Refuse more items than a message may have that is parsed."""
        self.left -= count
        if self.left < 0:
            raise DataError(f"it holds more than {MOST_VALUES} values")


class RosLayout(Layout):
    """Messages of one ROS type."""

    def __init__(self, topic: Topic, limits: Limits) -> None:
        super().__init__()
        self._cdr = topic.encoding == "cdr"
        if not topic.type:
            raise DataError("the recording does not say of which type its messages are")
        self.root = load_type(topic.type, str(topic.definition), topic.encoding, limits)
        self._is_idl = is_idl(str(topic.definition))
        self._skips: dict[int, tuple[Skip, int]] = {}

    def parser(self, wants: Wants) -> Callable[[Data], Tree]:
        """Return a function from a message to nested dicts of the wanted fields."""
        parse, cdr, is_idl = self._message_parser(self.root, wants), self._cdr, self._is_idl

        def tree(data: Data) -> Tree:
            try:
                found: Tree = parse(Reader(data, cdr, is_idl), 0)[0]
                return found
            except struct.error:
                raise DataError(CUT) from None

        return tree

    def stamp_reader(self) -> tuple[Callable[[Data], int] | None, int | None]:
        """Return the function from a message to its stamp, and the first bytes that suffice."""
        first = next(iter(self.root.fields.values()), None)
        if first is None or first.name != HEADER or first.size is not None or self._is_idl:
            return super().stamp_reader()
        cdr = self._cdr

        # Four bytes (the number in ROS 1, the byte order in CDR) come before the stamp.
        def stamp(data: Data) -> int:
            big_endian = cdr and len(data) > 1 and not data[1] & 1
            try:
                sec, nsec = unpack_from(">II" if big_endian else "<II", data, 4)
            except struct.error:
                raise DataError("a message is too short for its header") from None
            return int(sec) * 10**9 + int(nsec)

        return stamp, _STAMP_BYTES

    def _skip(self, node: Node) -> tuple[Skip, int]:
        """Return the move behind a value, and the least bytes that it takes."""
        one, least_bytes = self._skip_one(node)
        size = node.size
        if node.optional:
            whole = self._skip(replace(node, optional=False))[0]

            def skip_optional(reader: Reader, pos: int) -> int:
                pos, length = reader.optional(pos)
                return whole(reader, pos) if length is None else pos + length

            return skip_optional, 1
        if size is None:
            return one, least_bytes
        width = least_bytes if node.type in NUMBERS else 0

        def skip(reader: Reader, pos: int) -> int:
            if width:
                count, pos = reader.items(pos, size, 0)
                return reader.align(pos, width) + count * width if count else pos
            count, pos = reader.items(reader.behind_length(pos), size, least_bytes)
            for _ in range(count if least_bytes else 0):  # items without a byte: nothing to pass
                pos = one(reader, pos)
                if pos > reader.size:
                    raise DataError(CUT)
            return pos

        return skip, 4 if size < 0 else size * least_bytes

    def _skip_one(self, node: Node) -> tuple[Skip, int]:
        """Return the move behind one value of a type, and the least bytes that it takes."""
        if node.type in NUMBERS:
            width = int(NUMBERS[node.type][1])
            return lambda reader, pos: reader.align(pos, width) + width, width
        if node.type == "string":
            return _skip_string, 4
        if not node.fields and node.type != "message":
            raise DataError(f"values of type {node.type} cannot be read")
        key = id(node.fields)
        if key not in self._skips:
            moves = [self._skip(inner) for inner in node.fields.values()]
            skips = [skip for skip, _ in moves]
            empty_bytes = 1 if self._cdr and not moves else 0  # an empty CDR struct is one byte

            def skip(reader: Reader, pos: int) -> int:
                for move in skips:
                    pos = move(reader, pos)
                return pos + empty_bytes

            def skip_delimited(reader: Reader, pos: int) -> int:
                if reader.widest == 4 and (node.delimited or reader.delimited):
                    length, pos = reader.count(pos)
                    return pos + length
                return skip(reader, pos)

            move = skip if node.delimited is False else skip_delimited
            self._skips[key] = move, sum(least for _, least in moves) + empty_bytes
        return self._skips[key]

    def _parser(self, node: Node, wants: Wants | None) -> Parse:
        """Return the function that parses a value."""
        size = node.size
        if node.optional:
            return _optional_parser(node, self._parser(replace(node, optional=False), wants))
        if node.type in NUMBERS:
            return _number_parser(node) if size is None else _array_parser(node)
        if node.type == "string":
            return _parse_string if size is None else _texts_parser(size)
        one = self._message_parser(node, wants)
        if size is None:
            return one
        least_bytes = self._skip_one(node)[1]

        def parse(reader: Reader, pos: int) -> tuple[list[Any], int]:
            count, pos = reader.items(reader.behind_length(pos), size, least_bytes)
            found: list[Any] = []
            if least_bytes:
                reader.take(count)
                for _ in range(count):
                    value, pos = one(reader, pos)
                    found.append(value)
            return found, pos

        return parse

    def _message_parser(self, node: Node, wants: Wants | None) -> Parse:
        """Return the function that parses the wanted fields of a message, and passes the others."""
        fields = list(node.fields.items())
        if node.type != "message":
            wants = None  # both parts of a time
        if node is self.root:  # nothing lies behind its last wanted field
            wanted = [place for place, (name, _) in enumerate(fields) if name in (wants or ())]
            fields = fields[: max(wanted, default=-1) + 1]
        moves: list[tuple[str | None, Any]] = []
        for name, inner in fields:
            if wants is None or name in wants:
                moves.append((name, self._parser(inner, wants and wants[name])))
            else:
                moves.append((None, self._skip(inner)[0]))
        empty_bytes = 1 if self._cdr and not node.fields else 0

        def parse(reader: Reader, pos: int) -> tuple[Tree, int]:
            found: Tree = {}
            for name, move in moves:
                if name is None:
                    pos = move(reader, pos)
                else:
                    found[name], pos = move(reader, pos)
            return found, pos + empty_bytes

        if node.delimited is False:
            return parse
        appendable = node.delimited and node is not self.root

        def parse_delimited(reader: Reader, pos: int) -> tuple[Tree, int]:
            if reader.widest != 4 or not (appendable or reader.delimited):
                return parse(reader, pos)
            length, pos = reader.count(pos)
            return parse(reader, pos)[0], pos + length

        return parse_delimited


def _optional_parser(node: Node, parse: Parse) -> Parse:
    def optional(reader: Reader, pos: int) -> tuple[Any, int]:
        pos, length = reader.optional(pos)
        if not length:
            return parse(reader, pos) if length is None else (None, pos)
        if node.type not in NUMBERS or node.size is not None:
            raise DataError(f"an optional {node.text} in CDR of version 1 cannot be read")
        code = NUMBERS[node.type]  # it ends with its head's length, wherever it is aligned to
        at = pos + length - int(code[1])
        return unpack_from(reader.order + _CODES[code], reader.view, at)[0], pos + length

    return optional


def _number_parser(node: Node) -> Parse:
    code = NUMBERS[node.type]
    letter, width = _CODES[code], int(code[1])

    def parse(reader: Reader, pos: int) -> tuple[Any, int]:
        pos = reader.align(pos, width)
        return unpack_from(reader.order + letter, reader.view, pos)[0], pos + width

    return parse


def _array_parser(node: Node) -> Parse:
    code, size = NUMBERS[node.type], node.size
    width = int(code[1])

    def parse(reader: Reader, pos: int) -> tuple[Any, int]:
        count, pos = reader.items(pos, size, width)
        pos = reader.align(pos, width) if count else pos
        stop = pos + count * width
        if stop > reader.size:
            raise DataError(CUT)
        if code == "u1":
            return reader.view[pos:stop], stop
        return np.frombuffer(reader.view[pos:stop], reader.order + code), stop

    return parse


def _texts_parser(size: int) -> Parse:
    # The names of joints are the same in every message: bytes that are known are not parsed again.
    known: tuple[Any, bytes, tuple[str, ...]] = None, b"", ()

    def parse(reader: Reader, start: int) -> tuple[tuple[str, ...], int]:
        nonlocal known
        key = start % 4, reader.order, reader.widest  # where it begins moves the padding
        if key == known[0] and reader.view[start : start + len(known[1])] == known[1]:
            return known[2], start + len(known[1])
        count, pos = reader.items(reader.behind_length(start), size, 4)
        reader.take(count)
        texts = []
        for _ in range(count):
            text, pos = _parse_string(reader, pos)
            texts.append(text)
        if pos - start < _MOST_KNOWN_BYTES:
            known = key, bytes(reader.view[start:pos]), tuple(texts)
        return tuple(texts), pos

    return parse


def _parse_string(reader: Reader, pos: int) -> tuple[str, int]:
    length, pos = reader.count(pos)
    if length > reader.size - pos:
        raise DataError(CUT)
    stop = pos + length
    return bytes(reader.view[pos:stop]).rstrip(b"\0").decode("utf-8", "replace"), stop


def _skip_string(reader: Reader, pos: int) -> int:
    length, pos = reader.count(pos)
    return pos + length
