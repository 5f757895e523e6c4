"""`penstock train`: parse its words, train, and say how it went."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from penstock.errors import UsageError
from penstock.ui.progress import choose_mode


def run(arguments: argparse.Namespace) -> int:
    """Train; return the exit code."""
    # Before torch is imported: nobody should look at an empty screen.
    if (
        not arguments.print_config
        and choose_mode(None) != "quiet"
        and os.environ.get("RANK", "0") == "0"
    ):
        sys.stderr.write("penstock: loading torch; the first start compiles for half a minute\n")
        sys.stderr.flush()
    from penstock.nav.training.config import help_text, load_config

    if arguments.print_config:
        if arguments.words or arguments.config:
            sys.stdout.write(load_config(arguments.words, arguments.config).to_yaml())
        else:
            sys.stdout.write(help_text())
        return 0
    unknown = next((word for word in arguments.words if "=" not in word), None)
    if unknown is not None:
        raise UsageError(f"{unknown!r} is not a setting; give key=value, such as env.num_envs=256")
    load_config(arguments.words, arguments.config)  # a mistake is said before torchrl is imported
    from penstock.nav.training.launch import start
    from penstock.nav.training.stopping import Stop

    with Stop() as stop:
        result = start(arguments.words, arguments.config, stop)
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
    if result.summary:  # process 0
        sys.stdout.write("\n".join(lines) + "\n")
    if not result.stopped:
        return 0
    if result.summary:
        sys.stderr.write(
            f"penstock: stopped, the state is saved: penstock train resume={result.folder}\n"
        )
    return 128 + (stop.signal or signal.SIGTERM)
