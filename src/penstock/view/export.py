"""One episode as a file for another viewer: rerun's .rrd, or an .mcap for Foxglove."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from penstock.core.files import NewFile, storage_error
from penstock.core.interrupt import check_stop
from penstock.errors import DataError, MissingExtra
from penstock.view.model import EpisodeView, Source

_WIDTH = 1280
_MOST_POINTS = 200_000
_IMAGE_SCHEMA = {
    "title": "foxglove.CompressedImage",
    "type": "object",
    "properties": {
        "timestamp": {
            "type": "object",
            "properties": {"sec": {"type": "integer"}, "nsec": {"type": "integer"}},
        },
        "frame_id": {"type": "string"},
        "data": {"type": "string", "contentEncoding": "base64"},
        "format": {"type": "string"},
    },
}


def to_rerun(source: Source, index: int, target: Path) -> None:
    """Write an episode for the rerun viewer.

    Raises:
        MissingExtra: rerun-sdk is not installed.
        StorageError: The file cannot be written.
    """
    rerun = _load("rerun", "rerun-sdk", "rerun")
    view = source.open(index)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        temporary.touch()  # fails here, in words, where the library would not say why
        stream = rerun.RecordingStream("penstock")
        stream.save(temporary)
        for name, t_s, data in _pictures(view):
            stream.set_time("time", duration=t_s)
            stream.log(name, rerun.EncodedImage(contents=data, media_type="image/jpeg"))
        for name, labels, t_s, row in _numbers(view):
            stream.set_time("time", duration=t_s)
            if t_s == 0 and len(labels) > 1:
                stream.log(name, rerun.SeriesLines(names=list(labels)), static=True)
            stream.log(name, rerun.Scalars(row))
        stream.flush()
        stream.disconnect()
        os.replace(temporary, target)
    except OSError as error:
        raise storage_error("write", target, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def to_foxglove(source: Source, index: int, target: Path) -> None:
    """Write an episode as MCAP, with Foxglove's own types.

    Raises:
        MissingExtra: mcap is not installed.
        StorageError: The file cannot be written.
    """
    mcap = _load("mcap.writer", "mcap", "foxglove")
    view = source.open(index)
    with NewFile(target) as new:
        buffered = io.BufferedWriter(cast(io.RawIOBase, new.file))
        writer = mcap.Writer(buffered, compression=mcap.CompressionType.ZSTD)
        writer.start(library="penstock")
        channels: dict[str, int] = {}

        def write(name: str, schema: dict[str, Any], t_s: float, message: dict[str, Any]) -> None:
            if name not in channels:
                text = json.dumps(schema).encode()
                number = writer.register_schema(schema["title"], "jsonschema", text)
                channels[name] = writer.register_channel(f"/{name}", "json", number)
            t_ns = max(0, round(t_s * 1e9))
            data = json.dumps(message, allow_nan=False).encode()
            writer.add_message(channels[name], t_ns, data, t_ns)

        for name, t_s, data in _pictures(view):
            sec, rest = divmod(max(0, round(t_s * 1e9)), 10**9)
            stamp = {"sec": sec, "nsec": rest}
            picture = {"frame_id": name, "data": b64encode(data).decode(), "format": "jpeg"}
            write(name, _IMAGE_SCHEMA, t_s, {"timestamp": stamp, **picture})
        for name, labels, t_s, row in _numbers(view):
            keys = [label or "value" for label in labels]
            numbers = {key: {"type": "number"} for key in keys}
            schema = {"title": f"penstock.{name}", "type": "object", "properties": numbers}
            values = [value if math.isfinite(value) else None for value in row.tolist()]
            write(name, schema, t_s, dict(zip(keys, values, strict=True)))
        writer.finish()
        buffered.flush()
        buffered.detach()


def _pictures(view: EpisodeView) -> Iterator[tuple[str, float, bytes]]:
    """Yield (name, time, JPEG) of every picture; those that cannot be decoded are left out."""
    for number, camera in enumerate(view.cameras):
        name = camera.name.strip("/")
        if any(camera.name == other.name for other in view.cameras[:number]):
            name = f"{camera.origin}/{name}"
        for frame, t_s in enumerate(view.times(number).tolist()):
            check_stop()
            if 0 <= t_s <= view.seconds:
                try:
                    yield name, t_s, view.picture(number, frame, _WIDTH)
                except DataError:
                    continue


def _numbers(view: EpisodeView) -> Iterator[tuple[str, tuple[str, ...], float, Any]]:
    """Yield (name, labels, time, values) of every row of every curve."""
    for number, curve in enumerate(view.curves):
        try:
            points = view.points(number, most=_MOST_POINTS)
        except DataError:
            continue
        for t_s, row in zip(points.t_s.tolist(), points.low, strict=True):
            yield curve.name.strip("/").replace(" ", "/"), points.labels, t_s, np.float64(row)


def _load(module: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(package, extra) from error
