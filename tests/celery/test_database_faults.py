"""Databases that fail, restart, forget connections or are locked (reports B96, B97, B98, B103)."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kombu_taskgate.core.database import InjectedDeadlock, InjectedDisconnect
from kombu_taskgate.core.errors import StoreUnavailable
from kombu_taskgate.core.model import Lease, NewTask
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker
from tests.workers.fixtures import MakeLab
from tests.workers.harness import wait_for
from tests.workers.servers import PrivateServer
from tests.workers.victims import Victim

pytestmark = pytest.mark.crash


def sql_broker(lab_url: str, prefix: str, **settings: object) -> SqlBroker:
    return SqlBroker(BrokerSettings(lab_url, table_prefix=prefix, **settings))  # type: ignore[arg-type]


CALLS: dict[str, Callable[[SqlBroker, Lease], object]] = {
    "put": lambda broker, lease: broker.enqueue(NewTask("q")),
    "get": lambda broker, lease: broker.dequeue(["q"]),
    "ack": lambda broker, lease: broker.ack(lease),
    "heartbeat": lambda broker, lease: broker.heartbeat(lease),
}


@pytest.mark.parametrize("call", CALLS)
def test_one_failing_statement_leaves_nothing_broken(make_lab: MakeLab, database_url: str, call: str) -> None:
    """B96: after an error inside a transaction the very next call in the process works."""
    lab = make_lab(database_url)
    broker = sql_broker(database_url, lab.options["table_prefix"])
    broker.enqueue_many([NewTask("q"), NewTask("q")])
    lease = broker.dequeue(["q"])[0]

    def fail_once(point: str) -> None:
        broker.database.fault = None
        with broker.database.engine.connect() as conn:
            conn.exec_driver_sql("select * from a_table_that_is_not_there")

    broker.database.fault = fail_once
    with pytest.raises(Exception, match="a_table_that_is_not_there"):
        CALLS[call](broker, lease)
    CALLS[call](broker, lease)
    broker.close()


@pytest.mark.parametrize(
    ("fault", "point"),
    [
        (InjectedDeadlock, "before_commit"),  # a deadlock is told before the commit
        (InjectedDisconnect, "before_commit"),
        (InjectedDisconnect, "after_commit"),
    ],
)
@pytest.mark.parametrize("call", CALLS)
def test_injected_faults_are_repaired_inside(
    make_lab: MakeLab, database_url: str, call: str, point: str, fault: type[Exception]
) -> None:
    """A deadlock, and a connection that breaks before or in COMMIT: done once, and the caller sees nothing."""
    lab = make_lab(database_url)
    broker = sql_broker(database_url, lab.options["table_prefix"])
    broker.enqueue_many([NewTask("q"), NewTask("q")])
    lease = broker.dequeue(["q"])[0]
    fired = []

    def strike(where: str) -> None:
        if where == point and not fired:
            fired.append(where)
            raise fault

    broker.database.fault = strike
    result = CALLS[call](broker, lease)
    assert fired
    states = sorted(row.state.value for row in broker.list())
    expected = {
        "put": ["pending", "pending", "running"],
        "get": ["running", "running"],
        "ack": ["pending"],
        "heartbeat": ["pending", "running"],
    }
    assert states == expected[call]
    if call == "get":
        assert isinstance(result, list)
        assert broker.ack_many(result) == []
    broker.close()


@pytest.mark.parametrize("call", CALLS)
def test_killed_sessions_are_replaced(victim: Victim, make_lab: MakeLab, call: str) -> None:
    """B96, B98: all idle sessions are gone: the next call works, and nothing is done twice."""
    lab = make_lab(victim.url)
    broker = sql_broker(victim.url, lab.options["table_prefix"])
    broker.enqueue_many([NewTask("q"), NewTask("q")])
    lease = broker.dequeue(["q"])[0]
    broker.heartbeat(lease)
    assert victim.kill_sessions() >= 2
    CALLS[call](broker, lease)
    assert len(broker.list()) == {"put": 3, "get": 2, "ack": 1, "heartbeat": 2}[call]
    broker.close()


def test_idle_worker_and_publisher_survive_killed_sessions(victim: Victim, make_lab: MakeLab) -> None:
    """B98: the sessions of an idle worker are killed three times; publishing and working go on."""
    lab = make_lab(victim.url, lease_ttl=10.0)
    worker = lab.start_worker("-c1")
    for _ in range(3):
        id = lab.send("work", 0)
        wait_for(lambda id=id: lab.journal.ends(id), 30, "work")
        assert victim.kill_sessions() >= 1
    id = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(id), 30, "work after the last kill")
    wait_for(lambda: not lab.rows(), 30, "all settled")
    assert lab.journal.starts() == 4
    assert worker.alive


def test_restart_under_an_idle_and_a_busy_worker(make_lab: MakeLab, private_server: PrivateServer) -> None:
    """B97: same processes, consuming again, and what ran is not run again."""
    lab = make_lab(private_server.url, lease_ttl=30.0)  # a server may take some time to start
    workers = [lab.start_worker("-c1") for _ in range(2)]
    gate = lab.folder / "gate"
    busy = lab.send("hold_until", str(gate))
    wait_for(lambda: lab.journal.starts(busy), 30, "busy")
    private_server.stop()
    gate.touch()
    wait_for(lambda: lab.journal.ends(busy), 30, "it ends while the server is down")
    private_server.start()
    ids = [wait_for(lambda: publish(lab.send), 30, "publish") for _ in range(6)]
    wait_for(lambda: lab.journal.ended() >= {busy, *ids}, 30, "all ran")
    wait_for(lambda: not lab.rows(), 30, "all settled")
    assert set(lab.journal.starts_each().values()) == {1}
    assert all(worker.alive for worker in workers)


def publish(send: Callable[..., str]) -> str | None:
    try:
        return send("work", 0.1, retry=False)
    except Exception:
        return None


def test_errors_are_connection_errors(tmp_path: Path) -> None:
    """B97: what an outage raises is what kombu and Celery retry."""
    from kombu import Connection

    connection = Connection(f"taskgate+sqlite:///{tmp_path}/broker.db")
    assert StoreUnavailable in connection.connection_errors
    assert StoreUnavailable in connection.recoverable_connection_errors
    connection.release()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_foreign_writer_on_the_file_harms_nobody(make_lab: MakeLab, tmp_path: Path) -> None:
    """B103: 4 workers, 4 publishers, and a foreign writer that holds the lock for 3 s again and again."""
    held = 0
    path = tmp_path / "broker.db"
    lab = make_lab(f"sqlite:///{path}", lease_ttl=15.0)
    workers = [lab.start_worker("-c1", ready=False) for _ in range(4)]
    for worker in workers:
        worker.wait_ready(60)
    stop = threading.Event()
    ids: list[str] = []
    failures: list[Exception] = []

    def produce() -> None:
        app = lab.make_app()
        while not stop.is_set():
            try:
                ids.append(lab.send("work", 0, app=app))
            except Exception as error:
                failures.append(error)
            stop.wait(0.05)
        app.close()

    def hold_lock() -> None:
        foreign = sqlite3.connect(path, timeout=30, isolation_level=None)
        nonlocal held
        while not stop.wait(1):
            foreign.execute("BEGIN IMMEDIATE")
            stop.wait(3)
            foreign.execute("COMMIT")
            held += 1
        foreign.close()

    threads = [threading.Thread(target=produce) for _ in range(4)] + [threading.Thread(target=hold_lock)]
    for thread in threads:
        thread.start()
    wait_for(lambda: held >= 3 and len(ids) > 100, 90, "the lock was held three times under load")
    stop.set()
    for thread in threads:
        thread.join(60)
    wait_for(lambda: lab.journal.ended() >= set(ids), 60, "all ran")
    wait_for(lambda: not lab.rows(), 30, "all settled")
    assert failures == []
    assert set(lab.journal.starts_each().values()) == {1}, "a lease was lost"
    assert not any("is locked" in worker.text() for worker in workers)
    assert all(worker.alive for worker in workers)
