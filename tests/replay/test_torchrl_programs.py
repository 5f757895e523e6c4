"""Random programs of writes and reads, on a CompressedStorage and on TorchRL's LazyTensorStorage.

After each step both hold the same, or ours refused the step with one clear error and holds what it
held before: never half of a record.
"""

import os
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch.utils import _pytree as pytree
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from penstock.errors import PenstockError
from penstock.replay.torchrl.storage import CompressedStorage

pytestmark = pytest.mark.filterwarnings("ignore:Using `add")
INNER = 3
MISTAKES = (IndexError, KeyError, RuntimeError, TypeError, ValueError, AttributeError)


@tensorclass
class Step:
    pixels: torch.Tensor
    action: torch.Tensor


def pixels(draw, *batch):
    """A key that is compressed."""
    few = torch.tensor(draw.choices(range(256), k=4), dtype=torch.uint8)
    rows = torch.randint(0, 4, (*batch, 20, 1), generator=draw.torch)
    return few[rows].expand(*batch, 20, 20)


def tensordict(draw, *batch):
    return TensorDict(
        {
            "pixels": pixels(draw, *batch),
            "action": torch.randn(*batch, 2, generator=draw.torch),
            "count": torch.randint(0, 9, batch, generator=draw.torch).to(torch.int16),
            "next": TensorDict(
                {
                    "pixels": pixels(draw, *batch).float(),
                    "done": torch.rand(*batch, 1, generator=draw.torch) > 0.5,
                },
                batch,
            ),
        },
        batch,
    )


FORMS = {
    "tensordict": tensordict,
    "tensorclass": lambda draw, *batch: Step(
        pixels=pixels(draw, *batch),
        action=torch.randn(*batch, 2, generator=draw.torch),
        batch_size=batch,
    ),
    "tensor": lambda draw, *batch: pixels(draw, *batch).contiguous(),
    "plain tensor": lambda draw, *batch: torch.randn(*batch, 2, generator=draw.torch),
    "pytree": lambda draw, *batch: OrderedDict(
        picture=pixels(draw, *batch), others=(torch.randn(*batch, 2, generator=draw.torch),)
    ),
}


class Draw(random.Random):
    """Random choices, of Python's kind and of torch's."""

    def __init__(self, seed):
        super().__init__(seed)
        self.torch = torch.Generator().manual_seed(seed)


