"""Save at the strangest moments of a process, and look at what is on disk when it has ended.

Usage: exit_campaign.py FOLDER. Prints one JSON line. Each case is a child forked from this process
(torch is imported once) that ends as any program does, so with all of Python's own exit.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver
from penstock.errors import PenstockError

LIMIT_S = 300


class Child:
    """What a case works with: a saver, a network, and a way to say that a save was refused."""

    def __init__(self, folder, lazy):
        self.net = torch.nn.Linear(400, 400)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)
        options = {"optimizers": self.optimizer, "lazy": True} if lazy else {}
        self.saver = AsyncCheckpointSaver(folder, max_staging_bytes=10**9, **options)

    def save(self, n):
        with torch.no_grad():
            self.saver.barrier()
            self.net.weight.fill_(n)
        return self.save_as(n, self.net.weight)

    def save_as(self, n, weight):
        try:
            return self.saver.save_async({"n": n, "w": weight}, f"{n}.pt")
        except PenstockError as error:
            os.write(2, f"refused {n}: {error}\n".encode())


def in_atexit(child):
    atexit.register(child.save, 1)


def in_atexit_and_wait(child):
    atexit.register(lambda: child.save(1).wait())


def in_atexit_after_earlier_ones(child):
    child.save(1)
    atexit.register(child.saver.shutdown)
    atexit.register(child.save, 2)
    atexit.register(child.save, 3)


def before_threads_are_joined(child):
    threading._register_atexit(child.save, 1)


def in_del_at_the_end(child):
    class Late:
        def __del__(self):
            child.save(1)

    sys.modules["late"] = Late()


def in_a_signal_handler(child):
    signal.signal(signal.SIGUSR1, lambda *_: child.save(2))
    child.save(1)
    os.kill(os.getpid(), signal.SIGUSR1)


def in_a_signal_handler_during_a_save(child):
    def handler(*_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        child.save_as(1, torch.ones(300))

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.002)
    for n in range(2, 12):
        child.save(n)
    while signal.getitimer(signal.ITIMER_REAL)[0]:
        time.sleep(0.001)


def in_another_thread(child):
    thread = threading.Thread(target=child.save, args=(1,))
    thread.start()


def in_a_thread_that_outlives_the_main_one(child):
    def later():
        threading.main_thread().join()
        child.save(1)
        child.save(2)

    threading.Thread(target=later).start()


def without_threads(child):
    threading.stack_size(1 << 46)  # no thread of this size can be had
    child.save(1)
    child.save(2)
    assert child.saver.wait(LIMIT_S)
    threading.stack_size(0)
    child.save(3)
    child.saver.shutdown()


def with_every_other_thread(child):
    start, turn = threading.Thread.start, [0]

    def moody(thread):
        turn[0] += 1
        if turn[0] % 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = moody
    for n in range(1, 5):
        child.save(n)
        child.saver.wait()
    child.saver.shutdown()


def with_a_log_that_raises(child):
    import logging

    class Broken(logging.Handler):
        def emit(self, record):
            raise ValueError("a broken handler")

    logging.getLogger("penstock").addHandler(Broken())
    sync, os.fsync = os.fsync, lambda descriptor: 1 / 0
    handle = child.save(99)
    while not handle.done():
        time.sleep(0.001)
    os.fsync = sync
    try:
        handle.wait()
    except PenstockError as error:
        os.write(2, f"refused 99: {error}\n".encode())
    child.save(1)


def closed_while_it_waits_for_room(child):
    """A user's signal handler shuts the saver down while `save_async` waits for room."""

    def handler(*_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        child.saver.shutdown()

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    for n in range(1, 30):
        child.save(n)
    while signal.getitimer(signal.ITIMER_REAL)[0]:  # a fast disk: after the handlers it would kill
        time.sleep(0.001)


def forked_twice(child):
    child.save(1)
    pid = os.fork()
    if pid == 0:
        child.save(99)  # refused: the saver belongs to the parent
        return
    os.waitpid(pid, 0)
    child.save(2)


CASES = {
    in_atexit: [1],
    in_atexit_and_wait: [1],
    in_atexit_after_earlier_ones: [1, 2, 3],
    before_threads_are_joined: [1],
    in_del_at_the_end: [1],
    in_a_signal_handler: [1, 2],
    in_a_signal_handler_during_a_save: range(1, 12),
    in_another_thread: [1],
    in_a_thread_that_outlives_the_main_one: [1, 2],
    without_threads: [1, 2, 3],
    with_every_other_thread: [1, 2, 3, 4],
    with_a_log_that_raises: [1, 99],
    closed_while_it_waits_for_room: range(1, 30),
    forked_twice: [1, 2, 99],
}


def run(case, folder, lazy):
    """Return the pid of the child; in the child, None: it goes on to the end of the program."""
    pid = os.fork()
    if pid:
        return pid
    complaints = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(complaints, 2)
    case(Child(folder, lazy))
    return None


def ended(pid):
    """Wait for a child, within a limit; return its status, None if it had to be killed."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main(root):
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports much
    wrong = []
    took_s = {}
    for lazy in (False, True):
        for case, numbers in CASES.items():
            which = f"{case.__name__} {lazy=}"
            folder = root / which
            folder.mkdir()
            pid = run(case, folder, lazy)
            if pid is None:
                return
            begin = time.monotonic()
            status = ended(pid)
            took_s[which] = round(time.monotonic() - begin, 2)
            said = (folder / "stderr").read_text()
            if status != 0:
                wrong.append(f"{which}: status {status}: {said}")
            if "Traceback" in said:
                wrong.append(f"{which}: {said}")
            for n in numbers:
                try:
                    loaded = load_checkpoint(folder / f"{n}.pt")
                    if loaded["n"] != n or not (loaded["w"] == n).all():
                        wrong.append(f"{which}: {n} holds {loaded['n']}")
                except PenstockError as error:
                    if f"refused {n}: " not in said:
                        wrong.append(f"{which}: {n} is lost: {error}: {said}")
    sys.stdout.write(json.dumps({"cases": took_s, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
