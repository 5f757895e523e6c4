"""What is in a recording (`info`): topics, types, rates, gaps, sizes, a guess of a mapping.

Only the index is read.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from penstock.bags import Bag, find_bags, open_bag
from penstock.bags.find import parts_of
from penstock.conversion.guess import guess_mapping, left_out, rate_of, survey
from penstock.conversion.map_file import to_yaml
from penstock.conversion.mapping import Camera
from penstock.core.files import publish_bytes
from penstock.core.memory import format_bytes
from penstock.errors import DataError
from penstock.ui.report import aligned, text_table

Facts = dict[str, Any]
_MOST_OPENED = 200  # of a folder
BAG_ENDINGS = (".bag", ".bag.active", ".db3", ".mcap", ".db3.zstd", ".mcap.zstd")


def is_bag(path: Path) -> bool:
    """Tell whether a file or folder is a recording, by its name: a damaged one is one too.

    A folder of several recordings is none, as for a conversion.
    """
    if path.is_dir():
        return bool(parts_of(path)) and len(find_bags([path])) == 1
    return path.name.endswith(BAG_ENDINGS)


def size_of(path: Path) -> int:
    """Return the bytes of a recording."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def describe(path: Path, salvage: bool = False) -> Facts:
    """Say what is in a bag."""
    with open_bag(path, salvage=salvage) as bag:
        topics = []
        for topic in bag.topics.values():
            rate = rate_of(bag, topic.name) if topic.count else None
            topics.append(
                {
                    "name": topic.name,
                    "type": topic.type,
                    "encoding": topic.encoding,
                    "messages": topic.count,
                    "size_bytes": topic.size_bytes,
                    "hz": round(rate.hz, 2) if rate else 0.0,
                    "longest_gap_s": round(rate.longest_gap_s, 3) if rate else 0.0,
                    "stamps_out_of_order": rate.disorder if rate else 0,
                    "in_bursts": round(rate.in_bursts, 2) if rate else 0.0,
                }
            )
        found, mapping = survey(bag), None
        try:
            mapping = guess_mapping(bag, found)
            guess: Any = {
                "fps": mapping.fps,
                "clock": mapping.clock,
                "task": mapping.tasks.topic if mapping.tasks else None,
                "features": {
                    name: list(feature.topics)
                    if isinstance(feature, Camera)
                    else [f"{s.topics[0]} {s.field}" for s in feature.sources]
                    for name, feature in mapping.features.items()
                },
            }
        except DataError:
            guess = None
        return {
            "path": str(path),
            "kind": _kind(bag),
            "size_bytes": bag.size_bytes,
            "compression": bag.compression,
            "messages": bag.message_count,
            "start": _date(bag.start_ns),
            "duration_s": round(bag.duration_s, 3),
            "salvage": None if bag.salvage is None else str(bag.salvage),
            "topics": topics,
            "guess": guess,
            "left_out": left_out(bag, found, mapping),
        }


def is_folder(path: Path) -> bool:
    """Tell whether a folder holds recordings, one or several."""
    with suppress(DataError):
        return path.is_dir() and bool(find_bags([path]))
    return False


def describe_folder(path: Path, salvage: bool = False) -> Facts:
    """Say which recordings are in a folder; of the first ones, what is in them."""
    found = find_bags([path])
    entries: list[Facts] = []
    for each in found[:_MOST_OPENED]:
        entry: Facts = {"path": str(each), "size_bytes": size_of(each)}
        try:
            with open_bag(each, salvage=salvage) as bag:
                entry |= {"kind": _kind(bag), "topics": len(bag.topics)}
                entry |= {"messages": bag.message_count, "duration_s": round(bag.duration_s, 3)}
        except DataError as error:
            entry["problem"] = str(error).removeprefix(f"{each}: ")
        entries.append(entry)
    return {"path": str(path), "count": len(found), "recordings": entries}


