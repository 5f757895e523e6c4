"""A policy that leaves: what the file gives is what torch gives, and it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import nav
from penstock.cli import main
from penstock.errors import UnknownFormat, UsageError
from penstock.nav.evaluation.pilot import Navigator
from penstock.nav.export import INPUTS, export_policy, observations
from penstock.nav.networks import FastEncoder, Policy
from penstock.nav.shield import Shield
from penstock.nav.simulation.kernels import POSITION
from penstock.nav.simulation.simulator import Simulator
from penstock.nav.simulation.task import Settings

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

Save = Callable[..., Path]
Seen = dict[str, Any]


def flown(settings: Settings, drones: int, steps: int) -> tuple[Seen, Any]:
    """Observations and heights of a flight that wanders, [drones x steps, ...]."""
    rows: list[Seen] = []
    heights = []
    generator = torch.Generator().manual_seed(0)
    settings = settings.with_(num_envs=drones, maps=2, num_obstacles=200, dynamic_obstacles=80)
    with Simulator(settings, threads=1) as sim:
        obs = sim.reset()
        for _ in range(steps):
            action = torch.rand(drones, 3, generator=generator) * 0.4 + 0.3
            action[:, 0] += 0.3
            for _ in range(12):
                obs = sim.step(action)[0]
            rows.append({name: value.numpy().copy() for name, value in obs.items()})
            heights.append(sim.rows[:, POSITION][:, 2].numpy().copy())
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}, np.concatenate(
        heights
    )


def trained(preset: str) -> dict[str, Any]:
    """A policy whose weights are all in use."""
    policy = Policy(preset, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for head in (policy.alpha, policy.beta):
            head.weight.normal_(0.0, 0.2, generator=generator)
    return {"ppo": {"policy": policy.state_dict(), "preset": preset}}


@pytest.mark.parametrize("preset", ["fast", "navrl"])
def test_actions_are_those_of_torch(save: Save, small: Settings, tmp_path: Path, preset: str):
    run = save(state=trained(preset))
    result = export_policy(run, tmp_path / "policy.onnx")
    assert result.difference <= 1e-5
    assert result.bytes == (tmp_path / "policy.onnx").stat().st_size
    source = str(Path(nav.__file__).parent).encode()
    assert source not in (tmp_path / "policy.onnx").read_bytes()
    there = nav.Navigator.load(tmp_path / "policy.onnx", shield="off")
    here = Navigator.load(run, shield="off")
    assert there.settings == here.settings == small
    assert there.metadata["iteration"] == 12
    real, _ = flown(small, 250, 40)
    for seen in (real, observations(small, 10_000, seed=5)):
        expected = here.action({name: seen[name] for name in INPUTS})
        assert len(expected) == 10_000
        assert expected.std(0).min() > 0.01  # it does decide
        assert np.abs(there.action(seen) - expected).max() <= 1e-5
    alone = {name: value[:1] for name, value in real.items()}
    assert np.abs(there.velocity(alone) - here.velocity(alone)).max() <= 2e-5


def test_a_further_sensor_of_the_policy_is_exported(
    save: Save, small: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As docs/navigation.md says: what the policy looks at is named in one place."""
    names = (*INPUTS, "direction")
    monkeypatch.setattr("penstock.nav.export.INPUTS", names)
    monkeypatch.setattr("penstock.nav.navigator.INPUTS", names)
    before = FastEncoder.prepare

    def prepare(self: FastEncoder, obs: Any) -> torch.Tensor:
        sideways = obs["direction"].reshape(-1, 3)[:, 1:2]
        return before(self, obs) + sideways

    monkeypatch.setattr(FastEncoder, "prepare", prepare)
    run = save(state=trained("fast"))
    for name in ("policy.onnx", "policy.pt2"):
        assert export_policy(run, tmp_path / name).difference <= 1e-5
    there = nav.Navigator.load(tmp_path / "policy.onnx", shield="off")
    seen = observations(small, 10)
    turned = seen | {"direction": seen["direction"] + 1.0}
    assert np.abs(there.action(seen) - there.action(turned)).max() > 1e-3


