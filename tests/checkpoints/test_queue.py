"""The queue is bounded in saves and in bytes, by a stated policy."""

import threading
import time

import pytest
import torch

from penstock import errors
from penstock.checkpoints import publish
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver


@pytest.fixture
def gate(monkeypatch):
    """Hold the writer thread until the gate opens."""
    opened = threading.Event()
    write = publish.Publisher.publish

    def held(self, job):
        assert opened.wait(60)
        return write(self, job)

    monkeypatch.setattr(publish.Publisher, "publish", held)
    yield opened
    opened.set()


def make(tmp_path, **options):
    return AsyncCheckpointSaver(tmp_path, handle_signals=False, **options)


def state(number):
    return {"x": torch.full((1000,), float(number))}


def test_skip_leaves_the_queue_alone(tmp_path, gate):
    with make(tmp_path, max_queue_size=2, on_full="skip") as saver:
        handles = [saver.save_async(state(i), f"{i}.pt") for i in range(5)]
        assert [h.status for h in handles[2:]] == ["skipped"] * 3
        assert saver.get_stats()["queue_size"] == 2
        gate.set()
        assert saver.wait()
        assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["0.pt", "1.pt"]
        assert saver.get_stats()["total_skipped"] == 3
        with pytest.raises(errors.PenstockError, match="skipped"):
            handles[2].wait()


def test_drop_oldest_keeps_the_newest(tmp_path, gate):
    with make(tmp_path, max_queue_size=2, on_full="drop_oldest") as saver:
        handles = []
        for i in range(5):
            handles.append(saver.save_async(state(i), f"{i}.pt"))
            while not saver._queue._pending[0]._ticket.locked():  # until the writer has claimed it
                time.sleep(0.001)
        gate.set()
        saver.wait()
        assert [h.status for h in handles] == ["saved", "dropped", "dropped", "dropped", "saved"]
        assert saver.get_stats()["total_dropped"] == 3
        assert load_checkpoint(tmp_path)["x"][0] == 4


def test_wait_blocks_until_there_is_room(tmp_path, gate):
    with make(tmp_path, max_queue_size=2) as saver:
        for i in range(2):
            saver.save_async(state(i), f"{i}.pt")
        threading.Timer(0.3, gate.set).start()
        begin = time.monotonic()
        saver.save_async(state(2), "2.pt")
        assert time.monotonic() - begin > 0.25
        saver.wait()
        assert saver.get_stats()["total_saved"] == 3
        assert saver.get_stats()["queue_full"] == 1


def test_staging_is_bounded_in_bytes(tmp_path, gate):
    """A large state gets one copy, however long the queue may be."""
    large = {"x": torch.zeros(30_000_000)}
    with make(tmp_path, max_queue_size=10, on_full="skip") as saver:
        first = saver.save_async(large, "0.pt")
        assert saver.save_async(large, "1.pt").status == "skipped"
        assert 120e6 <= saver.get_stats()["staged_bytes"] < 121e6
        gate.set()
        first.wait()
    with make(tmp_path, max_queue_size=10, on_full="skip", max_staging_bytes=10**9) as saver:
        for i in range(3):
            assert saver.save_async(large, f"{i}.pt").status != "skipped"


def test_wait_times_out(tmp_path, gate):
    with make(tmp_path) as saver:
        handle = saver.save_async(state(0), "0.pt")
        assert saver.wait(timeout=0.05) is False
        with pytest.raises(errors.UsageError, match="not saved after"):
            handle.wait(timeout=0.05)
        gate.set()
        assert saver.wait() is True
        assert handle.wait() == tmp_path / "0.pt"
        assert handle.done()


def test_shutdown_that_times_out_goes_on_in_the_background(tmp_path, gate, caplog):
    saver = make(tmp_path)
    saver.save_async(state(0), "0.pt")
    assert saver.shutdown(timeout=0.05) is False
    assert "still being written" in caplog.text
    gate.set()
    assert saver.shutdown() is True
    assert load_checkpoint(tmp_path)["x"][0] == 0


def test_closed_savers_say_so(tmp_path):
    saver = make(tmp_path)
    saver.shutdown()
    assert saver.shutdown() is True
    with pytest.raises(errors.SaverClosed, match="closed"):
        saver.save_async(state(0), "0.pt")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_queue_size": 0}, "max_queue_size=0"),
        ({"on_full": "explode"}, "on_full='explode'"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"keep_best": (1, "up")}, "'up'"),
        ({"compression_level": 99}, "level 99"),
        ({"delta_every": -1}, "delta_every=-1"),
    ],
)
def test_wrong_settings(tmp_path, options, words):
    with pytest.raises(errors.UsageError, match=words.replace("(", r"\(")):
        make(tmp_path, **options)


@pytest.mark.parametrize("path", ["", ".", "latest", "sub/"])
def test_paths_that_are_no_file_names(tmp_path, path):
    (tmp_path / "sub").mkdir()
    with (
        make(tmp_path) as saver,
        pytest.raises(errors.UsageError, match="no name for a checkpoint"),
    ):
        saver.save_async(state(0), path)


def test_paths_in_sub_folders_and_absolute_ones(tmp_path):
    with make(tmp_path / "runs") as saver:
        saver.save_async(state(1), "deep/er/1.pt").wait()
        saver.save_async(state(2), tmp_path / "elsewhere.pt").wait()
    assert load_checkpoint(tmp_path / "runs" / "deep" / "er")["x"][0] == 1
    assert load_checkpoint(tmp_path / "elsewhere.pt")["x"][0] == 2


def test_verbose_and_statistics(tmp_path, capsys):
    with make(tmp_path, verbose=True) as saver:
        saver.save_async({"x": torch.zeros(100_000)}, "x.pt").wait()
        stats = saver.get_stats()
    assert "saved x.pt" in capsys.readouterr().err
    assert stats["total_saved"] == 1
    assert stats["raw_bytes"] == 400_000
    assert stats["compression_ratio"] > 10
    assert stats["stored_bytes"] == (tmp_path / "x.pt").stat().st_size
    assert stats["blocked"]["call"]["count"] == 1


def test_the_seeds_calls(tmp_path, monkeypatch):
    """As written in the source document, with a changed import."""
    from penstock import AsyncCheckpointSaver as Saver
    from penstock import PerformanceMonitor, print_model_info
    from penstock import load_checkpoint as load

    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 4)
    print_model_info(model)
    monitor = PerformanceMonitor()
    saver = Saver(max_queue_size=3)
    with monitor.timer("checkpoint_save"):
        saver.save_async(
            checkpoint={"model_state_dict": model.state_dict()},
            path="checkpoint_1000.pt",
            compress=True,
            metadata=None,
        )
    saver.shutdown(timeout=60)
    assert saver.get_stats()["compression_ratio"] > 0
    model.load_state_dict(load("checkpoint_1000.pt")["model_state_dict"])
    assert "checkpoint_save" in monitor.get_summary()
