"""Power loss at any moment: what was acknowledged is there, and `latest` loads it or a newer one.

A real saver is recorded once per scenario; then every state that a disk may be in after any prefix
of its system calls is built and read with `load_checkpoint`. The truth comes from the notes that
the recorded process wrote before each save and after each acknowledgement.
"""

import inspect
import json
import os
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from penstock import errors
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver
from powerloss import Disk, build, has_strace, record

from .conftest import assert_equal

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_strace(), reason="needs strace (apt-get install strace) and ptrace"),
]


def state_of(n):
    torch.manual_seed(0)
    weights = torch.randn(12_000)
    weights[:40] += n
    return {"n": n, "w": weights, "b": torch.full((7,), float(n))}


PROGRAM = f"""
import ast, json, os, sys, torch
from pathlib import Path
from unittest.mock import patch
from penstock import AsyncCheckpointSaver
torch.set_num_threads(1)
{inspect.getsource(state_of)}
def save(root, folder, saves, options, number):
    notes = os.open(root + "/notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with AsyncCheckpointSaver(Path(root, folder), **options) as saver:
        for name, metric in saves:
            number += 1
            note = dict(n=number, name=os.path.join(folder, name), metric=metric)
            os.write(notes, json.dumps(note | dict(acknowledged=False)).encode())
            saver.save_async(state_of(number), name, metric=metric).wait()
            os.write(notes, json.dumps(note | dict(acknowledged=True)).encode())
    os.close(notes)
    return number
for root, scenario in ast.literal_eval(sys.argv[1]).items():
    number = 0
    for folder, saves in scenario["runs"]:
        if scenario["broken"]:
            with patch(scenario["broken"], lambda what: None):
                number = save(root, folder, saves, scenario["options"], number)
        else:
            number = save(root, folder, saves, scenario["options"], number)
"""


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: more threads only stand in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def memory(tmp_path):
    """A folder in memory, if there is one: thousands of trees are built and removed."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=in_memory) as made:
        yield Path(made)


@dataclass(frozen=True)
class Save:
    n: int
    name: str
    metric: float | None

    @property
    def folder(self):
        return str(Path(self.name).parent)


def kept(saves, options):
    """Return the saves that retention has to keep: an obvious reference."""
    last, best = options.get("keep_last"), options.get("keep_best")
    result = set()
    for place in {save.folder for save in saves}:
        under_name = {save.name: save for save in saves if save.folder == place}
        here = sorted(under_name.values(), key=lambda save: save.n)
        if last is None and best is None:
            result |= set(here)
            continue
        result |= set(here[-(last or 1) :])
        if best:
            count, direction = best
            rated = [save for save in here if save.metric is not None]
            assert direction == "max"
            rated.sort(key=lambda save: (save.metric, save.n), reverse=True)
            result |= set(rated[:count])
    return result


def must_load(acknowledged, begun, options):
    """Return what may not be lost now; a save under way may have gone through, or not."""
    required = kept(acknowledged, options)
    if begun is not None:
        required &= kept([*acknowledged, begun], options)
        required = {save for save in required if save.name != begun.name}
    return required


def check(where, acknowledged, begun, options):
    """Say what is lost in a state of the disk."""
    for save in must_load(acknowledged, begun, options):
        try:
            assert_equal(load_checkpoint(where / save.name), state_of(save.n))
        except (errors.PenstockError, AssertionError) as error:
            yield f"save {save.n} ({save.name}): {error}"
    for place in {save.folder for save in acknowledged}:
        newest = max(save.n for save in acknowledged if save.folder == place)
        try:
            loaded = load_checkpoint(where / place)
            assert_equal(loaded, state_of(loaded["n"]))
            if loaded["n"] < newest:
                yield f"{place}: {loaded['n']} is loaded where {newest} was acknowledged"
        except (errors.PenstockError, AssertionError) as error:
            yield f"{place}: {error}"


def go_on(where, saves, options, chance):
    """A new run in what is left must work, and lose nothing of it."""
    for place in {save.folder for save in saves}:
        with AsyncCheckpointSaver(where / place, handle_signals=False, **options) as saver:
            saver.save_async(state_of(1000), f"again{chance % 2}.pt").wait()
        if load_checkpoint(where / place)["n"] != 1000:
            yield f"{place}: a later run does not go on"


def record_all(tmp_path, scenarios):
    """Record the scenarios, all by one process; return each one's disk and the calls."""
    disks = {}
    for number, scenario in enumerate(scenarios):
        root = tmp_path / f"disk{number}"
        root.mkdir()
        disks[str(root)] = scenario
    calls = record(PROGRAM, disks, log=tmp_path / "log")
    return list(disks), calls


