"""Ends calls to the database that get no answer.

A network that swallows everything, or a server that is frozen, leaves a driver waiting for ever: TCP notices a peer
that is gone, not one whose kernel, or a proxy in between, still says yes to every byte. Drivers without a limit of
their own are given one here: the socket of a call that has waited too long is shut down, and the call ends as if the
connection had been cut.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

#: Descriptor of a driver's connection; raises when it is closed.
Descriptor = Callable[[Any], int]
#: Longest time in seconds by which a call can exceed its limit: how often the watch looks.
LOOK_EVERY = 0.25
#: Looks without a call under way after which the thread ends.
IDLE_LOOKS = 40
_all: weakref.WeakSet[Patience] = weakref.WeakSet()


class Waiting:
    """A call under way: since when (monotonic seconds) it waits, how long it may, and on which connection."""

    __slots__ = ("connection", "limit", "since")

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.since = time.monotonic()
        self.connection: Any = None

    def on(self, connection: Any) -> None:
        """It waits on this connection of the driver now; from here on the time counts."""
        self.since = time.monotonic()
        self.connection = connection

    def again(self) -> None:
        """There was an answer, and the next question is asked."""
        self.since = time.monotonic()


class Patience:
    """Watches calls, with a thread that lives while there are some.

    Args:
        descriptor: tells the descriptor of a driver's connection.
    """

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self.reset()
        _all.add(self)

    def reset(self) -> None:
        """In a forked child: the thread and the calls are the parent's."""
        self._lock = threading.Lock()
        self._calls: set[Waiting] = set()
        self._thread: threading.Thread | None = None
        #: The call of each thread, for what only the pool knows: that it opens a connection.
        self._mine = threading.local()

    @contextmanager
    def limit(self, seconds: float) -> Iterator[Waiting]:
        """End the block's call when it has waited for an answer for so many seconds."""
        call = Waiting(seconds)
        outer = getattr(self._mine, "call", None)
        with self._lock:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="taskgate-patience", daemon=True)
                self._start(self._thread)
        self._mine.call = call
        try:
            yield call
        finally:
            self._mine.call = outer
            with self._lock:
                self._calls.discard(call)

    def connected(self, connection: Any) -> None:
        """The calling thread has opened a connection, and is going to prepare it."""
        call = getattr(self._mine, "call", None)
        if call is not None:
            call.on(connection)

    def asked(self) -> None:
        """The calling thread asks something now."""
        call = getattr(self._mine, "call", None)
        if call is not None:
            call.again()

    def _start(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError:
            # The interpreter is ending: the last calls have the limits that TCP has.
            self._thread = None

    def _run(self) -> None:
        idle = 0
        while True:
            time.sleep(LOOK_EVERY)
            with self._lock:
                idle = 0 if self._calls else idle + 1
                if idle >= IDLE_LOOKS:
                    self._thread = None
                    return
                now = time.monotonic()
                for call in self._calls:
                    if call.connection is not None and now - call.since >= call.limit:
                        self._end(call)

    def _end(self, call: Waiting) -> None:
        connection, call.connection = call.connection, None
        # A closed connection has no descriptor. Of the driver only the number is used: the call ends in its own thread.
        with suppress(Exception), socket.socket(fileno=os.dup(self._descriptor(connection))) as end:
            end.shutdown(socket.SHUT_RDWR)


def _after_fork() -> None:
    for patience in list(_all):
        patience.reset()


os.register_at_fork(after_in_child=_after_fork)
