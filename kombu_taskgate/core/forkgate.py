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


class Forks:
    """The forks that are under way in this process, for all its gates."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """In a child none is under way, and nobody waits."""
        self.changed = threading.Condition(threading.RLock())
        self.number = 0

    def begin(self) -> None:
        """Keep everybody out from now on."""
        with self.changed:
            self.number += 1

    def end(self) -> None:
        """Let them in again."""
        with self.changed:
            self.number -= 1
            self.changed.notify_all()


class ForkGate:
    """Threads pass it to use the connections of one database; a fork closes it.

    Args:
        forks: of this process.
    """

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self._epoch = forks.changed
        self._inside = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Use connections in the block."""
        changed = self._forks.changed
        with changed:
            if self._epoch is not changed:
                # A forked child: who was inside is not here.
                self._epoch, self._inside = changed, 0
            while self._forks.number:
                changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            # In a child that was forked inside the block this is not the condition that was entered.
            with self._forks.changed:
                if self._epoch is self._forks.changed:
                    self._inside -= 1
                    self._forks.changed.notify_all()

    def empty(self) -> bool:
        """Wait, with a fork under way, until nobody is inside; returns whether that came about."""
        deadline = time.monotonic() + PATIENCE
        with self._forks.changed:
            while self._inside:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._forks.changed.wait(left)
        return True
