"""Definitions in IDL, and messages of both versions of CDR, against Eclipse Cyclone DDS.

The messages were written by its Python package (cyclonedds 0.10 or newer).
"""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pytest

from penstock.bags import Decoder, Limits, Topic
from penstock.bags.idl import full_type
from penstock.errors import DataError

from .damage import mutate

DEFINITION = """
module m {
  @final struct Motor { string name; double q; octet mode; };
  @appendable struct Grown { octet a; double b; };
  @final struct State {
    octet id;
    sequence<string> names;
    sequence<Motor> motors;
    Motor pair[2];
    @optional double level;
    @optional unsigned long count;
    Grown grown;
    sequence<m::Grown> many;
    sequence<double> q;
    double last;
  };
  @extensibility(APPENDABLE) struct Open {
    octet id;
    Motor motor;
    ::m::Grown grown;
    sequence<double> q;
    double last;
  };
};
"""
MESSAGES = {
    "State, version 1, little": (
        "000100000100000002000000020000006100000004000000626364000200000003000000616200000000"
        "0000000000000000f83f0700000002000000630000000000000000000000000004400800000002000000"
        "64000000000000000000000000000c400900000004000000656667000000000000000000000012400a00"
        "0000017f080004000000080000000000000000001640017f08000500000004000000060000000b000000"
        "000000000000000000001a40020000000c0000000000000000001e400d00000000000000000000000000"
        "21400200000000000000000000000000f03f00000000000000400000000000002340"
    ),
    "State, version 1, big": (
        "000000000100000000000002000000026100000000000004626364000000000200000003616200000000"
        "00003ff80000000000000700000000000002630000000000000040040000000000000800000000000002"
        "6400000000000000400c0000000000000900000000000004656667000000000040120000000000000a00"
        "00007f010008000000040000000840160000000000007f0100080000000500000004000000060b000000"
        "00000000401a000000000000000000020c000000401e0000000000000d00000000000000402100000000"
        "000000000002000000003ff000000000000040000000000000004023000000000000"
    ),
    "State, version 1, little, nothing optional": (
        "000100000100000002000000020000006100000004000000626364000200000003000000616200000000"
        "0000000000000000f83f0700000002000000630000000000000000000000000004400800000002000000"
        "64000000000000000000000000000c400900000004000000656667000000000000000000000012400a00"
        "0000017f08000400000000000000017f080005000000000000000b0000000000000000001a4002000000"
        "0c0000000000000000001e400d0000000000000000000000000021400200000000000000000000000000"
        "f03f00000000000000400000000000002340"
    ),
    "State, version 1, big, nothing optional": (
        "000000000100000000000002000000026100000000000004626364000000000200000003616200000000"
        "00003ff80000000000000700000000000002630000000000000040040000000000000800000000000002"
        "6400000000000000400c0000000000000900000000000004656667000000000040120000000000000a00"
        "00007f01000800000004000000007f01000800000005000000000b000000401a00000000000000000002"
        "0c000000401e0000000000000d00000000000000402100000000000000000002000000003ff000000000"
        "000040000000000000004023000000000000"
    ),
    "State, version 2, little": (
        "000700000100000014000000020000000200000061000000040000006263640029000000020000000300"
        "000061620000000000000000f83f07000000020000006300000000000000000004400800000025000000"
        "02000000640000000000000000000c4009000000040000006566670000000000000012400a0100000000"
        "00000000164001000000060000000c0000000b0000000000000000001a4024000000020000000c000000"
        "0c0000000000000000001e400c0000000d000000000000000000214002000000000000000000f03f0000"
        "0000000000400000000000002340"
    ),
    "State, version 2, big": (
        "000600000100000000000014000000020000000261000000000000046263640000000029000000020000"
        "0003616200003ff800000000000007000000000000026300000040040000000000000800000000000025"
        "0000000264000000400c00000000000009000000000000046566670040120000000000000a0100004016"
        "00000000000001000000000000060000000c0b000000401a00000000000000000024000000020000000c"
        "0c000000401e0000000000000000000c0d0000004021000000000000000000023ff00000000000004000"
        "0000000000004023000000000000"
    ),
    "State, version 2, little, nothing optional": (
        "000700000100000014000000020000000200000061000000040000006263640029000000020000000300"
        "000061620000000000000000f83f07000000020000006300000000000000000004400800000025000000"
        "02000000640000000000000000000c4009000000040000006566670000000000000012400a0000000c00"
        "00000b0000000000000000001a4024000000020000000c0000000c0000000000000000001e400c000000"
        "0d000000000000000000214002000000000000000000f03f00000000000000400000000000002340"
    ),
    "State, version 2, big, nothing optional": (
        "000600000100000000000014000000020000000261000000000000046263640000000029000000020000"
        "0003616200003ff800000000000007000000000000026300000040040000000000000800000000000025"
        "0000000264000000400c00000000000009000000000000046566670040120000000000000a0000000000"
        "000c0b000000401a00000000000000000024000000020000000c0c000000401e0000000000000000000c"
        "0d0000004021000000000000000000023ff000000000000040000000000000004023000000000000"
    ),
    "Open, version 2, little": (
        "0009000044000000010000000300000061620000000000000000f83f070000000c000000020000000000"
        "00000000044002000000000000000000f03f00000000000000400000000000000c40"
    ),
    "Open, version 2, big": (
        "00080000000000440100000000000003616200003ff8000000000000070000000000000c020000004004"
        "000000000000000000023ff00000000000004000000000000000400c000000000000"
    ),
}
WANTED = {
    "State": {
        "id": [1],
        "motors.q": [1.5, 2.5],
        "motors.mode": [7, 8],
        "pair.q": [3.5, 4.5],
        "level": [5.5],
        "count": [6],
        "grown": [11, 6.5],
        "many.b": [7.5, 8.5],
        "q": [1, 2],
        "last": [9.5],
    },
    "Open": {"id": [1], "motor.q": [1.5], "grown": [2, 2.5], "q": [1, 2], "last": [3.5]},
}


