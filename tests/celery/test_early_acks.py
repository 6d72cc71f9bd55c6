"""Tasks that are acknowledged when they start (Celery's default): known while they run, never run twice."""

from __future__ import annotations

import os
import signal

import celery
import pytest

from kombu_taskgate.core.model import State, Task
from tests.celery.test_pools import POOLS, installed
from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, holds_for, wait_for

pytestmark = pytest.mark.crash

EARLY = {"task_acks_late": False, "task_reject_on_worker_lost": None}
#: Leases that run out are not what settles a task here.
LONG = 60.0


def begun(lab: Lab, id: str) -> bool:
    return [row.begun for row in lab.rows(task_id=id)] == [True]


def running(lab: Lab, gate: str = "gate") -> str:
    """A task that runs until a file appears, and is known to."""
    id = lab.send("hold_until", str(lab.folder / gate))
    # The row may say so before the task has come to its first line.
    wait_for(lambda: begun(lab, id) and lab.journal.starts(id), 30, "it runs, and is known to")
    return id


def lost(lab: Lab, id: str) -> Task | None:
    rows = lab.rows(task_id=id, states=[State.FAILED])
    return rows[0] if rows else None


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_every_end_settles(make_lab: MakeLab, postgresql_url: str, pool: str) -> None:
    """Success, failure, retry, Ignore and Reject: the row stays until the run ends, and not longer."""
    installed(pool)
    lab = make_lab(postgresql_url, conf=EARLY, lease_ttl=LONG)
    worker = lab.start_worker(*POOLS[pool])
    id = running(lab)
    assert lab.rows()[0].state is State.RUNNING
    (lab.folder / "gate").touch()
    wait_for(lambda: not lab.rows(), 30, "success settles")
    ids = [lab.send(name) for name in ("work", "fail", "ignore")]
    ids += [lab.send("reject", 1), lab.send("flaky", 2)]
    wait_for(lambda: lab.journal.starts_each() == {id: 1, **dict.fromkeys(ids[:4], 1), ids[4]: 3}, 30, "all have run")
    wait_for(lambda: not lab.rows(), 30, "all are settled")
    assert worker.terminate() == 0
    assert lab.journal.starts(ids[3]) == 1, "rejected after it was acknowledged: as with every broker, it is gone"


def test_killed_worker_leaves_a_dead_letter(make_lab: MakeLab, database_url: str) -> None:
    """What ran on it is told as lost once its lease has run out, and does not run again; what waited does."""
    lab = make_lab(database_url, conf=EARLY, lease_ttl=4.0)
    first = lab.start_worker("-c1")
    id = running(lab)
    behind = lab.send("work", 0)
    wait_for(lambda: len([row for row in lab.rows() if row.owner]) == 2, 30, "another is reserved")
    first.kill()
    lab.start_worker("-c1")
    dead = wait_for(lambda: lost(lab, id), 30, "the dead letter")
    assert (dead.reason, dead.lease_lost, dead.deliveries) == ("lost", 1, 1)
    assert "task_acks_late" in (dead.detail or "")
    wait_for(lambda: lab.journal.ends(behind) == 1, 30, "the other runs")
    (lab.folder / "gate").touch()
    holds_for(lambda: lab.journal.starts(id) == 1, 1.0, "it has not run again")


def test_lost_pool_process_settles(make_lab: MakeLab, postgresql_url: str) -> None:
    """Celery tells the caller of it, so the row has served."""
    lab = make_lab(postgresql_url, conf=EARLY, lease_ttl=LONG)
    worker = lab.start_worker("-c1")
    id = running(lab)
    os.kill(int(lab.journal.of("start", id)[0]["pid"]), signal.SIGKILL)
    wait_for(lambda: not lab.rows(), 30, "it is settled")
    wait_for(lambda: "WorkerLostError" in worker.text(), 30, "it is said")
    other = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(other) == 1, 30, "the worker works on")
    assert lab.journal.starts(id) == 1


def test_hard_time_limit_settles(make_lab: MakeLab, postgresql_url: str) -> None:
    """As the loss of a process does."""
    lab = make_lab(postgresql_url, conf={**EARLY, "task_time_limit": 5}, lease_ttl=LONG)
    lab.start_worker("-c1")
    id = running(lab)
    wait_for(lambda: not lab.rows(), 30, "it is settled")
    assert (lab.journal.starts(id), lab.journal.ends(id)) == (1, 0)


@pytest.mark.parametrize("pool", ["prefork", "gevent", "eventlet"])
def test_revoked_while_it_runs(make_lab: MakeLab, postgresql_url: str, pool: str) -> None:
    """revoke(terminate=True) ends the run and settles it."""
    installed(pool)
    if pool == "gevent" and celery.VERSION < (5, 5):
        pytest.skip("this Celery can't end a greenlet of gevent: the run goes on, and is settled at its end")
    lab = make_lab(postgresql_url, conf=EARLY, lease_ttl=LONG)
    lab.start_worker(*POOLS[pool])
    id = running(lab)
    lab.app.control.revoke(id, terminate=True, signal="SIGKILL")
    wait_for(lambda: not lab.rows(), 30, "it is settled")
    assert lab.journal.starts(id) == 1


@pytest.mark.parametrize("pool", POOLS)
def test_warm_shutdown_waits_and_settles(make_lab: MakeLab, postgresql_url: str, pool: str) -> None:
    """What runs ends and is settled; nothing is told as lost."""
    installed(pool)
    lab = make_lab(postgresql_url, conf=EARLY, lease_ttl=LONG)
    worker = lab.start_worker(*POOLS[pool])
    id = running(lab)
    worker.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "shutdown" in worker.text().lower(), 30, "it is told to stop")
    holds_for(lambda: begun(lab, id), 0.5, "it goes on")
    (lab.folder / "gate").touch()
    assert worker.process.wait(60) == 0
    assert lab.journal.ends(id) == 1
    assert lab.rows() == []


def test_cold_shutdown_leaves_a_dead_letter_or_an_answer(make_lab: MakeLab, postgresql_url: str) -> None:
    """What a cold shutdown ends does not run again; it is no running row any more once the worker has gone."""
    lab = make_lab(postgresql_url, conf=EARLY, lease_ttl=LONG)
    worker = lab.start_worker("-c1")
    id = running(lab)
    worker.process.send_signal(signal.SIGQUIT)
    worker.process.wait(60)
    wait_for(lambda: not lab.unfinished(), 30, "nothing is left running")
    lab.start_worker("-c1")
    other = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(other) == 1, 30, "the next works")
    assert lab.journal.starts(id) == 1


def test_reconnect_of_celery(make_lab: MakeLab, postgresql_url: str) -> None:
    """When Celery gives its connection up, what runs goes on and is settled at its end."""
    lab = make_lab(postgresql_url, conf=EARLY, lease_ttl=LONG)
    worker = lab.start_worker("-c2", "-P", "prefork")
    id = running(lab)
    lab.app.control.broadcast("lose_connection")
    wait_for(lambda: "Trying to re-establish" in worker.text(), 30, "Celery gives its connection up")
    other = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(other) == 1, 30, "it consumes again")
    assert begun(lab, id)
    (lab.folder / "gate").touch()
    wait_for(lambda: not lab.rows(), 30, "it is settled")
    assert (lab.journal.starts(id), lab.journal.ends(id)) == (1, 1)
