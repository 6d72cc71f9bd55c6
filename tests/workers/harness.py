"""Real workers, publishers and network faults, and waiting on what they do instead of sleeping."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from celery import Celery

from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.model import FINAL, Filter, State, Task
from kombu_taskgate.core.settings import BrokerSettings

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]


def wait_for(condition: Callable[[], T], timeout: float, what: str, every: float = 0.02) -> T:
    """Return the first true value of ``condition``; fail with ``what`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        # Looked at once more when the time is over: this process may have been paused since the last look.
        late = time.monotonic() > deadline
        value = condition()
        if value:
            return value
        if late:
            raise AssertionError(f"not within {timeout:g} s: {what}")
        time.sleep(every)


def holds_for(condition: Callable[[], bool], seconds: float, what: str, every: float = 0.05) -> None:
    """Fail unless ``condition`` stays true all the time: for "nothing more happens"."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), what
        time.sleep(every)


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal; one that has ended is not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] == "T"


def can_be_written(url: str) -> bool:
    """Whether nobody keeps the lock of an SQLite file.

    A process that is stopped in the middle of a write keeps it until it goes on, and nothing can be tested meanwhile.
    Servers end such transactions by themselves.
    """
    import sqlalchemy as sa

    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return True
    # The living need it for a moment only.
    with closing(sqlite3.connect(str(parsed.database), timeout=1, isolation_level=None)) as conn:
        try:
            conn.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        conn.execute("ROLLBACK")
    return True


def freeze_between_writes(url: str, pid: int) -> None:
    """Stop the process group of ``pid``, but not while it writes to the database: the others are to go on."""

    def frozen() -> bool:
        os.killpg(pid, signal.SIGSTOP)
        wait_for(lambda: is_stopped(pid), 30, f"process {pid} is stopped")
        if can_be_written(url):
            return True
        os.killpg(pid, signal.SIGCONT)
        return False

    wait_for(frozen, 60, f"process {pid} is stopped outside of its writes")


@dataclass
class Journal:
    """What the tasks of :mod:`tests.workers.app` wrote."""

    path: Path

    def lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.endswith("\n")]

    def of(self, event: str, id: str | None = None) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["event"] == event and id in (None, line["id"])]

    def starts(self, id: str | None = None) -> int:
        return len(self.of("start", id))

    def ends(self, id: str | None = None) -> int:
        return len(self.of("end", id))

    def ended(self) -> set[str]:
        return {line["id"] for line in self.of("end")}

    def starts_each(self) -> Counter[str]:
        return Counter(line["id"] for line in self.of("start"))


@dataclass
class Worker:
    """One ``celery worker`` in a process group of its own."""

    process: subprocess.Popen[bytes]
    log: Path
    name: str

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def wait_ready(self, timeout: float = 60.0) -> Worker:
        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"worker {self.name} ended at start:\n{self.text()[-4000:]}")
            return " ready." in self.text()

        wait_for(ready, timeout, f"worker {self.name} ready; its log:\n{self.text()[-2000:]}")
        return self

    def signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """The end of a machine: SIGKILL for the whole group."""
        self.signal_group(signal.SIGKILL)
        self.process.wait(30)

    def freeze(self) -> None:
        self.signal_group(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal_group(signal.SIGCONT)

    def terminate(self, timeout: float = 60.0) -> int:
        """Warm shutdown; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def children(self) -> list[int]:
        """Pids of the pool's processes."""
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


@dataclass
class Lab:
    """One database, one journal, and the processes of one test."""

    url: str
    folder: Path
    options: dict[str, Any]
    conf: dict[str, Any] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.journal = Journal(self.folder / "journal.jsonl")
        self.broker = open_broker(self.settings())
        self.app = self.make_app()

    def settings(self, **more: Any) -> BrokerSettings:
        known = {"table_prefix", "schema", "lease_ttl", "lease_lost_max", "max_deliveries"}
        options = {name: value for name, value in self.options.items() if name in known}
        return BrokerSettings(self.url, **{**options, **more})

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TASKGATE_TEST_URL": f"taskgate+{self.url}",
            "TASKGATE_TEST_OPTIONS": json.dumps(self.options),
            "TASKGATE_TEST_CONF": json.dumps(self.conf),
            "TASKGATE_TEST_JOURNAL": str(self.journal.path),
            **more,
        }

    def make_app(self, **conf: Any) -> Celery:
        """An app that publishes to the same broker, as a web server would."""
        app = Celery("publisher", set_as_current=False)
        app.conf.update(
            broker_url=f"taskgate+{self.url}", broker_transport_options=dict(self.options), task_ignore_result=True
        )
        app.conf.update({**self.conf, **conf})
        return app

    def send(self, name: str, *args: Any, app: Celery | None = None, **options: Any) -> str:
        """Publish one of the tasks of tests.workers.app; returns the task id."""
        return str((app or self.app).send_task(f"tests.workers.app.{name}", args, **options).id)

    def start_worker(self, *arguments: str, ready: bool = True, url: str | None = None, **environment: str) -> Worker:
        """Start ``celery worker`` with these arguments, e.g. ``-c2 -Psolo -Q a,b``."""
        name = f"w{len(self.workers)}-{uuid.uuid4().hex[:6]}@test"
        log = self.folder / f"{name}.log"
        if url is not None:
            environment["TASKGATE_TEST_URL"] = f"taskgate+{url}"
        command = [sys.executable, "-m", "celery", "-A", "tests.workers.app", "worker", "-n", name, "-l", "INFO"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, "--without-gossip", "--without-mingle", *arguments],
                cwd=ROOT,
                env=self.environment(**environment),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        worker = Worker(process, log, name)
        self.workers.append(worker)
        return worker.wait_ready() if ready else worker

    def run_python(self, code: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start another process with the same environment."""
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def rows(self, **filter: Any) -> list[Task]:
        return self.broker.list(Filter(limit=100_000, **filter))

    def unfinished(self) -> list[Task]:
        return [row for row in self.rows() if row.state not in FINAL]

    def states(self) -> Counter[State]:
        return Counter(row.state for row in self.rows())

    def close(self) -> None:
        for worker in self.workers:
            if worker.alive:
                worker.thaw()
                worker.kill()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()
        # An app leaves the connections of its pools open, until they are collected or the process ends.
        self.app.amqp.producer_pool.force_close_all()
        self.app.pool.force_close_all()
        self.app.close()
        self.broker.close()

    def logs(self) -> str:
        return "\n".join(f"== {worker.name}\n{worker.text()[-6000:]}" for worker in self.workers)


class Proxy:
    """A TCP proxy whose connections can be cut or black-holed, to put before a database."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket, threading.Event]] = []
        self._lock = threading.Lock()
        self._up = True
        self._closing = False
        self._silent = threading.Event()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while not self._closing:
            if not select.select([self._listener], [], [], 0.1)[0]:
                continue
            client, _ = self._listener.accept()
            if not self._up:
                _reset(client)
                continue
            try:
                server = socket.create_connection(self._target, 5)
                server.settimeout(None)  # the limit was for connecting: an idle connection stays
            except OSError:
                _reset(client)
                continue
            forgotten = threading.Event()
            with self._lock:
                up = self._up
                if up:
                    self._pairs.append((client, server, forgotten))
            if not up:  # since it was asked before
                _reset(client)
                _reset(server)
                continue
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, sink, forgotten), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, forgotten: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                while (self._silent.is_set() or forgotten.is_set()) and not self._closing:
                    time.sleep(0.02)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> int:
        """Reset all connections; returns how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for client, server, _ in pairs:
            for end in (client, server):
                _reset(end)
        return len(pairs)

    def forget(self) -> int:
        """Swallow everything on today's connections, for good and without a word; returns how many there are."""
        with self._lock:
            for _, _, forgotten in self._pairs:
                forgotten.set()
            return len(self._pairs)

    def down(self) -> None:
        """Refuse new connections and reset those there are."""
        with self._lock:
            self._up = False
        self.cut()

    def up(self) -> None:
        self._up = True

    def black_hole(self, on: bool) -> None:
        """Swallow everything without a word, both ways."""
        (self._silent.set if on else self._silent.clear)()

    def close(self) -> None:
        self._closing = True
        self.down()
        self._accepting.join(30)
        self._listener.close()


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextmanager
def proxy_for(url: str, default_port: int) -> Iterator[tuple[Proxy, str]]:
    """A proxy before the server of a URL, and the URL that leads through it."""
    import sqlalchemy as sa

    parsed = sa.make_url(url)
    proxy = Proxy(parsed.host or "127.0.0.1", parsed.port or default_port)
    try:
        yield proxy, parsed.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    finally:
        proxy.close()


def merge(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Dictionaries laid over each other."""
    result: dict[str, Any] = {}
    for part in parts:
        result.update(part)
    return result
