"""lazy=True: what is published is the state of one moment, as long as only steps write."""

import copy
import io
import pickle
import random
import threading
import time
import warnings

import pytest
import torch

from penstock import errors
from penstock.checkpoints import lazy
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver

from .conftest import FUSED, Training, assert_equal

BIG = 1500  # wide enough for several chunks of copying


@pytest.fixture
def big():
    made = Training(width=BIG * 40)
    made.step()
    return made


def make(tmp_path, training, **options):
    return AsyncCheckpointSaver(
        tmp_path,
        optimizers=[training.optimizer],
        modules=[training.net],
        lazy=True,
        handle_signals=False,
        **options,
    )


def only_the_barrier_copies(monkeypatch):
    """As if the background threads never got a core."""
    copy_all = lazy.LazyCapture.help

    def idle(self):
        if threading.current_thread() is threading.main_thread():
            copy_all(self)

    monkeypatch.setattr(lazy.LazyCapture, "help", idle)


@pytest.mark.parametrize(
    "options",
    [{}, {"foreach": True}, pytest.param({"fused": True}, marks=FUSED), {"amsgrad": True}],
)
def test_steps_right_after_a_save_are_not_in_it(tmp_path, options):
    training = Training(width=BIG * 40, **options)
    training.step()
    with make(tmp_path, training) as saver:
        for round_ in range(3):
            expected = training.copy()
            saver.save_async(training.state(), f"{round_}.pt")
            training.step()
            training.step()
            saver.wait()
            assert_equal(load_checkpoint(tmp_path / f"{round_}.pt"), expected)
        assert saver.get_stats()["total_discarded"] == 0


def test_everything_owned_is_lazy_and_the_rest_is_not(saver, training):
    saver.save_async(training.state(), "x.pt")
    names = lazy_names(saver)
    assert "model.0.weight" in names
    assert "optimizer.state.0.exp_avg" in names
    assert "model.1.running_mean" not in names  # buffers change in forward


def lazy_names(saver):
    snapshot = saver._active.snapshot
    return {snapshot.name_of(tensor) for tensor in snapshot.lazy}


def test_batch_norm_statistics_change_in_forward(tmp_path, big):
    """Running statistics change without a version bump, in forward: they are copied at once."""
    with make(tmp_path, big) as saver:
        expected = big.copy()
        saver.save_async(big.state(), "x.pt")
        big.net(torch.randn(8, 32) * 100)
        saver.wait()
        assert_equal(load_checkpoint(tmp_path / "x.pt"), expected)


def test_load_state_dict_waits(tmp_path, big):
    with make(tmp_path, big) as saver:
        expected = big.copy()
        saver.save_async(big.state(), "x.pt")
        big.net.load_state_dict(Training(width=BIG * 40, seed=5).net.state_dict())
        saver.wait()
        assert_equal(load_checkpoint(tmp_path / "x.pt"), expected)
        saver.save_async(big.state(), "y.pt")
        big.net[0].load_state_dict(Training(width=BIG * 40, seed=6).net[0].state_dict())
        saver.wait()
        other = Training(width=BIG * 40, seed=7)
        other.step()
        saver.save_async(big.state(), "z.pt")
        expected = big.copy()
        big.optimizer.load_state_dict(other.optimizer.state_dict())
        big.step()
        saver.wait()
        assert_equal(load_checkpoint(tmp_path / "z.pt"), expected)
        assert saver.get_stats()["total_discarded"] == 0


def add_in_place(training):
    with torch.no_grad():
        training.net[0].weight.add_(1)


def add_to_data(training):
    training.net[0].weight.data.add_(1)


def add_to_moment(training):
    training.optimizer.state[training.net[0].weight]["exp_avg"].mul_(0.5)


def through_numpy(training):
    training.net[0].weight.detach().numpy()[:] += 1


@pytest.mark.parametrize("change", [add_in_place, add_to_moment])
def test_a_change_past_the_optimizer_is_never_published(tmp_path, big, change):
    with make(tmp_path, big) as saver:
        saver.save_async(big.state(), "torn.pt")
        change(big)
        with pytest.warns(errors.PenstockWarning, match=r"(model\.0\.weight|exp_avg)"):
            big.step()
        saver.wait()
        assert not (tmp_path / "torn.pt").exists()
        stats = saver.get_stats()
        assert stats["total_discarded"] == 1
        assert len(stats["eager_tensors"]) == 1
        # From now on that tensor is copied at once: the same change does no harm.
        for _ in range(2):
            expected = big.copy()
            saver.save_async(big.state(), "good.pt")
            change(big)
            big.step()
            saver.wait()
            assert_equal(load_checkpoint(tmp_path / "good.pt"), expected)
        assert saver.get_stats()["total_discarded"] == 1


