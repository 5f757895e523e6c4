"""PrioritySampler: the odds are those of the formula, the behaviour is TorchRL's."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from penstock import errors
from penstock.core.pack import Item, PackWriter
from penstock.replay.torchrl.sampler import PrioritySampler, PrioritySliceSampler
from penstock.replay.torchrl.storage import CompressedStorage


def items(count, start=0):
    numbers = torch.arange(start, start + count)
    return TensorDict(
        {"n": numbers, "pixels": (numbers % 251).to(torch.uint8)[:, None].repeat(1, 300)},
        batch_size=[count],
    )


def make(size=100, storage=CompressedStorage, batch_size=32, **options):
    sampler = PrioritySampler(size, **{"seed": 0, **options})
    return TensorDictReplayBuffer(
        storage=storage(size), sampler=sampler, batch_size=batch_size, priority_key="td_error"
    )


def priorities(buffer):
    sampler = buffer.sampler
    return sampler._tree.get(np.arange(sampler.max_size))


@pytest.mark.parametrize("storage", [CompressedStorage, LazyTensorStorage])
def test_the_loop_of_a_learner(storage):
    buffer = make(storage=storage)
    buffer.extend(items(60))
    for turn in range(20):
        batch = buffer.sample()
        assert torch.equal(batch["n"], batch["index"])
        assert batch["priority_weight"].dtype == torch.float32
        assert ((batch["priority_weight"] > 0) & (batch["priority_weight"] <= 1)).all()
        batch["td_error"] = batch["n"].float() + turn
        buffer.update_tensordict_priority(batch)
        slots = batch["index"].numpy()
        wanted = (slots + turn + 1e-8) ** 0.7
        np.testing.assert_allclose(priorities(buffer)[slots], wanted)
    assert (priorities(buffer)[60:] == 0).all()


def test_odds_and_weights():
    buffer = make(4, alpha=0.5, beta=0.8, eps=0.0, batch_size=40_000)
    buffer.extend(items(4))
    given_ = np.array([1.0, 4.0, 9.0, 100.0])
    buffer.update_priority(torch.arange(4), torch.from_numpy(given_))
    batch = buffer.sample()
    odds = given_**0.5 / (given_**0.5).sum()
    counts = np.bincount(batch["index"].numpy(), minlength=4) / 40_000
    np.testing.assert_allclose(counts, odds, atol=0.015)
    # w = (N P) ** -beta, scaled so that the largest possible one is 1
    wanted = (odds / odds.min()) ** -0.8
    np.testing.assert_allclose(batch["priority_weight"], wanted[batch["index"]], rtol=1e-6)


def test_new_items_get_the_largest_priority_seen():
    buffer = make(10, alpha=1.0, eps=0.0)
    buffer.extend(items(3))
    assert priorities(buffer)[:3].tolist() == [1, 1, 1]  # nothing is known yet
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([5.0, 2.0]))
    buffer.extend(items(2, 3))
    buffer.add(items(1, 5)[0])
    buffer.update_priority(torch.tensor([0]), torch.tensor([0.5]))
    buffer.extend(items(1, 6))
    assert priorities(buffer).tolist() == [0.5, 2, 1, 5, 5, 5, 5, 0, 0, 0]
    assert buffer.sampler.default_priority == 5
    data = items(2, 7)
    data["td_error"] = torch.tensor([3.0, 4.0])
    buffer = make(10, alpha=1.0, eps=0.0)
    buffer.extend(data)  # a priority that comes with the data counts
    assert priorities(buffer)[:2].tolist() == [3, 4]


def test_overwritten_slots_start_anew():
    buffer = make(10, alpha=1.0, eps=0.0)
    buffer.extend(items(10))
    buffer.update_priority(torch.arange(10), torch.full((10,), 0.25))
    buffer.extend(items(4, 10))
    assert priorities(buffer).tolist() == [1, 1, 1, 1, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25]
    buffer.empty()
    assert priorities(buffer).sum() == 0
    with pytest.raises(errors.UsageError, match="empty storage"):
        buffer.sample()


def test_slots_with_coordinates():
    sampler = PrioritySampler(60, alpha=1.0, seed=1)
    buffer = TensorDictReplayBuffer(
        storage=CompressedStorage(60, ndim=2), sampler=sampler, batch_size=50, dim_extend=0
    )
    buffer.extend(items(40).reshape(8, 5))
    assert np.count_nonzero(priorities(buffer)) == 40
    batch = buffer.sample()
    assert batch["index"].shape == (50, 2)
    assert torch.equal(batch["n"], batch["index"][:, 0] * 5 + batch["index"][:, 1])
    batch["td_error"] = batch["n"].float() + 10
    buffer.update_tensordict_priority(batch)
    slots = batch["n"].numpy()
    np.testing.assert_allclose(priorities(buffer)[slots], slots + 10, rtol=1e-6)
    with pytest.raises(errors.UsageError, match="give storage="):
        sampler.update_priority(torch.zeros(3, 2, dtype=torch.long), 1.0)


def test_slots_that_were_not_stored_are_left_out():
    sampler = PrioritySampler(5, alpha=1.0, eps=0.0)
    sampler.update_priority(torch.tensor([-1, 2, -1]), torch.tensor([9.0, 3.0, 9.0]))
    assert sampler._tree.get(np.arange(5)).tolist() == [0, 0, 3, 0, 0]
    assert sampler.default_priority == 3
    sampler.update_priority(torch.tensor([-1]), torch.tensor([7.0]))
    assert sampler.default_priority == 3


def test_the_same_seed_gives_the_same_batches():
    runs = []
    for _ in range(2):
        buffer = make(seed=5)
        buffer.extend(items(100))
        runs.append([buffer.sample()["n"].tolist() for _ in range(5)])
    assert runs[0] == runs[1]
    assert len({tuple(batch) for batch in runs[0]}) == 5
    runs = []
    for seed in (1, 2):
        buffer = make(seed=seed)
        buffer.extend(items(100))
        buffer.set_rng(torch.Generator().manual_seed(3))
        runs.append([buffer.sample()["n"].tolist() for _ in range(5)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("index", "priority", "message"),
    [
        ([0, 1], [1.0, float("nan")], "nan is not a number from 0"),
        ([0, 1], [1.0, -2.0], "-2.0 is not a number from 0; give its absolute value"),
        ([0], float("inf"), "inf is not"),
        ([0, 1], [1.0, 2.0, 3.0], "3 priorities for 2 slots"),
        ([0, 100], [1.0, 2.0], "100"),
    ],
)
def test_wrong_priorities_change_nothing(index, priority, message):
    buffer = make()
    buffer.extend(items(50))
    before = priorities(buffer), buffer.sampler.default_priority
    with pytest.raises(errors.UsageError, match=message):
        buffer.sampler.update_priority(torch.tensor(index), priority, storage=buffer.storage)
    assert np.array_equal(priorities(buffer), before[0])
    assert buffer.sampler.default_priority == before[1]


def test_wrong_settings():
    for options in ({"alpha": -1}, {"beta": float("nan")}, {"eps": -1}, {"reduction": "sum"}):
        with pytest.raises(errors.UsageError, match=next(iter(options))):
            PrioritySampler(10, **options)
    storage = CompressedStorage(10)
    storage.set(range(5), items(5))
    with pytest.raises(errors.UsageError, match="no slot has a priority"):
        PrioritySampler(10).sample(storage, 3)
    sampler = PrioritySampler(10)
    sampler.update_priority(torch.tensor([9]), 1.0)
    with pytest.raises(errors.UsageError, match="slot 9 has a priority, the storage has only 5"):
        sampler.sample(storage, 3)


def test_alpha_may_change():
    buffer = make(10, alpha=0.5, eps=0.0)
    buffer.extend(items(10))
    values = torch.arange(1.0, 11.0)
    buffer.update_priority(torch.arange(10), values)
    buffer.sampler.alpha = 0.9
    np.testing.assert_allclose(priorities(buffer), values.double().numpy() ** 0.9, rtol=1e-6)
    buffer.sampler.alpha = 0.0
    with pytest.warns(errors.PenstockWarning, match="away from 0.*drawn alike"):
        buffer.sampler.alpha = 0.5
    np.testing.assert_array_equal(priorities(buffer), np.ones(10))
    assert buffer.sampler._sum_tree.query(0, 10) == 10
    assert (buffer.sampler._min_tree.query(0, 10), buffer.sampler._sum_tree[3]) == (1, 1)
    buffer.update_priority(torch.arange(5), values[:5])
    np.testing.assert_allclose(priorities(buffer)[:5], values[:5].double().numpy() ** 0.5)


def test_the_largest_priority_within_the_buffer():
    for within, wanted in ((False, 50.0), (True, 3.0)):
        buffer = make(10, alpha=0.5, eps=0.0, max_priority_within_buffer=within)
        buffer.extend(items(10))
        buffer.update_priority(torch.arange(10), torch.tensor([50.0, *[3.0] * 9]))
        assert buffer.sampler.default_priority == 50
        buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))
        assert buffer.sampler.default_priority == pytest.approx(wanted)
    buffer.update_priority(torch.tensor([4]), torch.tensor([9.0]))
    buffer.extend(items(5))  # slot 4, the largest, is written over: TorchRL forgets it as well
    assert buffer.sampler.default_priority == 1.0


def test_weights_of_another_type():
    buffer = make(10, dtype=torch.float64)
    buffer.extend(items(10))
    assert buffer.sample()["priority_weight"].dtype == torch.float64
    for sampler in (PrioritySampler, PrioritySliceSampler):
        with pytest.raises(errors.UsageError, match=r"dtype is torch.int64"):
            sampler(
                10,
                0.5,
                0.5,
                dtype=torch.int64,
                **{"slice_len": 2} if "Slice" in sampler.__name__ else {},
            )


def slices(size=100, storage=CompressedStorage, **options):
    sampler = PrioritySliceSampler(
        size, alpha=1.0, beta=1.0, eps=0.0, slice_len=3, traj_key="episode", **options
    )
    buffer = TensorDictReplayBuffer(
        storage=storage(size), sampler=sampler, batch_size=30, priority_key="td_error"
    )
    data = items(63)
    data["episode"] = torch.arange(63) // 7
    data["next", "done"] = (torch.arange(63) % 7 == 6).unsqueeze(-1)
    buffer.extend(data)
    return buffer


@pytest.mark.parametrize("storage", [CompressedStorage, LazyTensorStorage])
def test_slices_by_priority(storage, tmp_path):
    buffer = slices(storage=storage)
    values = torch.zeros(63) + 1e-6
    values[[8, 9, 30]] = torch.tensor([1.0, 2.0, 5.0])
    buffer.update_priority(torch.arange(63), values)
    starts = []
    for _ in range(100):
        batch = buffer.sample()
        steps = batch["n"].view(-1, 3)
        assert (steps.diff(dim=1) == 1).all()
        assert torch.equal(batch["pixels"][:, 0].long(), batch["n"] % 251)
        assert (batch["episode"].view(-1, 3).diff(dim=1) == 0).all()
        starts += steps[:, 0].tolist()
    shares = [starts.count(slot) / len(starts) for slot in (8, 9, 30)]
    np.testing.assert_allclose(shares, [1 / 8, 2 / 8, 5 / 8], atol=0.06)
    # The last two steps of an episode begin no slice, and have their priorities again afterwards.
    assert not {5, 6, 12, 13} & set(starts)
    np.testing.assert_allclose(buffer.sampler._sum_tree[np.arange(63)], values, rtol=1e-6)
    other = slices(storage=storage)
    other.load_state_dict(copy.deepcopy(buffer.state_dict()))
    buffer.dumps(tmp_path / "saved")
    third = slices(storage=storage)
    third.loads(tmp_path / "saved")
    for loaded in (other, third):
        np.testing.assert_allclose(loaded.sampler._sum_tree[np.arange(63)], values, rtol=1e-6)


def test_saved_and_loaded(tmp_path):
    buffer = make()
    buffer.extend(items(70))
    buffer.update_priority(torch.arange(70), torch.rand(70) * 9)
    buffer.sample()
    buffer.dumps(tmp_path / "saved")
    state = buffer.state_dict()
    torch.save(state, tmp_path / "state.pt")
    loaded, restored, copied = make(seed=8), make(seed=9), make(seed=10)
    loaded.loads(tmp_path / "saved")
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    copied.load_state_dict(copy.deepcopy(state))
    wanted = [buffer.sample() for _ in range(3)]
    for other in (loaded, restored, copied):
        assert np.array_equal(priorities(other), priorities(buffer))
        for batch in wanted:
            found = other.sample()
            assert torch.equal(found["n"], batch["n"])
            assert torch.equal(found["priority_weight"], batch["priority_weight"])
        assert other.sampler.default_priority == buffer.sampler.default_priority
    with pytest.raises(errors.UsageError, match="saved with 100 slots, this sampler has 50"):
        PrioritySampler(50).loads(tmp_path / "saved" / "sampler")


def test_damaged_files_are_refused(tmp_path):
    sampler = PrioritySampler(20)
    with pytest.raises(errors.UnknownFormat, match="no saved sampler"):
        sampler.loads(tmp_path)
    with PackWriter(tmp_path / "sampler.pack", kind="replay") as pack:
        pack.write([Item("priorities", np.zeros(20))])
    with pytest.raises(errors.UnknownFormat, match="not a saved sampler"):
        sampler.loads(tmp_path)
    sampler.update_priority(torch.arange(20), torch.arange(20.0))
    good = sampler.state_dict()
    for wrong in (
        {**good, "priorities": -good["priorities"]},
        {**good, "rng": "{}"},
        {**good, "largest": 3},
        {key: value for key, value in good.items() if key != "priorities"},
    ):
        with pytest.raises(errors.CorruptFile):
            sampler.load_state_dict(wrong)
    sampler.dumps(tmp_path)
    whole = (tmp_path / "sampler.pack").read_bytes()
    fresh = PrioritySampler(20)
    for at in range(0, len(whole), 7):
        data = bytearray(whole)
        data[at] ^= 16
        (tmp_path / "sampler.pack").write_bytes(data)
        try:
            fresh.loads(tmp_path)
        except errors.DataError:
            continue
        assert torch.equal(fresh.state_dict()["priorities"], good["priorities"])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_run_of_calls_against_a_slow_reference(data):
    """The reference: a plain list of raw priorities, and the largest one ever given."""
    size = data.draw(st.integers(1, 20))
    sampler = PrioritySampler(size, alpha=0.6, eps=0.01, seed=0)
    buffer = ReplayBuffer(storage=CompressedStorage(size), sampler=sampler, batch_size=5)
    reference, largest = [0.0] * size, None
    cursor = itertools.count()
    numbers = st.floats(0, 1e6)
    for _ in range(data.draw(st.integers(1, 15))):
        filled = len(buffer)
        if not filled or data.draw(st.booleans()):
            count = data.draw(st.integers(1, size))
            buffer.extend(items(count))
            # TorchRL gives new items the largest priority, which then counts as seen.
            largest = 1.0 if largest is None else largest
            for _ in range(count):
                reference[next(cursor) % size] = (largest + 0.01) ** 0.6
        else:
            slots = data.draw(st.lists(st.integers(0, filled - 1), min_size=1))
            values = data.draw(st.lists(numbers, min_size=len(slots), max_size=len(slots)))
            wanted = torch.tensor(values, dtype=torch.float64)
            buffer.update_priority(torch.tensor(slots), wanted)
            largest = max(largest, *values)
            for slot, value in zip(slots, values, strict=True):
                reference[slot] = (value + 0.01) ** 0.6
        np.testing.assert_allclose(priorities(buffer), reference, rtol=1e-9)
        assert sampler.default_priority == largest
        index = buffer.sample(return_info=True)[1]["index"]
        assert all(reference[slot] > 0 for slot in index.tolist())


def test_a_slot_that_is_updated_twice():
    """Batches are drawn with replacement: the last value of a slot counts, for the largest, too."""
    buffer = make(10, alpha=0.5, eps=0.0, max_priority_within_buffer=True)
    buffer.extend(items(10))
    buffer.update_priority(torch.tensor([2, 2]), torch.tensor([5.0, 2.0]))
    assert buffer.sampler.default_priority == pytest.approx(2.0)


@pytest.mark.parametrize(
    "change",
    [
        {"largest": ["x", "y"]},
        {"largest": [1.0, None]},
        {"alpha": float("nan")},
        {"beta": -1.0},
        {"rng": "[" * 100_000},
    ],
)
def test_hostile_states(change):
    sampler = make(10).sampler
    with pytest.raises(errors.CorruptFile):
        sampler.load_state_dict(sampler.state_dict() | change)
