"""taskgate's own scheduler: entries of the code and of the store, sent at their due times by the store's clock."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery.beat import BeatLazyFunc
from celery.schedules import crontab
from celery.schedules import schedule as interval

from kombu_taskgate.core.errors import StoreBusy
from kombu_taskgate.core.schedules import Progress, Tick

from .. import signals
from .due import latest_due, next_due
from .plan import Planned, Plans
from .publishing import Publisher
from .sending import Due, Outcome, Sender
from .stores import Stores

logger = logging.getLogger("celery_ext.beat")

#: Seconds between two looks for changed entries. One that takes long is repeated more seldom.
LOOK_EVERY = 1.0
#: A look takes at most this part of the time.
LOOK_SHARE = 0.02
#: Longest time in seconds between two looks: what is changed counts within five seconds.
LONGEST_PAUSE = 4.0
#: Most entries that one look gives another base.
MOST_REBASED = 200
#: An interval that was kept to within this part of it goes on in its rhythm; a later tick begins a new one, so that the
#: one after it does not follow at once.
ON_TIME = 0.1
#: Milliseconds by which an entry may be ahead of the clock before the clock counts as set back.
AHEAD = 1000
#: Milliseconds after which an entry is tried again whose rows were locked by others.
PUT_OFF = 5000
#: Most ticks sent before the caller has a look at whether it still leads.
AT_ONCE = 100


class Native:
    """Sends what is due, under one term.

    Args:
        app: the Celery app.
        stores: where the entries are.
        sender: sends ticks under the term.
        code: the entries of the app's code.
        now_ms: the store's time, or ``None`` while it is not known.
        publisher: publishes; it stays open.
        look_every: seconds between two looks for changed entries; 0: one in each pass.
    """

    def __init__(
        self,
        app: Any,
        stores: Stores,
        sender: Sender,
        code: dict[str, Planned],
        now_ms: Callable[[], int | None],
        publisher: Publisher,
        *,
        look_every: float = LOOK_EVERY,
    ) -> None:
        self._app = app
        self._stores = stores
        self._sender = sender
        self._now_ms = now_ms
        self._look_every = look_every
        self._publisher = publisher
        self._plans = Plans(app, code)
        self._code = code
        self._known: dict[str, Planned] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._order = itertools.count()
        self._next_look = 0.0
        #: Name -> when it is due (ms), as long as its row stays what it was; ``None``: never.
        self._dues: dict[str, int | None] = {}
        #: The store's time of the last look.
        self._looked_at = 0
        #: Entries that one look has given another base, and whether there are more to come.
        self._rebased = 0
        self._look_again = False
        self._unsent: list[Tick] = []
        self._synced = False
        #: Name -> why it is not sent: said once.
        self._told: dict[str, str] = {}
        #: Names whose schedules raised when they were asked last: they are asked again with the next look.
        self._unsure: set[str] = set()

    @property
    def schedule(self) -> dict[str, Planned]:
        """The entries that are known, by name."""
        return self._known

    def tick(self) -> float:
        """Send what is due; returns after how many seconds there may be more to do.

        Raises:
            NotLeader, NotSent, StoreUnavailable: see :meth:`.sending.Sender.send`.
        """
        now = self._now_ms()
        if now is None:
            return 0.1
        self._begin(now)
        if time.monotonic() >= self._next_look:
            self._look(now)
        self._send_again(now)
        for _ in range(AT_ONCE):
            if not self._heap or self._heap[0][0] > now:
                break
            _, _, name = self._heap[0]
            try:
                self._send_due(name, now)
            except StoreBusy as error:
                if not self._sender.together:
                    raise
                self._put_off(name, error)
                break
        wait = self._next_look - time.monotonic()
        if self._heap:
            wait = min(wait, (self._heap[0][0] - now) / 1000)
        return max(0.0, wait)

    def sync(self) -> None:
        """Everything is stored with each tick."""

    def close(self) -> None:
        """It has opened nothing of its own."""

    # -- what there is -------------------------------------------------------------------------------

    def _begin(self, now: int) -> None:
        """Once for each term: tell the store what the code says, and see what an earlier leader left half done."""
        if self._synced:
            return
        # The state is that of new entries: they count from now.
        code = [replace(planned.row, base_at=now) for planned in self._code.values()]
        self._stores.schedules.sync(self._sender.term, code)
        self._unsent = [] if self._sender.together else self._stores.schedules.unsent(self._stores.key)
        self._synced = True

    def _look(self, now: int) -> None:
        started = time.monotonic()
        rows = self._stores.schedules.entries(self._stores.key)
        plans = self._plans.of(rows)
        self._rebased, self._look_again = 0, False
        if now < self._looked_at:
            self._dues.clear()  # the store's clock was set back
        self._looked_at = now
        dues: dict[str, int | None] = {}
        for name, planned in plans.items():
            known = self._known.get(name)
            sure = name in self._dues and name not in self._unsure
            if known is not None and sure and known.row == planned.row:
                dues[name] = self._dues[name]
            else:
                self._unsure.discard(name)
                due = self._prepare(planned, now)
                if not self._look_again:
                    dues[name] = due
        self._known, self._dues = plans, dues
        self._heap = [(due, next(self._order), name) for name, due in dues.items() if due is not None]
        heapq.heapify(self._heap)
        taken = time.monotonic() - started
        pause = min(LONGEST_PAUSE, max(self._look_every, taken / LOOK_SHARE)) if self._look_every else 0.0
        self._next_look = time.monotonic() + (0.0 if self._look_again else pause)

    def _prepare(self, planned: Planned, now: int) -> int | None:
        """When an entry is due (ms); ``None``: never, as it is now."""
        row = planned.row
        if row.no_overlap and not self._sender.together:
            self._refuse(planned, "no_overlap needs a broker in the same database as beat's lease")
            return None
        if not row.enabled:
            if row.base_at is not None:
                # Whoever enables it by hand need not know that what was due meanwhile is not to be sent.
                self._rebase(planned, None)
            return now if row.requested_at is not None else None
        ahead = row.base_at is not None and row.base_at > now + AHEAD
        if row.base_at is None or (ahead and _counts_elapsed(planned.schedule)):
            self._rebase(planned, now)
        if row.requested_at is not None:
            return now
        return self._next(planned)

    def _next(self, planned: Planned) -> int | None:
        base = planned.row.base_at
        if base is None:
            return None
        try:
            return next_due(planned.schedule, base, planned.zone)
        except Exception as error:  # noqa: BLE001  # a user's own schedule may raise anything; the others go on
            self._not_told(planned, error)
            return None

    def _not_told(self, planned: Planned, error: Exception) -> None:
        """Leave an entry alone until the next look: its schedule may know then."""
        self._unsure.add(planned.row.name)
        self._refuse(planned, f"its next due time can't be told: {type(error).__name__}: {error}")

    def _refuse(self, planned: Planned, why: str) -> None:
        if self._told.get(planned.row.name) != why:
            self._told[planned.row.name] = why
            logger.error("beat: entry %r is not sent: %s", planned.row.name, why)

    def _rebase(self, planned: Planned, base: int | None) -> bool:
        """Let an entry count from another instant; whether it does now."""
        row = planned.row
        # Each is a transaction: what is due must not wait for thousands of them.
        if self._rebased < MOST_REBASED:
            self._rebased += 1
            if self._stores.schedules.rebase(self._sender.term, row.name, row.base_at, base):
                row.base_at = base
                return True
        self._look_again = True
        self._next_look = 0.0
        return False

    # -- sending -------------------------------------------------------------------------------------

    def _send_due(self, name: str, now: int) -> None:
        planned = self._known[name]
        row = planned.row
        if row.requested_at is not None:
            self._send_requested(planned, now)
        else:
            self._send_regular(planned, now)
        # Only now: when sending raises, the entry is still at the top.
        due = None
        if name not in self._unsure:
            due = now if row.requested_at is not None else self._next(planned) if row.enabled else None
        self._dues[name] = due
        if due is None:
            heapq.heappop(self._heap)
        else:
            heapq.heapreplace(self._heap, (due, next(self._order), name))

    def _put_off(self, name: str, error: StoreBusy) -> None:
        """Somebody has locked what this entry needs, its unique key say, for long: the others do not wait for it."""
        logger.warning("beat: %r has to wait, and is tried again in %d s: %s", name, PUT_OFF // 1000, error)
        later = (self._now_ms() or self._heap[0][0]) + PUT_OFF
        self._dues[name] = later
        heapq.heapreplace(self._heap, (later, next(self._order), name))

    def _send_requested(self, planned: Planned, now: int) -> None:
        row = planned.row
        assert row.requested_at is not None
        base = row.base_at
        due = Due(row.name, row.requested_at, Progress(base, base, requested_at=row.requested_at), now)
        self._done(planned, due, self._sender.send(due, self._publish(planned, due.due_at)))

    def _send_regular(self, planned: Planned, now: int) -> None:
        row = planned.row
        assert row.base_at is not None
        try:
            due_at = latest_due(planned.schedule, row.base_at, now, planned.zone)
        except Exception as error:  # noqa: BLE001  # as in _next
            self._not_told(planned, error)
            return
        if due_at is None:
            # A schedule that can't be asked about the past the way it answers about the future.
            due_at = now
        late = (now - due_at) / 1000
        deadline = self._deadline(planned)
        if deadline is not None and late > deadline:
            if self._rebase(planned, due_at):
                logger.info("beat: %r was due %.0f s ago, past its deadline of %g s", row.name, late, deadline)
                signals.tick_skipped.send(self._stores.key, entry=row.name, due=due_at / 1000, reason="deadline")
            return
        progress = Progress(row.base_at, self._base_after(planned, due_at, now), disable=row.one_off)
        due = Due(row.name, due_at, progress, now)
        self._done(planned, due, self._sender.send(due, self._publish(planned, due_at)))

    def _deadline(self, planned: Planned) -> float | None:
        if planned.row.starting_deadline is not None:
            return planned.row.starting_deadline
        celerys = self._app.conf.beat_cron_starting_deadline
        if celerys is not None and isinstance(planned.schedule, crontab):
            return float(celerys)
        return self._stores.settings.starting_deadline

    @staticmethod
    def _base_after(planned: Planned, due_at: int, now: int) -> int:
        if not _counts_elapsed(planned.schedule):
            return due_at
        return due_at if now - due_at <= ON_TIME * 1000 * planned.schedule.seconds else now

    def _done(self, planned: Planned, due: Due, outcome: Outcome) -> None:
        row = planned.row
        if outcome is Outcome.REPEATED:
            # Somebody has changed the entry, or it was sent before: see what is so.
            self._next_look = 0.0
        row.base_at = due.progress.base_at
        if due.progress.requested_at is not None:
            row.requested_at = None
        if due.progress.disable:
            row.enabled = False
        if outcome is Outcome.OVERLAP:
            logger.info("beat: %r is left out: its last task has not ended", row.name)
        elif outcome is Outcome.SENT:
            logger.info("beat: sent %s (%s)", row.name, row.task)

    def _publish(self, planned: Planned, due_at: int) -> Callable[[str], object]:
        row = planned.row
        args, kwargs = _evaluated(planned)

        def publish(task_id: str) -> object:
            options = dict(planned.options)
            headers = {"celery_beat_task": True, "periodic_task_name": row.name, "taskgate_due_at": due_at}
            options["headers"] = {**headers, **(options.get("headers") or {})}
            if row.no_overlap:
                options["unique_key"] = f"beat:{self._stores.key}:{row.name}"
            return self._publisher.publish(row.task, args(), kwargs(), {"task_id": task_id, **options})

        return publish

    def _send_again(self, now: int) -> None:
        """Send what an earlier leader may not have sent, unless a later tick makes up for it anyway."""
        while self._unsent:
            tick = self._unsent[0]
            planned = self._known.get(tick.name)
            due = None if planned is None or not planned.row.enabled else self._next(planned)
            if planned is None:
                logger.warning("beat: a tick of %r may not have been sent, and the entry is gone", tick.name)
                self._sender.give_up(tick)
            elif due is not None and due <= now:
                logger.warning("beat: %r may not have been sent by an earlier leader, and is due again", tick.name)
                self._sender.give_up(tick)
            else:
                logger.warning("beat: %r may not have been sent by an earlier leader; sent again", tick.name)
                self._sender.resend(tick, self._publish(planned, tick.due_at))
            self._unsent.pop(0)


def _counts_elapsed(schedule: Any) -> bool:
    """Whether it counts from its last run, and does not name times of the day."""
    return isinstance(schedule, interval) and not schedule.relative


def _evaluated(planned: Planned) -> tuple[Callable[[], list[Any]], Callable[[], dict[str, Any]]]:
    """The arguments, made when they are needed: they may be functions."""

    def value(of: Any) -> Any:
        return of() if isinstance(of, BeatLazyFunc) else of

    return (
        lambda: [value(one) for one in planned.args],
        lambda: {name: value(one) for name, one in planned.kwargs.items()},
    )
