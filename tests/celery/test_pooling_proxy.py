"""Behind a proxy that pools transactions (reports B105)."""

from __future__ import annotations

import pytest

from tests.workers.fixtures import MakeLab
from tests.workers.harness import wait_for
from tests.workers.servers import PrivatePgBouncer

pytestmark = [pytest.mark.postgresql, pytest.mark.slow]

TELLS = "does not deliver notifications"


def test_workers_behind_it_do_all_their_work_by_polling(pgbouncer: PrivatePgBouncer, make_lab: MakeLab) -> None:
    """B105: no LISTEN, no lock or setting of a session, and no prepared statement is needed."""
    lab = make_lab(pgbouncer.url)
    workers = [lab.start_worker("-c2", ready=False) for _ in range(4)]
    for worker in workers:
        worker.wait_ready()
    now = [lab.send("work", 0.0) for _ in range(200)]
    later = [lab.send("work", 0.0, countdown=1) for _ in range(10)]
    flaky = [lab.send("flaky", 2) for _ in range(5)]
    wait_for(lambda: lab.journal.ended() == {*now, *later, *flaky}, 60, "all have run")
    wait_for(lambda: not lab.rows(), 30, "all are settled")
    assert all(number == 1 for id, number in lab.journal.starts_each().items() if id not in flaky)
    for _ in range(5):
        replies = lab.app.control.ping(timeout=30, limit=4)
        assert {name for reply in replies for name in reply} == {worker.name for worker in workers}
    for worker in workers:
        wait_for(lambda worker=worker: TELLS in worker.text(), 30, "it says why it polls")  # type: ignore[misc]
        assert worker.text().count(TELLS) == 1
        assert "Traceback" not in worker.text()


def test_without_the_attempt_nobody_says_anything(pgbouncer: PrivatePgBouncer, make_lab: MakeLab) -> None:
    lab = make_lab(pgbouncer.url, listen=False)
    worker = lab.start_worker("-c1")
    id = lab.send("work", 0.0)
    wait_for(lambda: lab.journal.ended() == {id}, 30, "it has run")
    assert TELLS not in worker.text()
