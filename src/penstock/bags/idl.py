"""Message definitions in OMG IDL, as ROS 2, DDS recorders and Foxglove write them.

Structs become lists of fields; typedefs, enumerations and constants are put in where they are
used. What has no fixed place for its numbers (a union, a map, lists of lists) keeps a name that
nobody can read, so that the fields before it can be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any, Final, NamedTuple

from penstock.errors import DataError

_TOKEN: Final = re.compile(
    r"""[A-Za-z_][\w]*(?:::\w+)*|::\w+(?:::\w+)*|[0-9][\w.+-]*|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\]|\\.)'|\S"""
)
# Each pattern stops at what ends it, or takes all there is: the text may be hostile.
_NOISE: Final = re.compile(
    r"/\*.*?(?:\*/|\Z)|//[^\n]*|^[ \t]*#[^\n]*|^={3,}[ \t]*$|^IDL: [^\n]*", re.S | re.M
)
_PRIMITIVES: Final = {
    **{"boolean": "bool", "octet": "byte", "char": "char", "wchar": "wchar", "any": "any"},
    **{"short": "int16", "long": "int32", "long long": "int64", "float": "float32"},
    **{"unsigned short": "uint16", "unsigned long": "uint32", "unsigned long long": "uint64"},
    **{"double": "float64", "long double": "float128", "string": "string", "wstring": "wstring"},
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_SPECIFIERS: Final = ("unsigned", "long", "short", "double")  # that are several words
_LISTS: Final = "list of lists"
UNREADABLE: Final = {"map", "union", "fixed", "any", _LISTS}
_BASE: Final = UNREADABLE | set(_PRIMITIVES.values())
_MOST_DEPTH: Final = 20
_LOOKED_UP: Final = 100  # typedefs of typedefs


class Field(NamedTuple):
    """A field of a message type.

    Attributes:
        name: Its name.
        type: A base type such as "float64", or the full name of a message type.
        size: None for one value, -1 for a sequence, otherwise the length of an array.
        optional: Whether a message may leave it out.
    """

    name: str
    type: str
    size: int | None = None
    optional: bool = False


class _Type(NamedTuple):
    """A type as it is written: a name, or a list of items of another."""

    name: str
    sizes: tuple[str, ...] = ()  # of an array; ("",) for a sequence
    item: _Type | None = None


class _Member(NamedTuple):
    name: str
    type: _Type
    optional: bool = False


class _Struct(NamedTuple):
    scope: tuple[str, ...]
    members: list[_Member]
    base: str
    delimited: bool | None


def full_type(name: str) -> str:
    """Return a message type in ROS 2 spelling: of "sensor_msgs/Image", "sensor_msgs/msg/Image".

    DDS writes it as "sensor_msgs::msg::dds_::Image_".
    """
    parts = name.removeprefix("::").replace("::", "/").split("/")
    if parts[-2:-1] == ["dds_"]:
        parts = [*parts[:-2], parts[-1].removesuffix("_")]
    return f"{parts[0]}/msg/{parts[1]}" if len(parts) == 2 else "/".join(parts)


def parse_idl(text: str) -> tuple[dict[str, tuple[Field, ...]], dict[str, bool | None]]:
    """Return the fields of each struct, and whether its values are delimited.

    That is by the annotations of a struct: True if it is appendable, False if it is final, None if
    it says neither.

    Raises:
        DataError: It is not understood, or a struct is mutable.
    """
    parser = _Parser(text)
    parser.definitions((), 0)
    return parser.resolved()


class _Parser:
    """Reads the definitions of a text."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(_NOISE.sub(" ", text))
        self._at = 0
        self._structs: dict[str, _Struct] = {}
        self._others: dict[str, tuple[tuple[str, ...], _Type]] = {}  # typedefs, enums, unions
        self._constants: dict[str, str] = {}

    def _next(self, *expected: str) -> str:
        part = self._tokens[self._at] if self._at < len(self._tokens) else "its end"
        if expected and part not in expected:
            raise DataError(f"the IDL definition has {part[:40]!r} where {expected[0]!r} belongs")
        self._at += 1
        return part

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _takes(self, part: str) -> bool:
        """Pass over a part if it is the next one."""
        found = self._peek() == part
        self._at += found
        return found

    def _name(self) -> str:
        name = self._next()
        if not re.fullmatch(r"(::)?[A-Za-z_]\w*(::\w+)*", name):
            raise DataError(f"the IDL definition has {name[:40]!r} where a name belongs")
        return name

    def _until(self, *ends: str) -> Iterator[str]:
        """Yield the tokens up to one of these, which is passed over; brackets are whole."""
        depth = 0
        while depth or self._peek() not in ends:
            part = self._next()
            if part == "its end":
                raise DataError("the IDL definition is cut")
            depth += (part in "({[") - (part in ")}]")
            yield part
        self._at += 1

    def _annotations(self) -> dict[str, str]:
        """Return annotations and what they say in brackets."""
        found = {}
        while self._takes("@"):
            name = self._name()
            found[name] = "".join(self._until(")")) if self._takes("(") else ""
        return found

    def definitions(self, scope: tuple[str, ...], depth: int) -> None:
        """Read the definitions of a module, up to its end."""
        if depth > _MOST_DEPTH:
            raise DataError(f"the IDL definition is nested deeper than {_MOST_DEPTH}")
        while self._at < len(self._tokens) and self._peek() != "}":
            said = self._annotations()
            kind = self._next()
            if kind == "module":
                inner = (*scope, self._name())
                self._next("{")
                self.definitions(inner, depth + 1)
                self._next("}")
            elif kind == "struct":
                self._struct(scope, said)
            elif kind in ("enum", "bitmask", "union"):
                self._other(scope, kind, said)
            elif kind == "typedef":
                type_ = self._type()
                for name, sizes in self._declarators():
                    one = _Type("", sizes, type_) if sizes else type_
                    self._others["::".join((*scope, name))] = scope, one
                continue
            elif kind == "const":
                self._type()
                name = "::".join((*scope, self._name()))
                self._next("=")
                self._constants[name] = "".join(self._until(";"))
                continue
            elif kind != ";":
                raise DataError(f"the IDL definition has {kind[:40]!r} where a type belongs")
            self._takes(";")
        if not depth and self._peek():
            raise DataError("the IDL definition has a '}' too many")

    def _struct(self, scope: tuple[str, ...], said: dict[str, str]) -> None:
        name = "::".join((*scope, self._name()))
        if self._peek() == ";":  # it is defined further down
            return
        base = self._name() if self._takes(":") else ""
        self._next("{")
        members = []
        while not self._takes("}"):
            optional = "optional" in self._annotations()
            type_ = self._type()
            for field, sizes in self._declarators():
                whole = _Type("", sizes, type_) if sizes else type_
                members.append(_Member(field, whole, optional))
        ways = {*said, said.get("extensibility", "").lower()}
        if "mutable" in ways:
            raise DataError(f"the struct {name} is mutable: such lists of parameters are not read")
        delimited = True if "appendable" in ways else False if "final" in ways else None
        self._structs[name] = _Struct(scope, members, base, delimited)

    def _other(self, scope: tuple[str, ...], kind: str, said: dict[str, str]) -> None:
        """Take an enumeration for the whole number that it is; a union cannot be read."""
        name = "::".join((*scope, self._name()))
        if self._peek() == ";":
            return
        for _ in self._until("{"):
            pass
        for _ in self._until("}"):
            pass
        digits = re.search(r"\d{1,3}", said.get("bit_bound", ""))
        bits = next(
            (size for size in (8, 16, 32, 64) if size >= int(digits[0] if digits else 32)), 64
        )
        number = f"{'u' * (kind == 'bitmask')}int{bits}"
        self._others[name] = scope, _Type("union" if kind == "union" else number)

    def _declarators(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield names, and the sizes of those that are arrays."""
        while True:
            name, sizes = self._name(), []
            while self._takes("["):
                sizes.append("".join(self._until("]")))
            yield name, tuple(sizes)
            if self._next(",", ";") == ";":
                return

    def _type(self, depth: int = 0) -> _Type:
        if depth > _MOST_DEPTH:
            raise DataError(f"the IDL definition is nested deeper than {_MOST_DEPTH}")
        word = self._name()
        if word == "sequence":
            self._next("<")
            item = self._type(depth + 1)
            for _ in self._until(">"):  # how many there may be
                pass
            return _Type("", ("",), item)
        if word in ("map", "fixed"):
            self._next("<")
            nested = 1
            while nested:
                part = self._next()
                if part == "its end":
                    raise DataError("the IDL definition is cut")
                nested += (part == "<") - (part == ">")
            return _Type(word)
        if word in _SPECIFIERS:
            while self._peek() in _SPECIFIERS:
                word += f" {self._next()}"
        elif word in ("string", "wstring") and self._takes("<"):
            for _ in self._until(">"):
                pass
        return _Type(_PRIMITIVES.get(word, word))

    def resolved(self) -> tuple[dict[str, tuple[Field, ...]], dict[str, bool | None]]:
        """Return the structs with the full names of their types."""
        types, delimited = {}, {}
        for name, struct in self._structs.items():
            members = self._members(name, 0)
            types[full_type(name)] = tuple(
                Field(member.name, *self._resolve(member.type, scope), member.optional)
                for scope, member in members
                if member.name != "structure_needs_at_least_one_member"
            )
            delimited[full_type(name)] = struct.delimited
        return types, delimited

    def _members(self, name: str, depth: int) -> list[tuple[tuple[str, ...], _Member]]:
        """Return the members of a struct, after those that it inherits."""
        struct = self._structs[name]
        inherited = []
        if struct.base:
            base = self._find(struct.base, struct.scope, self._structs)
            if base is None or depth > _MOST_DEPTH:
                raise DataError(
                    f"the struct {name} inherits of {struct.base}, which is not defined"
                )
            inherited = self._members(base, depth + 1)
        return [*inherited, *((struct.scope, member) for member in struct.members)]

    def _find(self, name: str, scope: tuple[str, ...], among: dict[str, Any]) -> str | None:
        """Return the whole name of what a scope knows under a name."""
        if name.startswith("::"):
            return name[2:] if name[2:] in among else None
        names = ("::".join((*scope[:stop], name)) for stop in range(len(scope), -1, -1))
        return next((one for one in names if one in among), None)

    def _resolve(
        self, type_: _Type, scope: tuple[str, ...], depth: int = 0
    ) -> tuple[str, int | None]:
        """Return a base type or the full name of a struct, and its size."""
        if depth > _LOOKED_UP:
            raise DataError("the IDL definition has types that are made of themselves")
        if type_.item is not None:
            kind, inner = self._resolve(type_.item, scope, depth + 1)
            size = -1 if type_.sizes == ("",) else prod(self._number(s, scope) for s in type_.sizes)
            if inner is None:
                return kind, size
            return (kind, inner * size) if min(inner, size) > 0 else (_LISTS, None)
        other = self._find(type_.name, scope, self._others)
        struct = self._find(type_.name, scope, self._structs)
        if other is not None and (struct is None or len(other) >= len(struct)):
            return self._resolve(self._others[other][1], self._others[other][0], depth + 1)
        return (
            (type_.name, None) if type_.name in _BASE else (full_type(struct or type_.name), None)
        )

    def _number(self, text: str, scope: tuple[str, ...], depth: int = 0) -> int:
        name = self._find(text, scope, self._constants)
        if name is not None and depth < _LOOKED_UP:
            return self._number(self._constants[name], scope, depth + 1)
        if not re.fullmatch(r"[0-9]{1,10}", text) or not int(text):
            raise DataError(f"the IDL definition has an array of {text[:40]!r} items")
        return int(text)
