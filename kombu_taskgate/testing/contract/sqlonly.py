"""What only a SQL store can get wrong: commits, deadlocks, locks, plans, schema, forks."""

from __future__ import annotations

import math
import os
import re
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import SchemaError, StoreUnavailable, TaskgateError
from kombu_taskgate.core.memory import MemoryBroker
from kombu_taskgate.core.model import FailKind, Filter, Lease, Session, State
from kombu_taskgate.core.results import WAIT_EXPIRES, Finality, NewResult
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.faults import FailAt
from kombu_taskgate.testing.threads import DEADLINE, errors_of, together, wait_until

from .base import QUEUE, Cases, ids_of, put, put_many, state_of, take
from .store import FORK, SQL, Store, require

if TYPE_CHECKING:
    from kombu_taskgate.core.sql import SqlBroker

#: What faults are tried on: calls on (broker, lease of a running parent, id of an execution that waits).
Call = Callable[[Broker, Lease, int], object]
WRITES: dict[str, Call] = {
    "enqueue": lambda broker, lease, id: put(broker, "new") > id,
    "enqueue_many": lambda broker, lease, id: len(put_many(broker, 3, "new")),
    "enqueue_key": lambda broker, lease, id: put(broker, "new", key="new") > id,
    "enqueue_unique": lambda broker, lease, id: put(broker, "new", unique_key="new") > id,
    "enqueue_child": lambda broker, lease, id: put(broker, "new", parents=[id]) > id,
    "dequeue": lambda broker, lease, id: len(broker.dequeue([QUEUE], 5)),
    "ack": lambda broker, lease, id: broker.ack(lease),
    "ack_result": lambda broker, lease, id: broker.ack(lease, b"result"),
    "ack_many": lambda broker, lease, id: broker.ack_many([lease]),
    "begin_many": lambda broker, lease, id: len(broker.begin_many([lease])),
    "ack_and_dequeue": lambda broker, lease, id: [len(part) for part in broker.ack_and_dequeue([lease], [QUEUE], 5)],
    "business": lambda broker, lease, id: broker.fail(lease, FailKind.BUSINESS, delay=60),
    "throttled": lambda broker, lease, id: broker.fail(lease, FailKind.THROTTLED, delay=60),
    "skip": lambda broker, lease, id: broker.fail(lease, FailKind.SKIP),
    "lost": lambda broker, lease, id: broker.fail(lease, FailKind.LOST),
    "requeue": lambda broker, lease, id: broker.requeue(lease),
    "requeue_many": lambda broker, lease, id: broker.requeue_many([lease], delivered=False),
    "finish_canceled": lambda broker, lease, id: broker.finish_canceled(lease),
    "heartbeat": lambda broker, lease, id: broker.heartbeat(lease),
    "heartbeat_many": lambda broker, lease, id: len(broker.heartbeat_many([lease]).lost),
    "open_session": lambda broker, lease, id: broker.open_session("w", 5).ttl,
    "cancel": lambda broker, lease, id: broker.cancel(id),
    "cancel_running": lambda broker, lease, id: broker.cancel(lease.id),
    "cancel_waiting": lambda broker, lease, id: len(broker.cancel_waiting([id, lease.id])),
    "purge": lambda broker, lease, id: broker.purge(QUEUE),
    "wake": lambda broker, lease, id: broker.results.store(NewResult("p", "SUCCESS", Finality.SUCCEEDED, b"1")),
    "reap": lambda broker, lease, id: broker.reap_expired(),
    "quota": lambda broker, lease, id: broker.queue_quota("k", 1, 60.0) is not None,
}
#: Columns that were added to the tables of the first version.
ADDED = ("begun", "unique_key", "lock_", "answer_at")
#: Calls that are simply done again when the outcome is unknown; what they count the second time is less.
COUNTING = {"reap", "purge"}


def _prepare(broker: Broker, clock: FakeClock) -> tuple[Lease, int]:
    """A running parent whose lease has run out, a child of it, and one that waits."""
    put(broker, key="running")
    lease = take(broker, owner="w")
    put(broker, "later", parents=[lease.id])
    waiting = put(broker)
    put(broker, "parents", type="t", task_id="p")
    put(broker, "later", type="t", depends_on=["p"])
    clock.advance(10.001)
    return lease, waiting


def _picture(broker: Broker) -> list[dict[str, Any]]:
    """All that can be seen, but the ids."""
    return [{**asdict(task), "id": None} for task in broker.list(Filter(limit=10**6))]


