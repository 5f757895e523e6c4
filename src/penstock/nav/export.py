"""A trained policy as a file for others: ONNX, or torch.export's .pt2.

The file takes observations as the simulator gives them, [n, ...] float32 for any n, and answers
with the mean action, [n, 3] from 0 to 1 in the goal frame. It appears only after it was run and
gave what torch gives.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.files import publish_bytes
from penstock.errors import DataError, MissingExtra, UsageError
from penstock.nav.evaluation.pilot import Navigator
from penstock.nav.navigator import INPUTS, NOTES, open_session, runner
from penstock.nav.networks import Policy
from penstock.nav.simulation.task import Obstacle, Settings, State

TOLERANCE = 1e-5
_CHECKED = 1000  # observations that file and torch must agree on
_SUFFIXES = (".onnx", ".pt2")

Seen = dict[str, Any]


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    bytes: int
    checkpoint: Path
    """Where the policy came from."""
    difference: float
    """Largest difference of an action between the file and torch."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in vars(self).items()}

    def text(self) -> str:
        """Return the summary for the terminal."""
        return (
            f"{self.path}: {self.bytes} bytes, from {self.checkpoint}; {_CHECKED} actions equal "
            f"torch's within {self.difference:.1e}"
        )


class MeanAction(nn.Module):
    """The mean action of a policy, as a function of tensors alone."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, *seen: Tensor) -> Tensor:
        """Return [n, 3] in (0, 1) for the observations of `INPUTS`, in that order."""
        rows = self.policy.encoder.prepare(dict(zip(INPUTS, seen, strict=True)))
        alpha, beta, _ = self.policy.actor_critic(rows)
        return alpha / (alpha + beta)


def export_policy(
    path: str | os.PathLike[str], out: str | os.PathLike[str], *, checkpoint: str = "best"
) -> Exported:
    """Write the policy of a run as a file that runs without penstock.

    Args:
        path: A run or a checkpoint: as for `Navigator.load`, as is the name of the checkpoint.
        out: The file: .onnx, or .pt2 for torch.export. One that exists is replaced.
        checkpoint: Its name.

    Raises:
        UsageError: There is no such run, or the file has another ending.
        DataError: The checkpoint is damaged, or the file would not give what torch gives.
        MissingExtra: onnx, onnxruntime or onnxscript is not installed.
    """
    target = Path(out)
    if target.suffix not in _SUFFIXES:
        raise UsageError(f"{target}: give a name that ends with {' or '.join(_SUFFIXES)}")
    if not target.parent.is_dir():  # before the minute that it takes
        raise UsageError(f"{target}: there is no folder {target.parent}; create it first")
    navigator = Navigator.load(path, checkpoint, "off")
    settings = navigator.settings
    notes = json.dumps(navigator.metadata)
    module = MeanAction(navigator.policy).eval()
    write = _onnx if target.suffix == ".onnx" else _torch_export
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch's exporters about themselves
        data, decide = write(module, settings, notes)
        worst = _difference(module, decide, settings)
    if not worst <= TOLERANCE:
        raise DataError(
            f"{target} would not give what torch gives: an action differs by {worst:.1e}; nothing "
            "was written"
        )
    publish_bytes(target, data)
    assert navigator.path is not None
    return Exported(target, len(data), navigator.path, worst)


def observations(settings: Settings, count: int, seed: int = 0) -> Seen:
    """Return made-up observations that reach every part of a policy: [count, ...] float32."""
    rng = np.random.default_rng(seed)
    seen = {name: rng.normal(size=(count, *settings.shapes()[name])) for name in INPUTS}
    seen["state"][:, State.DISTANCE] = rng.uniform(0.0, 48.0, count)
    hit = rng.random(seen["lidar"].shape) < 0.3
    seen["lidar"] = hit * rng.uniform(0.0, settings.lidar_range_m, hit.shape)
    obstacles = seen["dynamic_obstacle"]
    obstacles[..., Obstacle.DISTANCE] = rng.uniform(
        0.0, settings.lidar_range_m, obstacles.shape[:2]
    )
    obstacles[..., Obstacle.WIDTH] = rng.integers(0, 4, obstacles.shape[:2])
    obstacles[..., Obstacle.FLOATS] = rng.integers(0, 2, obstacles.shape[:2])
    obstacles *= rng.random((*obstacles.shape[:2], 1)) < 0.5  # the others are out of sight
    return {name: value.astype(np.float32) for name, value in seen.items()}


def _example(settings: Settings) -> tuple[tuple[Tensor, ...], Any]:
    """Inputs to trace with, and which of their axes may have any length."""
    seen = observations(settings, 2)
    count = torch.export.Dim("n", min=1)
    axes = tuple({0: count} for _ in INPUTS)
    return tuple(torch.from_numpy(seen[name]) for name in INPUTS), (axes,)


def _onnx(module: nn.Module, settings: Settings, notes: str) -> tuple[bytes, Callable[..., Any]]:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "onnx")
    inputs, axes = _example(settings)
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)  # it misses torchvision, which nobody asked for
    try:
        program: Any = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            dynamic_shapes=axes,
            input_names=list(INPUTS),
            output_names=["action"],
            verbose=False,
        )
    finally:
        log.setLevel(level)
    model = program.model_proto
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.input, *graph.initializer, *graph.value_info):
        del part.metadata_props[:]  # where in whose files each node comes from
    note = model.metadata_props.add()
    note.key, note.value = NOTES, notes
    data: bytes = model.SerializeToString()
    return data, runner(open_session(data))


def _torch_export(
    module: nn.Module, settings: Settings, notes: str
) -> tuple[bytes, Callable[..., Any]]:
    inputs, axes = _example(settings)
    file = io.BytesIO()
    program = torch.export.export(module, inputs, dynamic_shapes=axes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # where in whose files it comes from
    torch.export.save(program, file, extra_files={f"{NOTES}.json": notes})
    again = torch.export.load(io.BytesIO(file.getvalue())).module()

    def decide(seen: Seen) -> Any:
        return again(*(torch.from_numpy(seen[name]) for name in INPUTS)).numpy()

    return file.getvalue(), decide


def _difference(module: nn.Module, decide: Callable[..., Any], settings: Settings) -> float:
    seen = observations(settings, _CHECKED, seed=1)
    expected = module(*(torch.from_numpy(seen[name]) for name in INPUTS)).numpy()
    first = decide({name: value[:1] for name, value in seen.items()})  # one drone, too
    worst = max(np.abs(decide(seen) - expected).max(), np.abs(first - expected[:1]).max())
    return float(worst)
