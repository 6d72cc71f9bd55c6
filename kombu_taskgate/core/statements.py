"""Every SQL statement of the broker: one named attribute each, with a sentence. Built once per broker.

Parameters start with ``p_`` so that they can't be taken for columns. ``p_now`` is asked for only when a test
clock replaces the server's time; see :meth:`Statements.time`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import sqlalchemy as sa

from .clock import Clock
from .dialects.base import Dialect
from .model import FINAL, WAITING, State
from .parameters import among
from .schema import LANE_BLOCKED, LANE_DELAYED, LANE_NONE, LANE_READY, Tables
from .wait_statements import WaitStatements

#: A new token keeps the order of claims in its high part and can't be guessed by its low one: after a database
#: lost its last commits in a fail-over, the same number is not given to two holders.
TOKEN_STEP = 2**24

#: What :attr:`Statements.look_around` finds.
RUNS, LOST, ANSWER, ENDS = range(4)

Statement = sa.Executable


def _first(query: sa.Select[Any], name: str) -> sa.Subquery:
    """Whether there is any, asked in index order: as EXISTS it might be answered by reading the whole table."""
    return query.limit(1).subquery(name)


def _place(number: int) -> sa.Select[Any]:
    """Answer the place of a queue in the list of those that are asked for."""
    return sa.select(sa.literal_column(str(number), sa.Integer).label("place"))


def _kind(number: int) -> sa.ColumnElement[int]:
    return sa.literal_column(str(number), sa.Integer).label("kind")


def _lane(number: int) -> sa.ColumnElement[int]:
    # Literal, not bound: partial indexes are only used when the planner sees the value.
    return sa.literal_column(str(number), sa.SmallInteger)


class Statements:
    """All statements for one set of tables.

    Args:
        tables: where.
        dialect: whose words.
        clock: replaces the server's time in tests.
    """

    def __init__(self, tables: Tables, dialect: Dialect, clock: Clock | None) -> None:
        self.tables = tables
        self.dialect = dialect
        self._clock = clock
        self._t = tables.tasks.c
        self._by_number: dict[tuple[str, int], Statement] = {}
        #: Those about executions that wait for results.
        self.waits = WaitStatements(self)

    def time(self, **parameters: Any) -> dict[str, Any]:
        """The parameters, with the test clock's time where there is one."""
        if self._clock is not None:
            parameters["p_now"] = self._clock.now_ms()
        return parameters

    @property
    def now(self) -> sa.ColumnElement[int]:
        """The instant that decides, in milliseconds."""
        if self._clock is not None:
            return sa.bindparam("p_now", type_=sa.BigInteger)
        return self.dialect.server_now()

    def _locking(self, statement: sa.Select[Any], *, skip: bool) -> sa.Select[Any]:
        return statement.with_for_update(skip_locked=skip, of=self.tables.tasks)

    def _in_lane(self, lane: int) -> sa.ColumnElement[bool]:
        """In a lane; also in the words of the partial index, which some databases do not conclude by themselves."""
        if lane == LANE_READY:
            return self._t.lane == _lane(LANE_READY)
        return (self._t.lane >= _lane(LANE_DELAYED)) & (self._t.lane == _lane(lane))

    # -- publishing ---------------------------------------------------------------------------------

    @cached_property
    def insert_task(self) -> sa.Insert:
        """Store an execution that is ready now or, with p_run_at or p_delay, later."""
        run_at = sa.func.coalesce(
            sa.bindparam("p_run_at", type_=sa.BigInteger),
            self.now + sa.bindparam("p_delay", type_=sa.BigInteger),
        )
        wanted = sa.bindparam("p_lane", type_=sa.SmallInteger)
        lane = sa.case((wanted != LANE_READY, wanted), (run_at > self.now, LANE_DELAYED), else_=LANE_READY)
        final = sa.bindparam("p_final", type_=sa.SmallInteger) == 1
        finished = sa.case((final, self.now), else_=sa.null().cast(sa.BigInteger))
        answered_for = sa.bindparam("p_answered_for", type_=sa.SmallInteger) == 1
        answer = sa.case((answered_for, self.now), else_=sa.null().cast(sa.BigInteger))
        at = sa.bindparam("p_expires_at", type_=sa.BigInteger)
        until = self.now + sa.bindparam("p_expires_in", type_=sa.BigInteger)
        # Comparisons with NULL are not true, so each of the two may be missing.
        expires = sa.case((at <= until, at), else_=sa.func.coalesce(until, at))
        return sa.insert(self.tables.tasks).values(
            run_at=run_at, lane=lane, created_at=self.now, finished_at=finished, expires_at=expires, answer_at=answer
        )

    @cached_property
    def insert_ready(self) -> sa.Insert:
        """Store an execution that is ready now: the usual case, with the least to compute."""
        return sa.insert(self.tables.tasks).values(
            run_at=self.now, created_at=self.now, lane=LANE_READY, state=State.PENDING.value
        )

    @cached_property
    def stored(self) -> list[sa.ColumnElement[Any]]:
        """What an INSERT tells of the row: its id, and the transaction's mark where there is one."""
        mark = self.dialect.transaction_mark()
        return [self._t.id] if mark is None else [self._t.id, mark.label("mark")]

    @cached_property
    def store_ready(self) -> sa.Insert:
        """insert_ready for one row, telling the transaction's mark where there is one."""
        return self.insert_ready if len(self.stored) == 1 else self.insert_ready.returning(*self.stored)

    @cached_property
    def store_ready_and_tell(self) -> sa.Insert:
        """store_ready, and tell those who listen to p_channel."""
        channel = sa.bindparam("p_channel", type_=sa.String)
        told = self.dialect.telling(channel, sa.bindparam("p_text", type_=sa.String))
        return self.insert_ready.returning(*self.stored, told)

    @cached_property
    def store_task(self) -> sa.Insert:
        """insert_task, likewise."""
        return self.insert_task if len(self.stored) == 1 else self.insert_task.returning(*self.stored)

    @cached_property
    def insert_dep(self) -> sa.Insert:
        """Note that a child waits for a parent."""
        return sa.insert(self.tables.deps)

    @cached_property
    def lock_parents(self) -> Statement:
        """States of the parents; locked in id order, so that none ends while its child is stored."""
        t = self._t
        return self._locking(sa.select(t.id, t.state).where(among(t.id, "p_ids")).order_by(t.id), skip=False)

    @cached_property
    def link(self) -> Statement:
        """Mark rows whose settling must look at the deps table."""
        return sa.update(self.tables.tasks).where(among(self._t.id, "p_ids")).values(linked=1)

    @cached_property
    def newest_of_key(self) -> Statement:
        """Newest execution of a business key."""
        t = self._t
        return (
            sa.select(t.id, t.state, t.seq, t.task_id)
            .where(t.key_ == sa.bindparam("p_key"))
            .order_by(t.seq.desc())
            .limit(1)
        )

    @cached_property
    def holder_of_lock(self) -> Statement:
        """The execution that has locked a unique key."""
        t = self._t
        return sa.select(t.id, t.state, t.task_id).where(t.lock_ == sa.bindparam("p_key"))

    @cached_property
    def take_lock_over(self) -> Statement:
        """Free a unique key that a running execution of p_task_id has locked."""
        t = self._t
        held = (t.lock_ == sa.bindparam("p_key"), t.task_id == sa.bindparam("p_task_id"))
        return sa.update(self.tables.tasks).where(*held, t.state == State.RUNNING.value).values(lock_=None)

    @cached_property
    def exists(self) -> Statement:
        """How many of the ids are stored."""
        return sa.select(sa.func.count()).select_from(self.tables.tasks).where(among(self._t.id, "p_ids"))

    # -- claiming -----------------------------------------------------------------------------------

    @cached_property
    def pick_due(self) -> Statement:
        """Delayed rows whose time has come, oldest first."""
        t = self._t
        query = sa.select(t.id).where(self._in_lane(LANE_DELAYED), t.run_at <= self.now)
        return self._locking(query.order_by(t.run_at).limit(sa.bindparam("p_limit")), skip=True)

    @cached_property
    def promote(self) -> Statement:
        """Put due rows into the claim index."""
        return (
            sa.update(self.tables.tasks)
            .where(among(self._t.id, "p_ids"), self._t.lane == _lane(LANE_DELAYED))
            .values(lane=LANE_READY)
        )

    def ready_queues(self, number: int) -> Statement:
        """Which of ``number`` queues (p_q0, p_q1, …) have something to claim."""
        return self._made_once("ready_queues", number, lambda: sa.union_all(*self._ready_places(number)))

    def _made_once(self, name: str, number: int, make: Callable[[], Statement]) -> Statement:
        """A statement for so many queues: every claim from several, and every look, asks for the same again."""
        made = self._by_number.get((name, number))
        if made is None:
            made = self._by_number[name, number] = make()
        return made

    def anything(self, number: int) -> Statement:
        """As ready_queues; besides, at place -1, in how many ms the first delayed row is due. Locks nothing."""
        return self._made_once("anything", number, lambda: self._anything(number))

    def _anything(self, number: int) -> Statement:
        t = self._t
        parts = [
            part.add_columns(sa.literal_column("0", sa.BigInteger).label("wait")) for part in self._ready_places(number)
        ]
        first = sa.select(t.run_at).where(self._in_lane(LANE_DELAYED)).order_by(t.run_at).limit(1).subquery("due")
        place = sa.literal_column("-1", sa.Integer).label("place")
        return sa.union_all(*parts, sa.select(place, (first.c.run_at - self.now).label("wait")))

    @cached_property
    def notify(self) -> Statement:
        """Tell those who listen to p_channel."""
        channel = sa.bindparam("p_channel", type_=sa.String)
        return self.dialect.notification(channel, sa.bindparam("p_text", type_=sa.String))

    def _ready_places(self, number: int) -> list[sa.Select[Any]]:
        heads = [self._head(place, self._t.id) for place in range(number)]
        return [_place(place).select_from(head) for place, head in enumerate(heads)]

    def _head(self, place: int, column: sa.ColumnElement[Any]) -> sa.Subquery:
        """A column of the first ready row of the queue p_q<place>."""
        t, name = self._t, sa.bindparam(f"p_q{place}", type_=sa.String)
        ready = sa.select(column).where(self._in_lane(LANE_READY), t.queue == name)
        return _first(ready.order_by(t.rank_, t.run_at, t.id), f"q{place}")

    @property
    def _claimed(self) -> list[sa.ColumnElement[Any]]:
        t = self._t
        return [
            t.id, t.token, t.queue, t.payload, t.type, t.task_id, t.rank_, t.run_at, t.created_at, t.deliveries,
            t.attempts, t.throttled, t.lease_lost, t.expires_at, t.linked, t.state, self.now.label("now"),
        ]  # fmt: skip

    def _ready(self, *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
        t = self._t
        query = sa.select(*columns).where(self._in_lane(LANE_READY), t.queue == sa.bindparam("p_queue"))
        query = query.order_by(t.rank_, t.run_at, t.id).limit(sa.bindparam("p_limit"))
        return self._locking(query, skip=True)

    @property
    def _lease(self) -> dict[str, Any]:
        t = self._t
        return {
            "state": State.RUNNING.value,
            "lane": LANE_NONE,
            "token": t.token - t.token % TOKEN_STEP + TOKEN_STEP + sa.bindparam("p_low", type_=sa.BigInteger),
            "deliveries": t.deliveries + 1,
            "owner": sa.bindparam("p_owner", type_=sa.String),
            "session": sa.bindparam("p_session", type_=sa.BigInteger),
            "lease_until": self.now + sa.bindparam("p_ttl", type_=sa.BigInteger),
        }

    @cached_property
    def claim(self) -> Statement:
        """Lease the best ready rows of one queue and return them, in one statement.

        A CTE that locks is evaluated once; the same query inside IN (…) could be planned to run repeatedly.
        """
        picked = self._ready(self._t.id).cte("picked")
        return (
            sa.update(self.tables.tasks)
            .where(self._t.id == picked.c.id)
            .values(**self._lease)
            .returning(*self._claimed)
        )

    @cached_property
    def claim_pick(self) -> Statement:
        """Lock the best ready rows of one queue, where UPDATE … RETURNING does not exist."""
        return self._ready(*self._claimed)

    @cached_property
    def claim_take(self) -> Statement:
        """Lease the rows locked by claim_pick."""
        return sa.update(self.tables.tasks).where(among(self._t.id, "p_ids")).values(**self._lease)

    @cached_property
    def see_expired(self) -> Statement:
        """Which of the next p_limit ready rows of one queue nobody wants any more; locks nothing."""
        t = self._t
        ready = sa.select(t.id, t.expires_at).where(self._in_lane(LANE_READY), t.queue == sa.bindparam("p_queue"))
        head = ready.order_by(t.rank_, t.run_at, t.id).limit(sa.bindparam("p_limit")).subquery("head")
        return sa.select(head.c.id).where(head.c.expires_at <= self.now)

    @cached_property
    def pick_expired(self) -> Statement:
        """Those of p_ids that nobody has claimed meanwhile."""
        t = self._t
        query = sa.select(t.id, t.queue, t.state, t.linked, t.type)
        query = query.where(among(t.id, "p_ids"), t.lane == _lane(LANE_READY))
        return self._locking(query, skip=True)

    @cached_property
    def delete_traceless(self) -> Statement:
        """Remove those of p_ids that stand in queues with an end and that no other row is linked to."""
        t, q = self._t, self.tables.queues.c
        ending = sa.select(q.name).where(q.expires_ms.is_not(None))
        return sa.delete(self.tables.tasks).where(
            among(t.id, "p_ids"), t.linked == 0, t.key_.is_(None), t.replay_of.is_(None), t.queue.in_(ending)
        )

    def expired_heads(self, number: int) -> Statement:
        """Which of ``number`` queues (p_q0, p_q1, …) begin with a row that nobody wants any more; locks nothing."""
        heads = [self._head(place, self._t.expires_at) for place in range(number)]
        return sa.union_all(
            *(_place(place).select_from(head).where(head.c.expires_at <= self.now) for place, head in enumerate(heads))
        )

    # -- settling -----------------------------------------------------------------------------------

    def _held(self) -> list[sa.ColumnElement[bool]]:
        # The ids once more by themselves: not every database finds an index for pairs.
        t = self._t
        return [
            among(t.id, "p_ids"),
            sa.tuple_(t.id, t.token).in_(sa.bindparam("p_leases", expanding=True)),
            t.state == State.RUNNING.value,
        ]

    @cached_property
    def delete_acked(self) -> Statement:
        """Settle leases whose rows nobody else needs; returns which."""
        t = self._t
        return (
            sa.delete(self.tables.tasks)
            .where(*self._held(), t.linked == 0, t.key_.is_(None), t.replay_of.is_(None))
            .returning(t.id, t.token)
        )

    @cached_property
    def held(self) -> Statement:
        """Rows whose lease token is the current one, locked in id order."""
        t = self._t
        query = sa.select(
            t.id,
            t.token,
            t.queue,
            t.state,
            t.linked,
            t.key_,
            t.replay_of,
            t.cancel_mark,
            t.attempts,
            t.max_retry,
            t.throttled,
            t.lease_lost,
            t.begun,
            t.type,
        )
        return self._locking(query.where(*self._held()).order_by(t.id), skip=False)

    @cached_property
    def begin(self) -> Statement:
        """Note of leases that are current that their runs have begun."""
        return sa.update(self.tables.tasks).where(*self._held()).values(begun=1)

    @cached_property
    def count_held(self) -> Statement:
        """How many of the leases are still current."""
        return sa.select(sa.func.count()).select_from(self.tables.tasks).where(*self._held())

    @cached_property
    def finish(self) -> Statement:
        """Make rows final; in p_answer_in ms, if that is a number, somebody may answer for those that have a type."""
        answer_at = self.now + sa.bindparam("p_answer_in", type_=sa.BigInteger)
        return (
            sa.update(self.tables.tasks)
            .where(among(self._t.id, "p_ids"))
            .values(
                state=sa.bindparam("p_state", type_=sa.String),
                lane=LANE_NONE,
                reason=sa.bindparam("p_reason", type_=sa.String),
                detail=sa.bindparam("p_detail", type_=sa.Text),
                result=sa.bindparam("p_result", type_=sa.LargeBinary),
                finished_at=self.now,
                session=None,
                lease_until=None,
                cancel_mark=0,
                begun=0,
                lock_=None,
                pending_parents=0,
                answer_at=sa.case((self._t.type != "", answer_at), else_=sa.null().cast(sa.BigInteger)),
            )
        )

    @cached_property
    def uncount_delivery(self) -> Statement:
        """Take back the delivery of a claim that reached nobody."""
        return sa.update(self.tables.tasks).where(among(self._t.id, "p_ids")).values(deliveries=self._t.deliveries - 1)

    @cached_property
    def undo_claim(self) -> Statement:
        """Take back a claim that was made only to find that the row must not be delivered."""
        return (
            sa.update(self.tables.tasks)
            .where(among(self._t.id, "p_ids"))
            .values(deliveries=self._t.deliveries - 1, owner=None)
        )

    @cached_property
    def count_failure(self) -> Statement:
        """Set the counters of a failed run."""
        return (
            sa.update(self.tables.tasks)
            .where(self._t.id == sa.bindparam("p_id"))
            .values(
                attempts=sa.bindparam("p_attempts", type_=sa.Integer),
                throttled=sa.bindparam("p_throttled", type_=sa.Integer),
            )
        )

    def _give_back(self, state: State, run_at: sa.ColumnElement[int], lane: Any) -> sa.Update:
        return (
            sa.update(self.tables.tasks)
            .where(among(self._t.id, "p_ids"))
            .values(state=state.value, run_at=run_at, lane=lane, session=None, owner=None, lease_until=None, begun=0)
        )

    @cached_property
    def retry_later(self) -> Statement:
        """Let a failed run wait until p_run_at, or p_delay milliseconds from now."""
        run_at = sa.func.coalesce(
            sa.bindparam("p_run_at", type_=sa.BigInteger), self.now + sa.bindparam("p_delay", type_=sa.BigInteger)
        )
        return self._give_back(State.RETRYING, run_at, sa.case((run_at > self.now, LANE_DELAYED), else_=LANE_READY))

    @cached_property
    def give_back(self) -> Statement:
        """Make leased rows pending again, at their old place."""
        return self._give_back(State.PENDING, self._t.run_at, LANE_READY)

    @cached_property
    def count_loss(self) -> Statement:
        """One more lost lease."""
        return sa.update(self.tables.tasks).where(among(self._t.id, "p_ids")).values(lease_lost=self._t.lease_lost + 1)

    @cached_property
    def delete_tasks(self) -> Statement:
        """Remove rows."""
        return sa.delete(self.tables.tasks).where(among(self._t.id, "p_ids"))

    @cached_property
    def delete_deps(self) -> Statement:
        """Remove what is known of the links of removed rows."""
        d = self.tables.deps.c
        return sa.delete(self.tables.deps).where(among(d.child_id, "p_ids") | among(d.parent_id, "p_ids"))

    # -- dependencies -------------------------------------------------------------------------------

    @cached_property
    def blocked_children(self) -> Statement:
        """Blocked children of rows that have just ended, locked in id order; a row per link."""
        t, d = self._t, self.tables.deps.c
        query = (
            sa.select(t.id, t.queue, t.fail_fast, t.pending_parents, t.type)
            .select_from(self.tables.deps.join(self.tables.tasks, t.id == d.child_id))
            .where(among(d.parent_id, "p_ids"), t.state == State.BLOCKED.value)
            .order_by(t.id)
        )
        return self._locking(query, skip=False)

    @cached_property
    def fewer_parents(self) -> Statement:
        """A blocked row waits for p_number parents less."""
        return (
            sa.update(self.tables.tasks)
            .where(self._t.id == sa.bindparam("p_id"))
            .values(pending_parents=self._t.pending_parents - sa.bindparam("p_number", type_=sa.Integer))
        )

    @cached_property
    def unblock(self) -> Statement:
        """Let rows go whose parents have all ended."""
        t = self._t
        return (
            sa.update(self.tables.tasks)
            .where(among(t.id, "p_ids"))
            .values(
                state=State.PENDING.value,
                pending_parents=0,
                lane=sa.case((t.run_at > self.now, LANE_DELAYED), else_=LANE_READY),
            )
        )

    @cached_property
    def pick_forgotten(self) -> Statement:
        """Blocked rows none of whose parents is still to come, nor the result of one."""
        t, d = self._t, self.tables.deps.c
        parent = self.tables.tasks.alias("parent")
        waiting = (
            sa.exists()
            .where(d.child_id == t.id, parent.c.id == d.parent_id)
            .where(parent.c.state.not_in([state.value for state in sorted(FINAL)]))
        )
        waits = self.waits.waits_for_results
        query = sa.select(t.id, t.queue, t.fail_fast, t.type).where(self._in_lane(LANE_BLOCKED), ~waiting, ~waits)
        return self._locking(query.order_by(t.run_at).limit(sa.bindparam("p_limit")), skip=True)

    @cached_property
    def failed_parents(self) -> Statement:
        """Children (of p_ids) that have a failed or canceled parent."""
        t, d = self._t, self.tables.deps.c
        return (
            sa.select(d.child_id)
            .distinct()
            .select_from(self.tables.deps.join(self.tables.tasks, t.id == d.parent_id))
            .where(among(d.child_id, "p_ids"), t.state.in_([State.FAILED.value, State.CANCELED.value]))
        )

    # -- leases -------------------------------------------------------------------------------------

    def extend(self, ttls: dict[str, int], default: int) -> Statement:
        """Extend leases by their queue's time in milliseconds."""
        ttl = sa.case(ttls, value=self._t.queue, else_=default) if ttls else sa.literal(default, sa.BigInteger)
        return sa.update(self.tables.tasks).where(*self._held()).values(lease_until=self.now + ttl)

    @cached_property
    def marks(self) -> Statement:
        """The leases that are current, with their end and whether cancel was asked for."""
        t = self._t
        return sa.select(t.id, t.token, t.cancel_mark, t.lease_until).where(*self._held())

    @cached_property
    def insert_session(self) -> Statement:
        """Register a holder."""
        return sa.insert(self.tables.sessions).values(
            started_at=self.now, until_=self.now + sa.bindparam("p_ttl", type_=sa.BigInteger)
        )

    @cached_property
    def renew_session(self) -> Statement:
        """Extend all leases of a holder: one row, however many they are."""
        return (
            sa.update(self.tables.sessions)
            .where(self.tables.sessions.c.id == sa.bindparam("p_id"))
            .values(until_=self.now + sa.bindparam("p_ttl", type_=sa.BigInteger))
        )

    @cached_property
    def session_leases(self) -> Statement:
        """What a holder holds."""
        t = self._t
        return sa.select(t.id, t.token, t.cancel_mark, t.queue).where(t.session == sa.bindparam("p_id"), self._runs)

    @cached_property
    def lock_session_leases(self) -> Statement:
        """What a holder holds, locked in id order."""
        t = self._t
        query = sa.select(t.id, t.queue, t.state, t.linked, t.cancel_mark, t.begun, t.type).where(
            t.session == sa.bindparam("p_id"), self._runs
        )
        return self._locking(query.order_by(t.id), skip=False)

    @cached_property
    def delete_session(self) -> Statement:
        """Forget a holder."""
        return sa.delete(self.tables.sessions).where(self.tables.sessions.c.id == sa.bindparam("p_id"))

    @cached_property
    def dead_sessions(self) -> Statement:
        """Holders whose time is over and who hold something; locked, so that none is renewed meanwhile."""
        s = self.tables.sessions.c
        query = sa.select(s.id).where(s.until_ < self.now, self._holds()).limit(200)
        return query.with_for_update(skip_locked=True, of=self.tables.sessions)

    def _holds(self) -> sa.ColumnElement[bool]:
        # As a value instead of EXISTS, which one database turns into a join with the whole table.
        t, s = self._t, self.tables.sessions.c
        held = sa.select(t.id).where(t.session == s.id, self._runs).limit(1)
        return held.correlate(self.tables.sessions).scalar_subquery().is_not(None)

    @cached_property
    def pick_lost(self) -> Statement:
        """Leases without a holder that have run out."""
        return self._lost(self._t.session.is_(None))

    @cached_property
    def pick_orphaned(self) -> Statement:
        """Leases of dead holders (p_sessions) that have run out."""
        return self._lost(among(self._t.session, "p_sessions"))

    @cached_property
    def pick_stray(self) -> Statement:
        """Leases of holders that are not in the table any more."""
        s = self.tables.sessions.c
        return self._lost(self._t.session.is_not(None) & ~sa.exists().where(s.id == self._t.session))

    def _lost(self, whose: sa.ColumnElement[bool]) -> Statement:
        t = self._t
        query = sa.select(t.id, t.queue, t.state, t.linked, t.cancel_mark, t.lease_lost, t.begun, t.type)
        query = query.where(whose, *self._out)
        return self._locking(query.limit(sa.bindparam("p_limit")), skip=True)

    @property
    def _out(self) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
        return self._runs, self._t.lease_until < self.now

    @property
    def _runs(self) -> sa.ColumnElement[bool]:
        # Literal, as the partial index has it.
        return self._t.state == sa.literal_column("'running'")

    @cached_property
    def look_around(self) -> Statement:
        """What the reaper has to know, a row for each thing that is so; locks nothing.

        LOST: one of pick_lost, pick_orphaned and pick_stray would find something. RUNS: something runs; only told where
        the index has running rows alone. ANSWER: an answer is due. ENDS: ``wait`` ms until the first lease runs out
        that nobody renews, of those that have not.
        """
        t, s = self._t, self.tables.sessions.c
        held = sa.select(t.id).where(t.session == s.id, *self._out).limit(1)
        lost = held.correlate(self.tables.sessions).scalar_subquery().is_not(None)
        looks = (
            sa.select(t.id).where(t.session.is_(None), *self._out),
            sa.select(s.id).where(s.until_ < self.now, lost),
            sa.select(t.id).where(t.session.is_not(None), ~sa.exists().where(s.id == t.session), *self._out),
        )
        found = [(LOST, _first(look, f"look{place}")) for place, look in enumerate(looks)]
        if self.dialect.partial_index("lease"):
            found.append((RUNS, _first(sa.select(t.id).where(self._runs), "look")))
        found.append((ANSWER, _first(sa.select(t.id).where(*self._due), "due")))
        wait = sa.literal_column("0", sa.BigInteger).label("wait")
        ends = (self._first_end_of_sessions(), self._first_end_without_session())
        return sa.union_all(
            *(sa.select(_kind(kind), wait).select_from(look) for kind, look in found),
            *(sa.select(_kind(ENDS), (end.c.at - self.now).label("wait")) for end in ends),
        )

    def _first_end_of_sessions(self) -> sa.Subquery:
        """When the first session ends, and with it leases; one that was claimed late lives a little longer."""
        t, s = self._t, self.tables.sessions.c
        held = sa.select(t.lease_until).where(t.session == s.id, self._runs).order_by(t.lease_until).limit(1)
        first = held.correlate(self.tables.sessions).scalar_subquery()
        each = sa.select(sa.case((first > s.until_, first), else_=s.until_).label("at")).where(first.is_not(None))
        of_each = each.subquery("each_session")
        return sa.select(sa.func.min(of_each.c.at).label("at")).where(of_each.c.at >= self.now).subquery("ends")

    def _first_end_without_session(self) -> sa.Subquery:
        t = self._t
        query = sa.select(t.lease_until.label("at")).where(t.session.is_(None), self._runs, t.lease_until >= self.now)
        return _first(query.order_by(t.lease_until), "ends_alone")

    # -- answering ----------------------------------------------------------------------------------

    @property
    def _due(self) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
        # Also in the words of the partial index.
        return self._t.answer_at.is_not(None), self._t.answer_at <= self.now

    @cached_property
    def pick_answers(self) -> Statement:
        """Rows that somebody should answer for, the longest due first."""
        return self._answers()

    @cached_property
    def pick_answers_of(self) -> Statement:
        """The same: of p_queues, and of all others when they have been due for p_older ms."""
        t = self._t
        older = t.answer_at <= self.now - sa.bindparam("p_older", type_=sa.BigInteger)
        return self._answers(among(t.queue, "p_queues") | older)

    def _answers(self, *which: sa.ColumnElement[bool]) -> Statement:
        t = self._t
        query = sa.select(self.tables.tasks).where(*self._due, *which).order_by(t.answer_at)
        return self._locking(query.limit(sa.bindparam("p_limit")), skip=True)

    @cached_property
    def put_off_answers(self) -> Statement:
        """Somebody answers for rows; should they not, another may in p_wait ms."""
        later = self.now + sa.bindparam("p_wait", type_=sa.BigInteger)
        return sa.update(self.tables.tasks).where(among(self._t.id, "p_ids")).values(answer_at=later)

    @cached_property
    def clear_answers(self) -> Statement:
        """Rows have been answered for."""
        t = self._t
        return sa.update(self.tables.tasks).where(among(t.id, "p_ids"), t.answer_at.is_not(None)).values(answer_at=None)

    # -- keeping tidy -------------------------------------------------------------------------------

    def _old(self, *which: sa.ColumnElement[bool]) -> Statement:
        t, d = self._t, self.tables.deps.c
        child = self.tables.tasks.alias("child")
        needed = sa.exists().where(d.parent_id == t.id, child.c.id == d.child_id, child.c.state == State.BLOCKED.value)
        query = sa.select(t.id, t.linked).where(t.finished_at.is_not(None), *which)
        query = query.where(t.finished_at < self.now - sa.bindparam("p_keep", type_=sa.BigInteger), ~needed)
        return self._locking(query.limit(sa.bindparam("p_limit")), skip=True)

    @cached_property
    def pick_old(self) -> Statement:
        """Final rows that ended more than p_keep ms ago and that no blocked row waits for."""
        return self._old(self._t.state.in_([state.value for state in sorted(FINAL)]))

    @cached_property
    def pick_old_completed(self) -> Statement:
        """The same of completed rows that are kept for no other reason than their time."""
        t = self._t
        return self._old(t.state == State.COMPLETED.value, t.key_.is_(None), t.replay_of.is_(None))

    @cached_property
    def delete_old_sessions(self) -> Statement:
        """Forget holders that died p_age ms ago and hold nothing."""
        s = self.tables.sessions.c
        return sa.delete(self.tables.sessions).where(
            s.until_ < self.now - sa.bindparam("p_age", type_=sa.BigInteger), ~self._holds()
        )

    @cached_property
    def delete_old_quotas(self) -> Statement:
        """Forget windows that closed p_age ms ago."""
        q = self.tables.quotas.c
        return sa.delete(self.tables.quotas).where(
            q.window_start + q.window_ms < self.now - sa.bindparam("p_age", type_=sa.BigInteger)
        )

    # -- control ------------------------------------------------------------------------------------

    @cached_property
    def lock_task(self) -> Statement:
        """One row, locked."""
        t = self._t
        query = sa.select(*[column for column in t if column.name != "result"])
        return self._locking(query.where(t.id == sa.bindparam("p_id")), skip=False)

    @cached_property
    def mark_canceled(self) -> Statement:
        """Ask the holder of a running row to stop."""
        return sa.update(self.tables.tasks).where(self._t.id == sa.bindparam("p_id")).values(cancel_mark=1)

    def _waiting(self, *which: sa.ColumnElement[bool]) -> sa.Select[Any]:
        t = self._t
        waits = t.state.in_([state.value for state in sorted(WAITING)])
        return sa.select(self.tables.tasks).where(waits, *which).order_by(t.id)

    @cached_property
    def lock_waiting(self) -> Statement:
        """Those of p_ids that wait, locked in id order."""
        return self._locking(self._waiting(among(self._t.id, "p_ids")), skip=False)

    @cached_property
    def lock_waiting_of(self) -> Statement:
        """What waits under the task_ids p_task_ids and has a type, locked in id order."""
        return self._locking(self._waiting(among(self._t.task_id, "p_task_ids"), self._t.type != ""), skip=False)

    @cached_property
    def see_waiting(self) -> Statement:
        """A page of what waits, after the id p_after; locks nothing."""
        return self._waiting(self._t.id > sa.bindparam("p_after")).limit(sa.bindparam("p_limit"))

    @cached_property
    def replayed_by(self) -> Statement:
        """The execution that replays p_id."""
        return sa.select(self._t.id).where(self._t.replay_of == sa.bindparam("p_id"))

    def pick_waiting(self, lane: int) -> Statement:
        """Rows of one lane of a queue, to be purged."""
        t = self._t
        query = sa.select(t.id, t.queue, t.state, t.linked).where(
            self._in_lane(lane), t.queue == sa.bindparam("p_queue")
        )
        return self._locking(query.limit(sa.bindparam("p_limit")), skip=True)

    @cached_property
    def have_children(self) -> Statement:
        """Which of the ids are parents."""
        d = self.tables.deps.c
        return sa.select(d.parent_id).distinct().where(among(d.parent_id, "p_ids"))

    # -- asking -------------------------------------------------------------------------------------

    @cached_property
    def get(self) -> Statement:
        """One row."""
        return sa.select(self.tables.tasks).where(self._t.id == sa.bindparam("p_id"))

    @cached_property
    def running(self) -> Statement:
        """Those of the task_ids p_task_ids under which an execution with a type runs."""
        t = self._t
        return sa.select(t.task_id).where(among(t.task_id, "p_task_ids"), t.state == State.RUNNING.value, t.type != "")

    @cached_property
    def newest_of_task(self) -> Statement:
        """Newest execution of a task, when its session's leases end, and the time."""
        t, s = self._t, self.tables.sessions
        query = sa.select(self.tables.tasks, s.c.until_, self.now.label("now"))
        query = query.select_from(self.tables.tasks.outerjoin(s, s.c.id == t.session))
        return query.where(t.task_id == sa.bindparam("p_task_id"), t.type != "").order_by(t.id.desc()).limit(1)

    @cached_property
    def count_executions(self) -> Statement:
        """How many executions a task has."""
        t = self._t
        return (
            sa.select(sa.func.count())
            .select_from(self.tables.tasks)
            .where(t.task_id == sa.bindparam("p_task_id"), t.type != "")
        )

    @cached_property
    def count_before(self) -> Statement:
        """How many of a queue are claimed before (p_rank, p_run_at, p_id), of those that are ready or due."""
        t = self._t
        rank, run_at = (sa.bindparam(name, type_=sa.BigInteger) for name in ("p_rank", "p_run_at"))
        earlier = (t.run_at < run_at) | ((t.run_at == run_at) & (t.id < sa.bindparam("p_id", type_=sa.BigInteger)))
        before = (t.queue == sa.bindparam("p_queue"), (t.rank_ < rank) | ((t.rank_ == rank) & earlier))
        ready = sa.select(sa.func.count().label("number")).where(self._in_lane(LANE_READY), *before)
        due = sa.select(sa.func.count().label("number")).where(
            self._in_lane(LANE_DELAYED), t.run_at <= self.now, *before
        )
        return sa.select(ready.scalar_subquery() + due.scalar_subquery())

    @cached_property
    def queue_lens(self) -> Statement:
        """Pending and retrying rows per queue, of the queues named."""
        t = self._t

        def part(lane: int) -> sa.Select[Any]:
            query = sa.select(t.queue, sa.func.count()).where(among(t.queue, "p_queues"), self._in_lane(lane))
            return query.group_by(t.queue)

        return sa.union_all(part(LANE_READY), part(LANE_DELAYED))

    @cached_property
    def counts(self) -> Statement:
        """Rows per type and state."""
        t = self._t
        return sa.select(t.type, t.state, sa.func.count()).group_by(t.type, t.state)

    # -- quotas -------------------------------------------------------------------------------------

    @cached_property
    def current_time(self) -> Statement:
        """The time that decides."""
        return sa.select(self.now)

    @cached_property
    def new_quota(self) -> Statement:
        """Make the row of a key, empty, unless there is one."""
        return self.dialect.insert_or_ignore(self.tables.quotas)

    @cached_property
    def reserve(self) -> Statement:
        """Take p_n of the window's quota; changes no row when there is not enough or the window is older."""
        q = self.tables.quotas.c
        start = sa.bindparam("p_start", type_=sa.BigInteger)
        number = sa.bindparam("p_n", type_=sa.BigInteger)
        limit = sa.bindparam("p_limit", type_=sa.BigInteger)
        fits = sa.case((q.window_start == start, q.used + number <= limit), else_=number <= limit)
        return (
            sa.update(self.tables.quotas)
            .where(
                q.key_ == sa.bindparam("p_key"), q.window_ms == sa.bindparam("p_window"), q.window_start <= start, fits
            )
            # In this order: one database assigns from left to right, seeing what it has assigned.
            .ordered_values(
                (q.used, sa.case((q.window_start == start, q.used + number), else_=number)), (q.window_start, start)
            )
        )

    @cached_property
    def release(self) -> Statement:
        """Give p_n back to the window they were taken from."""
        q = self.tables.quotas.c
        number = sa.bindparam("p_n", type_=sa.BigInteger)
        return (
            sa.update(self.tables.quotas)
            .where(
                q.key_ == sa.bindparam("p_key"),
                q.window_ms == sa.bindparam("p_window"),
                q.window_start == sa.bindparam("p_start"),
                q.used >= number,
            )
            .values(used=q.used - number)
        )

    # -- queues and who uses them --------------------------------------------------------------------

    @cached_property
    def touch_queues(self) -> Statement:
        """Queues (p_names) are in use now."""
        q = self.tables.queues
        return sa.update(q).where(among(q.c.name, "p_names")).values(touched_at=self.now)

    @cached_property
    def drop_consumers(self) -> Statement:
        """A holder's consumers of one queue are gone."""
        c = self.tables.consumers.c
        ours = (c.queue == sa.bindparam("p_queue"), c.session == sa.bindparam("p_session"))
        return sa.delete(self.tables.consumers).where(*ours)

    @cached_property
    def add_consumers(self) -> Statement:
        """A holder has p_number consumers of a queue."""
        return sa.insert(self.tables.consumers).values(
            queue=sa.bindparam("p_queue"), session=sa.bindparam("p_session"), number=sa.bindparam("p_number")
        )

    @cached_property
    def count_consumers(self) -> Statement:
        """Consumers that a queue has, of holders that live, but for p_but."""
        c, s = self.tables.consumers.c, self.tables.sessions.c
        query = sa.select(sa.func.coalesce(sa.func.sum(c.number), 0)).where(c.queue == sa.bindparam("p_queue"))
        return query.where(s.id == c.session, s.until_ >= self.now, ~among(c.session, "p_but"))

    @cached_property
    def unused_queues(self) -> Statement:
        """Queues whose time has passed since they were touched, and since the end of all who consume them."""
        q, c, s = self.tables.queues.c, self.tables.consumers.c, self.tables.sessions.c
        used = sa.exists().where(c.queue == q.name, s.id == c.session, s.until_ + q.expires_ms >= self.now)
        query = sa.select(q.name).where(q.expires_ms.is_not(None), q.touched_at + q.expires_ms < self.now, ~used)
        return query.order_by(q.name)

    @cached_property
    def touch_consumed(self) -> Statement:
        """The queues that a holder (p_id) consumes were in use until now."""
        q, c = self.tables.queues, self.tables.consumers.c
        consumed = sa.select(c.queue).where(c.session == sa.bindparam("p_id"))
        return sa.update(q).where(q.c.expires_ms.is_not(None), q.c.name.in_(consumed)).values(touched_at=self.now)

    @cached_property
    def delete_consumers(self) -> Statement:
        """A holder (p_id) consumes nothing any more."""
        return sa.delete(self.tables.consumers).where(self.tables.consumers.c.session == sa.bindparam("p_id"))

    @cached_property
    def delete_old_consumers(self) -> Statement:
        """Forget consumers whose holder has been forgotten."""
        c, s = self.tables.consumers.c, self.tables.sessions.c
        return sa.delete(self.tables.consumers).where(~sa.exists().where(s.id == c.session))

    # -- revocations --------------------------------------------------------------------------------

    @cached_property
    def insert_revocation(self) -> sa.Insert:
        """Store a revocation unless it is there. Of values alone: then a driver can send many rows at once."""
        return self.dialect.insert_or_ignore(self.tables.revocations).values(
            value_=sa.bindparam("p_value", type_=sa.String),
            header=sa.bindparam("p_header", type_=sa.String),
            until_=sa.bindparam("p_until", type_=sa.BigInteger),
        )

    def _these(self) -> list[sa.ColumnElement[bool]]:
        # By header, of which there are few, because databases plan long lists of pairs slowly.
        r = self.tables.revocations.c
        return [among(r.value_, "p_values"), r.header == sa.bindparam("p_header", type_=sa.String)]

    @cached_property
    def prolong_revocations(self) -> Statement:
        """Let revocations of one header that were stored before live as long as new ones."""
        r = self.tables.revocations
        until = sa.bindparam("p_until", type_=sa.BigInteger)
        return sa.update(r).where(*self._these(), r.c.until_ < until).values(until_=until)

    @cached_property
    def any_revocation(self) -> Statement:
        """One revocation, if there is any."""
        return sa.select(self.tables.revocations.c.value_).limit(1)

    @cached_property
    def find_revocations(self) -> Statement:
        """The revocations of values, whatever header they are of."""
        r = self.tables.revocations.c
        return sa.select(r.value_, r.header).where(among(r.value_, "p_values"))

    @cached_property
    def count_revocations(self) -> Statement:
        """How many revocations are stored."""
        return sa.select(sa.func.count()).select_from(self.tables.revocations)

    @cached_property
    def pick_old_revocations(self) -> Statement:
        """Revocations past their time, but those of task ids under which an execution has not ended."""
        t, r = self._t, self.tables.revocations.c
        final = [state.value for state in sorted(FINAL)]
        goes_on = sa.select(t.id).where(t.task_id == r.value_, t.state.not_in(final)).limit(1)
        needed = goes_on.correlate(self.tables.revocations).scalar_subquery().is_not(None)
        query = sa.select(r.value_, r.header).where(r.until_ < self.now, ~((r.header == "") & needed))
        query = query.order_by(r.until_).limit(sa.bindparam("p_limit"))
        return query.with_for_update(skip_locked=True, of=self.tables.revocations)

    @cached_property
    def delete_revocations(self) -> Statement:
        """Forget revocations of one header."""
        return sa.delete(self.tables.revocations).where(*self._these())
