"""JSON messages, by their JSON schema, and by the first messages where that does not tell."""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote

import pybase64

from penstock.bags.layout import (
    MOST_VALUES,
    NUMBERS,
    Data,
    Layout,
    Node,
    Tree,
    Wants,
    is_field_name,
)
from penstock.bags.limits import Limits
from penstock.bags.reader import Topic
from penstock.errors import DataError, LimitExceeded

_MOST_FIELDS: Final = 2000
_SECONDS: Final = {"sec", "secs", "seconds"}
_NANOSECONDS: Final = {"nsec", "nsecs", "nanosec", "nanos", "nanoseconds"}
_NUMBERS: Final = {"number": "float64", "integer": "int64", "boolean": "bool"}


class JsonLayout(Layout):
    """Messages of one topic in JSON: by their schema, and by samples where it names no fields."""

    def __init__(self, topic: Topic, limits: Limits, samples: Sequence[Data] = ()) -> None:
        super().__init__()
        self._limits, self._fields = limits, 0
        definition = str(topic.definition)
        if len(definition) > limits.definition_bytes:
            raise LimitExceeded(f"the definition of {topic.type[:80]!r} is too long")
        self._schema = _load(definition.encode(), "its JSON schema") if definition.strip() else {}
        self.root = self._node(self._schema, 0) or Node("message")
        problem: DataError | None = None
        good = 0
        for sample in samples:
            try:
                self._complete(self.root, _load(sample, "its first message"), 0)
                good += 1
            except DataError as error:  # damaged: the next one tells
                problem = problem or error
        if problem is not None and not good and not self.root.fields:
            raise problem
        if self.root.type != "message" or self.root.size is not None:
            raise DataError(f"the JSON schema of {topic.type[:80]!r} describes no object")

    def parser(self, wants: Wants) -> Callable[[Data], Tree]:
        """Return a function from a message to nested dicts of all its fields."""

        def parse(data: Data) -> Tree:
            tree = _load(data, "the message")
            _decode_bytes(self.root, tree)
            return tree

        return parse

    def _node(self, schema: Any, depth: int) -> Node | None:
        """Return the node of a schema; None for what has no numbers, texts or objects."""
        for _ in range(8):
            if not isinstance(schema, dict):
                break
            either = schema.get("anyOf", schema.get("oneOf"))
            if "$ref" in schema:
                schema = self._referenced(schema["$ref"])
            elif isinstance(schema.get("allOf"), list):
                schema = self._joined(schema)
            elif isinstance(either, list):  # as optional values are written: a number, or null
                schema = next((one for one in either if one != {"type": "null"}), None)
            else:
                break
        self._fields += 1
        if not isinstance(schema, dict) or depth > self._limits.nesting:
            return None
        if self._fields > _MOST_FIELDS:
            raise LimitExceeded(f"the JSON schema has more than {_MOST_FIELDS} fields")
        kind = schema.get("type", "object" if "properties" in schema else "")
        if isinstance(kind, list):  # ["number", "null"]
            kind = next((one for one in kind if one != "null"), "")
        if kind in _NUMBERS:
            return Node(_NUMBERS[kind], optional=True, default=float("nan"))
        if kind == "string":
            encoded = schema.get("contentEncoding") == "base64"
            return Node("bytes" if encoded else "string", optional=True)
        if kind == "array":
            each = schema.get("prefixItems", schema.get("items"))
            each = each if isinstance(each, list) else [each]
            items = [self._node(one, depth + 1) for one in each]
            item = items[0] if items else None
            if len(items) > 1:  # one by one, as of a tuple
                numbers = all(it is not None and it.text in NUMBERS for it in items)
                item = Node("float64", optional=True, default=float("nan")) if numbers else None
            if item is None or (item.size is not None and item.type not in NUMBERS):
                return None
            return replace(item, size=-1, optional=False)
        if kind != "object" or not isinstance(schema.get("properties", {}), dict):
            return None
        node = Node("message", name=str(schema.get("title", "object"))[:80])
        for name, inner in schema.get("properties", {}).items():
            made = self._node(inner, depth + 1)
            if made is not None and is_field_name(name):
                node.fields[name] = made
        return _as_time(node, str(schema.get("title", "")))

    def _referenced(self, reference: Any) -> Any:
        """Return the part of the schema that a reference such as "#/$defs/Pose" names."""
        found: Any = self._schema
        for part in unquote(str(reference)).removeprefix("#").strip("/").split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) and part else found
        return found

    def _joined(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the one schema that all of its parts make, as of a type with a description."""
        joined = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            part = (
                self._referenced(part["$ref"])
                if isinstance(part, dict) and "$ref" in part
                else part
            )
            if not isinstance(part, dict):
                continue
            inherited, own = part.get("properties"), joined.get("properties")
            joined = {**part, **joined}
            if isinstance(inherited, dict) and isinstance(own, dict):
                joined["properties"] = {**own, **inherited}
        return joined

    def _complete(self, node: Node, value: Any, depth: int) -> None:
        """Add what a message holds and its type does not name: of a map, or without a schema."""
        if depth > self._limits.nesting or node.type != "message" or node.size is not None:
            return
        for name, inner in value.items() if isinstance(value, dict) else ():
            if name in node.fields:
                self._complete(node.fields[name], inner, depth + 1)
            elif is_field_name(name) and inner is not None and inner != []:
                node.fields[name] = self._like(inner, depth + 1)

    def _like(self, value: Any, depth: int) -> Node:
        """Return the node of a value of a message."""
        self._fields += 1
        if depth > self._limits.nesting or self._fields > _MOST_FIELDS:
            raise LimitExceeded("the first message has too many fields")
        if isinstance(value, dict):
            node = Node("message", name="object")
            for name, inner in value.items():
                if is_field_name(name) and inner is not None:
                    node.fields[name] = self._like(inner, depth + 1)
            return _as_time(node, "")
        if isinstance(value, list):
            item = self._like(value[0], depth + 1) if value else Node("float64")
            return replace(item, size=-1, optional=False)
        if isinstance(value, bool):
            return Node("bool", default=float("nan"))
        if isinstance(value, int | float):
            return Node("float64", optional=True, default=float("nan"))
        return Node("string")


def _as_time(node: Node, title: str) -> Node:
    """Take an object of seconds and nanoseconds for a time."""
    names = set(node.fields)
    if len(names) == 2 and names & _SECONDS and names & _NANOSECONDS:
        return Node("duration" if "duration" in title.lower() else "time", optional=True)
    return node


def _load(data: Data, what: str) -> Tree:
    """Parse a JSON object of a bounded number of values."""
    raw = bytes(data)
    # A short one cannot have so many, and counting takes longer than parsing a picture.
    if len(raw) > MOST_VALUES and sum(map(raw.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise DataError(f"{what} has more than {MOST_VALUES} values")
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is no JSON ({str(error)[:80]})") from None
    if not isinstance(tree, dict):
        raise DataError(f"{what} is no JSON object")
    return tree


def _decode_bytes(node: Node, tree: Any) -> None:
    """Decode the texts that stand for bytes, in place."""
    if not isinstance(tree, dict):
        return
    for name, inner in node.fields.items():
        value = tree.get(name)
        if inner.type == "bytes" and isinstance(value, str):
            try:
                tree[name] = memoryview(pybase64.b64decode(value, validate=True))
            except (binascii.Error, ValueError):
                raise DataError(f"{name} is no base64") from None
        elif inner.type == "message":
            for item in value if isinstance(value, list) else [value]:
                _decode_bytes(inner, item)
