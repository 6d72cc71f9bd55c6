"""Listener: a thread with a connection of its own on which the database tells of new work.

It trusts nothing: after connecting it has itself notified by way of another connection, and only when that arrives
the listener counts as live. Behind a proxy that hands connections from one transaction to the next it never does;
that is said once, and everybody goes on polling. A connection that breaks is noticed at once and made again, one that
has silently died when TCP's keep-alive or somebody who found untold work says so.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
import uuid
import weakref
from collections.abc import Callable

import sqlalchemy as sa

from .database import Database, Use
from .errors import StoreUnavailable, TaskgateError
from .notifier import BINDINGS, RESULTS, TEST, WORK, names_in
from .ready import Ready
from .watch import Wake

logger = logging.getLogger("kombu_taskgate.listener")

#: Seconds that a test notification may take.
ANSWER = 2.0
#: Shortest and longest pause before connecting again.
MIN_PAUSE, MAX_PAUSE = 0.1, 5.0
#: Seconds until listening is tried again where it did not work.
TRY_AGAIN = 600.0
#: Shortest time in seconds between two tests that are asked for by :meth:`Listener.doubt`.
DOUBT_EVERY = 30.0
_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


class _Watch:
    """One subscription, see :class:`.watch.Watch`."""

    def __init__(self, listener: Listener, wake: Wake) -> None:
        self._listener = listener
        self.wake = wake

    @property
    def live(self) -> bool:
        return self._listener.live

    @property
    def longest_pause(self) -> float:
        settings = self._listener.settings
        return settings.poll_listening if self._listener.live else settings.poll_max

    def doubt(self) -> None:
        self._listener.doubt()

    def close(self) -> None:
        self._listener.remove(self)


class Listener:
    """Runs while somebody watches.

    Args:
        database: where.
        channel: what to listen to.
        send: sends a text to the channel over another connection.
        bindings_changed: called when somebody's bindings have, or may have while nobody listened.
        kind: what those who watch are told of: names of queues that have work, or task ids that have a result.
    """

    def __init__(
        self,
        database: Database,
        channel: str,
        send: Callable[[str], None],
        bindings_changed: Callable[[], None],
        kind: str = WORK,
    ) -> None:
        self.settings = database.settings
        self._database = database
        self._channel = channel
        self._send = send
        self._bindings_changed = bindings_changed
        self._kind = kind
        self._use = Use.RESULTS if kind == RESULTS else Use.ASIDE
        #: For messages.
        self._what = "results" if kind == RESULTS else "work"
        self._reset()
        _listeners.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._watches: list[_Watch] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._stir: Ready | None = None
        self._doubted = False
        self._tested_at = 0.0
        self._failing = False
        #: Whether notifications arrive at this time.
        self.live = False

    def after_fork(self) -> None:
        """In the child: the thread and its connection are the parent's."""
        if self._stir is not None:
            self._stir.after_fork()
        self._reset()

    # -- what others call ----------------------------------------------------------------------------

    def watch(self, wake: Wake) -> _Watch:
        """Tell somebody from now on, in the listener's thread."""
        watch = _Watch(self, wake)
        with self._lock:
            self._watches.append(watch)
            if self._thread is None:
                # Its own, so that one that hangs in a dead network is no concern of the next.
                self._stop, self._stir = threading.Event(), Ready()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop, self._stir), name="taskgate-listener", daemon=True
                )
                self._thread.start()
        return watch

    def remove(self, watch: _Watch) -> None:
        """Tell somebody no more; the last one ends the thread."""
        with self._lock:
            if watch not in self._watches:
                return
            self._watches.remove(watch)
            if self._watches:
                return
            thread, self._thread = self._thread, None
            self.live = False
            self._stop.set()
            if self._stir is not None:
                self._stir.set()
        if thread is not None and thread is not threading.current_thread():
            # It may hang in a dead network; then it ends when that call does.
            thread.join(ANSWER)

    def close(self) -> None:
        """End all subscriptions."""
        for watch in self._current():
            self.remove(watch)

    def suspect(self) -> None:
        """Have the connection tested now: another one of this process turned out to be dead."""
        if self.live and self._stir is not None:
            self._doubted = True
            self._stir.set()

    def doubt(self) -> None:
        """Have the connection tested soon."""
        if time.monotonic() - self._tested_at >= DOUBT_EVERY:
            self.suspect()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self, stop: threading.Event, stir: Ready) -> None:
        try:
            self._go_on(stop, stir)
        finally:
            stir.close()

    def _go_on(self, stop: threading.Event, stir: Ready) -> None:
        pause = MIN_PAUSE
        while not stop.is_set():
            began = time.monotonic()
            try:
                with self._database.translated(), self._database.aside(self._use) as conn:
                    usable = self._listen(conn, stop, stir)
            except TaskgateError as error:
                self._broke(error)
            except Exception:
                # Its watchers would poll for ever, and nobody would know why.
                logger.exception("listening for new %s failed", self._what)
                self._broke(None)
            else:
                if not usable:
                    self._unusable()
                    stop.wait(TRY_AGAIN)
                continue
            if time.monotonic() - began > MAX_PAUSE:
                pause = MIN_PAUSE
            stop.wait(pause)
            pause = min(MAX_PAUSE, pause * 2)

    def _listen(self, conn: sa.Connection, stop: threading.Event, stir: Ready) -> bool:
        """Listen until told to stop; returns whether notifications arrive at all."""
        dialect = self._database.dialect
        driver = conn.connection.dbapi_connection
        if driver is None:
            raise StoreUnavailable("the connection for listening was closed")
        with self._database.answered(conn):
            dialect.listen(conn, self._channel)
        with selectors.DefaultSelector() as selector:
            selector.register(dialect.descriptor(driver), selectors.EVENT_READ)
            selector.register(stir.fileno(), selectors.EVENT_READ)

            def hear(timeout: float | None) -> list[str]:
                selector.select(timeout)
                stir.clear()
                texts = dialect.heard(driver)
                if not stop.is_set():
                    self._tell(texts)
                return texts

            if not self._arrives(hear, stop):
                return stop.is_set()
            self._became_live(stop)
            while not stop.is_set():
                hear(None)
                if self._doubted and not stop.is_set():
                    self._doubted = False
                    if not self._arrives(hear, stop) and not stop.is_set():
                        raise StoreUnavailable(f"the connection that listens for new {self._what} has gone deaf")
        return True

    def _arrives(self, hear: Callable[[float | None], list[str]], stop: threading.Event) -> bool:
        """Whether what is sent over another connection arrives on this one."""
        self._tested_at = time.monotonic()
        token = TEST + uuid.uuid4().hex
        self._send(token)
        give_up = time.monotonic() + ANSWER
        while not stop.is_set():
            left = give_up - time.monotonic()
            # Once more when the time is over: this process may have been frozen, and the answer be there.
            if token in hear(max(0.0, left)):
                return True
            if left <= 0:
                break
        return False

    def _tell(self, texts: list[str]) -> None:
        queues: set[str] = set()
        anything = False
        for text in texts:
            if text.startswith(BINDINGS):
                self._bindings_changed()
            elif text.startswith(self._kind):
                named = names_in(text)
                anything = anything or named is None
                queues.update(named or ())
        if anything or queues:
            self._tell_all(None if anything else queues)

    def _tell_all(self, queues: set[str] | None) -> None:
        for watch in self._current():
            watch.wake(queues)

    def _current(self) -> list[_Watch]:
        with self._lock:
            return list(self._watches)

    def _became_live(self, stop: threading.Event) -> None:
        with self._lock:
            # Told to stop meanwhile, it hears for nobody.
            self.live = not stop.is_set()
        if self._failing:
            self._failing = False
            logger.info("listening for new %s again", self._what)
        # What came while nobody listened was told to nobody.
        self._bindings_changed()
        self._tell_all(None)

    def _broke(self, error: TaskgateError | None) -> None:
        self.live = False
        if not self._failing:
            self._failing = True
            if error is not None:
                logger.info("can't listen for new %s now, looking more often meanwhile: %s", self._what, error)
        self._tell_all(None)

    def _unusable(self) -> None:
        if not self._failing:
            self._failing = True
            logger.warning(
                "%s does not deliver notifications on this connection (a proxy that pools transactions between?): "
                "looking for new %s every %g s instead; listen=False says so from the start",
                self._database.shown,
                self._what,
                self.settings.poll_max,
            )


def _after_fork() -> None:
    for listener in list(_listeners):
        listener.after_fork()


os.register_at_fork(after_in_child=_after_fork)
