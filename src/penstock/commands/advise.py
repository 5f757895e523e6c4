"""`penstock advise`: measure whether to compress."""

from __future__ import annotations

import argparse

from penstock.commands.base import Command, Outcome, natural


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="what to look at")
    parser.add_argument("--memory", metavar="SIZE", help="memory for the data, such as 2GB")
    parser.add_argument(
        "--bandwidth", metavar="RATE", help="of the link or disk it crosses: 1Gb/s, 125MB/s"
    )
    parser.add_argument(
        "--reuse", type=natural, metavar="N", help="how often each piece of it is read"
    )
    parser.add_argument("--device-memory", metavar="SIZE", help="memory of the GPU for it")


def _run(arguments: argparse.Namespace) -> Outcome:
    from penstock.advisor import advise

    advice = advise(
        arguments.path,
        memory=arguments.memory,
        bandwidth=arguments.bandwidth,
        reuse=arguments.reuse,
        device_memory=arguments.device_memory,
    )
    return Outcome(advice.text(), advice.to_json())


COMMAND = Command(
    "measure on your own data whether to compress it",
    "Takes a sample of a recording, dataset, rollouts, checkpoint, replay buffer, .npz or "
    ".safetensors file; measures ratio and speed of each codec, key by key, on this machine; then "
    "answers for the limits you state:\n"
    "  A  don't compress\n"
    "  B  compress what is stored\n"
    "  C  compress in memory, too\n"
    "with the break-even point, and the settings to type.",
    "penstock advise runs/x/rollouts --memory 2GB --bandwidth 1Gb/s",
    _add_arguments,
    _run,
)
