"""Run cases, and say on which machine, with which versions, and under which load."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import NAMES, Case, Row, Settings, find_case
from benchmarks.compare import compare_text
from benchmarks.stored import FORMAT, format_number, load, save
from penstock import __version__
from penstock.errors import PenstockError
from penstock.ui.report import Report, text_table

__all__ = [
    "compare_text",
    "html_report",
    "load",
    "machine",
    "run",
    "save",
    "text_report",
    "versions",
]

_PACKAGES = (
    *("torch", "torchrl", "tensordict", "numba", "numpy"),
    *("safetensors", "lz4", "backports.zstd", "isal", "av", "pyarrow", "cpprb"),
)
_MOST_BARS, _SPAN = 5, 200.0
_QUICK = {"train_steps": 24, "rounds": 5, "repeats": 2, "faults": 300, "peer_faults": 10} | {
    "episodes": 8
}
_COLUMNS = (
    "what",
    "who",
    "median",
    "verdict",
    "bar",
    "p90",
    "n",
    "x penstock",
    "CPU s",
)


def run(names: Sequence[str] = (), quick: bool = False, settings: Settings | None = None) -> Any:
    """Run cases and return everything as plain values.

    Args:
        names: Of the cases; none means all.
        quick: Fewer repetitions.
        settings: How much to measure, instead of `quick`.

    Returns:
        The finished cases; those that failed or were interrupted are named under "failed". Only
        when nothing has finished, the error or the interrupt is raised.

    Raises:
        UsageError: There is no such case.
    """
    cases = [find_case(name) for name in names or NAMES]
    # Not the temporary folder of the system, which may be in memory: a disk is to be measured.
    with tempfile.TemporaryDirectory(prefix=".penstock-bench-", dir=".") as scratch:
        chosen = settings or Settings(Path(scratch))
        if quick:
            chosen = replace(chosen, **_QUICK)  # type: ignore[arg-type]
        load_before = os.getloadavg()[0]
        finished, failed = _run_all(cases, chosen)
    return {
        "format": FORMAT,
        "penstock": __version__,
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "quick": quick,
        "cases": finished,
        "failed": failed,
    }


def _run_all(
    cases: Sequence[Case], settings: Settings
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run one case after another; what has finished is kept, whatever becomes of the rest."""
    finished: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for number, case in enumerate(cases):
        try:
            finished.append(_run_case(case, settings))
        except KeyboardInterrupt:
            if not finished:
                raise
            failed[case.name] = "interrupted"
            failed |= {other.name: "not run: interrupted" for other in cases[number + 1 :]}
            break
        except Exception as error:  # of any kind: minutes of the other cases are not thrown away
            if len(cases) == 1:
                raise
            kind = "" if isinstance(error, PenstockError) else f"{type(error).__name__}: "
            failed[case.name] = " ".join(f"{kind}{error}".split())
    if not finished:
        lines = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise PenstockError(f"no case could be measured: {lines}")
    return finished, failed


def _run_case(case: Case, settings: Settings) -> dict[str, Any]:
    missing = case.missing()
    for line in missing:
        sys.stderr.write(f"{line}\n")
    begin, cpu = time.perf_counter(), _cpu_s()
    rows = case.run(settings)
    return {
        "name": case.name,
        "claim": case.claim,
        "peers": list(case.peers),
        "missing": missing,
        "data": case.data.format(**asdict(settings)),
        "seconds": round(time.perf_counter() - begin, 1),
        "cpu_seconds": round(_cpu_s() - cpu, 1),
        "rows": [asdict(row) for row in rows],
    }


def machine() -> str:
    """Name the machine: processor, cores, memory, system."""
    import psutil

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    memory = psutil.virtual_memory().total / 1e9
    system = f"{platform.system()} {platform.release()}"
    return f"{model}, {os.cpu_count()} cores, {memory:.1f} GB memory, {system}"


