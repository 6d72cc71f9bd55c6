"""In which order tasks run, and what others wait for (reports B19, B21, B23, B25)."""

from __future__ import annotations

import time
import uuid

import pytest

from kombu_taskgate.core.model import NewTask, State
from tests.workers.fixtures import MakeLab
from tests.workers.harness import wait_for

pytestmark = pytest.mark.slow

#: Of leases that are to be kept: more than a busy machine may pause.
TTL = 4.0


def test_higher_priority_runs_first(make_lab: MakeLab, database_url: str) -> None:
    """B19: 0 to 9, higher first, as in AMQP; first come first served within one; outside of it the nearest end."""
    lab = make_lab(database_url, {"worker_prefetch_multiplier": 1})
    low = [lab.send("work", priority=1) for _ in range(10)]
    high = [lab.send("work", priority=8) for _ in range(5)]
    least, most = lab.send("work", priority=-1), lab.send("work", priority=50)
    usual = lab.send("work")
    zero = lab.send("work", priority=0)
    nine = lab.send("work", priority=9)
    expected = [most, nine, *high, *low, least, usual, zero]
    lab.start_worker("-c1")
    wait_for(lambda: lab.journal.ended() == set(expected), 40, "all have run")
    assert [line["id"] for line in lab.journal.of("start")] == expected


def test_a_live_task_behind_many_expired_ones_runs(make_lab: MakeLab, main_url: str) -> None:
    """B21."""
    lab = make_lab(main_url)
    for _ in range(5):
        lab.broker.enqueue_many([NewTask("celery", b"x", expires_at=1) for _ in range(1000)])
    live = lab.send("work")
    worker = lab.start_worker("-c1")
    pid = worker.pid
    wait_for(lambda: lab.journal.ended() == {live}, 60, "the live one has run")
    wait_for(lambda: lab.broker.queue_len("celery") == 0, 60, "the expired ones are gone")
    assert (worker.alive, worker.pid) == (True, pid)
    assert lab.journal.starts() == 1
    row = lab.rows(states=[State.CANCELED])[0]
    assert row.reason == "expired"


@pytest.mark.parametrize("acks_late", [True, False])
def test_a_rate_limited_task_holds_up_no_other(make_lab: MakeLab, main_url: str, acks_late: bool) -> None:
    """B23: what waits for its rate takes up no place of the prefetch window, and keeps its lease."""
    conf = {
        "worker_prefetch_multiplier": 4,
        "task_acks_late": acks_late,
        "task_annotations": {"tests.workers.app.limited": {"rate_limit": "1/m"}},
    }
    lab = make_lab(main_url, conf, lease_ttl=TTL)
    for _ in range(100):
        lab.send("limited")
    others = {lab.send("work") for _ in range(20)}
    lab.start_worker("-c1")
    wait_for(lambda: others <= lab.journal.ended(), 30, "the others have run")
    beyond = time.monotonic() + 1.2 * TTL
    wait_for(lambda: time.monotonic() > beyond, 2 * TTL, "leases that nobody renewed are over")
    waiting = [row for row in lab.rows() if row.type.endswith("limited")]
    assert len(waiting) >= 98
    assert {(row.lease_lost, row.deliveries) for row in waiting} <= {(0, 1), (0, 0)}
    assert set(lab.journal.starts_each().values()) == {1}


@pytest.mark.redis
def test_a_redelivered_task_that_has_succeeded_is_not_run_again(
    make_lab: MakeLab, main_url: str, redis_url: str
) -> None:
    """B25: with worker_deduplicate_successful_tasks, which goes by the redelivered flag and the stored result."""
    conf = {
        "worker_deduplicate_successful_tasks": True,
        "result_backend": redis_url,
        "task_ignore_result": False,
        "result_expires": 60,
    }
    lab = make_lab(main_url, conf, lease_ttl=1)
    id = lab.send("end_with_worker", str(lab.folder / f"marker-{uuid.uuid4().hex}"), ignore_result=False)
    first = lab.start_worker("-c1", ready=False)
    wait_for(lambda: not first.alive, 30, "the worker has gone with its task")
    lab.start_worker("-c1")
    wait_for(lambda: not lab.rows(), 30, "the message is removed")
    assert lab.journal.starts(id) == 1
    again = lab.send("work")
    wait_for(lambda: again in lab.journal.ended(), 30, "the worker goes on")
