"""Reaper: a thread that takes back the leases of the dead, in every process that consumes.

There is no elected reaper that could die: every one may reap, and the database decides who gets which row.
The pauses are jittered so that they do not all come at once.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable

from .broker import Broker
from .errors import TaskgateError

logger = logging.getLogger("kombu_taskgate.reaper")

#: Seconds between two looks for rows to prune.
PRUNE_EVERY = 300.0
#: How long in seconds a stop waits for a round that is under way: it may hang in a dead network.
STOP_WITHIN = 5.0
_reapers: weakref.WeakSet[Reaper] = weakref.WeakSet()


class Reaper:
    """Calls ``reap_expired`` every ``interval`` seconds (times 0.75 to 1.25), and ``prune`` every five minutes.

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
        self._reset()
        _reapers.add(self)

    def _reset(self) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False
        self._pruned = 0.0

    def start(self) -> None:
        """Start the thread. Idempotent."""
        if self._thread is None:
            # Its own, so that a round that hangs in a dead network does not go on beside the next thread.
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name="taskgate-reaper", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it; a round that gets no answer ends it later. Idempotent."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_WITHIN)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval * random.uniform(0.75, 1.25)):
            try:
                self._round(stop)
            except TaskgateError as error:
                if not stop.is_set():
                    self._failed(error)
            except Exception:
                # A reaper that dies silently would leave the dead unreaped.
                logger.exception("a reaping round failed")
            else:
                self._failing = False

    def _round(self, stop: threading.Event) -> None:
        # Where nothing runs there is nothing to take back for a while.
        number = 0 if self._broker.reap_in() else self._broker.reap_expired()
        if number:
            logger.warning("took back %d leases whose workers are gone", number)
        now = time.monotonic()
        if now - self._pruned >= PRUNE_EVERY:
            self._pruned = now
            while self._broker.prune() >= 1000 and not stop.is_set():
                continue
        if self._also is not None and not stop.is_set():
            self._also()

    def _failed(self, error: TaskgateError) -> None:
        if self._on_error is not None:
            self._on_error(error)
        elif not self._failing:
            logger.warning("can't reap now, will try again: %s", error)
        self._failing = True


def _after_fork() -> None:
    # The parent's thread does not exist here.
    for reaper in list(_reapers):
        reaper._reset()


os.register_at_fork(after_in_child=_after_fork)