def _schema(broker: SqlBroker) -> dict[str, Any]:
    """The tables as the database describes them."""
    import sqlalchemy as sa

    inspector = sa.inspect(broker.database.engine)
    found: dict[str, Any] = {}
    for table in broker.tables.metadata.sorted_tables:
        columns = [{**column, "type": repr(column["type"])} for column in inspector.get_columns(table.name)]
        indexes = {str(index["name"]): _plain(index) for index in inspector.get_indexes(table.name)}
        found[table.name] = (columns, inspector.get_pk_constraint(table.name), indexes)
    return found


def _back_to_the_first(broker: SqlBroker) -> None:
    """Take from the tables of the first version what has been added to them since."""
    import sqlalchemy as sa

    tasks = broker.tables.tasks
    with broker.database.engine.connect() as conn:
        table = conn.dialect.identifier_preparer.format_table(tasks)
        for index in [one for one in tasks.indexes if any(column.name in ADDED for column in one.columns)]:
            index.drop(conn)
        for column in ADDED:
            conn.exec_driver_sql(f"ALTER TABLE {table} DROP COLUMN {column}")
        results = conn.dialect.identifier_preparer.format_table(broker.tables.results)
        conn.exec_driver_sql(f"ALTER TABLE {results} DROP COLUMN awaited")
        conn.execute(sa.update(broker.tables.version).values(version=1))


