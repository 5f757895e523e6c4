"""Power loss at any moment: a saved replay is the last one acknowledged, or the one under way.

A real process saves each kind of buffer again and again, under strace. Every state that a disk may
be in after any prefix of its system calls is then built and loaded.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.replay.segments import MANIFEST
from powerloss import Disk, build, has_strace, record

from .kill_campaign import KINDS, STEP

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_strace(), reason="needs strace (apt-get install strace) and ptrace"),
]
HERE = str(Path(__file__).parent)

PROGRAM = """
import json, os, sys
from pathlib import Path
tests, kind, root, saves, broken = sys.argv[1:]
sys.path[:0] = [tests, os.path.dirname(tests)]
import torch
from kill_campaign import KINDS
if broken == "True":
    import penstock.core.files
    penstock.core.files.os.fsync = lambda descriptor: None
torch.set_num_threads(1)
folder = Path(root, "saved")
folder.mkdir()
victim = KINDS[kind](folder)
notes = os.open(root + "/notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for save in range(int(saves)):
    if save % 4 == 3:  # a later run goes on
        victim = KINDS[kind](folder, anew=save % 8 == 7)
    victim.add()
    os.write(notes, json.dumps(dict(total=victim.total, done=False)).encode())
    victim.save(folder)
    os.write(notes, json.dumps(dict(total=victim.total, done=True)).encode())
"""


def lose_power(kind, tmp_path, saves, broken=False):
    """Lose the power after every call; return how many states there were, and what was wrong."""
    root = tmp_path / "disk"
    root.mkdir()
    calls = record(PROGRAM, HERE, kind, root, saves, broken, log=tmp_path / "log")
    disk, done, seen, wrong, saved = Disk(str(root)), 0, set(), [], 0
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    for call in calls:
        if not disk.apply(call):
            continue
        said = call.texts[0] if call.name == "write" else b""
        if said.startswith(b'{"total": '):
            note = json.loads(said)
            done, saved = (note["total"], saved + 1) if note["done"] else (done, saved)
        for tree in disk.states():
            tree.pop("notes", None)
            key = hash((done, frozenset(item for item in tree.items() if "-tmp" not in item[0])))
            if key in seen:
                continue
            seen.add(key)
            with tempfile.TemporaryDirectory(dir=in_memory) as made:
                where = Path(made, "replayed")
                build(tree, where)
                folder = where / "saved"
                if not (folder / MANIFEST).exists():
                    wrong += [f"nothing is left of {done}"] if done else []
                    continue
                try:
                    left = KINDS[kind](folder)
                    if left.total not in (done, done + STEP) or not left.is_whole():
                        wrong.append(f"{left.total} where {done} was acknowledged")
                    left.add()
                    left.save(folder)
                    if KINDS[kind](folder).total != left.total:
                        wrong.append(f"a later run does not go on after {done}")
                except PenstockError as error:
                    wrong.append(f"{done}: {error}")
    assert saved == saves
    sys.stdout.write(f"{kind}: {len(calls)} calls, {len(seen)} states, {len(wrong)} wrong\n")
    return len(seen), wrong


@pytest.mark.parametrize("kind", list(KINDS))
def test_nothing_acknowledged_is_lost(kind, tmp_path):
    states, wrong = lose_power(kind, tmp_path, 9)
    assert states > 50
    assert wrong == []


def test_the_test_sees_a_missing_fsync(tmp_path):
    assert lose_power("dict", tmp_path, 3, broken=True)[1]
