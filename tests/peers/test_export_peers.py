"""The real lerobot opens what `penstock export` writes; see peer.py for how it is installed."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tensordict import TensorDict  # noqa: E402

from penstock.rollouts.lerobot import export  # noqa: E402
from penstock.rollouts.storage import RolloutStorage  # noqa: E402

from .peer import lerobot_reads  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]


def make(seed: int) -> TensorDict:
    rng = torch.Generator().manual_seed(seed)
    flags = [torch.rand(12, 10, generator=rng) < share for share in (0.1, 0.05)]
    return TensorDict(
        {
            "agents": {
                "observation": {
                    "state": torch.randn(12, 10, 8, generator=rng),
                    "lidar": torch.rand(12, 10, 1, 6, 4, generator=rng),
                },
                "action_normalized": torch.rand(12, 10, 3, generator=rng),
                "reward": torch.randn(12, 10, generator=rng),
            },
            "terminated": flags[0],
            "truncated": flags[1],
        },
        batch_size=[12, 10],
    )


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_lerobot_reads_exported_rollouts(tmp_path, version, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_PROGRESS", "quiet")
    batches = [make(0), make(1)]
    for number, batch in enumerate(batches):
        RolloutStorage(tmp_path / "rollouts").save(batch, number)
    report = export(tmp_path / "rollouts", tmp_path / "out", fps=10, version=version)
    whole = torch.cat([batch.flatten(0, 1) for batch in batches])
    cuts = torch.cat([(b["terminated"] | b["truncated"]) for b in batches])
    done = cuts.flatten().numpy().copy()
    cuts[:, -1] = True
    lengths = np.diff(np.flatnonzero(cuts.flatten().numpy()), prepend=-1)
    assert report.episodes == len(lengths)
    np.savez(
        tmp_path / "expect.npz",
        lengths=lengths,
        task=np.array(["navigate"] * len(whole)),
        **{
            "vec/observation.state": whole["agents", "observation", "state"].numpy(),
            "vec/observation.lidar": whole["agents", "observation", "lidar"].numpy(),
            "vec/action": whole["agents", "action_normalized"].numpy(),
            "vec/next.reward": whole["agents", "reward"].numpy(),
            "vec/next.done": done,
            "vec/next.terminated": whole["terminated"].numpy(),
        },
    )
    verdict = lerobot_reads(tmp_path / "out", tmp_path / "expect.npz", old=version == "v2.1")
    assert verdict["backends"]["pyav"]["frames"] == len(whole)
