"""Stored runs: kept whole, checked when read, compared; what has finished is never lost."""

from __future__ import annotations

import copy
import json

import pytest

import benchmarks as bench
from benchmarks import Case, Extra, Row, compare, runner
from penstock.errors import CorruptFile, PenstockError, StorageError, UnknownFormat, UsageError


def row(what="w", who="penstock", value=1.0, **more):
    return Row(what, who, value, more.pop("unit", "ms"), **more)


def case(name, rows=(), error=None, extras=()):
    def run(settings):
        if error is not None:
            raise error
        return list(rows)

    return Case(name, "a.txt: claim", ("peer",), "data of {envs}", run, extras)


@pytest.fixture
def cases(monkeypatch, tmp_path):
    """Cases by name, in place of the real ones."""
    monkeypatch.chdir(tmp_path)
    known = {}
    monkeypatch.setattr(runner, "find_case", lambda name: known[name])
    return known


@pytest.fixture
def result(cases):
    cases["a"] = case("a", [row(p90=1.1, n=5), row("size", unit="B", value=100)])
    cases["b"] = case("b", [row(value=2.0)])
    return runner.run(["a", "b"])


# ---------------------------------------------------------------------- what has finished stays


def test_an_interrupt_keeps_the_finished_cases(cases):
    cases["a"] = case("a", [row()])
    cases["b"] = case("b", error=KeyboardInterrupt())
    cases["c"] = case("c", [row()])
    found = runner.run(["a", "b", "c"])
    assert [one["name"] for one in found["cases"]] == ["a"]
    assert found["failed"] == {"b": "interrupted", "c": "not run: interrupted"}
    assert "b: interrupted" in runner.text_report(found)


def test_an_interrupt_before_anything_finished_goes_on(cases):
    cases["a"] = case("a", error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        runner.run(["a"])


def test_a_failure_keeps_the_other_cases(cases):
    cases["a"] = case("a", error=PenstockError("no disk"))
    cases["b"] = case("b", error=ValueError("two\nlines"))
    cases["c"] = case("c", [row()])
    found = runner.run(["a", "b", "c"])
    assert [one["name"] for one in found["cases"]] == ["c"]
    assert found["failed"] == {"a": "no disk", "b": "ValueError: two lines"}


def test_the_only_case_raises_its_own_error(cases):
    cases["a"] = case("a", error=StorageError("the disk is full"))
    with pytest.raises(StorageError, match="the disk is full"):
        runner.run(["a"])


def test_no_case_finished(cases):
    cases["a"] = case("a", error=ValueError("x"))
    cases["b"] = case("b", error=ValueError("y"))
    with pytest.raises(PenstockError, match="no case could be measured: a: ValueError: x; b: "):
        runner.run(["a", "b"])


# ---------------------------------------------------------------------- missing peers


def test_missing_peers_are_named(cases, capsys):
    extras = (
        Extra("cpprb", "pip install penstock[bench]", lambda: False),
        Extra("there", "nothing", lambda: True),
    )
    cases["a"] = case("a", [row()], extras=extras)
    found = runner.run(["a"])
    line = "cpprb is missing: pip install penstock[bench]"
    assert found["cases"][0]["missing"] == [line]
    assert line in runner.text_report(found)
    assert line in runner.html_report(found).html()
    assert line in capsys.readouterr().err


def test_optional_peers_are_known():
    cases = map(bench.find_case, ("checkpoint", "replay", "convert"))
    names = {extra.name for case in cases for extra in case.extras}
    assert names == {"ZipNN", "sb3-extra-buffers", "cpprb", "lerobot 0.4.4 and 0.6.1"}


# ---------------------------------------------------------------------- files


def test_round_trip(result, tmp_path):
    path = runner.save(result, tmp_path / "run.json")
    assert runner.load(path) == result
    assert runner.text_report(runner.load(path)) == runner.text_report(result)


def test_saving_where_there_is_no_folder(result, tmp_path):
    with pytest.raises(StorageError, match="does not exist"):
        runner.save(result, tmp_path / "no" / "run.json")


def change(*path_and_value):
    *path, last, value = path_and_value

    def apply(document):
        part = document
        for step in path:
            part = part[step]
        part[last] = value

    return apply


@pytest.mark.parametrize(
    ("apply", "kind", "message"),
    [
        (change("format", 2), UnknownFormat, "format 2, this penstock reads 1"),
        (change("format", None), UnknownFormat, "no run of python -m benchmarks"),
        (change("machine", 3), CorruptFile, "machine is 3, not a str"),
        (change("quick", 1), CorruptFile, "quick is 1, not a bool"),
        (change("cases", {}), CorruptFile, "cases is {}, not a list"),
        (change("cases", 0, []), CorruptFile, "case 0 is a list, not an object"),
        (change("cases", 0, "rows", 0, "value", "x"), CorruptFile, "row 0: value is 'x'"),
        (change("cases", 0, "rows", 0, "value", True), CorruptFile, "row 0: value is True"),
        (change("cases", 0, "rows", 0, "met", "yes"), CorruptFile, "row 0: met is 'yes'"),
        (change("cases", 0, "rows", 0, "more", 1), CorruptFile, "'more' is no part of a row"),
        (lambda document: document["cases"][0].pop("missing"), CorruptFile, "missing is None"),
    ],
)
def test_bad_files_are_refused_in_one_line(result, tmp_path, apply, kind, message):
    document = copy.deepcopy(result)
    apply(document)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(kind, match=message) as caught:
        runner.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "\x00\xff", "[" * 100_000, "[1]", "NaN"])
