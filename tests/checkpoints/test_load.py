"""Finding, telling apart, verifying and falling back."""

import io
import os
import pickle
import sys
import zipfile

import lz4.frame
import pytest
import torch

from penstock import errors
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver


def save_three(tmp_path, **options):
    with AsyncCheckpointSaver(tmp_path, handle_signals=False, **options) as saver:
        for i in range(3):
            saver.save_async({"i": i, "x": torch.randn(20_000)}, f"{i}.pt").wait()


def damage(path, at=-5000):
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_falls_back_to_the_newest_good_one_and_says_so(tmp_path):
    save_three(tmp_path)
    damage(tmp_path / "2.pt")
    with pytest.warns(errors.PenstockWarning, match=r"fell back to 1\.pt.*2\.pt is damaged"):
        assert load_checkpoint(tmp_path)["i"] == 1
    damage(tmp_path / "1.pt")
    with pytest.warns(errors.PenstockWarning, match=r"fell back to 0\.pt"):
        assert load_checkpoint(tmp_path)["i"] == 0
    damage(tmp_path / "0.pt")
    with pytest.raises(errors.CorruptFile, match="no checkpoint in"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("where", [0, 4, 9, 12, 40])
def test_falls_back_when_the_header_is_damaged(tmp_path, where):
    save_three(tmp_path)
    damage(tmp_path / "2.pt", where)
    with pytest.warns(errors.PenstockWarning, match="fell back"):
        assert load_checkpoint(tmp_path)["i"] == 1


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
def test_falls_back_when_the_newest_is_cut_off(tmp_path, size):
    save_three(tmp_path)
    os.truncate(tmp_path / "2.pt", size)
    with pytest.warns(errors.PenstockWarning, match="fell back"):
        assert load_checkpoint(tmp_path)["i"] == 1


def test_falls_back_when_the_base_is_gone(tmp_path):
    state = {"x": torch.randn(200_000)}
    with AsyncCheckpointSaver(tmp_path, handle_signals=False, delta_every=2) as saver:
        for i in range(4):
            state["x"][:100] += 1
            saver.save_async(state, f"{i}.pt").wait()
        assert saver.get_stats()["total_deltas"] == 2
    (tmp_path / "2.pt").unlink()
    with pytest.warns(errors.PenstockWarning, match=r"fell back to 1\.pt"):
        load_checkpoint(tmp_path)


def test_a_named_file_never_falls_back(tmp_path):
    save_three(tmp_path)
    damage(tmp_path / "2.pt")
    with pytest.raises(errors.CorruptFile, match=r"2\.pt is damaged: tensor 'x', block 0"):
        load_checkpoint(tmp_path / "2.pt")


def test_without_a_pointer_the_newest_is_found(tmp_path):
    save_three(tmp_path)
    (tmp_path / "latest").unlink()
    assert load_checkpoint(tmp_path)["i"] == 2


def test_missing_files_and_folders(tmp_path):
    save_three(tmp_path)
    with pytest.raises(errors.UsageError, match=r"the folder has 0\.pt, 1\.pt, 2\.pt"):
        load_checkpoint(tmp_path / "nope.pt")
    with pytest.raises(errors.UsageError, match="folder does not exist"):
        load_checkpoint(tmp_path / "no" / "x.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.UsageError, match="no checkpoint in"):
        load_checkpoint(tmp_path / "empty")
    (tmp_path / "text.txt").write_text("hello, world, this is text")
    with pytest.raises(errors.UnknownFormat, match="neither penstock, safetensors, torch"):
        load_checkpoint(tmp_path / "text.txt")


def test_plain_torch_files(tmp_path):
    state = {"model": {"a.weight": torch.randn(3, 3)}, "i": 4}
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("new.pt", "old.pt"):
        loaded = load_checkpoint(tmp_path / name)
        assert torch.equal(loaded["model"]["a.weight"], state["model"]["a.weight"])
        assert list(load_checkpoint(tmp_path / name, only="model.a.*")) == ["model"]


def test_two_values_of_one_path_in_a_torch_file(tmp_path):
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, tmp_path / "x.pt")
    part = load_checkpoint(tmp_path / "x.pt", only="a.*")
    assert part["a.b"].tolist() == [1, 1]
    assert part["a"]["b"].tolist() == [0, 0]


def test_the_seeds_lz4_files(tmp_path):
    """Their saver wrote torch.save bytes through LZ4 frames, as name.pt.lz4."""
    buffer = io.BytesIO()
    torch.save({"model_state_dict": {"w": torch.arange(10_000)}}, buffer)
    packed = lz4.frame.compress(buffer.getvalue(), compression_level=9)
    (tmp_path / "foo.pt.lz4").write_bytes(packed)
    for name in ("foo.pt", "foo.pt.lz4"):
        loaded = load_checkpoint(tmp_path / name)
        assert torch.equal(loaded["model_state_dict"]["w"], torch.arange(10_000))
    (tmp_path / "cut.pt.lz4").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(errors.CorruptFile):
        load_checkpoint(tmp_path / "cut.pt")
    (tmp_path / "bad.pt.lz4").write_bytes(packed[:50] + b"\x00" * 50 + packed[100:])
    with pytest.raises(errors.CorruptFile):
        load_checkpoint(tmp_path / "bad.pt")


class Exploit:
    """On unpickling, runs what it is told."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


def exploits(mark):
    calls = [
        (os.system, f"touch {mark}"),
        (eval, f"open({str(mark)!r}, 'w')"),
        (exec, f"open({str(mark)!r}, 'w')"),
        (open, str(mark), "w"),
        (__import__, "antigravity"),
        (os.rename, str(mark), "x"),
        (os.mkdir, str(mark)),
    ]
    for call, *arguments in calls:
        for protocol in (2, 4):
            yield pickle.dumps({"x": Exploit(call, *arguments)}, protocol)


def test_hostile_files_run_no_code(tmp_path):
    """A corpus of pickles, bare, in torch zips and in LZ4 frames, under an audit hook."""
    mark = tmp_path / "owned"
    fired = []
    armed = [False]

    def audit(event, arguments):
        suspicious = ("os.system", "subprocess.Popen", "os.exec", "socket.connect", "os.mkdir")
        if armed[0] and event in suspicious:
            fired.append((event, arguments))

    sys.addaudithook(audit)
    torch.save({"x": 1}, tmp_path / "good.pt")
    count = 0
    for payload in exploits(mark):
        with (
            zipfile.ZipFile(tmp_path / "good.pt") as good,
            zipfile.ZipFile(tmp_path / "zip.pt", "w") as bad,
        ):
            for name in good.namelist():
                bad.writestr(name, payload if name.endswith("data.pkl") else good.read(name))
        (tmp_path / "bare.pt").write_bytes(payload)
        (tmp_path / "lz4.pt.lz4").write_bytes(lz4.frame.compress(payload))
        zipped = (tmp_path / "zip.pt").read_bytes()
        (tmp_path / "lz4zip.pt.lz4").write_bytes(lz4.frame.compress(zipped))
        for name in ("zip.pt", "bare.pt", "lz4.pt", "lz4zip.pt"):
            count += 1
            armed[0] = True
            try:
                with pytest.raises(
                    errors.DataError, match=r"without running code|cannot be loaded"
                ):
                    load_checkpoint(tmp_path / name)
            finally:
                armed[0] = False
    assert count >= 30
    assert not mark.exists()
    assert fired == []


def test_unreadable_folder_entries_do_not_matter(tmp_path):
    save_three(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("gone.pt")
    assert load_checkpoint(tmp_path)["i"] == 2
