import pytest

from penstock.conversion.mapping import Camera, Vector
from penstock.conversion.settings import from_json, load_map, parse_value
from penstock.errors import UsageError

SHORT = {
    "fps": 30,
    "features": {
        "observation.state": {"topic": "/joint_states", "field": "position"},
        "observation.images.head": {"topic": "/cam", "kind": "color"},
    },
}


def changed(**settings):
    return {**SHORT, **settings}


def test_the_short_form_is_one_source():
    mapping = from_json(SHORT)
    state = mapping.features["observation.state"]
    assert isinstance(state, Vector)
    assert state.sources[0].topics == ("/joint_states",)
    assert isinstance(mapping.features["observation.images.head"], Camera)


def test_json_is_all_of_it():
    mapping = from_json(SHORT)
    assert from_json(mapping.to_json()) == mapping


def test_yaml_file(tmp_path):
    path = tmp_path / "map.yaml"
    path.write_text(
        "fps: 20\ntimeline: 20\nfeatures:\n  action:\n    align: hold\n    sources:\n"
        "      - {topic: /cmd, field: q, select: [0, 3], scale: 0.5}\n"
        "      - topic: /a\n        field: x\n        otherwise: {topic: /b, field: y}\n"
    )
    mapping = load_map(path)
    action = mapping.features["action"]
    assert mapping.timeline == "rate"
    assert action.align == "hold"
    assert action.sources[0].select == (0, 3)
    assert action.sources[1].otherwise.topics == ("/b",)
    assert from_json(mapping.to_json()) == mapping


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"fps": 30}, "has no features"),
        (changed(fsp=3), "unknown key 'fsp': did you mean 'fps'"),
        (changed(fps=0), "fps is 0"),
        (changed(fps="x"), "give a whole number"),
        (changed(fps=True), "give a whole number"),
        (changed(codec="h265"), "did you mean 'h264'"),
        (changed(codec="grey8"), "codec is 'grey8'"),
        (changed(gap="splt"), "did you mean 'split'"),
        (changed(clock="headr"), "did you mean 'header'"),
        (changed(hold_s=-1), "hold_s is -1"),
        (changed(split_frames=0), "split_frames is 0"),
        (changed(features={"../x": {"topic": "/a", "field": "b"}}), "use letters"),
        (changed(features={"a/b": {"topic": "/a", "field": "b"}}), "use letters"),
        (changed(features={"index": {"topic": "/a", "field": "b"}}), "made by penstock"),
        (changed(features={"a": 3}), "describe it by topic"),
        (changed(features={"a": {"field": "b"}}), "lacks 'topic'"),
        (changed(features={"a": {"topic": "/a", "feild": "b"}}), "did you mean 'field"),
        (changed(features={"a": {"topic": "/a", "kind": "colour"}}), "did you mean 'color'"),
        (
            changed(
                codec="copy", features={"a": {"topic": "/a", "kind": "color", "resize": [4, 4]}}
            ),
            "copy keeps the recorded pictures",
        ),
        (changed(features={"a": {"topic": "/a", "field": "b", "select": [3, 3]}}), "select is"),
        (changed(features={"a": {"topic": "/a", "field": "b", "scale": "x"}}), "give a number"),
        (changed(features={"a": {"topic": "/a", "field": "b", "delta": True}}), "delta_from"),
        (changed(features={"a": {"topic": "/a", "kind": "depth", "codec": "h264"}}), "use one of"),
    ],
)
def test_every_mistake_is_named(content, says):
    with pytest.raises(UsageError, match=says.replace("[", r"\[")) as caught:
        from_json(content)
    assert "\n" not in str(caught.value)


def test_a_file_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text("fps: !!python/object/apply:os.system ['touch /tmp/evil']\n")
    with pytest.raises(UsageError, match="not YAML"):
        load_map(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text file"):
        load_map(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("true", True), ("null", None), ("[0, 15]", [0, 15]), ("a b", "a b"), ("{", "{")],
)
def test_values_of_words(text, value):
    assert parse_value(text) == value
