"""info and doctor: what is there is told, what is damaged is found."""

from __future__ import annotations

import os
from pathlib import Path

import lz4.frame
import pytest
import torch
from safetensors.torch import save_file

import penstock
from penstock import AsyncCheckpointSaver, inspect
from penstock.core.files import process_owner
from penstock.errors import CorruptFile, UnknownFormat, UsageError
from penstock.inspect import doctor


@pytest.fixture
def run(tmp_path):
    """A folder with one full checkpoint and two differences to it."""
    torch.manual_seed(0)
    weight = torch.randn(20_000)
    with AsyncCheckpointSaver(tmp_path / "run", delta_every=10) as saver:
        for step in range(3):
            state = {"model": {"weight": weight + 1e-6 * step}, "step": step}
            saver.save_async(state, f"{step}.pt", metadata={"note": "x"}, metric=step / 2).wait()
    return tmp_path / "run"


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_describe_a_full_checkpoint(run):
    facts = inspect.describe(run / "0.pt")
    assert facts["kind"] == "penstock checkpoint"
    assert facts["size_bytes"] == os.path.getsize(run / "0.pt")
    assert facts["raw_bytes"] == 80_000
    assert facts["ratio"] == pytest.approx(80_000 / facts["size_bytes"])
    assert (facts["tensors"], facts["delta"], facts["base"]) == (1, False, None)
    assert facts["codecs"] == {"planes+zstd": 1}
    assert (facts["sequence"], facts["metric"]) == (1, 0.0)
    largest = facts["largest"][0]
    assert (largest["name"], largest["shape"]) == ("model.weight", [20_000])
    assert 0 < largest["stored_bytes"] < largest["raw_bytes"]
    text = inspect.text(facts)
    assert "stored as:    full" in text
    assert "model.weight" in text
    assert "model.weight" not in inspect.text(facts, top=0)


def test_describe_a_difference_names_its_base(run):
    facts = inspect.describe(run / "1.pt")
    assert facts["base"] == {"file": "0.pt", "present": True}
    assert facts["codecs"] == {"delta+planes+zstd": 1}
    (run / "0.pt").unlink()
    assert "delta to 0.pt (MISSING)" in inspect.text(inspect.describe(run / "1.pt"))


def test_describe_a_folder_marks_latest(run):
    damage(run / "1.pt", 300)
    (run / "config.yaml").write_text("a: 1")
    facts = inspect.describe(run)
    assert [item["name"] for item in facts["checkpoints"]] == ["2.pt", "0.pt", "1.pt"]
    assert facts["latest"] == "2.pt"
    assert [item["latest"] for item in facts["checkpoints"]] == [True, False, False]
    text = inspect.text(facts)
    assert "*  2.pt" in text
    assert "DAMAGED" in text


def test_metadata_of_every_kind_is_shown(tmp_path):
    with AsyncCheckpointSaver(tmp_path) as saver:
        saver.save_async({}, "a.pt", metadata={"pair": (1, 2), "raw": b"x", "inf": float("inf")})
    text = inspect.text(inspect.describe(tmp_path / "a.pt"))
    assert "{'pair': (1, 2), 'raw': b'x', 'inf': inf}" in text


def lines_of(path: Path) -> dict[str, str]:
    text = inspect.text(inspect.describe(path))
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def test_info_says_how_to_load_each_file(run, tmp_path, monkeypatch):
    """What it says is typed here, and works."""
    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.ones(2)}, "plain torch.pt")
    save_file({"x": torch.ones(2)}, "flat.safetensors")
    for name in ("plain torch.pt", "flat.safetensors"):
        call = lines_of(Path(name))["load"]
        assert call == f'penstock.load_checkpoint("{name}")'
        assert eval(call, {"penstock": penstock})["x"].tolist() == [1, 1]
    lines = lines_of(Path("run/2.pt"))
    assert eval(lines["load"], {"penstock": penstock})["step"] == 2
    out = eval(lines["for torch.load"], {"penstock": penstock})
    assert torch.load(out, weights_only=True)["step"] == 2
    assert eval(lines_of(Path("run"))["load"], {"penstock": penstock})["step"] == 2


