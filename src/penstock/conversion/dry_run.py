"""What a conversion will give and cost, before it is done: planned frames, and a trial of a few.

The frames are exact: they come from the same plan. Size, time and memory are measured on the
first frames of the first bag and scaled.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.conversion.account import Account
from penstock.conversion.features import describe
from penstock.conversion.one_bag import Job, convert_bag
from penstock.conversion.plan import plan_bag
from penstock.conversion.ray_engine import RayCluster
from penstock.conversion.recordings import size_of
from penstock.conversion.request import Request
from penstock.core.memory import format_bytes
from penstock.dataset.layout import Feature
from penstock.dataset.unit import UnitRecord
from penstock.errors import DataError
from penstock.ui.report import aligned

_TRIAL_FRAMES = 90


@dataclass(slots=True)
class Prediction:
    """What a conversion will give and cost.

    Attributes:
        account: Where the frames will go, exactly.
        episodes: How many there will be.
        failed: Bags that cannot be converted, and why.
        size_bytes: Of the dataset, about.
        seconds: Time it will take, about.
        memory_bytes: Largest resident memory, about.
        trial_frames: Frames on which the last three were measured.
    """

    account: Account
    episodes: int
    failed: dict[Path, str]
    size_bytes: int
    seconds: float
    memory_bytes: int
    trial_frames: int

    @property
    def ok(self) -> bool:
        """Whether every bag can be planned."""
        return not self.failed

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            **self.account.to_json(),
            "episodes": self.episodes,
            "failed": {str(path): reason for path, reason in self.failed.items()},
            "size_bytes": self.size_bytes,
            "seconds": round(self.seconds, 1),
            "memory_bytes": self.memory_bytes,
            "trial_frames": self.trial_frames,
        }

    def text(self, verbose: bool = False) -> str:
        """Return the prediction for the terminal; there are no more details."""
        account = self.account
        out = f"{account.frames_out} in {self.episodes} episodes"
        counts = f"{account.frames_in} recorded, {account.frames_dropped} dropped"
        lines = [("CANNOT", f"{path}: {reason}") for path, reason in self.failed.items()]
        lines += [
            ("frames", f"{out} ({counts})"),
            ("size", f"about {format_bytes(self.size_bytes)}"),
            ("time", f"about {self.seconds:.0f} s"),
            ("memory", f"about {format_bytes(self.memory_bytes)}"),
            ("measured on", f"{self.trial_frames} frames; nothing was written"),
        ]
        lines += [("dropped", f"{n} x {why}") for why, n in account.dropped.most_common()]
        return aligned(lines)


def predict(request: Request) -> Prediction:
    """Plan every bag, and convert the beginning of the first into a temporary folder."""
    account, failed, episodes, longest = Account(), dict[Path, str](), 0, 0
    trial: Path | None = None
    features: dict[str, Feature] = {}
    for path in request.own_bags:
        try:
            bag = request.opened.open(path)
            plan = plan_bag(bag, request.mapping)
            if trial is None:
                features = describe(bag, request.mapping, plan)
                trial = path
        except DataError as error:
            failed[path] = str(error)
            continue
        account.add(plan.account)
        longest = max(longest, plan.account.frames_out)
        episodes += len(plan.episodes)
    if trial is None:
        raise DataError(next(iter(failed.values())))
    request.opened.close()
    with tempfile.TemporaryDirectory(prefix="penstock-trial-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        job = Job(
            trial,
            request.mapping,
            features,
            folder,
            UnitRecord("trial", 0, {}, []),
            request.memory_bytes,
            request.salvage,
            most_frames=_TRIAL_FRAMES,
        )
        done = convert_bag(job, lambda size_bytes, frames: None)
        size_bytes = size_of(folder)
    frames = done.account.frames_out
    workers = request.workers
    if request.ray is not None:
        with RayCluster(request.ray) as cluster:
            workers = max(cluster.cpus, 1)
    workers = min(workers, len(request.own_bags))
    return Prediction(
        account,
        episodes,
        failed,
        int(size_bytes * account.frames_out / max(frames, 1)),
        done.wall_s / max(frames, 1) * max(account.frames_out / workers, longest),
        done.peak_bytes * workers,
        frames,
    )
