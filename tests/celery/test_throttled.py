"""Tasks that raise Throttled: they come back later, whatever the pool, and use up no retries."""

from __future__ import annotations

import copy
import datetime as dt
import pickle
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo

from celery_ext import Throttled
from kombu_taskgate.core.model import State, Task
from tests.celery.test_pools import POOLS, installed
from tests.celery.test_worker_request import Bench
from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, wait_for

EARLY = {"task_acks_late": False, "task_reject_on_worker_lost": None}
#: Leases that run out are not what brings a task back here.
LONG = 60.0


class Busy(Throttled):
    def __init__(self, *, host: str) -> None:
        super().__init__(retry_after=2.5, reason=f"{host} is busy")
        self.host = host


def row(bench: Bench) -> Task:
    found = bench.row()
    assert found is not None
    return found


# -- the exception ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Throttled(5), Throttled(retry_after=0.5, reason="full"), Busy(host="db1")])
def test_it_survives_a_pipe(error: Throttled) -> None:
    """With its arguments, also those of a subclass that takes others."""
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (again.retry_after, again.reason, again.requeue) == (error.retry_after, error.reason, True)
        assert vars(again) == vars(error)
        assert str(again) == str(error)
    try:
        raise error
    except Throttled:
        info = pickle.loads(pickle.dumps(ExceptionInfo(internal=True)))
    assert info.exception.retry_after == error.retry_after


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), 1_790_000_000, 366 * 86400 + 1])
def test_a_time_that_can_not_be_meant(wrong: float) -> None:
    """Negative, endless, or so long that it must be an instant."""
    with pytest.raises(ValueError, match="retry_after of 0 to"):
        Throttled(wrong)


@pytest.mark.parametrize("wrong", [None, "5", True, dt.timedelta(seconds=5)])
def test_no_number_of_seconds(wrong: Any) -> None:
    """The error says what is wanted."""
    with pytest.raises(TypeError, match="a number of seconds"):
        Throttled(wrong)


def test_its_name_loads_celery_and_the_package_does_not() -> None:
    """A program with kombu alone loads no Celery."""
    code = "import sys, celery_ext; assert 'celery' not in sys.modules; celery_ext.Throttled; sys.modules['celery']"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ImportError, match="Trottled"):
        from celery_ext import Trottled  # type: ignore[attr-defined]  # noqa: F401  # that is shown


# -- the request -----------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [True, False])
def test_it_is_put_back_for_later(late: bool) -> None:
    """Retrying, counted as throttled and as nothing else; also when it was acknowledged at its start."""
    bench = Bench(acks_late=late)
    bench.request.on_accepted(1, 0.0)
    bench.fails_with(Throttled(30, "full"))
    task = row(bench)
    assert (task.state, task.throttled, task.attempts, task.lease_lost) == (State.RETRYING, 1, 0, 0)
    assert (task.begun, task.run_at - task.created_at >= 30_000) == (False, True)
    bench.request.acknowledge()
    assert row(bench).state is State.RETRYING, "nobody settles it any more"
    bench.close()


def test_what_callers_see_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stored, so it is a task that waits; but a STARTED that was stored becomes RETRY."""
    stored: list[tuple[Any, ...]] = []
    for options in ({}, {"ignore_result": False}, {"ignore_result": False, "track_started": True}):
        bench = Bench(**options)
        monkeypatch.setattr(bench.task.backend, "mark_as_retry", lambda *args, **_: stored.append(args))
        bench.fails_with(Throttled(30))
        assert row(bench).state is State.RETRYING
        bench.close()
    assert [type(error) for _, error in stored] == [Throttled]


@pytest.mark.parametrize("late", [True, False])
def test_callers_are_told_while_its_lease_is_held(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Of an execution that waits nobody has a lease, and the result backend would refuse what is said of it."""
    seen: list[State] = []

    def fails(*_: Any, **__: Any) -> None:
        seen.append(row(bench).state)
        raise OSError("no result backend")

    bench = Bench(acks_late=late, ignore_result=False, track_started=True)
    bench.request.on_accepted(1, 0.0)
    monkeypatch.setattr(bench.task.backend, "mark_as_retry", fails)
    with pytest.raises(OSError, match="no result backend"):
        bench.fails_with(Throttled(30))
    assert seen == [State.RUNNING]
    assert row(bench).state is State.RETRYING
    bench.close()


# -- workers ---------------------------------------------------------------------------------------


def ran_twice_more(lab: Lab, id: str, seconds: float) -> None:
    """It was throttled twice and has ended, with no retry counted and the pauses that it asked for."""
    wait_for(lambda: lab.journal.ends(id) == 1, 30, "it ends")
    wait_for(lambda: not lab.rows(), 30, "it is settled")
    starts = lab.journal.of("start", id)
    assert [start["retries"] for start in starts] == [0, 0, 0]
    assert [start["redelivered"] for start in starts] == [False, True, True]
    times = [start["time"] for start in starts]
    assert all(after - before >= seconds for before, after in pairwise(times))


@pytest.mark.slow
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("pool", POOLS)
def test_on_each_pool(make_lab: MakeLab, postgresql_url: str, pool: str, late: bool) -> None:
    """More often than it may be retried, and with autoretry_for=(Exception,): it is no failure."""
    installed(pool)
    lab = make_lab(postgresql_url, conf={} if late else EARLY, lease_ttl=LONG)
    worker = lab.start_worker(*POOLS[pool])
    ran_twice_more(lab, lab.send("throttle", 2, 0.3), 0.3)
    wait_for(lambda: "throttled for 0.3 s: db1 is busy" in worker.text(), 30, "it is said")


def test_on_each_database(make_lab: MakeLab, database_url: str) -> None:
    """It waits in the database, so a worker that ends meanwhile does not matter."""
    lab = make_lab(database_url, lease_ttl=LONG)
    first = lab.start_worker("-c1")
    id = lab.send("throttle", 2, 3.0)
    waits = wait_for(lambda: [one for one in lab.rows() if one.state is State.RETRYING], 30, "it waits")[0]
    assert (waits.throttled, waits.owner) == (1, None)
    assert first.terminate() == 0
    lab.start_worker("-c1")
    ran_twice_more(lab, id, 3.0)


@pytest.mark.parametrize("late", [True, False])
def test_too_often(make_lab: MakeLab, postgresql_url: str, late: bool) -> None:
    """After throttled_max times it is a dead letter with the reason that the task gave."""
    lab = make_lab(postgresql_url, conf={} if late else EARLY, lease_ttl=LONG, throttled_max=3)
    worker = lab.start_worker("-c1")
    id = lab.send("throttle", 100, 0.05)
    dead = wait_for(lambda: lab.rows(states=[State.FAILED]), 30, "the dead letter")[0]
    assert (dead.task_id, dead.reason, dead.throttled) == (id, "throttled", 3)
    assert dead.detail == "throttled for 0.05 s: db1 is busy"
    assert lab.journal.starts(id) == 3
    wait_for(lambda: "throttled too often" in worker.text(), 30, "and it is said")
