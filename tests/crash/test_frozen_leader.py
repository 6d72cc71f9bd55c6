"""A leader that is frozen in the middle of what it writes keeps nobody else from leading, and writes nothing later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.schedules import Entry, Progress, Tick
from kombu_taskgate.core.sql import SqlBroker
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
