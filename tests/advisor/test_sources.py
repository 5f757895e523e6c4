"""Advice on files of every kind: what is found, and that damage is one clear line."""

from __future__ import annotations

import io
import subprocess
import sys
from types import SimpleNamespace

import lz4.frame
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

import penstock
from benchmarks.experience import depth_pictures, flights
from penstock.advisor import advise
from penstock.core.pack import Item
from penstock.errors import (
    CorruptFile,
    DataError,
    LimitExceeded,
    PenstockError,
    UnknownFormat,
    UnsupportedValue,
    UsageError,
)
from penstock.inspect import describe
from penstock.replay.segments import LogReader, SegmentLog
from penstock.samples import write_sample

SECONDS = 0.5


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "rollouts"
    storage = penstock.RolloutStorage(folder)
    for number in range(3):
        storage.save(flights(128, 16, 0.02, number), number)
    return folder


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    weight = torch.randn(300, 400)
    return {"model": {"weight": weight}, "moments": torch.zeros(300, 400), "list": [weight[0]]}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("checkpoints")
    with penstock.AsyncCheckpointSaver(folder) as saver:
        saver.save_async(state, "a.pt").wait()
        saver.save_async(state, "b.pt").wait()
    return folder


def test_rollouts(rollouts):
    found = advise(rollouts, seconds=SECONDS)
    files = list(rollouts.iterdir())
    raw = sum(describe(file)["raw_bytes"] for file in files)
    size = sum(file.stat().st_size for file in files)
    assert found.verdict == "B"
    assert found.decision.raw_bytes == raw
    assert found.ratio == pytest.approx(raw / size, rel=0.1)
    assert (found.measurements.frames, found.measurements.environments) == (3 * 128 * 16, 3 * 128)
    assert found.settings[0] == 'RolloutStorage("rollouts", compression_level=9)'
    one = advise(sorted(files)[1], seconds=SECONDS)
    assert one.verdict == "B"
    assert one.decision.raw_bytes == raw // 3


def test_rollouts_whose_shapes_differ(tmp_path):
    """Another number of beams, or steps, from some iteration on; keys have the newest shapes."""
    storage = penstock.RolloutStorage(tmp_path)
    for number, (steps, beams) in enumerate([(50, 30), (50, 40), (60, 40)]):
        batch = [20, steps]
        content = {"x": torch.randn(*batch, beams), "table": torch.zeros(steps, beams)}
        storage.save({**content, "r": torch.zeros(batch)}, number)
    found = advise(tmp_path, seconds=SECONDS)
    assert found.verdict == "A"
    assert found.measurements.frames == 20 * (50 + 50 + 60)


def test_rollouts_of_which_a_part_is_read(tmp_path):
    data = TensorDict({"x": torch.zeros(100_000, 30)}, [100_000])
    penstock.RolloutStorage(tmp_path).save(data, 0)
    [key] = advise(tmp_path, seconds=SECONDS).measurements.keys
    assert key.shape == (100_000, 30)
    assert key.sampled_bytes < key.raw_bytes / 2


def test_rollouts_that_do_not_fit(rollouts):
    assert advise(rollouts, memory="2MB", seconds=SECONDS).verdict == "C"


def test_a_checkpoint_of_every_kind(checkpoints, state, tmp_path):
    real = describe(checkpoints / "a.pt")
    plain, packed, tensors = (tmp_path / name for name in ("p.pt", "l.pt.lz4", "t.safetensors"))
    torch.save(state, plain)
    content = io.BytesIO()
    torch.save(state, content)
    packed.write_bytes(lz4.frame.compress(content.getvalue()))
    save_file({"a.weight": state["model"]["weight"], "b": state["moments"]}, tensors)
    for path in (checkpoints / "a.pt", plain, packed, tensors):
        found = advise(path, seconds=SECONDS)
        assert found.verdict == "B"
        assert found.decision.raw_bytes == pytest.approx(real["raw_bytes"], rel=0.01)
        assert found.ratio == pytest.approx(real["ratio"], rel=0.1)
        assert found.settings[1] == (
            "penstock train compress_checkpoint=True save_compression_level=2"
        )


