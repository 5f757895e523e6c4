"""Default settings: the file holds the state of the call, whatever legal code runs after it."""

import copy
import gc
import multiprocessing
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from penstock import errors
from penstock.checkpoints import snapshot as snapshots
from penstock.checkpoints.load import load_checkpoint
from penstock.checkpoints.saver import AsyncCheckpointSaver

from .conftest import FUSED, assert_equal, needs_torch

REPEATS = 30
WIDTH = 640  # about 5 MB with Adam's moments: copied by several threads


class Trained:
    """A network in training; `extra` goes into the state, too."""

    def __init__(self, optimizer=torch.optim.Adam, **options):
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(64, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        )
        self.optimizer = optimizer(self.net.parameters(), **({"lr": 1e-3} | options))
        self.extra = {}
        self.step()

    @property
    def weight(self):
        return self.net[2].weight

    def loss(self):
        return self.net(torch.randn(8, 64)).square().mean()

    def step(self):
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def state(self):
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "extra": self.extra,
        }


def snapshot(value):
    """An independent copy of a state, by the slowest and plainest means."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().resolve_conj().resolve_neg().contiguous()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return type(value)((key, snapshot(child)) for key, child in value.items())
    if isinstance(value, list | tuple | set):
        return type(value)(snapshot(child) for child in value)
    return bytearray(value) if isinstance(value, bytearray) else value


def plain(value):
    """Arrays as tensors, so that one comparison serves all."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(child) for child in value)
    return value


# Each case is a generator: it yields what is saved, and goes on as the training would.


def ema_swap_by_data(t):
    """diffusers' EMAModel: store, copy_to, evaluate, restore."""
    shadow = [p.detach().clone().zero_() for p in t.net.parameters()]
    while True:
        yield t.state()
        stored = [p.detach().clone() for p in t.net.parameters()]
        for s, p in zip(shadow, t.net.parameters(), strict=True):
            p.data.copy_(s)
        t.loss()
        for s, p in zip(stored, t.net.parameters(), strict=True):
            p.data.copy_(s)
        for s, p in zip(shadow, t.net.parameters(), strict=True):
            s.lerp_(p.detach(), 0.1)
        t.step()


def ema_swap_by_swap_tensors(t):
    if not hasattr(torch.utils, "swap_tensors"):
        pytest.skip("torch before 2.3 cannot swap tensors")
    twin = copy.deepcopy(t.net)
    while True:
        t.extra = {"twin": twin.state_dict()}
        yield t.state()
        t.extra = {}
        t.optimizer.zero_grad(set_to_none=True)
        for p, q in zip(t.net.parameters(), twin.parameters(), strict=True):
            q.data.mul_(0.5)
            torch.utils.swap_tensors(p, q)


def ema_as_a_module(t):
    """timm's ModelEma: another module, written in place, in the state."""
    twin = copy.deepcopy(t.net)
    while True:
        t.extra = {"ema": twin.state_dict()}
        yield t.state()
        t.step()
        for e, p in zip(twin.state_dict().values(), t.net.state_dict().values(), strict=True):
            e.copy_(e * 0.9 + p * 0.1)


def averaged_model(t):
    average = torch.optim.swa_utils.AveragedModel(t.net)
    while True:
        t.extra = {"swa": average.state_dict()}
        yield t.state()
        t.step()
        average.update_parameters(t.net)
        torch.optim.swa_utils.update_bn([torch.randn(8, 64)], average)


def rows_by_data(t):
    while True:
        yield t.state()
        t.weight.data[:64] = 0
        t.weight.data[64:, :8].normal_()


def dormant_neurons_reset(t):
    while True:
        yield t.state()
        for values in t.optimizer.state.values():
            values["exp_avg"].data[:8] = 0
            values["exp_avg_sq"].data[:8].fill_(7)
        t.step()


def weights_clipped(t):
    while True:
        yield t.state()
        for p in t.net.parameters():
            p.data.clamp_(-0.01, 0.01)
        t.step()


def max_norm(t):
    while True:
        yield t.state()
        t.weight.data.renorm_(2, 0, 0.05)
        t.step()


def flat_vector(t):
    while True:
        flat = nn.utils.parameters_to_vector(t.net.parameters()).detach()
        nn.utils.vector_to_parameters(flat, t.net.parameters())
        yield t.state()
        flat.mul_(0.5).add_(1)


