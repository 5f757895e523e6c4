"""Nested Python state as JSON, without pickle: containers and scalars in text, arrays by name.

Plain JSON values stay as they are; everything else becomes an object with the key "!" that says
what it is. A value of any other class is refused by its path: nothing that could run code on
loading is ever stored.
"""

from __future__ import annotations

import base64
import fnmatch
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container
from typing import Any

import numpy as np

from penstock.errors import CorruptFile, UnsupportedValue, UsageError

Json = Any
TAG = "!"
MAX_DEPTH = 200
_BUILDERS: dict[Any, Any] = {
    **{list: list, "tuple": tuple, "set": set, "frozenset": frozenset},
    "deque": deque,  # of the last rewards, say
}
_DICTS: dict[Any, Any] = {dict: dict, "dict": dict, "odict": OrderedDict}
_DICTS["counter"] = Counter  # the milestones of MultiStepLR
_DICT_NAMES = {kind: name for name, kind in _DICTS.items()}
_CONTAINERS = frozenset({*_DICT_NAMES, *_BUILDERS.values()})
_SCALAR_KINDS = "?bhilqBHILQefdgFD"
_SCALARS = {np.dtype(kind).str for kind in _SCALAR_KINDS}
_NONSENSE = (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)
_DROPPED = object()
_PLAIN_KEYS = frozenset({str, int, bool, type(None)})
_IMMUTABLE = frozenset(
    {str, bool, int, float, complex, bytes, type(None), *(np.dtype(k).type for k in _SCALAR_KINDS)}
)

Store = Callable[[str, Any], Json | None]
"""Given a path and a foreign value (a tensor, …): its JSON record, or None to refuse it."""
Keep = Callable[[Any], Any]
"""Given a foreign value: what stands for it from now on. Raises UnsupportedValue to refuse it."""
Fetch = Callable[[dict[str, Json]], Any]
"""Given a record that a Store made: the value."""


def copy_containers(state: Any, keepers: dict[type, Keep], keep: Keep) -> Any:
    """Copy nested containers: the quick half of `flatten`, without paths and JSON.

    A foreign value goes to the keeper of its class, or to `keep`. Raises UnsupportedValue if one
    cannot be stored; `flatten` says where it is.
    """
    (copied,) = _copy([state], list, -1, keepers, keep)
    return copied


def _copy(value: Any, kind: type, depth: int, keepers: dict[type, Keep], keep: Keep) -> Any:
    if depth >= MAX_DEPTH and kind in _CONTAINERS:
        raise UnsupportedValue(f"nested deeper than {MAX_DEPTH}")
    if kind in _DICT_NAMES:
        copied: Any = kind()
        for key, child in value.items():
            inner = type(child)
            if (keeper := keepers.get(inner)) is not None:
                copied[key] = keeper(child)
            elif inner in _IMMUTABLE:
                copied[key] = child
            else:
                copied[key] = _copy(child, inner, depth + 1, keepers, keep)
        if not _PLAIN_KEYS.issuperset(map(type, copied)):
            for key in copied:
                _flatten(key, "", depth + 1, _refuse)
        if kind is OrderedDict and hasattr(value, "_metadata"):
            (copied._metadata,) = _copy([value._metadata], list, depth, keepers, keep)
        return copied
    if kind in _CONTAINERS:
        items = value
        if not _IMMUTABLE.issuperset(map(type, value)):
            items = [
                v if type(v) in _IMMUTABLE else _copy(v, type(v), depth + 1, keepers, keep)
                for v in value
            ]
        return deque(items, value.maxlen) if kind is deque else kind(items)
    return bytearray(value) if kind is bytearray else keepers.get(kind, keep)(value)


def flatten(state: Any, store: Store) -> Json:
    """Turn nested state into JSON; `store` takes every value that is not plain Python.

    Raises UnsupportedValue if one cannot be stored; its path and class are named.
    """
    return _flatten(state, "", 0, store)


