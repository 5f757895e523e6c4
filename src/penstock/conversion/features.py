"""What the features of a dataset look like: numbers per feature, their names, size of every camera.

The first message of each topic tells; nothing else of the bag is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

import numpy as np

from penstock.bags import Bag, Decoder, Message
from penstock.bags.transforms import is_pair
from penstock.conversion.mapping import GAP_FLAG, STAMP, Mapping, Source, Vector
from penstock.conversion.plan import CameraPlan, Plan
from penstock.conversion.timeline import named_joints
from penstock.conversion.topics import of_first_usable
from penstock.dataset.layout import Feature
from penstock.errors import DataError, UsageError
from penstock.media.encodings import CODECS
from penstock.media.headers import picture_size
from penstock.media.video import video_info
from penstock.ui.suggestions import did_you_mean

_MOST_LABELS: Final = 256
Joints = dict[tuple[str, str], tuple[str, ...]]
"""By topic and field: the names of the numbers, in the order that a dataset has them."""


def describe(
    bag: Bag, mapping: Mapping, plan: Plan, joints: Joints | None = None
) -> dict[str, Feature]:
    """Return the features that a bag gives; the plan learns the names of joints.

    `joints` are those of the dataset; None for the first bag, whose order counts.

    Raises:
        DataError: A message does not hold what the mapping asks of it.
    """
    first = bag.first_messages(plan.topics)
    features: dict[str, Feature] = {}
    for name, feature in mapping.features.items():
        if isinstance(feature, Vector):
            features[name] = _vector(bag, name, feature, plan, first, joints or {})
            continue
        camera = plan.cameras[name]
        size = camera.camera.resize
        if size is None and camera.video is not None:
            size = camera.video.width, camera.video.height
        elif size is None:
            size = _recorded_size(bag, camera.topic, first[camera.topic].data)
        codec = mapping.codec_of(feature)
        if camera.video is not None and feature.kind == "depth":
            raise DataError(f"{bag.path}: {camera.topic} is a video of colours: set kind: color")
        if codec == "copy" and camera.video is not None:
            _check_copied(bag, camera, plan.episodes)
        width, height = size
        if codec != "png" and codec != "copy" and (width % 2 or height % 2):
            raise DataError(
                f"{bag.path}: {camera.topic} has pictures of {width}x{height}, and a video needs "
                f"even numbers: set resize to [{width // 2 * 2}, {height // 2 * 2}], or use png"
            )
        channels = 1 if codec == "depth12" else 3
        dtype = "image" if codec == "png" else "video"
        info = None
        if codec == "copy" and camera.video is not None:  # every bag must have the same
            kind = CODECS[camera.video.codec][0]
            info = video_info(width, height, mapping.fps, kind, camera.video.pix_fmt)
        words = ["channels", "height", "width"]
        features[name] = Feature(dtype, (channels, height, width), words, info)
    if mapping.stamps:
        features[STAMP] = Feature("float64", (1,), ["seconds"])
    if mapping.gap == "flag":
        features[GAP_FLAG] = Feature("float32", (1,), ["gap"])
    return features


def _recorded_size(bag: Bag, topic: str, first: bytes | memoryview) -> tuple[int, int]:
    def size(data: bytes | memoryview) -> tuple[int, int]:
        found = picture_size(bag.decoder(topic).image(data))
        if not all(found):
            raise DataError(f"{bag.path}: {topic} begins with pictures of no size")
        return found

    return of_first_usable(bag, topic, first, size)


def _check_copied(bag: Bag, camera: CameraPlan, episodes: Sequence[tuple[int, int]]) -> None:
    """Check that packets can be copied: each frame shows the next one of them, and all do."""
    for number, (first, after) in enumerate(episodes):
        if np.any(np.diff(np.sort(camera.ordinals[first:after])) != 1):
            raise DataError(
                f"{bag.path}: {camera.topic}: the frames of episode {number} leave packets out or "
                "repeat them, and codec copy needs each once: use h264, which decodes them"
            )


def _vector(
    bag: Bag, name: str, feature: Vector, plan: Plan, first: dict[str, Message], joints: Joints
) -> Feature:
    length = 0
    named_by: list[tuple[str, ...]] = []  # joint, field and topic of each number
    for part in plan.vectors[name]:
        source = part.source
        if source.flag_gaps is not None:
            length += 1
            continue
        decoder, data = bag.decoder(part.topic), first[part.topic].data
        named = decoder.names(data, source.field)
        if source.partial:
            named, start = named_joints(bag, part.topic, source.field)
            if not named:
                there = {part.topic: np.array([start])}
                data = bytes(next(iter(bag.read([part.topic], there))).data)
        apart = (source.partial and named) or is_pair(
            source.field
        )  # not all is in the first message
        values = np.zeros(len(named)) if apart else decoder.vector(data, source.field)
        place = part.topic, source.field
        one = source.field.endswith("]")
        if place in joints:
            if named and set(named) != set(joints[place]):
                raise DataError(
                    f"{bag.path}: {part.topic}: {source.field} {other_joints(joints[place], named)}"
                )
            plan.joints[place] = joints[place]
        elif named and len(named) == len(set(named)) and (one or len(named) == len(values)):
            plan.joints[place] = named
        known = () if one else plan.joints.get(place, ())
        try:
            taken = places_of(source, known, len(values))
        except DataError as error:
            raise DataError(f"{bag.path}: {part.topic}: {source.field} {error}") from None
        length += len(taken)
        labels = known or _labels(decoder, source.field, len(values))
        named_by += [(labels[k], source.field, part.topic) for k in taken]
    length //= feature.window or 1
    names = list(feature.names) if feature.names else _joint_names(named_by[:length], length)
    if names is not None and len(names) != length:
        raise UsageError(f"feature {name!r} has {length} numbers and {len(names)} names")
    shape = (length,) if feature.window is None else (feature.window, length)
    names = names if feature.window is None else None  # lerobot names the numbers of vectors only
    dtype = feature.dtype or "float32"
    return Feature(
        dtype, shape, {feature.names_key: names} if feature.names_key and names else names
    )


def _labels(decoder: Decoder, path: str, count: int) -> list[str]:
    """Name the numbers at a path by their fields: linear.x, or data[0]; a scan's are too many."""
    leaves = decoder.fields()
    inside = [leaf for leaf in leaves if leaf == path or leaf.startswith(f"{path}.")]
    if len(inside) == count and not any(leaves[leaf].endswith("]") for leaf in inside):
        return inside
    return [f"{path}[{k}]" if count <= _MOST_LABELS else "" for k in range(count)]