def commit() -> str:
    """Name the commit that was measured; "unknown" outside of a clone."""
    words = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def text_report(result: dict[str, Any]) -> str:
    """Lay out a result for the terminal."""
    parts = [_head(result)]
    for case in result["cases"]:
        parts.append(_case_head(case))
        rows = [row for _, group in _groups(case["rows"]) for row in group]
        parts.append(text_table(_COLUMNS, _cells(rows)))
        parts.append(_summary(case["rows"]))
    return "\n\n".join(parts)


def html_report(result: dict[str, Any]) -> Report:
    """Lay out a result as a page."""
    report = Report("python -m benchmarks")
    report.text(*_head(result).splitlines())
    for case in result["cases"]:
        report.heading(case["name"])
        report.text(*_case_head(case).splitlines()[1:])
        report.figures(_figures(case["rows"]))
        for what, rows in _groups(case["rows"]):
            cells = [row[1:] for row in _cells(rows)]
            # A column that says nothing in this group is left out.
            kept = [
                k for k in range(len(cells[0])) if any(row[k] not in ("", "-") for row in cells)
            ]
            names = [_COLUMNS[1:][k] for k in kept]
            report.table(names, [[row[k] for k in kept] for row in cells], caption=what)
            if _can_be_drawn(rows):
                bars = {row["who"]: [row["value"]] for row in rows}
                report.plot(bars, what, rows[0]["unit"], kind="bars")
    return report


def _can_be_drawn(rows: Sequence[dict[str, Any]]) -> bool:
    """Methods beside each other, in one unit, and not so far apart that a bar vanishes."""
    values = [row["value"] for row in rows]
    return (
        2 <= len(rows) <= _MOST_BARS
        and len({row["unit"] for row in rows}) == 1
        and len({row["who"] for row in rows}) == len(rows)
        and min(values) > 0
        and max(values) <= _SPAN * min(values)
    )


def _head(result: dict[str, Any]) -> str:
    names = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    quick = " (quick: few repetitions, expect noise)" if result["quick"] else ""
    when = f", {result['when']}, commit {result.get('commit', 'unknown')}"
    return (
        f"penstock {result['penstock']}{when}{quick}\n{result['machine']}\n{names}\n"
        f"load before {result['load_before']:.1f}, after {result['load_after']:.1f}"
        + "".join(f"\n{name}: {reason}" for name, reason in result["failed"].items())
    )


def _case_head(case: dict[str, Any]) -> str:
    return (
        f"{case['name']}\nclaim: {case['claim']}\npeers: {', '.join(case['peers'])}\n"
        + "".join(f"{line}\n" for line in case["missing"])
        + f"data: {case['data']}\n"
        f"took {case['seconds']:.0f} s, {case['cpu_seconds']:.0f} s of processor time; methods "
        "take turns in one run, values are medians"
    )


def _summary(rows: Iterable[dict[str, Any]]) -> str:
    verdicts = [row["met"] for row in rows if row["met"] is not None]
    return f"{sum(verdicts)} of {len(verdicts)} bars met"


def _figures(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Choose the figures that carry a bar, one card each, and how many bars are met."""
    judged = [Row(**row) for row in rows if row["met"] is not None]
    cards = [("bars met", f"{sum(bool(row.met) for row in judged)} of {len(judged)}", "")]
    for row in judged:
        value = row.ratio if "x penstock" in row.bar and row.ratio else row.value
        unit = "x penstock" if "x penstock" in row.bar else row.unit
        note = f"{row.who}; bar {row.bar}: {'met' if row.met else 'NOT MET'}"
        cards.append((row.what, f"{format_number(value)} {unit}", note))
    return cards


def _groups(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["what"], []).append(row)
    return list(groups.items())


def _cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    cells = []
    last = ""
    for values in rows:
        row = Row(**values)
        cells.append(
            [
                row.what if row.what != last else "",
                row.who,
                f"{format_number(row.value)} {row.unit}",
                {True: "met", False: "NOT MET", None: ""}[row.met],
                row.bar,
                "-" if row.p90 is None else format_number(row.p90),
                str(row.n),
                "-" if row.ratio is None else format_number(row.ratio),
                "-" if row.cpu_s is None else format_number(row.cpu_s),
            ]
        )
        last = row.what
    return cells


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
