"""Cut connections under tasks that are to be canceled on connection loss (reports B63)."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from tests.workers.fixtures import MakeLab
from tests.workers.harness import wait_for

pytestmark = pytest.mark.crash
CONF = {"worker_cancel_long_running_tasks_on_connection_loss": True}


def test_cut_sessions_are_no_connection_loss(make_lab: MakeLab, postgresql_url: str) -> None:
    """B63: all sessions are cut three times under two tasks: nothing is canceled, lost or started twice."""
    mark = f"victim_{uuid.uuid4().hex[:10]}"
    lab = make_lab(f"{postgresql_url}?application_name={mark}", conf=CONF, lease_ttl=9.0)
    worker = lab.start_worker("-c2")
    gate = lab.folder / "gate"
    ids = [lab.send("hold_until", str(gate)) for _ in range(2)]
    wait_for(lambda: lab.journal.starts() == 2, 30, "two run")
    with psycopg.connect(postgresql_url, autocommit=True) as killer:
        query = "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = %s"
        ends = f"select id, until_ from {lab.options['table_prefix']}sessions order by id"
        for _ in range(3):
            wait_for(lambda: (killer.execute(query, (mark,)).fetchone() or (0,))[0], 30, "sessions are cut")
            before = killer.execute(ends).fetchall()
            wait_for(lambda before=before: killer.execute(ends).fetchall() != before, 30, "leases are renewed again")  # type: ignore[misc]
    gate.touch()
    wait_for(lambda: lab.journal.ended() == set(ids), 30, "both end")
    wait_for(lambda: not lab.rows(), 30, "both acknowledged")
    assert lab.journal.starts() == 2
    assert worker.alive
    assert "Trying to re-establish" not in worker.text()


def test_celery_cancels_and_reconnects(make_lab: MakeLab, postgresql_url: str) -> None:
    """B63: when Celery itself gives its connection up, both tasks are canceled and run again: same worker, no loss."""
    lab = make_lab(postgresql_url, conf=CONF, lease_ttl=60.0)
    worker = lab.start_worker("-c2", "-P", "prefork")
    gate = lab.folder / "gate"
    ids = [lab.send("hold_until", str(gate)) for _ in range(2)]
    wait_for(lambda: lab.journal.starts() == 2, 30, "two run")
    lab.app.control.broadcast("lose_connection")
    wait_for(lambda: "Trying to re-establish" in worker.text(), 30, "Celery gives its connection up")
    wait_for(lambda: lab.journal.starts() == 4, 30, "both run again")
    assert {row.lease_lost for row in lab.rows()} == {0}
    gate.touch()
    wait_for(lambda: lab.journal.ended() == set(ids), 30, "both end")
    wait_for(lambda: not lab.rows(), 30, "both acknowledged")
    assert worker.alive
    assert {lab.journal.starts(id) for id in ids} == {2}
