"""What is in a checkpoint or a folder of them, from headers alone."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from penstock.checkpoints import folder
from penstock.core import tree
from penstock.core.files import storage_error
from penstock.core.memory import format_bytes
from penstock.core.pack import Entry, PackReader, is_pack
from penstock.core.pack.format import MAX_HEADER_BYTES
from penstock.errors import CorruptFile, DataError, UnknownFormat
from penstock.ui.report import aligned, text_table

FileKind = Literal["pack", "torch", "pickle", "lz4", "safetensors", "damaged", "unknown"]
Facts = dict[str, Any]

_FOREIGN: dict[str, str] = {
    "torch": "torch.save file (zip)",
    "pickle": "torch.save file (old pickle form)",
    "lz4": "LZ4-compressed torch.save file",
    "safetensors": "safetensors file",
}
_CHECKPOINT_ENDINGS = (".pt", ".pth", ".ckpt", ".lz4", ".safetensors")


def classify(path: Path) -> FileKind:
    """Tell from its content what kind of file it is; nothing is unpickled."""
    try:
        if is_pack(path):
            return "pack"
        with path.open("rb") as file:
            head = file.read(16)
            if head[:4] == b"\x04\x22\x4d\x18":
                return "lz4"
            if head[:4] == b"PK\x03\x04":
                return _classify_zip(path)
            if head[:1] == b"\x80":
                return "pickle"
            return _classify_header(file, head)
    except OSError as error:
        raise storage_error("read", path, error) from error


def _classify_zip(path: Path) -> FileKind:
    try:
        with zipfile.ZipFile(path) as archive:
            is_torch = any(name.endswith("/data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return "damaged"
    return "torch" if is_torch else "unknown"


def _classify_header(file: Any, head: bytes) -> FileKind:
    """Tell a stock safetensors file from a pack whose first bytes were changed."""
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 10 else 0
    if 2 <= length <= MAX_HEADER_BYTES:
        file.seek(8)
        header = file.read(length)
        if b'"penstock.digest":' in header:
            return "damaged"
        try:
            if len(header) == length and isinstance(json.loads(header), dict):
                return "safetensors"
        except (ValueError, RecursionError):
            pass
    ending = os.path.splitext(file.name)[1].lower()
    return "damaged" if ending in _CHECKPOINT_ENDINGS else "unknown"


def open_pack(path: Path) -> PackReader:
    """Open a pack of a folder of checkpoints, so that it finds its base."""
    try:
        return PackReader(path, find_base=folder.find_base)
    except OSError as error:
        raise storage_error("read", path, error) from error


def describe_file(path: Path) -> Facts:
    """Say what is in one file."""
    kind = classify(path)
    facts: Facts = {"path": str(path), "size_bytes": path.stat().st_size}
    if kind == "pack":
        with open_pack(path) as pack:
            facts |= _describe_pack(pack)
        if facts["kind"].endswith(folder.KIND):
            facts["load"] = _load_call(path)
        return facts
    if kind in _FOREIGN:
        return {**facts, "kind": _FOREIGN[kind], "load": _load_call(path)}
    if kind == "damaged":
        raise CorruptFile(f"{path} is damaged: its beginning or end is not that of a checkpoint")
    raise UnknownFormat(
        f"{path} is no file that penstock reads: give a recording, a checkpoint or a rollout, or "
        "the folder of a dataset, a run or a replay buffer"
    )


def _load_call(path: Path) -> str:
    return f"penstock.load_checkpoint({json.dumps(str(path), ensure_ascii=False)})"


def _describe_pack(pack: PackReader) -> Facts:
    index, meta = pack.index, pack.index.meta
    raw_bytes = sum(entry.nbytes for entry in index.entries.values())
    base = None
    if index.base:
        file = folder.find_base(pack.path, index.base)
        base = {"file": index.base["file"], "present": file.is_file()}
    entries = sorted(index.entries.values(), key=lambda entry: -entry.nbytes)
    return {
        "kind": f"penstock {index.kind}",
        "raw_bytes": raw_bytes,
        "ratio": raw_bytes / pack.size_bytes,
        "tensors": len(entries),
        "codecs": dict(Counter(_codec_name(entry.codec.config()) for entry in entries)),
        "delta": base is not None,
        "base": base,
        "sequence": meta.get("sequence"),
        "saved_at": _date(meta.get("saved_at")),
        "written_by": meta.get("written_by"),
        "metric": meta.get("metric"),
        "metadata": meta.get("metadata"),
        "largest": [_describe_tensor(entry) for entry in entries],
    }


def _describe_tensor(entry: Entry) -> Facts:
    saved = 1 - entry.stored_bytes / entry.nbytes if entry.nbytes else 0.0
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "raw_bytes": entry.nbytes,
        "stored_bytes": entry.stored_bytes,
        "saved_percent": round(100 * saved, 1),
    }


def describe_folder(where: Path) -> Facts:
    """Say what checkpoints are in a folder."""
    newest = folder.latest(where)
    checkpoints: list[Facts] = []
    for file in checkpoint_files(where):
        try:
            facts = describe_file(file)
        except UnknownFormat:
            continue
        except DataError as error:
            facts = {"path": str(file), "size_bytes": file.stat().st_size, "damaged": str(error)}
        facts.pop("largest", None)
        checkpoints.append({"name": file.name, "latest": file == newest, **facts})
    checkpoints.sort(key=lambda facts: (facts.get("sequence") or 0, facts["name"]), reverse=True)
    return {
        "path": str(where),
        "kind": "folder of checkpoints",
        "size_bytes": sum(facts["size_bytes"] for facts in checkpoints),
        "latest": newest.name if newest else None,
        "checkpoints": checkpoints,
    }


def checkpoint_files(where: Path) -> list[Path]:
    """List the files of a folder that may be checkpoints: no links, nothing hidden."""
    try:
        found = sorted(where.iterdir())
    except OSError as error:
        raise storage_error("read", where, error) from error
    names = (path for path in found if not path.name.startswith(".") and path.name != folder.LATEST)
    return [path for path in names if path.is_file() and not path.is_symlink()]


def text(facts: Facts, top: int = 10) -> str:
    """Lay out what `describe` found for the terminal."""
    if "checkpoints" in facts:
        return folder_text(facts)
    lines = [("path", facts["path"]), ("kind", facts["kind"])]
    lines.append(("size on disk", format_bytes(facts["size_bytes"])))
    if "load" in facts:
        lines.append(("load", facts["load"]))
    if "codecs" not in facts:
        return aligned(lines)
    codecs = (f"{name} ({count})" for name, count in facts["codecs"].items())
    lines += [
        ("raw size", f"{format_bytes(facts['raw_bytes'])}, ratio {facts['ratio']:.2f}"),
        ("tensors", str(facts["tensors"])),
        ("codecs", ", ".join(codecs) or "none"),
    ]
    if facts["kind"].endswith(folder.KIND):
        torch_file = json.dumps(f"{os.path.splitext(facts['path'])[0]}_torch.pt")
        call = facts["load"].replace("load_checkpoint", "to_torch")
        lines += [
            ("for torch.load", f"{call[:-1]}, {torch_file})"),
            ("stored as", _stored_as(facts)),
            ("sequence", _or_dash(facts["sequence"])),
            ("saved at", _or_dash(facts["saved_at"])),
            ("written by", _or_dash(facts["written_by"])),
            ("metric", _figure(facts["metric"])),
            ("metadata", _metadata_text(facts["metadata"])),
        ]
    rows = [
        (
            tensor["name"],
            tensor["dtype"],
            "x".join(map(str, tensor["shape"])) or "scalar",
            format_bytes(tensor["raw_bytes"]),
            format_bytes(tensor["stored_bytes"]),
            f"{tensor['saved_percent']:.1f} %",
        )
        for tensor in facts["largest"][:top]
    ]
    if not rows:
        return aligned(lines)
    title = f"largest {len(rows)} of {facts['tensors']} tensors"
    table = text_table(("name", "dtype", "shape", "raw", "stored", "saved"), rows)
    return f"{aligned(lines)}\n\n{title}\n{table}"


def folder_table(facts: Facts) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and rows that list the checkpoints of a folder, the latest marked."""
    rows: list[tuple[str, ...]] = [
        (
            "*" if item["latest"] else " ",
            item["name"],
            format_bytes(item["size_bytes"]),
            f"{item['ratio']:.2f}" if "ratio" in item else "-",
            "DAMAGED, run doctor" if "damaged" in item else _stored_as(item),
            _or_dash(item.get("sequence")),
            _figure(item.get("metric")),
            _or_dash(item.get("saved_at"))[:16],  # to the minute
        )
        for item in facts["checkpoints"]
    ]
    return (" ", "name", "size", "ratio", "stored as", "seq", "metric", "saved at"), rows


