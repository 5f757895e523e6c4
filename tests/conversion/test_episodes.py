"""Where episodes begin and end, and their tasks: by topics, names, folders and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

import penstock
from penstock.cli import main
from penstock.conversion.settings import from_json
from penstock.dataset.reader import Dataset
from penstock.errors import DataError, UsageError

STORE = get_typestore(Stores.ROS2_HUMBLE)
EVENT_INFO = (
    "uint8 event_type\nbuiltin_interfaces/Time stamp\nuint8[16] client_gid\nint64 sequence_number\n"
)
STORE.register(get_types_from_msg(EVENT_INFO, "service_msgs/msg/ServiceEventInfo"))
STORE.register(
    get_types_from_msg("service_msgs/ServiceEventInfo info\n", "my_msgs/msg/Start_Event")
)
T = STORE.types
QUIET = {"progress": "quiet", "memory": "1GB"}
START_NS = 1_700_000_000 * 10**9


def number(value: float) -> Any:
    return T["std_msgs/msg/Float64"](value)


def flag(value: bool) -> Any:
    return T["std_msgs/msg/Bool"](value)


def words(value: str) -> Any:
    return T["std_msgs/msg/String"](value)


def call(kind: int) -> Any:
    stamp = T["builtin_interfaces/msg/Time"](0, 0)
    info = T["service_msgs/msg/ServiceEventInfo"](kind, stamp, np.zeros(16, np.uint8), 1)
    return T["my_msgs/msg/Start_Event"](info)


def record(path: Path, topics: dict[str, list[tuple[float, Any]]], hz: int = 10, seconds=60.0):
    """Write /state, which says what time it is, and other topics as (seconds, message)."""
    states = [(k / hz, number(k / hz)) for k in range(round(seconds * hz))]
    with Writer(path, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        rows = []
        for topic, messages in {"/state": states, **topics}.items():
            kind = messages[0][1].__msgtype__
            known = writer.add_connection(topic, kind, typestore=STORE)
            rows += [(t_s, known, STORE.serialize_cdr(message, kind)) for t_s, message in messages]
        for t_s, known, data in sorted(rows, key=lambda row: row[0]):
            writer.write(known, START_NS + round(t_s * 1e9), data)
    return path


def convert(bags: Any, out: Path, **settings: Any) -> Dataset:
    features = {"observation.state": {"topic": "/state", "field": "data"}}
    content = {"fps": 10, "timeline": "/state", "features": features, **settings}
    report = penstock.convert(bags, out, from_json(content), **QUIET)
    assert report.ok, report.text()
    return Dataset(out)


def times(dataset: Dataset) -> list[tuple[float, float, str]]:
    """Return first and last time, and the task, of every episode; frames between are all there."""
    found = []
    for index in range(len(dataset)):
        rows = [round(float(f["observation.state"]), 3) for f in dataset.episode(index).frames()]
        assert np.allclose(np.diff(rows), 0.1, atol=1e-3)
        tasks = dataset.episode(index).tasks
        found.append((rows[0], rows[-1], tasks[0] if len(tasks) == 1 else str(tasks)))
    return found


def test_an_hour_with_a_hundred_markers(tmp_path):
    """Every frame lies in its own episode, whatever the moment of the marker."""
    chance = np.random.default_rng(3)
    marks = np.sort(chance.choice(35_900, 100, replace=False) + chance.random(100)) / 10
    bag = record(tmp_path / "bag", {"/mark": [(t, flag(True)) for t in marks]}, seconds=3600)
    dataset = convert(bag, tmp_path / "out", episodes={"topic": "/mark"})
    assert len(dataset) == 100
    frames = 0
    for (first, last, _), begin, end in zip(
        times(dataset), marks, [*marks[1:], 3600.0], strict=True
    ):
        assert begin <= first < begin + 0.1
        assert end - 0.1 <= last + 1e-3 < end + 0.1
        assert last < end
        frames += round((last - first) * 10) + 1
    assert frames == sum(np.arange(36_000) / 10 >= marks[0])


def test_a_flag_that_rises_and_falls(tmp_path):
    flags = [(0.05, False), (10.05, True), (15.0, True), (20.05, False), (30.05, True)]
    bag = record(tmp_path / "bag", {"/on": [(t, flag(v)) for t, v in flags]})
    out = convert(bag, tmp_path / "out", episodes={"topic": "/on", "field": "data"})
    assert [span[:2] for span in times(out)] == [(10.1, 20.0), (30.1, 59.9)]


def test_words_that_begin_and_end(tmp_path):
    said = [(5.05, "start pick"), (9.05, "noise"), (12.05, "stop"), (20.05, "start place")]
    bag = record(tmp_path / "bag", {"/event": [(t, words(v)) for t, v in said]})
    episodes = {"topic": "/event", "field": "data", "begin": "start*", "end": "stop*"}
    tasks = {"topic": "/event"}
    out = convert(bag, tmp_path / "out", episodes=episodes, tasks=tasks)
    assert times(out) == [(5.1, 12.0, "start pick"), (20.1, 59.9, "start place")]


def test_calls_of_a_service(tmp_path):
    """The caller (0) and the server (1) may both have recorded a call."""
    calls = [(t + k / 100, call(k)) for t in (10.0, 40.0) for k in (0, 1, 2, 3)]
    bag = record(tmp_path / "bag", {"/start/_service_event": calls})
    out = convert(bag, tmp_path / "out", episodes={"topic": "/start/_service_event"})
    assert [span[:2] for span in times(out)] == [(10.1, 40.0), (40.1, 59.9)]


def test_tasks_that_are_said(tmp_path):
    """What was last said when an episode begins; what is said first in it, if nothing was."""
    said = [(2.0, "open the door"), (35.0, "close the door"), (36.0, "  ")]
    bag = record(
        tmp_path / "bag",
        {
            "/task": [(t, words(v)) for t, v in said],
            "/mark": [(t, flag(True)) for t in (0, 20, 40)],
        },
    )
    out = convert(
        bag, tmp_path / "out", episodes={"topic": "/mark"}, tasks={"topic": "/task"}, task="other"
    )
    assert [task for *_, task in times(out)] == ["open the door", "open the door", "other"]


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ({"name": "{task}_*"}, {"pick up", "put down"}),
        ({"name": "*_{task}"}, {"up 01", "down 02"}),
        ({"folder": True}, {"monday", "tuesday morning"}),
    ],
)
def test_tasks_by_name_and_folder(tmp_path, tasks, expected):
    for folder, name in (("monday", "pick_up_01"), ("tuesday_morning", "put_down_02")):
        (tmp_path / "bags" / folder).mkdir(parents=True)
        record(tmp_path / "bags" / folder / name, {}, seconds=2)
    out = convert(sorted((tmp_path / "bags").iterdir()), tmp_path / "out", tasks=tasks)
    assert {task for *_, task in times(out)} == expected


@pytest.mark.parametrize("kind", ["csv", "yaml"])
def test_a_table_of_times_and_tasks(tmp_path, kind):
    record(tmp_path / "bags" / "one", {})
    record(tmp_path / "bags" / "two", {})
    rows = [
        {"bag": "one", "start": 10, "end": 20, "task": "pick, then place"},
        {"bag": "one", "start": START_NS / 1e9 + 30},
        {"bag": "bags/two", "start": 5.5, "end": 6},
    ]
    table = tmp_path / f"table.{kind}"
    if kind == "csv":
        lines = ["bag,start,end,task"]
        lines += [f'{r["bag"]},{r["start"]},{r.get("end", "")},"{r.get("task", "")}"' for r in rows]
        table.write_text("\n".join(lines))
    else:
        table.write_text(json.dumps(rows))
    recipe = tmp_path / "map.yaml"
    features = {"observation.state": {"topic": "/state", "field": "data"}}
    content = {"fps": 10, "timeline": "/state", "features": features, "table": table.name}
    recipe.write_text(json.dumps(content))
    report = penstock.convert(tmp_path / "bags", tmp_path / "out", recipe, task="rest", **QUIET)
    assert report.ok, report.text()
    assert times(Dataset(tmp_path / "out")) == [
        (10.0, 19.9, "pick, then place"),
        (30.0, 59.9, "rest"),
        (5.5, 5.9, "rest"),
    ]
    again = penstock.convert(
        tmp_path / "bags", tmp_path / "out", recipe, task="rest", resume=True, **QUIET
    )
    assert again.ok


def test_a_table_of_tasks_alone(tmp_path):
    record(tmp_path / "bags" / "one", {}, seconds=2)
    record(tmp_path / "bags" / "two", {}, seconds=2)
    (tmp_path / "tasks.csv").write_text("bag,task\none,wave\n")
    out = convert(tmp_path / "bags", tmp_path / "out", table=str(tmp_path / "tasks.csv"))
    assert [task for *_, task in times(out)] == ["wave", "task"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"episodes": {"topic": "/mark", "begin": "a"}}, "begin and end are texts"),
        ({"episodes": {"topik": "/mark"}}, "did you mean 'episodes.topic'"),
        ({"episodes": "/mark"}, "give it as keys"),
        ({"tasks": {}}, "give one of topic, name and folder"),
        ({"tasks": {"name": "take_*"}}, "put {task} into it"),
        ({"tasks": {"topic": "/a", "folder": True}}, "give one of"),
        ({"table": [{"start": "soon"}]}, "row 1: start_s is 'soon'"),
        ({"table": [{"begin": 1}]}, "unknown key 'begin'"),
        ({"table": 5}, "a list of rows"),
        ({"episodes": {"topic": "/mark"}, "table": [{"start": 1}]}, "exclude each other"),
    ],
)
def test_mistakes_are_named(settings, reason):
    with pytest.raises(UsageError, match=reason.replace("{", r"\{")):
        from_json({"fps": 10, "features": {"a": {"topic": "/a"}}, **settings})


def test_what_does_not_fit_the_recording(tmp_path):
    bag = record(tmp_path / "bag", {"/mark": [(1.0, flag(True))]}, seconds=5)
    for settings, reason in [
        ({"episodes": {"topic": "/marks"}}, "there is no topic /marks .*did you mean '/mark'"),
        ({"episodes": {"topic": "/mark", "field": "dat"}}, "there is no field 'dat'"),
        ({"tasks": {"topic": "/mark"}}, "'data' is bool, not bytes"),
        ({"tasks": {"name": "{task}_9"}}, "its name is not like"),
        ({"table": [{"start": 1, "end": 3}, {"start": 2}]}, "episodes 0 and 1 of the table"),
        ({"table": [{"bag": "other", "start": 1}]}, "no frame is left"),
    ]:
        with pytest.raises(DataError, match=reason):
            convert(bag, tmp_path / "out", **settings)


def test_words_on_the_command_line(tmp_path, capsys):
    bag = record(tmp_path / "bag", {"/mark": [(t, flag(True)) for t in (1.0, 3.0)]}, seconds=5)
    words = ["episodes={topic: /mark}", "tasks={folder: true}"]
    assert main(["convert", str(bag), str(tmp_path / "out"), *words]) == 0
    assert len(Dataset(tmp_path / "out")) == 2