def _plain(value: Any) -> Any:
    """Without SQLAlchemy's objects, which do not compare."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else str(value)


class SqlCases(Cases):
    """Cases for stores with the capability ``sql``."""

    @pytest.fixture
    def sql_store(self, store: Store) -> Store:
        require(store, SQL)
        return store

    def _open(self, store: Store, **options: Any) -> SqlBroker:
        return cast("SqlBroker", store.open(**options))

    def _compare(self, store: Store, name: str, fault: FailAt) -> tuple[object, list[object], list[object]]:
        """One call under a fault, and the same on the reference without; gives outcome and both pictures."""
        call = WRITES[name]
        told: list[object] = []
        expected_told: list[object] = []
        clock, other_clock = FakeClock(), FakeClock()
        broker = self._open(store, clock=clock, lease_ttl=10, notify=told.append)
        self._clear(broker)
        reference = MemoryBroker(
            BrokerSettings("memory://", lease_ttl=10), clock=other_clock, notify=expected_told.append
        )
        lease, waiting = _prepare(broker, clock)
        other_lease, other_waiting = _prepare(reference, other_clock)
        before = _picture(broker)
        assert before == _picture(reference)
        expected = call(reference, other_lease, other_waiting)
        broker.database.fault = fault
        try:
            outcome = call(broker, lease, waiting)
        except TaskgateError as error:
            outcome = error
        finally:
            broker.database.fault = None
        after = _picture(broker)
        broker.close()
        if isinstance(outcome, TaskgateError):
            assert isinstance(outcome, StoreUnavailable), f"{name}: {outcome!r}"
            assert after in (before, _picture(reference)), name
        else:
            assert outcome == expected or name in COUNTING, name
            assert after == _picture(reference), name
            assert len(told) == len(expected_told) or name in COUNTING, name
        return outcome, [before, after], [before, _picture(reference)]

    def _clear(self, broker: SqlBroker) -> None:
        import sqlalchemy as sa

        tables = [table for table in broker.tables.metadata.sorted_tables if table is not broker.tables.version]

        def work(conn: sa.Connection) -> None:
            for table in tables:
                conn.execute(sa.delete(table))

        broker.database.transaction(work)

    # -- faults ------------------------------------------------------------------------------------

    def test_deadlock_is_retried(self, sql_store: Store) -> None:
        """A deadlock: the whole transaction runs again, with one effect and one announcement."""
        from kombu_taskgate.core.database import InjectedDeadlock

        for name in WRITES:
            fault = FailAt("before_commit", InjectedDeadlock, times=2)
            outcome, _, _ = self._compare(sql_store, name, fault)
            assert not isinstance(outcome, StoreUnavailable), name
            assert fault.raised == 2, name

    def test_connection_lost_before_commit(self, sql_store: Store) -> None:
        """A connection lost before COMMIT: done by a second try, with one effect."""
        from kombu_taskgate.core.database import InjectedDisconnect

        for name in WRITES:
            fault = FailAt("before_commit", InjectedDisconnect)
            self._compare(sql_store, name, fault)
            assert fault.raised == 1, name

    def test_database_gone(self, sql_store: Store) -> None:
        """Connections lost again and again: StoreUnavailable, nothing done, and all is well afterwards."""
        from kombu_taskgate.core.database import InjectedDisconnect

        for name in WRITES:
            fault = FailAt("before_commit", InjectedDisconnect, times=10**6)
            outcome, (before, after), _ = self._compare(sql_store, name, fault)
            assert isinstance(outcome, StoreUnavailable), name
            assert after == before, name

    def test_commit_lost(self, sql_store: Store) -> None:
        """A connection lost in COMMIT that took effect: found out, or told as unknown; never done twice."""
        from kombu_taskgate.core.database import InjectedDisconnect

        for name in WRITES:
            fault = FailAt("after_commit", InjectedDisconnect)
            outcome, (_, after), (_, expected) = self._compare(sql_store, name, fault)
            assert after == expected, f"{name}: {outcome!r}"
            assert fault.raised == 1, name

    def test_refused_calls_leave_a_good_connection(self, sql_store: Store) -> None:
        """After each refused call the next one works, also with a single connection."""
        broker = self._open(sql_store, pool_size=1)
        id = put(broker, key="k")
        calls: list[Callable[[], object]] = [
            partial(put, broker, key="k"),
            partial(put, broker, parents=[10**12]),
            partial(broker.ack, Lease(id, 1)),
            partial(broker.replay, id),
            partial(broker.cancel, 10**12),
        ]
        for call in calls * 3:
            with pytest.raises(TaskgateError):
                call()
            assert state_of(broker, id) is State.PENDING
        broker.ack(take(broker))

    def test_closed_connections_are_replaced(self, sql_store: Store) -> None:
        """Pooled connections that were closed behind our back cost no call."""
        broker = self._open(sql_store)
        ids = put_many(broker, 20)
        claims = broker.dequeue([QUEUE], 20)
        steps: list[Callable[[], object]] = [
            lambda: put(broker, "later"),
            lambda: broker.ack(claims[0]),
            lambda: broker.get(ids[1]),
            lambda: broker.dequeue(["later"]),
            lambda: broker.ack_many(claims[1:5]),
            broker.counts,
            broker.topology.queues,
        ]
        for step in steps:
            raw = broker.database.engine.raw_connection()
            assert raw.driver_connection is not None
            raw.driver_connection.close()
            raw.close()
            step()
        assert len(broker.list(Filter(states=[State.RUNNING]))) == 16

    def test_lock_wait_ends(self, sql_store: Store) -> None:
        """A row that somebody else keeps locked is waited for, but not for ever; afterwards all is well."""
        import sqlalchemy as sa

        broker = self._open(sql_store, busy_timeout=0.5)
        put(broker)
        claim = take(broker)
        tasks = broker.tables.tasks
        engine = sql_store.engine()
        with engine.connect() as blocker:
            blocker.execute(sa.update(tasks).where(tasks.c.id == claim.id).values(owner="blocker"))
            outcomes: list[object] = []
            thread = threading.Thread(target=lambda: outcomes.append(_outcome(partial(broker.ack, claim))), daemon=True)
            thread.start()
            thread.join(DEADLINE / 2)
            waited_in_vain = thread.is_alive()
            blocker.rollback()
        thread.join(DEADLINE)
        assert not waited_in_vain, "the call did not come back while the row was locked"
        assert isinstance(outcomes[0], StoreUnavailable), outcomes
        broker.ack(claim)

    def test_heartbeats_have_a_connection(self, sql_store: Store) -> None:
        """With every pooled connection in use leases are renewed all the same; other calls say what to raise."""
        broker = self._open(sql_store, pool_size=1, pool_timeout=0.1)
        session = broker.open_session("w", 30)
        put(broker)
        claim = take(broker, session=session)
        with broker.database.engine.connect():
            assert broker.heartbeat(claim) > 0
            assert broker.heartbeat_many([claim]).lost == []
            assert broker.renew_session(session).held == {claim.id: claim.token}
            with pytest.raises(StoreUnavailable, match="pool_size"):
                put(broker)
        broker.ack(claim)

    def test_calm(self, sql_store: Store) -> None:
        """While anything runs, or the store can't tell, a lease may run out at any time; else not before its time."""
        broker = self._open(sql_store, lease_ttl=60, queue_lease_ttl={"quick": 20})
        assert broker.reap_in() == 0, "nobody has looked"
        broker.reap_expired()  # the first is a round in full
        put(broker)
        assert broker.reap_expired() == 0
        calm = broker.reap_in()
        assert calm == 0 or 10 < calm <= 20
        claim = take(broker)
        assert broker.reap_expired() == 0
        assert broker.reap_in() == 0
        broker.ack(claim)
        assert broker.reap_expired() == 0
        assert (broker.reap_in() == 0) == (calm == 0)
        if "mysql" not in broker.settings.url:
            assert calm > 0

    def test_when_a_lease_runs_out(self, sql_store: Store) -> None:
        """One look tells when the first lease will run out that nobody renews, of a session and without one."""
        broker = self._open(sql_store, lease_ttl=60, queue_lease_ttl={"quick": 20})
        broker.reap_expired()  # the first is a round in full
        put(broker)
        broker.reap_expired()
        assert broker.runs_out_in() == math.inf
        idle = broker.open_session("idle", 5)
        broker.reap_expired()
        assert broker.runs_out_in() == math.inf, "a session that holds nothing has nothing to lose"
        session = broker.open_session("w", 60)
        claim = take(broker, session=session)
        broker.reap_expired()
        assert 50 < broker.runs_out_in() <= 60
        # A session may end before a lease that was claimed late; the later of the two counts.
        broker.renew_session(Session(session.id, "w", 30))
        broker.reap_expired()
        assert 50 < broker.runs_out_in() <= 60
        put(broker, "quick")
        other = take(broker, "quick")
        broker.reap_expired()
        assert 10 < broker.runs_out_in() <= 20
        broker.ack(other)
        broker.ack(claim)
        broker.reap_expired()
        assert broker.runs_out_in() == math.inf
        broker.close_session(idle)

    def test_a_round_is_one_statement(self, sql_store: Store) -> None:
        """Idle or busy, while all live: a round of the reaper asks one thing, answers included."""
        from ..statements import noted

        broker = self._open(sql_store, lease_ttl=60)
        broker.reap_expired()  # the first is a round in full
        with noted(broker.database.engine) as seen:
            broker.reap_expired()
        assert len(seen) == 1, "idle"
        session = broker.open_session("w", 60)
        put_many(broker, 3)
        broker.dequeue([QUEUE], 2, session=session)
        take(broker)
        with noted(broker.database.engine) as seen:
            broker.reap_expired()
        assert len(seen) == 1, "busy"

    def test_reaper_repairs_blocked_rows(self, sql_store: Store, clock: FakeClock) -> None:
        """Blocked rows whose parents were ended or removed by hand are woken or canceled by the reaper."""
        import sqlalchemy as sa

        broker = self._open(sql_store, clock=clock)
        tasks = broker.tables.tasks
        removed, failed, alive = put_many(broker, 3)
        orphan = put(broker, "later", parents=[removed])
        doomed = put(broker, "later", parents=[failed])
        grandchild = put(broker, "later", parents=[doomed])
        patient = put(broker, "later", parents=[failed], fail_fast=False)
        waits = put(broker, "later", parents=[alive, removed])
        with broker.database.engine.connect() as conn:
            conn.execute(sa.delete(tasks).where(tasks.c.id == removed))
            conn.execute(sa.update(tasks).where(tasks.c.id == failed).values(state="failed", lane=0, finished_at=1))
        broker.reap_expired()
        assert {id: state_of(broker, id).value for id in (orphan, doomed, grandchild, patient, waits)} == {
            orphan: "pending",
            doomed: "canceled",
            grandchild: "canceled",
            patient: "pending",
            waits: "blocked",
        }

    # -- looks -------------------------------------------------------------------------------------

    def test_a_claim_does_not_tell_when_something_is_due(self, sql_store: Store) -> None:
        """Only a look does: whoever sleeps by what a look before the claim said sleeps too long."""
        broker = self._open(sql_store)
        assert broker.due_in([QUEUE]) == 0
        assert broker.dequeue([QUEUE]) == []
        assert broker.due_in([QUEUE]) == 0, "this was a claim"
        assert broker.dequeue([QUEUE]) == []
        assert broker.due_in([QUEUE]) == math.inf
        put(broker)
        take(broker)
        put(broker, delay=3600.0)
        assert broker.dequeue([QUEUE]) == []
        assert broker.due_in([QUEUE]) == 0, "this was a claim"
        assert broker.dequeue([QUEUE]) == []
        assert 0 < broker.due_in([QUEUE]) <= 3600.0

    # -- plan --------------------------------------------------------------------------------------

    @pytest.mark.slow
    def test_claim_uses_its_index(self, sql_store: Store) -> None:
        """With more than 50,000 rows a claim reads its index in order: no scan of the table, no sort."""
        import sqlalchemy as sa

        broker = self._open(sql_store)
        tasks = broker.tables.tasks
        for queue in range(10):
            put_many(broker, 100, f"queue {queue}", priority=queue % 3, payload=b"x" * 100)
        names = [column.name for column in tasks.columns if column.name != "id"]
        double = sa.insert(tasks).from_select(names, sa.select(*[tasks.c[name] for name in names]))
        with broker.database.engine.connect() as conn:
            for _ in range(6):
                conn.execute(double)
        assert sum(broker.counts().values()) == 64_000
        for _ in range(2):
            plan = broker.explain_claim("queue 5")
            assert f"{broker.tables.prefix}tasks_claim" in plan, plan
            assert not re.search(r"Seq Scan|\bSCAN\b|\bALL\b|\bSort\b|filesort|TEMP B-TREE", plan), plan
            # A claimed and acked part later the same has to hold.
            for _ in range(20):
                assert broker.ack_many(broker.dequeue(["queue 5"], 50)) == []

    # -- schema ------------------------------------------------------------------------------------

    def test_fresh_schema_equals_migrated(self, sql_store: Store) -> None:
        """Tables made at once and tables brought up version by version are the same; no step minds a repetition."""
        import sqlalchemy as sa

        from kombu_taskgate.core import migrations

        broker = self._open(sql_store)
        fresh = _schema(broker)
        migrations.drop(broker.database, broker.tables)
        for version in range(1, migrations.SCHEMA_VERSION + 1):
            assert migrations.upgrade(broker.database, broker.tables, to=version) == version
            # As if killed before the version was written, where DDL commits by itself.
            with broker.database.engine.connect() as conn:
                conn.execute(sa.update(broker.tables.version).values(version=version - 1))
            assert migrations.upgrade(broker.database, broker.tables, to=version) == version
        assert migrations.upgrade(broker.database, broker.tables) == migrations.SCHEMA_VERSION
        assert _schema(broker) == fresh
        assert put(broker) > 0

    def test_nothing_is_left_of_waits(self, sql_store: Store) -> None:
        """However a child ends, no wait of it is left, and what marked its parents goes with its time."""
        import sqlalchemy as sa

        clock = FakeClock()
        broker = self._open(sql_store, clock=clock)
        for name in ("a", "b", "unended"):
            put(broker, type="t", task_id=name)
        names = ["a", "b", "unended"]
        canceled = [put(broker, "canceled", type="t", depends_on=names) for _ in range(2)]
        put(broker, "purged", type="t", depends_on=names)
        put(broker, "failed", type="t", depends_on=names)
        put(broker, "woken", type="t", depends_on=["a"])
        put(broker, "tolerant", type="t", depends_on=["a", "b"], fail_fast=False)
        broker.cancel(canceled[0])
        assert len(broker.cancel_waiting([canceled[1]])) == 1
        assert broker.purge("purged") == 1
        broker.results.store(NewResult("a", "SUCCESS", Finality.SUCCEEDED, b"1", expires_in=1))
        broker.results.store(NewResult("b", "FAILURE", Finality.ENDED, b"1", expires_in=1))
        assert broker.queue_lens(["woken", "tolerant"]) == {"woken": 1, "tolerant": 1}
        clock.advance(WAIT_EXPIRES + 1)
        assert broker.results.sweep() == 3

        def left(conn: sa.Connection) -> list[int]:
            tables = (broker.tables.waits, broker.tables.results)
            return [conn.execute(sa.select(sa.func.count()).select_from(table)).scalar_one() for table in tables]

        assert broker.database.read(left) == [0, 0]

    def test_upgrade_adds_what_is_missing(self, sql_store: Store) -> None:
        """Tables as the first version made them get what later versions have added; what they hold stays."""
        from kombu_taskgate.core import migrations

        broker = self._open(sql_store)
        fresh = _schema(broker)
        id = put(broker, payload=b"old")
        _back_to_the_first(broker)
        assert _schema(broker) != fresh
        migrations.upgrade(broker.database, broker.tables)
        assert _schema(broker) == fresh
        assert (broker.get(id).payload, take(broker).id) == (b"old", id)

    def test_two_starters(self, sql_store: Store) -> None:
        """Processes that start together on an empty database make one schema, and all work at once."""
        import sqlalchemy as sa

        from kombu_taskgate.core import migrations

        first = self._open(sql_store)
        for _ in range(3):
            migrations.drop(first.database, first.tables)

            def start() -> int:
                return put(self._open(sql_store))

            outcomes = together([start] * 6)
            assert errors_of(outcomes) == []
            assert len(first.list()) == 6
            with first.database.engine.connect() as conn:
                versions = conn.execute(sa.select(first.tables.version.c.version)).scalars().all()
            assert versions == [migrations.SCHEMA_VERSION]

    def test_newer_schema_is_refused(self, sql_store: Store) -> None:
        """Tables of a newer version are not touched: the start is refused with both numbers."""
        import sqlalchemy as sa

        from kombu_taskgate.core import migrations

        broker = self._open(sql_store)
        newer = migrations.SCHEMA_VERSION + 1
        with broker.database.engine.connect() as conn:
            conn.execute(sa.update(broker.tables.version).values(version=newer))
        for create_tables in (True, False):
            with pytest.raises(SchemaError, match=f"{newer}.*{migrations.SCHEMA_VERSION}"):
                sql_store.open(create_tables=create_tables)
        with broker.database.engine.connect() as conn:
            conn.execute(sa.update(broker.tables.version).values(version=migrations.SCHEMA_VERSION))
        assert sql_store.open(create_tables=False).list() == []

    def test_create_tables_off(self, sql_store: Store) -> None:
        """Without the right to create tables a start on an empty database is refused, and says what is needed."""
        from kombu_taskgate.core import migrations

        broker = self._open(sql_store)
        migrations.drop(broker.database, broker.tables)
        with pytest.raises(SchemaError, match="create_tables"):
            sql_store.open(create_tables=False)

    def test_prefixes_are_apart(self, sql_store: Store, clock: FakeClock) -> None:
        """Two apps with prefixes of their own in one database never see each other."""
        from kombu_taskgate.core import migrations

        one = self._open(sql_store, clock=clock)
        two = self._open(sql_store, clock=clock, table_prefix=f"t{uuid.uuid4().hex[:12]}_")
        try:
            put(one, key="k")
            put(two, key="k", payload=b"two")
            assert take(two).payload == b"two"
            assert (one.queue_len(QUEUE), two.queue_len(QUEUE)) == (1, 0)
            clock.advance(100)
            assert one.reap_expired() == 0
        finally:
            migrations.drop(two.database, two.tables)
            two.close()
        assert len(one.list()) == 1

    # -- fork --------------------------------------------------------------------------------------

    def test_fork_in_mid_use(self, sql_store: Store) -> None:
        """A fork while the broker is in use: parent and child go on, each with connections of its own."""
        require(sql_store, FORK)
        broker = self._open(sql_store)
        stop = threading.Event()
        published: list[int] = []

        def publish() -> None:
            while not stop.is_set():
                published.append(put(broker, "parent"))

        def child() -> None:
            inherited = _descriptors()
            put(broker, "child")
            assert _descriptors() - inherited, "the child used a connection of its parent"
            for _ in range(9):
                put(broker, "child")
            claims = broker.dequeue(["child"], 4, timeout=30)
            assert broker.ack_many(claims) == []
            session = broker.open_session("child", 30)
            assert broker.renew_session(session).held == {}
            broker.close()

        threads = [threading.Thread(target=publish, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(1, 4):
                seen = len(published)
                wait_until(lambda seen=seen: len(published) > seen, "the parent publishes")  # type: ignore[misc]
                assert _in_child(child) == 0, "the child failed; its traceback is on standard error"
                assert broker.queue_len("child") == 6 * number
                assert all(thread.is_alive() for thread in threads)
        finally:
            stop.set()
            for thread in threads:
                thread.join(DEADLINE)
        assert sorted(published) == sorted(ids_of(broker.list(Filter(queue="parent", limit=10**6))))


def _descriptors() -> set[tuple[int, int, int]]:
    """The open files and sockets of this process, each with its number."""
    found = set()
    for number in range(3, 512):
        with suppress(OSError):
            status = os.fstat(number)
            found.add((number, status.st_dev, status.st_ino))
    return found


def _outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except TaskgateError as error:
        return error


def _in_child(work: Callable[[], None]) -> int:
    """Run work in a forked child; its exit status. A child that does not end is killed."""
    with warnings.catch_warnings():
        # Newer Pythons warn of forks with threads: that is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001  # the child must not go on into the test runner
            traceback.print_exc()
        finally:
            os._exit(status)
    give_up = time.monotonic() + DEADLINE
    while time.monotonic() < give_up:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -9
