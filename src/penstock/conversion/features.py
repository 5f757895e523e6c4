"""What the features of a dataset look like: numbers per feature, size of every camera.

The first message of each topic tells; nothing else of the bag is decoded.
"""

from __future__ import annotations

from penstock.bags import Bag, Message
from penstock.conversion.mapping import GAP_FLAG, Mapping, Vector
from penstock.conversion.plan import Plan
from penstock.errors import DataError, UsageError
from penstock.lerobot.images import picture_size
from penstock.lerobot.layout import Feature


def describe(bag: Bag, mapping: Mapping, plan: Plan) -> dict[str, Feature]:
    """Return the features that a bag gives.

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
    for part in plan.vectors[name]:
        source = part.source
        if source.flag_gaps is not None:
            length += 1
            continue
        values = bag.decoder(part.topic).vector(first[part.topic].data, source.field)
        start, after = source.select or (0, len(values))
        if after > len(values) or start == after:
            raise DataError(
                f"{bag.path}: {part.topic}: {source.field} has {len(values)} numbers, and "
                f"[{start}, {after}] was asked for: check the robot's platform or the mapping"
            )
        length += after - start
    names = list(feature.names) if feature.names else None
    if names is not None and len(names) != length:
        raise UsageError(f"feature {name!r} has {length} numbers and {len(names)} names")
    return Feature(
        "float32", (length,), {feature.names_key: names} if feature.names_key and names else names
    )