def test_a_folder_of_checkpoints_counts_them_all(checkpoints):
    one = advise(checkpoints / "a.pt", seconds=SECONDS).decision.raw_bytes
    assert advise(checkpoints, seconds=SECONDS).decision.raw_bytes == 2 * one


def test_a_run_has_both(rollouts, checkpoints, tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "checkpoints").symlink_to(checkpoints)
    (tmp_path / "rollouts").symlink_to(rollouts)
    found = advise(tmp_path, seconds=SECONDS)
    assert {key.writer for key in found.measurements.keys} == {"rollouts", "checkpoint"}
    assert found.verdict == "B"


def test_experience_in_safetensors(tmp_path):
    path = tmp_path / "e.safetensors"
    save_file(
        {
            "obs": torch.zeros(1000, 64),
            "half": torch.ones(1000, 8).to(torch.bfloat16),
            "scalar": torch.tensor(3.0),
            "none": torch.zeros(1000, 0),
        },
        path,
    )
    found = advise(path, seconds=SECONDS)
    assert found.verdict == "B"
    assert found.measurements.frames == 1000


def buffer():
    made = penstock.DictReplayBuffer(1000, ["pixels", ("n", "x")], img_compressed=True)
    rng = np.random.default_rng(0)
    for episode in range(4):
        x = rng.normal(size=(40, 3)).astype(np.float32)
        made.add({"pixels": depth_pictures(40, episode), "n": {"x": x}})
    return made


def test_a_replay_buffer(tmp_path):
    made = buffer()
    made.save(tmp_path / "replay")
    raw = 160 * (84 * 84 + 12)
    found = advise(tmp_path / "replay", seconds=SECONDS)
    assert found.verdict == "B"
    assert found.ratio == pytest.approx(raw / made.stored_bytes, rel=0.1)
    found = advise(tmp_path / "replay", memory="1MB", seconds=SECONDS)
    assert found.verdict == "C"
    assert '"mixed"' in found.settings[0]


@pytest.mark.parametrize("kind", [penstock.CompressedStorage, LazyTensorStorage])
@pytest.mark.parametrize("ndim", [1, 2])
def test_a_buffer_of_torchrl(tmp_path, kind, ndim):
    """Saved as a buffer, as a storage alone, and in memory: the settings are those of a storage."""
    batch = [100] if ndim == 1 else [20, 5]
    pixels = torch.from_numpy(depth_pictures(100)).view(*batch, 84, 84)
    data = TensorDict(
        {"next": TensorDict({"pixels": pixels}, batch), "r": torch.zeros(batch)}, batch
    )
    made = TensorDictReplayBuffer(storage=kind(500, ndim=ndim), dim_extend=0)
    made.extend(data)
    made.dumps(tmp_path / "buffer")
    made.storage.dumps(tmp_path / "storage")
    limits = {"memory": "200kB", "seconds": SECONDS}
    for source in (tmp_path / "buffer", tmp_path / "storage", made, made.storage):
        found = advise(source, **limits)
        assert {key.name for key in found.measurements.keys} >= {"next.pixels", "r"}
        (line,) = found.settings
        assert line.startswith("CompressedStorage(500, codecs={('next', 'pixels'): ")
        assert line.endswith('spill_dir="spill")')
        storage = eval(line, {"CompressedStorage": penstock.CompressedStorage})
        storage.set(range(100), data.reshape(100))


def test_a_damaged_storage_of_torchrl(tmp_path):
    made = TensorDictReplayBuffer(storage=LazyTensorStorage(50))
    made.extend(TensorDict({"x": torch.zeros(20, 300)}, [20]))
    made.dumps(tmp_path)
    for name, content in (
        ("meta.json", "{"),
        ("meta.json", '{"x": {"dtype": "torch.float32", "shape": [9e99, 300]}}'),
        ("meta.json", '{"x": {"dtype": "os.system", "shape": [50, 300]}}'),
        ("storage_metadata.json", '{"len": 7000}'),
    ):
        file = tmp_path / "storage" / name
        before = file.read_text()
        file.write_text(content)
        with pytest.raises(DataError, match="its files make no sense"):
            advise(tmp_path, seconds=SECONDS)
        file.write_text(before)
    assert advise(tmp_path, seconds=SECONDS).measurements.frames == 20


