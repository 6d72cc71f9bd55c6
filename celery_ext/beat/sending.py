"""Sending one tick: its message, its row and what it changes in its entry belong together.

Where the broker's tables are in the same database all of it is one transaction, under the leader's term: it is there
once or not at all, whoever is killed or frozen when. Elsewhere a message can't be part of the transaction. There the
tick's row is stored first, as SENDING, then the message is published, then the row says so; a leader that finds a row
SENDING publishes again, under the same task id. So there a tick may be published twice, when its leader dies between
publishing and saying so, and a leader that is frozen in between publishes when it wakes; it is not lost.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from celery.beat import SchedulingError
from kombu.exceptions import OperationalError

from kombu_taskgate.core.errors import (
    ConfigError,
    NotLeader,
    PayloadTooLarge,
    SchemaError,
    StoreUnavailable,
    TaskExists,
    TaskgateError,
)
from kombu_taskgate.core.schedules import Progress, Schedules, Tick, TickState
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.terms import Term
from kombu_taskgate.transport.capture import capturing

from .. import signals

logger = logging.getLogger("celery_ext.beat")

#: Task ids of ticks are made of it; never to be changed.
_TICKS = uuid.UUID("9f4c1a52-7d0f-5c3e-8e57-3f6a6d1f0b21")

#: Publishes the message of a tick under a task id.
Publish = Callable[[str], object]


class Outcome(Enum):
    """What became of a due entry."""

    SENT = "sent"
    #: It was sent before, by somebody else or by an earlier term.
    REPEATED = "repeated"
    #: It is not due after all, in a way that another one will not be either; the error was logged.
    FAILED = "failed"
    #: Its last task still runs.
    OVERLAP = "overlap"


class NotSent(Exception):
    """The broker can't be reached, so nothing was sent; the same tick can be sent later."""


@dataclass(slots=True)
class Due:
    """One due entry.

    Args:
        name: of the entry.
        due_at: the due time, ms.
        progress: what changes in the entry.
        now: the store's time, ms.
    """

    name: str
    due_at: int
    progress: Progress
    now: int


def task_id_of(key: str, name: str, due_at: int) -> str:
    """The task id of a tick: the same on every replica, so that a repeated message can be told."""
    return str(uuid.uuid5(_TICKS, f"{key}\0{name}\0{due_at}"))


