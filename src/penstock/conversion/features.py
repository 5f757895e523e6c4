"""What the features of a dataset look like: numbers per feature, their names, size of every camera.

The first message of each topic tells; nothing else of the bag is decoded.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.bags import Bag, Message
from penstock.conversion.mapping import GAP_FLAG, Mapping, Vector
from penstock.conversion.plan import Plan
from penstock.errors import DataError, UsageError
from penstock.lerobot.images import picture_size
from penstock.lerobot.layout import Feature


def describe(bag: Bag, mapping: Mapping, plan: Plan) -> dict[str, Feature]:
    """Return the features that a bag gives; the plan learns the names of joints.

    Raises:
        DataError: A message does not hold what the mapping asks of it.
    """
    first = _first_messages(bag, plan)
    features: dict[str, Feature] = {}
    for name, feature in mapping.features.items():
        if isinstance(feature, Vector):
            features[name] = _vector(bag, name, feature, plan, first)
            continue
        camera = plan.cameras[name]
        size = camera.camera.resize
        if size is None:
            image = bag.decoder(camera.topic).image(first[camera.topic].data)
            size = picture_size(image.data, image.encoding, image.width, image.height)
        codec = mapping.codec_of(feature)
        width, height = size
        if codec != "png" and codec != "copy" and (width % 2 or height % 2):
            raise DataError(
                f"{bag.path}: {camera.topic} has pictures of {width}x{height}, and a video needs "
                f"even numbers: set resize to [{width // 2 * 2}, {height // 2 * 2}], or use png"
            )
        channels = 1 if codec == "depth12" else 3
        dtype = "image" if codec == "png" else "video"
        features[name] = Feature(dtype, (channels, height, width), ["channels", "height", "width"])
    if mapping.gap == "flag":
        features[GAP_FLAG] = Feature("float32", (1,), ["gap"])
    return features


def _first_messages(bag: Bag, plan: Plan) -> dict[str, Message]:
    found: dict[str, Message] = {}
    for message in bag.read(plan.topics):
        if message.topic not in found:
            found[message.topic] = message
            if len(found) == len(plan.topics):
                break
    return found


def _vector(bag: Bag, name: str, feature: Vector, plan: Plan, first: dict[str, Message]) -> Feature:
    length = 0
    joints: list[tuple[str, str]] = []  # and the field of each
    for part in plan.vectors[name]:
        source = part.source
        if source.flag_gaps is not None:
            length += 1
            continue
        decoder, data = bag.decoder(part.topic), first[part.topic].data
        values, named = decoder.vector(data, source.field), decoder.names(data, source.field)
        if named and len(named) == len(set(named)) == len(values):
            plan.joints[part.topic, source.field] = named
        start, after = source.select or (0, len(values))
        if after > len(values) or start == after:
            raise DataError(
                f"{bag.path}: {part.topic}: {source.field} has {len(values)} numbers, and "
                f"[{start}, {after}] was asked for: check the robot's platform or the mapping"
            )
        length += after - start
        known = plan.joints.get((part.topic, source.field), ())
        joints += [(joint, source.field) for joint in known[start:after]]
    names = list(feature.names) if feature.names else _joint_names(joints, length)
    if names is not None and len(names) != length:
        raise UsageError(f"feature {name!r} has {length} numbers and {len(names)} names")
    return Feature(
        "float32", (length,), {feature.names_key: names} if feature.names_key and names else names
    )


def _joint_names(joints: list[tuple[str, str]], length: int) -> list[str] | None:
    """Name the numbers of a feature by their joints, and by their fields if that is not enough."""
    for names in ([joint for joint, _ in joints], [".".join(pair) for pair in joints]):
        if len(set(names)) == length:
            return names
    return None


def columns_in_order(
    where: str, wanted: dict[str, Feature], found: dict[str, Feature]
) -> dict[str, list[int]]:
    """Return, for features whose names come in another order than the dataset's, the columns.

    Raises:
        DataError: A bag has other joints than the dataset.
    """
    columns: dict[str, list[int]] = {}
    for name, feature in found.items():
        mine, theirs = feature.names, wanted[name].names
        if feature.is_picture or not isinstance(mine, list) or not isinstance(theirs, list):
            continue
        if set(mine) != set(theirs):
            raise DataError(f"{where}: {name} {other_joints(theirs, mine)}")
        if mine != theirs:
            columns[name] = [mine.index(joint) for joint in theirs]
    return columns


def other_joints(wanted: Iterable[str], found: Iterable[str]) -> str:
    """Say which joints are missing and which are new."""
    missing, new = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    parts = [f"lacks {', '.join(missing)}"] if missing else []
    parts += [f"has {', '.join(new)} besides"] if new else []
    return (
        f"{' and '.join(parts)}: the joints must stay the same; select those that all have "
        "with `select`, or convert it into a dataset of its own"
    )
