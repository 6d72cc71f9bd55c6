"""Sessions that are ended, servers that restart, and nodes that turn read-only, under load (reports B16, B97)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg
import pymysql
import pytest
import sqlalchemy as sa
from kombu.exceptions import OperationalError

from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, Worker, proxy_for, wait_for
from tests.workers.servers import PrivatePostgres, PrivateServer

pytestmark = pytest.mark.crash

POOLS = {"prefork": ("-c2",), "threads": ("-c2", "-Pthreads"), "solo": ("-Psolo",)}


class Load:
    """Publishes until it is told to stop; knows what was published for certain, and what may have been."""

    def __init__(self, lab: Lab, pause: float = 0.03) -> None:
        self.lab = lab
        self.ids: list[str] = []
        self.failures: list[Exception] = []
        self._pause = pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish)

    def _publish(self) -> None:
        while not self._stop.is_set():
            try:
                self.ids.append(self.lab.send("work", 0.02, retry=False))
            except Exception as error:
                self.failures.append(error)
            self._stop.wait(self._pause)

    @contextmanager
    def running(self) -> Iterator[Load]:
        self._thread.start()
        try:
            wait_for(lambda: self.lab.journal.ends() >= 5, 30, "the load runs")
            yield self
        finally:
            self._stop.set()
            self._thread.join(60)


def end_sessions(url: str) -> int:
    """End every session of the database's clients but this one; returns how many there were."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "postgresql":
        with psycopg.connect(url) as connection:
            query = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = %s"
            )
            return len(connection.execute(query, [parsed.database]).fetchall())
    with pymysql.connect(host="127.0.0.1", port=parsed.port or 3306, user="root") as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT id FROM information_schema.processlist WHERE id <> connection_id() AND db IS NOT NULL")
        ids = [row[0] for row in cursor.fetchall()]
        for id in ids:
            with suppress(pymysql.err.OperationalError):
                cursor.execute(f"KILL {id}")
        return len(ids)


def check_afterwards(lab: Lab, load: Load, workers: list[Worker]) -> None:
    """The same processes do everything, once, and answer."""
    since = time.time()
    later = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(later), 30, "what is published afterwards starts soon")
    wait_for(lambda: lab.journal.ended() >= set(load.ids), 30, "nothing is lost")
    wait_for(lambda: not lab.rows(), 30, "all is settled, and nothing is a dead letter")
    assert set(lab.journal.starts_each().values()) == {1}, "something was started twice"
    names = {worker.name for worker in workers}
    wait_for(lambda: {n for reply in lab.app.control.ping(timeout=1) for n in reply} == names, 30, "all can be asked")
    assert all(worker.alive for worker in workers)
    assert all(line["time"] >= since for line in lab.journal.of("start", later))
    assert all(isinstance(failure, OperationalError) for failure in load.failures), load.failures


@pytest.fixture(params=["postgresql", "mysql"])
def own_database(request: pytest.FixtureRequest, private_servers: Callable[[str], PrivateServer]) -> str:
    """A server of this file's own: its sessions are all the test's to end."""
    return private_servers(request.param).url


@pytest.mark.parametrize("pool", POOLS)
def test_sessions_that_are_ended_again_and_again(own_database: str, pool: str, make_lab: MakeLab) -> None:
    """B16: three times within three seconds, while tasks are published and run."""
    lab = make_lab(own_database)
    worker = lab.start_worker(*POOLS[pool])
    load = Load(lab)
    ended: list[int] = []
    with load.running():
        for _ in range(3):
            seen = lab.journal.ends()
            ended.append(end_sessions(own_database))
            with suppress(AssertionError):  # the next one comes within a second, also when nothing goes on until then
                wait_for(lambda seen=seen: lab.journal.ends() > seen + 2, 1, "it goes on")
        wait_for(lambda: lab.journal.ends() > seen, 30, "it goes on after the last one")
    assert ended[0] >= 2
    check_afterwards(lab, load, [worker])
    assert worker.text().count("Connected to") == 1, "the engine did it; Celery had no need to connect again"


STOPS = {
    "postgresql-fast": ("postgresql", signal.SIGINT),
    "postgresql-immediate": ("postgresql", signal.SIGQUIT),
    "mysql": ("mysql", signal.SIGTERM),
}


@pytest.mark.parametrize("stop", STOPS)
def test_restart_under_load(stop: str, make_lab: MakeLab, private_servers: Callable[[str], PrivateServer]) -> None:
    """B97, with tasks that are published and run all the while."""
    kind, number = STOPS[stop]
    server = private_servers(kind)
    lab = make_lab(server.url)
    worker = lab.start_worker("-c2")
    load = Load(lab)
    with load.running():
        server.stop(number)
        wait_for(lambda: len(load.failures) >= 2, 30, "publishers are told")
        server.start()
        seen = lab.journal.ends()
        wait_for(lambda: lab.journal.ends() > seen + 5, 30, "it goes on")
    check_afterwards(lab, load, [worker])


def test_node_that_turns_read_only(make_lab: MakeLab, private_servers: Callable[[str], PrivateServer]) -> None:
    """As in a fail-over: for a while the address leads to a node that takes no writes."""
    server = private_servers("postgresql")
    assert isinstance(server, PrivatePostgres)
    lab = make_lab(server.url)
    worker = lab.start_worker("-c2")
    gate = lab.folder / "gate"
    held = [lab.send("hold_until", str(gate))]
    wait_for(lambda: lab.journal.starts(held[0]), 30, "one is running")
    load = Load(lab)
    with load.running():
        read_only(server, on=True)
        wait_for(lambda: len(load.failures) >= 5, 30, "publishers are told")
        gate.touch()
        wait_for(lambda: lab.journal.ends(held[0]), 30, "what runs ends")
        wait_for(lambda: "can't be used just now" in worker.text(), 30, "the worker waits")
        read_only(server, on=False)
        seen = lab.journal.ends()
        wait_for(lambda: lab.journal.ends() > seen + 5, 30, "it goes on")
    check_afterwards(lab, load, [worker])


def read_only(server: PrivatePostgres, *, on: bool) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
        connection.execute("SELECT pg_reload_conf()")


def test_connections_that_are_cut_by_something_between(server_url: str, make_lab: MakeLab) -> None:
    """A proxy that restarts: connections are reset, in the middle of whatever they were at."""
    with proxy_for(server_url, 5432 if server_url.startswith("postgresql") else 3306) as (proxy, url):
        lab = make_lab(server_url)
        worker = lab.start_worker("-c2", url=url)
        load = Load(lab, pause=0.01)
        with load.running():
            for _ in range(10):
                seen = lab.journal.ends()
                wait_for(proxy.cut, 30, "it has connected again, and is cut again")
                wait_for(lambda seen=seen: lab.journal.ends() > seen + 2, 30, "it goes on")
        check_afterwards(lab, load, [worker])
