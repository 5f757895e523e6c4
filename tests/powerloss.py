"""What a disk may hold after a power loss: rebuilt from the system calls of a real process.

`record` runs a program under strace. `Disk` replays its calls on a model of a disk that keeps only
what it was told to keep: the bytes of a file until its last fsync, the names of a folder until the
last fsync of that folder. `Disk.states` are the trees that may be found after losing the power at
that moment: everything un-synced is gone, or is there, or in part; in order or not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CALLS = (
    "open,openat,creat,close,dup,write,pwrite64,writev,pwritev,pwritev2,lseek,truncate,ftruncate,"
    "fsync,fdatasync,sync,syncfs,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,"
    "unlinkat,mkdir,mkdirat,rmdir,sendfile,copy_file_range,fallocate"
)
_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')

Tree = dict[str, "bytes | str | None"]
"""Path to content: bytes of a file, the target of a link, None for a folder."""


def has_strace() -> bool:
    """Tell whether system calls can be recorded here."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", os.devnull, "true"], check=False).returncode == 0


def record(program: str, *words: object, log: Path, timeout_s: float = 300) -> list[Call]:
    """Run a Python program under strace; return its calls, in the order in which they ended."""
    command = ["strace", "-f", "--seccomp-bpf", "-xx", "-s", "100000000", "-e", f"trace={CALLS}"]
    command += ["-o", str(log), sys.executable, "-c", program, *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert result.returncode == 0, result.stderr
    return list(_parse(log))


@dataclass
class Call:
    """One system call that worked."""

    name: str
    words: str
    result: int

    @property
    def texts(self) -> list[bytes]:
        """The paths or the data among the arguments."""
        return [bytes.fromhex(text.replace("\\x", "")) for text in _TEXT.findall(self.words)]

    def number(self, at: int) -> int:
        """Return a numeric argument."""
        return int(_TEXT.sub("", self.words).split(",")[at])


def _parse(log: Path) -> Iterator[Call]:
    begun: dict[str, str] = {}
    for line in log.read_text().splitlines():
        thread, _, rest = line.partition(" ")
        rest = rest.lstrip()
        if rest.endswith("<unfinished ...>"):
            begun[thread] = rest.removesuffix("<unfinished ...>").rstrip()
            continue
        resumed = re.match(r"<\.\.\. \w+ resumed>", rest)
        if resumed:
            rest = begun.pop(thread) + rest[resumed.end() :]
        match = _LINE.match(f"{thread} {rest}")
        if match and int(match[4]) >= 0:
            yield Call(match[2], match[3], int(match[4]))


@dataclass(eq=False)
class _Node:
    """A file, a link or a folder."""

    content: bytes | str | None
    synced: bytes = b""

    @property
    def dirty(self) -> bool:
        return isinstance(self.content, bytes) and self.content != self.synced


@dataclass(frozen=True)
class _Change:
    """What happened to the names of a folder: one goes, one comes (both for a rename)."""

    folder: str
    gone: str | None = None
    come: str | None = None
    node: _Node | None = None


@dataclass
class _Open:
    path: str
    node: _Node | None
    at: int = 0
    append: bool = False


@dataclass
class Disk:
    """A disk that starts with one durable, empty folder.

    Args:
        root: That folder; what happens outside is not looked at.
    """

    root: str
    _now: dict[str, _Node] = field(default_factory=dict)
    _durable: dict[str, _Node] = field(default_factory=dict)
    _pending: list[_Change] = field(default_factory=list)
    _files: dict[int, _Open] = field(default_factory=dict)

    def apply(self, call: Call) -> bool:
        """Replay one call; tell whether it changed what the disk may hold."""
        method = getattr(self, f"_{call.name.rstrip('0123456789')}", None)
        if method is None:
            raise AssertionError(f"{call.name} is not modelled")
        return bool(method(call))

    def states(self) -> Iterator[Tree]:
        """Yield every tree that may be found if the power is lost now."""
        count = len(self._pending)
        chosen = [set(range(k)) for k in range(count + 1)]  # the first k, in order
        chosen += [{k} for k in range(count)]  # or only one
        chosen += [set(range(count)) - {k} for k in range(count)]  # or all but one
        for one in chosen:
            names = dict(self._durable)
            for k, change in enumerate(self._pending):
                if k in one:
                    _change(names, change)
            lost = {path for path in names if not self._reachable(path, names)}
            visible = {path: node for path, node in names.items() if path not in lost}
            dirty = any(node.dirty for node in visible.values())
            for survives in (_none, _all, _half, _zeros) if dirty else (_none,):
                yield {
                    os.path.relpath(path, self.root): (
                        survives(node.content, node.synced)
                        if isinstance(node.content, bytes)
                        else node.content
                    )
                    for path, node in visible.items()
                }

    def _reachable(self, path: str, names: dict[str, _Node]) -> bool:
        parent = os.path.dirname(path)
        return parent == self.root or (parent in names and self._reachable(parent, names))

    def _inside(self, path: bytes) -> str | None:
        text = os.path.normpath(os.fsdecode(path))
        return text if text.startswith(self.root + "/") else None

    def _note(self, change: _Change) -> bool:
        _change(self._now, change)
        self._pending.append(change)
        return True

    def _openat(self, call: Call) -> bool:
        raw = call.texts[0]
        path = os.path.normpath(os.fsdecode(raw))
        if path != self.root and self._inside(raw) is None:
            self._files.pop(call.result, None)
            return False
        node = self._now.get(path)
        made = node is None and "O_CREAT" in call.words
        if made:
            node = _Node(b"")
            self._note(_Change(os.path.dirname(path), come=path, node=node))
        elif node is not None and "O_TRUNC" in call.words:
            node.content = b""
        self._files[call.result] = _Open(path, node, append="O_APPEND" in call.words)
        return made

    _open = _openat

    def _close(self, call: Call) -> bool:
        self._files.pop(call.number(0), None)
        return False

    def _dup(self, call: Call) -> bool:
        assert call.number(0) not in self._files
        return False

    def _write(self, call: Call) -> bool:
        file = self._files.get(call.number(0))
        if file is None or file.node is None:
            return False
        assert isinstance(file.node.content, bytes)
        if file.append:
            file.at = len(file.node.content)
        file.node.content = _written(file.node.content, file.at, call.texts[0][: call.result])
        file.at += call.result
        return True

    def _pwrite(self, call: Call) -> bool:
        file = self._files.get(call.number(0))
        if file is None or file.node is None:
            return False
        assert isinstance(file.node.content, bytes)
        at = call.number(3)
        file.node.content = _written(file.node.content, at, call.texts[0][: call.result])
        return True

    def _lseek(self, call: Call) -> bool:
        file = self._files.get(call.number(0))
        if file is not None:
            file.at = call.result
        return False

    def _ftruncate(self, call: Call) -> bool:
        file = self._files.get(call.number(0))
        if file is None or file.node is None:
            return False
        assert isinstance(file.node.content, bytes)
        size = call.number(1)
        file.node.content = file.node.content[:size].ljust(size, b"\0")
        return True

    def _fsync(self, call: Call) -> bool:
        file = self._files.get(call.number(0))
        if file is None:
            return False
        if file.node is not None and isinstance(file.node.content, bytes):
            file.node.synced = file.node.content
            return True
        kept = [change for change in self._pending if change.folder != file.path]
        for change in self._pending:
            if change.folder == file.path:
                _change(self._durable, change)
        self._pending = kept
        return True

    _fdatasync = _fsync

    def _rename(self, call: Call) -> bool:
        old, new = (self._inside(text) for text in call.texts)
        if old is None and new is None:
            return False
        assert old and new and os.path.dirname(old) == os.path.dirname(new)
        return self._note(_Change(os.path.dirname(new), gone=old, come=new, node=self._now[old]))

    def _link(self, call: Call) -> bool:
        old, new = (self._inside(text) for text in call.texts)
        if new is None:
            return False
        assert old
        return self._note(_Change(os.path.dirname(new), come=new, node=self._now[old]))

    _linkat = _link

    def _symlink(self, call: Call) -> bool:
        target, raw = call.texts
        path = self._inside(raw)
        if path is None:
            return False
        node = _Node(os.fsdecode(target))
        return self._note(_Change(os.path.dirname(path), come=path, node=node))

    _symlinkat = _symlink

    def _unlink(self, call: Call) -> bool:
        path = self._inside(call.texts[0])
        if path is None:
            return False
        return self._note(_Change(os.path.dirname(path), gone=path))

    def _mkdir(self, call: Call) -> bool:
        path = self._inside(call.texts[0])
        if path is None:
            return False
        return self._note(_Change(os.path.dirname(path), come=path, node=_Node(None)))


def _change(names: dict[str, _Node], change: _Change) -> None:
    if change.gone is not None:
        names.pop(change.gone, None)
    if change.come is not None and change.node is not None:
        names[change.come] = change.node


def _written(content: bytes, at: int, data: bytes) -> bytes:
    return content[:at].ljust(at, b"\0") + data + content[at + len(data) :]


def _none(now: bytes, synced: bytes) -> bytes:
    return synced


def _all(now: bytes, synced: bytes) -> bytes:
    return now


def _half(now: bytes, synced: bytes) -> bytes:
    return now if now == synced else now[: len(now) // 2]


def _zeros(now: bytes, synced: bytes) -> bytes:
    return now if now == synced else bytes(len(now))


def build(tree: Tree, where: Path) -> None:
    """Put a tree on a real disk."""
    where.mkdir(parents=True)
    for name, content in sorted(tree.items()):
        path = where / name
        if content is None:
            path.mkdir()
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
