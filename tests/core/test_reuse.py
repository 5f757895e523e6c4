"""Memory that is used again, and never under someone's eyes."""

import gc
import threading

import numpy as np
import pytest

from penstock.core.reuse import ReusedMemory

SHAPE = (256, 1024)


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_comes_back_when_the_array_is_gone():
    memory = ReusedMemory()
    first = memory.array(SHAPE, np.uint8)
    where = address(first)
    del first
    assert address(memory.array(SHAPE, np.uint8)) == where


@pytest.mark.parametrize(
    "hold",
    [
        lambda a: a,
        lambda a: a[3:5],
        lambda a: a[3:5][:, ::2],
        lambda a: a.view(np.uint32),
        lambda a: memoryview(a),
        lambda a: a.reshape(-1).T,
    ],
)
def test_memory_is_not_given_twice_while_a_view_lives(hold):
    memory = ReusedMemory()
    first = memory.array(SHAPE, np.uint8)
    first[:] = 7
    where = address(first)
    view = hold(first)
    del first
    gc.collect()
    second = memory.array(SHAPE, np.uint8)
    assert address(second) != where
    second[:] = 1
    assert np.asarray(view).reshape(-1).view(np.uint8)[0] == 7
    del view, second
    assert memory.idle_bytes == 2 * 256 * 1024


def test_torch_tensors_hold_it_too():
    torch = pytest.importorskip("torch")
    memory = ReusedMemory()
    tensor = torch.from_numpy(memory.array(SHAPE, np.uint8))
    where = tensor.data_ptr()
    part = tensor[5:].view(torch.int32)
    del tensor
    assert memory.array(SHAPE, np.uint8).__array_interface__["data"][0] != where
    del part
    assert where in {memory.array(SHAPE, np.uint8).__array_interface__["data"][0] for _ in range(3)}


def test_idle_memory_is_limited():
    memory = ReusedMemory(limit_bytes=600 * 1024)
    arrays = [memory.array(SHAPE, np.uint8) for _ in range(5)]
    assert memory.idle_bytes == 0
    del arrays
    assert memory.idle_bytes == 512 * 1024


def test_small_and_odd_shapes():
    memory = ReusedMemory()
    assert memory.array((), np.float64).shape == ()
    assert memory.array((0, 5), np.float32).shape == (0, 5)
    assert memory.array((3, 70001), np.int16).shape == (3, 70001)


def test_threads_never_share():
    memory = ReusedMemory()
    problems = []

    def work(number):
        for _ in range(300):
            array = memory.array(SHAPE, np.uint8)
            array[::16] = number
            if not (array[::16] == number).all():
                problems.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
