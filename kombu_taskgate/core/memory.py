"""The broker in plain dictionaries: the reference that the SQL stores are compared with.

One lock guards everything, so each method is one transaction. Everything lives as long as its
:class:`MemoryStore`; brokers opened on one store see the same data.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from operator import attrgetter

from .broker import Notify
from .chords import ChordPart
from .clock import Clock, to_ms
from .errors import (
    AlreadyFinal,
    AlreadyReplayed,
    CompletedNotAllowed,
    ConfigError,
    LeaseLost,
    PayloadTooLarge,
    ReplayNotFinal,
    TaskCanceled,
    TaskExists,
    TaskNotFound,
)
from .memory_chords import ChordRow, MemoryChords
from .memory_results import MemoryResults
from .memory_revocations import MemoryRevocations
from .memory_schedules import MemorySchedules
from .memory_terms import MemoryTerms, TermRow
from .memory_topology import MemoryTopology
from .model import (
    ANSWER_WITHIN,
    FINAL,
    NO_TOKEN,
    WAITING,
    WAS_BEGUN,
    Claim,
    FailKind,
    Filter,
    HeartbeatResult,
    Inspection,
    Lease,
    NewTask,
    Reason,
    Renewal,
    Reservation,
    Session,
    State,
    StateChange,
    Task,
)
from .results import WAIT_EXPIRES, Finality, NewResult, Result, left_nothing, parent_ended
from .revocations import Revocation
from .schedules import KEEP_TICKS, Entry, Tick
from .settings import BrokerSettings, check_name
from .topology import Binding, Exchange, Queue
from .wakeup import Wakeup
from .watch import Polling, Wake, Watch
from .watchers import Watchers

logger = logging.getLogger(__name__)

#: What a transaction did, in order; told to the callback when it is over.
Changes = list[StateChange]
Refused = list[Lease]

_READY = frozenset({State.PENDING, State.RETRYING})
_ANSWERED_FOR = frozenset({State.FAILED, State.CANCELED})
_FAIL_REASONS = {
    FailKind.BUSINESS: Reason.BUSINESS,
    FailKind.THROTTLED: Reason.THROTTLED,
    FailKind.SKIP: Reason.REJECTED,
}
_NAMES = ("type", "task_id", "root_id", "parent_task_id", "group_id")
_REPLAYED = ("queue", *_NAMES, "priority", "key", "max_retry", "fail_fast", "unique_key")
_ANSWER_WITHIN = to_ms(ANSWER_WITHIN)
#: Ten thousand years in milliseconds.
_FAR = 10_000 * 366 * 86_400_000
#: Symmetric, because a store may keep the negative.
_PRIORITIES = range(-(2**15) + 1, 2**15)


@dataclass(slots=True)
class _Row(Task):
    """A task and what nobody outside may see of it."""

    token: int = NO_TOKEN
    #: Token of the newest claim, also when its lease is over.
    newest_token: int = NO_TOKEN
    session: int | None = None


_TASK_FIELDS = tuple(field.name for field in fields(Task))
_CLAIM_FIELDS = tuple(field.name for field in fields(Claim))


class MemoryStore:
    """The data of any number of brokers, and the lock that guards it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        #: Grows with every change, so that a waiter sees one that came before it began to wait.
        self.version = 0
        self.last_id = 0
        self.last_token = NO_TOKEN
        self.last_session = 0
        self.tasks: dict[int, _Row] = {}
        #: Parent -> its children, of which some may be gone.
        self.children: dict[int, set[int]] = {}
        #: (child, task_id of a parent) -> the workflow of that, if it is known.
        self.waits: dict[tuple[int, str], str | None] = {}
        #: Session -> when it ends (ms).
        self.sessions: dict[int, int] = {}
        #: (key, window in ms) -> (start of the newest window, starts used in it).
        self.quotas: dict[tuple[str, int], tuple[int, int]] = {}
        self.exchanges: dict[str, Exchange] = {}
        self.queues: dict[str, Queue] = {}
        self.touched: dict[str, int] = {}
        self.bindings: dict[tuple[str, str, str, str], Binding] = {}
        #: (queue, session) -> how many consumers.
        self.consumers: dict[tuple[str, int], int] = {}
        #: Revocation -> until when it is kept (ms).
        self.revocations: dict[Revocation, int] = {}
        #: Task id -> result; group id -> what it consists of and when that expires (ms).
        self.results: dict[str, Result] = {}
        self.groups: dict[str, tuple[bytes, int | None]] = {}
        self.chords: dict[str, ChordRow] = {}
        self.terms: dict[str, TermRow] = {}
        #: (key, holder) -> since when it stands by, and when it last said so (ms).
        self.candidates: dict[tuple[str, str], tuple[int, int]] = {}
        #: Schedule -> its entries by name; (schedule, entry, due time) -> tick.
        self.entries: dict[str, dict[str, Entry]] = {}
        self.ticks: dict[tuple[str, str, int], Tick] = {}
        self.watchers = Watchers()
        #: Of all its brokers: they are in one process.
        self.to_answer = Wakeup()
        _stores.add(self)

    def is_current(self, said: NewResult | ChordPart) -> bool:
        """Whether what is said under a lease counts; the caller holds the lock."""
        row = self.tasks.get(said.execution) if said.fenced else None
        return row is None or (row.newest_token == said.token and row.state not in WAITING)

    def end_consumers(self, session: int, instant: int) -> None:
        """A holder is gone: what it consumed was in use until then; the caller holds the lock."""
        for queue, holder in [key for key in self.consumers if key[1] == session]:
            del self.consumers[queue, holder]
            if queue in self.touched:
                self.touched[queue] = max(self.touched[queue], instant)

    def wake(self) -> None:
        """Make every waiting dequeue look again; the caller holds the lock."""
        self.version += 1
        self.changed.notify_all()


