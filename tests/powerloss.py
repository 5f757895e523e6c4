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

    def folder(self, at: int) -> int:
        """Return the descriptor before the n-th path; -1 if there is none."""
        before = _TEXT.split(self.words)[2 * at].strip(", ").rpartition(" ")[2]
        return int(before) if before.isdigit() else -1


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
    """A file, a link, or a folder with its names: as they are, and as the disk has to keep them."""

    content: bytes | str | None
    synced: bytes = b""
    names: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)

    @property
    def dirty(self) -> bool:
        return isinstance(self.content, bytes) and self.content != self.synced


@dataclass(frozen=True)
class _Change:
    """What one call did to names, at once: (folder, name, what it is now or None)."""

    edits: tuple[tuple[_Node, str, _Node | None], ...]

    def apply(self, names: dict[_Node, dict[str, _Node]]) -> None:
        for folder, name, node in self.edits:
            own = names.setdefault(folder, dict(folder.durable))
            if node is None:
                own.pop(name, None)
            else:
                own[name] = node


@dataclass
class _Open:
    node: _Node
    at: int = 0
    append: bool = False


class Disk:
    """A disk that starts with one durable, empty folder.

    A name that moves from a folder to another is durable with either of them: file systems with a
    journal do both or nothing.

    Args:
        root: That folder; what happens outside is not looked at.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._top = _Node(None)
        self._pending: list[_Change] = []
        self._files: dict[int, _Open] = {}

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
            changed: dict[_Node, dict[str, _Node]] = {}
            for k, change in enumerate(self._pending):
                if k in one:
                    change.apply(changed)
            visible = dict(_walk(self._top, changed, ""))
            dirty = any(node.dirty for node in visible.values())
            for survives in (_none, _all, _half, _zeros) if dirty else (_none,):
                yield {
                    path: survives(node.content, node.synced)
                    if isinstance(node.content, bytes)
                    else node.content
                    for path, node in visible.items()
                }

    def _find(self, call: Call, at: int) -> tuple[_Node, str] | None:
        """Return the folder and the name that a path among the arguments means; None if outside."""
        path = os.fsdecode(call.texts[at])
        if path.startswith("/"):
            path = os.path.normpath(path)
            if path != self.root and not path.startswith(self.root + "/"):
                return None
            folder, path = self._top, os.path.relpath(path, self.root)
        else:
            opened = self._files.get(call.folder(at))
            if opened is None:
                return None
            folder = opened.node
        *parents, name = path.split("/")
        for parent in parents:
            folder = folder.names[parent]
        return folder, name

    def _note(self, *edits: tuple[_Node, str, _Node | None]) -> bool:
        change = _Change(edits)
        for folder, name, node in edits:
            if node is None:
                del folder.names[name]
            else:
                folder.names[name] = node
        self._pending.append(change)
        return True

    def _openat(self, call: Call) -> bool:
        found = self._find(call, 0)
        if found is None:
            self._files.pop(call.result, None)
            return False
        folder, name = found
        node = self._top if name == "." else folder.names.get(name)
        made = node is None
        if node is None:
            assert "O_CREAT" in call.words, call
            node = _Node(b"")
            self._note((folder, name, node))
        elif "O_TRUNC" in call.words:
            node.content = b""
        self._files[call.result] = _Open(node, append="O_APPEND" in call.words)
        return made

    _open = _openat

    def _close(self, call: Call) -> bool:
        self._files.pop(call.number(0), None)
        return False

    def _dup(self, call: Call) -> bool:
        assert call.number(0) not in self._files
        return False

    def _put(self, file: _Open | None, at: int | None, data: bytes) -> bool:
        if file is None:
            return False
        content = file.node.content
        assert isinstance(content, bytes)
        if at is None:
            at = len(content) if file.append else file.at
            file.at = at + len(data)
        file.node.content = content[:at].ljust(at, b"\0") + data + content[at + len(data) :]
        return True

    def _write(self, call: Call) -> bool:
        return self._put(self._files.get(call.number(0)), None, call.texts[0][: call.result])

    def _pwrite(self, call: Call) -> bool:
        file = self._files.get(call.number(0))
        return self._put(file, call.number(3), call.texts[0][: call.result])

    def _lseek(self, call: Call) -> bool:
        file = self._files.get(call.number(0))
        if file is not None:
            file.at = call.result
        return False

    def _ftruncate(self, call: Call) -> bool:
        file = self._files.get(call.number(0))
        if file is None:
            return False
        assert isinstance(file.node.content, bytes)
        size = call.number(1)
        file.node.content = file.node.content[:size].ljust(size, b"\0")
        return True

    def _fsync(self, call: Call) -> bool:
        file = self._files.get(call.number(0))
        if file is None:
            return False
        if isinstance(file.node.content, bytes):
            file.node.synced = file.node.content
            return True
        kept = []
        for change in self._pending:
            if any(folder is file.node for folder, _, _ in change.edits):
                now: dict[_Node, dict[str, _Node]] = {}
                change.apply(now)
                for folder, names in now.items():
                    folder.durable = names
            else:
                kept.append(change)
        self._pending = kept
        return True

    _fdatasync = _fsync

    def _rename(self, call: Call) -> bool:
        old, new = self._find(call, 0), self._find(call, 1)
        if old is None and new is None:
            return False
        assert old and new, call
        moved = old[0].names[old[1]]
        if "RENAME_EXCHANGE" in call.words:
            return self._note((*old, new[0].names[new[1]]), (*new, moved))
        return self._note((*old, None), (*new, moved))

    _renameat = _rename

    def _link(self, call: Call) -> bool:
        old, new = self._find(call, 0), self._find(call, 1)
        if new is None:
            return False
        assert old
        return self._note((*new, old[0].names[old[1]]))

    _linkat = _link

    def _symlink(self, call: Call) -> bool:
        found = self._find(call, 1)
        return found is not None and self._note((*found, _Node(os.fsdecode(call.texts[0]))))

    _symlinkat = _symlink

    def _unlink(self, call: Call) -> bool:
        found = self._find(call, 0)
        return found is not None and self._note((*found, None))

    _unlinkat = _rmdir = _unlink

    def _mkdir(self, call: Call) -> bool:
        found = self._find(call, 0)
        return found is not None and self._note((*found, _Node(None)))

    _mkdirat = _mkdir


def _walk(
    folder: _Node, changed: dict[_Node, dict[str, _Node]], path: str
) -> Iterator[tuple[str, _Node]]:
    for name, node in changed.get(folder, folder.durable).items():
        yield path + name, node
        if node.content is None:
            yield from _walk(node, changed, f"{path}{name}/")


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
