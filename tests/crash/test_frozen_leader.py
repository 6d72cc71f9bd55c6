"""A leader that is frozen in the middle of what it writes keeps nobody else from leading, and writes nothing later.

Nor does anybody else who is frozen keep the leader from going on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kombu_taskgate.core.errors import StoreBusy, StoreUnavailable
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.schedules import Entry, Progress, Tick
from kombu_taskgate.core.sql import SqlBroker
from kombu_taskgate.core.term_statements import TermStatements
from kombu_taskgate.testing.stores import InDatabase
from kombu_taskgate.testing.threads import DEADLINE, wait_until

pytestmark = [pytest.mark.crash]

KEY = "beat"
TTL = 4.0
#: Seconds within which somebody else leads after the term of the frozen one is over; at once, if the machine is idle.
#: Without the server's help nobody would, as long as the frozen one stays so.
WITHIN = 10.0
#: Leads, and stops itself right before a commit of what argv[3] says.
LEADER = """
import os, signal, sys
from kombu_taskgate.core.errors import TaskgateError
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.schedules import Entry, Progress, Tick
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker

broker = SqlBroker(BrokerSettings(sys.argv[1], table_prefix=sys.argv[2]))
term = broker.terms.try_acquire("beat", "frozen", float(sys.argv[4]))
stops = []

def stop(point):
    if point == "before_commit" and not stops:
        stops.append(point)
        os.kill(os.getpid(), signal.SIGSTOP)

broker.database.fault = stop
calls = {
    "tick": lambda: broker.schedules.tick(term, Tick("one", 1, "frozen"), Progress(None, 1), [NewTask("q", b"frozen")]),
    "rebase": lambda: broker.schedules.rebase(term, "one", None, 99),
    "sync": lambda: broker.schedules.sync(term, [Entry("code", task="t", schedule="interval 1")]),
}
try:
    print("done", calls[sys.argv[3]]())
except TaskgateError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def frozen_store(server_url: str) -> Iterator[InDatabase]:
    store = InDatabase(server_url)
    yield store
    store.close()


@pytest.mark.parametrize("writes", ["tick", "rebase", "sync"])
def test_a_frozen_leader_gives_way(frozen_store: InDatabase, writes: str) -> None:
    broker = frozen_store.open()
    assert isinstance(broker, SqlBroker)
    schedules = broker.schedules
    schedules.add(KEY, Entry("one", task="t", schedule="interval 1"))
    command = [sys.executable, "-c", LEADER, frozen_store.url, broker.tables.prefix, writes, str(TTL)]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        _, status = os.waitpid(leader.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "it has ended instead of being stopped"
        old = broker.terms.current(KEY)
        assert old is not None
        assert old.holder == "frozen"
        wait_until(lambda: broker.terms.try_acquire(KEY, "living", 60.0) is not None, "another leads")
        new = broker.terms.current(KEY)
        assert new is not None
        assert new.number > old.number
        assert 0 <= new.acquired_at - old.until <= WITHIN * 1000
        assert (schedules.ticks(KEY), broker.queue_len("q")) == ([], 0)
        assert schedules.tick(new, Tick("one", 1, "living"), Progress(None, 1), [NewTask("q", b"living")]) is True
        leader.send_signal(signal.SIGCONT)
        said, _ = leader.communicate(timeout=DEADLINE)
    finally:
        leader.kill()
        leader.wait()
    assert said.strip() in {"NotLeader", "StoreUnavailable"}
    assert [(tick.task_id, tick.term) for tick in schedules.ticks(KEY)] == [("living", new.number)]
    assert [claim.payload for claim in broker.dequeue(["q"], 10)] == [b"living"]
    assert [(entry.name, entry.base_at, entry.total_run_count) for entry in schedules.entries(KEY)] == [("one", 1, 1)]


#: Stops itself right before a commit of what argv[3] says.
ANYBODY = """
import os, signal, sys
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.schedules import Entry
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker

broker = SqlBroker(BrokerSettings(sys.argv[1], table_prefix=sys.argv[2], answer_timeout=float(sys.argv[4])))
broker.database.fault = lambda point: os.kill(os.getpid(), signal.SIGSTOP)
entry = Entry("one", task="other", schedule="interval 1")
{
    "replace": lambda: broker.schedules.add("beat", entry, replace=True),
    "change": lambda: broker.schedules.change("beat", "one", enabled=False),
    "remove": lambda: broker.schedules.remove("beat", "one"),
    "publish": lambda: broker.enqueue(NewTask("q", unique_key="one at a time")),
}[sys.argv[3]]()
"""


@contextmanager
def frozen(store: InDatabase, prefix: str, does: str, answer_timeout: float = 30.0) -> Iterator[None]:
    """Somebody is frozen in the middle of it."""
    process = subprocess.Popen([sys.executable, "-c", ANYBODY, store.url, prefix, does, str(answer_timeout)])
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "it has ended instead of being stopped"
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("does", "answer_timeout"), [("replace", 30.0), ("change", 30.0), ("remove", 30.0), ("publish", 3.0)]
)
def test_somebody_frozen_does_not_hold_up_ticks_for_good(
    frozen_store: InDatabase, does: str, answer_timeout: float
) -> None:
    # A few stretches long: somebody who is frozen for good would make it fail.
    broker = frozen_store.open(busy_timeout=20.0)
    assert isinstance(broker, SqlBroker)
    broker.schedules.add(KEY, Entry("one", task="t", schedule="interval 1"))
    term = broker.terms.try_acquire(KEY, "leader", 60.0)
    assert term is not None
    with frozen(frozen_store, broker.tables.prefix, does, answer_timeout):
        task = NewTask("q", unique_key="one at a time")
        assert broker.schedules.tick(term, Tick("one", 1, "id"), Progress(None, 1), [task]) is True
        assert [entry.enabled for entry in broker.schedules.entries(KEY)] == [True]