def _flatten(value: Any, path: str, depth: int, store: Store) -> Json:
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is int:
        # Python limits the digits of decimal numbers, not those of hexadecimal ones.
        return value if -(2**63) <= value < 2**64 else {TAG: "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}
    if depth >= MAX_DEPTH and kind in _CONTAINERS:
        raise UnsupportedValue(
            f"{path[:60]}… is nested deeper than {MAX_DEPTH}, or contains itself; flatten it first"
        )
    if kind in _DICT_NAMES:
        return _flatten_dict(value, path, depth, store)
    if kind in _CONTAINERS:
        prefix = f"{path}." if path else ""
        numbers = len(value) > 8 and set(map(type, value)) == {int}
        if numbers and min(value) >= -(2**63) and max(value) < 2**64:
            items = list(value)  # a generator's state is a long tuple of numbers
        else:
            items = [_flatten(v, f"{prefix}{i}", depth + 1, store) for i, v in enumerate(value)]
        if kind is deque:
            return {TAG: "deque", "v": items, "maxlen": value.maxlen}
        return items if kind is list else {TAG: kind.__name__, "v": items}
    record = _flatten_scalar(value, kind) or store(path, value)
    if record is None:
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise UnsupportedValue(
            f"{path or 'the state'} is a {name}, which cannot be stored without pickle; "
            "convert it to tensors, numbers, strings, lists or dicts"
        )
    return record


def _flatten_dict(value: dict[Any, Any], path: str, depth: int, store: Store) -> Json:
    prefix = f"{path}." if path else ""
    children = [_flatten(child, f"{prefix}{k}", depth + 1, store) for k, child in value.items()]
    if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
        return dict(zip(value, children, strict=True))
    keys = [_flatten(key, f"{prefix}<key>", depth + 1, _refuse) for key in value]
    pairs = [list(pair) for pair in zip(keys, children, strict=True)]
    record = {TAG: _DICT_NAMES[type(value)], "v": pairs}
    versions = getattr(value, "_metadata", None)  # what a module's state dict knows of its parts
    if versions is not None:
        record["metadata"] = _flatten(versions, f"{prefix}_metadata", depth + 1, store)
    return record


def _flatten_scalar(value: Any, kind: type) -> Json | None:
    if kind is complex:
        return {TAG: "complex", "v": [repr(value.real), repr(value.imag)]}
    if kind is bytes or kind is bytearray:
        return {TAG: kind.__name__, "v": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and value.dtype.str in _SCALARS:
        content = base64.b64encode(value.tobytes()).decode()
        return {TAG: "npscalar", "dtype": value.dtype.str, "v": content}
    return None


def _refuse(path: str, value: Any) -> None:
    return None


def unflatten(node: Json, fetch: Fetch, only: str | None = None) -> Any:
    """Rebuild the state that `flatten` described; `fetch` rebuilds the foreign values.

    What does not match `only`, a pattern such as "model.actor.*", is left out. Elements of a list
    or tuple become None instead, so that positions stay.

    Raises:
        CorruptFile: The description makes no sense.
        UsageError: Nothing matches the pattern.
    """
    try:
        value = _unflatten(node, fetch, "", only)
    except _NONSENSE as error:
        raise CorruptFile(f"the description of the state makes no sense ({error!r})") from error
    if value is _DROPPED:
        raise UsageError(f"nothing matches only={only!r}")
    return value


def _unflatten(node: Json, fetch: Fetch, path: str, only: str | None) -> Any:
    if only is not None and path and fnmatch.fnmatchcase(path, only):
        only = None  # everything below it, too
    kind: Any = type(node)
    if kind is not list and kind is not dict:
        return node if only is None else _DROPPED
    value: Any = node
    if kind is dict:
        kind, value = (node[TAG], node.get("v", ())) if TAG in node else (dict, node.items())
    prefix = f"{path}." if path else ""
    if kind in _DICTS:
        built: Any = _DICTS[kind]()
        for key, child in value:
            name = _unflatten(key, fetch, "", None)
            inner = _unflatten(child, fetch, f"{prefix}{name}", only)
            if inner is not _DROPPED:
                built[name] = inner
        if kind == "odict" and "metadata" in node:
            built._metadata = _unflatten(node["metadata"], fetch, "", None)
        return built if built or only is None else _DROPPED
    if kind in _BUILDERS:
        items = [_unflatten(v, fetch, f"{prefix}{i}", only) for i, v in enumerate(value)]
        kept = [item for item in items if item is not _DROPPED]
        if only is not None and not kept:
            return _DROPPED
        if kind in ("set", "frozenset"):  # they have no positions to keep
            return _BUILDERS[kind](kept)
        items = [None if item is _DROPPED else item for item in items]
        return deque(items, node["maxlen"]) if kind == "deque" else _BUILDERS[kind](items)
    if only is not None:
        return _DROPPED
    match kind:
        case "int":
            return int(value, 16)
        case "float":
            return float(value)
        case "complex":
            return complex(float(value[0]), float(value[1]))
        case "bytes" | "bytearray":
            content = base64.b64decode(value)
            return content if kind == "bytes" else bytearray(content)
        case "npscalar":
            if node["dtype"] not in _SCALARS:
                raise CorruptFile(f"a scalar of type {node['dtype']!r} makes no sense")
            return np.frombuffer(base64.b64decode(value), node["dtype"])[0]
    return fetch(node)


def free_name(path: str, taken: Container[str]) -> str:
    """Name a value by its path; two may have the same, as in {"a.b": …, "a": {"b": …}}."""
    number, name = 1, path
    while name in taken:
        number += 1
        name = f"{path}#{number}"
    return name