def folder_text(facts: Facts) -> str:
    """Lay out what `describe_folder` found."""
    head = [("path", facts["path"]), ("holds", f"{facts['count']} recordings")]
    rows = [
        (
            Path(entry["path"]).name,
            entry.get("kind") or entry["problem"],
            *(str(entry.get(key, "-")) for key in ("topics", "messages")),
            f"{entry['duration_s']:.1f}" if "duration_s" in entry else "-",
            format_bytes(entry["size_bytes"]),
        )
        for entry in facts["recordings"]
    ]
    columns = ("recording", "kind", "topics", "messages", "seconds", "size")
    more = facts["count"] - len(rows)
    table = text_table(columns, rows) + (f"\nand {more} more" if more else "")
    return f"{aligned(head)}\n\n{table}\n\npenstock info RECORDING shows the topics of one of them"


def _kind(bag: Bag) -> str:
    """Name the container, and who recorded it where that can be told."""
    encodings = sorted({topic.encoding or "unknown" for topic in bag.topics.values()})
    if bag.kind == "bag":
        return "ROS 1 bag"
    if bag.kind == "db3" or encodings == ["cdr"]:
        return f"ROS 2 bag ({bag.kind})"
    return f"MCAP file ({', '.join(encodings) or 'empty'})"


def write_map(path: Path, target: Path, salvage: bool = False) -> None:
    """Write the guessed mapping of a bag as a commented YAML file."""
    with open_bag(path, salvage=salvage) as bag:
        try:
            mapping = guess_mapping(bag)
        except DataError:  # nothing to guess: the file says what there is
            mapping = None
        text = to_yaml(mapping, bag)
    publish_bytes(target, text.encode())


def text(facts: Facts) -> str:
    """Lay out what `describe` found for the terminal."""
    head = [
        ("path", facts["path"]),
        ("kind", f"{facts['kind']}, compression {facts['compression']}"),
        ("size on disk", format_bytes(facts["size_bytes"])),
        ("messages", f"{facts['messages']} in {facts['duration_s']:.3f} s"),
        ("start", facts["start"] or "-"),
    ]
    if facts["salvage"]:
        head.append(("salvaged", facts["salvage"]))
    encodings = {topic["encoding"] for topic in facts["topics"]}
    rows = [
        (
            topic["name"],
            topic["type"] + (f" ({topic['encoding']})" if len(encodings) > 1 else ""),
            topic["messages"],
            f"{topic['hz']:.1f}",
            f"{topic['longest_gap_s']:.3f}",
            format_bytes(topic["size_bytes"]) if topic["size_bytes"] is not None else "-",
            topic["stamps_out_of_order"] or "-",
        )
        for topic in facts["topics"]
    ]
    columns = ("topic", "type", "messages", "Hz", "gap s", "size", "unordered")
    told = [n for n in range(len(columns)) if n < 5 or any(row[n] != "-" for row in rows)]
    parts = [aligned(head)]
    table = [[str(line[n]).replace("/msg/", "/") for n in told] for line in (columns, *rows)]
    parts.append(text_table(table[0], table[1:]) if rows else "no topics")
    bursts = [
        f"{topic['name']}: {topic['in_bursts']:.0%} of its messages came in bursts"
        for topic in facts["topics"]
        if topic["in_bursts"] > 0.3
    ]
    if bursts:
        parts.append("\n".join([*bursts, "their header stamps may tell more: clock: header"]))
    if facts["guess"] is None:
        parts.append("guess: nothing here looks like a camera, a state or an action")
    else:
        clock = " by header stamps" if facts["guess"]["clock"] == "header" else ""
        guess = [f"guess at {facts['guess']['fps']} fps{clock} (--write-map map.yaml to edit it):"]
        features = facts["guess"]["features"]
        sources = [(name, ", ".join(dict.fromkeys(topics))) for name, topics in features.items()]
        if facts["guess"]["task"]:
            sources.append(("task", facts["guess"]["task"]))
        guess.append(text_table(("feature", "from"), sources))
        parts.append("\n".join(guess))
    if facts["left_out"]:
        parts.append(text_table(("left out", "because"), list(facts["left_out"].items())))
    return "\n\n".join(parts)


def _date(stamp_ns: int) -> str | None:
    try:
        when = datetime.fromtimestamp(stamp_ns / 1e9, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    return when.isoformat(" ", "milliseconds")