def test_figures_have_few_digits(tmp_path):
    with AsyncCheckpointSaver(tmp_path) as saver:
        notes = {"loss": 0.1 + 0.2, "curve": [1 / 3]}
        saver.save_async({}, "a.pt", metadata=notes, metric=2 / 3).wait()
    lines = lines_of(tmp_path / "a.pt")
    assert lines["metric"] == "0.666667"
    assert lines["metadata"] == "{'loss': 0.3, 'curve': [0.333333]}"
    assert "0.666667 " in inspect.text(inspect.describe(tmp_path))
    assert inspect.describe(tmp_path / "a.pt")["metric"] == 2 / 3  # --json has them all


def test_foreign_files_are_named_not_opened(tmp_path):
    state = {"weight": torch.ones(1000)}
    torch.save(state, tmp_path / "plain.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(state, tmp_path / "flat.safetensors")
    packed = lz4.frame.compress((tmp_path / "plain.pt").read_bytes())
    (tmp_path / "seed.pt.lz4").write_bytes(packed)
    kinds = {item["name"]: item["kind"] for item in inspect.describe(tmp_path)["checkpoints"]}
    assert kinds == {
        "plain.pt": "torch.save file (zip)",
        "old.pt": "torch.save file (old pickle form)",
        "flat.safetensors": "safetensors file",
        "seed.pt.lz4": "LZ4-compressed torch.save file",
    }
    assert "load_checkpoint" in inspect.text(inspect.describe(tmp_path / "plain.pt"))
    result = doctor.check_all([tmp_path])
    assert result.findings == []
    assert sum("cannot be verified: no checksums" in note for note in result.notes) == 3
    assert sum("only its zip checksums" in note for note in result.notes) == 1
    damage(tmp_path / "plain.pt", 3000)
    assert "zip checksum" in doctor.check(tmp_path / "plain.pt")[0].problem


def test_what_is_no_checkpoint_is_said(tmp_path):
    (tmp_path / "notes.txt").write_text("hello there, reader")
    (tmp_path / "zeros.pt").write_bytes(bytes(5000))
    with pytest.raises(UnknownFormat):
        inspect.describe(tmp_path / "notes.txt")
    with pytest.raises(CorruptFile):
        inspect.describe(tmp_path / "zeros.pt")
    with pytest.raises(UsageError):
        inspect.describe(tmp_path / "nothing")
    with pytest.raises(UsageError):
        doctor.check(tmp_path / "nothing")


def test_doctor_finds_nothing_in_a_good_folder(run):
    result = doctor.check_all([run])
    assert result.findings == []
    assert result.files == 3
    assert result.size_bytes == sum(os.path.getsize(run / f"{k}.pt") for k in range(3))
    assert result.text().startswith("ok: verified 3 files, ")
    assert doctor.check_all([run / "latest"]).files == 1


@pytest.mark.parametrize("at", [0, 9, 20, 40, 300, -1000])
def test_doctor_finds_damage_anywhere(run, at):
    damage(run / "2.pt", at)
    findings = doctor.check(run)
    assert [Path(finding.path).name for finding in findings] == ["2.pt"]


def test_doctor_finds_a_cut_off_file(run):
    os.truncate(run / "2.pt", 5000)
    assert "damaged" in doctor.check(run / "2.pt")[0].problem


def test_doctor_finds_damage_in_a_base_once_per_file(run):
    damage(run / "0.pt", -1000)
    findings = doctor.check(run)
    assert sorted(Path(finding.path).name for finding in findings) == ["0.pt", "1.pt", "2.pt"]


def test_doctor_finds_a_missing_base(run):
    (run / "0.pt").unlink()
    findings = doctor.check(run)
    assert len(findings) == 2
    assert all("0.pt, which is not beside it" in finding.problem for finding in findings)


def test_doctor_finds_a_dangling_latest(run):
    (run / "2.pt").unlink()
    findings = doctor.check(run)
    assert [Path(finding.path).name for finding in findings] == ["latest"]


def test_doctor_tells_dead_temporaries_from_live_ones(run):
    host, _, _, namespace = process_owner().split("-")
    dead = run / f".penstock-tmp-{host}-4194304-12345-{namespace}-abcdef"
    live = run / f".penstock-tmp-{process_owner()}-abcdef"
    dead.touch()
    live.touch()
    result = doctor.check_all([run])
    assert [finding.path for finding in result.findings] == [str(dead)]
    assert any(str(live) in note for note in result.notes)


def test_doctor_verifies_kept_bases(tmp_path):
    weight = torch.randn(20_000)
    with AsyncCheckpointSaver(tmp_path, delta_every=10) as saver:
        saver.save_async({"w": weight}, "a.pt").wait()
        saver.save_async({"w": weight + 1e-6}, "b.pt").wait()
        saver.save_async({"w": weight + 1.0}, "a.pt").wait()  # a.pt again: its old self is kept
    kept = [path for path in tmp_path.iterdir() if path.name.endswith(".base")]
    assert len(kept) == 1
    assert doctor.check_all([tmp_path]).files == 3
    damage(kept[0], -1000)
    assert len(doctor.check(tmp_path)) == 2


@pytest.mark.parametrize("at", [8, 9, 12, 20])
def test_damage_to_the_first_bytes_is_a_finding(tmp_path, at):
    """Such a file no longer looks like ours: doctor must not pass over what it was asked about."""
    with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
        saver.save_async({"x": torch.ones(100)}, "x.pt").wait()
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[at] ^= 4
    (tmp_path / "x.pt").write_bytes(data)
    assert doctor.check(tmp_path / "x.pt")
    assert doctor.check(tmp_path)
    (tmp_path / "note.txt").write_text("hello")
    assert doctor.check(tmp_path / "note.txt")


def test_doctor_reads_recordings_and_refuses_nothing(tmp_path, capsys):
    """A folder in which there is nothing to verify was called good."""
    from penstock.cli import main
    from penstock.inspect.doctor import check_all
    from penstock.samples import write_sample

    bags = tmp_path / "bags"
    bags.mkdir()
    for number in range(2):
        name = bags / f"{number}.bag"
        write_sample(name, seconds=0.5, cameras=1, width=64, height=48, seed=number)
    found = check_all([bags])
    assert (found.files, found.findings) == (2, [])
    whole = (bags / "1.bag").read_bytes()
    (bags / "1.bag").write_bytes(whole[: len(whole) // 2])
    (finding,) = check_all([bags]).findings
    assert finding.path == str(bags / "1.bag")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["doctor", str(empty)]) == 1
    assert "nothing that can be verified" in capsys.readouterr().out


def test_doctor_goes_on_after_what_cannot_be_read(run, tmp_path):
    from penstock.inspect.doctor import check_all

    (tmp_path / "gone.pt").symlink_to(tmp_path / "nowhere")
    found = check_all([tmp_path / "gone.pt", run / "0.pt"])
    assert [finding.path for finding in found.findings] == [str(tmp_path / "gone.pt")]
    assert found.files == 2


def test_info_lists_the_recordings_of_a_folder(tmp_path, capsys):
    """Several takes are not one; a damaged one does not hide the others."""
    from penstock.cli import main
    from penstock.samples import write_sample

    takes = tmp_path / "day"
    takes.mkdir()
    for name in ("a.mcap", "b.mcap"):
        write_sample(takes / name, seconds=0.3, kind="mcap", cameras=0)
    (takes / "c.mcap").write_bytes((takes / "a.mcap").read_bytes()[:-30])
    assert main(["info", str(takes)]) == 0
    told = capsys.readouterr().out
    assert "3 recordings" in told
    assert "b.mcap" in told
    assert "no footer" in told
    assert main(["info", str(takes), "--write-map", str(tmp_path / "map.yaml")]) == 2
    (takes / "b.mcap").unlink()
    (takes / "c.mcap").unlink()
    assert main(["info", str(takes)]) == 0
    assert "/sensors_data_raw" in capsys.readouterr().out


def test_info_names_each_source_of_a_feature_once(tmp_path, capsys):
    from penstock.cli import main
    from penstock.samples import write_sample

    write_sample(tmp_path / "take.bag", seconds=0.5, cameras=1, width=64, height=48)
    assert main(["info", str(tmp_path / "take.bag")]) == 0
    guess = capsys.readouterr().out.split("guess at")[1].split("left out")[0]
    assert guess.count("/leju_claw_state") == 1