def numpy_alias(t):
    array = t.weight.detach().numpy()
    moment = t.optimizer.state[t.weight]["exp_avg"].numpy()
    while True:
        yield t.state()
        array[:] += 1
        moment[:] *= 2


def dlpack_alias(t):
    other = torch.from_dlpack(t.weight.detach())
    while True:
        yield t.state()
        other.mul_(1.5)


def assigned(t):
    while True:
        yield t.state()
        changed = {name: value * 2 for name, value in t.net.state_dict().items()}
        t.net.load_state_dict(changed, assign=True)
        for value in t.net.state_dict().values():
            value.add_(1)


def half_and_back(t):
    while True:
        yield t.state()
        t.net.half()
        gc.collect()
        t.net.float()
        for p in t.net.parameters():
            p.data.add_(1)


def shrinking_and_growing(t):
    sizes = [WIDTH, WIDTH // 2, 1, 0, WIDTH * 2]
    turn = 0
    while True:
        t.extra = {"weight": t.weight}
        yield {"extra": t.extra}
        turn += 1
        t.weight.data = torch.randn(sizes[turn % 5], WIDTH)
        gc.collect()


def storage_given_up(t):
    spare = torch.randn(WIDTH, WIDTH)
    while True:
        yield {"spare": spare, **t.state()}
        spare.untyped_storage().resize_(0)
        gc.collect()
        spare.untyped_storage().resize_(WIDTH * WIDTH * 4)
        spare.normal_()


def parameters_come_and_go(t):
    while True:
        yield t.state()
        extra = nn.Parameter(torch.randn(100, 100))
        t.optimizer.add_param_group({"params": [extra]})
        t.step()
        yield t.state()
        group = t.optimizer.param_groups.pop()
        for p in group["params"]:
            t.optimizer.state.pop(p, None)
        t.optimizer.state.clear()
        t.step()


def tied_weights(t):
    tied = nn.Linear(WIDTH, WIDTH)
    tied.weight = t.net[2].weight
    while True:
        t.extra = {"tied": tied.state_dict()}
        yield t.state()
        tied.weight.data.neg_()
        t.net[2].weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        tied.weight = t.net[2].weight


def aliases_made_later(t):
    one, two = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    while True:
        yield {"one": one, "two": two}
        two.data = one.data
        one.add_(1)
        two.data = torch.randn(WIDTH, WIDTH)


def many_views(t):
    w = torch.randn(8, 64, 1024)
    while True:
        yield {
            "w": w,
            "flat": w.view(-1),
            "other": w.view(64, 8192),
            "turned": w.transpose(0, 2),
            "part": w[1:3, ::2],
            "last": w[-1],
            "int": w.view(torch.int32),
            "broadcast": w[0, 0, :4].expand(100, 4),
        }
        w.normal_()


def conjugated_and_negated(t):
    z = torch.randn(512, 512, dtype=torch.complex64)
    while True:
        yield {
            "z": z,
            "conj": z.conj(),
            "neg": z.conj().imag,
            "h": z.mH if hasattr(z, "mH") else z.conj().T,
            "real": torch.view_as_real(z),
        }
        z.mul_(2j).add_(1)


def channels_last(t):
    net = nn.Conv2d(32, 64, 5).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    while True:
        yield {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        net.weight.data.mul_(1.1)
        net(torch.randn(1, 32, 9, 9)).sum().backward()
        optimizer.step()


def in_another_thread(t):
    while True:
        yield t.state()
        thread = threading.Thread(target=t.step)
        thread.start()
        thread.join()


def unknown_optimizer(t):
    other = torch.optim.SGD(t.net.parameters(), lr=0.1)
    while True:
        yield t.state()
        t.loss().backward()
        other.step()
        t.step()


def inference_tensors(t):
    while True:
        with torch.inference_mode():
            made = torch.randn(WIDTH, WIDTH)
        yield {"made": made, **t.state()}
        with torch.inference_mode():
            made.mul_(3)
        t.step()


def compiled_step(t):
    if not hasattr(torch, "compiler"):
        pytest.skip("torch before 2.1")
    step = torch.compile(t.optimizer.step, backend="eager")
    while True:
        yield t.state()
        t.loss().backward()
        step()


def scaled_gradients(t):
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("torch before 2.3 scales on GPUs only")
    scaler = torch.amp.GradScaler("cpu")
    while True:
        t.extra = {"scaler": scaler.state_dict()}
        yield t.state()
        scaler.scale(t.loss()).backward()
        scaler.step(t.optimizer)
        scaler.update()


def lbfgs(t):
    net = nn.Linear(200, 200)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    data = torch.randn(16, 200)

    def closure():
        optimizer.zero_grad()
        loss = net(data).square().mean()
        loss.backward()
        return loss

    while True:
        yield {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        optimizer.step(closure)


def containers(t):
    state = {"list": [1, [2, {"deep": torch.ones(4)}]], "set": {1, (2, 3)}, "bytes": bytearray(8)}
    while True:
        yield state
        state["list"][1].append(len(state["list"][1]))
        state["list"][1][1]["deep"].add_(1)
        state["set"].add(len(state["set"]) + 10)
        state["bytes"][0] += 1


def arrays(t):
    array = np.arange(300_000, dtype=np.float64)
    while True:
        yield {"array": array, "part": array[::3], "turned": array.reshape(1000, 300).T}
        array += 1


def freed_memory(t):
    while True:
        yield t.state()
        t.__init__()
        gc.collect()
        [torch.full((WIDTH, WIDTH), 7.0) for _ in range(4)]


def _add_one(tensor):
    tensor.add_(1)


def forked_workers(t):
    """Hogwild: the parameters lie in shared memory, and children write them."""
    shared = torch.randn(WIDTH, WIDTH).share_memory_()
    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)  # OpenMP does not survive a fork
    while True:
        yield {"shared": shared}
        child = context.Process(target=_add_one, args=(shared,))
        child.start()
        child.join()
        assert child.exitcode == 0


def optimizers(kind, **options):
    def case(t):
        t.__init__(kind, **options)
        while True:
            yield t.state()
            t.step()
            t.step()

    case.__name__ = f"{kind.__name__} {options}"
    return case


CASES = [
    ema_swap_by_data,
    ema_swap_by_swap_tensors,
    ema_as_a_module,
    averaged_model,
    rows_by_data,
    dormant_neurons_reset,
    weights_clipped,
    max_norm,
    flat_vector,
    numpy_alias,
    dlpack_alias,
    pytest.param(assigned, marks=needs_torch("2.1", "load_state_dict(assign=True)")),
    half_and_back,
    shrinking_and_growing,
    storage_given_up,
    parameters_come_and_go,
    tied_weights,
    aliases_made_later,
    many_views,
    conjugated_and_negated,
    channels_last,
    in_another_thread,
    unknown_optimizer,
    inference_tensors,
    compiled_step,
    scaled_gradients,
    lbfgs,
    containers,
    arrays,
    freed_memory,
    forked_workers,
    optimizers(torch.optim.Adam, foreach=True),
    pytest.param(optimizers(torch.optim.Adam, fused=True), marks=FUSED),
    optimizers(torch.optim.Adam, foreach=False),
    optimizers(torch.optim.SGD, momentum=0.9),
]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, on compiling
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_file_holds_the_state_of_the_call(tmp_path, case):
    threads = torch.get_num_threads()
    training = Trained()
    states = case(training)
    try:
        with AsyncCheckpointSaver(
            tmp_path,
            optimizers=[training.optimizer],
            modules=[training.net],
            keep_last=2,
            handle_signals=False,
        ) as saver:
            for number in range(REPEATS):
                state = next(states)
                expected = snapshot(state)
                saver.save_async(state, f"{number}.pt", compress=number % 3 > 0)
                del state
                if number % 2:
                    time.sleep(0.001)
                # What the training does between two saves runs when the next state is asked for.
                ahead = next(states)
                saver.wait()
                assert_equal(plain(load_checkpoint(tmp_path)), plain(expected))
                del ahead
            assert saver.get_stats()["total_saved"] == REPEATS
    finally:
        torch.set_num_threads(threads)
        states.close()


def test_an_alias_is_one_tensor_again_and_a_mirror_is_not(tmp_path):
    z = torch.randn(40, 40, dtype=torch.complex64)
    with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
        saver.save_async({"a": z, "b": z.detach(), "c": z.conj(), "d": z.T}, "x.pt")
    loaded = load_checkpoint(tmp_path)
    assert loaded["a"] is loaded["b"]
    assert torch.equal(loaded["c"], z.conj())
    assert torch.equal(loaded["d"], z.T)


def test_memory_that_was_given_up_is_refused_by_name(tmp_path):
    gone = torch.randn(1000)
    part = gone[::2]
    gone.untyped_storage().resize_(0)
    with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
        with pytest.raises(errors.UnsupportedValue, match=r"model\.shard .*memory was given up"):
            saver.save_async({"model": {"shard": gone}}, "x.pt")
        with pytest.raises(errors.UnsupportedValue, match=r"model\.shard .*memory was given up"):
            saver.save_async({"model": {"shard": part}}, "x.pt")
        saver.save_async({"x": 1}, "y.pt").wait()


@pytest.mark.parametrize("writes", [1, 1000])
def test_a_write_by_another_thread_during_the_call(tmp_path, monkeypatch, writes):
    """It is copied again; when that does not help, the call says so. Never half of each."""
    weight = torch.zeros(3_000_000)
    copy_all = snapshots.parallel_list
    left = [writes]

    def disturbed(*arguments, **options):
        if left[0]:
            left[0] -= 1
            thread = threading.Thread(target=lambda: weight[1_000_000:].add_(1))
            thread.start()
            thread.join()
        return copy_all(*arguments, **options)

    monkeypatch.setattr(snapshots, "parallel_list", disturbed)
    with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
        if writes == 1:
            saver.save_async({"w": weight}, "x.pt").wait()
            assert torch.equal(load_checkpoint(tmp_path)["w"], weight)
        else:
            with pytest.raises(errors.SnapshotDiscarded, match="w was written by another thread"):
                saver.save_async({"w": weight}, "x.pt")
            assert saver.latest() is None


def test_sets_of_tuples_and_module_versions_come_back(tmp_path):
    net = nn.Sequential(nn.BatchNorm1d(4))
    state = {"seen": {(1, 2), (3, "x")}, "frozen": frozenset({frozenset({1})})}
    with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
        saver.save_async({**state, "net": net.state_dict()}, "x.pt")
    loaded = load_checkpoint(tmp_path)
    assert loaded["seen"] == state["seen"]
    assert loaded["frozen"] == state["frozen"]
    assert loaded["net"]._metadata == net.state_dict()._metadata
    assert loaded["net"]._metadata["0"]["version"] == 2
    net.load_state_dict(loaded["net"])


@pytest.mark.parametrize("elements", [0, 400_000])
def test_memory_that_another_thread_takes_away_meanwhile(elements):
    """While the call waits for room, say: nothing is read from where the tensor was."""
    tensor = torch.full((200_000,), 7.0)
    taken = snapshots.Snapshot({"deep": {"t": tensor}})
    tensor.untyped_storage().resize_(4 * elements)
    refusals = (errors.SnapshotDiscarded, errors.UnsupportedValue)
    with pytest.raises(refusals, match=r"deep\.t .*(given other memory|memory was given up)"):
        taken.copy(np.empty(taken.size_bytes, np.uint8))


def test_first_saves_of_several_threads_are_all_taken(tmp_path):
    for number in range(10):
        with AsyncCheckpointSaver(tmp_path / str(number), handle_signals=False) as saver:
            start = threading.Barrier(4)
            handles = []

            def save(name, start=start, handles=handles, saver=saver):
                start.wait()
                handles.append(saver.save_async({"x": torch.ones(3)}, f"{name}.pt"))

            threads = [threading.Thread(target=save, args=(name,)) for name in "abcd"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len([handle.wait() for handle in handles]) == 4


def test_a_hidden_name_is_refused(tmp_path):
    with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
        for name in (".b.pt", ".penstock.lock"):
            with pytest.raises(errors.UsageError, match="begin with"):
                saver.save_async({}, name)


def test_loading_where_the_default_device_has_no_memory(tmp_path):
    with AsyncCheckpointSaver(tmp_path, handle_signals=False) as saver:
        saver.save_async({"x": torch.arange(3)}, "a.pt").wait()
    with torch.device("meta"):
        assert load_checkpoint(tmp_path / "a.pt")["x"].tolist() == [0, 1, 2]