def lose_power(root, calls, memory, scenario, *, resume_every=0, every_write=False):
    """Lose the power after every call; return the figures and what was lost."""
    options = scenario["options"]
    disk = Disk(root)
    acknowledged, begun = [], None
    seen = set()
    lost = []
    states = moments = 0
    where = memory / "replayed"
    for call in calls:
        if not disk.apply(call):
            continue
        moments += 1
        said = call.texts[0] if call.name == "write" else b""
        if said.startswith(b'{"n": '):
            values = json.loads(said)
            done = values.pop("acknowledged")
            save = Save(**values)
            if done:
                acknowledged.append(save)
            begun = None if done else save
        for tree in disk.states():
            tree.pop("notes", None)
            names = {name: text for name, text in tree.items() if ".penstock-tmp" not in name}
            key = hash((len(acknowledged), begun, frozenset(names.items())))
            if key in seen and not every_write:
                continue
            seen.add(key)
            states += 1
            build(tree, where)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what was passed over is not what this is about
                found = list(check(where, acknowledged, begun, options))
                if resume_every and states % resume_every == 0:
                    found += go_on(where, acknowledged, options, states)
            lost += [f"call {moments} ({call.name}), state {states}: {what}" for what in found]
            shutil.rmtree(where)
    assert len(acknowledged) == sum(len(saves) for _, saves in scenario["runs"])
    return {"calls": moments, "states": states, "acknowledged": len(acknowledged)}, lost


def rotating(count):
    return "runs/a", [(f"{n % 3}.pt", None) for n in range(count)]


def rated(count):
    metrics = [3.0, 9.0, None, 1.0, 5.0]
    names = [f"sub/{n}.pt" if n % 3 == 2 else f"{n}.pt" for n in range(count)]
    return "deep/er/run", [(name, metrics[n % 5]) for n, name in enumerate(names)]


def scenarios(size):
    """Names that are written twice, differences, retention, sub-folders, a run that goes on."""
    second = "deep/er/run", [("late.pt", 2.0), ("1.pt", 11.0)]
    best = {"delta_every": 3, "keep_last": 1, "keep_best": (1, "max")}
    last = {"delta_every": 3, "keep_last": 2}
    return [
        {"runs": [rotating(size)], "options": {"delta_every": 4}, "broken": ""},
        {"runs": [rotating(size), rotating(size)], "options": last, "broken": ""},
        {"runs": [rated(size), second], "options": best, "broken": ""},
    ]


def lose_power_everywhere(tmp_path, memory, size, **settings):
    chosen = scenarios(size)
    roots, calls = record_all(tmp_path, chosen)
    result = []
    for root, scenario in zip(roots, chosen, strict=True):
        figures, lost = lose_power(root, calls, memory, scenario, **settings)
        assert lost == []
        result.append(figures)
    return result


def test_nothing_acknowledged_is_lost(tmp_path, memory):
    figures = lose_power_everywhere(tmp_path, memory, 5, resume_every=20)
    assert all(one["states"] > 50 for one in figures)


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_nothing_acknowledged_is_lost_in_long_runs(tmp_path, memory):
    figures = lose_power_everywhere(tmp_path, memory, 14, resume_every=3, every_write=True)
    sys.stdout.write(f"{figures}\n")
    assert all(one["states"] > 1000 for one in figures)


def test_a_saver_that_does_not_sync_is_found_out(tmp_path, memory):
    """The same campaign, against savers that leave out a part of what they have to do."""
    broken = [
        "os.fsync",
        "penstock.core.files.sync_folder",
        "penstock.checkpoints.folder.sync_folder",
    ]
    chosen = [{"runs": [rotating(2)], "options": {}, "broken": name} for name in broken]
    roots, calls = record_all(tmp_path, chosen)
    for root, scenario in zip(roots, chosen, strict=True):
        assert lose_power(root, calls, memory, scenario)[1]
