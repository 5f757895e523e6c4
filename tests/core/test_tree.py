"""Nested state to JSON and back: types and bits exact, everything else refused by its path."""

from __future__ import annotations

import copy
import itertools
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.tree import MAX_DEPTH, TAG, copy_containers, flatten, unflatten
from penstock.errors import CorruptFile, UnsupportedValue, UsageError

QUICK = settings(deadline=None, max_examples=300)
SCALAR_TYPES = [np.dtype(kind).type for kind in "?bhilBHILefdFD"]


def refuse(path: str, value: Any) -> None:
    return None


def no_fetch(record: dict[str, Any]) -> Any:
    raise CorruptFile(f"unknown record {record}")


def refuse_aloud(value: Any) -> Any:
    raise UnsupportedValue("foreign")


def there_and_back(state: Any) -> Any:
    text = json.dumps(flatten(state, refuse), allow_nan=False)
    return unflatten(json.loads(text), no_fetch)


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, all the way down: 1 is not True, -0.0 is not 0.0, NaN is NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        return math.isnan(a) == math.isnan(b) and (
            math.isnan(a) or struct.pack("d", a) == struct.pack("d", b)
        )
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes()
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return sorted(map(canonical, a)) == sorted(map(canonical, b))
    if isinstance(a, dict):  # the order counts
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    return bool(a == b)


def canonical(member: Any) -> str:
    """A text that says a hashable value exactly, whatever the order inside a frozenset."""
    if isinstance(member, frozenset):
        return f"frozenset {sorted(map(canonical, member))}"
    return f"{type(member)} {member!r}"


numpy_scalars = st.builds(
    lambda kind, raw: np.frombuffer(raw[: np.dtype(kind).itemsize], kind)[0],
    st.sampled_from([kind for kind in SCALAR_TYPES if kind is not np.bool_]),
    st.binary(min_size=16, max_size=16),
)
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([TAG, "", "a.b", "v", 2**64, -(2**63) - 1, 10**400, -0.0, "\ud800"]),
    st.binary(max_size=5),
    st.complex_numbers(),
    st.tuples(st.integers(), st.text(max_size=2)),
    st.frozensets(st.integers(), max_size=2),
)
leaves = st.one_of(
    hashable,
    st.binary(max_size=5).map(bytearray),
    numpy_scalars,
    st.sampled_from([np.True_, np.float64(-0.0), [], (), {}, set(), frozenset(), OrderedDict()]),
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=4).map(OrderedDict),
        st.dictionaries(hashable, inner, max_size=4).map(Counter),
        st.builds(deque, st.lists(inner, max_size=4), st.sampled_from([None, 3])),
        st.sets(hashable, max_size=4),
    ),
    max_leaves=12,
)


@QUICK
@given(states)
def test_nested_state_comes_back_exactly(state: Any) -> None:
    assert same(there_and_back(state), state)


def empty_all(value: Any) -> None:
    """Change everything in a state that can be changed."""
    if isinstance(value, dict):
        for child in value.values():
            empty_all(child)
    elif isinstance(value, list | tuple | deque):
        for child in value:
            empty_all(child)
    if isinstance(value, dict | list | deque | set | bytearray):
        value.clear()


@QUICK
@given(states)
def test_a_copy_is_the_same_and_stays_so(state: Any) -> None:
    twin, reference = copy_containers([state], {}, refuse_aloud), copy.deepcopy([state])
    empty_all([state])
    assert same(there_and_back(twin), reference)


@pytest.mark.parametrize("kind", "?bhilqBHILQefdgFD")
def test_every_numpy_scalar_is_copied(kind: str) -> None:
    value = np.zeros(1, kind)[0]
    assert copy_containers([value, 1j], {}, refuse_aloud)[0] is value
    flatten([value], refuse)


def test_a_copy_keeps_the_versions_of_a_state_dict() -> None:
    state: Any = OrderedDict(a=1)
    state._metadata = {"": {"version": 1}}
    twin = copy_containers(state, {}, refuse_aloud)
    state._metadata[""]["version"] = 2
    assert twin._metadata == {"": {"version": 1}}


