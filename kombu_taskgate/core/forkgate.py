"""Closing connections before a fork, for databases whose connections must not be open in a process that forks.

A fork waits until no thread is inside a transaction, and threads wait until the fork is over. Where that takes
too long the fork goes ahead: a child that can't use the database is better than a worker that stands still.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Longest time in seconds that a fork waits for transactions of other threads.
PATIENCE = 10.0


class ForkGate:
    """Threads pass it to use connections; a fork closes it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget who is inside: in a child nobody is."""
        self._condition = threading.Condition()
        self._inside = 0
        self._forks = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Use connections in the block."""
        with self._condition:
            while self._forks:
                self._condition.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    def shut(self) -> bool:
        """Keep everybody out from now on; returns whether nobody is inside any more."""
        deadline = time.monotonic() + PATIENCE
        with self._condition:
            self._forks += 1
            while self._inside:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._condition.wait(left)
        return True

    def open(self) -> None:
        """Let them in again."""
        with self._condition:
            self._forks -= 1
            self._condition.notify_all()
