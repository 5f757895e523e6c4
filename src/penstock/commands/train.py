"""`penstock train`: train the navigation policy."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.base import Command, Outcome
from penstock.errors import MissingExtra, UsageError
from penstock.ui.progress import choose_mode

if TYPE_CHECKING:
    from penstock.nav.train import Result


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run, bit for bit")
    parser.add_argument("--config", metavar="FILE", help="a YAML file with some of the settings")
    parser.add_argument("--print-config", action="store_true", help="show the settings, and end")


def _run(arguments: argparse.Namespace) -> Outcome:
    words = list(arguments.words)
    if arguments.resume is not None:
        words.append(f"resume={arguments.resume}")
    if arguments.print_config:
        from penstock.nav.config import help_text, load_config

        config = load_config(words, arguments.config)
        shown = config.to_yaml() if words or arguments.config else help_text()
        return Outcome(shown.rstrip("\n"), dict(config.raw))
    unknown = next((word for word in words if "=" not in word), None)
    if unknown is not None:
        raise UsageError(f"{unknown!r} is not a setting; give key=value, such as env.num_envs=256")
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", "rl")
    # Before torch is imported: nobody should look at an empty screen.
    if choose_mode(None) != "quiet" and os.environ.get("RANK", "0") == "0":
        sys.stderr.write("penstock: loading torch; the first start compiles for half a minute\n")
        sys.stderr.flush()
    from penstock.nav.config import load_config

    load_config(words, arguments.config)  # a mistake is said before torchrl is imported
    from penstock.nav.distributed import Stop
    from penstock.nav.train import start

    with Stop() as stop:
        result = start(words, arguments.config, stop)
    leads = bool(result.summary)  # process 0 speaks for all
    if leads and result.stopped:
        go_on = f"penstock train --resume {result.folder}"
        sys.stderr.write(f"penstock: stopped, the state is saved: {go_on}\n")
    code = 128 + (stop.signal or signal.SIGTERM) if result.stopped else 0
    return Outcome(_text(result) if leads else "", _to_json(result), code, answer=False)


def _text(result: Result) -> str:
    rate = result.frames / max(result.seconds, 1e-9)
    lines = [
        result.summary,
        "",
        f"{result.iteration} iterations, {result.frames / 1e6:.2f} M frames in "
        f"{result.seconds / 60:.1f} min ({rate:,.0f} frames/s)",
    ]
    if result.nothing_to_do is not None:
        lines = [f"nothing to do: {result.nothing_to_do}"]
    if result.validation is not None:
        lines.append(f"best on validation maps: {result.validation:.1%} of crossings")
    if not result.stopped:
        lines.append(f"next: penstock evaluate {result.folder}")
    return "\n".join(lines)


def _to_json(result: Result) -> dict[str, Any]:
    found = {name: str(v) if isinstance(v, Path) else v for name, v in vars(result).items()}
    found.pop("summary")
    return found


COMMAND = Command(
    "train the navigation policy with PPO, on CPU cores alone",
    "Settings are key=value; --print-config shows all of them, with comments. A run goes to "
    "runs/<name>: checkpoints/, rollouts/, metrics.jsonl, tensorboard/. SIGINT and SIGTERM save "
    "the state first; --resume goes on.\n\n"
    "Uses all cores; or: torchrun --nproc-per-node=2 train.py key=value ...",
    "penstock train name=x env.num_envs=1024 max_minutes=60\n"
    "  penstock train --resume runs/x max_minutes=120",
    _add_arguments,
    _run,
    usage="penstock train [options] [key=value ...]",
)