class Program:
    """Two buffers that are given the same steps."""

    def __init__(self, seed):
        self.draw = Draw(seed)
        self.form = self.draw.choice(["tensordict", "tensordict", *FORMS])
        self.ndim = 1 if self.form == "pytree" else self.draw.choice([1, 2])
        self.size = self.draw.randint(4, 12) * (INNER if self.ndim == 2 else 1)
        kind = ReplayBuffer
        if self.form == "tensordict" and self.draw.random() < 0.5:
            kind = TensorDictReplayBuffer
        # TorchRL's default for several dimensions turns the data round before it is written.
        self.options = {"dim_extend": 0} if self.ndim == 2 and self.draw.random() < 0.7 else {}
        self.lazy, self.ours = (
            kind(storage=storage(self.size, ndim=self.ndim), batch_size=4, **self.options)
            for storage in (LazyTensorStorage, CompressedStorage)
        )
        self.done = []
        self.over = False

    def data(self, *batch):
        return FORMS[self.form](self.draw, *batch)

    @property
    def rows(self):
        return self.lazy.storage._len_along_dim0 if self.lazy.storage.initialized else 0

    def step(self):
        steps = [self.extend, self.extend, self.add, self.put, self.put, self.read]
        if self.form == "tensordict":
            steps += [self.update, self.set_key, self.set_key_at, self.get_key]
        # TorchRL takes a first bare tensor of two dimensions, added alone, for a whole storage.
        first = (
            [self.extend] if "tensor" in self.form and self.ndim == 2 else [self.extend, self.add]
        )
        self.draw.choice(steps if self.rows else first)()

    def extend(self):
        count = self.draw.randint(1, min(6, self.size // (INNER if self.ndim == 2 else 1)))
        turned = self.ndim == 2 and not self.options
        batch = (count,) if self.ndim == 1 else (INNER, count) if turned else (count, INNER)
        data = self.data(*batch)
        self.both(f"extend {batch}", lambda buffer: buffer.extend(clone(data)))

    def add(self):
        if self.ndim == 2 and not self.options:
            return
        data = self.data() if self.ndim == 1 else self.data(INNER)
        self.both("add", lambda buffer: buffer.add(clone(data)))

    def index(self):
        """Any index, with the shape that it gives, if it is one that fits."""
        draw, rows = self.draw, self.rows
        one = draw.randrange(-rows, rows)
        # No slot twice: torch says that it does not say which value it keeps.
        some = draw.sample(range(rows), draw.randint(1, min(4, rows)))
        back = draw.choice([0, rows])  # a number below 0 counts from the end, even a later one
        some = [row - back for row in some]
        part = slice(draw.choice([None, *range(rows)]), draw.choice([None, *range(rows + 1)]))
        mask = torch.tensor([draw.random() < 0.5 for _ in range(rows)])
        numbers = (one, np.int64(one), torch.tensor(one), rows + 3)
        several = (some, torch.tensor(some), np.array(some), range(rows), mask, mask.numpy())
        first = draw.choice([*numbers, *several, part, slice(None, None, 2)])
        if draw.random() < 0.4:
            second = draw.choice([draw.randrange(INNER), slice(None), slice(1, None), ...])
            return (first, second)
        return first

    def put(self):
        index = self.index()
        try:
            shape = torch.empty(self.rows, *(INNER,) * (self.ndim - 1))[_plain(index)].shape
        except MISTAKES:
            shape = (2,)
        data = self.data(*shape)

        def put(buffer):
            buffer[index] = clone(data)

        self.both(f"[{index!r}] = {tuple(shape)}", put)

    def read(self):
        index = self.index()
        self.both(f"read [{index!r}]", lambda buffer: buffer[index])

    def whole(self):
        batch = (self.rows,) if self.ndim == 1 else (self.rows, INNER)
        return batch[::-1] if self.ndim == 2 and not self.options else batch

    def update(self):
        data = self.data(*self.whole())
        keys = self.draw.sample(["pixels", "action", "count", "next"], self.draw.randint(1, 4))
        part = data.select(*keys)
        self.both(f"update_ {keys}", lambda buffer: buffer.update_(part.clone()))

    def key(self):
        return self.draw.choice(["pixels", "action", ("next", "pixels"), ("next", "done"), "none"])

    def set_key(self):
        key, data = self.key(), self.data(*self.whole())
        value = data.get(key, data["action"])
        self.both(f"set_ {key}", lambda buffer: buffer.set_(key, value.clone()))

    def set_key_at(self):
        key, index = self.key(), self.index()
        try:
            shape = torch.empty(self.whole())[_plain(index)].shape
        except MISTAKES:
            shape = (2,)
        data = self.data(*shape)
        value = data.get(key, data["action"])
        self.both(f"set_at_ {key} {index!r}", lambda b: b.set_at_(key, value.clone(), index))

    def get_key(self):
        key = self.draw.choice(["pixels", "next", ("next", "done"), ("next", "pixels")])
        self.both(f"get {key}", lambda buffer: buffer.storage.get(key))

    def both(self, what, step):
        self.done.append(what)
        before = self.content(self.lazy)
        refused, failed, wanted, found = None, None, None, None
        try:
            found = step(self.ours)
        except PenstockError as error:
            refused = error
        except MISTAKES as error:
            failed = error
        if refused is None:
            try:
                wanted = step(self.lazy)
            except MISTAKES:
                # Some steps that it cannot do, ours can: they are not compared.
                self.over = failed is None
                if failed is not None and not is_same(self.content(self.ours), before):
                    same(self, self.content(self.lazy), self.content(self.ours))  # it came later
                elif failed is not None:  # TorchRL may have written half of it
                    self.over = not is_same(self.content(self.lazy), before)
                return
            assert failed is None, f"{self}: {failed!r}"
        else:
            assert "\n" not in str(refused)
            self.done[-1] += " (refused)"
            same(self, before, self.content(self.ours))
            return
        same(self, self.content(self.lazy), self.content(self.ours))
        if what.startswith(("read", "get")):
            same(self, wanted, found)

    def content(self, buffer):
        if not buffer.storage.initialized:
            return torch.zeros(0)
        return {
            name: leaf.clone() for name, leaf in leaves_of(buffer.storage.get(slice(None))).items()
        }

    def __str__(self):
        return f"{self.form}, ndim={self.ndim}, {self.size} slots, {self.options}: {self.done}"


def clone(data):
    return data.clone() if hasattr(data, "clone") else pytree.tree_map(torch.clone, data)


def _plain(index):
    """The index as torch takes it."""
    if isinstance(index, tuple):
        return tuple(map(_plain, index))
    return torch.arange(len(index)) if isinstance(index, range) else index


def leaves_of(data):
    """The tensors of an answer, with their names."""
    if isinstance(data, torch.Tensor):
        return {"": data.as_subclass(torch.Tensor)}
    if isinstance(data, Step):
        data = TensorDict(dict(data.items()), data.batch_size)
    if isinstance(data, TensorDict):
        return {str(key): data.get(key) for key in data.keys(True, True)}
    return {str(path): leaf for path, leaf in pytree.tree_flatten_with_path(data)[0]}


def same(program, wanted, found):
    wanted, found = leaves_of(wanted), leaves_of(found)
    assert wanted.keys() == found.keys(), str(program)
    for key, one in wanted.items():
        assert one.dtype == found[key].dtype, f"{program}: {key}"
        assert torch.equal(one, found[key]), f"{program}: {key}"


def is_same(wanted, found):
    wanted, found = leaves_of(wanted), leaves_of(found)
    return wanted.keys() == found.keys() and all(
        torch.equal(wanted[key], found[key]) for key in wanted
    )


def run(programs):
    torch.manual_seed(0)
    refusals = steps = 0
    for seed in programs:
        program = Program(seed)
        while len(program.done) < 10 and not program.over:
            program.step()
        steps += len(program.done)
        refusals += sum(what.endswith("(refused)") for what in program.done)
    return steps, refusals


def test_programs():
    first = int(os.environ.get("PENSTOCK_FIRST", "0"))
    steps, refusals = run(range(first, first + 150))
    assert refusals < steps / 5  # most steps are sensible ones


@pytest.mark.stress
@pytest.mark.timeout(1500)  # minutes, on a busy machine
def test_five_thousand_programs():
    run(range(5000))
