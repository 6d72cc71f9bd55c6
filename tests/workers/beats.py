"""Real replicas of beat, what they have sent, and what can happen to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.model import Filter, Task
from kombu_taskgate.core.schedules import Tick
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.terms import Term
from tests.workers.harness import ROOT, can_be_written, is_stopped, wait_for

KEY = "beat:beats"


@dataclass
class Replica:
    """One ``celery beat`` in a process group of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(30)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@dataclass
class Beats:
    """One database and the replicas on it.

    Args:
        url: of the database, without ``taskgate+``.
        folder: for logs.
        prefix: of the tables.
        entries: as TASKGATE_TEST_ENTRIES has them.
        conf: more settings.
        ttl: of the lease, seconds.
        scheduler: what ``-S`` names.
        app: the module of the app.
    """

    url: str
    folder: Path
    prefix: str
    entries: dict[str, Any]
    conf: dict[str, Any] = field(default_factory=dict)
    ttl: float = 2.0
    scheduler: str = "taskgate"
    app: str = "tests.workers.beat_app"
    replicas: list[Replica] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.broker: Broker = open_broker(BrokerSettings(self.url, table_prefix=self.prefix))
        self.blow = self.folder / "blow"

    def environment(self, own: dict[str, Any] | None = None, **more: str) -> dict[str, str]:
        conf = {
            "broker_url": f"taskgate+{self.url}",
            "broker_transport_options": {"table_prefix": self.prefix},
            "beat_taskgate_lease_ttl": self.ttl,
            **self.conf,
            **(own or {}),
        }
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "default",
            "TASKGATE_TEST_BEAT": json.dumps(conf),
            "TASKGATE_TEST_ENTRIES": json.dumps(self.entries),
            "TASKGATE_TEST_BLOW": str(self.blow),
            **more,
        }

    def start(self, number: int = 1, own: dict[str, Any] | None = None, **more: str) -> list[Replica]:
        """Start replicas; ``own``: settings of theirs alone."""
        started = []
        for _ in range(number):
            log = self.folder / f"beat-{len(self.replicas)}.log"
            command = [sys.executable, "-m", "celery", "-A", self.app, "beat"]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*command, "-S", self.scheduler, "--pidfile=", "-l", "INFO"],
                    env=self.environment(own, **more),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            replica = Replica(process, log)
            self.replicas.append(replica)
            started.append(replica)
        return started

    def term(self) -> Term | None:
        """The term that is valid."""
        term = self.broker.terms.current(KEY)
        return term if term is not None and term.left > 0 else None

    def leader(self, timeout: float = 30.0) -> Replica:
        """The replica that leads, once one does; not one that is stopped, and whose term is not over yet."""

        def found() -> Replica | None:
            term = self.term()
            pids = [] if term is None else term.holder.split(":")
            living = (one for one in self.replicas if one.alive and not is_stopped(one.pid))
            return next((one for one in living if str(one.pid) in pids), None)

        replica = wait_for(found, timeout, f"somebody leads:\n{self.logs()}")
        assert replica is not None
        return replica

    def freeze_leader(self) -> Replica:
        """Stop whoever leads, between two writes to the database, so that the others can go on."""

        def frozen() -> Replica | None:
            leader = self.leader()
            leader.signal(signal.SIGSTOP)
            wait_for(lambda: is_stopped(leader.pid), 30, f"the leader is stopped:\n{self.logs()}")
            return self._unless_writing(leader)

        return self._frozen(frozen)

    def freeze_in_publish(self, entry: str = "often") -> Replica:
        """Stop whoever is about to send the entry, between its decision and the sending."""

        def frozen() -> Replica | None:
            before = [one for one in self.replicas if is_stopped(one.pid)]
            self.blow.write_text(f"SIGSTOP {entry}", encoding="utf-8")

            def hit() -> Replica | None:
                now = [one for one in self.replicas if one not in before and is_stopped(one.pid)]
                return now[0] if now and not self.blow.exists() else None

            replica = wait_for(hit, 60, f"somebody is stopped:\n{self.logs()}")
            assert replica is not None
            return self._unless_writing(replica)

        return self._frozen(frozen)

    def _unless_writing(self, replica: Replica) -> Replica | None:
        if can_be_written(self.url):
            return replica
        replica.signal(signal.SIGCONT)
        return None

    def _frozen(self, frozen: Callable[[], Replica | None]) -> Replica:
        replica = wait_for(frozen, 90, f"somebody is stopped outside of its writes:\n{self.logs()}")
        assert replica is not None
        return replica

    def ticks(self, name: str | None = None) -> list[Tick]:
        """In the order of their due times."""
        return self.broker.schedules.ticks(KEY, [] if name is None else [name], 100_000)[::-1]

    def sent(self) -> list[Task]:
        """The messages that are stored."""
        return self.broker.list(Filter(limit=1_000_000))

    def wait_ticks(self, number: int, name: str | None = None, timeout: float = 60.0) -> list[Tick]:
        try:
            return wait_for(
                lambda: ticks if len(ticks := self.ticks(name)) >= number else [], timeout, f"{number} ticks of {name}"
            )
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.logs()}") from None

    def check(self) -> None:
        """Each tick has one message, and there is no other message."""
        ticks = Counter(tick.task_id for tick in self.ticks())
        messages = Counter(task.task_id for task in self.sent())
        assert max([*ticks.values(), *messages.values()], default=1) == 1, "sent twice"
        # A leader may be sending just now.
        missing, strange = (
            set(ticks) - set(messages),
            set(messages) - set(ticks) - {tick.task_id for tick in self.ticks()},
        )
        assert not missing, f"ticks without a message: {missing}"
        assert not strange, f"messages without a tick: {strange}"
        terms = [tick.term for tick in sorted(self.ticks(), key=lambda tick: tick.sent_at)]
        assert terms == sorted(terms), "somebody sent under an old term"

    def logs(self) -> str:
        return "\n".join(f"== {one.log.name} pid {one.pid}\n{one.text()[-3000:]}" for one in self.replicas)

    def close(self) -> None:
        for replica in self.replicas:
            replica.signal(signal.SIGCONT)
            if replica.alive:
                replica.process.terminate()
        deadline = time.monotonic() + 10
        for replica in self.replicas:
            try:
                replica.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                replica.kill()
        self.broker.close()
