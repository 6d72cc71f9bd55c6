"""How soon a consumer starts on what another process has published, and how seldom it asks for nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from kombu_taskgate.core import quick
from kombu_taskgate.core.errors import StoreUnavailable
from kombu_taskgate.core.memory import MemoryBroker, MemoryStore
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker
from kombu_taskgate.core.watch import LOOK_ON
from kombu_taskgate.testing.statements import noted
from kombu_taskgate.testing.stores import InDatabase
from kombu_taskgate.testing.threads import DEADLINE, wait_until
from kombu_taskgate.transport import declared as declared_module
from kombu_taskgate.transport import looking as looking_module
from kombu_taskgate.transport.codec import Envelope, encode
from tests.transport.conftest import connections
from tests.transport.helpers import consuming, drain

#: Far longer than any test waits: what arrives was not found by looking from time to time.
NEVER = 3600.0


def message(text: str) -> bytes:
    return encode(Envelope(text.encode(), content_type="text/plain", content_encoding="utf-8"))


class Statements:
    """What one process sends to its database in the pump's and its helpers' threads."""

    def __init__(self, broker: SqlBroker) -> None:
        # The broker of a connection is a handle on the one that the process shares.
        self._noted = noted(broker.database.engine)
        self.seen = self._noted.__enter__()

    def looks(self) -> int:
        return sum("AS place" in statement or "SKIP LOCKED" in statement for statement in self.seen)


@pytest.fixture(autouse=True)
def nobody_observes_longer_than_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "observers", [])


# -- PostgreSQL ------------------------------------------------------------------------------------


@pytest.fixture
def store(postgresql_url: str) -> Iterator[InDatabase]:
    store = InDatabase(postgresql_url)
    yield store
    store.close()


@pytest.fixture
def connection(store: InDatabase):
    made = connections(f"taskgate+{store.url}", {**store.settings, "poll_listening": NEVER, "reap_interval": NEVER})
    yield next(made)()
    next(made, None)


@pytest.fixture
def elsewhere(store: InDatabase) -> SqlBroker:
    """Another process: what it publishes is told to nobody here by other ways than the database's."""
    return store.open()


def idle(connection, statements: Statements) -> None:
    """Wait until the consumer has stopped looking."""
    engine = connection.connection.engine
    wait_until(lambda: engine._looking.watch.live, "it listens")

    wait_until(lambda: calm(statements, 2 * LOOK_ON), "it does not look any more")


def calm(statements: Statements, seconds: float) -> bool:
    """Whether nothing is sent for a while; in steps, so that a pause of the whole process does not pass for calm."""
    before = len(statements.seen)
    for _ in range(20):
        time.sleep(seconds / 20)
        if len(statements.seen) != before:
            return False
    return True


@pytest.mark.postgresql
def test_an_idle_consumer_asks_for_nothing_and_is_woken(connection, elsewhere):
    with consuming(connection, "q") as taken:
        statements = Statements(connection.connection.broker)
        idle(connection, statements)
        for number, text in enumerate(("one", "two", "three"), 1):
            elsewhere.enqueue(NewTask("q", message(text)))
            drain(connection, taken, number)
        # One after the other, so quickly that not each is announced.
        for number in range(20):
            elsewhere.enqueue(NewTask("q", message(str(number))))
            time.sleep(0.01)
        drain(connection, taken, 23)
        idle(connection, statements)
        elsewhere.enqueue(NewTask("other", message("not ours")))
        before = statements.looks()
        time.sleep(2 * LOOK_ON)
        assert statements.looks() == before, "work of other queues is no reason to look"


@pytest.mark.postgresql
def test_an_idle_consumer_wakes_when_something_is_due(connection, elsewhere):
    with consuming(connection, "q") as taken:
        statements = Statements(connection.connection.broker)
        idle(connection, statements)
        elsewhere.enqueue(NewTask("q", message("later"), delay=3600.0))
        elsewhere.enqueue(NewTask("q", message("soon"), delay=3.0))
        idle(connection, statements)
        assert taken == []
        drain(connection, taken, 1)


@pytest.mark.postgresql
def test_work_that_nobody_told_of_is_found_and_makes_doubt(store, elsewhere, monkeypatch):
    doubts: list[None] = []
    monkeypatch.setattr("kombu_taskgate.core.listener._Watch.doubt", lambda watch: doubts.append(None))
    silent = store.open(listen=False)
    made = connections(f"taskgate+{store.url}", {**store.settings, "poll_listening": 2.0})
    connection = next(made)()
    with consuming(connection, "q") as taken:
        engine = connection.connection.engine
        wait_until(lambda: engine._looking.untold, "it sleeps until it is told")
        silent.enqueue(NewTask("q", message("untold")))
        drain(connection, taken, 1)
        wait_until(lambda: doubts == [None], "it has the connection tested")
        elsewhere.enqueue(NewTask("q", message("told")))
        drain(connection, taken, 2)
        assert doubts == [None]
    next(made, None)