def folder_text(facts: Facts) -> str:
    """Lay out what `describe_folder` found for the terminal."""
    columns, rows = folder_table(facts)
    lines = [("path", facts["path"]), ("kind", facts["kind"])]
    lines.append(("size on disk", f"{format_bytes(facts['size_bytes'])} in {len(rows)} files"))
    lines.append(("latest (*)", _or_dash(facts["latest"])))
    if facts["latest"]:
        lines.append(("load", f"{_load_call(Path(facts['path']))}  # the newest that verifies"))
    return f"{aligned(lines)}\n\n{text_table(columns, rows)}" if rows else aligned(lines)


def _stored_as(facts: Facts) -> str:
    if "delta" not in facts:
        return str(facts["kind"])
    if not facts["delta"]:
        return "full"
    gone = "" if facts["base"]["present"] else " (MISSING)"
    return f"delta to {facts['base']['file']}{gone}"


def _codec_name(config: dict[str, Any]) -> str:
    inner = config.get("inner")
    if inner is None:
        return str(config["id"])
    return f"{config['id']}+{inner if isinstance(inner, str) else _codec_name(inner)}"


def _metadata_text(metadata: Any) -> str:
    if metadata is None:
        return "-"
    return repr(_shortened(tree.unflatten(metadata, lambda record: record)))


def _shortened(value: Any) -> Any:
    """Give floats 6 digits, however deep they lie."""
    if isinstance(value, dict):
        return {key: _shortened(child) for key, child in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(map(_shortened, value))
    return float(f"{value:.6g}") if type(value) is float else value


def _date(saved_at: Any) -> str | None:
    if not isinstance(saved_at, int | float):
        return None
    return datetime.fromtimestamp(saved_at).astimezone().isoformat(" ", "seconds")


def _figure(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else "-"


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)
