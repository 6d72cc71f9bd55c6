"""Waiting for results that other processes store in a database with a server, whatever becomes of it (report B66)."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_ext import waiting
from kombu_taskgate.core.migrations import drop
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker
from kombu_taskgate.testing.stores import InDatabase
from tests.celery.results import close, make_app, succeed
from tests.workers.harness import ROOT, holds_for, wait_for
from tests.workers.servers import PrivatePgBouncer, PrivateServer
from tests.workers.victims import Victim

LONG = 30.0
MakeApp = Callable[..., Celery]


@pytest.fixture
def apps() -> Iterator[MakeApp]:
    """Make apps that share the tables of the test; each has connections of its own."""
    prefix = f"t{uuid.uuid4().hex[:10]}_"
    made: list[Celery] = []

    def make(url: str, **options: Any) -> Celery:
        options.setdefault("pool_timeout", 20.0 + len(made))
        made.append(make_app(BrokerSettings(url, table_prefix=prefix), options=options))
        return made[-1]

    yield make
    last = SqlBroker(BrokerSettings(made[0].backend.settings.url, table_prefix=prefix))
    for app in made:
        close(app)
    drop(last.database, last.tables)
    last.close()


def getting(app: Celery, id: str) -> Callable[[], Any]:
    """Get a result in a thread; returns what waits for its end."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(app.AsyncResult(id).get(timeout=60)), daemon=True)
    waiters = app.backend.result_consumer._waiters
    thread.start()
    wait_for(lambda: app.backend.result_consumer._waiters > waiters, LONG, "it waits")

    def done() -> Any:
        thread.join(LONG)
        assert found, "get() has not returned"
        return found[0]

    return done


