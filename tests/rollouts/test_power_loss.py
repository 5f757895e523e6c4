"""Power loss at any moment: every rollout that was acknowledged, and is to be kept, is there."""

import inspect
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from penstock.errors import PenstockError
from penstock.rollouts.storage import RolloutStorage
from powerloss import Disk, build, has_strace, record

from .conftest import same

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_strace(), reason="needs strace (apt-get install strace) and ptrace"),
]
KEPT = 2


def rollout_of(n):
    values = torch.arange(6 * 32 * 40).reshape(6, 32, 40) // 7
    return {"n": n, "lidar": (values + n).float(), "done": values[..., :1] % 5 == n % 5}


PROGRAM = f"""
import json, os, sys, torch
from penstock import RolloutStorage
torch.set_num_threads(1)
{inspect.getsource(rollout_of)}
root, background, broken = sys.argv[1:]
if broken == "True":
    import penstock.core.files
    penstock.core.files.os.fsync = lambda descriptor: None
notes = os.open(root + "/notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with RolloutStorage(root + "/saved", keep_last={KEPT}, background=background == "True") as storage:
    for n, iteration in enumerate((0, 1, 2, 2, 5, 6, 6)):
        note = dict(n=n, iteration=iteration)
        os.write(notes, json.dumps(note | dict(done=False)).encode())
        storage.save(rollout_of(n), iteration)
        storage.wait()
        os.write(notes, json.dumps(note | dict(done=True)).encode())
"""


def lose_power(tmp_path, background, broken=False):
    """Lose the power after every call; return how many states there were, and what was wrong."""
    root = tmp_path / "disk"
    root.mkdir()
    calls = record(PROGRAM, root, background, broken, log=tmp_path / "log")
    disk, seen, wrong = Disk(str(root)), set(), []
    done, begun = {}, None  # by iteration: the number of the content
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    for call in calls:
        if not disk.apply(call):
            continue
        said = call.texts[0] if call.name == "write" else b""
        if said.startswith(b'{"n": '):
            note = json.loads(said)
            begun = None if note["done"] else note
            if note["done"]:
                done[note["iteration"]] = note["n"]
        for tree in disk.states():
            tree.pop("notes", None)
            names = frozenset(item for item in tree.items() if "-tmp" not in item[0])
            key = hash((len(done), begun is None, names))
            if key in seen:
                continue
            seen.add(key)
            coming = {} if begun is None else {begun["iteration"]: begun["n"]}
            kept = sorted({**done, **coming})[-KEPT:]  # what is under way may have gone through
            with tempfile.TemporaryDirectory(dir=in_memory) as made:
                where = Path(made, "replayed")
                build(tree, where)
                storage = RolloutStorage(where / "saved")
                try:
                    for iteration in storage.iterations():
                        found = storage.load(iteration)
                        same(found, rollout_of(found["n"]))
                        if found["n"] not in (done.get(iteration), coming.get(iteration)):
                            wrong.append(f"{iteration} is {found['n']}, not {done}, {coming}")
                    for iteration in set(kept) & set(done):
                        storage.load(iteration)
                    storage.save(rollout_of(99), 99)
                    same(storage.load(99), rollout_of(99))
                except (PenstockError, AssertionError) as error:
                    wrong.append(f"{done}, {coming}: {error}")
    assert len(done) == 5
    sys.stdout.write(f"rollouts: {len(calls)} calls, {len(seen)} states, {len(wrong)} wrong\n")
    return len(seen), wrong


@pytest.mark.parametrize("background", [False, True])
def test_nothing_acknowledged_is_lost(background, tmp_path):
    states, wrong = lose_power(tmp_path, background)
    assert states > 30
    assert wrong == []


def test_the_test_sees_a_missing_fsync(tmp_path):
    assert lose_power(tmp_path, False, broken=True)[1]
