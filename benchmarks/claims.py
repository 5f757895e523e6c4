"""Every number that the proposal promises, beside what a run measured.

The claims are in claims.yaml. Each names its places, the rows of the benchmark that speak about it,
and the rule by which it is judged; figures and verdicts come from a run alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from benchmarks import NAMES, Row
from benchmarks.stored import format_number
from penstock.errors import CorruptFile

SEEDS = {
    "000": "000_f1b48b876e9111bd.txt",
    "002": "002_264a9765fbfbcad6.txt",
    "003": "003_be2ecd7b42ab1d79.txt",
    "004": "004_2e944fceda80809b.txt",
}
COLUMNS = ("where", "claim", "command", "measured", "verdict", "penstock")
HOW = (
    "Verdicts are computed from the figures by the rule in brackets. “About” and “~” allow "
    "25 %; “arithmetic” is a sum that was done again by code; “(computed)” rows follow from "
    "measured ones and the document's own numbers; “(scaled)” ones were measured on less."
)
ABSENT = "not in this run"
_ABOUT, _EXACT = 0.25, 0.01
_FIELDS = {"id", "places", "claim", "case", "figures", "holds", "arithmetic", "unmeasured"} | {
    "instead",
    "note",
}
_RULES = ("between", "at_least", "at_most", "about_at_least", "about_at_most", "about", "equals")

Rows = Mapping[tuple[str, str, str], Row]


@dataclass(frozen=True)
class Look:
    """Where a figure is found.

    Args:
        label: Under which circumstances; "" if there is only one.
        case: The case that measures it.
        what: The quantity.
        who: The method.
    """

    label: str
    case: str
    what: str
    who: str


@dataclass(frozen=True)
class Claim:
    """One claim of the proposal.

    Args:
        id: Names it.
        places: "000 §3.1:120" and so on: seed, section, lines.
        claim: In English, with its number.
        case: The case whose command measures it.
        figures: What was measured of it.
        rule: Its name and numbers; none if it cannot be judged here.
        arithmetic: Whether it is a sum, not a measurement.
        unmeasured: Why it cannot be judged here; then the figures are the nearest ones.
        instead: What penstock reaches.
        note: A remark.
    """

    id: str
    places: tuple[str, ...]
    claim: str
    case: str
    figures: tuple[Look, ...]
    rule: tuple[str, Any] | None
    arithmetic: bool
    unmeasured: str
    instead: tuple[Look, ...]
    note: str

    @property
    def command(self) -> str:
        """What a reader types to measure it."""
        return f"python -m benchmarks {self.case}"


@cache
def all_claims() -> tuple[Claim, ...]:
    """Read claims.yaml."""
    from ruamel.yaml import YAML

    text = files("benchmarks").joinpath("claims.yaml").read_text(encoding="utf-8")
    return tuple(_parse(entry) for entry in YAML(typ="safe", pure=True).load(text))


def _parse(entry: Mapping[str, Any]) -> Claim:
    name = entry["id"]
    unknown = entry.keys() - _FIELDS
    if unknown or ("holds" in entry) == ("unmeasured" in entry):
        raise CorruptFile(f"claims.yaml: {name} has odd fields: {sorted(unknown) or 'holds'}")
    rule = None
    if "holds" in entry:
        ((kind, numbers),) = entry["holds"].items()
        if kind not in _RULES:
            raise CorruptFile(f"claims.yaml: {name} has no rule {kind!r}; use one of {_RULES}")
        rule = (kind, numbers)
    return Claim(
        id=name,
        places=tuple(entry["places"]),
        claim=entry["claim"],
        case=entry["case"],
        figures=tuple(_looks(entry["figures"], entry["case"])),
        rule=rule,
        arithmetic=bool(entry.get("arithmetic", False)),
        unmeasured=entry.get("unmeasured", ""),
        instead=tuple(_looks(entry.get("instead", {}), entry["case"])),
        note=entry.get("note", ""),
    )


def _looks(found: str | Mapping[str, str], case: str) -> Iterator[Look]:
    """Read look-ups: "what | who", one or by label; "nav/what | who" is of another case."""
    for label, text in ({"": found} if isinstance(found, str) else found).items():
        what, _, who = text.partition(" | ")
        head, slash, rest = what.partition("/")
        other = bool(slash) and head in NAMES
        yield Look(label, head if other else case, rest if other else what, who.strip())


def holds(rule: tuple[str, Any], value: float) -> bool:
    """Judge a figure by a rule."""
    kind, wanted = rule
    if kind == "between":
        low, high = wanted
        return bool(low <= value <= high)
    number = float(wanted)
    slack = {"about": _ABOUT, "equals": _EXACT}.get(kind)
    if slack is not None:
        return abs(value - number) <= slack * abs(number)
    slack = _ABOUT if kind.startswith("about") else 0.0
    if kind.endswith("at_least"):
        return value >= number * (1 - slack)
    return value <= number * (1 + slack)


def rule_text(rule: tuple[str, Any]) -> str:
    """Say a rule in words."""
    kind, wanted = rule
    if kind == "between":
        return f"{wanted[0]:g} to {wanted[1]:g}"
    words = {"about": "about", "equals": "exactly", "at_least": "at least", "at_most": "at most"}
    words |= {"about_at_least": "at least about", "about_at_most": "at most about"}
    return f"{words[kind]} {wanted:g}"


def look_up(rows: Rows, look: Look) -> Row | None:
    """Return a row of a run; a look-up without a method takes the first of the quantity."""
    if look.who:
        return rows.get((look.case, look.what, look.who))
    return next(
        (row for (case, what, _), row in rows.items() if (case, what) == (look.case, look.what)),
        None,
    )


def rows_of(result: Mapping[str, Any]) -> dict[tuple[str, str, str], Row]:
    """Return all rows of a run by case, quantity and method."""
    return {
        (case["name"], row["what"], row["who"]): Row(**row)
        for case in result["cases"]
        for row in case["rows"]
    }


def verdict(claim: Claim, rows: Rows) -> str:
    """Judge a claim by a run."""
    if claim.rule is None:
        return f"not measured: {claim.unmeasured}; the nearest figure is shown"
    found = [(look.label, look_up(rows, look)) for look in claim.figures]
    if any(row is None for _, row in found):
        return ABSENT
    rule = claim.rule
    good = [label for label, row in found if row is not None and holds(rule, row.value)]
    sums = "arithmetic " if claim.arithmetic else ""
    if len(good) == len(found):
        return f"{sums}holds ({rule_text(rule)})"
    if good:
        return f"holds only for {'; '.join(good)} ({rule_text(rule)})"
    return f"{'arithmetic is ' if sums else ''}{'wrong' if sums else 'false'} ({rule_text(rule)})"


def _figures(looks: Sequence[Look], rows: Rows) -> str:
    parts = []
    for look in looks:
        row = look_up(rows, look)
        value = ABSENT if row is None else f"{format_number(row.value)} {row.unit}"
        parts.append(f"{look.label}: {value}" if look.label else value)
    return "; ".join(parts)


def _places(places: Sequence[str]) -> str:
    """Name each document once."""
    found: dict[str, list[str]] = {}
    for place in places:
        short, _, rest = place.partition(" ")
        found.setdefault(short, []).append(rest)
    return "; ".join(f"{short} {', '.join(parts)}" for short, parts in found.items())


def table(result: Mapping[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Lay out all claims beside a run: columns and rows."""
    rows = rows_of(result)
    cells = []
    for claim in all_claims():
        reached = "; ".join(part for part in (_figures(claim.instead, rows), claim.note) if part)
        cells.append(
            [
                _places(claim.places),
                claim.claim,
                claim.command,
                _figures(claim.figures, rows),
                verdict(claim, rows),
                reached,
            ]
        )
    return COLUMNS, cells


