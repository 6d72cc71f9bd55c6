"""TaskgateScheduler: beat on every replica, of which exactly one schedules."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Protocol

from celery.beat import Scheduler

from kombu_taskgate.core.election import LeaderElector
from kombu_taskgate.core.errors import ConfigError, NotLeader, StoreUnavailable, TaskgateError
from kombu_taskgate.core.schedules import KEEP_TICKS
from kombu_taskgate.core.terms import Term

from .. import signals
from ..result_settings import broker_settings
from .native import Native
from .plan import Planned, code_entries
from .publishing import Publisher
from .sending import NotSent, Sender
from .settings import beat_settings
from .stores import Stores
from .wrapping import Foreign, to_wrap

logger = logging.getLogger("celery_ext.beat")

#: Longest time in seconds between two looks whether this replica leads, or is to end.
LONGEST_WAIT = 1.0
#: Seconds between two attempts to send what could not be sent.
RETRY_EVERY = 0.5
#: Seconds between two sweeps of old ticks, and how many go at a time.
SWEEP_EVERY, SWEEP = 300.0, 1000

#: Whether this thread prepares a scheduler.
_preparing = threading.local()


class Inner(Protocol):
    """What does the scheduling under one term."""

    @property
    def schedule(self) -> Any:
        """Its entries by name."""

    def tick(self) -> float:
        """Send what is due; returns after how many seconds there may be more to do."""

    def sync(self) -> None:
        """Write down what is not yet."""

    def close(self) -> None:
        """Close what it has opened."""


class TaskgateScheduler(Scheduler):
    """``celery -A app beat -S taskgate``, on as many replicas as you like.

    One of them leads and schedules; the others stand by, and the first of them that sees the leader's term end goes on
    where it was. Who leads has a term in the store (:class:`~kombu_taskgate.core.election.LeaderElector`); what is sent
    is fenced with its number (:mod:`.sending`). Settings: see ``docs/beat.md``.

    Args:
        app: the Celery app.
        max_interval: longest time in seconds between two passes of a wrapped scheduler.
        lazy: only tell what would be scheduled; nothing is started.
        options: further options for a wrapped scheduler.

    Raises:
        ConfigError: a setting, or an entry of ``beat_schedule``, can't be right.
        SchemaError: the tables are newer than this code, or may not be created.
    """

    def __init__(
        self,
        app: Any,
        schedule: Any = None,
        max_interval: float | None = None,
        Producer: Any = None,  # noqa: N803  # Celery's name
        lazy: bool = False,
        sync_every_tasks: int | None = None,
        **options: Any,
    ) -> None:
        self._settings = beat_settings(app)
        self._wraps, self._class = to_wrap(app, self._settings.scheduler, TaskgateScheduler)
        given = {"max_interval": max_interval, "Producer": Producer, "sync_every_tasks": sync_every_tasks}
        # A class need not know what nobody has said.
        self._options = {**options, **{name: value for name, value in given.items() if value is not None}}
        self._code: dict[str, Planned] = {}
        self._stores = Stores(self._settings)
        self._publisher = Publisher(app)
        self._changed = threading.Event()
        self._inner: Inner | None = None
        self._term: Term | None = None
        self._busy_since: float | None = None
        self._closing = False
        self._failing_since: float | None = None
        self._sweep_at = time.monotonic() + SWEEP_EVERY
        self._elector = LeaderElector(
            self._stores.terms,
            self._settings.key,
            ttl=self._settings.ttl,
            interval=self._settings.interval,
            on_gained=self._gained,
            on_lost=self._lost,
            fit=self._fit,
        )
        super().__init__(app, schedule, max_interval, Producer, lazy=True, sync_every_tasks=sync_every_tasks)
        # A beat that is told to end while it makes its scheduler makes another one, to close that: in the signal's
        # handler, where nothing may be waited for that the interrupted code holds.
        if not lazy and not getattr(_preparing, "on", False):
            _preparing.on = True
            try:
                self._prepare()
            finally:
                _preparing.on = False

    def _prepare(self) -> None:
        """Say at once what can't be right; a database that is away may come back."""
        if self._class is None:
            self._code = code_entries(self.app)
        try:
            self._stores.open()
        except StoreUnavailable as error:
            logger.warning("beat: %s can't be reached, and is tried again: %s", self._stores.shown, error)
            return
        if self._class is None and self._settings.is_broker:
            # Whoever takes over has its first tick to send within a second.
            self._publisher.warm()

    # -- what Celery's beat asks ---------------------------------------------------------------------

    @property
    def info(self) -> str:
        """For the banner."""
        wraps = f" around {self._wraps}" if self._wraps else ""
        return (
            f"    . taskgate -> {self._settings.key}{wraps}\n"
            f"    . lease -> {self._stores.shown} ({self._settings.ttl:g} s)"
        )

    def get_schedule(self) -> Any:
        """The entries, where this replica leads."""
        return self.data if self._inner is None else self._inner.schedule

    def set_schedule(self, schedule: Any) -> None:
        """Entries are in the code and in the store; Celery sets what it has when it begins."""
        self.data = schedule

    schedule = property(get_schedule, set_schedule)

    def setup_schedule(self) -> None:
        """Done by whoever leads, when it begins to."""

    def tick(self, *_: Any, **__: Any) -> float:
        """One pass: wait until there is something to do here, and do it."""
        try:
            # Beat may be told to end in any line, of the elector's and the stores' too: see close().
            self._busy_since = time.monotonic()
            self._elector.start()
            wait = self._pass()
        finally:
            self._busy_since = None
        if wait > 0:
            # Not slept by Celery's service, which nobody can wake.
            self._changed.wait(min(wait, LONGEST_WAIT))
            self._changed.clear()
        return 0.0

    def sync(self) -> None:
        """Let what is wrapped write down what it wants to."""
        if self._inner is not None:
            self._inner.sync()

    def add(self, **_: Any) -> None:
        """Celery's way to add an entry to a scheduler, which here would be to one replica's own.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "an entry that is added to this scheduler would be of one replica alone: add it to beat_schedule, with "
            "app.add_periodic_task while the app is configured, or with celery_ext.schedule.Schedule(app).add"
        )

    def close(self) -> None:
        """Resign, so that another replica goes on at once. Idempotent.

        Celery calls it from a signal handler, and again when it ends. In the middle of a pass, or of itself, it leaves
        all to the last call: the transaction of a tick holds the row of the term, and what is interrupted holds locks.
        """
        if self._busy_since is not None or self._closing:
            return
        self._closing = True
        try:
            inner, self._inner = self._inner, None
            if inner is not None:
                inner.close()
            self._elector.stop()
            self._publisher.close()
            self._stores.close()
        finally:
            self._closing = False

    # -- leading -------------------------------------------------------------------------------------

    def _gained(self, term: Term) -> None:
        signals.leadership_gained.send(term.key, term=term.number)
        self._changed.set()

    def _lost(self, term: Term) -> None:
        signals.leadership_lost.send(term.key, term=term.number)
        self._changed.set()

    def _fit(self) -> bool:
        """Whether this replica can do the work: not while a pass of it hangs."""
        since = self._busy_since
        return since is None or time.monotonic() - since < self._settings.ttl

    def _leads(self, term: Term) -> bool:
        now = self._elector.term
        return now is not None and now.number == term.number

    def _pass(self) -> float:
        term = self._elector.term
        if term is None or (self._term is not None and self._term.number != term.number):
            self._drop()
        if term is None:
            return LONGEST_WAIT
        try:
            if self._inner is None:
                self._inner, self._term = self._make(term), term
            wait = self._inner.tick()
            self._sweep(wait)
        except NotLeader as error:
            logger.warning("beat: nothing is sent: %s", error)
            self._drop()
            return RETRY_EVERY
        except Exception as error:  # noqa: BLE001  # a class that is wrapped may raise anything
            self._drop()
            return self._failed(error)
        self._failing_since = None
        return wait

    def _sweep(self, wait: float) -> None:
        """Delete old ticks, when there is time: where no worker uses these tables nobody else does."""
        if wait > 0 and time.monotonic() >= self._sweep_at:
            swept = self._stores.schedules.sweep(KEEP_TICKS, SWEEP)
            self._sweep_at = time.monotonic() + (SWEEP_EVERY if swept < SWEEP else 1.0)

    def _make(self, term: Term) -> Inner:
        # The broker's own settings, and not those of the stores, which are more impatient.
        broker = broker_settings(self.app) if self._settings.is_broker else None
        sender = Sender(self._stores.schedules, term, lambda: self._leads(term), broker)
        if self._class is None:
            return Native(self.app, self._stores, sender, self._code, self._elector.now_ms, self._publisher)
        return Foreign(self._class, self.app, self._options, self._stores, sender, lambda: self._leads(term))

    def _drop(self) -> None:
        inner, self._inner, self._term = self._inner, None, None
        if inner is not None:
            inner.close()

    def _failed(self, error: Exception) -> float:
        """Try again soon; who can't send for a third of the lease time lets another try."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            known = isinstance(error, (NotSent, TaskgateError))
            logger.error(
                "beat: nothing can be sent, which is tried again: %s", error, exc_info=None if known else error
            )
        elif now - self._failing_since > self._settings.interval:
            logger.error("beat: nothing can be sent, so another replica may try: %s", error)
            self._failing_since = None
            self._elector.resign(self._settings.ttl)
        return RETRY_EVERY
