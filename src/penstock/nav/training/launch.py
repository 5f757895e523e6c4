"""Starting a training: alone, under torchrun, or with a process per core.

Processes that are started here ignore signals: process 0, the one the user sees, is asked to stop,
and tells them at the end of an iteration. If one of them dies, the others notice in their next
exchange and end, too.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from penstock.errors import PeerLost, PenstockError, UsageError
from penstock.nav.training.config import Config, from_raw, load_config
from penstock.nav.training.group import Group
from penstock.nav.training.loop import Result, train
from penstock.nav.training.runs import Run, load_state, open_run
from penstock.nav.training.stopping import Stop

_GIVE_UP_S = 10.0


def start(words: Sequence[str] = (), file: str | None = None, stop: Stop | None = None) -> Result:
    """Train as the words say, in as many processes as they say.

    Args:
        words: key=value.
        file: A YAML file with some of the keys.
        stop: Asked whether to stop.

    Raises:
        PenstockError: The settings, the state or the disk make it impossible, or a process died.
    """
    config, run, state = open_run(load_config(words, file), words)
    if "WORLD_SIZE" in os.environ:  # torchrun, or a test, has started us
        with Group.from_environment(config["device"]) as group:
            return train(config, run, state, group, stop)
    if config.processes == 1:
        return train(config, run, state, None, stop)
    return _spawn_workers(config, run, state, stop)


def _spawn_workers(
    config: Config, run: Run, state: dict[str, Any] | None, stop: Stop | None
) -> Result:
    """Run process 0 here, and start the others."""
    context = multiprocessing.get_context("spawn")
    meeting = Path(tempfile.gettempdir()) / f"penstock-{os.getpid()}-{secrets.token_hex(8)}"
    address = f"file://{meeting}"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they all are on this machine
    others: list[BaseProcess] = [
        context.Process(
            target=_worker_main,
            args=(dict(config.raw), dict(config.plugin_arguments), str(run.folder), rank, address),
            name=f"penstock-train-{rank}",
        )
        for rank in range(1, config.processes)
    ]
    try:
        for process in others:
            process.start()
        with Group(0, config.processes, address, config["device"]) as group:
            return train(config, run, state, group, stop)
    except PeerLost as error:
        _raise_named(error, others)
        raise
    finally:
        for process in others:
            process.join(_GIVE_UP_S)
            if process.is_alive():
                process.kill()
                process.join()
        with suppress(OSError):
            meeting.unlink()


def _worker_main(
    raw: dict[str, Any], arguments: dict[str, Any], folder: str, rank: int, address: str
) -> None:
    """The life of a process that was started here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["PENSTOCK_PROGRESS"] = "quiet"
    config, run = from_raw(raw, arguments), Run(Path(folder))
    try:
        with Group(rank, config.processes, address, config["device"]) as group:
            state = None if config["resume"] is None else load_state(run)
            train(config, run, state, group)
    except (PeerLost, UsageError) as error:  # process 0 says it
        sys.exit(error.exit_code)
    except PenstockError as error:
        sys.stderr.write(f"penstock: process {rank}: {error}\n")
        sys.exit(error.exit_code)


def _raise_named(error: PeerLost, others: Sequence[BaseProcess]) -> None:
    """If a process died, say which and how: that is the cause, not the lost connection."""
    for rank, process in enumerate(others, 1):
        process.join(1.0)
        if process.exitcode not in (None, 0):
            raise PenstockError(
                f"process {rank} of the training ended with code {process.exitcode}; go on with "
                "resume=…"
            ) from error
