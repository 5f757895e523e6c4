"""Other versions than those of the tests: what works, and the one line that tells what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.core.extras import version_of
from penstock.errors import UnknownFormat

torch = pytest.importorskip("torch", reason="checkpoints and rollouts need torch")

PLUG_INS = ["CompressedStorage", "PrioritySampler", "CompressedLidarTransform"]


def python(code: str, path: Path | None = None) -> str:
    """Run a program; return what it prints, its own error in one line."""
    places = [str(path), *sys.path] if path else sys.path
    program = (
        "import sys, warnings\nimport penstock\ntry:\n"
        + "\n".join(f"    {line}" for line in code.splitlines())
        + "\nexcept penstock.PenstockError as error:\n    print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def pretend(folder: Path, package: str, version: str) -> Path:
    """Make a folder that says that a package is installed in this version."""
    metadata = folder / f"{package}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return folder


@pytest.mark.parametrize("name", PLUG_INS)
def test_a_plug_in_names_the_torchrl_that_it_needs(name, tmp_path) -> None:
    said = python(f"penstock.{name}", pretend(tmp_path, "torchrl", "0.1.1"))
    assert said.startswith("MissingExtra")
    assert f"{name} needs TorchRL 0.14, 0.1.1 is installed" in said
    assert 'pip install "penstock[rl]"' in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", PLUG_INS)
def test_a_plug_in_without_torchrl(name) -> None:
    hidden = "import penstock.core.extras as extras\nextras.installed = lambda package: None\n"
    said = python(f"{hidden}penstock.{name}")
    assert f"{name} needs TorchRL 0.14, none is installed" in said
    assert 'pip install "penstock[rl]"' in said


def test_a_newer_torchrl_is_tried_with_a_warning(tmp_path) -> None:
    pytest.importorskip("torchrl")
    code = (
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always', UserWarning)\n"
        "    penstock.PrioritySampler\n"
        "print([str(one.message) for one in told if 'PenstockWarning' in str(one.category)])"
    )
    said = python(code, pretend(tmp_path, "torchrl", "0.99.0"))
    assert "PrioritySampler was tested with TorchRL 0.14, 0.99.0 is installed" in said


NO_TENSORDICT = """sys.modules["tensordict"] = None
import numpy as np, torch
storage = penstock.RolloutStorage(sys.argv[1] if sys.argv[1:] else FOLDER)
"""


def test_rollouts_of_dicts_need_no_tensordict(tmp_path) -> None:
    code = NO_TENSORDICT.replace("FOLDER", repr(str(tmp_path))) + (
        "lidar = torch.arange(6 * 8 * 50.0).reshape(6, 8, 50)\n"
        "ticks = np.arange(6 * 8, dtype=np.uint16).reshape(6, 8)\n"
        "half = lidar.bfloat16()\n"
        "data = {'lidar': lidar, 'deep': {'ticks': ticks, 'half': half}, 'note': 'first'}\n"
        "storage.save(data, 1)\n"
        "loaded = storage.load(1)\n"
        "assert torch.equal(loaded['lidar'], lidar) and loaded['note'] == 'first'\n"
        "assert torch.equal(loaded['deep']['half'], half)\n"
        "assert loaded['deep']['ticks'].dtype == np.uint16\n"
        "assert (loaded['deep']['ticks'] == ticks).all()\n"
        "part = storage.load(1, envs=[4, 2], steps=slice(3, 5))\n"
        "assert torch.equal(part['lidar'], lidar[[4, 2], 3:5])\n"
        "assert (part['deep']['ticks'] == ticks[[4, 2], 3:5]).all()\n"
        "with penstock.PipelinedDataCollector([data, data]) as collector:\n"
        "    assert sum(torch.equal(batch['lidar'], lidar) for batch in collector) == 2\n"
        "print('good')"
    )
    assert python(code) == "good\n"


def test_a_rollout_of_tensordicts_without_tensordict(tmp_path) -> None:
    tensordict = pytest.importorskip("tensordict")
    from penstock import RolloutStorage

    data = tensordict.TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2, 3])
    RolloutStorage(tmp_path).save(data, 1)
    said = python(NO_TENSORDICT.replace("FOLDER", repr(str(tmp_path))) + "storage.load(1)")
    assert said.startswith("MissingExtra tensordict is not installed")
    assert 'pip install "penstock[rl]"' in said


def test_an_old_tensordict_is_named(tmp_path) -> None:
    tensordict = pytest.importorskip("tensordict", "0.3")
    from penstock import RolloutStorage

    note = tensordict.NonTensorData("hi", batch_size=[2, 3])
    data = tensordict.TensorDict({"x": torch.zeros(2, 3), "note": note}, batch_size=[2, 3])
    RolloutStorage(tmp_path / "out").save(data, 1)
    folder = pretend(tmp_path / "old", "tensordict", "0.1.2")
    (folder / "tensordict.py").write_text("class TensorDict:\n    pass\n")
    said = python(f"penstock.RolloutStorage({str(tmp_path / 'out')!r}).load(1)", folder)
    assert "needs a newer tensordict than 0.1.2" in said


@pytest.mark.skipif(version_of(torch.__version__) >= (2, 3), reason="torch has uint16 from 2.3")
def test_a_type_that_this_torch_lacks_is_named() -> None:
    from penstock.tensors import tensor_over

    with pytest.raises(UnknownFormat, match=r"torch 2\.\d\S* has no uint16: .* newer torch"):
        tensor_over(np.zeros(3, np.uint16), "uint16")