@pytest.mark.parametrize(
    "value",
    [
        True,
        1,
        1.0,
        -0.0,
        math.nan,
        math.inf,
        -math.inf,
        2**63,
        2**64,
        -(2**63),
        -(2**64),
        10**5000,
        5e-324,
        0.1,
        (),
        ((),),
        set(),
        frozenset({1}),
        {},
        {TAG: 1},
        {TAG: {TAG: "tuple", "v": []}},
        {1: "a", "1": "b", False: "c"},
        {None: 0, (1, 2): 0, b"k": 0, 1.5: 0, "s": 0},
        OrderedDict(b=1, a=2),
        OrderedDict({TAG: 1}),
        b"",
        bytearray(b"x"),
        complex(-0.0, math.nan),
        np.float32(1),
        np.longdouble(1) / 3,
        np.complex128(1j),
        np.bool_(True),
        np.uint64(2**64 - 1),
        np.frombuffer(struct.pack("<I", 0x7FC0BEEF), np.float32)[0],
        "ünïcode \0 \ud800",
    ],
    ids=itertools.count(),
)
def test_one_value(value: Any) -> None:
    assert same(there_and_back(value), value)
    assert same(there_and_back({"a": [value, (value,)]}), {"a": [value, (value,)]})


def test_same_is_strict() -> None:
    for a, b in [(1, True), (1, 1.0), (0.0, -0.0), ((), []), ({}, OrderedDict()), (b"", "")]:
        assert not same(a, b)
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same(np.float32(1), np.float64(1))


def test_foreign_values_go_through_store_and_fetch() -> None:
    class Tensor:
        pass

    kept: dict[str, Any] = {}

    def store(path: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        kept[path] = value
        return {TAG: "tensor", "v": path}

    one, two = Tensor(), Tensor()
    state = {"model": {"w": one}, "list": [1, (two,)], 3: {"k": one}}
    node = json.loads(json.dumps(flatten(state, store)))
    assert set(kept) == {"model.w", "list.1.0", "3.k"}
    back = unflatten(node, lambda record: kept[record["v"]])
    assert back["model"]["w"] is one
    assert back["list"][1][0] is two
    assert back[3]["k"] is one


class Colour(IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        Colour.RED,
        Point(1, 2),
        defaultdict(list),
        np.datetime64("2026-01-01"),
        np.str_("x"),
        np.clongdouble(1),
        type("Text", (str,), {})("x"),
        type("Number", (int,), {})(3),
        slice(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_refusal_names_the_path_and_the_class(value: Any) -> None:
    with pytest.raises(UnsupportedValue) as caught:
        flatten({"model": [0, {"deep": (value,)}]}, refuse)
    text = str(caught.value)
    assert text.startswith("model.1.deep.0 is a ")
    assert type(value).__qualname__ in text
    assert "\n" not in text
    with pytest.raises(UnsupportedValue, match="the state is a"):
        flatten(value, refuse)
    for state in (value, [value], {"deep": (value,)}):
        with pytest.raises(UnsupportedValue):
            copy_containers(state, {}, refuse_aloud)


def test_a_key_is_refused_too() -> None:
    with pytest.raises(UnsupportedValue, match=r"a\.<key> is a"):
        flatten({"a": {Colour.RED: 1}}, refuse)
    with pytest.raises(UnsupportedValue):
        copy_containers({"a": {Colour.RED: 1}}, {}, refuse_aloud)


def test_what_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedValue, match="contains itself"):
        flatten({"a": endless}, refuse)
    with pytest.raises(UnsupportedValue):
        copy_containers({"a": endless}, {}, refuse_aloud)
    ring: dict[Any, Any] = {}
    ring[1] = [ring]
    with pytest.raises(UnsupportedValue, match="contains itself"):
        flatten(ring, refuse)


@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: OrderedDict({1: v})]
)
def test_the_deepest_state_that_is_taken_also_comes_back(wrap: Any) -> None:
    state: Any = 0
    for _ in range(MAX_DEPTH):
        state = wrap(state)
    back, depth = there_and_back(state), 0
    while back != 0:
        (back,) = back.values() if isinstance(back, dict) else back
        depth += 1
    assert depth == MAX_DEPTH
    with pytest.raises(UnsupportedValue, match="deeper"):
        flatten(wrap(wrap(state)), refuse)


# --- damaged descriptions ----------------------------------------------------------------------

kinds = st.sampled_from(
    ["dict", "odict", "tuple", "set", "frozenset", "int", "float", "complex", "bytes", "bytearray"]
)
dtypes = st.sampled_from(["<f4", "|b1", "O", "V9", "(1,", "f4,f4", "a", "M8[s]", ">f4", "", 1, []])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "v", "dtype", TAG]), inner, max_size=3),
        st.fixed_dictionaries({TAG: kinds, "v": inner}),
        st.fixed_dictionaries({TAG: st.just("npscalar"), "dtype": dtypes, "v": inner}),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=500)
