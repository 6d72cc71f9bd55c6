"""Rounds: a thread that does something again and again, and at once when it is woken."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable

logger = logging.getLogger("kombu_taskgate.rounds")

#: How long in seconds a stop waits for a round that is under way: it may hang in a dead network.
STOP_WITHIN = 5.0

_all: weakref.WeakSet[Rounds] = weakref.WeakSet()


class _Life:
    """What one run of the thread is told. Its own, so that one that hangs in a dead network misses nothing."""

    def __init__(self) -> None:
        self.stopping = False
        self.woken = threading.Event()


class Rounds:
    """Calls ``do`` in a thread of its own until it is stopped; does not survive a fork.

    Args:
        name: of the thread.
        do: one round. It is given a function that says whether the thread is to end, and returns after how many seconds
            the next round is due (``None``: when it is woken). What it raises is logged, and it is called again after
            ``pause``.
        pause: seconds before the first round, asked for each time, and after one that raised.
    """

    def __init__(
        self, name: str, do: Callable[[Callable[[], bool]], float | None], pause: Callable[[], float | None]
    ) -> None:
        self._name = name
        self._do = do
        self._pause = pause
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._life = _Life()
        self._thread: threading.Thread | None = None

    @property
    def thread(self) -> threading.Thread | None:
        """The thread, while it is wanted."""
        return self._thread

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            self._life = _Life()
            self._thread = threading.Thread(target=self._run, args=(self._life,), name=self._name, daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Let the next round be due now. From any thread; does not wait."""
        self._life.woken.set()

    def stop(self) -> None:
        """Stop the thread and wait for it; a round that gets no answer ends it later. Idempotent."""
        thread, self._thread = self._thread, None
        self._life.stopping = True
        self._life.woken.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_WITHIN)

    def _run(self, life: _Life) -> None:
        pause = self._pause()
        while True:
            life.woken.wait(pause)
            if life.stopping:
                return
            life.woken.clear()
            try:
                pause = self._do(lambda: life.stopping)
            except Exception:
                # A thread that ended silently would leave undone whatever it is for.
                logger.exception("a round of %s failed", self._name)
                pause = self._pause()


def _after_fork() -> None:
    # The parent's thread does not exist here.
    for rounds in list(_all):
        rounds._reset()


os.register_at_fork(after_in_child=_after_fork)