def decoder(definition: str, kind: str = "m::A") -> Decoder:
    return Decoder(Topic("/t", full_type(kind), 1, None, definition, "cdr"), "x.mcap", Limits())


@pytest.mark.parametrize("what", MESSAGES)
def test_messages_of_cyclone(what: str) -> None:
    data, kind = bytes.fromhex(MESSAGES[what]), what.partition(",")[0]
    for path, wanted in WANTED[kind].items():
        if "nothing" in what and path in ("level", "count"):
            wanted = [np.nan]
        # Each by itself, so that all that lies before it is passed over.
        np.testing.assert_array_equal(decoder(DEFINITION, f"m::{kind}").vector(data, path), wanted)
    whole = decoder(DEFINITION, f"m::{kind}")
    for path in WANTED[kind]:
        if path not in ("level", "count"):
            whole.vector(data, path)
    np.testing.assert_array_equal(whole.vector(data, "last"), WANTED[kind]["last"])
    if kind == "State":
        assert whole.names(data, "motors.q") == ("ab", "c")


def test_lists_of_parameters_are_refused() -> None:
    one = decoder("module m { struct A { double x; }; };")
    for second in (2, 3, 10, 11):
        with pytest.raises(DataError, match="not plain CDR"):
            one.vector(bytes([0, second, 0, 0]) + bytes(20), "x")
    with pytest.raises(DataError, match="mutable"):
        decoder("module m { @mutable struct A { double x; }; };")


def test_what_idl_can_say() -> None:
    text = """
    // a comment with a struct { in it
    #include "other.idl"
    /* and
       one of several lines */
    module m {
      const long N = 3;
      const long M = N;
      enum Mode { OFF, @value(5) ON };
      @bit_bound(8) enum Small { A, B };
      bitmask Flags { @position(0) LEFT, RIGHT };
      typedef double Seven[7];
      typedef sequence<float, M> Some;
      struct Base { @key long id; };
      struct Later;
      struct A : Base {
        Mode mode;
        Small small;
        Flags flags;
        Seven joints;
        Some some;
        float matrix[2][N];
        @unit(value="rad") @default(value=3) double x, y;
        Later later;
        string<20> text;
      };
      struct Later { unsigned long long n; };
    };
    """
    one = decoder(text)
    assert one.fields() == {
        "id": "int32",
        "mode": "int32",
        "small": "int8",
        "flags": "uint32",
        "joints": "float64[7]",
        "some": "float32[]",
        "matrix": "float32[6]",
        "x": "float64",
        "y": "float64",
        "later.n": "uint64",
    }
    body = struct.pack("<iib3xI7dI3f6f", 1, 5, -2, 3, *range(7), 3, 1, 2, 3, *range(6))
    body += bytes(-len(body) % 8) + struct.pack("<ddQ", 1.5, 2.5, 9)
    data = b"\0\1\0\0" + body
    assert one.vector(data, "joints").tolist() == [*range(7)]
    assert one.vector(data, "matrix").tolist() == [*range(6)]
    assert one.vector(data, "later.n").tolist() == [9]
    assert one.vector(data, "small").tolist() == [-2]