@pytest.mark.parametrize("hostile", [[-1000, 2000], [10**12, 5], [500, -1]])
def test_frames_of_a_storage_that_lead_outside(tmp_path, hostile):
    """Whoever can write a file can make its checksums right, too."""
    made = TensorDictReplayBuffer(storage=penstock.CompressedStorage(50))
    made.extend(TensorDict({"x": torch.from_numpy(depth_pictures(20))}, [20]))
    made.dumps(tmp_path)
    folder = tmp_path / "storage"
    with LogReader(folder) as log, log.open_segment(log.segments[0]) as segment:
        state, holder = log.state, log.holder
        tables = {name: log.item(name) for name in log.names}
        items = {name: segment.read(name) for name in segment.names}
        meta = segment.index.meta
    (name,) = [name for name in items if name.startswith("lengths.")]
    items[name][3:5] = hostile
    with SegmentLog(folder, holder) as log:
        kept = log.append([Item(*item) for item in items.items()], meta)
        log.commit(state, [Item(*item) for item in tables.items()], keep=[kept])
    with pytest.raises(CorruptFile, match="make no sense"):
        advise(tmp_path, seconds=SECONDS)


def test_a_recording_and_its_dataset(tmp_path):
    bag = tmp_path / "take.bag"
    write_sample(bag, seconds=0.6, cameras=1, width=320, height=240, state_hz=20)
    found = advise(bag, seconds=SECONDS)
    notes = {key.name: key.note for key in found.measurements.keys}
    assert notes["/cam_h/color/image_raw/compressed"] == "already compressed (jpeg)"
    assert found.verdict == "A"
    assert "already compressed" in found.why[1]
    assert found.settings == [f"penstock convert {bag} take_dataset --codec copy"]
    penstock.convert([bag], tmp_path / "out")
    found = advise(tmp_path / "out", seconds=SECONDS)
    assert found.verdict == "A"
    assert any(key.note == "already compressed (h264)" for key in found.measurements.keys)
    found = advise(tmp_path / "out", memory="500kB", seconds=SECONDS)
    assert found.verdict == "C"
    assert found.settings[0].startswith("DictReplayBuffer.from_lerobot(")


