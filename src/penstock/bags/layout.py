"""The fields of a message type, and how they are found in a message: the same for all encodings.

An encoding (ros.py, protobuf.py, json_messages.py) says what a type looks like (`Node`), and parses
the wanted fields of a message into nested dicts.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import DataError, LimitExceeded

Data = bytes | memoryview
Tree = dict[str, Any]
Wants = dict[str, Any]  # by name, the wanted fields of a field; None for all of it

NUMBERS: Final = {
    **{"bool": "u1", "byte": "u1", "octet": "u1", "char": "u1", "int8": "i1", "uint8": "u1"},
    **{"int16": "i2", "uint16": "u2", "int32": "i4", "uint32": "u4", "int64": "i8"},
    **{"uint64": "u8", "float32": "f4", "float64": "f8"},
}
_STEP: Final = re.compile(r"([^\s.,*?<>\[\]][^,*?<>\[\]]{0,79})(?:\[([0-9]{1,9})\])?")
HEADER: Final = "std_msgs/msg/Header"
MOST_VALUES: Final = 200_000  # in one message, but for arrays of numbers and bytes
_NAMES: Final = ("name", "key", "joint_names", "joint_name", "names")  # the last of joints alone
CUT: Final = "the message is cut"
_UNWANTED: Final = object()
_TIMES: Final = ("time", "duration")
_MOST_LISTED: Final = 2000
_MOST_FIELDS: Final = 20_000
_MOST_DEPTH: Final = 32
_KEPT_BYTES: Final = 1 << 16  # of the last message: a large one would keep its chunk in memory
_TIME_PARTS: Final = (
    ("sec", "seconds", "secs"),
    ("nsec", "nanos", "nanosec", "nsecs", "nanoseconds"),
)


@dataclass(slots=True, eq=False)
class Node:
    """A field of a type, or a type as a whole.

    Attributes:
        type: One of `NUMBERS`, "time", "duration", "string", "bytes" (shown as uint8[]) or
            "message"; another one can be named but not read.
        size: None for one value, -1 for a list of any length, otherwise the length of an array.
        optional: Whether it is there can be told: among many items a missing one is NaN.
        fields: Of a message or a time; types may contain themselves.
        default: The number that stands for one that is missing.
        name: Of the type of a message.
        delimited: Whether its length stands before it, in CDR of version 2; None if the message
            itself tells.
    """

    type: str
    size: int | None = None
    optional: bool = False
    fields: dict[str, Node] = field(default_factory=dict)
    default: float = 0.0
    name: str = ""
    delimited: bool | None = False

    @property
    def text(self) -> str:
        """The type as people write it."""
        kind = {"bytes": "uint8[]", "message": self.name}.get(self.type, self.type)
        return kind + ("" if self.size is None else "[]" if self.size < 0 else f"[{self.size}]")

    @property
    def is_named_list(self) -> bool:
        """Whether it is a list of things with names, as the joints of a robot."""
        name = self.fields.get("name", self.fields.get("key"))
        return self.size is not None and name is not None and name.text == "string"


def is_field_name(name: str) -> bool:
    """Tell whether a name can be part of a path: "left-arm" can."""
    match = _STEP.fullmatch(name)
    return match is not None and match[2] is None and name.isprintable()


class _Step:
    """One part of a path: a field, maybe one item of it, maybe all of its items."""

    __slots__ = ("index", "name", "spreads")

    def __init__(self, name: str, index: int | None, spreads: bool) -> None:
        self.name, self.index, self.spreads = name, index, spreads


class Layout(ABC):
    """The fields of a message type, and how to find them in a message."""

    root: Node

    def __init__(self) -> None:
        self._wants: Wants = {}
        self._parse: Callable[[Data], Tree] | None = None
        self._last: tuple[Data | None, Tree] = (None, {})

    @abstractmethod
    def parser(self, wants: Wants) -> Callable[[Data], Tree]:
        """Return a function from a message to nested dicts of the wanted fields."""

    def leaves(self) -> Iterator[tuple[str, str]]:
        """Yield the paths of all numbers and times, and the text of their types."""
        yield from islice(self._leaves(self.root, "", (), [_MOST_FIELDS]), _MOST_LISTED)

    def find(self, path: str) -> Callable[[Data], NDArray[np.float64]]:
        """Return a function from a message to the numbers at a path.

        The path may lead through a list: "joints.position" are the positions of all joints.
        """
        steps, node = self._resolve(path)
        _count_numbers(node, path, (), {})
        get = self._getter(path)
        # Among the items of a list, one without the number is told from a zero.
        spread = any(step.spreads for step in steps[:-1])
        absent = spread and node.optional and node.type in NUMBERS
        is_array = not spread and node.size is not None and node.type in NUMBERS

        def vector(data: Data) -> NDArray[np.float64]:
            values = get(self._tree(data))
            try:
                if is_array:
                    return np.array(() if values[0] is None else values[0], np.float64).reshape(-1)
                if absent:
                    there = any(value is not None for value in values)
                    return np.array(values if there else (), np.float64)
                found: list[float] = []
                for value in values:
                    _collect(node, value, found)
                return np.array(found, np.float64)
            except (TypeError, ValueError, OverflowError):
                raise DataError(f"a value that should be {node.text} is no number") from None

        return vector

    def find_names(self, path: str) -> Callable[[Data], tuple[str, ...]] | None:
        """Return a function from a message to the names of the numbers at a path.

        They are those of a list of named things, or the texts beside an array, as a JointState or
        a JointTrajectory has them. None if there are no such.
        """
        path = path.rpartition("[")[0] if path.endswith("]") else path  # one item has its array's
        path = self._whole_path(path)
        beside, parts = self._names_of(path)
        if beside is None:
            return None
        get = self._getter(beside)

        def texts(data: Data) -> tuple[str, ...]:
            values: Sequence[Any] = get(self._tree(data))
            if len(values) == 1 and type(values[0]) is tuple:  # of texts, as ROS has them
                known: tuple[str, ...] = values[0]
                return known
            if len(values) == 1 and isinstance(values[0], list):
                values = values[0]
            names = (value if isinstance(value, str) else "" for value in values)
            return tuple(name + part for name in names for part in parts)

        return texts

    def _names_of(self, path: str) -> tuple[str | None, list[str]]:
        """Return the path of the names of the numbers at a path: beside them, or further up.

        And what to add to a name for each number of a thing that has several.
        """
        try:
            numbers, head = self._resolve(path)[1], path
        except DataError:
            return None, []
        while head:
            head = head.rpartition(".")[0]
            try:
                parent = self._resolve(head)[1] if head else self.root
            except DataError:  # a part of a name with dots
                continue
            for name in _NAMES[: None if "Joint" in parent.name else -1]:
                node = parent.fields.get(name)
                if node is None or node.type != "string":
                    continue
                if parent.size is not None:
                    parts = _parts(numbers, 0)
                    return f"{head}.{name}" if parts else None, parts
                if node.size is not None and numbers.size is not None:
                    return f"{head}.{name}".lstrip("."), [""]
            if parent.size is not None:
                break  # an item without a name of a list in a list
        return None, []

    def find_texts(
        self, path: str, names: tuple[str, ...]
    ) -> Callable[[Data], list[tuple[str, ...]]]:
        """Return a function from a message to some texts of every item of a list.

        Args:
            path: Of the list; "" for the message itself.
            names: The paths of the texts within an item.
        """
        if path and self._resolve(path)[1].size is None:
            raise DataError(f"{path!r} is no list")
        paths = [f"{path}.{name}" if path else name for name in names]
        if any(self._resolve(one)[1].text != "string" for one in paths):
            raise DataError(f"{path!r} has no texts {', '.join(names)}")
        getters = [self._getter(one) for one in paths]

        def texts(data: Data) -> list[tuple[str, ...]]:
            tree = self._tree(data)
            found = ([str(value or "") for value in get(tree)] for get in getters)
            return list(zip(*found, strict=True))

        return texts

    def find_bytes(self, path: str) -> Callable[[Data], memoryview]:
        """Return a function from a message to the bytes of a text or blob."""
        _, node = self._resolve(path)
        single = node.size is None and node.type in ("string", "bytes")
        if not single and (node.size != -1 or NUMBERS.get(node.type) not in ("u1", "i1")):
            raise DataError(f"{path!r} is {node.text}, not bytes")
        get = self._getter(path)
        return lambda data: as_bytes(get(self._tree(data))[0])

    def values(self, *paths: str) -> Callable[[Data], list[Any]]:
        """Return a function from a message to the values at some paths; None for a missing one."""
        getters = [self._getter(path) for path in paths]

        def values(data: Data) -> list[Any]:
            tree = self._tree(data)
            return [get(tree)[0] for get in getters]

        return values

    def stamp_reader(self) -> tuple[Callable[[Data], int] | None, int | None]:
        """Return the function from a message to its stamp, and the first bytes that suffice.

        The stamp is that of its header, or its own; None if it has none, and None for all bytes.
        """
        fields = self.root.fields.items()
        headers = [name for name, node in fields if node.name == HEADER or name == "header"]
        stamps = [f"{header}.{name}" for header in headers for name in ("stamp", "timestamp")]
        for path in (*stamps, "timestamp", "stamp"):
            try:
                _, node = self._resolve(path)
            except DataError:
                continue
            if node.text == "time":
                read = self.values(path)
                return (lambda data, read=read: time_ns(read(data)[0])), None
        return None, None

    def _tree(self, data: Data) -> Tree:
        """Parse a message, or return it if it is the last one again."""
        if self._last[0] is data:
            return self._last[1]
        assert self._parse is not None
        tree = self._parse(data)
        self._last = (data, tree) if len(data) <= _KEPT_BYTES else (None, {})
        return tree

    def _whole_path(self, path: str) -> str:
        """Return the path that a short one stands for: "position" in a type of joints alone."""
        fields = self.root.fields
        if path.partition(".")[0].partition("[")[0] in fields:
            return path
        if any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in fields):
            return path  # a name with dots
        lists = [name for name, node in self.root.fields.items() if node.is_named_list]
        return f"{lists[0]}.{path}" if len(lists) == 1 else path

    def _resolve(self, path: str) -> tuple[list[_Step], Node]:
        """Return the steps that lead to the values at a path, and what they are."""
        steps: list[_Step] = []
        node = self.root
        parts = self._whole_path(path).split(".")
        while parts:
            for size in range(len(parts), 0, -1):  # names in JSON may hold dots
                match = _STEP.fullmatch(".".join(parts[:size]))
                if match is not None and match[1] in node.fields:
                    break
            else:
                raise DataError(f"there is no field {path!r}")
            del parts[:size]
            node = node.fields[match[1]]
            index = None if match[2] is None else int(match[2])
            if index is not None:
                if node.size is None or 0 <= node.size <= index:
                    raise DataError(f"there is no item {index} in {path!r} ({node.text})")
                node = replace(node, size=None, optional=False)
            steps.append(_Step(match[1], index, node.size is not None and node.type == "message"))
        return steps, node

    def _getter(self, path: str) -> Callable[[Tree], list[Any]]:
        """Return a function from a parsed message to the values at a path: they are wanted now."""
        steps, _ = self._resolve(path)
        wants: Wants | None = self._wants
        changed: tuple[Wants, str, Any] | None = None  # the first change, and what was there
        for step in steps:
            assert wants is not None
            before = wants.get(step.name, _UNWANTED)
            if before is None:
                break  # all of it is wanted
            if before is _UNWANTED or step is steps[-1]:
                changed = changed or (wants, step.name, before)
                wants[step.name] = None if step is steps[-1] else {}
            wants = wants[step.name]
        try:
            self._parse, self._last = self.parser(self._wants), (None, {})
        except DataError:  # nobody wants what cannot be read: the other fields can be
            if changed is not None:
                place, name, before = changed
                place[name] = before
                if before is _UNWANTED:
                    del place[name]
            raise
        last = steps[-1]

        def get(tree: Tree) -> list[Any]:
            values: list[Any] = [tree]
            for step in steps:
                name, index = step.name, step.index
                values = [v.get(name) if isinstance(v, dict) else None for v in values]
                if index is not None:
                    if any(value is None or len(value) <= index for value in values):
                        shortest = min(0 if value is None else len(value) for value in values)
                        raise DataError(f"{path!r} has only {shortest} items")
                    values = [value[index] for value in values]
                if step.spreads and step is not last:
                    values = [item for value in values for item in value or ()]
            return values

        return get

    def _leaves(
        self, node: Node, prefix: str, above: tuple[int, ...], left: list[int]
    ) -> Iterator[tuple[str, str]]:
        for name, inner in node.fields.items():
            left[0] -= 1
            if left[0] < 0 or len(above) > _MOST_DEPTH:
                return
            path = prefix + name
            if inner.type in NUMBERS or inner.type in ("time", "duration", "bytes"):
                yield path, inner.text
            elif inner.type == "message" and id(inner.fields) not in above:
                deeper = (*above, id(inner.fields))
                if inner.size is None:
                    yield from self._leaves(inner, f"{path}.", deeper, left)
                elif inner.is_named_list:
                    for leaf, text in self._leaves(inner, "", deeper, left):
                        short = not prefix and self._whole_path(leaf) == f"{path}.{leaf}"
                        text = text if text.endswith("[]") else f"{text}[]"
                        yield leaf if short else f"{path}.{leaf}", text
                else:
                    yield from self._leaves(inner, f"{path}[0].", deeper, left)


def as_bytes(value: Any) -> memoryview:
    """Return a parsed text, or an array of bytes, as its bytes."""
    if isinstance(value, str):
        return memoryview(value.encode())
    if isinstance(value, np.ndarray):
        return memoryview(value.tobytes())
    return memoryview(b"" if value is None else value)


def time_ns(value: Any) -> int:
    """Return a time in nanoseconds; it is a dict of seconds and nanoseconds."""
    if value is None:
        return 0
    try:
        whole, rest = (
            next((value[key] for key in keys if key in value), 0) for keys in _TIME_PARTS
        )
        return int(whole) * 10**9 + int(rest)
    except (TypeError, ValueError, OverflowError):
        raise DataError("a time is no time") from None


def _parts(node: Node, depth: int) -> list[str]:
    """Return what tells the numbers of a thing from each other; none if their number changes."""
    if node.size is not None and not 0 < node.size <= _MOST_LISTED:
        return []
    ends = [""] if node.size is None else [f"[{place}]" for place in range(node.size)]
    if node.type != "message":
        return ends
    found: list[str] = []
    for name, inner in node.fields.items():
        parts = _parts(inner, depth + 1) if depth < _MOST_DEPTH else []
        if not parts or len(found) > _MOST_LISTED:
            return []
        found += [f".{name}{part}" for part in parts]
    return [f"{end}{part}" for end in ends for part in found][: _MOST_LISTED + 1]


def _count_numbers(node: Node, path: str, above: tuple[int, ...], known: dict[int, int]) -> int:
    """Count the fields of a field laid out; refuse one that holds anything else, or itself."""
    key = id(node.fields)
    if node.type == "message" and key not in above and len(above) <= _MOST_DEPTH:
        if key not in known:
            known[key] = 1 + sum(
                _count_numbers(inner, f"{path}.{name}", (*above, key), known)
                for name, inner in node.fields.items()
            )
        if known[key] > _MOST_FIELDS:
            raise LimitExceeded(f"{path!r} has more than {_MOST_FIELDS} fields")
        return known[key]
    if node.type not in NUMBERS and node.type not in ("time", "duration", "bytes"):
        raise DataError(f"{path!r} is {node.text}, not numbers")
    return 1


def _collect(node: Node, value: Any, found: list[float]) -> None:
    """Append the numbers of a value, in the order of the fields."""
    many = node.size is not None
    if node.type == "message":
        for item in (value or ()) if many else (value,):
            for name, inner in node.fields.items():
                _collect(inner, item.get(name) if isinstance(item, dict) else None, found)
    elif node.type in _TIMES:
        for item in (value or ()) if many else (value,):
            whole, rest = divmod(time_ns(item), 10**9)
            found.append(whole + rest * 1e-9)
    elif many:
        found += np.array(() if value is None else value, np.float64).reshape(-1).tolist()
    elif node.type == "bytes":
        found += () if value is None else bytes(value)
    else:
        found.append(float(node.default if value is None else value))
