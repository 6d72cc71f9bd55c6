"""Reaping needs no one in particular (reports B11)."""

from __future__ import annotations

import pytest

from tests.workers.fixtures import MakeLab
from tests.workers.harness import wait_for

pytestmark = pytest.mark.crash

#: A process that reaps, and is killed in the middle of its transaction.
REAP_AND_DIE = """
import os, signal, sys, time
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker
broker = SqlBroker(BrokerSettings(sys.argv[1], table_prefix=sys.argv[2], lease_ttl=1.0))
broker.database.fault = lambda point: os.kill(os.getpid(), signal.SIGKILL)
while True:
    if broker.database.read(lambda conn: conn.exec_driver_sql(
        f"select count(*) from {sys.argv[2]}tasks where state = 'running'").scalar()):
        broker.reap_expired()
    time.sleep(0.05)
"""


def test_death_of_the_reaping_process_stops_nobody(make_lab: MakeLab, main_url: str) -> None:
    """Two workers die, and so does a process in the middle of reaping them: the third reaps all."""
    lab = make_lab(main_url, lease_ttl=4.0)  # more than a busy machine may pause
    first, second = lab.start_worker("-c2"), lab.start_worker("-c2")
    gate = lab.folder / "gate"
    ids = [lab.send("hold_until", str(gate)) for _ in range(4)]
    wait_for(lambda: lab.journal.starts() == 4, 30, "four running")
    first.kill()
    second.kill()
    reaper = lab.run_python(
        f"import sys; sys.argv[1:] = [{main_url!r}, {lab.options['table_prefix']!r}]\n{REAP_AND_DIE}"
    )
    wait_for(lambda: reaper.poll() is not None, 30, "the reaping process dies")
    lab.start_worker("-c4")
    wait_for(lambda: lab.journal.starts() == 8, 30, "the third worker takes over all four")
    gate.touch()
    wait_for(lambda: lab.journal.ended() == set(ids), 30, "all end")
    wait_for(lambda: not lab.rows(), 30, "all rows gone")
    assert max(lab.journal.starts_each().values()) == 2
