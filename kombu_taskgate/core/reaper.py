"""Reaper: a thread that takes back the leases of the dead, in every process that consumes.

There is no elected reaper that could die: every one may reap, and the database decides who gets which row.
The pauses are jittered so that they do not all come at once.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable

from .broker import Broker
from .errors import TaskgateError
from .rounds import Rounds

logger = logging.getLogger("kombu_taskgate.reaper")

#: Seconds between two looks for rows to prune.
PRUNE_EVERY = 300.0
#: Longest time in seconds, and longest part of the interval, by which a lease's end is looked at late, so that not all
#: look at once.
LATE, LATE_PART = 0.5, 0.1


class Reaper:
    """Calls ``reap_expired`` every ``interval`` seconds (times 0.75 to 1.25), and ``prune`` every five minutes.

    Earlier when the last look has told that a lease runs out before, if nobody renews it.

    Args:
        broker: where.
        interval: seconds between two rounds.
        also: called after each round, e.g. to sweep what has expired elsewhere.
        on_error: called with what a round raised, in place of a log line.
    """

    def __init__(
        self,
        broker: Broker,
        interval: float,
        *,
        also: Callable[[], None] | None = None,
        on_error: Callable[[TaskgateError], None] | None = None,
    ) -> None:
        self._broker = broker
        self._interval = interval
        self._also = also
        self._on_error = on_error
        self._failing = False
        self._pruned = -math.inf
        self._rounds = Rounds("taskgate-reaper", self._round, self._usual)

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._rounds.thread is None:
            self._failing, self._pruned = False, -math.inf
            self._rounds.start()

    def stop(self) -> None:
        """Stop the thread and wait for it; a round that gets no answer ends it later. Idempotent."""
        self._rounds.stop()

    def _usual(self) -> float:
        return self._interval * random.uniform(0.75, 1.25)

    def _round(self, stopping: Callable[[], bool]) -> float:
        try:
            self._reap(stopping)
        except TaskgateError as error:
            if not stopping():
                self._failed(error)
            return self._usual()
        self._failing = False
        return min(self._usual(), self._next_end())

    def _reap(self, stopping: Callable[[], bool]) -> None:
        # Where nothing runs there is nothing to take back for a while.
        number = 0 if self._broker.reap_in() else self._broker.reap_expired()
        if number:
            logger.warning("took back %d leases whose workers are gone", number)
        now = time.monotonic()
        if now - self._pruned >= PRUNE_EVERY:
            self._pruned = now
            while self._broker.prune() >= 1000 and not stopping():
                continue
        if self._also is not None and not stopping():
            self._also()

    def _next_end(self) -> float:
        """Seconds until a lease may have run out that the last look has seen, or that was claimed right after it."""
        calm, end = self._broker.reap_in(), self._broker.runs_out_in()
        first = min(calm, end) if calm else end
        return first + random.uniform(0.1, 1.0) * min(LATE, LATE_PART * self._interval)

    def _failed(self, error: TaskgateError) -> None:
        if self._on_error is not None:
            self._on_error(error)
        elif not self._failing:
            logger.warning("can't reap now, will try again: %s", error)
        self._failing = True
