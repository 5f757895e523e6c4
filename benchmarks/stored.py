"""A run of the benchmarks in a file: one JSON document, checked when it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from benchmarks import Row
from penstock.core.files import publish_bytes, storage_error
from penstock.errors import CorruptFile, UnknownFormat, UsageError

FORMAT = 1
_MAX_BYTES = 32_000_000
_HINT = "make one with `python -m benchmarks --save FILE`"
_TOP = {"penstock": str, "when": str, "machine": str, "versions": dict} | {
    "load_before": float,
    "load_after": float,
    "quick": bool,
    "cases": list,
    "failed": dict,
}
_CASE = {"name": str, "claim": str, "peers": list, "missing": list, "data": str} | {
    "seconds": float,
    "cpu_seconds": float,
    "rows": list,
}
_ROW = {"what": str, "who": str, "value": float, "unit": str, "n": int, "bar": str}
_ROW_OPTIONAL = {"p90": float, "ratio": float, "cpu_s": float, "met": bool}


def save(result: Mapping[str, Any], path: str | PathLike[str]) -> Path:
    """Publish a run, whole or not at all; return where it is.

    Raises:
        StorageError: The disk refuses.
    """
    target = Path(path)
    text = json.dumps(result, indent=1, allow_nan=False, ensure_ascii=False)
    publish_bytes(target, f"{text}\n".encode())
    return target


def load(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a run that `save` wrote.

    Raises:
        UsageError: There is no such file.
        UnknownFormat: It holds something else, or was written by another version.
        CorruptFile: A part of it is missing or of the wrong kind.
    """
    source = Path(path)
    try:
        size = source.stat().st_size
        if size > _MAX_BYTES:
            raise UnknownFormat(f"{source} has {size} bytes: no stored run is so large; {_HINT}")
        result = json.loads(source.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"there is no stored run {source}; {_HINT}") from None
    except OSError as error:
        raise storage_error("read", source, error) from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UnknownFormat(f"{source} is not JSON ({reason}); {_HINT}") from error
    if not isinstance(result, dict) or not isinstance(result.get("format"), int):
        raise UnknownFormat(f"{source} is no run of python -m benchmarks; {_HINT}")
    if result["format"] != FORMAT:
        raise UnknownFormat(
            f"{source} has format {result['format']}, this penstock reads {FORMAT}: measure again"
        )
    _check(result, _TOP, {}, str(source))
    for number, case in enumerate(result["cases"]):
        where = f"{source}: case {number}"
        _check(case, _CASE, {}, where)
        for place, row in enumerate(case["rows"]):
            _check(row, _ROW, _ROW_OPTIONAL, f"{where} ({case['name']}): row {place}")
            Row(**row)
    return result


def _check(
    part: object, wanted: Mapping[str, type], optional: Mapping[str, type], where: str
) -> None:
    """Check the kinds of the members, that all are there, and of a row that there are no others."""
    if not isinstance(part, dict):
        raise CorruptFile(f"{where} is a {type(part).__name__}, not an object; {_HINT}")
    for name, kind in {**wanted, **optional}.items():
        value = part.get(name)
        if value is None and name in optional:
            continue
        good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if kind is float:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            good = number and math.isfinite(value)  # type: ignore[arg-type]
        if not good:
            raise CorruptFile(f"{where}: {name} is {value!r:.40}, not a {kind.__name__}; {_HINT}")
    if optional and (unknown := part.keys() - wanted.keys() - optional.keys()):
        raise CorruptFile(f"{where}: {min(unknown)!r:.40} is no part of a row; {_HINT}")


def format_number(value: float) -> str:
    """Say a figure in about three digits."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"