def page(result: Mapping[str, Any]) -> str:
    """Write the page of the claims, in Markdown."""
    columns, cells = table(result)
    verdicts = [row[columns.index("verdict")] for row in cells]
    kinds = {
        "hold": sum("holds (" in text for text in verdicts),
        "hold in some cases": sum("holds only" in text for text in verdicts),
        "are false": sum(text.startswith(("false", "arithmetic is")) for text in verdicts),
        "cannot be measured here": sum(text.startswith("not measured") for text in verdicts),
        "are not in this run": sum(text == ABSENT for text in verdicts),
    }
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    quick = " A quick run: few repetitions, expect noise." if result["quick"] else ""
    missing = [line for case in result["cases"] for line in case["missing"]]
    lines = [
        "# Every claim, measured",
        "",
        "Penstock grew out of four documents on robot data and training. This is every number in "
        "them, the figure that was measured, and what penstock reaches instead.",
        "",
        f"Written by `python -m benchmarks --from docs/bench.json --claims docs/claims.md`. {HOW}",
        "",
        f"{len(cells)} claims: {counted}. Where: document, section and lines; sections without a "
        "number are counted.",
        "",
        f"The run: penstock {result['penstock']}, {result['when']}; {result['machine']}; "
        f"{versions}; load {result['load_before']:.1f} before, {result['load_after']:.1f} after."
        f"{quick}",
        *(f"\n{line}" for line in missing),
    ]
    places = columns.index("where")
    for short, name in SEEDS.items():
        # A claim that several documents make is listed with the first of them.
        own = [row for row in cells if row[places].startswith(short)]
        lines += ["", f"## {name}", "", _markdown(columns), _markdown(["---"] * len(columns))]
        for row in own:
            code = [
                f"`{cell}`" if k == columns.index("command") else cell for k, cell in enumerate(row)
            ]
            lines.append(_markdown(code))
    return "\n".join(lines) + "\n"


def _markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
