"""Workers that are told to stop: what has not begun goes elsewhere at once, what runs ends (reports B47, B48, B50)."""

from __future__ import annotations

import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, Worker, wait_for

pytestmark = pytest.mark.crash

#: Leases that run out are not what brings a task back here.
LONG = 60.0
#: Long before a lease runs out, and what a busy machine may take.
SOON = 15.0


def claimed(lab: Lab, number: int) -> bool:
    """Whether so many tasks are leased, and nothing is left to claim."""
    return [row.owner is not None for row in lab.rows()] == [True] * number


def hold(lab: Lab, running: int, reserved: int, **options: object) -> tuple[list[str], list[str], Path]:
    """Fill the only worker with tasks that run until a file appears, and more behind them."""
    gate = lab.folder / "gate"
    first = [lab.send("hold_until", str(gate)) for _ in range(running)]
    wait_for(lambda: lab.journal.starts() == running, 30, f"{running} running")
    behind = [lab.send("work", 0, **options) for _ in range(reserved)]
    wait_for(lambda: claimed(lab, running + reserved), 30, f"{reserved} reserved")
    return first, behind, gate


def stop(worker: Worker, number: int = signal.SIGTERM) -> float:
    worker.process.send_signal(number)
    return time.time()


POOLS = {
    "prefork": ["-c2"],
    "prefork without a loop": ["-c2"],
    "threads": ["-c2", "-Pthreads"],
    "gevent": ["-c2", "-P", "gevent"],
    "eventlet": ["-c2", "-P", "eventlet"],
    "solo": ["-c1", "-Psolo"],
}


@pytest.mark.parametrize("pool", POOLS)
def test_reserved_tasks_start_elsewhere_at_once(make_lab: MakeLab, postgresql_url: str, pool: str) -> None:
    """B47: SIGTERM with two running and four reserved: the four start on another worker at once, uncounted.

    Without a loop, Celery's main thread waits inside the pool until it takes the next task: that one stays.
    """
    if pool in {"gevent", "eventlet"} and find_spec(pool) is None:
        pytest.skip(f"{pool} is not installed")
    running = 1 if pool == "solo" else 2
    lab = make_lab(postgresql_url, conf={"worker_prefetch_multiplier": 4 if pool == "solo" else 3}, lease_ttl=LONG)
    loop = {"TASKGATE_TEST_NO_LOOP": "1"} if pool == "prefork without a loop" else {}
    first = lab.start_worker(*POOLS[pool], **loop)
    held, behind, gate = hold(lab, running, 3 if pool == "solo" else 4)
    second = lab.start_worker("-c2")
    told = stop(first)
    moved = behind[1:] if pool == "prefork without a loop" else behind
    wait_for(lambda: lab.journal.ended() >= set(moved), 30, "the reserved ones end")
    starts = [line for id in moved for line in lab.journal.of("start", id)]
    assert {line["worker"] for line in starts} == {second.name}
    assert max(line["time"] for line in starts) - told < SOON
    assert not any(line["redelivered"] for line in starts), "counted as delivered"
    assert not any(row.lease_lost for row in lab.rows())
    assert first.alive
    gate.touch()
    assert first.process.wait(60) == 0
    wait_for(lambda: not lab.rows(), 30, "all acknowledged")
    assert set(lab.journal.starts_each().values()) == {1}
    assert lab.journal.ended() == {*held, *behind}


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_shutdown_by_remote_control(make_lab: MakeLab, postgresql_url: str, pool: str) -> None:
    """The same without a signal: Celery has emptied its waiting lists before anybody is asked."""
    lab = make_lab(postgresql_url, conf={"worker_prefetch_multiplier": 3}, lease_ttl=LONG)
    first = lab.start_worker("-c2", "-P", pool)
    _, behind, gate = hold(lab, 2, 4)
    lab.app.control.shutdown()
    wait_for(lambda: sum(row.owner is None for row in lab.rows()) == 4, 30, "four go back")
    assert {(row.deliveries, row.lease_lost) for row in lab.rows() if row.task_id in behind} == {(0, 0)}
    assert first.alive
    gate.touch()
    assert first.process.wait(60) == 0
    assert sorted(str(row.task_id) for row in lab.rows()) == sorted(behind)
    assert lab.journal.starts() == 2


@pytest.mark.parametrize("pool", [[], ["-Pthreads"]], ids=["prefork", "threads"])
def test_reserved_behind_a_rate_limit_or_unacked_early(make_lab: MakeLab, postgresql_url: str, pool: list[str]) -> None:
    """The same for what waits for a rate limit, and for tasks that are acknowledged when they start."""
    lab = make_lab(postgresql_url, conf={"task_acks_late": False}, lease_ttl=LONG)
    first = lab.start_worker("-c4", *pool)
    seldom = [lab.send("seldom") for _ in range(3)]
    wait_for(lambda: lab.journal.ends() == 1, 30, "the first of them")
    wait_for(lambda: claimed(lab, 2), 30, "two wait for their turn")
    stop(first)
    assert first.process.wait(60) == 0
    rows = lab.rows()
    assert sorted((row.state.value, row.deliveries, row.lease_lost) for row in rows) == [("pending", 0, 0)] * 2
    assert {row.task_id for row in rows} < set(seldom)


@pytest.mark.parametrize("pool", [[], ["-Pthreads"]], ids=["prefork", "threads"])
def test_task_that_ends_during_shutdown_is_acknowledged(
    make_lab: MakeLab, postgresql_url: str, tmp_path: Path, pool: list[str]
) -> None:
    """B48: SIGTERM in the middle of a late-acked task: success, no row left, a new worker runs nothing."""
    conf = {"result_backend": f"file://{tmp_path}", "task_ignore_result": False}
    lab = make_lab(postgresql_url, conf=conf, lease_ttl=LONG)
    first = lab.start_worker("-c1", *pool)
    (id,), _, gate = hold(lab, 1, 0)
    stop(first)
    wait_for(lambda: "Warm shutdown" in first.text(), 30, "it was told")
    gate.touch()
    assert first.process.wait(60) == 0
    assert lab.rows() == []
    asker = lab.make_app(result_backend=conf["result_backend"])
    assert asker.AsyncResult(id).state == "SUCCESS"
    asker.close()
    lab.start_worker("-c1")
    other = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(other), 30, "the new worker works")
    assert lab.journal.starts(id) == 1


@pytest.mark.parametrize("soft", [0.0, 1.0], ids=["cold", "soft"])
def test_quick_shutdown_is_no_loss(make_lab: MakeLab, postgresql_url: str, soft: float) -> None:
    """B50: SIGQUIT in the middle of a long task: ready as soon as it has ended, redelivered, no loss counted."""
    conf = {"worker_soft_shutdown_timeout": soft, "worker_prefetch_multiplier": 2}
    lab = make_lab(postgresql_url, conf=conf, lease_ttl=LONG)
    first = lab.start_worker("-c1")
    (id,), (behind,), gate = hold(lab, 1, 1)
    second = lab.start_worker("-c2")
    stop(first, signal.SIGQUIT)
    first.process.wait(60)
    gone = time.time()
    wait_for(lambda: lab.journal.starts(id) == 2, 30, "it starts again")
    again = lab.journal.of("start", id)[1]
    assert again["worker"] == second.name
    assert again["redelivered"]
    assert again["time"] - gone < SOON
    assert [(row.lease_lost, row.deliveries) for row in lab.rows(task_id=id)] == [(0, 2)]
    gate.touch()
    wait_for(lambda: not lab.rows(), 30, "all acknowledged")
    assert lab.journal.starts(behind) == 1
