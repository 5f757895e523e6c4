"""Two runs beside each other: what moved, and whether by more than noise.

Noise is judged by the runs themselves: a row with a 90th percentile moves when its median differs
by more than the distances from median to 90th percentile of both runs together, 5 % at least.
Rows without one: 10 %; sizes in bytes, ratios of sizes, and counts are exact: 1 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import Row
from benchmarks.stored import format_number
from penstock.ui.report import text_table

HOW = (
    "moved: the medians differ by more than the distance from median to p90 of both runs together "
    "(5 % at least; 10 % where there is no p90; 1 % for sizes and counts)"
)
_COLUMNS = ("case", "what", "who", "before", "after", "ratio", "noise", "moved", "bar")
_LEAST, _UNKNOWN, _EXACT = 0.05, 0.10, 0.01
_EXACT_UNITS = ("B", "kB", "x smaller", "lines", "steps", "epochs", "float32", "different tensors")

Key = tuple[str, str, str]


def compare_text(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Lay out two runs for the terminal: first what else differs, then every row of both.

    Args:
        old: The run before, of `load` or `run`.
        new: The run after.
    """
    before, after = _rows(old), _rows(new)
    both = [key for key in after if key in before]
    parts = [*_differences(old, new), HOW]
    if both:
        cells = [_cells(key, before[key], after[key]) for key in both]
        parts.append(text_table(_COLUMNS, cells))
        moved = sum(bool(row[_COLUMNS.index("moved")]) for row in cells)
        parts.append(f"{moved} of {len(both)} rows moved")
    else:
        parts.append("the runs have no row in common")
    for title, mine, theirs in (("before", before, after), ("after", after, before)):
        lone = [key for key in mine if key not in theirs]
        if lone:
            lines = [f"  {case}: {what} | {who}" for case, what, who in lone]
            parts.append("\n".join([f"only {title} ({len(lone)}):", *lines]))
    return "\n\n".join(parts)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say what else than the code may have moved the figures."""
    lines = [f"before: penstock {old['penstock']}, {old['when']}"]
    lines.append(f"after:  penstock {new['penstock']}, {new['when']}")
    if old["machine"] != new["machine"]:
        lines.append(f"ANOTHER MACHINE: {old['machine']} -> {new['machine']}")
    if old["quick"] != new["quick"]:
        lines.append("only one of the runs is quick: fewer repetitions, more noise")
    for name in sorted(old["versions"].keys() | new["versions"].keys()):
        pair = [str(run["versions"].get(name, "not there")) for run in (old, new)]
        if pair[0] != pair[1]:
            lines.append(f"{name} {pair[0]} -> {pair[1]}")
    loads = [f"{run['load_before']:.1f} to {run['load_after']:.1f}" for run in (old, new)]
    lines.append(f"load {loads[0]} before, {loads[1]} after")
    return ["\n".join(lines)]


def _rows(result: Mapping[str, Any]) -> dict[Key, Row]:
    return {
        (case["name"], row["what"], row["who"]): Row(**row)
        for case in result["cases"]
        for row in case["rows"]
    }


def _cells(key: Key, old: Row, new: Row) -> list[str]:
    case, what, who = key
    noise = noise_of(old, new)
    ratio = new.value / old.value if old.value else None
    change = abs(ratio - 1) if ratio is not None else float(new.value != old.value)
    moved = change > noise
    bar = "" if old.met == new.met else f"{_met(old.met)} -> {_met(new.met)}"
    return [
        case,
        what,
        who,
        f"{format_number(old.value)} {old.unit}",
        f"{format_number(new.value)} {new.unit}",
        "-" if ratio is None else f"{ratio:.3f}",
        f"{noise:.0%}",
        ("up" if new.value > old.value else "down") if moved else "",
        bar,
    ]


def noise_of(old: Row, new: Row) -> float:
    """Say by which share of the value before two runs of the same code may differ."""
    if old.unit in _EXACT_UNITS or old.unit.startswith("of "):
        return _EXACT
    spreads = [
        abs(row.p90 - row.value) / abs(row.value)
        for row in (old, new)
        if row.p90 is not None and row.value
    ]
    return max(_LEAST, sum(spreads)) if len(spreads) == 2 else _UNKNOWN


def _met(met: bool | None) -> str:
    return {True: "met", False: "NOT MET", None: "none"}[met]
