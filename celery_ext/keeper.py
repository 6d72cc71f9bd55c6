"""Keeper: the thread of a worker's main process for what must not hold up its event loop or its deliveries.

Work that talks to result backends may wait for them for long. All of it shares one thread, so a worker has one more
thread however much there is to look after.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kombu_taskgate.core.rounds import Rounds

logger = logging.getLogger("celery_ext.keeper")

#: Seconds after which work that raised is tried again, unless its own interval is shorter.
AFTER_FAILURE = 30.0


class Work:
    """One kind of work of a keeper; made by :meth:`Keeper.add`."""

    def __init__(
        self,
        keeper: Keeper,
        name: str,
        do: Callable[[Callable[[], bool]], float | None],
        interval: float | None,
    ) -> None:
        self._keeper = keeper
        self.name = name
        self.do = do
        self.interval = interval
        self.due: float | None = None
        self.failing = False

    def wake(self) -> None:
        """Do it now. From any thread; does not wait."""
        self._keeper._wake(self)


class Keeper:
    """Does several kinds of work, each when it is due or woken, in one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: list[Work] = []
        self._rounds = Rounds("taskgate-keeper", self._round, self._next)

    def add(self, name: str, do: Callable[[Callable[[], bool]], float | None], interval: float | None = None) -> Work:
        """Add work; before or after the start.

        Args:
            name: for log lines.
            do: does it. It is given a function that says whether the thread is to end, and may return after how many
                seconds it wants to be called again in any case. What it raises is logged, and it is tried again.
            interval: seconds between two calls; ``None``: only when it is woken or has asked for it.

        Returns:
            the work, which can be woken.
        """
        work = Work(self, name, do, interval)
        with self._lock:
            self._works.append(work)
        work.wake()  # what was left behind
        return work

    def start(self) -> None:
        """Start the thread. Idempotent."""
        self._rounds.start()

    def stop(self) -> None:
        """Stop the thread; what hangs is not waited for longer than some seconds. Idempotent."""
        self._rounds.stop()

    def _wake(self, work: Work) -> None:
        with self._lock:
            work.due = time.monotonic()
        self._rounds.wake()

    def _next(self) -> float | None:
        with self._lock:
            due = [work.due for work in self._works if work.due is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _round(self, stopping: Callable[[], bool]) -> float | None:
        with self._lock:
            now = time.monotonic()
            works = [work for work in self._works if work.due is not None and work.due <= now]
            for work in works:
                # Before it is done: what wakes it meanwhile is not lost.
                work.due = None
        for work in works:
            if not stopping():
                self._do(work, stopping)
        return self._next()

    def _do(self, work: Work, stopping: Callable[[], bool]) -> None:
        again = work.interval
        try:
            wanted = work.do(stopping)
        except Exception as error:  # one kind of work must not end the others
            wanted = AFTER_FAILURE
            if not work.failing and not stopping():
                logger.warning("%s failed, will try again: %r", work.name, error, exc_info=error)
            work.failing = True
        else:
            work.failing = False
        if wanted is not None:
            again = wanted if again is None else min(again, wanted)
        if again is not None:
            with self._lock:
                due = time.monotonic() + again
                work.due = due if work.due is None else min(work.due, due)
