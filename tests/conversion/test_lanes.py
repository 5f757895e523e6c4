import threading
import time

import pytest

from penstock.conversion.lanes import Lanes


def test_every_item_is_worked_on_in_order_by_its_own_lane():
    seen = {"a": [], "b": []}
    threads = {"a": set(), "b": set()}

    def work(lane):
        def take(item):
            threads[lane].add(threading.get_ident())
            seen[lane].append(item)

        return take

    with Lanes("test", 100) as lanes:
        lanes.open("a", work("a"))
        lanes.open("b", work("b"))
        for number in range(500):
            lanes.put("ab"[number % 2], number, 10)
    assert seen == {"a": list(range(0, 500, 2)), "b": list(range(1, 500, 2))}
    assert len(threads["a"]) == len(threads["b"]) == 1
    assert threads["a"] != threads["b"]
    assert lanes.used_bytes == 0


def test_what_waits_never_exceeds_the_limit():
    with Lanes("test", 50) as lanes:
        lanes.open("slow", lambda item: time.sleep(0.002))
        for _ in range(40):
            lanes.put("slow", b"x", 20)
        assert lanes.peak_bytes <= 50


def test_an_item_larger_than_the_limit_passes_alone():
    seen = []
    with Lanes("test", 10) as lanes:
        lanes.open("a", seen.append)
        lanes.put("a", 1, 1000)
        lanes.put("a", 2, 1000)
    assert seen == [1, 2]


def test_the_error_of_a_lane_reaches_the_next_put_once_and_ends_all_threads():
    def fail(item):
        raise OSError("disk")

    before = threading.active_count()
    with pytest.raises(OSError, match="disk"), Lanes("test", 10) as lanes:
        lanes.open("bad", fail)
        lanes.open("good", lambda item: None)
        for _ in range(100):
            lanes.put("bad", 1, 10)
            time.sleep(0.001)
    assert threading.active_count() == before


def test_the_error_of_the_last_item_is_raised_at_the_end():
    def fail(item):
        raise ValueError("last")

    with pytest.raises(ValueError, match="last"), Lanes("test", 10) as lanes:
        lanes.open("bad", fail)
        lanes.put("bad", 1, 1)


def test_an_error_of_the_block_leaves_what_waits_undone():
    seen = []
    gate = threading.Event()

    def work(item):
        gate.wait(5)
        seen.append(item)

    with pytest.raises(KeyboardInterrupt), Lanes("test", 10) as lanes:
        lanes.open("a", work)
        for number in range(5):
            lanes.put("a", number, 1)
        threading.Timer(0.05, gate.set).start()
        raise KeyboardInterrupt
    assert len(seen) <= 1
