"""The words of the command: verbs, their options and their help. What they do is in cli.py."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from penstock import __version__
from penstock.errors import UsageError

_EXIT_CODES = """\
exit codes:
  0 ok            1 a finding, or a bag that failed        2 usage
  3 unusable data 4 storage            5 missing extra     6 save discarded
  70 internal error                    130 interrupted    143 terminated

examples:
  penstock info flight.bag
  penstock convert bags/ dataset --memory 512MB
  penstock doctor dataset"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are UsageErrors, like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs; the chosen one is in `verb`, their names in `verbs`."""
    parser = _Parser(
        prog="penstock",
        description="The data path of robot learning: memory stays bounded, training never "
        "stalls, nothing is lost.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")

    info = _verb(
        verbs,
        "info",
        "show what is in recordings, datasets, checkpoints, rollouts and replay buffers",
        "A recording: topics, types, rates, gaps, sizes, and a guess of what a dataset may hold.\n"
        "A dataset: features, episodes, codecs. A checkpoint or rollout: sizes, codecs, its\n"
        "largest tensors. A replay buffer: keys, codecs, frames.\n"
        "Read from indexes and headers alone; nothing is unpickled, and torch is not needed.",
        "penstock info flight.bag --write-map map.yaml",
    )
    info.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a recording, dataset, checkpoint or rollout, or a folder",
    )
    info.add_argument("--write-map", metavar="FILE", help="write the guess for a bag, to edit it")
    info.add_argument("--salvage", action="store_true", help="read what there is of a damaged bag")
    info.add_argument(
        "--top", type=_natural, default=10, metavar="N", help="largest tensors to list (default 10)"
    )
    info.add_argument("--json", action="store_true", help="one JSON document on stdout")

    doctor = _verb(
        verbs,
        "doctor",
        "verify every byte of datasets, checkpoints, rollouts and replay buffers",
        "A dataset: schemas, counts, timestamps, statistics, and every picture is decoded.\n"
        "A checkpoint or rollout: every block is decoded; bases of differences, the `latest`\n"
        "pointer and left-over temporary files are checked. A replay buffer: every segment.\n"
        "Exit code 1 if anything is wrong.",
        "penstock doctor dataset --json",
    )
    doctor.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a dataset, checkpoint, rollout or replay buffer, or a folder",
    )
    doctor.add_argument(
        "--quick", action="store_true", help="of a dataset, decode only a sample of the pictures"
    )
    doctor.add_argument("--json", action="store_true", help="one JSON document on stdout")

    _add_convert(verbs)

    build = _verb(
        verbs,
        "build",
        "make the LeRobot files of a dataset from what is committed",
        "convert commits every bag as a unit, and builds the LeRobot files from the units at its\n"
        "end, or when it is interrupted. build does so after a kill, a full disk, or when other\n"
        "machines have made the units. What is built already is kept as it is.",
        "penstock build dataset",
    )
    build.add_argument("out", metavar="OUT", help="the folder of the dataset")
    build.add_argument("--json", action="store_true", help="one JSON document on stdout")

    edit = _verb(
        verbs,
        "edit",
        "remove, shorten, split, relabel or merge the episodes of a dataset",
        "EDIT is one of\n"
        "  delete 3 7 10-20     keep 0-46           relabel 'pick a cup' 3 4\n"
        "  trim 5=10:200        split 5=100,150     drop observation.wrench\n"
        "  rename OLD=NEW       reencode h264       merge OTHER... --out OUT\n"
        "  apply marks.yaml     undo\n"
        "Frames that stay are not touched: rows and video packets are copied. The\n"
        "result is made beside the dataset and exchanged in one step; undo puts the\n"
        "last one back.",
        "penstock edit dataset delete 3 7 10-20",
    )
    edit.usage = "penstock edit [options] DATASET EDIT ..."
    edit.add_argument("path", metavar="DATASET", help="a LeRobot dataset of any making")
    edit.add_argument("operation", metavar="EDIT", help="what to do, as above")
    edit.add_argument("words", nargs="*", metavar="...", help="with which episodes or features")
    edit.add_argument("--out", metavar="OUT", help="a new dataset; DATASET stays as it is")
    edit.add_argument(
        "--dry-run", action="store_true", help="say what would be left; write nothing"
    )
    edit.add_argument("--json", action="store_true", help="one JSON document on stdout")

    train = _verb(
        verbs,
        "train",
        "train the navigation policy with PPO, on CPU cores alone",
        "Settings are key=value; --print-config shows all of them, with comments.\n"
        "A run goes to runs/<name>: checkpoints/, rollouts/, metrics.jsonl, tensorboard/.\n"
        "SIGINT and SIGTERM save the state first; resume=runs/<name> goes on, bit for bit.\n"
        "Uses all cores; or: torchrun --nproc-per-node=2 train.py key=value ...",
        "penstock train env.num_envs=1024 env_dyn.num_obstacles=80 max_minutes=60",
    )
    train.usage = "penstock train [--config FILE] [--print-config] [key=value ...]"
    train.add_argument("words", nargs="*", metavar="key=value", help="settings")
    train.add_argument("--config", metavar="FILE", help="a YAML file with some of the settings")
    train.add_argument("--print-config", action="store_true", help="show the settings, and end")

    fly = _verb(
        verbs,
        "evaluate",
        "fly a trained policy across unseen worlds, with and without the shield",
        "Deterministic 48 m crossings in worlds that were not trained on: success, collisions,\n"
        "time-outs and time to goal, with 95 % intervals over worlds, of four pilots: straight\n"
        "ahead and the policy, each alone and with the safety shield. Writes evaluation.json,\n"
        "flights.png and report.html into RUN/evaluation. Settings: shield=on|off,\n"
        "margins=[0.1,0.05], env.num_obstacles, env_dyn.num_obstacles, env.drone, sim.substeps.",
        "penstock evaluate runs/x --worlds 16 shield=off",
    )
    fly.usage = "penstock evaluate [options] RUN [key=value ...]"
    fly.add_argument(
        "words", nargs="*", metavar="RUN key=value", help="a run, or a checkpoint; and settings"
    )
    fly.add_argument(
        "--checkpoint", default="best", metavar="NAME", help="best (default), latest or a file name"
    )
    fly.add_argument(
        "--worlds", type=_natural, default=8, metavar="N", help="unseen worlds (default 8)"
    )
    fly.add_argument(
        "--drones", type=_natural, default=256, metavar="N", help="drones in each (default 256)"
    )
    fly.add_argument(
        "--first-world", type=_natural, default=7, metavar="N", help="its seed (default 7)"
    )
    fly.add_argument("--out", metavar="DIR", help="where to write (default RUN/evaluation)")
    fly.add_argument("--rerun", metavar="FILE", help="also write the flights for the rerun viewer")
    fly.add_argument("--json", action="store_true", help="one JSON document on stdout")

    policy = _verb(
        verbs,
        "export-policy",
        "write a trained policy as ONNX, to fly it without torch",
        "The file takes observations and gives the mean action; it is run before it appears, and\n"
        "must give what torch gives within 1e-5. OUT.pt2 writes torch.export's format instead.\n"
        "penstock.nav.Navigator flies OUT.onnx with numpy and onnxruntime, behind the shield.",
        "penstock export-policy runs/x policy.onnx",
    )
    policy.add_argument("run", metavar="RUN", help="a run, or a checkpoint")
    policy.add_argument("out", metavar="OUT", help="the file: .onnx or .pt2")
    policy.add_argument(
        "--checkpoint", default="best", metavar="NAME", help="best (default), latest or a file name"
    )
    policy.add_argument("--json", action="store_true", help="one JSON document on stdout")

    _add_export(verbs)

    advise = _verb(
        verbs,
        "advise",
        "measure on your own data whether to compress it, and with what",
        "Takes a sample of a recording, dataset, rollouts, checkpoint, replay buffer, .npz or\n"
        ".safetensors file; measures ratio and speed of each codec, key by key, on this machine;\n"
        "then answers for the limits you state: A don't compress, B compress what is stored,\n"
        "C compress in memory, too; with the break-even point, and the settings to type.",
        "penstock advise runs/x/rollouts --memory 2GB --bandwidth 1Gb/s",
    )
    advise.add_argument("path", metavar="PATH", help="what to look at")
    advise.add_argument("--memory", metavar="SIZE", help="memory for the data, such as 2GB")
    advise.add_argument(
        "--bandwidth", metavar="RATE", help="of the link or disk it crosses: 1Gb/s, 125MB/s"
    )
    advise.add_argument(
        "--reuse", type=_natural, metavar="N", help="how often each piece of it is read"
    )
    advise.add_argument("--device-memory", metavar="SIZE", help="memory of the GPU for it")
    advise.add_argument("--json", action="store_true", help="one JSON document on stdout")

    demo = _verb(
        verbs,
        "demo",
        "the whole tour in under five minutes, with a report",
        "Records a sample bag, converts and checks it; trains the navigation policy, stops it\n"
        "half-way, resumes, flies it across unseen worlds; reads its rollouts in part, exports\n"
        "them, fills a replay buffer, asks for advice; damages a checkpoint, and recovers.\n"
        "Every command is printed before it is run, and every figure is measured in that run.",
        "penstock demo --out demo",
    )
    demo.add_argument("--out", default="demo", metavar="DIR", help="folder to make (default demo)")

    parser.set_defaults(verbs=list(verbs.choices))
    return parser


