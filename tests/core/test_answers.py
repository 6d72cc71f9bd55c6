"""Calls that get no answer end in time, over whatever driver."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from kombu_taskgate.core import patience as patience_module
from kombu_taskgate.core.errors import StoreUnavailable
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.patience import Patience
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker
from kombu_taskgate.testing.stores import InDatabase
from kombu_taskgate.testing.threads import wait_until
from tests import services
from tests.workers.harness import Proxy, proxy_for

#: Longer than a busy machine pauses, and what these tests wait for.
LIMIT = 4.0


class Hole:
    """A broker behind a proxy, and one that goes straight to the same tables."""

    def __init__(self, proxy: Proxy, broker: SqlBroker, straight: SqlBroker) -> None:
        self.proxy = proxy
        self.broker = broker
        self.straight = straight


@pytest.fixture(params=services.SQL_STORES[1:])
def hole(request: pytest.FixtureRequest) -> Iterator[Hole]:
    url = services.url_of_store(request.param, request)
    store = InDatabase(url)
    straight = store.open()
    with proxy_for(url, 5432 if url.startswith("postgresql") else 3306) as (proxy, through):
        settings = BrokerSettings(through, **store.settings, answer_timeout=LIMIT, connect_timeout=LIMIT, listen=False)
        broker = SqlBroker(settings)
        assert isinstance(straight, SqlBroker)
        yield Hole(proxy, broker, straight)
        broker.close()
    store.close()


def test_a_call_that_gets_no_answer_fails_and_the_next_one_works(hole: Hole) -> None:
    hole.broker.enqueue(NewTask("q"))
    hole.proxy.black_hole(True)
    with pytest.raises(StoreUnavailable):
        hole.broker.enqueue(NewTask("q"))
    hole.proxy.black_hole(False)
    id = hole.broker.enqueue(NewTask("q"))
    assert hole.straight.get(id).queue == "q"


def test_a_dead_connection_is_replaced_inside_the_call(hole: Hole) -> None:
    first = hole.broker.enqueue(NewTask("q"))
    session = hole.broker.open_session("me", 60.0)
    assert hole.proxy.forget() >= 1
    second = hole.broker.enqueue(NewTask("q"))
    hole.broker.renew_session(session)
    assert [task.id for task in hole.straight.list()] == [first, second]


def test_changing_tables_may_take_longer(hole: Hole) -> None:
    sleep = "pg_sleep" if hole.broker.database.dialect.notifies else "sleep"
    slow = f"SELECT {sleep}({LIMIT * 1.5})"
    hole.broker.database.transaction(lambda conn: conn.exec_driver_sql(slow).all(), schema=True)
    with pytest.raises(StoreUnavailable):
        hole.broker.database.transaction(lambda conn: conn.exec_driver_sql(slow).all())


def test_each_statement_of_a_transaction_has_the_whole_time(hole: Hole) -> None:
    sleep = "pg_sleep" if hole.broker.database.dialect.notifies else "sleep"
    slow = f"SELECT {sleep}({LIMIT * 0.55})"
    hole.broker.database.transaction(lambda conn: [conn.exec_driver_sql(slow).all() for _ in range(2)])


@pytest.mark.postgresql
def test_a_listening_connection_that_is_dead_as_well_is_found_out(postgresql_url: str) -> None:
    """Else work would be heard of only when somebody looks by himself, every poll_listening seconds."""
    store = InDatabase(postgresql_url)
    straight = store.open()
    told: list[object] = []
    with proxy_for(postgresql_url, 5432) as (proxy, through):
        broker = SqlBroker(BrokerSettings(through, **store.settings, answer_timeout=LIMIT, connect_timeout=LIMIT))
        watch = broker.watch(told.append)
        wait_until(lambda: watch.live, "it listens")
        proxy.forget()
        broker.enqueue(NewTask("mine"))
        wait_until(lambda: not watch.live, "it is found out")
        wait_until(lambda: watch.live, "it listens again")
        told.clear()
        straight.enqueue(NewTask("theirs"))
        wait_until(lambda: ["theirs"] in [list(queues) for queues in told if isinstance(queues, set)], "it hears")
        watch.close()
        broker.close()
    store.close()


# -- the watch itself ------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_the_socket_of_a_call_that_waits_too_long_is_shut_down(ends: tuple[socket.socket, socket.socket]) -> None:
    patience = Patience(lambda connection: int(connection.fileno()))
    with patience.limit(0.3) as call:
        call.on(ends[0])
        began = time.monotonic()
        assert ends[0].recv(1) == b""
        assert time.monotonic() - began >= 0.3


def test_a_call_that_gets_answers_goes_on(ends: tuple[socket.socket, socket.socket]) -> None:
    patience = Patience(lambda connection: int(connection.fileno()))
    with patience.limit(3600.0) as call:
        call.on(ends[0])
        call.since -= 3599.0
        patience.asked()  # of this thread: that call
        assert time.monotonic() - call.since < 3000
    ends[0].sendall(b"alive")
    assert ends[1].recv(5) == b"alive"


def test_its_thread_ends_when_there_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience_module, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(patience_module, "IDLE_LOOKS", 3)
    patience = Patience(lambda connection: -1)
    with patience.limit(1.0):
        thread = patience._thread
        assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    with patience.limit(1.0):
        assert patience._thread is not None, "the next call has a new one"
    wait_until(lambda: patience._thread is None, "that one ends as well")


def test_a_forked_child_has_its_own_watch(ends: tuple[socket.socket, socket.socket]) -> None:
    patience = Patience(lambda connection: int(connection.fileno()))
    with patience.limit(3600.0):
        pid = os.fork()
        if pid == 0:
            with patience.limit(0.1) as call:
                call.on(ends[0])
                os._exit(0 if ends[0].recv(1) == b"" else 1)
        assert os.waitpid(pid, 0)[1] == 0