@given(json_values, st.sampled_from(["a", "*", "a.*", "0.*"]))
def test_a_damaged_description_is_a_corrupt_file(node: Any, pattern: str) -> None:
    for read in (lambda: unflatten(node, no_fetch), lambda: unflatten(node, no_fetch, pattern)):
        try:
            read()
        except (CorruptFile, UsageError) as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "node",
    [
        {TAG: "complex", "v": []},
        {TAG: "complex", "v": ["1"]},
        {TAG: "float", "v": 10**400},
        {TAG: "float", "v": "x"},
        {TAG: "int", "v": 5},
        {TAG: "bytes", "v": "é"},
        {TAG: "set", "v": [[]]},
        {TAG: "dict", "v": [[1]]},
        {TAG: "dict", "v": 3},
        {TAG: ["tuple"], "v": []},
        {TAG: "npscalar", "v": ""},
        {TAG: "npscalar", "dtype": "<f4", "v": ""},
        {TAG: "npscalar", "dtype": "<f4", "v": "AAA="},
        {TAG: "npscalar", "dtype": "O", "v": "AAAAAAAAAAA="},
        {TAG: "npscalar", "dtype": "(1,", "v": ""},
        {TAG: "npscalar", "dtype": ["f4"], "v": ""},
        {TAG: "surprise"},
    ],
    ids=itertools.count(),
)
def test_one_damaged_record(node: Any) -> None:
    with pytest.raises(CorruptFile):
        unflatten({"a": [node]}, no_fetch)


def test_a_description_that_is_too_deep() -> None:
    node: Any = 0
    for _ in range(100_000):
        node = [node]
    for read in (lambda: unflatten(node, no_fetch), lambda: unflatten(node, no_fetch, "x")):
        with pytest.raises(CorruptFile):
            read()
    while node:  # taken apart here: the interpreter itself must not recurse into it
        node = node[0]


# --- only --------------------------------------------------------------------------------------

STATE = {
    "model": {"actor": {"w": 1, "b": None}, "critic": {"w": 2}},
    "opt": [{"lr": 0.1, "foreach": None}, {"lr": 0.2}],
    "pair": (1, 2, 3),
    "kinds": {1, 2},
    7: {"x": "seven"},
    "none": None,
}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model.actor.*", {"model": {"actor": {"w": 1, "b": None}}}),
        ("model.actor", {"model": {"actor": {"w": 1, "b": None}}}),
        ("model.*.w", {"model": {"actor": {"w": 1}, "critic": {"w": 2}}}),
        ("*.w", {"model": {"actor": {"w": 1}, "critic": {"w": 2}}}),
        ("opt.1.lr", {"opt": [None, {"lr": 0.2}]}),
        ("opt.0.*", {"opt": [{"lr": 0.1, "foreach": None}, None]}),
        ("pair.1", {"pair": (None, 2, None)}),
        ("7.*", {7: {"x": "seven"}}),
        ("none", {"none": None}),
        ("*", STATE),
        ("Model*", None),
        ("actor", None),
        ("", None),
    ],
)
def test_select(pattern: str, expected: Any) -> None:
    node = flatten(STATE, refuse)
    if expected is None:
        with pytest.raises(UsageError):
            unflatten(node, no_fetch, pattern)
    else:
        assert same(unflatten(node, no_fetch, pattern), expected)


def test_select_from_a_set_adds_nothing() -> None:
    (kept,) = unflatten(flatten(STATE, refuse), no_fetch, "kinds.1")["kinds"]
    assert kept in (1, 2)


@QUICK
@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), states, min_size=1, max_size=4))
def test_select_of_one_name_is_that_value(state: dict[str, Any]) -> None:
    node = flatten(state, refuse)
    for name, value in state.items():
        kept = unflatten(node, no_fetch, name)
        assert list(kept) == [name]
        assert same(kept[name], value)


@pytest.mark.parametrize("leaf", [1j, b"x", bytearray(b"x"), np.float32(1), np.zeros(2), 1, "s"])
def test_what_can_be_copied_can_be_flattened_however_deep(leaf):
    """A save that was accepted must not fail later, where nobody waits for it."""
    for depth in (MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1):
        state = leaf
        for _ in range(depth):
            state = [state]
        try:
            copied = copy_containers(state, {}, lambda value: value)
        except UnsupportedValue:
            copied = None
            assert depth > MAX_DEPTH
        if copied is None:
            with pytest.raises(UnsupportedValue):
                flatten(state, lambda path, value: {})
        else:
            flatten(copied, lambda path, value: {})