@pytest.mark.parametrize("when", ["before it is copied", "after"])
@pytest.mark.parametrize("change", [add_to_data, through_numpy])
def test_a_change_that_leaves_no_version_is_caught_by_samples(tmp_path, change, when, monkeypatch):
    """Such writes leave no trace but the bytes."""
    if when == "before it is copied":
        only_the_barrier_copies(monkeypatch)
    net = torch.nn.Sequential(torch.nn.Linear(1000, 1000, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    training = type("T", (), {"net": net, "optimizer": optimizer})
    with AsyncCheckpointSaver(
        tmp_path, optimizers=optimizer, lazy=True, handle_signals=False
    ) as saver:
        handle = saver.save_async({"model": net.state_dict()}, "torn.pt")
        while when == "after" and (saver._active._todo or saver._active._busy):
            time.sleep(0.001)
        change(training)
        net(torch.randn(2, 1000)).sum().backward()
        with pytest.warns(errors.PenstockWarning, match=r"model\.0\.weight"):
            optimizer.step()
        with pytest.raises(errors.SnapshotDiscarded):
            handle.wait()
        assert not (tmp_path / "torn.pt").exists()


def test_the_tensor_is_named_once(tmp_path, big):
    with make(tmp_path, big) as saver, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(3):
            saver.save_async(big.state(), f"{i}.pt")
            add_in_place(big)
            big.step()
        saver.wait()
    assert len([w for w in caught if w.category is errors.PenstockWarning]) == 1


def test_a_save_without_a_further_step_is_published(tmp_path, big):
    """A long evaluation follows: nobody calls the saver, yet the file appears."""
    with make(tmp_path, big) as saver:
        expected = big.copy()
        saver.save_async(big.state(), "x.pt")
        deadline = time.monotonic() + 30
        while not (tmp_path / "x.pt").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert_equal(load_checkpoint(tmp_path / "x.pt"), expected)


def test_a_change_before_settling_is_not_published(tmp_path, big, monkeypatch, caplog):
    monkeypatch.setattr(lazy, "SETTLE_AFTER_S", 0.2)
    with make(tmp_path, big) as saver:
        handle = saver.save_async(big.state(), "x.pt")
        while saver._active._todo or saver._active._busy:
            time.sleep(0.001)
        add_to_data(big)
        while not handle.done():
            time.sleep(0.01)
        assert handle.status == "discarded"
        assert not (tmp_path / "x.pt").exists()
    assert "model.0.weight" in caplog.text  # the writer thread logs last, and has ended now


def test_parameters_that_moved_are_not_taken_for_owned(tmp_path, big):
    with make(tmp_path, big) as saver:
        saver.save_async(big.state(), "a.pt")
        big.step()
        big.net[0].weight.data = big.net[0].weight.data.clone()
        expected = big.copy()
        saver.save_async(big.state(), "b.pt")
        big.step()
        saver.wait()
        assert_equal(load_checkpoint(tmp_path / "b.pt"), expected)


def test_memory_that_is_swapped_away_in_the_middle(tmp_path, big, monkeypatch):
    """The copy reads the old memory: it must still be there, and hold what was saved."""
    only_the_barrier_copies(monkeypatch)
    weight = big.net[0].weight
    with make(tmp_path, big) as saver:
        expected = weight.detach().clone()
        saver.save_async({"w": weight.detach()}, "view.pt")
        weight.data = expected + 1
        saver.save_async({"w": weight}, "itself.pt")
        weight.data = torch.zeros_like(expected)
        saver.wait()
        assert torch.equal(load_checkpoint(tmp_path / "view.pt")["w"], expected)
        assert torch.equal(load_checkpoint(tmp_path / "itself.pt")["w"], expected + 1)


def test_after_loading_an_optimizer_its_new_tensors_are_lazy(tmp_path, big):
    with make(tmp_path, big) as saver:
        saver.save_async(big.state(), "a.pt")
        big.step()
        other = Training(width=BIG * 40, seed=7)
        other.step()
        big.optimizer.load_state_dict(other.optimizer.state_dict())
        saver.save_async(big.state(), "b.pt")
        assert "optimizer.state.0.exp_avg" in lazy_names(saver)


def test_two_optimizers(tmp_path):
    one, two = Training(width=4000, seed=1), Training(width=4000, seed=2)
    one.step()
    two.step()
    both = [one.optimizer, two.optimizer]
    with AsyncCheckpointSaver(tmp_path, optimizers=both, lazy=True, handle_signals=False) as saver:
        for i in range(5):
            expected = {"one": one.copy(), "two": two.copy()}
            saver.save_async({"one": one.state(), "two": two.state()}, f"{i}.pt")
            (one if i % 2 else two).step()
            (two if i % 2 else one).step()
            saver.wait()
            assert_equal(load_checkpoint(tmp_path / f"{i}.pt"), expected)


def test_non_contiguous_parameters(tmp_path):
    net = torch.nn.Conv2d(64, 64, 7).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with AsyncCheckpointSaver(
        tmp_path, optimizers=[optimizer], lazy=True, handle_signals=False
    ) as saver:
        for i in range(3):
            expected = net.weight.detach().clone()
            saver.save_async({"w": net.state_dict(), "o": optimizer.state_dict()}, f"{i}.pt")
            net(torch.randn(1, 64, 9, 9)).sum().backward()
            optimizer.step()
            saver.wait()
            assert torch.equal(load_checkpoint(tmp_path / f"{i}.pt")["w"]["weight"], expected)


def test_random_interleavings(tmp_path):
    """Many small random programs against the plain rule: what is saved is what was there."""
    chance = random.Random(0)
    training = Training(width=700)
    training.step()
    ema = {name: tensor.clone() for name, tensor in training.net.state_dict().items()}
    expected = {}
    with make(tmp_path, training, delta_every=4) as saver:
        for number in range(120):
            for _ in range(chance.randrange(3)):
                training.step()
            if chance.random() < 0.3:
                for name, tensor in training.net.state_dict().items():
                    ema[name].copy_(tensor)
            if chance.random() < 0.2:
                time.sleep(chance.random() * 0.01)
            state = {**training.state(), "ema": ema, "list": [number]}
            expected[number] = ({**training.copy(), "ema": copy.deepcopy(ema)}, number)
            saver.save_async(state, f"{number}.pt", compress=chance.random() < 0.7)
            state["list"].append("later")
        saver.wait()
        for number, (state, value) in expected.items():
            loaded = load_checkpoint(tmp_path / f"{number}.pt")
            assert loaded.pop("list") == [value]
            assert_equal(loaded, state)
        assert saver.get_stats()["total_discarded"] == 0


def test_hooked_modules_and_optimizers_can_be_copied(saver, training):
    twin = copy.deepcopy(training.net)
    twin.load_state_dict(training.net.state_dict())
    pickle.loads(pickle.dumps(training.net))
    buffer = io.BytesIO()
    torch.save(training.net, buffer)
    copy.deepcopy(training.optimizer)
    with pytest.raises(errors.UsageError, match="belongs to its process"):
        pickle.dumps(saver)


def test_hooks_go_with_the_saver(tmp_path, training):
    before = len(training.optimizer._optimizer_step_pre_hooks)
    with make(tmp_path, training):
        assert len(training.optimizer._optimizer_step_pre_hooks) == before + 1
    assert len(training.optimizer._optimizer_step_pre_hooks) == before
    training.step()


def test_threads_come_late_and_go(tmp_path, training):
    threads = set(threading.enumerate())
    with make(tmp_path, training) as saver:
        assert set(threading.enumerate()) == threads
        saver.save_async(training.state(), "x.pt")
        assert not any(t.daemon for t in set(threading.enumerate()) - threads)
    assert set(threading.enumerate()) == threads


def test_staging_memory_is_used_again(tmp_path, big):
    with make(tmp_path, big) as saver:
        addresses = set()
        for i in range(4):
            saver.save_async(big.state(), f"{i}.pt")
            addresses.add(saver._active._base_address)
            big.step()
            saver.wait()
        assert len(addresses) == 1
