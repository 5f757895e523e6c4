"""A mapping as a YAML file with comments, ready to edit; what it leaves out can be switched on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from penstock.bags import Bag
from penstock.conversion.features import describe
from penstock.conversion.guess import (
    common_rate,
    describe_camera,
    free_key,
    holding,
    plain_name,
    rate_of,
    survey,
)
from penstock.conversion.mapping import Camera, Mapping, Source, Vector
from penstock.conversion.plan import plan_bag
from penstock.conversion.topics import possible_fields
from penstock.errors import DataError, UsageError


def to_yaml(mapping: Mapping | None, bag: Bag) -> str:
    """Write a mapping as a YAML file with comments.

    Args:
        mapping: The guess; None if there was nothing to guess.
        bag: What it is of. All that is left out follows as comments that can be switched on.
    """
    if mapping is None:
        mapping = Mapping(common_rate(bag, [t.name for t in bag.topics.values() if t.count]), {})
    tasks = mapping.tasks
    lines = [
        f"# Mapping of {_comment(bag.path.name)}: which topics make which features.",
        "# Use it with: penstock convert BAGS OUT --map THIS_FILE",
        "",
        f"fps: {mapping.fps}                # frames per second of the dataset",
        f"task: {json.dumps(mapping.task)}           # what the robot does, for the learner",
        *([f"tasks: {{topic: {json.dumps(tasks.topic)}}}"] if tasks and tasks.topic else []),
        f"robot_type: {json.dumps(mapping.robot_type)}",
        "# timeline: /topic     # its messages are the frames; default: the camera with the most"
        " pictures; a number is a fixed rate",
        f"clock: {mapping.clock}             # bag (when recorded) or header (the message's stamp)",
        f"gap: {mapping.gap}              # a hole of the timeline: drop, split, hold or flag",
        f"hold_s: {mapping.hold_s}            # holes up to this many seconds show the last one",
        f"codec: {mapping.codec}            # h264, av1, copy (JPEG, video as recorded) or png",
        f"depth_codec: {mapping.depth_codec}   # depth12 (12 bit, lossless) or grey8",
        *([f"timeline: {json.dumps(mapping.timeline)}"] if mapping.timeline else []),
        *([f"timeline_hz: {mapping.timeline_hz}"] if mapping.timeline_hz else []),
        "# split_frames: 1000  # longest episode",
        "",
        "features:",
    ]
    for name, feature in mapping.features.items():
        lines += [f"  {name}:", *_feature_lines(feature, bag)]
    if not mapping.features:
        lines.append("  # nothing was found that a learner would want: switch on what you need")
    never = []
    for name, reason in survey(bag).left_out.items():
        extra = None if name in mapping.topics else _switchable(name, bag, mapping)
        if extra is not None:
            key = free_key(mapping.features, plain_name(name))
            lines.append(f"  # {key}:    # left out: {_comment(reason)}; remove the # to take it")
            lines += [f"  # {line[2:]}" for line in _feature_lines(extra, bag)]
        elif name not in mapping.topics:
            never.append(_comment(f"#   {name}: {reason}"))
    if never:
        lines += ["", "# Cannot be taken:", *never]
    return "\n".join(lines) + "\n"


def _switchable(name: str, bag: Bag, mapping: Mapping) -> Vector | Camera | None:
    """Return a feature of a topic that is left out, if it can be converted with the others."""
    topic = bag.topics[name]
    if not topic.count:
        return None
    feature: Vector | Camera
    try:
        if topic.media is not None:
            feature = replace(describe_camera(bag, name), align="hold", tolerance_s=0.0)
        else:
            feature = holding([Source((name,), field) for field in possible_fields(topic, bag)])
            if not feature.sources:
                return None
        whole = replace(mapping, features={**mapping.features, "observation.it": feature})
        describe(bag, whole, plan_bag(bag, whole))
    except (DataError, UsageError):
        return None
    return feature


def _feature_lines(feature: Vector | Camera, bag: Bag) -> list[str]:
    if isinstance(feature, Camera):
        lines = [_topic_line(feature.topics, bag, "    "), f"    kind: {feature.kind}"]
        lines += _other_keys(feature, ("topics", "kind"), "    ")
        return lines if feature.resize else [*lines, "    # resize: [640, 480]"]
    lines = [f"    align: {feature.align}      # nearest, hold (last one), linear or slerp"]
    lines += _other_keys(feature, ("sources", "align"), "    ")
    if feature.tolerance_s is None:
        lines.append(
            "    # tolerance_s: 0.1   # how far a message may lie from its frame; 0: no limit"
        )
    lines.append("    sources:")
    for source in feature.sources:
        lines += _source_lines(source, bag, "      - ")
    return lines


def _source_lines(source: Source, bag: Bag, lead: str) -> list[str]:
    indent = " " * len(lead)
    lines = [_topic_line(source.topics, bag, lead)]
    lines += _other_keys(source, ("topics", "otherwise"), indent)
    topic = _present(source.topics, bag)
    if topic in bag.topics:
        paths = bag.decoder(topic).fields()
        others = [f for f in paths if f != source.field and not f.startswith("header.")]
        if others:
            lines.append(_comment(f"{indent}# its fields: {', '.join(others)[:120]}"))
    if source.otherwise is not None:
        lines.append(f"{indent}otherwise:    # in bags without that topic")
        lines += _source_lines(source.otherwise, bag, indent + "  ")
    return lines


def _other_keys(record: Any, skip: tuple[str, ...], indent: str) -> list[str]:
    """Return the keys whose values are not the default ones."""
    defaults = {entry.name: entry.default for entry in fields(record)}
    return [
        f"{indent}{key}: {json.dumps(value)}"
        for key, value in asdict(record).items()
        if key not in skip and value != defaults[key] and value is not None
    ]


def _present(topics: Sequence[str], bag: Bag) -> str:
    return next((name for name in topics if name in bag.topics), topics[0])


def _topic_line(topics: Sequence[str], bag: Bag, lead: str) -> str:
    key, names = "topic", json.dumps(topics[0], ensure_ascii=False)
    if len(topics) > 1:
        key, names = "topics", json.dumps(list(topics), ensure_ascii=False)
    entry, about = bag.topics.get(_present(topics, bag)), "not in this bag"
    if entry is not None and entry.count:
        rate = rate_of(bag, entry.name).hz
        about = _comment(f"{entry.type}, {entry.count} messages, {rate:.1f} Hz")
    return f"{lead}{key}: {names}    # {about}"


def _comment(text: str) -> str:
    """Keep what a recording says on the line of its comment."""
    return "".join(c if c.isprintable() else "?" for c in text)