def _add_export(verbs: Any) -> None:
    export = _verb(
        verbs,
        "export",
        "write rollouts as a LeRobot dataset",
        "Each environment's steps, cut where an episode ended, become one episode: observations,\n"
        "action, next.reward, next.done. Values are exact. After a crash, --resume goes on.",
        "penstock export runs/x/rollouts flights --fps 10",
    )
    export.add_argument("rollouts", metavar="ROLLOUTS", help="a folder, one file, or a run")
    export.add_argument("out", metavar="OUT", help="the dataset")
    export.add_argument(
        "--fps", type=_natural, default=10, metavar="N", help="steps per second (default 10)"
    )
    export.add_argument("--task", default="navigate", metavar="TEXT", help="what was to be done")
    export.add_argument("--keys", metavar="A,B", help="only these (default all)")
    export.add_argument(
        "--envs", type=_natural, metavar="N", help="only the first N environments of each rollout"
    )
    export.add_argument(
        "--version",
        default="v3.0",
        metavar="NAME",
        help="of the dataset format: v3.0 (default) or v2.1",
    )
    mode = export.add_mutually_exclusive_group()
    mode.add_argument("--resume", action="store_true", help="go on; what is committed is skipped")
    mode.add_argument("--overwrite", action="store_true", help="replace a dataset that exists")
    export.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _add_convert(verbs: Any) -> None:
    convert = _verb(
        verbs,
        "convert",
        "turn ROS bags of any size into a LeRobot dataset",
        "Bags are .bag, .db3, .mcap, ROS 2 folders, or folders of them; the last path is the\n"
        "dataset. Every bag is committed when it is done: after a crash, --resume goes on.\n"
        "Without --map or --config the mapping is guessed from the first bag (see penstock info).\n"
        "With --config both paths may be left out: the settings name them.",
        "penstock convert bags/ dataset --config KuavoRosbag2Lerobot.yaml dataset.train_hz=20",
    )
    convert.usage = "penstock convert [options] BAGS... OUT [key=value ...]"
    convert.add_argument(
        "words", nargs="*", metavar="BAGS OUT key=value", help="bags, the dataset, and settings"
    )
    which = convert.add_mutually_exclusive_group()
    which.add_argument("--map", metavar="FILE", help="a mapping of topics to features (YAML)")
    which.add_argument("--config", metavar="FILE", help="a Kuavo settings file (Hydra YAML)")
    convert.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting: features.action.topic=/cmd",
    )
    convert.add_argument("--fps", type=_natural, metavar="N", help="frames per second")
    convert.add_argument(
        "--codec", metavar="NAME", help="h264 (default), av1, copy (as recorded) or png"
    )
    convert.add_argument("--depth-codec", metavar="NAME", help="depth12 (default) or grey8")
    convert.add_argument("--clock", metavar="NAME", help="bag (default) or header")
    convert.add_argument("--task", metavar="TEXT", help="what the robot does")
    convert.add_argument(
        "--version",
        metavar="NAME",
        help="of the dataset format: v3.0 (default) or v2.1",
    )
    convert.add_argument(
        "--memory", default="512MB", metavar="SIZE", help="memory to stay below (default 512MB)"
    )
    convert.add_argument(
        "--workers", type=_natural, default=1, metavar="N", help="bags at a time (default 1)"
    )
    convert.add_argument(
        "--ray",
        nargs="?",
        const=True,
        default=False,
        metavar="ADDRESS",
        help="on a Ray cluster: the one that is there, or at an address, or one of this machine",
    )
    convert.add_argument(
        "--shard",
        metavar="I/N",
        help="only one of N parts, from 0/N on; when all are done, penstock build OUT",
    )
    mode = convert.add_mutually_exclusive_group()
    mode.add_argument("--resume", action="store_true", help="go on; what is committed is skipped")
    mode.add_argument("--append", action="store_true", help="add to a dataset that exists")
    mode.add_argument("--overwrite", action="store_true", help="replace a dataset that exists")
    convert.add_argument(
        "--salvage", action="store_true", help="read what there is of damaged bags"
    )
    convert.add_argument(
        "--dry-run",
        action="store_true",
        help="predict frames, size, time and memory; write nothing",
    )
    convert.add_argument("--no-check", action="store_true", help="do not verify the dataset")
    convert.add_argument("--report", metavar="FILE", help="the HTML report (default OUT.html)")
    convert.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _verb(
    verbs: Any,
    name: str,
    summary: str,
    description: str,
    example: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback on an error")
    parser.set_defaults(verb=name)
    return parser


def _natural(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count")
    return number
