"""The words of `penstock convert`, turned into one call."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from penstock.conversion import kuavo
from penstock.conversion.dry_run import Prediction, predict
from penstock.conversion.report import Report
from penstock.conversion.request import Request, make_request
from penstock.conversion.run import carry_out
from penstock.core.files import sweep
from penstock.errors import UsageError

_SETTING = re.compile(r"[+]{0,2}[A-Za-z_][\w.-]*=")


def run(arguments: argparse.Namespace) -> Report | Prediction:
    """Carry out what the words ask for."""
    request = _request(arguments)
    if arguments.dry_run:
        return predict(request)
    report = carry_out(request)
    if request.shard is not None and not arguments.report:
        return report  # a page per shard would be a hundred pages
    page = Path(arguments.report or f"{request.out.absolute()}.html")
    sweep(page.absolute().parent)  # of a command that was killed while it wrote its page
    report.write_page(page)
    return report


def _request(arguments: argparse.Namespace) -> Request:
    settings = [w for w in arguments.words if _SETTING.match(w) and not Path(w).exists()]
    paths: list[Any] = [word for word in arguments.words if word not in settings]
    for word in arguments.set:
        if not _SETTING.match(word):
            raise UsageError(f"--set {word!r}: write key=value, such as features.action.topic=/cmd")
    settings += arguments.set
    bags, out = paths[:-1], paths[-1] if paths else None
    if arguments.config:
        named = kuavo.load_kuavo(Path(arguments.config), kuavo.own_settings(settings))
        if len(paths) == 1 and named.bags is not None:
            bags, out = [named.bags], paths[0]
        elif not paths:
            bags, out = [named.bags] if named.bags else [], named.out
    if not bags or out is None:
        raise UsageError("convert needs bags and a dataset: penstock convert BAGS OUT")
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
        version=arguments.version,
        fps=arguments.fps,
        codec=arguments.codec,
        depth_codec=arguments.depth_codec,
        clock=arguments.clock,
        task=arguments.task,
        check=not arguments.no_check,
        shard=arguments.shard,
        ray=arguments.ray,
    )
