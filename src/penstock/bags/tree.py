"""Messages that are trees of named values, whatever their encoding: protobuf and JSON.

An encoding says what a type looks like (`Node`), and parses a message into nested dicts. Fields are
then found by the same paths as in ROS messages.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bags.definitions import NUMBERS
from penstock.errors import DataError, LimitExceeded

Data = bytes | memoryview
Tree = dict[str, Any]

STEP: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[([0-9]{1,9})\])?")
MOST_VALUES: Final = 200_000  # in one message, but for arrays of numbers and bytes
_MOST_LISTED: Final = 2000
_MOST_FIELDS: Final = 20_000
_MOST_DEPTH: Final = 32
_TIME_PARTS: Final = (
    ("sec", "seconds", "secs"),
    ("nsec", "nanos", "nanosec", "nsecs", "nanoseconds"),
)


@dataclass(slots=True, eq=False)
class Node:
    """A field of a type, or a type as a whole.

    Attributes:
        type: One of `NUMBERS`, "time", "duration", "string", "bytes" (shown as uint8[]), or
            "message".
        repeated: It is a list.
        optional: Whether it is there can be told: among many items a missing one is NaN.
        fields: Of a message; types may contain themselves.
        default: The number that stands for one that is missing.
        name: Of the type of a message.
    """

    type: str
    repeated: bool = False
    optional: bool = False
    fields: dict[str, Node] = field(default_factory=dict)
    default: float = 0.0
    name: str = ""

    @property
    def text(self) -> str:
        """The type as people write it."""
        kind = {"bytes": "uint8[]", "message": self.name}.get(self.type, self.type)
        return kind + "[]" * self.repeated

    @property
    def is_named_list(self) -> bool:
        """Whether it is a list of things with names, as the joints of a robot."""
        name = self.fields.get("name")
        return self.repeated and name is not None and name.type == "string" and not name.repeated


class TreeLayout(ABC):
    """The fields of a message type, and how to find them in a message.

    Attributes:
        root: The type.
    """

    root: Node
    _last: tuple[Data | None, Tree] = (None, {})
    _wanted: frozenset[str] = frozenset()  # the fields of the root that were asked for

    @abstractmethod
    def parse(self, data: Data, wanted: frozenset[str]) -> Tree:
        """Return a message as nested dicts, with the fields of the root that are wanted."""

    def leaves(self) -> Iterator[tuple[str, str]]:
        """Yield the paths of all numbers and times, and the text of their types."""
        yield from islice(self._leaves(self.root, "", (), [_MOST_FIELDS]), _MOST_LISTED)

    def find(self, path: str) -> Callable[[Data], NDArray[np.float64]]:
        """Return a function from a message to the numbers at a path.

        The path may lead through a list: "joints.position" are the positions of all joints.

        Raises:
            DataError: There are no numbers at that path.
        """
        get, node = self._getter(path)
        _count_numbers(node, path, (), {})
        # Among the items of a list, one without the number is told from a zero.
        absent = node.optional and node.type in NUMBERS and self._is_spread(path)

        def vector(data: Data) -> NDArray[np.float64]:
            found: list[Any] = []
            values = get(self._tree(data))
            if absent and all(value is None for value in values):
                return np.empty(0)
            for value in values:
                if value is None and absent:
                    found.append(np.array([np.nan]))
                else:
                    _collect(node, value, found)
            return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0)])

        return vector

    def find_names(self, path: str) -> Callable[[Data], tuple[str, ...]] | None:
        """Return a function from a message to the names of the numbers at a path.

        They are those of a list of named things, or the texts of the field "name" beside an array.
        None if there are no such.
        """
        path = path.rpartition("[")[0] if path.endswith("]") else path
        try:
            path = self._whole_path(path)
            head, dot, _ = path.rpartition(".")
            get, node = self._getter(f"{head}{dot}name")
            _, numbers = self._getter(path)
            _, parent = self._getter(head) if head else (None, self.root)
        except DataError:
            return None
        beside = numbers.repeated and node.repeated
        if node.type != "string" or not (beside or parent.repeated):
            return None

        def names(data: Data) -> tuple[str, ...]:
            found: list[Any] = []
            for value in get(self._tree(data)):
                found += value if isinstance(value, list) else [value]
            return tuple(value if isinstance(value, str) else "" for value in found)

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
        if path and not self._getter(path)[1].repeated:
            raise DataError(f"{path!r} is no list")
        getters = []
        for name in names:
            get, node = self._getter(f"{path}.{name}" if path else name)
            if node.type != "string" or node.repeated:
                raise DataError(f"{path!r} has no texts {name}")
            getters.append(get)

        def texts(data: Data) -> list[tuple[str, ...]]:
            tree = self._tree(data)
            found = ([str(value or "") for value in get(tree)] for get in getters)
            return list(zip(*found, strict=True))

        return texts

    def find_bytes(self, path: str) -> Callable[[Data], memoryview]:
        """Return a function from a message to the bytes of a text or blob.

        Raises:
            DataError: There is none at that path.
        """
        get, node = self._getter(path)
        if node.type not in ("string", "bytes") or node.repeated:
            raise DataError(f"{path!r} is {node.text}, not bytes")

        def blob(data: Data) -> memoryview:
            (value,) = get(self._tree(data))
            return memoryview(value.encode() if isinstance(value, str) else value or b"")

        return blob

    def stamp_reader(self) -> tuple[Callable[[Data], int] | None, int | None]:
        """Return the function from a message to its stamp: its own, or that of its header."""
        for path in ("timestamp", "stamp", "header.stamp", "header.timestamp"):
            try:
                get, node = self._getter(path)
            except DataError:
                continue
            if node.type == "time" and not node.repeated:
                return partial(self._stamp, get), None
        return None, None

    def _stamp(self, get: Callable[[Tree], list[Any]], data: Data) -> int:
        return time_ns(get(self._tree(data))[0])

    def _tree(self, data: Data) -> Tree:
        """Parse a message, or return it if it is the last one again."""
        if self._last[0] is not data:
            self._last = data, self.parse(data, self._wanted)
        return self._last[1]

    def _whole_path(self, path: str) -> str:
        """Return the path that a short one stands for: "position" in a type of joints alone."""
        first = path.partition(".")[0].partition("[")[0]
        lists = [name for name, node in self.root.fields.items() if node.is_named_list]
        if first not in self.root.fields and len(lists) == 1:
            return f"{lists[0]}.{path}"
        return path

    def _is_spread(self, path: str) -> bool:
        """Tell whether a path leads through all items of a list."""
        node = self.root
        for part in self._whole_path(path).split(".")[:-1]:
            name = part.partition("[")[0]
            node = node.fields[name]
            if node.repeated and name == part:
                return True
        return False

    def _getter(self, path: str) -> tuple[Callable[[Tree], list[Any]], Node]:
        """Return a function from a parsed message to the values at a path, and what they are."""
        steps: list[tuple[str, int | None, bool]] = []
        node = self.root
        for part in self._whole_path(path).split("."):
            match = STEP.fullmatch(part)
            if match is None or match[1] not in node.fields:
                raise DataError(f"there is no field {path!r}")
            node = node.fields[match[1]]
            if match[2] is not None:
                if not node.repeated:
                    raise DataError(f"there is no item {match[2]} in {path!r} ({node.text})")
                steps.append((match[1], int(match[2]), False))
                node = Node(node.type, False, False, node.fields, node.default, node.name)
            else:
                steps.append((match[1], None, node.repeated and node.type == "message"))
        self._wanted |= {steps[0][0]}
        self._last = None, {}
        last = len(steps) - 1

        def get(tree: Tree) -> list[Any]:
            values: list[Any] = [tree]
            for number, (name, index, spread) in enumerate(steps):
                following: list[Any] = []
                for value in values:
                    item = value.get(name) if isinstance(value, dict) else None
                    if index is not None:
                        if item is None or index >= len(item):
                            raise DataError(f"{path!r} has only {len(item or ())} items")
                        item = item[index]
                    if spread and number < last:
                        following += item or []
                    else:
                        following.append(item)
                values = following
            return values

        return get, node

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
                if not inner.repeated:
                    yield from self._leaves(inner, f"{path}.", deeper, left)
                elif inner.is_named_list:
                    for leaf, text in self._leaves(inner, "", deeper, left):
                        short = not prefix and self._whole_path(leaf) == f"{path}.{leaf}"
                        text = text if text.endswith("[]") else f"{text}[]"
                        yield leaf if short else f"{path}.{leaf}", text
                else:
                    yield from self._leaves(inner, f"{path}[0].", deeper, left)


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


def _count_numbers(node: Node, path: str, above: tuple[int, ...], known: dict[int, int]) -> int:
    """Count the fields of a field laid out; refuse one that holds anything else, or itself."""
    if node.type == "string" or id(node.fields) in above or len(above) > _MOST_DEPTH:
        raise DataError(f"{path!r} is {node.text}, not numbers")
    if node.type != "message":
        return 1
    key = id(node.fields)
    if key not in known:
        known[key] = 1 + sum(
            _count_numbers(inner, f"{path}.{name}", (*above, key), known)
            for name, inner in node.fields.items()
        )
    if known[key] > _MOST_FIELDS:
        raise LimitExceeded(f"{path!r} has more than {_MOST_FIELDS} fields")
    return known[key]


def _collect(node: Node, value: Any, found: list[Any]) -> None:
    """Append the numbers of a value, in the order of the fields."""
    try:
        if node.type == "message":
            items = (value or []) if node.repeated else [value]
            for item in items:
                for name, inner in node.fields.items():
                    _collect(inner, item.get(name) if isinstance(item, dict) else None, found)
        elif node.type in ("time", "duration"):
            times = (value or []) if node.repeated else [value]
            found.append(np.array([time_ns(item) * 1e-9 for item in times]))
        elif node.type == "bytes" and not node.repeated:
            found.append(np.frombuffer(value or b"", np.uint8).astype(np.float64))
        elif node.repeated:
            found.append(np.asarray([] if value is None else value, np.float64).reshape(-1))
        else:
            found.append(np.array([node.default if value is None else value], np.float64))
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"a value of type {node.text} is none") from None
