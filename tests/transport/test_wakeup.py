"""How soon a consumer starts on what another process has published, and how seldom it asks for nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from kombu_taskgate.core.memory import MemoryBroker, MemoryStore
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker
from kombu_taskgate.core.watch import LOOK_ON
from kombu_taskgate.testing.stores import InDatabase
from kombu_taskgate.testing.threads import wait_until
from kombu_taskgate.transport import declared as declared_module
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
        self.seen: list[str] = []
        # The broker of a connection is a handle on the one that the process shares.
        sa.event.listen(broker.database.engine, "before_cursor_execute", self._note)

    def _note(self, conn, cursor, statement, parameters, context, executemany) -> None:
        self.seen.append(statement)

    def looks(self) -> int:
        return sum("AS place" in statement or "SKIP LOCKED" in statement for statement in self.seen)


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
    wait_until(lambda: engine._watch.live, "it listens")

    def calm() -> bool:
        before = len(statements.seen)
        time.sleep(2 * LOOK_ON)
        return len(statements.seen) == before

    wait_until(calm, "it does not look any more")


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
        wait_until(lambda: engine._untold, "it sleeps until it is told")
        silent.enqueue(NewTask("q", message("untold")))
        drain(connection, taken, 1)
        wait_until(lambda: doubts == [None], "it has the connection tested")
        elsewhere.enqueue(NewTask("q", message("told")))
        drain(connection, taken, 2)
        assert doubts == [None]
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

    def calm() -> bool:
        before = len(statements.seen)
        time.sleep(seconds)
        return len(statements.seen) == before

    wait_until(calm, "the tables are not read any more")


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