def test_other_files_are_no_runs(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UnknownFormat, match="python -m benchmarks --save") as caught:
        runner.load(path)
    assert "\n" not in str(caught.value)


def test_a_value_that_is_not_finite(result, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(result).replace('"value": 2.0', '"value": NaN'))
    with pytest.raises(CorruptFile, match="value is nan"):
        runner.load(path)


def test_no_file(tmp_path):
    with pytest.raises(UsageError, match="there is no stored run"):
        runner.load(tmp_path / "none.json")


# ---------------------------------------------------------------------- two runs


def test_the_same_run_has_not_moved(result):
    text = runner.compare_text(result, copy.deepcopy(result))
    assert "0 of 3 rows moved" in text
    assert "only" not in text.partition(compare.HOW)[2]


def test_moved_beyond_noise(result):
    new = copy.deepcopy(result)
    rows = new["cases"][0]["rows"]
    rows[0]["value"] = 1.5  # p90 is 10 % off before, 27 % after
    rows[1]["value"] = 102
    new["cases"][1]["rows"][0]["value"] = 2.1
    text = runner.compare_text(result, new)
    lines = {line.split("  ")[0] + line.split()[1]: line for line in text.splitlines() if line}
    assert "2 of 3 rows moved" in text
    assert " up" in lines["aw"]
    assert "1.500" in lines["aw"]
    assert " up" in lines["asize"]
    assert " up" not in lines["bw"]


def test_noise_is_judged_by_both_runs():
    calm, wild = row(value=1.0, p90=1.01), row(value=1.0, p90=1.5)
    assert compare.noise_of(calm, calm) == pytest.approx(0.05)
    assert compare.noise_of(calm, wild) == pytest.approx(0.51)
    assert compare.noise_of(row(), row()) == pytest.approx(0.10)
    assert compare.noise_of(row(unit="B"), row(unit="B")) == pytest.approx(0.01)
    assert compare.noise_of(row(unit="of 100"), row(unit="of 100")) == pytest.approx(0.01)


def test_what_else_differs_comes_first(result):
    new = copy.deepcopy(result)
    new |= {"machine": "another", "quick": True, "versions": result["versions"] | {"numpy": "0"}}
    head = runner.compare_text(result, new).partition(compare.HOW)[0]
    assert "ANOTHER MACHINE" in head
    assert "-> another" in head
    assert "-> 0" in head
    assert "only one of the runs is quick" in head


def test_rows_of_one_side_are_named(result):
    new = copy.deepcopy(result)
    gone = new["cases"].pop()
    new["cases"][0]["rows"].append(gone["rows"][0] | {"what": "fresh"})
    text = runner.compare_text(result, new)
    assert "only before (1):\n  b: w | penstock" in text
    assert "only after (1):\n  a: fresh | penstock" in text
    new["cases"] = []
    assert "no row in common" in runner.compare_text(result, new)


def test_a_bar_that_is_missed_now_is_seen(result):
    old, new = copy.deepcopy(result), copy.deepcopy(result)
    old["cases"][0]["rows"][0] |= {"bar": "<= 1", "met": True}
    new["cases"][0]["rows"][0] |= {"bar": "<= 1", "met": False}
    assert "met -> NOT MET" in runner.compare_text(old, new)


def test_a_count_that_was_zero(result):
    new = copy.deepcopy(result)
    for run, value in ((result, 0), (new, 3)):
        run["cases"][1]["rows"][0] |= {"value": value, "unit": "of 10"}
    assert "1 of 3 rows moved" in runner.compare_text(result, new)


# ---------------------------------------------------------------------- the page


def test_bars_are_drawn_where_they_can_be(cases):
    cases["a"] = case("a", [row(value=1.0), row(who="peer", value=3.0), row("alone", value=1.0)])
    cases["b"] = case("b", [row(value=0.0), row(who="peer", value=3.0)])
    page = runner.html_report(runner.run(["a", "b"])).html()
    assert page.count('class="bars"') == 1
    assert "What the documents promise" not in page  # of these rows none is promised
