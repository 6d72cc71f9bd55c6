"""How many connections there are, and what happens when they are too few (reports B56, B110)."""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator

import psycopg
import pytest
import sqlalchemy as sa

from tests.workers.fixtures import MakeLab
from tests.workers.harness import wait_for
from tests.workers.servers import PrivatePostgres

#: Half of pool_size (10) is kept open when idle; one more is reserved for renewals.
KEPT, RESERVED = 5, 1
#: Of leases that are to be renewed while threads take turns with few connections; more than a busy machine may pause.
TTL = 5.0


class Sessions:
    """The server's sessions of one worker, told from others by its own user of the database."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._user = f"u{uuid.uuid4().hex[:10]}"
        parsed = sa.make_url(url)
        self._postgresql = parsed.get_backend_name() == "postgresql"
        self._engine = sa.create_engine(  # noqa: TID251  # to look from outside
            parsed.set(drivername="postgresql+psycopg" if self._postgresql else "mysql+pymysql"),
            isolation_level="AUTOCOMMIT",
        )
        if self._postgresql:
            self._do(f"CREATE ROLE {self._user} SUPERUSER LOGIN")
        else:
            self._do(f"CREATE USER {self._user}@'127.0.0.1'")
            self._do(f"GRANT ALL ON *.* TO {self._user}@'127.0.0.1'")
        self.url = parsed.set(username=self._user, password=None).render_as_string(hide_password=False)

    def _do(self, statement: str) -> None:
        with self._engine.connect() as conn:
            conn.exec_driver_sql(statement)

    def count(self) -> int:
        query = (
            f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{self._user}'"
            if self._postgresql
            else f"SELECT count(*) FROM information_schema.processlist WHERE user = '{self._user}'"
        )
        with self._engine.connect() as conn:
            return int(conn.exec_driver_sql(query).scalar_one())

    def close(self) -> None:
        wait_for(lambda: self.count() == 0, 30, "the worker's sessions are gone")
        self._do(f"DROP ROLE {self._user}" if self._postgresql else f"DROP USER {self._user}@'127.0.0.1'")
        self._engine.dispose()


@pytest.fixture
def sessions(server_url: str) -> Iterator[Sessions]:
    sessions = Sessions(server_url)
    yield sessions
    sessions.close()


def test_sessions_of_a_worker(sessions: Sessions, server_url: str, make_lab: MakeLab) -> None:
    """B110: the formula in docs/outages.md. A pool process has none until it publishes, and one then."""
    lab = make_lab(server_url)
    worker = lab.start_worker("-c16", url=sessions.url)
    listening = 1 if server_url.startswith("postgresql") else 0
    most = KEPT + RESERVED + listening
    wait_for(lambda: 1 <= sessions.count() <= most, 30, f"at most {most} at start")
    quiet = [lab.send("work", 0) for _ in range(60)]
    wait_for(lambda: lab.journal.ended() >= set(quiet), 30, "tasks that publish nothing")
    wait_for(lambda: not lab.rows(), 30, "all settled")
    wait_for(lambda: sessions.count() <= most, 30, f"its pool has opened no more than {most}")
    for _ in range(60):
        lab.send("publish", "x")
    wait_for(lambda: len([line for line in lab.journal.of("end") if line.get("tag") == "x"]) == 60, 30, "all ran")
    wait_for(lambda: sessions.count() <= most + 16, 30, "one more for each process that has published")
    worker.kill()


def test_few_connections_and_many_threads(sessions: Sessions, server_url: str, make_lab: MakeLab) -> None:
    """B110: 20 threads share two connections with the engine; leases are renewed over another, beyond their time."""
    lab = make_lab(server_url, pool_size=2, lease_ttl=TTL)
    worker = lab.start_worker("-c20", "-Pthreads", url=sessions.url)
    gate = lab.folder / "gate"
    held = [lab.send("hold_until", str(gate)) for _ in range(4)]
    wait_for(lambda: lab.journal.starts() == 4, 30, "four are running all the while")
    running = time.monotonic()
    for _ in range(150):
        lab.send("publish", "x")
    wait_for(lambda: len([line for line in lab.journal.of("end") if line.get("tag") == "x"]) == 150, 40, "all ran")
    listening = 1 if server_url.startswith("postgresql") else 0
    wait_for(lambda: sessions.count() <= 2 + RESERVED + listening, 30, "and no more connections than that")
    wait_for(lambda: time.monotonic() > running + 1.5 * TTL, 2 * TTL, "leases that nobody renewed are over")
    gate.touch()
    wait_for(lambda: lab.journal.ended() >= set(held), 30, "the four end")
    wait_for(lambda: not lab.rows(), 30, "all settled")
    assert set(lab.journal.starts_each().values()) == {1}, "a lease was lost"
    assert worker.alive
    worker.kill()


# -- over TLS --------------------------------------------------------------------------------------


@pytest.fixture
def tls_server(postgresql_url: str) -> Iterator[PrivatePostgres]:  # skips where there is none
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the server's certificate")
    server = PrivatePostgres()
    key, certificate = server.data / "server.key", server.data / "server.crt"
    command = ["openssl", "req", "-new", "-x509", "-days", "2", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    for file in (key, certificate):
        file.chmod(0o600)
        if server.user is not None:
            shutil.chown(file, server.user)
    with psycopg.connect(server.url, autocommit=True) as connection:
        if connection.execute("SHOW ssl_library").fetchone() == ("",):
            server.close()
            pytest.skip("this PostgreSQL was built without TLS")
        connection.execute("ALTER SYSTEM SET ssl = on")
        connection.execute("SELECT pg_reload_conf()")
    yield server
    server.close()


def test_children_use_no_connection_of_their_parent(tls_server: PrivatePostgres, make_lab: MakeLab) -> None:
    """B56: an app that publishes when it is imported, over TLS, which two processes would break."""
    lab = make_lab(tls_server.url)
    url = f"{tls_server.url}?sslmode=require"
    worker = lab.start_worker("-c4", url=url, TASKGATE_TEST_PUBLISH="at import")
    for _ in range(300):
        lab.send("publish", "x")
    wait_for(lambda: len([line for line in lab.journal.of("end") if line.get("tag") == "x"]) >= 300, 60, "all ran")
    wait_for(lambda: [line for line in lab.journal.of("end") if line.get("tag") == "at import"], 30, "that one too")
    # What was open at the fork is open in a child as well; there nobody reads or writes it.
    parents = ports(worker.pid, tls_server.port)

    def of_children() -> list[set[int]]:
        own = [ports(pid, tls_server.port) - parents for pid in worker.children()]
        if not all(own):
            lab.send("publish", "x")  # it may come to one that has had none yet
        return own if all(own) else []

    own = wait_for(of_children, 60, "each has published over a connection of its own", every=0.1)
    wait_for(lambda: not lab.rows(), 30, "all settled")
    assert sum(map(len, own)) == len(set().union(*own)), f"shared: {own}"
    assert encrypted(tls_server) >= len(parents) + len(own)
    assert "Traceback" not in worker.text()
    assert "can't be used just now" not in worker.text()
    assert set(lab.journal.starts_each().values()) == {1}


def ports(pid: int, server: int) -> set[int]:
    """Client ports of the connections that a process has to the server: one for each session."""
    import psutil

    connections = psutil.Process(pid).net_connections(kind="tcp")
    return {c.laddr.port for c in connections if c.raddr and c.raddr.port == server}


def encrypted(server: PrivatePostgres) -> int:
    with psycopg.connect(server.url) as connection:
        row = connection.execute("SELECT count(*) FROM pg_stat_ssl WHERE ssl AND pid <> pg_backend_pid()").fetchone()
    assert row is not None
    return int(row[0])
