"""The claims: every look-up exists in the stored run, and the page is what it makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import NAMES, Row, claims, runner
from benchmarks.claims import Claim, Look, all_claims, holds, rule_text, verdict

DOCS = Path(__file__).parent.parent.parent / "docs"
CLAIMS = all_claims()


@pytest.fixture(scope="module")
def result():
    return runner.load(DOCS / "bench.json")


@pytest.fixture(scope="module")
def rows(result):
    return claims.rows_of(result)


def test_the_stored_run_is_whole(result):
    assert {case["name"] for case in result["cases"]} == set(NAMES)
    assert result["failed"] == {}


def test_ids_are_unique():
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS) > 90


def test_all_documents_speak():
    shorts = {place.split()[0] for claim in CLAIMS for place in claim.places}
    assert shorts == set(claims.SEEDS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_is_complete(claim, rows):
    assert claim.case in NAMES
    assert claim.command == f"python -m benchmarks {claim.case}"
    assert claim.figures
    for place in claim.places:
        assert re.fullmatch(r"00[0234] §\d+(\.\d+)?:[\d+-]+", place), place
    for look in (*claim.figures, *claim.instead):
        assert claims.look_up(rows, look) is not None, look
    if len(claim.figures) > 1:
        assert all(look.label for look in claim.figures)
    assert verdict(claim, rows) != "not in this run"


def test_the_page_is_made_of_the_stored_run(result):
    assert claims.page(result) == (DOCS / "claims.md").read_text(encoding="utf-8")


def test_the_page_has_every_claim_once(result):
    lines = claims.page(result).splitlines()
    table = [line for line in lines if "`python -m benchmarks" in line and line.startswith("| 00")]
    assert len(table) == len(CLAIMS)
    assert f"{len(CLAIMS)} claims: " in "\n".join(lines)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (("between", [3, 5]), [3, 4, 5], [2.99, 5.01]),
        (("at_least", 3), [3, 9], [2.9]),
        (("at_most", 3), [3, 0], [3.1]),
        (("about_at_least", 500), [375, 900], [374]),
        (("about_at_most", 100), [125, 1], [126]),
        (("about", 20), [15, 25], [14.9, 25.1]),
        (("equals", 816), [816, 820], [800, 830]),
    ],
)
def test_rules(rule, good, bad):
    assert all(holds(rule, value) for value in good)
    assert not any(holds(rule, value) for value in bad)
    assert re.search(r"\d", rule_text(rule))


def make(rule=None, labels=("",), **more):
    figures = tuple(Look(label, "replay", "w", label) for label in labels)
    settings = {"arithmetic": False, "unmeasured": "", "instead": (), "note": ""} | more
    return Claim("x", ("000 §1:1",), "3x", "replay", figures, rule, **settings)


def found(**values):
    return {("replay", "w", who): Row("w", who, value, "x") for who, value in values.items()}


@pytest.mark.parametrize(
    ("labels", "values", "said"),
    [
        (("a",), {"a": 3.0}, "holds (at least 3)"),
        (("a",), {"a": 2.0}, "false (at least 3)"),
        (("a", "b"), {"a": 3.0, "b": 2.0}, "holds only for a (at least 3)"),
        (("a", "b"), {"a": 1.0, "b": 2.0}, "false (at least 3)"),
        (("a", "b"), {"a": 4.0}, "not in this run"),
    ],
)
def test_verdicts_follow_the_figures(labels, values, said):
    assert verdict(make(("at_least", 3), labels), found(**values)) == said


def test_verdicts_of_sums_and_of_what_cannot_be_measured():
    sums = make(("equals", 3), ("a",), arithmetic=True)
    assert verdict(sums, found(a=3.0)) == "arithmetic holds (exactly 3)"
    assert verdict(sums, found(a=4.0)) == "arithmetic is wrong (exactly 3)"
    absent = make(None, ("a",), unmeasured="no GPU here")
    assert verdict(absent, found(a=1.0)).startswith("not measured: no GPU here")


def test_a_look_up_without_a_method_takes_the_first():
    rows = found(a=1.0, b=2.0)
    assert claims.look_up(rows, Look("", "replay", "w", "")).value == 1.0
    assert claims.look_up(rows, Look("", "nav", "w", "")) is None


def test_a_run_of_one_case_says_what_it_lacks(result):
    part = result | {"cases": [case for case in result["cases"] if case["name"] == "monitor"]}
    columns, cells = claims.table(part)
    by_command = {(row[2], row[4] == "not in this run") for row in cells}
    assert columns == claims.COLUMNS
    assert ("python -m benchmarks replay", True) in by_command
    assert ("python -m benchmarks monitor", True) not in by_command
    assert "are not in this run" in claims.page(part)
    assert "not in this run" not in runner.html_report(part).html()
