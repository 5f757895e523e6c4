"""Every way a process can end: what was asked for is on disk afterwards."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from harness import told
from penstock import errors
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver

# Each starts processes that import torch: slow on a loaded machine.
pytestmark = pytest.mark.timeout(500)

PROLOGUE = """
import os, signal, sys, threading, time
import torch
from penstock import AsyncCheckpointSaver

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and "keep" not in sys.argv:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # inherited from a background shell
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
torch.manual_seed(0)
net = torch.nn.Linear(1500, 1500)
optimizer = torch.optim.Adam(net.parameters())
def step():
    net(torch.randn(2, 1500)).sum().backward()
    optimizer.step()
step()
out = sys.argv[1]
saver = AsyncCheckpointSaver(out, optimizers=[optimizer], max_staging_bytes=10**9)
def save(n):
    saver.barrier()
    net.bias.data.fill_(n)
    return saver.save_async({"n": n, "model": net.state_dict(),
                             "optimizer": optimizer.state_dict()}, f"{n}.pt")
def ready():
    print("ready", flush=True)
def idle():
    # In naps: a signal that comes while the main thread waits for the GIL, on its way into a call
    # that blocks, is handled by Python only after that call.
    while True:
        time.sleep(0.05)
"""


def start(tmp_path, program, **options):
    code = PROLOGUE + textwrap.dedent(program)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process, timeout=240):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def assert_saved(tmp_path, *numbers):
    for n in numbers:
        loaded = load_checkpoint(tmp_path / f"{n}.pt")
        assert loaded["n"] == n
        assert torch.equal(loaded["model"]["bias"], torch.full((1500,), float(n)))
    assert not list(tmp_path.glob(".penstock-tmp*"))


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("raise ValueError('user')", 1),
        ("del saver", 0),
        ("step()", 0),
    ],
)
def test_normal_ends(tmp_path, end, code):
    process = start(tmp_path, f"save(1)\nsave(2)\n{end}")
    returned, _, err = finish(process)
    assert returned == code, err
    if code == 1:
        assert "ValueError: user" in err
    assert_saved(tmp_path, 1, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_finish_the_saves_first(tmp_path, number):
    process = start(tmp_path, "save(1)\nsave(2)\nready()\nidle()")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    returned, _, err = finish(process)
    assert returned == -number, err
    assert_saved(tmp_path, 1, 2)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in err


def test_signals_in_the_middle_of_training(tmp_path):
    """At any instruction, in any phase: no dead-lock, and the last save is whole."""
    for delay in (0.0, 0.01, 0.1):
        target = tmp_path / str(delay)
        process = start(
            target,
            """
            ready()
            n = 0
            while True:
                n += 1
                save(n)
                step()
            """,
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3 + delay)
        process.send_signal(signal.SIGTERM)
        returned, _, err = finish(process)
        assert returned == -signal.SIGTERM, err
        newest = max(int(p.stem) for p in target.glob("*.pt"))
        assert_saved(target, newest)
        assert load_checkpoint(target)["n"] == newest


def test_the_users_handlers_are_chained_and_restored(tmp_path):
    process = start(
        tmp_path,
        """
        saver.shutdown()
        calls = []
        def mine(number, frame):
            calls.append(number)
            print("handled", flush=True)
            sys.exit(3)
        signal.signal(signal.SIGTERM, mine)
        saver = AsyncCheckpointSaver(out, optimizers=[optimizer])
        assert signal.getsignal(signal.SIGTERM) is not mine
        other = AsyncCheckpointSaver(out)
        other.shutdown()
        saver.shutdown()
        assert signal.getsignal(signal.SIGTERM) is mine
        saver = AsyncCheckpointSaver(out, optimizers=[optimizer])
        save(1)
        ready()
        idle()
        """,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    returned, out, err = finish(process)
    assert (returned, out) == (3, "handled\n"), err
    assert_saved(tmp_path, 1)


def test_handlers_that_swallow_the_signal_let_training_go_on(tmp_path):
    process = start(
        tmp_path,
        """
        saver.shutdown()
        signal.signal(signal.SIGTERM, lambda *_: None)
        saver = AsyncCheckpointSaver(out, optimizers=[optimizer])
        save(1)
        os.kill(os.getpid(), signal.SIGTERM)
        step()
        save(2)
        saver.shutdown()
        print("done")
        """,
    )
    returned, out, err = finish(process)
    assert (returned, out) == (0, "done\n"), err
    assert_saved(tmp_path, 1, 2)


def test_ignored_signals_stay_ignored(tmp_path):
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code = ignore + PROLOGUE + "save(1)\nready()\ntime.sleep(0.5)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), "keep"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 0
    assert_saved(tmp_path, 1)


def test_a_second_interrupt_does_not_wait(tmp_path):
    process = start(
        tmp_path,
        """
        from penstock.checkpoints import publish
        write = publish.Publisher.publish
        publish.Publisher.publish = lambda self, job: (time.sleep(3), write(self, job))[1]
        save(1)
        try:
            ready()
            idle()
        except KeyboardInterrupt:
            print("out", flush=True)
            idle()
        """,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "out\n"  # before the slow save was done
    process.kill()
    finish(process)


def test_a_forked_child_never_writes(tmp_path):
    process = start(
        tmp_path,
        """
        handle = save(1)
        pid = os.fork()
        if pid == 0:
            from penstock.errors import SaverClosed
            step()  # the hooks of the parent's saver do nothing here
            saver.shutdown()
            try:
                save(99)
            except SaverClosed as error:
                print("refused:", "belongs to process" in str(error), flush=True)
            sys.exit(0)
        os.waitpid(pid, 0)
        step()
        handle.wait()
        """,
    )
    returned, out, err = finish(process)
    assert (returned, out) == (0, "refused: True\n"), err
    assert_saved(tmp_path, 1)
    assert not (tmp_path / "99.pt").exists()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes_while_a_save_is_in_flight(tmp_path, method):
    """A DataLoader starts its workers in the middle of a save."""
    script = tmp_path / "run.py"
    script.write_text(
        PROLOGUE.replace("\nout = ", "\nif __name__ == '__main__':\n  out = ")
        .replace("\nsaver = ", "\nif __name__ == '__main__':\n  saver = ")
        .replace("\nstep()\n", "\n")
        + textwrap.dedent(
            f"""
            from torch.utils.data import DataLoader, TensorDataset
            if __name__ == "__main__":
                step()
                for n in range(2):
                    save(n)
                    loader = DataLoader(TensorDataset(torch.arange(20)), num_workers=1,
                                        multiprocessing_context={method!r})
                    assert sum(len(batch[0]) for batch in loader) == 20
                    step()
                saver.shutdown()
            """
        )
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
    )
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert_saved(tmp_path / "out", 0, 1)


def test_a_failure_at_exit_is_said(tmp_path):
    process = start(tmp_path, "saver.directory\nos.fsync = lambda fd: 1 / 0\nsave(1)")
    returned, _, err = finish(process)
    assert returned == 0
    assert "cannot save" in err


def test_background_errors_do_not_hide_the_users(tmp_path, monkeypatch, caplog):
    def broken(descriptor):
        raise OSError(5, "Input/output error")

    with pytest.raises(ValueError, match="user") as caught:  # noqa: SIM117
        with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
            monkeypatch.setattr(os, "fsync", broken)
            saver.save_async({"x": torch.ones(3)}, "x.pt")
            raise ValueError("user")
    assert "Input/output error" in told(caught.value, caplog)
    with pytest.raises(errors.SaverClosed):
        saver.save_async({"x": 1}, "y.pt")
