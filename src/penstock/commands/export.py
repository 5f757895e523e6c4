"""`penstock export`: rollouts as a LeRobot dataset, a policy as ONNX."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.commands.base import Command, Outcome, add_format, natural, note
from penstock.errors import UsageError

_POLICY_ENDINGS = (".onnx", ".pt2", ".pt", ".pth")  # the last two are refused there, by name
_OF_DATASETS = ("fps", "task", "keys", "envs", "format", "resume", "overwrite")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN", help="a run, its rollouts, or a checkpoint")
    parser.add_argument("out", metavar="OUT", help="a new dataset; or a file .onnx or .pt2")
    parser.add_argument("--fps", type=natural, metavar="N", help="steps per second (default 10)")
    parser.add_argument("--task", metavar="TEXT", help="what was to be done (default navigate)")
    parser.add_argument("--keys", metavar="A,B", help="only these (default all)")
    parser.add_argument(
        "--envs", type=natural, metavar="N", help="only the first N environments of each rollout"
    )
    add_format(parser)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--resume", action="store_true", help="go on; what is committed is skipped")
    mode.add_argument("--overwrite", action="store_true", help="replace a dataset that exists")
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="of a policy: best (default), latest or a file name"
    )


def _run(arguments: argparse.Namespace) -> Outcome:
    if Path(arguments.out).suffix in _POLICY_ENDINGS:
        return _export_policy(arguments)
    if arguments.checkpoint is not None:
        raise UsageError("--checkpoint is for a policy: OUT must end with .onnx or .pt2")
    return _export_dataset(arguments)


def _export_policy(arguments: argparse.Namespace) -> Outcome:
    wrong = next((name for name in _OF_DATASETS if getattr(arguments, name)), None)
    if wrong is not None:
        raise UsageError(f"--{wrong} is for a dataset, and {arguments.out} is a policy")
    from penstock.nav.export import export_policy
    from penstock.ui.report import wrapped

    name = arguments.checkpoint or "best"
    result = export_policy(arguments.source, arguments.out, checkpoint=name)
    return Outcome(wrapped(result.text()), result.to_json(), answer=False)


def _export_dataset(arguments: argparse.Namespace) -> Outcome:
    from penstock.inspect.run import rate_note
    from penstock.rollouts.lerobot import export

    report = export(
        arguments.source,
        arguments.out,
        keys=arguments.keys.split(",") if arguments.keys else None,
        envs=arguments.envs,
        fps=10 if arguments.fps is None else arguments.fps,
        task=arguments.task or "navigate",
        version=arguments.format or "v3.0",
        mode="resume" if arguments.resume else "overwrite" if arguments.overwrite else "create",
    )
    problem = rate_note(Path(arguments.source).absolute(), report.fps)
    if problem is not None:
        note(problem)
    return Outcome(report.text(), report.to_json(), answer=False)


COMMAND = Command(
    "write rollouts as a LeRobot dataset, a policy as ONNX",
    "Rollouts: each environment's steps, cut where an episode ended, become one episode: "
    "observations, action, next.reward, next.done. Values are exact. After a crash, --resume goes "
    "on.\n\n"
    "A policy: the file takes observations and gives the mean action; it is run before it appears, "
    "and must give what torch gives within 1e-5. penstock.nav.Navigator flies it with numpy and "
    "onnxruntime, behind the shield.",
    "penstock export runs/x flights\n  penstock export runs/x policy.onnx",
    _add_arguments,
    _run,
    interruptible=True,
)
