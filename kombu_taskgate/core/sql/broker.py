"""SqlBroker: puts each part of the contract into a transaction, and tells the world after commit."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import sqlalchemy as sa

from .. import migrations, urls
from ..broker import Notify
from ..clock import Clock, to_ms
from ..database import Confirm, Database
from ..dialects.base import Dialect
from ..errors import ConfigError, LeaseLost, TaskCanceled, TaskgateError, TaskNotFound
from ..listener import Listener
from ..model import (
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
    Task,
)
from ..notifier import BINDINGS, Notifier, work_in
from ..result_statements import ResultStatements
from ..schedule_statements import ScheduleStatements
from ..schedules import KEEP_TICKS
from ..schema import LANE_BLOCKED, LANE_DELAYED, LANE_READY, Tables
from ..settings import BrokerSettings, check_name, check_payload, storable
from ..statements import ANSWER, ENDS, LOST, RUNS, Statements
from ..term_statements import TermStatements
from ..wakeup import Wakeup
from ..watch import Polling, Wake, Watch
from . import answers, claim, control, leases, publish, queries, quota, settle, waits
from .chords import SqlChords
from .looks import Looks, channel_name
from .results import SqlResults
from .revocations import SqlRevocations
from .schedules import SqlSchedules
from .terms import SqlTerms
from .topology import SqlTopology
from .work import Work, repeat

logger = logging.getLogger("kombu_taskgate.broker")
T = TypeVar("T")

#: Longest time between two looks for due rows while claims go on without a pause (seconds).
PROMOTE_EVERY = 0.02
#: Longest time between two looks for blocked executions that nobody will wake (seconds).
REPAIR_EVERY = 300.0


class SqlBroker:
    """The broker contract on a SQL database. See :class:`~kombu_taskgate.core.broker.Broker`.

    Args:
        settings: which database, and how the broker behaves.
        clock: replaces the database's time, for tests.
        notify: called with each state change after its commit.

    Raises:
        ConfigError, SchemaError, StoreUnavailable: see :func:`~kombu_taskgate.core.factory.open_broker`.
    """

    def __init__(self, settings: BrokerSettings, *, clock: Clock | None = None, notify: Notify | None = None) -> None:
        self.settings = settings
        self._clock = clock
        self._notify = notify
        url, dialect = urls.resolve(settings.url)
        self.database = Database(settings, dialect, url)
        try:
            self._inspect(dialect)
            self.tables = Tables(settings.table_prefix, settings.schema, dialect, self._table_options)
            migrations.check(self.database, self.tables)
        except BaseException:
            self.database.dispose()
            raise
        self.sql = Statements(self.tables, dialect, clock)
        self.topology = SqlTopology(self.database, self.sql, self._bindings_changed, self._is_told)
        self.revocations = SqlRevocations(self.database, self.sql)
        ttls = {queue: to_ms(ttl) for queue, ttl in settings.queue_lease_ttl.items()}
        results = ResultStatements(self.sql)
        tells = dialect.notifies and settings.listen
        channel = channel_name(self.tables)
        self.results = SqlResults(
            self.database,
            results,
            settings,
            self._max_payload,
            f"{channel}_r" if tells else None,
            self.work_together,
        )
        self.chords = SqlChords(self.database, results, self.work_together, self._max_payload, self._insert_returning)
        terms = TermStatements(self.sql)
        self.terms = SqlTerms(self.database, terms)
        self.schedules = SqlSchedules(
            self.database,
            ScheduleStatements(self.sql),
            terms,
            self.work_together,
            self._max_payload,
            self._insert_returning,
        )
        self._extend = self.sql.extend(ttls, to_ms(settings.lease_ttl))
        self._wakeup = Wakeup()
        self.to_answer = Wakeup()
        # Under a test's clock something can become due without anybody's doing.
        probe = dialect.probe_every if clock is None else None
        self._looks = Looks(self.database, self.sql, probes=probe is not None)
        self._pause = settings.poll_max if probe is None else min(probe, settings.poll_max)
        self._tells = dialect.notifies and settings.listen and clock is None
        self._channel = channel
        self._notifier = Notifier()
        self._listener: Listener | None = None
        if self._tells:
            self._listener = Listener(self.database, self._channel, self._send, self.topology.forget_bindings)
            self.database.on_lost = self._listener.suspect
        self._turn = 0
        self._quiet = False
        self._promoted_at = 0.0
        self._repaired_at = -REPAIR_EVERY
        self._calm_until = 0.0
        self._runs_out_at = math.inf

    def _inspect(self, dialect: Dialect) -> None:
        def work(conn: sa.Connection) -> None:
            dialect.check_server(conn, self.settings)
            server = dialect.max_payload(conn)
            self._max_payload = min(self.settings.max_payload, server or self.settings.max_payload)
            self._table_options = dialect.table_options(conn)
            self._update_returning = conn.dialect.update_returning
            self._delete_returning = conn.dialect.delete_returning
            self._insert_returning = conn.dialect.insert_returning

        self.database.read(work)

    # -- transactions --------------------------------------------------------------------------------

    def _run(
        self,
        part: Callable[[Work], T],
        *,
        confirm: Confirm[T] | None = None,
        reserved: bool = False,
    ) -> T:
        works: list[tuple[Work, list[str], float]] = []

        def attempt(conn: sa.Connection) -> T:
            work = self._work(conn)
            result = part(work)
            told = work.told or (self._tell(work) if self._tells and work.woken else [])
            works.append((work, told, time.monotonic()))
            return result

        result = self.database.transaction(attempt, confirm=confirm, reserved=reserved)
        work, told, since = works[-1]
        if work.unserved:
            # The next round looks after those who wait for nothing.
            self._repaired_at, self._calm_until = -REPAIR_EVERY, 0.0
        if work.woken and self._tells:
            self._told(work.woken, told, since)
        if self._notify is not None:
            self._announce(work)
        if work.to_answer:
            self.to_answer.wake()
        return result

    def work_together(self, part: Callable[[Work], T], confirm: Confirm[T] | None) -> T:
        """Run something in one of the broker's transactions: who has to be told of work it makes is told."""
        result = self._run(part, confirm=confirm)
        self.wake()
        return result

    def _work(self, conn: sa.Connection) -> Work:
        return Work(conn, self.sql, self.settings, announce=self._notify is not None)

    # -- telling other processes ---------------------------------------------------------------------

    def _tell(self, work: Work) -> list[str]:
        """Notify in the transaction itself: those who hear of work then find it."""
        due = self._notifier.due(work.woken)
        if due:
            work.run(self.sql.notify, p_channel=self._channel, p_text=work_in(due))
        return due

    def _told(self, woken: Collection[str], told: Collection[str], since: float) -> None:
        """After the commit: what was left out because it had just been told, and has taken longer, is told now."""
        self._notifier.sent(told, since)
        late = [queue for queue in self._notifier.overdue(woken) if queue not in told]
        if late:
            since = time.monotonic()
            try:
                self._send(work_in(late))
            except TaskgateError as error:
                logger.debug("queues %s have work that nobody was told of: %s", late, error)
            else:
                self._notifier.sent(late, since)

    def _send(self, text: str) -> None:
        parameters = {"p_channel": self._channel, "p_text": text}
        self.database.read(lambda conn: conn.execute(self.sql.notify, parameters))

    def _bindings_changed(self) -> None:
        if self._tells:
            try:
                self._send(BINDINGS)
            except TaskgateError as error:
                logger.debug("nobody was told of the changed bindings: %s", error)

    def _is_told(self) -> bool:
        """Whether this process hears of changes by itself."""
        return self._listener is not None and self._listener.live

    def watch(self, wake: Wake) -> Watch:
        """See the contract."""
        if self._listener is None:
            return Polling(self._pause)

        def told(queues: Collection[str] | None) -> None:
            # There is something, most likely: to look first would be one round trip more.
            self._quiet = False
            wake(queues)

        return self._listener.watch(told)

    def due_in(self, queues: Sequence[str]) -> float:
        """See the contract."""
        return self._looks.due_in(queues)

    def _announce(self, work: Work) -> None:
        for change in work.changes:
            try:
                self._notify(change)  # type: ignore[misc]  # the caller has looked that it is there
            except Exception:
                logger.exception("the notify callback raised for %s; the change itself is stored", change)

    def _settled(self, asked: Sequence[Lease]) -> Callable[[sa.Connection, Sequence[Lease]], bool]:
        """Did a settling commit take effect? Then none of the leases that it did not refuse is current."""

        def confirm(conn: sa.Connection, refused: Sequence[Lease]) -> bool:
            stale = {(lease.id, lease.token) for lease in refused}
            done = [lease for lease in asked if (lease.id, lease.token) not in stale]
            return not done or settle.count_current(conn, self.sql.count_held, done) == 0

        return confirm

    # -- publishing ----------------------------------------------------------------------------------

    def enqueue(self, task: NewTask) -> int:
        """See the contract."""
        if self._notify is not None or not publish.simple(task):
            return self.enqueue_many([task])[0]
        publish.check(task, self._max_payload)
        done = self._run(lambda work: self._store_one(work, task), confirm=self._is_stored)
        self.wake()
        return done.ids[0]

    def _store_one(self, work: Work, task: NewTask) -> publish.Stored:
        """Store what concerns no other execution, and announce it in the same statement if it is to be announced."""
        told = self._notifier.due([task.queue]) if self._tells else []
        if not told:
            return publish.enqueue(work, [task], returning=self._insert_returning)
        id = publish.store_and_tell(work, task, self._channel, work_in(told))
        work.told = told
        return publish.Stored([id], work.mark)

    def _is_stored(self, conn: sa.Connection, done: publish.Stored) -> bool | None:
        """Did the commit of a publish take effect?"""
        if done.mark is not None:
            return self.database.dialect.committed(conn, done.mark)
        # A row that is not there may have been stored, worked on and removed meanwhile.
        return True if conn.execute(self.sql.exists, {"p_ids": done.ids[:1]}).scalar_one() else None

    def enqueue_many(self, tasks: Sequence[NewTask]) -> list[int]:
        """See the contract."""
        if not tasks:
            return []
        for task in tasks:
            publish.check(task, self._max_payload)
        done = self._run(
            lambda work: publish.enqueue(work, tasks, returning=self._insert_returning), confirm=self._is_stored
        )
        self.wake()
        return done.ids

    # -- claiming ------------------------------------------------------------------------------------

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
        """See the contract."""
        self._check_claim(queues, limit)
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = self.settings.poll_min
        while True:
            seen = self._wakeup.count
            _, claims = self.ack_and_dequeue((), queues, limit, owner=owner, session=session)
            left = pause if deadline is None else deadline - time.monotonic()
            if claims or left <= 0 or (stop is not None and stop.is_set()):
                return claims
            self._wakeup.wait(seen, min(pause, left), stop)
            pause = min(self.settings.poll_max, pause * 1.5)

    def _check_claim(self, queues: Sequence[str], limit: int) -> None:
        if isinstance(queues, str) or not queues:
            raise ConfigError(f"dequeue needs a list of at least one queue, not {queues!r}")
        if limit < 1:
            raise ConfigError(f"dequeue needs a limit of at least 1, not {limit!r}")

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
        """See the contract."""
        claimer = claim.Claimer(storable(owner), session, returning=self._update_returning and self._notify is None)
        names = self._rotated(list(dict.fromkeys(queues))) if limit > 0 else []
        look = bool(names) and self._due_look()

        def part(work: Work) -> tuple[list[Lease], list[Claim]]:
            refused = settle.ack_many(work, leases, returning=self._delete_returning) if leases else []
            if begin:
                refused += settle.begin_many(work, begin)
            if look:
                claim.promote(work)
            return refused, claim.claim(work, names, limit, claimer) if names else []

        def done(conn: sa.Connection, result: tuple[list[Lease], list[Claim]]) -> bool:
            refused, claims = result
            if claims:
                return settle.count_current(conn, self.sql.count_held, claims) > 0
            # To note a beginning twice does no harm.
            return (bool(leases) or not begin) and self._settled(leases)(conn, refused)

        # After a claim that found nothing: an idle worker locks nothing.
        if not leases and not begin and (not names or (self._quiet and not self._looks.anything(names))):
            return [], []
        if names:
            # What it does not find may be locked by others, or expired and so much that not all could be dropped.
            self._looks.forget(names)
        result = self._run(part, confirm=done)
        self._quiet = bool(names) and not result[1]
        return result

    def _rotated(self, queues: list[str]) -> list[str]:
        """Start with another queue each time, so that the first does not always get the odd one."""
        self._turn += 1
        start = self._turn % len(queues) if queues else 0
        return queues[start:] + queues[:start]

    def _due_look(self) -> bool:
        """Whether to look for due rows now. Under a test clock always: it does not run by itself."""
        now = time.monotonic()
        if self._clock is None and now - self._promoted_at < PROMOTE_EVERY:
            return False
        self._promoted_at = now
        return True

    # -- settling ------------------------------------------------------------------------------------

    def begin_many(self, leases: Sequence[Lease]) -> list[Lease]:
        """See the contract."""
        return self.ack_and_dequeue((), (), 0, begin=leases)[0]

    def ack(self, lease: Lease, result: bytes | None = None) -> None:
        """See the contract."""
        if result is not None:
            check_payload(result, f"result of execution {lease.id}", self._max_payload)

        def part(work: Work) -> list[Lease]:
            if result is None:
                return settle.ack_many(work, [lease], returning=self._delete_returning)
            settle.complete(work, [settle.held_one(work, lease)], result)
            return []

        _refuse(self._run(part, confirm=self._settled([lease])))
        self.wake()

    def ack_many(self, leases: Sequence[Lease]) -> list[Lease]:
        """See the contract."""
        refused, _ = self.ack_and_dequeue(leases, (), 0)
        self.wake()
        return refused

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
        """See the contract."""
        if retry_at is not None and delay is not None:
            raise ConfigError("give retry_at or delay, not both")
        if kind is FailKind.LOST and (retry_at is not None or delay is not None):
            raise ConfigError("what was lost is ready at once: give neither retry_at nor delay")
        publish.check_times(retry_at, delay)
        if detail is not None:
            detail = storable(detail)[: self._max_payload]
        state = self._run(
            lambda work: settle.fail(
                work, lease, kind, retry_at=retry_at, delay=delay, reason=reason, detail=detail, told=told
            ),
            confirm=lambda conn, _: self._settled([lease])(conn, []),
        )
        self.wake()
        return state

    def requeue(self, lease: Lease, *, delivered: bool = True) -> None:
        """See the contract."""
        _refuse(self.requeue_many([lease], delivered=delivered))

    def requeue_many(self, leases: Sequence[Lease], *, delivered: bool = True) -> list[Lease]:
        """See the contract."""
        if not leases:
            return []
        refused = self._run(
            lambda work: settle.requeue_many(work, leases, delivered=delivered), confirm=self._settled(leases)
        )
        self.wake()
        return refused

    def finish_canceled(self, lease: Lease) -> None:
        """See the contract."""
        self._run(
            lambda work: settle.finish_canceled(work, lease),
            confirm=lambda conn, _: self._settled([lease])(conn, []),
        )
        self.wake()

    # -- leases --------------------------------------------------------------------------------------

    def heartbeat(self, lease: Lease) -> int:
        """See the contract."""
        found, ends = self._heartbeat([lease])
        _refuse(found.lost)
        if found.canceled:
            raise TaskCanceled(f"execution {lease.id} was canceled while it ran")
        return ends[lease.id]

    def heartbeat_many(self, leases: Sequence[Lease]) -> HeartbeatResult:
        """See the contract."""
        return self._heartbeat(leases)[0] if leases else HeartbeatResult()

    def _heartbeat(self, held: Sequence[Lease]) -> tuple[HeartbeatResult, dict[int, int]]:
        return self._run(lambda work: leases.heartbeat_many(work, held, self._extend), confirm=repeat, reserved=True)

    def open_session(self, owner: str, ttl: float) -> Session:
        """See the contract."""
        return self._run(lambda work: leases.open_session(work, storable(owner), ttl), confirm=repeat, reserved=True)

    def renew_session(self, session: Session, *, look: bool = True) -> Renewal:
        """See the contract."""
        return self.database.renew(lambda conn: leases.renew_session(self._work(conn), session, look=look))

    def close_session(self, session: Session) -> int:
        """See the contract."""
        number = self._run(lambda work: leases.close_session(work, session), confirm=repeat)
        self.wake()
        return number

    def reap_expired(self) -> int:
        """See the contract."""
        now = time.monotonic()
        # Under a test clock always, as with what is due.
        repair = self._clock is not None or now - self._repaired_at >= REPAIR_EVERY
        lost = self._look_around()
        if not repair and not lost:
            return 0
        if repair:
            self._repaired_at = now
            self._run(waits.look_after, confirm=repeat)
        total = 0
        while True:
            number = self._run(lambda work: leases.reap(work, repair=repair), confirm=repeat)
            total += number
            if number < leases.REAP:
                break
        if total:
            self.wake()
        return total

    def _look_around(self) -> bool:
        """A look without a transaction, for most rounds have nothing to take back; returns whether this one has."""
        began = time.monotonic()
        parameters = self.sql.time()
        rows = self.database.read(lambda conn: conn.execute(self.sql.look_around, parameters).all())
        found = {row.kind for row in rows if row.wait is not None}
        calm = found.isdisjoint({LOST, RUNS}) and self._clock is None and bool(self.database.dialect.partial_index(""))
        # What is claimed from now on has its lease time at the least.
        shortest = min([self.settings.lease_ttl, *self.settings.queue_lease_ttl.values()])
        self._calm_until = began + shortest if calm else 0.0
        ends = [row.wait for row in rows if row.kind == ENDS and row.wait is not None]
        self._runs_out_at = began + min(ends) / 1000 if ends and self._clock is None else math.inf
        if ANSWER in found:
            self.to_answer.wake()
        return LOST in found

    def reap_in(self) -> float:
        """See the contract."""
        return max(0.0, self._calm_until - time.monotonic())

    def runs_out_in(self) -> float:
        """See the contract."""
        return max(0.0, self._runs_out_at - time.monotonic())

    def drop_expired(self, queues: Sequence[str]) -> int:
        """See the contract."""
        total = 0
        for queue in self._looks.expired_heads(list(dict.fromkeys(queues))):
            # In parts: one transaction over a whole queue would keep everybody else waiting.
            while number := self._run(lambda work, queue=queue: claim.drop_expired(work, queue), confirm=repeat):  # type: ignore[misc]  # mypy can't infer a lambda with a default
                total += number
        return total

    def prune(self, limit: int = 1000) -> int:
        """See the contract."""
        number = self._run(lambda work: control.prune(work, limit), confirm=repeat)
        return max(number, self.revocations.sweep(limit), self.schedules.sweep(KEEP_TICKS, limit))

    # -- control -------------------------------------------------------------------------------------

    def cancel(self, id: int) -> State:
        """See the contract."""
        return self._run(lambda work: control.cancel(work, id))

    def cancel_waiting(self, ids: Sequence[int] = (), *, task_ids: Sequence[str] = ()) -> Sequence[Task]:
        """See the contract."""

        def done(conn: sa.Connection, canceled: Sequence[Task]) -> bool:
            # All or none; if none, doing it again does no harm.
            row = conn.execute(self.sql.get, {"p_id": canceled[0].id}).first() if canceled else None
            return row is not None and row.state == State.CANCELED

        return self._run(lambda work: control.cancel_waiting(work, ids, task_ids), confirm=done)

    # -- answering -----------------------------------------------------------------------------------

    def claim_answers(self, limit: int, queues: Sequence[str] | None = None, *, older: float = 0.0) -> Sequence[Task]:
        """See the contract."""
        return self._run(lambda work: answers.claim_answers(work, limit, queues, older), confirm=repeat)

    def answered(self, ids: Sequence[int]) -> None:
        """See the contract."""
        if ids:
            self._run(lambda work: answers.answered(work, ids), confirm=repeat)

    def replay(self, id: int, *, payload: bytes | None = None, allow_completed: bool = False) -> int:
        """See the contract."""
        if payload is not None:
            check_payload(payload, f"replay of {id}", self._max_payload)
        new = self._run(lambda work: control.replay(work, id, payload, allow_completed=allow_completed))
        self.wake()
        return new

    def purge(self, queue: str) -> int:
        """See the contract."""
        total = 0
        for lane in (LANE_BLOCKED, LANE_DELAYED, LANE_READY):
            # In parts: one transaction over a whole queue would keep everybody else waiting. Children first, so that
            # none is canceled by its parent before it is counted.
            while number := self._run(lambda work, lane=lane: control.purge(work, queue, lane), confirm=repeat):  # type: ignore[misc]  # mypy can't infer a lambda with a default
                total += number
        return total

    # -- asking --------------------------------------------------------------------------------------

    def get(self, id: int) -> Task:
        """See the contract."""
        row = self.database.read(lambda conn: conn.execute(self.sql.get, {"p_id": id}).first())
        if row is None:
            raise TaskNotFound(f"execution {id} does not exist: it never did, or it completed and was removed")
        return queries.to_task(row)

    def list(self, filter: Filter | None = None) -> list[Task]:
        """See the contract."""
        query = queries.listing(self.tables, filter or Filter())
        return [queries.to_task(row) for row in self.database.read(lambda conn: conn.execute(query).all())]

    def waiting(self, after: int = 0, limit: int = 1000) -> Sequence[Task]:
        """See the contract."""
        page = {"p_after": after, "p_limit": limit}
        return [
            queries.to_task(row) for row in self.database.read(lambda c: c.execute(self.sql.see_waiting, page).all())
        ]

    def inspect(self, task_id: str) -> Inspection | None:
        """See the contract."""
        return self.database.read(lambda conn: queries.inspect(conn, self.sql, task_id))

    def running(self, task_ids: Sequence[str]) -> set[str]:
        """See the contract."""
        return self.database.read(lambda conn: queries.running(conn, self.sql, task_ids))

    def queue_len(self, queue: str) -> int:
        """See the contract."""
        return self.queue_lens([queue])[queue]

    def queue_lens(self, queues: Iterable[str]) -> dict[str, int]:
        """See the contract."""
        names = dict.fromkeys(queues)
        return self.database.read(lambda conn: queries.queue_lens(conn, self.sql, names))

    def counts(self) -> dict[tuple[str, State], int]:
        """See the contract."""
        return self.database.read(lambda conn: queries.counts(conn, self.sql))

    # -- quotas --------------------------------------------------------------------------------------

    def queue_quota(self, key: str, limit: int, window: float, n: int = 1) -> Reservation | None:
        """See the contract."""
        check_name(key, "quota key")
        if to_ms(window) < 1 or n < 1:
            raise ConfigError(f"a quota needs a window of at least 0.001 s and n of at least 1, not {window!r}, {n!r}")
        return self._run(lambda work: quota.reserve(work, key, limit, window, n))

    def release_quota(self, reservation: Reservation) -> bool:
        """See the contract."""
        return self._run(lambda work: quota.release(work, reservation))

    # -- life ----------------------------------------------------------------------------------------

    def explain_claim(self, queue: str) -> str:
        """The database's plan for a claim from the queue, as text: for tests and for people who tune."""
        parameters = self.sql.time(p_queue=queue, p_limit=10)
        return self.database.read(lambda conn: self.database.dialect.explain(conn, self.sql.claim_pick, parameters))

    def wake(self) -> None:
        """See the contract."""
        self._wakeup.wake()

    def close(self) -> None:
        """See the contract."""
        self.wake()
        if self._listener is not None:
            self._listener.close()
        self.results.close()
        self.database.dispose()


def _refuse(refused: Sequence[Lease]) -> None:
    if refused:
        raise LeaseLost(f"the lease on execution {refused[0].id} is lost: it was taken over or settled")