def test_what_stays_locked_is_told_from_a_database_that_is_away(frozen_store: InDatabase) -> None:
    """So that beat goes on with the other entries."""
    broker = frozen_store.open(busy_timeout=1.5)
    broker.schedules.add(KEY, Entry("one", task="t", schedule="interval 1"))
    term = broker.terms.try_acquire(KEY, "leader", 60.0)
    assert term is not None
    task = NewTask("q", unique_key="one at a time")
    with frozen(frozen_store, frozen_store.settings["table_prefix"], "publish"), pytest.raises(StoreBusy):
        broker.schedules.tick(term, Tick("one", 1, "id"), Progress(None, 1), [task])


def test_a_term_is_renewed_while_a_tick_waits(frozen_store: InDatabase) -> None:
    """For somebody who is just publishing with the same unique key, and is frozen."""
    broker = frozen_store.open(lease_ttl=6.0)  # renewals are answered within a second, or tried again
    assert isinstance(broker, SqlBroker)
    broker.schedules.add(KEY, Entry("one", task="t", schedule="interval 1"))
    term = broker.terms.try_acquire(KEY, "leader", 60.0)
    assert term is not None
    told: list[object] = []

    def send() -> None:
        task = NewTask("q", b"tick", unique_key="one at a time")
        try:
            told.append(broker.schedules.tick(term, Tick("one", 1, "id"), Progress(None, 1), [task]))
        except StoreUnavailable as error:
            told.append(error)

    def renewed() -> bool:
        try:
            now = broker.terms.try_acquire(KEY, "leader", 60.0)
        except StoreUnavailable:
            return False
        return now is not None and now.number == term.number

    sender = threading.Thread(target=send, daemon=True)
    with frozen(frozen_store, broker.tables.prefix, "publish"):
        sender.start()
        wait_until(lambda: not _is_free(broker), "the tick holds the term")
        for _ in range(3):
            wait_until(renewed, "it is renewed")
        assert told == [], "the tick has not waited"
    sender.join(DEADLINE)
    assert told == [True]


def _is_free(broker: SqlBroker) -> bool:
    row = broker.database.read(
        lambda conn: conn.execute(TermStatements(broker.sql).term_is_free, {"p_key": KEY}).first()
    )
    return row is not None