def places_of(source: Source, names: Sequence[str], count: int) -> list[int]:
    """Return the places of the numbers that a source takes of its field.

    Raises:
        DataError: There are not so many numbers, or none of such names.
    """
    start, after = source.select or (0, count)
    if after > count or start == after:
        raise DataError(
            f"has {count} numbers, and [{start}, {after}] was asked for: check the robot's "
            "platform or the mapping"
        )
    if not source.joints and not source.exclude:
        return list(range(start, after))
    if not names:
        raise DataError("does not name its numbers: use select instead of names")
    wanted = source.joints or ("*",)
    for pattern in (*wanted, *source.exclude):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise DataError(f"has no number named {pattern!r}: {did_you_mean(pattern, names)}")
    return [
        place
        for place in range(start, after)
        if any(fnmatchcase(names[place], pattern) for pattern in wanted)
        and not any(fnmatchcase(names[place], pattern) for pattern in source.exclude)
    ]


def _joint_names(named_by: list[tuple[str, ...]], length: int) -> list[str] | None:
    """Name the numbers of a feature by their joints; by field and topic, too, if need be."""
    for parts in (1, 2, 3):
        names = [".".join(words[:parts]) for words in named_by]
        if len(set(names)) == length:
            return names
    return None


def other_joints(wanted: Sequence[str], found: Sequence[str]) -> str:
    """Say what is wrong with the joints that a message names."""
    missing, new = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    parts = [f"lacks {_listed(missing)}"] if missing else []
    parts += [f"has {_listed(new)} besides"] if new else []
    if not found:
        parts = ["names no joints"]
    return (
        f"{' and '.join(parts) or f'names {len(found)} joints instead of {len(wanted)}'}: the "
        "joints must stay the same; convert it into a dataset of its own, or set partial: true of "
        "the source if each message names some of them"
    )


def _listed(names: list[str]) -> str:
    shown = ["".join(c if c.isprintable() else "?" for c in name)[:40] for name in names[:8]]
    return ", ".join(shown) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
