"""What conversion may hold in memory: budgets in bytes, and a watch that adapts them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from typing_extensions import Self

from penstock.core.memory import highest_rss_bytes, rss_bytes
from penstock.core.threads import POLL_S, start
from penstock.errors import UsageError

# What one worker needs beside its queue and its encoders: the interpreter, libraries, parquet.
BASE_BYTES: Final = 170 * 10**6
# What an encoder and the pictures on their way through it take, per pixel (measured).
_PER_PIXEL: Final = {"h264": 24, "grey8": 24, "depth12": 40, "av1": 64, "png": 12, "copy": 1}


def encoder_bytes(codec: str, width: int, height: int) -> int:
    """Return the memory that one camera takes while it is encoded, about."""
    return _PER_PIXEL[codec] * width * height


# A waiter looks at its `cancelled` this often even when nobody calls `Budget.wake`.
_MAX_SAMPLES: Final = 2000


class Budget:
    """A number of bytes that threads take from and give back to.

    Requests are granted in the order they were made, so nobody starves. A request larger than
    the whole limit is granted once nothing else is held: it passes alone instead of waiting for
    ever, and only then is `used_bytes` above `limit_bytes` (or after `resize` to less than is
    held, until enough is given back).

    Args:
        limit_bytes: How much may be held at one time.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[threading.Lock] = deque()  # each opened by `wake`
        self._used_bytes = 0
        self._peak_bytes = 0
        self._limit_bytes = _positive(limit_bytes)

    @property
    def limit_bytes(self) -> int:
        """How much may be held now."""
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        """How much is held now."""
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever held at one time."""
        return self._peak_bytes

    def acquire(self, n: int, cancelled: Callable[[], bool] | None = None) -> bool:
        """Take n bytes, waiting until they are free.

        Args:
            n: Bytes to take.
            cancelled: Asked while waiting; once it is true the request is given up. It is asked
                at once after `wake`, otherwise about ten times per second.

        Returns:
            True when granted, False when given up.
        """
        if n < 0:
            raise UsageError(f"cannot take {n} bytes from a budget: pass zero or more")
        gate = threading.Lock()
        with self._lock:
            if not self._waiting and self._fits(n):
                self._take(n)
                return True
            self._waiting.append(gate)
        try:
            while True:
                with self._lock:
                    if self._waiting[0] is gate and self._fits(n):
                        self._take(n)
                        return True
                if cancelled is not None and cancelled():
                    return False
                gate.acquire(timeout=POLL_S)  # until `wake` opens it
        finally:
            with self._lock:
                self._waiting.remove(gate)
            self.wake()  # the next in line may fit as well

    def release(self, n: int) -> None:
        """Give n bytes back."""
        with self._lock:
            if not 0 <= n <= self._used_bytes:
                raise UsageError(
                    f"cannot give {n} bytes back to a budget that lent {self._used_bytes}: "
                    "release what was acquired, once"
                )
            self._used_bytes -= n
        self.wake()

    @contextmanager
    def grant(self, n: int) -> Iterator[None]:
        """Hold n bytes for the length of a `with` block."""
        self.acquire(n)
        try:
            yield
        finally:
            self.release(n)

    def resize(self, limit_bytes: int) -> None:
        """Change the limit; what is held already stays held."""
        with self._lock:
            self._limit_bytes = _positive(limit_bytes)
        self.wake()

    def wake(self) -> None:
        """Make every waiter look again, and ask its `cancelled`, now."""
        with self._lock:
            for gate in self._waiting:
                if gate.locked():
                    gate.release()

    def _fits(self, n: int) -> bool:
        return self._used_bytes == 0 or self._used_bytes + n <= self._limit_bytes

    def _take(self, n: int) -> None:
        self._used_bytes += n
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)


class MemoryWatch:
    """Samples the memory of this process and its children, and keeps budgets below a limit.

    With a limit, budgets are halved at each sample above 90 % of it (never below 1/16 of their
    first size) and grow by 25 % at each sample below 70 % (up to their first size). Closing gives
    them their first size back, since nobody would do so later.

    Args:
        limit_bytes: Resident memory to stay below; None only measures.
        budgets: What to adapt. The sequence is read at each sample, so budgets added to a list
            later are seen.
        interval_s: Time between two samples.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        budgets: Sequence[Budget] = (),
        interval_s: float = 0.2,
    ) -> None:
        self.limit_bytes = None if limit_bytes is None else _positive(limit_bytes)
        self.peak_bytes = 0
        self.samples: list[tuple[float, int]] = []
        self._highest_before = 0
        self._budgets = budgets
        self._first_limits: dict[Budget, int] = {}
        self._interval_s = interval_s
        self._taken = 0
        self._stride = 1
        self._closing = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=False)

    def __enter__(self) -> Self:
        self._start_s = time.perf_counter()
        self._highest_before = highest_rss_bytes()
        self._sample()  # so that even the shortest block has a peak
        start(self._thread)
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception:
            if exc is None:  # never hide the error of the block behind ours
                raise

    def close(self) -> None:
        """Stop sampling; raise what went wrong in the background, once."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        highest = highest_rss_bytes()
        if highest > self._highest_before:  # a peak between two samples
            self.peak_bytes = max(self.peak_bytes, highest)
        for budget, limit_bytes in self._first_limits.items():
            budget.resize(limit_bytes)
        self._first_limits.clear()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._interval_s):
                self._sample()
        except BaseException as error:
            self._error = error

    def _sample(self) -> None:
        rss = rss_bytes(tree=True)
        self.peak_bytes = max(self.peak_bytes, rss)
        if self._taken % self._stride == 0:
            self.samples.append((time.perf_counter() - self._start_s, rss))
        self._taken += 1
        if len(self.samples) > _MAX_SAMPLES:
            self.samples = self.samples[::2]
            self._stride *= 2
        if self.limit_bytes is not None:
            self._adapt(rss / self.limit_bytes)

    def _adapt(self, share: float) -> None:
        for budget in tuple(self._budgets):
            first_bytes = self._first_limits.setdefault(budget, budget.limit_bytes)
            now_bytes = budget.limit_bytes
            if share > 0.9:
                budget.resize(max(now_bytes // 2, first_bytes // 16, 1))
            elif share < 0.7 and now_bytes < first_bytes:
                budget.resize(min(now_bytes + now_bytes // 4 + 1, first_bytes))


def _positive(limit_bytes: int) -> int:
    if limit_bytes <= 0:
        raise UsageError(f"a memory limit of {limit_bytes} bytes holds nothing: pass at least 1")
    return limit_bytes