def untold(elsewhere: SqlBroker, text: str) -> None:
    """Publish as if the queue had been announced a moment ago."""
    due = elsewhere._notifier.due
    elsewhere._notifier.due = lambda queues: []
    try:
        elsewhere.enqueue(NewTask("q", message(text)))
    finally:
        elsewhere._notifier.due = due


def filled(connection, elsewhere: SqlBroker, taken) -> None:
    """Wait until the only place is taken, and nobody looks because of it any more."""
    elsewhere.enqueue(NewTask("q", message("first")))
    drain(connection, taken, 1)
    engine = connection.connection.engine
    wait_until(lambda: time.monotonic() > engine._looking.on_until, "it does not look on")


@pytest.mark.postgresql
def test_what_is_delayed_while_there_is_no_room_is_found_when_it_is_due(connection, elsewhere):
    with consuming(connection, "q", prefetch=1) as taken:
        idle(connection, Statements(connection.connection.broker))
        filled(connection, elsewhere, taken)
        elsewhere.enqueue(NewTask("q", message("later"), delay=1.0))
        taken[0].ack()
        drain(connection, taken, 2)


@pytest.mark.postgresql
def test_who_hears_of_work_without_room_for_it_looks_on_all_the_same(connection, elsewhere, monkeypatch):
    monkeypatch.setattr(looking_module, "LOOK_ON", DEADLINE)
    with consuming(connection, "q", prefetch=1) as taken:
        engine = connection.connection.engine
        wait_until(lambda: engine._looking.watch.live, "it listens")
        elsewhere.enqueue(NewTask("q", message("first")))
        drain(connection, taken, 1)
        engine._looking.on_until = 0.0
        heard: list[object] = []
        wake = engine.wake
        monkeypatch.setattr(engine, "wake", lambda queues: heard.append(wake(queues)))
        wait_until(lambda: elsewhere._notifier.due(["q"]), "the queue is announced again")
        elsewhere.enqueue(NewTask("q", message("somebody else's")))
        assert len(elsewhere.dequeue(["q"])) == 1
        wait_until(lambda: heard, "it has heard")
        taken[0].ack()
        wait_until(
            lambda: engine._looking.found_nothing and engine.broker.due_in(["q"]) > 0, "it has found nothing, twice"
        )
        untold(elsewhere, "second")
        drain(connection, taken, 2)


@pytest.mark.postgresql
def test_a_look_that_took_long_is_not_the_last_one(connection, elsewhere, monkeypatch):
    with consuming(connection, "q") as taken:
        idle(connection, Statements(connection.connection.broker))
        engine = connection.connection.engine
        claim = engine.broker.ack_and_dequeue
        slow = iter([True])

        def claim_slowly(*args, **options):
            found = claim(*args, **options)
            if next(slow, False):
                untold(elsewhere, "too late for this look")
                wait_until(lambda: time.monotonic() > engine._looking.on_until, "the time to look on is over")
            return found

        monkeypatch.setattr(engine.broker, "ack_and_dequeue", claim_slowly)
        engine.wake(["q"])
        drain(connection, taken, 1)


@pytest.mark.postgresql
def test_a_look_that_failed_is_repeated(connection, elsewhere, monkeypatch):
    with consuming(connection, "q") as taken:
        idle(connection, Statements(connection.connection.broker))
        engine = connection.connection.engine
        claim = engine.broker.ack_and_dequeue
        failing = iter([True])

        def claim_or_fail(*args, **options):
            if next(failing, False):
                wait_until(lambda: time.monotonic() > engine._looking.on_until, "the time to look on is over")
                raise StoreUnavailable("no connection was free for long")
            return claim(*args, **options)

        monkeypatch.setattr(engine.broker, "ack_and_dequeue", claim_or_fail)
        elsewhere.enqueue(NewTask("q", message("told")))
        drain(connection, taken, 1)


@pytest.mark.postgresql
def test_what_somebody_held_while_it_was_looked_for_is_found_afterwards(connection, elsewhere):
    with consuming(connection, "q", prefetch=1) as taken:
        filled(connection, elsewhere, taken)
        untold(elsewhere, "second")
        task = elsewhere.tables.tasks
        with elsewhere.database.engine.connect() as other:
            # A claim that is about to fail with its process.
            other.exec_driver_sql("BEGIN")
            other.execute(sa.select(task.c.id).where(task.c.state == "pending").with_for_update())
            taken[0].ack()
            engine = connection.connection.engine
            wait_until(lambda: not engine._pending and engine._looking.found_nothing, "it has looked, and got nothing")
            other.exec_driver_sql("ROLLBACK")
        drain(connection, taken, 2)