def test_the_shield_that_flies_is_the_one_that_is_evaluated(small: Settings):
    seen, height = flown(small, 100, 10)
    wanted = np.random.default_rng(0).uniform(-2.0, 2.0, (1000, 3)).astype(np.float32)
    current = seen["state"][:, 5:8]
    evaluated, deployed = Shield.for_task(small), Shield.for_task(small, backend="numpy")
    tensors = {name: torch.from_numpy(value) for name, value in seen.items()}
    expected, changed = evaluated.filter(
        torch.from_numpy(wanted), tensors, torch.from_numpy(current), torch.from_numpy(height)
    )
    result, also = deployed.filter(wanted, seen, current, height)
    assert 100 < int(changed.sum()) < 900
    assert (also == changed.numpy()).all()
    assert (result == expected.numpy()).all()
    assert deployed.interventions == evaluated.interventions


def test_the_shield_asks_for_the_height(save: Save, small: Settings, tmp_path: Path):
    export_policy(save(), tmp_path / "policy.onnx")
    seen, height = flown(small, 4, 1)
    for navigator in (nav.Navigator.load(tmp_path / "policy.onnx"), Navigator.load(save())):
        with pytest.raises(UsageError, match="the shield needs the height"):
            navigator.velocity(seen)
        assert navigator.velocity(seen, height).shape == (4, 3)
        assert navigator.decisions == 4


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["numba"] = None  # as if they were not installed
import json
import numpy as np
from penstock.nav import Navigator

navigator = Navigator.load(sys.argv[1])
shapes = navigator.settings.shapes()
seen = {name: np.zeros((1, *shape), np.float32) for name, shape in shapes.items()}
seen["direction"][0, 0] = (0.0, -48.0, 0.0)
seen["lidar"][:, :, :3] = seen["lidar"][:, :, -3:] = 3.5
velocity = navigator.velocity(seen, [2.0])
print(json.dumps([velocity.tolist(), navigator.interventions]))
"""


def test_it_flies_without_torch(save: Save, tmp_path: Path):
    run = save()
    export_policy(run, tmp_path / "policy.onnx")
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "policy.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (velocity,), interventions = json.loads(done.stdout)
    assert interventions == 1
    assert velocity[1] > -0.5  # the target is at -y, and so is a wall


def test_torch_export(save: Save, small: Settings, tmp_path: Path):
    run = save(state=trained("fast"))
    assert main(["export", str(run), str(tmp_path / "policy.pt2")]) == 0
    source = str(Path(nav.__file__).parent).encode()
    assert source not in (tmp_path / "policy.pt2").read_bytes()
    program = torch.export.load(tmp_path / "policy.pt2").module()
    seen = observations(small, 50)
    action = program(*(torch.from_numpy(seen[name]) for name in INPUTS))
    expected = Navigator.load(run, shield="off").action(seen)
    assert np.abs(action.detach().numpy() - expected).max() <= 1e-5


def test_what_is_no_policy(save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = save()
    assert main(["export", str(run), str(tmp_path / "policy.pth")]) == 2
    assert "give a name that ends with .onnx or .pt2" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "p.onnx")]) != 0
    assert main(["export", str(run), str(tmp_path / "away" / "p.onnx")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not list(tmp_path.glob("p*"))
    with pytest.raises(UsageError, match="there is no policy"):
        nav.Navigator.load(tmp_path / "policy.onnx")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(UnknownFormat, match="no ONNX file"):
        nav.Navigator.load(tmp_path / "text.onnx")
    assert main(["export", str(run), str(tmp_path / "p.onnx"), "--json"]) == 0
    import onnx

    model = onnx.load(tmp_path / "p.onnx")
    for notes in (None, "{", "[1]", '{"settings": {"wings": 2}}'):
        del model.metadata_props[:]
        if notes is not None:
            entry = model.metadata_props.add()
            entry.key, entry.value = "penstock", notes
        onnx.save(model, tmp_path / "p.onnx")
        with pytest.raises(UnknownFormat, match=r"settings|wings"):
            nav.Navigator.load(tmp_path / "p.onnx")
    with pytest.raises(UsageError, match="did you mean 'on'"):
        nav.Navigator.load(tmp_path / "p.onnx", shield="onn")
