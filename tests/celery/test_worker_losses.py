"""Lost pool processes and hard time limits count as losses, and nothing else does (reports B03, B04, B18, B54)."""

from __future__ import annotations

import os
import signal
import time

import pytest
from celery.worker.request import Request

from kombu_taskgate.core.model import State, Task
from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, holds_for, wait_for

pytestmark = pytest.mark.crash

#: Leases that run out are not what brings a task back here.
LONG = 60.0
#: Long before a lease runs out, and what a busy machine may take to start a process and a task.
SOON = 15.0


def running_pid(lab: Lab, id: str, start: int = 1) -> int:
    wait_for(lambda: lab.journal.starts(id) >= start, 30, f"start {start} of {id}")
    return int(lab.journal.of("start", id)[start - 1]["pid"])


def row(lab: Lab, id: str) -> Task:
    return lab.rows(task_id=id)[0]


@pytest.mark.parametrize("task", ["hold_until", "hold_own"])
def test_killed_pool_process_is_a_loss_at_once(make_lab: MakeLab, main_url: str, task: str) -> None:
    """B03: ready again at once, one loss, redelivered, and it ends well; also with the app's own request class."""
    lab = make_lab(main_url, lease_ttl=LONG)
    worker = lab.start_worker("-c1")
    gate = lab.folder / "gate"
    id = lab.send(task, str(gate))
    pid = running_pid(lab, id)
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    running_pid(lab, id, 2)
    again = lab.journal.of("start", id)[1]
    assert again["time"] - killed < SOON
    assert again["redelivered"]
    assert (row(lab, id).lease_lost, row(lab, id).deliveries) == (1, 2)
    gate.touch()
    wait_for(lambda: not lab.rows(), 30, "it ends and is acknowledged")
    assert (lab.journal.starts(id), lab.journal.ends(id)) == (2, 1)
    assert worker.alive
    assert ("own request" in worker.text()) == (task == "hold_own")


def test_task_that_kills_its_process_is_stopped(make_lab: MakeLab, main_url: str) -> None:
    """B04: it starts three times, then it is a dead letter; the twenty behind it all succeed."""
    lab = make_lab(main_url, lease_ttl=LONG)
    worker = lab.start_worker("-c1")
    killer = lab.send("kill_self")
    others = [lab.send("work", 0) for _ in range(20)]
    wait_for(lambda: lab.journal.ended() == set(others), 30, "the others")
    dead = wait_for(lambda: lab.rows(states=[State.FAILED]), 30, "the dead letter")[0]
    assert (dead.task_id, dead.reason, dead.lease_lost, dead.deliveries) == (killer, "lease_lost", 3, 3)
    assert dead.owner
    assert "SIGKILL" in (dead.detail or "")
    wait_for(lambda: len(lab.rows()) == 1, 30, "the others are acknowledged, a little after their journal lines")
    assert lab.journal.starts(killer) == 3
    assert worker.alive


def test_hard_time_limit_without_ack_is_a_loss(make_lab: MakeLab, postgresql_url: str) -> None:
    """B18: what is not to be acknowledged on a time-out comes back, is counted, and ends as a dead letter."""
    conf = {"task_acks_on_failure_or_timeout": False}
    lab = make_lab(postgresql_url, conf=conf, lease_ttl=LONG, lease_lost_max=2)
    lab.start_worker("-c1")
    id = lab.send("work", 30, time_limit=4)
    running_pid(lab, id, 2)
    assert (row(lab, id).lease_lost, row(lab, id).state) == (1, State.RUNNING)
    dead = wait_for(lambda: lab.rows(states=[State.FAILED]), 30, "the dead letter")[0]
    assert (dead.task_id, dead.reason, dead.lease_lost) == (id, "lease_lost", 2)
    assert "time limit" in (dead.detail or "")
    assert (lab.journal.starts(id), lab.journal.ends(id)) == (2, 0)


def test_hard_time_limit_with_ack_ends_it(make_lab: MakeLab, postgresql_url: str) -> None:
    """Celery's default acknowledges a time-out: the task has failed and does not come back."""
    lab = make_lab(postgresql_url, lease_ttl=LONG)
    lab.start_worker("-c1")
    id = lab.send("work", 30, time_limit=4)
    running_pid(lab, id)
    wait_for(lambda: not lab.rows(), 30, "acknowledged")
    assert lab.journal.starts(id) == 1


def test_what_is_no_loss(make_lab: MakeLab, postgresql_url: str) -> None:
    """A task's own Reject(requeue=True), and one that is revoked and terminated, count no loss."""
    lab = make_lab(postgresql_url, lease_ttl=LONG)
    lab.start_worker("-c1")
    rejected = lab.send("reject", 3)
    wait_for(lambda: lab.journal.starts(rejected) == 4, 30, "three rejections and one more")
    wait_for(lambda: not lab.rows(), 30, "it ends: as many losses would have made it a dead letter")
    revoked = lab.send("hold_until", str(lab.folder / "never"))
    running_pid(lab, revoked)
    lab.app.control.revoke(revoked, terminate=True, signal="SIGKILL")
    wait_for(lambda: not lab.rows(), 30, "revoked is acknowledged")
    other = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(other), 30, "the next")
    assert lab.journal.starts(revoked) == 1


@pytest.mark.skipif(not hasattr(Request, "_worker_lost_info"), reason="to this Celery it is a failure like others")
def test_sys_exit_in_a_task(make_lab: MakeLab, postgresql_url: str) -> None:
    """A task that ends its process by sys.exit is stopped like one that is killed."""
    lab = make_lab(postgresql_url, lease_ttl=LONG, lease_lost_max=2)
    lab.start_worker("-c1")
    id = lab.send("leave")
    dead = wait_for(lambda: lab.rows(states=[State.FAILED]), 30, "the dead letter")[0]
    assert (dead.task_id, dead.reason, dead.lease_lost) == (id, "lease_lost", 2)
    assert lab.journal.starts(id) == 2


def test_pool_survives_ten_killed_processes(make_lab: MakeLab, postgresql_url: str) -> None:
    """B54: ten tasks in a row kill a process of two; fifty more all finish."""
    lab = make_lab(postgresql_url, lease_ttl=LONG)
    worker = lab.start_worker("-c2")
    killers = [lab.send("kill_once") for _ in range(10)]
    others = [lab.send("work", 0) for _ in range(50)]
    wait_for(lambda: lab.journal.ended() == {*killers, *others}, 60, "all sixty")
    wait_for(lambda: not lab.rows(), 30, "all acknowledged")
    starts = lab.journal.starts_each()
    # When two processes die at once, Celery's pool looks at the second before it has read that its task had begun, and
    # sends that task to another process by itself.
    assert {starts[id] for id in killers} <= {2, 3}
    assert {starts[id] for id in others} == {1}
    assert worker.alive
    wait_for(lambda: len(worker.children()) >= 2, 30, "a pool of two")
    holds_for(lambda: len(worker.children()) >= 2, 0.5, "it stays one")