class Sender:
    """Sends ticks under one term.

    Args:
        schedules: where.
        term: under which.
        leads: whether it is still trusted, by the local clock.
        broker: the settings of the broker whose messages go into the same tables; ``None``: it is elsewhere.
    """

    def __init__(
        self, schedules: Schedules, term: Term, leads: Callable[[], bool], broker: BrokerSettings | None
    ) -> None:
        self._schedules = schedules
        self.term = term
        self._leads = leads
        self._broker = broker

    @property
    def together(self) -> bool:
        """Whether messages are part of the transaction."""
        return self._broker is not None

    def send(self, due: Due, publish: Publish) -> Outcome:
        """Send it, once.

        Raises:
            NotLeader: the term is over; nothing was sent.
            NotSent, StoreUnavailable: nothing was sent that was not told of.
        """
        if not self._leads():
            raise NotLeader(f"term {self.term.number} of {self.term.key} is over by the local clock")
        tick = Tick(due.name, due.due_at, task_id_of(self.term.key, due.name, due.due_at))
        outcome = self._together(due, tick, publish) if self.together else self._apart(due, tick, publish)
        _tell(self.term.key, due, tick, outcome)
        return outcome

    def _together(self, due: Due, tick: Tick, publish: Publish) -> Outcome:
        assert self._broker is not None
        try:
            with capturing(self._broker) as captured:
                self._publish(due, tick, publish)
            if self._schedules.tick(self.term, tick, due.progress, captured.tasks):
                return Outcome.SENT
        except TaskExists:
            self._schedules.tick(self.term, replace(tick, state=TickState.SKIPPED), due.progress)
            return Outcome.OVERLAP
        except (NotLeader, StoreUnavailable, SchemaError):
            raise
        except TaskgateError as error:
            if isinstance(error, ConfigError) and error.__cause__ is not None:
                # The database itself says so, of its tables or rights: the tick is sent when that has been put right.
                raise
            # Of this message alone, so others are not held up: it is too large, or waits for a task that is not known.
            logger.error("beat: %r can't be sent: %s", due.name, error)  # noqa: TRY400  # it says all there is to say
            return self._fail(due, tick)
        except _UnusableError:
            return self._fail(due, tick)
        return Outcome.REPEATED

    def _apart(self, due: Due, tick: Tick, publish: Publish) -> Outcome:
        if not self._schedules.tick(self.term, replace(tick, state=TickState.SENDING), due.progress):
            return Outcome.REPEATED
        try:
            self._publish(due, tick, publish)
        except TaskExists:
            # The broker elsewhere is taskgate too, and the entry has a unique key of its own.
            self._skip(due.name, due.due_at)
            return Outcome.OVERLAP
        except _UnusableError:
            # Told, and not tried again: the next one would fail as well.
            self._skip(due.name, due.due_at)
            return Outcome.FAILED
        self._schedules.sent(self.term.key, due.name, due.due_at)
        return Outcome.SENT

    def resend(self, tick: Tick, publish: Publish) -> None:
        """Publish a tick that an earlier leader may or may not have published. Raises as :meth:`send`."""
        if not self._leads():
            raise NotLeader(f"term {self.term.number} of {self.term.key} is over by the local clock")
        try:
            publish(tick.task_id)
        except Exception as error:
            if _unreachable(error):
                raise NotSent(str(error)) from error
            logger.exception("beat: %r could not be sent and is given up", tick.name)
            self._skip(tick.name, tick.due_at)
            return
        self._schedules.sent(self.term.key, tick.name, tick.due_at)

    def give_up(self, tick: Tick) -> None:
        """Forget a tick that is not to be sent again: its entry is gone, or another one makes up for it."""
        self._schedules.sent(self.term.key, tick.name, tick.due_at)

    def _skip(self, name: str, due_at: int) -> None:
        self._schedules.sent(self.term.key, name, due_at, TickState.SKIPPED)

    def _fail(self, due: Due, tick: Tick) -> Outcome:
        self._schedules.tick(self.term, replace(tick, state=TickState.SKIPPED), due.progress)
        return Outcome.FAILED

    def _publish(self, due: Due, tick: Tick, publish: Publish) -> None:
        try:
            publish(tick.task_id)
        except TaskExists:
            raise
        except Exception as error:
            if _unreachable(error):
                raise NotSent(str(error)) from error
            logger.exception("beat: %r could not be sent; it is tried again at its next due time", due.name)
            raise _UnusableError from error


class _UnusableError(Exception):
    """The message can't be made."""


def _unreachable(error: BaseException) -> bool:
    """Whether an error says that the broker can't be reached, and not that the message can't be made."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PayloadTooLarge):
            return False  # an OperationalError as well, since kombu's callers expect that
        if isinstance(seen, (StoreUnavailable, NotLeader, OperationalError, OSError)):
            return True
        # Celery's scheduler wraps what was raised without naming it as the cause.
        seen = seen.__cause__ or (seen.__context__ if isinstance(seen, SchedulingError) else None)
    return False


def _tell(key: str, due: Due, tick: Tick, outcome: Outcome) -> None:
    at, reasons = due.due_at / 1000, {Outcome.OVERLAP: "overlap", Outcome.FAILED: "error"}
    if outcome is Outcome.SENT:
        lateness = max(0.0, (due.now - due.due_at) / 1000)
        signals.tick_sent.send(key, entry=due.name, due=at, lateness=lateness, task_id=tick.task_id)
    elif outcome in reasons:
        signals.tick_skipped.send(key, entry=due.name, due=at, reason=reasons[outcome])