@pytest.mark.parametrize(("name", "kind"), [("a.bag", "bag"), ("a.mcap", "mcap")])
def test_of_a_damaged_recording_the_rest_counts(name, kind, tmp_path):
    bag = tmp_path / name
    write_sample(bag, kind=kind, seconds=1, cameras=1, width=160, height=120, raw_images=True)
    whole = advise(bag, seconds=SECONDS)
    assert whole.to_json()["notes"] == []
    bag.write_bytes(bag.read_bytes()[: bag.stat().st_size * 2 // 3])
    found = advise(bag, seconds=SECONDS)
    assert found.verdict == "B"
    assert found.decision.raw_bytes == pytest.approx(whole.decision.raw_bytes * 2 / 3, rel=0.1)
    [note] = found.to_json()["notes"]
    assert "it is damaged, only a part was looked at" in note
    assert "--salvage" not in found.text()


def test_raw_pictures_of_a_recording_do_compress(tmp_path):
    bag = tmp_path / "raw.mcap"
    write_sample(bag, kind="mcap", seconds=1, cameras=1, width=160, height=120, raw_images=True)
    found = advise(bag, seconds=SECONDS)
    assert found.verdict == "B"
    assert any(key.note == "raw pictures (rgb8)" for key in found.measurements.keys)


def test_arrays_larger_than_the_memory(tmp_path, monkeypatch):
    """Rows are read as they are needed; where columns come first, all of an array must be."""
    array = np.random.default_rng(0).normal(size=(50_000, 40)).round(1)
    np.savez_compressed(tmp_path / "c.npz", x=array)
    np.savez(tmp_path / "f.npz", x=np.asfortranarray(array))
    whole = advise(tmp_path / "f.npz", seconds=SECONDS).decision.ratio_stored
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    found = advise(tmp_path / "c.npz", seconds=SECONDS)
    assert found.decision.ratio_stored == pytest.approx(whole)
    with pytest.raises(LimitExceeded, match="x"):
        advise(tmp_path / "f.npz", seconds=SECONDS)


def test_columns_of_an_array_in_column_order(tmp_path):
    array = np.asfortranarray(np.random.default_rng(0).normal(size=(3000, 4)).round(1))
    np.savez(tmp_path / "f.npz", x=array)
    np.savez(tmp_path / "c.npz", x=np.ascontiguousarray(array))
    ratios = [
        advise(tmp_path / name, seconds=SECONDS).decision.ratio_stored
        for name in ("f.npz", "c.npz")
    ]
    assert ratios[0] == pytest.approx(ratios[1])


def objects(path):
    np.savez(path, a=np.array([{}, 1], object))


def nothing(path):
    np.savez(path, a=np.zeros((0, 3)))


def cut(path):
    np.savez(path, a=np.zeros((100, 3)))
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path):
    np.savez_compressed(path, a=np.random.default_rng(0).normal(size=(1000, 3)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def liar(path):
    """A safetensors file whose tensor lies outside of it."""
    save_file({"x": torch.zeros(10)}, path)
    path.write_bytes(path.read_bytes().replace(b'"data_offsets":[0,40]', b'"data_offsets":[0,44]'))


def takes(path):
    path.mkdir()
    for number in range(2):
        (path / f"{number}.bag").write_bytes(b"#ROSBAG V2.0\n")


@pytest.mark.parametrize(
    ("name", "make", "error"),
    [
        ("a.npz", objects, UnsupportedValue),
        ("a.npz", nothing, UsageError),
        ("a.npz", cut, CorruptFile),
        ("a.npz", flipped, CorruptFile),
        ("a.safetensors", liar, CorruptFile),
        ("a.npz", lambda path: path.write_bytes(b"PK\x03\x04junk"), CorruptFile),
        ("a.bag", lambda path: path.write_bytes(b"#ROSBAG V2.0\nxxx"), DataError),
        ("a.pt", lambda path: path.write_bytes(b"junk" * 10), CorruptFile),
        ("a.txt", lambda path: path.write_bytes(b"junk" * 10), UnknownFormat),
        ("folder", lambda path: path.mkdir(), UsageError),
        ("takes", takes, UnknownFormat),
        ("missing", lambda path: None, UsageError),
    ],
)
def test_bad_files_are_one_clear_line(name, make, error, tmp_path):
    make(tmp_path / name)
    with pytest.raises(error, match=name) as caught:
        advise(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert "--salvage" not in str(caught.value)  # which is not a flag of advise


def test_a_damaged_rollout(rollouts, tmp_path):
    data = bytearray((rollouts / "rollout_000000.pack").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "rollout_000000.pack").write_bytes(data)
    with pytest.raises(PenstockError, match="damaged"):
        advise(tmp_path, seconds=SECONDS)


def test_nothing_is_left_behind(rollouts):
    before = sorted(rollouts.iterdir())
    advise(rollouts, seconds=SECONDS)
    assert sorted(rollouts.iterdir()) == before


def test_recordings_need_no_torch(tmp_path):
    write_sample(tmp_path / "a.bag", seconds=0.3, cameras=1, width=64, height=48)
    code = (
        "import sys; from penstock.advisor import advise; "
        f"advise({str(tmp_path / 'a.bag')!r}, seconds=1); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_needs_no_torch_does_without(tmp_path, checkpoints):
    """Recordings and checkpoints of penstock; for arrays the missing extra is named."""
    write_sample(tmp_path / "a.bag", seconds=0.3, cameras=1, width=64, height=48)
    np.savez(tmp_path / "a.npz", x=np.zeros(1000))
    paths = [str(path) for path in (tmp_path / "a.bag", checkpoints, checkpoints / "a.pt")]
    code = f"""
import sys
sys.modules["torch"] = None
from penstock.advisor import advise
from penstock.errors import MissingExtra
for path in {paths}:
    assert advise(path, seconds=1).verdict in "AB"
try:
    advise({str(tmp_path / "a.npz")!r}, seconds=1)
except MissingExtra:
    sys.exit(0)
sys.exit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
