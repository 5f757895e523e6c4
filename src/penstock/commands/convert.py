"""`penstock convert`: recordings to a LeRobot dataset."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.base import Command, Outcome, add_format, natural
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.conversion.dry_run import Prediction
    from penstock.conversion.report import Report
    from penstock.conversion.request import Request

_SETTING = re.compile(r"[+]{0,2}[A-Za-z_][\w.-]*=")


def run(arguments: argparse.Namespace) -> Report | Prediction:
    """Carry out what the words ask for."""
    # No large matrix is multiplied here: the threads that numpy starts for it cost, and wait.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from penstock.conversion.dry_run import predict
    from penstock.conversion.run import run_request
    from penstock.core.files import sweep

    page = Path(arguments.report) if arguments.report else None
    if page is not None and not page.absolute().parent.is_dir():
        raise UsageError(f"--report {page}: the folder does not exist; create it first")
    request = _request(arguments)
    if arguments.dry_run:
        return predict(request)
    report = run_request(request)
    if arguments.card and request.shard is None:
        from penstock.inspect.card import CARD, PICTURE, write_card

        write_card(request.out)
        if request.remote is not None:
            request.remote.push(CARD, PICTURE)
    if request.shard is not None and page is None:
        return report  # a page per shard would be a hundred pages
    beside = request.target.name if request.remote is not None else request.out.absolute()
    page = page or Path(f"{beside}.html")
    sweep(page.absolute().parent)  # of a command that was killed while it wrote its page
    report.write_page(page, arguments.typed)
    return report


def _request(arguments: argparse.Namespace) -> Request:
    from penstock.conversion.request import make_request, robot_words
    from penstock.conversion.robots import load_config

    settings = [w for w in arguments.words if _SETTING.match(w) and not Path(w).exists()]
    paths: list[Any] = [word for word in arguments.words if word not in settings]
    for word in arguments.set:
        if not _SETTING.match(word):
            raise UsageError(f"--set {word!r}: write key=value, such as features.action.topic=/cmd")
    settings += arguments.set
    bags, out = paths[:-1], paths[-1] if paths else None
    if arguments.config:
        named = load_config(Path(arguments.config), robot_words(settings))
        if len(paths) == 1 and named.bags is not None:
            bags, out = [named.bags], paths[0]
        elif not paths:
            bags, out = [named.bags] if named.bags else [], named.out
    if not bags or out is None:
        raise UsageError("convert needs bags and a dataset: penstock convert BAGS OUT")
    if Path(out).is_file():
        raise UsageError(f"{out} is a file, and the last path is the dataset: give a folder")
    return make_request(
        bags,
        out,
        arguments.map,
        config=arguments.config,
        overrides=settings,
        memory=arguments.memory,
        workers=arguments.workers,
        resume=arguments.resume,
        append=arguments.append,
        overwrite=arguments.overwrite,
        salvage=arguments.salvage,
        version=arguments.format,
        fps=arguments.fps,
        codec=arguments.codec,
        depth_codec=arguments.depth_codec,
        clock=arguments.clock,
        task=arguments.task,
        check=not arguments.no_check,
        shard=arguments.shard,
        ray=arguments.ray,
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="BAGS OUT", help="files, folders or s3:// URLs; the dataset"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--map", metavar="FILE", help="a mapping of topics to features (YAML)")
    which.add_argument("--config", metavar="FILE", help="a Kuavo settings file (Hydra YAML)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one entry of the mapping: features.action.topic=/cmd",
    )
    parser.add_argument("--fps", type=natural, metavar="N", help="frames per second")
    parser.add_argument(
        "--codec", metavar="NAME", help="h264 (default), av1, copy (as recorded) or png"
    )
    parser.add_argument("--depth-codec", metavar="NAME", help="depth12 (default) or grey8")
    parser.add_argument("--clock", metavar="NAME", help="bag (default) or header")
    parser.add_argument("--task", metavar="TEXT", help="what the robot does")
    add_format(parser)
    parser.add_argument(
        "--memory", default="512MB", metavar="SIZE", help="memory to stay below (default 512MB)"
    )
    parser.add_argument(
        "--workers", type=natural, default=1, metavar="N", help="bags at a time (default 1)"
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const=True,
        default=False,
        metavar="ADDRESS",
        help="on a Ray cluster, or on one of this machine",
    )
    parser.add_argument(
        "--shard", metavar="I/N", help="one of N parts, from 0/N on; then penstock build"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--resume", action="store_true", help="go on; what is committed is skipped")
    mode.add_argument("--append", action="store_true", help="add to a dataset that exists")
    mode.add_argument("--overwrite", action="store_true", help="replace a dataset that exists")
    parser.add_argument("--salvage", action="store_true", help="read what there is of damaged bags")
    parser.add_argument(
        "--dry-run", action="store_true", help="predict size, time and memory; write nothing"
    )
    parser.add_argument("--no-check", action="store_true", help="do not verify the dataset")
    parser.add_argument("--card", action="store_true", help="write a dataset card (README.md)")
    parser.add_argument("--report", metavar="FILE", help="the HTML report (default OUT.html)")


def _run(arguments: argparse.Namespace) -> Outcome:
    report = run(arguments)
    text = report.text(arguments.verbose)
    return Outcome(text, report.to_json(), 0 if report.ok else 1, answer=False)


COMMAND = Command(
    "turn recordings of any size into a LeRobot dataset",
    "Recordings are .bag, .db3, .mcap, ROS 2 folders, or folders of them; the last path is the "
    "dataset. Every bag is committed when it is done: after a crash, --resume goes on. Without "
    "--map or --config the mapping is guessed from what the bags share (see penstock info). With "
    "--config, Kuavo settings are key=value, and name both paths if none is given.",
    "penstock convert bags/ dataset --memory 512MB\n"
    "  penstock convert bags/ out --config Kuavo.yaml dataset.train_hz=20",
    _add_arguments,
    _run,
    usage="penstock convert [options] BAGS... OUT [key=value ...]",
    interruptible=True,
    objects=True,
)
