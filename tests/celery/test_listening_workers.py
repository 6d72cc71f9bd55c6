"""Workers that are told of work, and lose the connection on which they are told (reports B106)."""

from __future__ import annotations

import psycopg
import pytest

from kombu_taskgate.core.watch import LOOK_ON
from tests.workers.fixtures import MakeLab
from tests.workers.harness import holds_for, wait_for

pytestmark = [pytest.mark.postgresql, pytest.mark.crash]

#: Far longer than the test waits: what starts was not found by looking from time to time.
NEVER = 600.0


def test_a_worker_whose_listening_session_was_ended(make_lab: MakeLab, postgresql_url: str) -> None:
    """B106: it listens again by itself, takes what came meanwhile, and is told of what comes later."""
    lab = make_lab(postgresql_url, poll_max=NEVER, poll_listening=NEVER)
    worker = lab.start_worker("-c1")
    query = "FROM pg_stat_activity WHERE query LIKE %s AND pid <> pg_backend_pid()"
    listens = f"LISTEN%{lab.broker._channel}%"

    def rested() -> bool:
        return not lab.rows() and worker.alive

    def start_one() -> None:
        id = lab.send("work", 0)
        wait_for(lambda: lab.journal.ends(id), 30, "a task has run")
        wait_for(lambda: not lab.rows(), 30, "it is settled")

    with psycopg.connect(postgresql_url, autocommit=True) as killer:

        def listening() -> set[int]:
            return {row[0] for row in killer.execute(f"SELECT pid {query}", [listens]).fetchall()}

        start_one()
        for _ in range(2):
            holds_for(rested, 2 * LOOK_ON, "it has stopped looking")
            before = wait_for(listening, 30, "it listens")
            killer.execute(f"SELECT pg_terminate_backend(pid) {query}", [listens])
            start_one()
            wait_for(lambda before=before: listening() - before, 30, "it listens again")
            holds_for(rested, 2 * LOOK_ON, "it has stopped looking")
            start_one()
    assert "Traceback" not in worker.text()
    assert set(lab.journal.starts_each().values()) == {1}
