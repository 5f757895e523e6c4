"""`each`: all pieces, in order, in several threads; the first failure ends it."""

import threading
import time

import pytest

from penstock.core.parallel import each

LARGE = 100 << 20


@pytest.fixture(autouse=True)
def no_thread_survives():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("nbytes", [0, LARGE])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_results_keep_their_order(count, nbytes):
    def work(number):
        time.sleep(0.002 * (number % 3))
        return number * number

    assert each("test", work, range(count), nbytes) == [n * n for n in range(count)]


def test_threads_help_with_large_data_only():
    def threads(nbytes):
        found = set()

        def work(_):
            found.add(threading.current_thread())
            time.sleep(0.01)

        each("test", work, range(8), nbytes)
        return found

    assert threads(1000) == {threading.main_thread()}
    assert len(threads(LARGE)) == 2
    assert not any(thread.daemon for thread in threads(LARGE))


@pytest.mark.parametrize("where", ["helper", "caller"])
@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_the_first_failure_ends_it(where, error):
    begun = []

    def work(number):
        begun.append(number)
        time.sleep(0.005)
        if (threading.current_thread() is threading.main_thread()) is (where == "caller"):
            raise error

    with pytest.raises(type(error)) as raised:
        each("test", work, range(1000), LARGE)
    assert raised.value is error
    assert len(begun) < 10
