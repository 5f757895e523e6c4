"""Saving in the background: copied at the call, bounded, told of failures, done at the end."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from harness import told
from penstock import errors
from penstock.core.writes import SaveHandle
from penstock.rollouts import storage as storage_module
from penstock.rollouts.storage import RolloutStorage

from .conftest import make_batch, same


@pytest.fixture
def slow(monkeypatch):
    """Writing waits for a permission per file."""
    gate = threading.Semaphore(0)
    original = storage_module.write_rollout

    def write(*args):
        assert gate.acquire(timeout=30)
        return original(*args)

    monkeypatch.setattr(storage_module, "write_rollout", write)
    return gate


def test_the_data_may_be_overwritten_at_once(tmp_path, slow):
    with RolloutStorage(tmp_path, background=True, handle_signals=False) as storage:
        batch = make_batch(40, 32)
        kept = batch.clone()
        arrays = {"x": batch["count"].numpy()}
        handles = [storage.save(batch, 0), storage.save(arrays, 1)]
        assert all(isinstance(handle, SaveHandle) for handle in handles)
        assert [handle.status for handle in handles] == ["pending", "pending"]
        for tensor in batch.values(True, True):
            tensor.zero_()
        slow.release(2)
        assert handles[0].wait() == tmp_path / "rollout_000000.pack"
        assert handles[0].stats["raw_bytes"] > handles[0].stats["stored_bytes"]
        same(kept, storage.load(0))
        same({"x": kept["count"].numpy()}, storage.load(1))  # waits for the pending save
    assert not [thread for thread in threading.enumerate() if "rollouts" in thread.name]


def test_loading_waits_for_a_pending_save(tmp_path, slow):
    with RolloutStorage(tmp_path, background=True, handle_signals=False) as storage:
        old, new = make_batch(seed=1), make_batch(seed=2)
        slow.release()
        storage.save(old, 0).wait()
        storage.save(new, 0)
        timer = threading.Timer(0.2, slow.release)
        timer.start()
        same(new, storage.load(0))
        timer.join()


def test_pending_bytes_are_bounded(tmp_path, slow):
    batch = make_batch(40, 32)
    size = sum(tensor.numel() * tensor.element_size() for tensor in batch.values(True, True))
    storage = RolloutStorage(
        tmp_path, background=True, max_pending_bytes=2 * size, handle_signals=False
    )
    storage.save(batch, 0)
    storage.save(batch, 1)
    returned = threading.Event()
    third = threading.Thread(target=lambda: (storage.save(batch, 2), returned.set()))
    third.start()
    assert not returned.wait(0.3)
    assert storage._queue.held_bytes == 2 * size
    slow.release(1)
    assert returned.wait(20)
    third.join()
    slow.release(2)
    assert storage.wait(20)
    assert storage.close()
    assert storage._queue.held_bytes == 0
    assert storage.iterations() == [0, 1, 2]


def test_a_batch_over_the_limit_passes_alone(tmp_path):
    with RolloutStorage(
        tmp_path, background=True, max_pending_bytes=1, handle_signals=False
    ) as storage:
        for number in range(3):
            storage.save(make_batch(), number)
    assert storage.iterations() == [0, 1, 2]


def test_staging_memory_is_used_again(tmp_path):
    batch = make_batch(100, 32)
    with RolloutStorage(tmp_path, background=True, handle_signals=False) as storage:
        storage.save(batch, 0).wait()
        storage.wait()
        idle = storage._memory.idle_bytes
        assert idle > 1e6
        for number in range(5):
            storage.save(batch, number).wait()
        storage.wait()
        assert storage._memory.idle_bytes == idle


def test_what_cannot_be_stored_is_told_at_once(tmp_path):
    with RolloutStorage(tmp_path, background=True, handle_signals=False) as storage:
        with pytest.raises(errors.UnsupportedValue):
            storage.save({"x": object()}, 0)
        storage.save(make_batch(), 1)
    assert storage.iterations() == [1]


def test_an_unknown_failure_reaches_the_caller(tmp_path, monkeypatch, caplog):
    def defect(*_):
        raise RuntimeError("a defect")

    storage = RolloutStorage(tmp_path, background=True, handle_signals=False)
    with monkeypatch.context() as patch:
        patch.setattr(storage_module, "write_rollout", defect)
        handle = storage.save(make_batch(), 0)
        with pytest.raises(errors.StorageError, match="a defect"):
            handle.wait(20)
    storage.save(make_batch(), 1)  # told once
    storage.wait()
    with pytest.raises(ValueError, match="mine") as raised, storage:
        with monkeypatch.context() as patch:
            patch.setattr(storage_module, "write_rollout", defect)
            handle = storage.save(make_batch(), 2)
            while not handle.done():
                time.sleep(0.001)
        raise ValueError("mine")
    assert "a defect" in told(raised.value, caplog)


def test_a_closed_storage_still_loads(tmp_path):
    storage = RolloutStorage(tmp_path, background=True, handle_signals=False)
    storage.save(make_batch(), 0)
    assert storage.close()
    assert storage.close()
    with pytest.raises(errors.SaverClosed):
        storage.save(make_batch(), 1)
    same(make_batch(), storage.load(0))


def test_another_process_is_told(tmp_path):
    storage = RolloutStorage(tmp_path, background=True, handle_signals=False)
    pid = os.fork()
    if pid == 0:
        try:
            storage.save(make_batch(), 1)
        except errors.SaverClosed:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert storage.close()


PROGRAM = """
import signal, sys, time, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started without
from tensordict import TensorDict
from penstock.rollouts import storage as module
original = module.write_rollout
module.write_rollout = lambda *a: (time.sleep(0.3), original(*a))[1]
storage = module.RolloutStorage(sys.argv[1], background=True)
for number in range(4):
    storage.save(TensorDict({"x": torch.full((3, 4, 900), number)}, batch_size=[3, 4]), number)
print("saving", flush=True)
while sys.argv[2] == "signal":
    time.sleep(0.05)  # in naps: Python handles a signal after the call that it was about to make
"""


@pytest.mark.timeout(300)  # four fsyncs, which take their time on a disk that others write to
@pytest.mark.parametrize("how", ["exit", signal.SIGTERM, signal.SIGINT])
def test_nothing_is_lost_at_the_end(tmp_path, how):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "exit" if how == "exit" else "signal"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "saving\n"
    if how != "exit":
        process.send_signal(how)
    _, complaints = process.communicate(timeout=250)
    if how == "exit":
        assert process.returncode == 0, complaints
    else:
        assert "finishing" in complaints
        assert process.returncode == -how
    storage = RolloutStorage(tmp_path)
    assert storage.iterations() == [0, 1, 2, 3]
    assert all((data["x"] == number).all() for number, data in storage.iterate())
    torch.testing.assert_close(storage.load(3, envs=0, steps=0)["x"], torch.full((900,), 3))