@pytest.mark.postgresql
@pytest.mark.parametrize("prefetch", [0, 1])
def test_who_finds_what_nobody_told_of_does_not_count_on_being_told(store, monkeypatch, prefetch):
    """Publishers of an older version, or with listen=False."""
    silent = store.open(listen=False)
    made = connections(f"taskgate+{store.url}", {**store.settings, "poll_listening": 1.0})
    connection = next(made)()
    with consuming(connection, "q", prefetch=prefetch) as taken:
        engine = connection.connection.engine
        wait_until(lambda: engine._looking.untold, "it sleeps until it is told")
        monkeypatch.setattr("kombu_taskgate.core.listener._Watch.longest_pause", NEVER)
        silent.enqueue(NewTask("q", message("untold")))
        drain(connection, taken, 1)
        taken[0].ack()
        looked_on = time.monotonic() + LOOK_ON + 2 * engine.settings.poll_max
        wait_until(lambda: time.monotonic() > looked_on, "the time to look on is over")
        silent.enqueue(NewTask("q", message("untold too")))
        drain(connection, taken, 2)
    next(made, None)


# -- SQLite ----------------------------------------------------------------------------------------


def test_a_sqlite_consumer_reads_the_tables_only_after_somebody_wrote(tmp_path, monkeypatch):
    store = InDatabase(f"sqlite:///{tmp_path / 'q.db'}")
    elsewhere = store.open()
    made = connections(f"taskgate+{store.url}", {**store.settings, "reap_interval": NEVER, "lease_ttl": NEVER})
    connection = next(made)()
    with consuming(connection, "q") as taken:
        statements = Statements(connection.connection.broker)
        # Each look ends with a mark being compared; what is counted is those that went on to the tables.
        idle_looks(statements)
        for number, text in enumerate(("one", "two"), 1):
            elsewhere.enqueue(NewTask("q", message(text)))
            drain(connection, taken, number)
        elsewhere.enqueue(NewTask("q", message("due"), delay=1.5))
        idle_looks(statements, 0.5)
        assert len(taken) == 2
        drain(connection, taken, 3)
    next(made, None)
    store.close()


def idle_looks(statements: Statements, seconds: float = 1.0) -> None:
    """Wait until the tables have not been read for so long."""
    wait_until(lambda: calm(statements, seconds), "the tables are not read any more")


# -- noting who consumes ---------------------------------------------------------------------------


def test_who_slept_for_long_notes_its_consumers_again(monkeypatch):
    broker = MemoryBroker(BrokerSettings("memory://"), store=MemoryStore())
    now = [1000.0]
    monkeypatch.setattr(declared_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    declared = declared_module.Declared(broker)
    session = broker.open_session("me", 60.0)
    assert declared.keep(session, {"q": 1}) == declared_module.LONGEST
    assert broker.topology.consumers("q") == 1
    # As pruning does with the traces of a session that is long over.
    broker.topology.set_consumers(session, {"q": 0})
    now[0] += declared_module.LONGEST
    declared.keep(session, {"q": 1})
    assert broker.topology.consumers("q") == 0
    now[0] += 86400.0
    declared.keep(session, {"q": 1})
    assert broker.topology.consumers("q") == 1


@pytest.mark.postgresql
def test_what_a_claim_could_not_get_to_is_no_reason_to_sleep(connection, elsewhere):
    """So many have expired that one claim can't drop them all, and it comes back with nothing."""
    with consuming(connection, "q") as taken:
        idle(connection, Statements(connection.connection.broker))
        elsewhere.enqueue_many(
            [NewTask("q", b"x", expires_at=1) for _ in range(20_000)] + [NewTask("q", message("live"))]
        )
        drain(connection, taken, 1)


def test_a_consumer_that_begins_while_others_are_being_noted_is_noted_too(connect_memory):
    connection = connect_memory()
    channel = connection.channel()
    with consuming(connection, "q", channel=channel):
        engine, topology = connection.connection.engine, connection.connection.broker.topology
        wait_until(lambda: topology.consumers("q") == 1, "it is noted")
        real = engine._upkeep

        def begin_another() -> float:
            pause = real()
            engine._upkeep = real
            channel.basic_consume("late", no_ack=True)
            return pause

        engine._upkeep = begin_another
        channel.basic_consume("other", no_ack=True)
        wait_until(lambda: topology.consumers("late") == 1, "the late one is noted")
        assert topology.consumers("other") == 1