@pytest.mark.parametrize(
    "field", ["sequence<sequence<double>> w", "map<string, double> w", "U w", "wstring w"]
)
def test_what_lies_behind_something_unreadable_is_refused(field: str) -> None:
    union = "union U switch (long) { case 0: double a; default: long b; };"
    one = decoder(f"module m {{ {union} struct A {{ double x; {field}; double y; }}; }};")
    data = b"\0\1\0\0" + struct.pack("<d", 1.5) + bytes(40)
    assert one.vector(data, "x").tolist() == [1.5]
    with pytest.raises(DataError, match="cannot be read"):
        one.vector(data, "y")


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("sensor_msgs/Image", "sensor_msgs/msg/Image"),
        ("sensor_msgs::msg::dds_::Image_", "sensor_msgs/msg/Image"),
        ("unitree_go::msg::dds_::LowState_", "unitree_go/msg/LowState"),
        ("foxglove::RawImage", "foxglove/msg/RawImage"),
        ("HelloWorld", "HelloWorld"),
        ("foxglove.RawImage", "foxglove.RawImage"),
    ],
)
def test_names_of_types(written: str, known: str) -> None:
    assert full_type(written) == known


def test_types_as_dds_recorders_name_them() -> None:
    text = """module a { module msg { module dds_ {
        struct Motor_ { float q; }; struct Low_ { a::msg::dds_::Motor_ motors[2]; float v; };
    }; }; };"""
    one = decoder(text, "a::msg::dds_::Low_")
    data = b"\0\1\0\0" + struct.pack("<3f", 1, 2, 3)
    assert one.vector(data, "motors.q").tolist() == [1, 2]
    alone = decoder("struct Hello { unsigned long n; };", "Hello")
    assert alone.vector(b"\0\1\0\0\5\0\0\0", "n").tolist() == [5]


@pytest.mark.parametrize(
    "text",
    [
        "module m { struct A { double x; }; }; }",
        "module m { struct A { double x; }",
        "module m { struct A : Nothing { double x; }; };",
        "module m { struct A : A { double x; }; };",
        "module m { typedef B C; typedef C B; struct A { B x; }; };",
        "module m { struct A { double x[0]; }; };",
        "module m { struct A { double x[N]; }; };",
        "module m { const long N = N; struct A { double x[N]; }; };",
        "module m { struct A { sequence<" + "sequence<" * 500 + "double" + ">" * 501 + " x; }; };",
        "module m { struct A { map<string, x; }; };",
        "module m { struct A { A a; }; };",
        "module m { struct A { double x; double x; }; };",
        "module m { enum E { ",
        "module m { @unit(",
        "module m { struct A { double; }; };",
        "module m { struct A { B b; }; };",
        "struct A { double x; };",
    ],
)
def test_definitions_that_are_wrong(text: str) -> None:
    with pytest.raises(DataError):
        decoder(text)


def attack(cases: int) -> None:
    """Damage definitions and messages: one clear error, or numbers."""
    rng = np.random.default_rng(0)
    messages = [bytes.fromhex(data) for name, data in MESSAGES.items() if name.startswith("State")]
    errors = 0
    for case in range(cases):
        text, raw = DEFINITION.encode(), messages[case % len(messages)]
        text, raw = (mutate(text, rng), raw) if case % 2 else (text, mutate(raw, rng))
        try:
            one = decoder(text.decode("utf-8", "replace"), "m::State")
            for path in one.fields():
                one.vector(raw, path)
        except DataError:
            errors += 1
    assert errors > cases // 10


def test_damaged_definitions_and_messages() -> None:
    attack(300)


@pytest.mark.stress
def test_damaged_definitions_and_messages_for_long() -> None:
    attack(10_000)


@pytest.mark.parametrize(
    "text",
    [
        "/*",
        '\\"',
        "\n",
        "//",
        "\n#",
        "<",
        "[",
        "@a(",
        "struct ",
        "module a { ",
        "=== ",
        "::a",
        "'\\",
    ],
)
def test_long_definitions_are_read_at_once(text: str) -> None:
    """No pattern looks at all of a hostile text again and again."""
    text = f"struct A {{ double x; }};\n{text * (900_000 // len(text))}"
    with suppress(DataError):
        decoder(text, "A").fields()
    with pytest.raises(DataError):
        decoder(f"struct A {{ {text}", "A")
    with pytest.raises(DataError):
        decoder(f"@bit_bound({'9' * 5000}) enum E {{ X }}; struct A {{ E e; B b; }};", "A")