class _WallClock:
    """This process's clock, which for memory is the store's."""

    def now_ms(self) -> int:
        return to_ms(time.time())


class MemoryBroker:
    """A :class:`~kombu_taskgate.core.broker.Broker` over a :class:`MemoryStore`.

    Args:
        settings: how it behaves; the URL and everything about connections is not used.
        store: the data to share; ``None`` makes a new, empty one.
        clock: read in place of ``time.time``.
        notify: told each state change that this broker made, after it is done and outside the lock.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        store: MemoryStore | None = None,
        clock: Clock | None = None,
        notify: Notify | None = None,
    ) -> None:
        self.settings = settings
        self._store = MemoryStore() if store is None else store
        self._clock = _WallClock() if clock is None else clock
        self._notify = notify
        self._closed = False
        self._turn = 0
        self.to_answer = self._store.to_answer
        self.topology = MemoryTopology(self._store, self._clock)
        self.revocations = MemoryRevocations(self._store, self._clock)
        self.results = MemoryResults(self._store, self._clock, settings, self._transaction, self._said)
        self.chords = MemoryChords(self._store, self._clock, settings, self.enqueue_many)
        self.terms = MemoryTerms(self._store, self._clock)
        self.schedules = MemorySchedules(self._store, self._clock, self.terms, self.enqueue_many)

    # -- publishing ---------------------------------------------------------------------------------

    def enqueue(self, task: NewTask) -> int:
        return self.enqueue_many([task])[0]

    def enqueue_many(self, tasks: Sequence[NewTask]) -> list[int]:
        for task in tasks:
            self._check_new(task)
        with self._transaction() as changes:
            seen: set[str] = set()
            locks: dict[str, bool] = {}
            known = {row.task_id for row in self._rows() if row.type} | self._store.results.keys()
            for task in tasks:
                if task.key is not None:
                    self._check_key(task.key, seen)
                if task.unique_key is not None:
                    self._check_lock(task, locks)
                for name in sorted(task.depends_on):
                    if name not in known:
                        raise TaskNotFound(left_nothing(name, known=False))
                known.update([task.task_id] if task.type else [])
                for parent in task.parents:
                    self._row(parent)
                if task.unique_key is not None:
                    locks[task.unique_key] = not self._doomed(task)
            now = self._now()
            return [self._insert(task, now, changes) for task in tasks]

    def _check_key(self, key: str, seen: set[str]) -> None:
        newest = max((row for row in self._rows() if row.key == key), key=_by_id, default=None)
        if newest is not None:
            raise TaskExists(key, newest.id, newest.state, newest.task_id)
        if key in seen:  # of an earlier task of the same call, which is not stored either
            raise TaskExists(key, self._store.last_id + 1, State.PENDING)
        seen.add(key)

    def _check_lock(self, task: NewTask, locks: Mapping[str, bool]) -> None:
        """Refuse a unique key that is locked. ``locks``: what earlier tasks of the same call have locked, or freed."""
        key = task.unique_key
        assert key is not None
        if locks.get(key):
            raise TaskExists(key, self._store.last_id + 1, State.PENDING, unique=True)
        holder = None if key in locks else self._holder(key)
        if holder is not None and not _gives_up(holder, task):
            raise TaskExists(key, holder.id, holder.state, holder.task_id, unique=True)

    def _holder(self, key: str | None) -> _Row | None:
        """Who has locked a unique key."""
        return next((row for row in self._rows() if row.locks and row.unique_key == key), None)

    def _doomed(self, task: NewTask) -> bool:
        states = {self._row(parent).state for parent in task.parents}
        failed = not states.isdisjoint({State.FAILED, State.CANCELED})
        return task.fail_fast and (failed or self._failed_parent(task) is not None)

    def _failed_parent(self, task: NewTask) -> str | None:
        """The parent of ``depends_on`` that dooms the task, in words."""
        results = [self._store.results.get(name) for name in sorted(set(task.depends_on))]
        ended = [one for one in results if one is not None and one.finality is Finality.ENDED]
        return parent_ended(ended[0].task_id, ended[0].status) if ended and task.fail_fast else None

    def _check_new(self, task: NewTask) -> None:
        check_name(task.queue, "queue")
        for name in (*_NAMES, "key", "unique_key"):
            value = getattr(task, name)
            if value is not None and (name, value) != ("type", ""):
                check_name(value, name)
        if task.run_at is not None and task.delay is not None:
            raise ConfigError("run_at and delay exclude each other: give one of them")
        for name in task.depends_on:
            check_name(name, "task id in depends_on")
            if name == task.task_id:
                raise ConfigError(f"task {name} can't depend on itself")
        _check_times(task.run_at, task.delay)
        _check_times(task.expires_at, task.expires_in)
        if task.priority not in _PRIORITIES:
            raise ConfigError(f"priority must be a 16-bit integer, not {task.priority!r}")
        self._check_payload(task.payload)

    def _check_payload(self, payload: bytes) -> None:
        if len(payload) > self.settings.max_payload:
            raise PayloadTooLarge(
                f"the message is {len(payload)} bytes long, max_payload allows {self.settings.max_payload}"
            )

    def _keep_for_waiting(self, name: str, now: int) -> None:
        """What somebody waits for must not expire before its time to wait is over."""
        one, until = self._store.results.get(name), now + to_ms(WAIT_EXPIRES)
        if one is not None and one.expires_at is not None and one.expires_at < until:
            self._store.results[name] = replace(one, expires_at=until)

    def _insert(self, task: NewTask, now: int, changes: Changes) -> int:
        parents = {parent: self._row(parent) for parent in task.parents}
        results = {name: self._store.results.get(name) for name in sorted(set(task.depends_on))}
        awaited = [name for name, one in results.items() if one is None or one.finality is Finality.OPEN]
        for name in awaited:
            self._keep_for_waiting(name, now)
        failure = self._failed_parent(task)
        waits_for = sum(parent.state not in FINAL for parent in parents.values()) + len(awaited)
        doomed = self._doomed(task)
        holder = self._holder(task.unique_key)
        if holder is not None:
            holder.locks = False
        row = self._add(
            changes,
            State.CANCELED if doomed else State.BLOCKED if waits_for else State.PENDING,
            queue=task.queue,
            type=task.type,
            payload=bytes(task.payload),
            task_id=task.task_id,
            root_id=task.root_id,
            parent_task_id=task.parent_task_id,
            group_id=task.group_id,
            priority=task.priority,
            run_at=task.run_at if task.run_at is not None else now + to_ms(task.delay or 0),
            created_at=now,
            expires_at=_earliest(task.expires_at, None if task.expires_in is None else now + to_ms(task.expires_in)),
            finished_at=now if doomed else None,
            key=task.key,
            unique_key=task.unique_key,
            locks=task.unique_key is not None and not doomed,
            fail_fast=task.fail_fast,
            pending_parents=0 if doomed else waits_for,
            max_retry=task.max_retry,
            reason=Reason.PARENT.value if doomed else None,
            detail=failure,
            answer_at=now if doomed and task.type else None,
        )
        if row.state is State.BLOCKED:
            for name in awaited:
                roots = (one.root_id for one in self._rows() if one.task_id == name and one.type and one.id != row.id)
                self._store.waits[row.id, name] = next(reversed([*roots]), None)
        for parent_id in parents:
            self._store.children.setdefault(parent_id, set()).add(row.id)
        return row.id

    def _add(self, changes: Changes, state: State, **values: object) -> _Row:
        self._store.last_id += 1
        row = _Row(id=self._store.last_id, state=state, **values)  # type: ignore[arg-type]  # names are Task's
        self._store.tasks[row.id] = row
        changes.append(StateChange(row.id, row.queue, None, state))
        return row

    # -- claiming -----------------------------------------------------------------------------------

    def dequeue(
        self,
        queues: Sequence[str],
        limit: int = 1,
        timeout: float | None = 0.0,
        *,
        owner: str = "",
        session: Session | None = None,
        stop: threading.Event | None = None,
    ) -> list[Claim]:
        if not queues:
            raise ConfigError("dequeue needs at least one queue")
        if limit < 1:
            raise ConfigError(f"dequeue limit must be at least 1, not {limit!r}")
        give_up = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._transaction() as changes:
                seen = self._store.version
                claims = self._claim(queues, limit, owner, session, changes)
            left = self.settings.poll_max if give_up is None else give_up - time.monotonic()
            if claims or left <= 0 or self._closed or (stop is not None and stop.is_set()):
                return claims
            # In slices: neither a stop event nor a clock that has moved on can wake a condition.
            with self._store.changed:
                if self._store.version == seen:
                    self._store.changed.wait(min(left, self.settings.poll_max))

    def ack_and_dequeue(
        self,
        leases: Sequence[Lease],
        queues: Sequence[str],
        limit: int,
        *,
        owner: str = "",
        session: Session | None = None,
        begin: Sequence[Lease] = (),
    ) -> tuple[list[Lease], list[Claim]]:
        with self._transaction() as changes:
            refused = self._each(leases, lambda row: self._complete(row, None, changes))
            refused += self._each(begin, _begin)
            claims = self._claim(queues, limit, owner, session, changes) if queues and limit > 0 else []
            return refused, claims

    def _claim(
        self, queues: Sequence[str], limit: int, owner: str, session: Session | None, changes: Changes
    ) -> list[Claim]:
        """An equal share from each queue; what one does not use goes to the next that has more."""
        now = self._now()
        names = list(dict.fromkeys(queues))
        # Another queue begins each time, so that a limit of 1 is fair too.
        self._turn += 1
        names = names[self._turn % len(names) :] + names[: self._turn % len(names)]
        claimed: list[_Row] = []
        while names and len(claimed) < limit:
            left = deque(names)
            names = []
            while left and len(claimed) < limit:
                share = math.ceil((limit - len(claimed)) / len(left))
                rows = self._take(left[0], share, now, changes)
                claimed.extend(rows)
                if len(rows) == share:
                    names.append(left[0])
                left.popleft()
        for row in claimed:
            self._lease(row, now, owner, session)
        return [Claim(**{name: getattr(row, name) for name in _CLAIM_FIELDS}) for row in claimed]

    def _take(self, queue: str, limit: int, now: int, changes: Changes) -> list[_Row]:
        """The first ready rows of a queue, now running; ends those on the way that may not be delivered any more."""
        taken: list[_Row] = []
        while True:
            ready = [r for r in self._rows() if r.queue == queue and r.state in _READY and r.run_at <= now]
            ready.sort(key=_claim_order)
            met = ready[: limit - len(taken)]
            if any(_expired(row, now) for row in met):
                # More of the same kind are likely behind them.
                self._expire([row for row in ready if _expired(row, now)], changes)
            worn = [r for r in met if r.state in _READY and _unsettled(r) >= self.settings.max_deliveries]
            for row in worn:
                detail = f"delivered {_unsettled(row)} times without being settled"
                self._end(row, State.FAILED, changes, Reason.MAX_DELIVERIES, detail)
            good = [row for row in met if row.state in _READY]
            for row in good:
                self._move(row, State.RUNNING, changes)
            taken.extend(good)
            if len(good) == len(met):
                return taken

    def _expire(self, rows: Sequence[_Row], changes: Changes) -> None:
        """End rows that nobody wants any more; of those in a queue that will go itself nothing is kept."""
        for row in rows:
            self._end(row, State.CANCELED, changes, Reason.EXPIRED)
            queue = self._store.queues.get(row.queue)
            linked = row.id in self._store.children or any(row.id in ids for ids in self._store.children.values())
            if queue is not None and queue.expires is not None and not linked and not _in_chain(row):
                self._remove(row)

    def _lease(self, row: _Row, now: int, owner: str, session: Session | None) -> None:
        self._store.last_token += 1
        row.token = row.newest_token = self._store.last_token
        row.owner = owner
        row.session = None if session is None else session.id
        row.lease_until = now + self._ttl(row)
        row.deliveries += 1

    # -- settling -----------------------------------------------------------------------------------

    def begin_many(self, leases: Sequence[Lease]) -> list[Lease]:
        with self._transaction():
            return self._each(leases, _begin)

    def ack(self, lease: Lease, result: bytes | None = None) -> None:
        with self._transaction() as changes:
            self._complete(self._held(lease), result, changes)

    def ack_many(self, leases: Sequence[Lease]) -> list[Lease]:
        with self._transaction() as changes:
            return self._each(leases, lambda row: self._complete(row, None, changes))

    def _complete(self, row: _Row, result: bytes | None, changes: Changes) -> None:
        row.result = result
        self._end(row, State.COMPLETED, changes)
        if self.settings.keep_completed <= 0 and not _in_chain(row):
            self._remove(row)

    def fail(
        self,
        lease: Lease,
        kind: FailKind = FailKind.BUSINESS,
        *,
        retry_at: int | None = None,
        delay: float | None = None,
        reason: Reason | None = None,
        detail: str | None = None,
        told: bool = False,
    ) -> State:
        if retry_at is not None and delay is not None:
            raise ConfigError("retry_at and delay exclude each other: give one of them")
        if kind is FailKind.LOST and (retry_at is not None or delay is not None):
            raise ConfigError("what was lost is ready at once: give neither retry_at nor delay")
        with self._transaction() as changes:
            row = self._held(lease)
            if kind is FailKind.LOST:
                return self._lose(row, changes, reason, detail, told=told)
            if kind is FailKind.BUSINESS:
                row.attempts += 1
                over = row.attempts > row.max_retry
            elif kind is FailKind.THROTTLED:
                row.throttled += 1
                over = row.throttled >= self.settings.throttled_max
            else:
                over = True
            if over:
                self._end(row, State.FAILED, changes, reason or _FAIL_REASONS[kind], detail, answer=None if told else 0)
            elif row.cancel_requested:
                self._end(row, State.CANCELED, changes, Reason.CANCELED)
            else:
                row.run_at = retry_at if retry_at is not None else self._now() + to_ms(delay or 0)
                self._move(row, State.RETRYING, changes)
            return row.state

    def requeue(self, lease: Lease, *, delivered: bool = True) -> None:
        with self._transaction() as changes:
            self._give_back(self._held(lease), delivered, changes)

    def requeue_many(self, leases: Sequence[Lease], *, delivered: bool = True) -> list[Lease]:
        with self._transaction() as changes:
            return self._each(leases, lambda row: self._give_back(row, delivered, changes))

    def _give_back(self, row: _Row, delivered: bool, changes: Changes) -> None:
        if not delivered:
            row.deliveries -= 1
        if row.cancel_requested:  # nobody would tell the next holder in time
            self._end(row, State.CANCELED, changes, Reason.CANCELED)
        elif row.begun:
            self._end(row, State.FAILED, changes, Reason.LOST, WAS_BEGUN)
        else:
            self._move(row, State.PENDING, changes)

    def finish_canceled(self, lease: Lease) -> None:
        with self._transaction() as changes:
            self._end(self._held(lease), State.CANCELED, changes, Reason.CANCELED)

    # -- leases -------------------------------------------------------------------------------------

    def heartbeat(self, lease: Lease) -> int:
        with self._transaction():
            row = self._held(lease)
            row.lease_until = self._now() + self._ttl(row)
            if row.cancel_requested:
                raise TaskCanceled(f"execution {row.id} was canceled while it ran: finish it")
            return row.lease_until

    def heartbeat_many(self, leases: Sequence[Lease]) -> HeartbeatResult:
        with self._transaction():
            now = self._now()
            found = HeartbeatResult()
            for lease in leases:
                row = self._current(lease)
                if row is None:
                    found.lost.append(lease)
                    continue
                row.lease_until = now + self._ttl(row)
                if row.cancel_requested:
                    found.canceled.append(lease)
            return found

    def open_session(self, owner: str, ttl: float) -> Session:
        with self._transaction():
            self._store.last_session += 1
            session = Session(self._store.last_session, owner, ttl)
            self._store.sessions[session.id] = self._now() + to_ms(ttl)
            return session

    def renew_session(self, session: Session, *, look: bool = True) -> Renewal:
        with self._transaction():
            self._store.sessions[session.id] = self._now() + to_ms(session.ttl)
            if not look:
                return Renewal()
            held = [row for row in self._rows() if row.session == session.id]
            return Renewal({row.id: row.token for row in held}, {row.id for row in held if row.cancel_requested})

    def close_session(self, session: Session) -> int:
        with self._transaction() as changes:
            self._store.end_consumers(session.id, self._now())
            self._store.sessions.pop(session.id, None)
            held = [row for row in self._rows() if row.session == session.id]
            for row in held:
                self._give_back(row, True, changes)
            return len(held)

    def reap_in(self) -> float:
        return 0.0

    def reap_expired(self) -> int:
        with self._transaction() as changes:
            now = self._now()
            gone = [row for row in self._rows() if row.lease_until is not None and self._valid_until(row) < now]
            for row in gone:
                self._lose(row, changes)
            self._look_after_waits(changes)
            due = any(row.answer_at is not None and row.answer_at <= now for row in self._rows())
        if due:
            self.to_answer.wake()
        return len(gone)

    def runs_out_in(self) -> float:
        return math.inf

    def _look_after_waits(self, changes: Changes) -> None:
        """A task that nothing goes on of, not even its workflow, and that has no result, is taken for failed."""
        going_on = {row.task_id for row in self._rows() if row.type and row.state not in FINAL}
        roots = {row.root_id for row in self._rows() if row.root_id and row.state in {*_READY, State.RUNNING}}
        served = going_on | {name for (_, name), root_id in self._store.waits.items() if root_id in roots}
        for name in sorted({name for _, name in self._store.waits} - served):
            states = [row.state for row in self._rows() if row.task_id == name and row.type]
            nothing = not states or states[-1] is State.COMPLETED
            detail = left_nothing(name, known=True) if nothing else parent_ended(name, str(states[-1]))
            self._said(name, False, detail, changes)

    def _said(self, task_id: str, success: bool, detail: str, changes: Changes) -> None:
        """A task has ended: wake who waits for its result, or cancel them."""
        waits = sorted(child for child, name in self._store.waits if name == task_id)
        for child in waits:
            del self._store.waits[child, task_id]
        canceled: list[_Row] = []
        for row in (self._store.tasks[child] for child in waits):
            if success or not row.fail_fast:
                self._one_parent_less(row, changes)
            else:
                self._finish(row, State.CANCELED, self._now(), changes, Reason.PARENT, detail)
                canceled.append(row)
        self._tell_children(canceled, changes)

    def _one_parent_less(self, row: _Row, changes: Changes) -> None:
        row.pending_parents -= 1
        if row.pending_parents == 0:
            self._move(row, State.PENDING, changes)

    def _lose(
        self,
        row: _Row,
        changes: Changes,
        reason: Reason | None = None,
        detail: str | None = None,
        *,
        told: bool = False,
    ) -> State:
        """Take it from a holder that is gone."""
        if row.cancel_requested:
            self._end(row, State.CANCELED, changes, Reason.CANCELED)
            return row.state
        row.lease_lost += 1
        if row.begun:
            said = WAS_BEGUN if detail is None else f"{detail}: {WAS_BEGUN}"
            self._end(row, State.FAILED, changes, reason or Reason.LOST, said, answer=None if told else 0)
        elif row.lease_lost >= self.settings.lease_lost_max:
            usual = f"{row.lease_lost} workers lost their lease on it"
            why = reason or Reason.LEASE_LOST
            self._end(row, State.FAILED, changes, why, detail or usual, answer=None if told else 0)
        else:
            self._move(row, State.PENDING, changes)
        return row.state

    def _valid_until(self, row: _Row) -> int:
        session_until = 0 if row.session is None else self._store.sessions.get(row.session, 0)
        return max(row.lease_until or 0, session_until)

    def prune(self, limit: int = 1000) -> int:
        with self._transaction():
            now = self._now()
            # One that a blocked row refers to stays, so that whoever looks at that sees what it waited for.
            old = [row for row in self._rows() if self._kept_until(row) < now and not self._blocked_children(row)]
            old = sorted(old, key=attrgetter("finished_at"))[:limit]
            for row in old:
                self._remove(row)
            in_use = {row.session for row in self._rows()}
            for session in [s for s, until in self._store.sessions.items() if until < now and s not in in_use]:
                self._store.end_consumers(session, self._store.sessions[session])
                del self._store.sessions[session]
            for key, window in [k for k, (start, _) in self._store.quotas.items() if start + k[1] <= now]:
                del self._store.quotas[key, window]
        return max(len(old), self.revocations.sweep(limit), self.schedules.sweep(KEEP_TICKS, limit))

    def _kept_until(self, row: _Row) -> int:
        if row.state not in FINAL:
            return sys.maxsize
        short = row.state is State.COMPLETED and not _in_chain(row)
        return (row.finished_at or 0) + to_ms(self.settings.keep_completed if short else self.settings.keep_failed)

    # -- control ------------------------------------------------------------------------------------

    def cancel(self, id: int) -> State:
        with self._transaction() as changes:
            row = self._row(id)
            if row.state in FINAL:
                raise AlreadyFinal(f"execution {id} has ended already: it is {row.state}")
            if row.state is State.RUNNING:
                row.cancel_requested = True
            else:
                self._end(row, State.CANCELED, changes, Reason.CANCELED)
            return row.state

    def cancel_waiting(self, ids: Sequence[int] = (), *, task_ids: Sequence[str] = ()) -> Sequence[Task]:
        numbers, names = set(ids), set(task_ids)
        with self._transaction() as changes:
            meant = (r for r in self._rows() if r.id in numbers or (r.task_id in names and r.type))
            rows = [row for row in meant if row.state in WAITING]
            rows.sort(key=_by_id)
            shown = [_shown(row) for row in rows]
            # Children before parents: one that is meant itself is canceled on its own account.
            for row in reversed(rows):
                self._end(row, State.CANCELED, changes, Reason.CANCELED, answer=_ANSWER_WITHIN)
            return shown

    def replay(self, id: int, *, payload: bytes | None = None, allow_completed: bool = False) -> int:
        if payload is not None:
            self._check_payload(payload)
        with self._transaction() as changes:
            old = self._row(id)
            if old.state not in FINAL:
                raise ReplayNotFinal(f"execution {id} is {old.state}: only one that has ended can be replayed")
            newer = next((row for row in self._rows() if row.replay_of == id), None)
            if newer is not None:
                raise AlreadyReplayed(f"execution {id} was replayed as {newer.id}: replay the newest of the chain")
            if old.state is State.COMPLETED and not allow_completed:
                raise CompletedNotAllowed(f"execution {id} has completed: allow its replay explicitly")
            holder = None if old.unique_key is None else self._holder(old.unique_key)
            if holder is not None:
                raise TaskExists(str(old.unique_key), holder.id, holder.state, holder.task_id, unique=True)
            now = self._now()
            return self._add(
                changes,
                State.PENDING,
                locks=old.unique_key is not None,
                **{name: getattr(old, name) for name in _REPLAYED},
                payload=old.payload if payload is None else bytes(payload),
                run_at=now,
                created_at=now,
                replay_of=id,
            ).id

    def drop_expired(self, queues: Sequence[str]) -> int:
        with self._transaction() as changes:
            now = self._now()
            rows = [r for r in self._rows() if r.queue in queues and r.state in _READY and r.run_at <= now]
            expired = [row for row in rows if _expired(row, now)]
            self._expire(expired, changes)
            return len(expired)

    def purge(self, queue: str) -> int:
        with self._transaction() as changes:
            # Children before parents, as far as both are here: then nobody is told what would be removed anyway.
            blocked = self._purge(queue, frozenset({State.BLOCKED}), changes)
            return blocked + self._purge(queue, _READY, changes)

    def _purge(self, queue: str, states: frozenset[State], changes: Changes) -> int:
        rows = [row for row in self._rows() if row.queue == queue and row.state in states]
        known = self._store.tasks.keys()
        parents = {row.id for row in rows if self._store.children.get(row.id, set()) & known}
        for row in rows:
            if row.id not in parents:
                self._move(row, State.CANCELED, changes)
                self._remove(row)
        for row in rows:
            if row.id in parents and row.state not in FINAL:  # an earlier one may have canceled it, as its child
                self._end(row, State.CANCELED, changes, Reason.CANCELED, answer=None)
        return len(rows)

    # -- answering ----------------------------------------------------------------------------------

    def claim_answers(self, limit: int, queues: Sequence[str] | None = None, *, older: float = 0.0) -> Sequence[Task]:
        with self._transaction():
            now = self._now()
            due = [row for row in self._rows() if row.answer_at is not None and row.answer_at <= now]
            ours = [
                row
                for row in due
                if queues is None or row.queue in queues or (row.answer_at or 0) <= now - to_ms(older)
            ]
            ours = sorted(ours, key=attrgetter("answer_at"))[:limit]
            shown = [_shown(row) for row in ours]
            for row in ours:
                row.answer_at = now + _ANSWER_WITHIN
            return shown

    def answered(self, ids: Sequence[int]) -> None:
        with self._transaction():
            for row in map(self._store.tasks.get, ids):
                if row is not None:
                    row.answer_at = None

    # -- asking -------------------------------------------------------------------------------------

    def get(self, id: int) -> Task:
        with self._transaction():
            return _shown(self._row(id))

    def list(self, filter: Filter | None = None) -> list[Task]:
        wanted = filter or Filter()
        with self._transaction():
            rows = sorted((row for row in self._rows() if _matches(row, wanted)), key=attrgetter("created_at", "id"))
            return [_shown(row) for row in rows[wanted.offset : wanted.offset + wanted.limit]]

    def waiting(self, after: int = 0, limit: int = 1000) -> Sequence[Task]:
        with self._transaction():
            rows = sorted((row for row in self._rows() if row.id > after and row.state in WAITING), key=_by_id)
            return [_shown(row) for row in rows[:limit]]

    def inspect(self, task_id: str) -> Inspection | None:
        with self._transaction():
            rows = [row for row in self._rows() if row.task_id == task_id and row.type]
            if not rows:
                return None
            row = max(rows, key=_by_id)
            found = Inspection(_shown(row), len(rows))
            now = self._now()
            if row.state is State.RUNNING:
                found.lease_until = self._valid_until(row)
            elif row.state is State.BLOCKED:
                found.waits_for = self._unfinished_parents(row)
            elif row.state in _READY and row.run_at <= now:
                ready = [r for r in self._rows() if r.queue == row.queue and r.state in _READY and r.run_at <= now]
                found.position = sorted(ready, key=_claim_order).index(row) + 1
            return found

    def _unfinished_parents(self, row: _Row) -> Sequence[str]:
        names = {name for child, name in self._store.waits if child == row.id}
        parents = (self._store.tasks.get(id) for id, children in self._store.children.items() if row.id in children)
        names |= {one.task_id for one in parents if one is not None and one.task_id and one.state not in FINAL}
        return sorted(names)

    def running(self, task_ids: Sequence[str]) -> set[str]:
        with self._transaction():
            names = {row.task_id for row in self._rows() if row.state is State.RUNNING and row.type}
            return {name for name in task_ids if name in names}

    def queue_len(self, queue: str) -> int:
        return self.queue_lens([queue])[queue]

    def queue_lens(self, queues: Iterable[str]) -> Mapping[str, int]:
        with self._transaction():
            found = dict.fromkeys(queues, 0)
            for row in self._rows():
                if row.state in _READY and row.queue in found:
                    found[row.queue] += 1
            return found

    def counts(self) -> dict[tuple[str, State], int]:
        with self._transaction():
            found: dict[tuple[str, State], int] = {}
            for row in self._rows():
                found[row.type, row.state] = found.get((row.type, row.state), 0) + 1
            return found

    # -- quotas -------------------------------------------------------------------------------------

    def queue_quota(self, key: str, limit: int, window: float, n: int = 1) -> Reservation | None:
        check_name(key, "quota")
        if to_ms(window) < 1 or n < 1:
            raise ConfigError(f"a quota needs a window of at least 1 ms and n of at least 1, not {window!r} and {n!r}")
        with self._transaction():
            start, used = self._quota(key, window)
            if used + n > limit:
                return None
            self._store.quotas[key, to_ms(window)] = (start, used + n)
            return Reservation(key, window, start, n)

    def release_quota(self, reservation: Reservation) -> bool:
        with self._transaction():
            start, used = self._quota(reservation.key, reservation.window)
            if start != reservation.window_start:
                return False
            self._store.quotas[reservation.key, to_ms(reservation.window)] = (start, max(0, used - reservation.n))
            return True

    def _quota(self, key: str, window: float) -> tuple[int, int]:
        """Start of the current window and what is used of it; time that went back opens no window anew."""
        now = self._now()
        current = now - now % to_ms(window)
        start, used = self._store.quotas.get((key, to_ms(window)), (current, 0))
        return (start, used) if start >= current else (current, 0)

    # -- life ---------------------------------------------------------------------------------------

    def watch(self, wake: Wake) -> Watch:
        return Polling(self.settings.poll_max)

    def due_in(self, queues: Sequence[str]) -> float:
        return 0.0

    def wake(self) -> None:
        with self._store.changed:
            self._store.wake()

    def close(self) -> None:
        self._closed = True
        self.wake()

    # -- what a transaction is made of ----------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[Changes]:
        """Hold the lock; afterwards wake those who wait and tell the callback. Checks come before changes."""
        changes: Changes = []
        with self._store.changed:
            yield changes
            if changes:
                self._store.wake()
        if any(change.after in _ANSWERED_FOR for change in changes):
            self.to_answer.wake()
        for change in changes:
            self._tell(change)

    def _tell(self, change: StateChange) -> None:
        if self._notify is not None:
            try:
                self._notify(change)
            except Exception:
                logger.exception("the notify callback failed on %s", change)

    def _now(self) -> int:
        return self._clock.now_ms()

    def _ttl(self, row: _Row) -> int:
        return to_ms(self.settings.ttl_of(row.queue))

    def _rows(self) -> Iterable[_Row]:
        return self._store.tasks.values()

    def _row(self, id: int) -> _Row:
        row = self._store.tasks.get(id)
        if row is None:
            raise TaskNotFound(f"no execution has the id {id}: it never existed, or it was finished and removed")
        return row

    def _current(self, lease: Lease) -> _Row | None:
        """The row that a lease may settle: its token is the newest, and nobody has settled it."""
        row = self._store.tasks.get(lease.id)
        return row if row is not None and lease.token != NO_TOKEN and row.token == lease.token else None

    def _held(self, lease: Lease) -> _Row:
        row = self._current(lease)
        if row is None:
            raise LeaseLost(f"the lease of execution {lease.id} is lost: another holds it, or it is settled")
        return row

    def _each(self, leases: Sequence[Lease], settle: Callable[[_Row], None]) -> Refused:
        """Settle those that are held; the others are returned."""
        refused: Refused = []
        for lease in leases:
            row = self._current(lease)
            if row is None:
                refused.append(lease)
            else:
                settle(row)
        return refused

    def _move(self, row: _Row, state: State, changes: Changes) -> None:
        """Change the state; the lease, if there was one, ends."""
        changes.append(StateChange(row.id, row.queue, row.state, state))
        row.state = state
        row.token = NO_TOKEN
        row.begun = False
        row.session = row.lease_until = None
        if state in FINAL:
            row.locks = False
        else:
            row.owner = None  # of one that has ended it is shown who held it last

    def _end(
        self,
        row: _Row,
        state: State,
        changes: Changes,
        reason: Reason | None = None,
        detail: str | None = None,
        *,
        answer: int | None = 0,
    ) -> None:
        """Make it final and tell its children: they wake, or are canceled and tell theirs.

        ``answer``: in how many milliseconds somebody may answer for it; ``None``: nobody has to.
        """
        self._finish(row, state, self._now(), changes, reason, detail, answer=answer)
        self._tell_children([row], changes)

    def _tell_children(self, ended: Sequence[_Row], changes: Changes) -> None:
        now = self._now()
        ended = [*ended]
        for parent in ended:
            for child in self._blocked_children(parent):
                if parent.state is State.COMPLETED or not child.fail_fast:
                    self._one_parent_less(child, changes)
                else:
                    self._finish(child, State.CANCELED, now, changes, Reason.PARENT)
                    ended.append(child)

    def _finish(
        self,
        row: _Row,
        state: State,
        now: int,
        changes: Changes,
        reason: Reason | None,
        detail: str | None = None,
        *,
        answer: int | None = 0,
    ) -> None:
        self._move(row, state, changes)
        row.answer_at = None if answer is None or state is State.COMPLETED or not row.type else now + answer
        row.finished_at = now
        row.pending_parents = 0
        self._wait_for_nobody(row)
        row.cancel_requested = False
        row.reason = None if reason is None else reason.value
        row.detail = detail

    def _wait_for_nobody(self, row: _Row) -> None:
        for key in [key for key in self._store.waits if key[0] == row.id]:
            del self._store.waits[key]

    def _remove(self, row: _Row) -> None:
        self._wait_for_nobody(row)
        del self._store.tasks[row.id]
        self._store.children.pop(row.id, None)

    def _blocked_children(self, parent: _Row) -> Sequence[_Row]:
        found = (self._store.tasks.get(child) for child in sorted(self._store.children.get(parent.id, ())))
        return [child for child in found if child is not None and child.state is State.BLOCKED]


_by_id = attrgetter("id")


def _gives_up(holder: Task, task: NewTask) -> bool:
    """Whether a running execution gives the lock of its unique key up to one of the same task_id."""
    own = task.take_over and task.task_id is not None and holder.task_id == task.task_id
    return own and holder.state is State.RUNNING


def _begin(row: _Row) -> None:
    row.begun = True


def _earliest(*instants: int | None) -> int | None:
    return min((instant for instant in instants if instant is not None), default=None)


def _claim_order(row: Task) -> tuple[int, int, int]:
    return -row.priority, row.run_at, row.id


def _in_chain(row: Task) -> bool:
    """Whether a completed row has to stay, so that its key is known and what it replays is not replayed again."""
    return row.key is not None or row.replay_of is not None


def _check_times(instant: int | None, seconds: float | None) -> None:
    """Refuse what no calendar holds. Written so that it refuses NaN too."""
    if not -_FAR <= (instant or 0) <= _FAR or not abs(seconds or 0) * 1000 <= _FAR:
        raise ConfigError(f"times must be within 10,000 years: {instant!r} ms, {seconds!r} s")


def _unsettled(row: _Row) -> int:
    """Deliveries that nobody told the end of; business failures and throttlings have caps of their own."""
    return row.deliveries - row.attempts - row.throttled


def _expired(row: Task, now: int) -> bool:
    return row.expires_at is not None and now >= row.expires_at


def _shown(row: _Row) -> Task:
    return Task(**{name: getattr(row, name) for name in _TASK_FIELDS})


def _matches(row: Task, wanted: Filter) -> bool:
    exact = ("queue", "type", "key", "task_id", "group_id")
    return (wanted.states is None or row.state in wanted.states) and all(
        getattr(wanted, name) in (None, getattr(row, name)) for name in exact
    )


# -- fork -------------------------------------------------------------------------------------------

_stores: weakref.WeakSet[MemoryStore] = weakref.WeakSet()
_frozen: list[MemoryStore] = []
_forking = threading.Lock()


def _before_fork() -> None:
    # Held over the fork, so that the child's copy is not in the middle of somebody's transaction.
    _forking.acquire()
    _frozen.extend(_stores)
    for store in _frozen:
        store.changed.acquire()


def _after_fork_in_parent() -> None:
    while _frozen:
        _frozen.pop().changed.release()
    _forking.release()


def _after_fork_in_child() -> None:
    # Waiters on the old condition are threads of the parent.
    while _frozen:
        _frozen.pop().changed = threading.Condition()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