def listens(app: Celery) -> bool:
    watch = app.backend.result_consumer._watch
    return watch is not None and watch.live


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks by itself: what is found was told of."""
    monkeypatch.setattr(waiting, "LOOK_ANYWAY", 3600.0)
    monkeypatch.setattr(waiting, "LOOK_ON", 0.1)


def count_looks(app: Celery) -> list[int]:
    results = app.backend.broker.results
    looks: list[int] = []
    original = results.get
    results.get = lambda ids, **how: looks.append(len(ids)) or original(ids, **how)
    return looks


@pytest.mark.postgresql
@pytest.mark.usefixtures("seldom")
def test_a_notification_wakes_and_nothing_else_looks(apps: MakeApp, postgresql_url: str) -> None:
    """B66: whoever waits on PostgreSQL sends nothing, and is woken by the process that stores the result."""
    app, other = apps(postgresql_url), apps(postgresql_url)
    done = getting(app, "one")
    wait_for(lambda: listens(app), LONG, "it listens")
    # Just after it has begun to wait, and to listen, it looks now and then.
    look = app.backend.result_consumer
    wait_for(lambda: look._pause == waiting.LOOK_ANYWAY, LONG, "it looks seldom")
    looks = count_looks(app)
    holds_for(lambda: not looks, 1.5, "it does not look")
    succeed(other, "another")
    holds_for(lambda: not looks, 0.3, "it does not look for what others wait for")
    succeed(other, "one", 1)
    assert done() == 1
    assert looks == [1]


@pytest.mark.postgresql
@pytest.mark.usefixtures("seldom")
def test_a_listening_session_that_is_ended(victim: Victim, server_url: str, apps: MakeApp) -> None:
    """B66: it is replaced, and what came meanwhile is looked for."""
    # Which sessions are its own shows in their name here, and in their database there.
    app, other = apps(victim.url), apps(server_url if server_url.startswith("postgresql") else victim.url)
    done = getting(app, "one")
    if server_url.startswith("postgresql"):
        wait_for(lambda: listens(app), LONG, "it listens")
    wait_for(victim.kill_sessions, LONG, "its sessions are ended")
    succeed(other, "one", 1)
    assert done() == 1
    done = getting(app, "two")
    if server_url.startswith("postgresql"):
        wait_for(lambda: listens(app), LONG, "it listens again")
    succeed(other, "two", 2)
    assert done() == 2


@pytest.mark.postgresql
def test_without_listening(apps: MakeApp, postgresql_url: str) -> None:
    """With listen=False it is asked for."""
    app, other = apps(postgresql_url, listen=False), apps(postgresql_url)
    done = getting(app, "one")
    succeed(other, "one", 1)
    assert done() == 1
    assert not listens(app)


@pytest.mark.postgresql
def test_behind_a_proxy_that_pools(pgbouncer: PrivatePgBouncer, apps: MakeApp) -> None:
    """Where no notification arrives it is asked for."""
    app, other = apps(pgbouncer.url), apps(pgbouncer.url)
    done = getting(app, "one")
    succeed(other, "one", 1)
    assert done() == 1


@pytest.mark.postgresql
def test_threads_that_wait_share_their_connections(apps: MakeApp, postgresql_url: str) -> None:
    """Fifty of them need no more sessions than one: one that looks and one that listens."""
    mark = f"waits_{uuid.uuid4().hex[:8]}"
    url = f"{postgresql_url}{'&' if '?' in postgresql_url else '?'}application_name={mark}"
    app, other = apps(url), apps(postgresql_url)
    ids = [f"{number}" for number in range(50)]
    all_done = [getting(app, id) for id in ids]
    wait_for(lambda: listens(app), LONG, "it listens")
    with other.backend.broker.database.engine.connect() as conn:
        query = "select count(*) from pg_stat_activity where application_name = %s"
        # One that was closed is listed until the server's process has ended.
        wait_for(lambda: conn.exec_driver_sql(query, (mark,)).scalar_one() <= 3, LONG, "no more sessions than that")
    for number, id in enumerate(ids):
        succeed(other, id, number)
    assert [done() for done in all_done] == list(range(50))


@pytest.mark.slow
def test_a_restart_while_results_are_stored_and_waited_for(private_server: PrivateServer, apps: MakeApp) -> None:
    """Nothing is lost: who stores tries again, and who waits goes on."""
    app, other = apps(private_server.url), apps(private_server.url)
    succeed(other, "zero")
    done = getting(app, "one")
    private_server.stop()
    storing = threading.Thread(target=lambda: succeed(other, "one", 1), daemon=True)
    storing.start()
    holds_for(storing.is_alive, 0.5, "it tries again")
    private_server.start()
    storing.join(LONG)
    assert not storing.is_alive()
    assert done() == 1
    assert app.AsyncResult("one").get(timeout=LONG) == 1


GREEN = """
import sys
from {kind} import {patch}
from celery import Celery
app = Celery("green", broker="memory://", backend=sys.argv[1])
app.conf.result_backend_transport_options = {{"table_prefix": sys.argv[2]}}
def get(number): return app.AsyncResult(str(number)).get(timeout=30)
def store():
    for number in range(20): app.backend.store_result(str(number), number, "SUCCESS")
{run}
assert got == list(range(20)), got
app.backend.result_consumer.stop()
app.backend.broker.close()
print("all", len(got))
"""
GEVENT = GREEN.format(
    kind="gevent", patch="monkey; monkey.patch_all()",
    run="import gevent\nall = [gevent.spawn(get, n) for n in range(20)]\ngevent.sleep(0.3)\ngevent.spawn(store)\n"
    "gevent.joinall(all)\ngot = [one.value for one in all]",
)  # fmt: skip
EVENTLET = GREEN.format(
    kind="eventlet", patch="monkey_patch; monkey_patch()",
    run="import eventlet\nall = [eventlet.spawn(get, n) for n in range(20)]\neventlet.sleep(0.3)\n"
    "eventlet.spawn(store)\ngot = [one.wait() for one in all]",
)  # fmt: skip


@pytest.mark.parametrize("code", [pytest.param(GEVENT, id="gevent"), pytest.param(EVENTLET, id="eventlet")])
def test_greenlets(main_url: str, code: str) -> None:
    """Twenty greenlets wait side by side, and one that stores wakes them."""
    prefix = f"t{uuid.uuid4().hex[:10]}_"
    command = [sys.executable, "-W", "ignore", "-c", code, f"taskgate+{main_url}", prefix]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    broker = SqlBroker(BrokerSettings(main_url, table_prefix=prefix))
    drop(broker.database, broker.tables)
    broker.close()
    assert done.stdout.strip() == "all 20", done.stderr[-3000:]


FORK = """
import os, sys
from celery import Celery
app = Celery("fork", broker="memory://", backend=sys.argv[1])
app.conf.result_backend_transport_options = {"table_prefix": sys.argv[2]}
app.backend.store_result("before", 1, "SUCCESS")
assert app.AsyncResult("before").get(timeout=30) == 1
kept = app.AsyncResult("kept")
kept.then(lambda ready: None)
child = os.fork()
app.backend.store_result("kept" if child == 0 else "mine", 2, "SUCCESS")
got = kept.get(timeout=30) + app.AsyncResult("mine").get(timeout=30)
if child == 0:
    os._exit(0 if got == 4 else 1)
assert got == 4
assert os.waitpid(child, 0)[1] == 0
app.backend.result_consumer.stop()
app.backend.broker.close()
print("both")
"""


def test_a_child_of_a_process_that_has_waited(main_url: str) -> None:
    """Both get their results, over connections of their own."""
    prefix = f"t{uuid.uuid4().hex[:10]}_"
    command = [sys.executable, "-W", "ignore", "-c", FORK, f"taskgate+{main_url}", prefix]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    broker = SqlBroker(BrokerSettings(main_url, table_prefix=prefix))
    drop(broker.database, broker.tables)
    broker.close()
    assert done.stdout.strip() == "both", done.stderr[-3000:]


@pytest.mark.parametrize("sql_store_name", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def test_expired_results_are_found_by_their_index(sql_store: InDatabase, tmp_path: Path) -> None:
    """B71: what lives is not read to find what has expired."""
    with_rows = SqlBroker(BrokerSettings(sql_store.url, **sql_store.settings))
    results = with_rows.results
    table = results._sql.tables.results

    def fill(conn: Any) -> None:
        row = {"status": "SUCCESS", "finality": 2, "stored_at": 0, "payload": b"1"}
        conn.execute(table.insert(), [{**row, "task_id": str(n), "expires_at": 2**50 + n} for n in range(2000)])

    with_rows.database.write(fill)
    with with_rows.database.engine.connect() as conn:
        conn.exec_driver_sql("ANALYZE")
        plan = with_rows.database.dialect.explain(
            conn, results._sql.pick_expired_results, results._sql.time(p_limit=1000)
        )
    assert "results_expires" in plan
    assert results.sweep() == 0
    with_rows.close()
