"""Waking those of this process who wait: dequeue calls, and who answers for what has ended.

A counter instead of a flag: a waiter remembers the count before it looks for work, so that a wake-up that
comes between its look and its wait is not lost.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

_wakeups: weakref.WeakSet[Wakeup] = weakref.WeakSet()


class Wakeup:
    """A condition with a counter; safe to use from any thread."""

    def __init__(self) -> None:
        self.reset()
        _wakeups.add(self)

    def reset(self) -> None:
        """Forget all waiters (after a fork: they live in the parent)."""
        self._condition = threading.Condition()
        self._count = 0
        self._callbacks: tuple[Callable[[], object], ...] = ()

    @property
    def count(self) -> int:
        """How many wake-ups there have been."""
        return self._count

    def wake(self) -> None:
        """Wake everybody who waits."""
        with self._condition:
            self._count += 1
            self._condition.notify_all()
            callbacks = self._callbacks
        for callback in callbacks:
            callback()

    def add(self, callback: Callable[[], object]) -> None:
        """Call back at each wake-up, in the thread that wakes: something quick that does not raise."""
        with self._condition:
            self._callbacks = (*self._callbacks, callback)

    def remove(self, callback: Callable[[], object]) -> None:
        """Undo :meth:`add`."""
        with self._condition:
            self._callbacks = tuple(one for one in self._callbacks if one != callback)

    def wait(self, seen: int, timeout: float, stop: threading.Event | None = None) -> None:
        """Wait until there was a wake-up after ``seen``, ``timeout`` seconds have passed or ``stop`` is set.

        A stop event that is set by somebody who does not call :meth:`wake` is noticed within 50 ms.
        """
        deadline = time.monotonic() + timeout
        with self._condition:
            while self._count == seen and not (stop is not None and stop.is_set()):
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._condition.wait(left if stop is None else min(left, 0.05))


def _after_fork() -> None:
    for wakeup in list(_wakeups):
        wakeup.reset()


os.register_at_fork(after_in_child=_after_fork)
