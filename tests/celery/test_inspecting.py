"""What inspect_task and AsyncResult.exists tell of a task."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_ext import TaskInfo, inspect_task
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.model import Claim, FailKind
from kombu_taskgate.core.settings import BrokerSettings
from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, wait_for

LATE = 60.0


@pytest.fixture
def make(make_lab: MakeLab) -> MakeLab:
    """Labs whose results are in the broker's own tables."""

    def make(url: str, **options: Any) -> Lab:
        conf = {"result_backend": f"taskgate+{url}", "task_ignore_result": False, "result_extended": True}
        return make_lab(url, conf, **options)

    return make


def info(lab: Lab, task_id: str) -> TaskInfo:
    found = inspect_task(task_id, app=lab.app)
    assert found is not None
    return found


def exists(app: Celery, task_id: str) -> bool:
    """AsyncResult.exists, and what stands behind it in versions of Celery that do not have it."""
    result = app.AsyncResult(task_id)
    return bool(result.exists() if hasattr(result, "exists") else app.backend.task_result_exists(task_id))


def claimed(lab: Lab, task_id: str) -> Claim:
    """Claim the only ready task, as a worker would."""
    (claim,) = lab.broker.dequeue(["celery"], owner="somebody")
    assert claim.task_id == task_id
    return claim


def test_life_of_a_task(database_url: str, make: MakeLab) -> None:
    """A task is told from one that never existed before any worker runs, while it runs, and when it has ended (B67)."""
    lab = make(database_url)
    go = lab.folder / "go"
    never = str(uuid.uuid4())
    assert inspect_task(never, app=lab.app) is None
    assert not exists(lab.app, never)
    first, second = lab.send("hold_until", str(go)), lab.send("work", 0, "second")
    waits = info(lab, second)
    assert (waits.name, waits.queue, waits.state, waits.status) == (
        "tests.workers.app.work", "celery", "pending", "PENDING",
    )  # fmt: skip
    assert (waits.position, waits.executions, waits.deliveries, waits.owner, waits.lease_until) == (2, 1, 0, None, None)
    assert waits.run_at is not None
    assert exists(lab.app, second)
    worker = lab.start_worker("-c1")
    wait_for(lambda: lab.journal.starts(first), LATE, "the first runs")
    runs = info(lab, first)
    assert (runs.state, runs.position, runs.deliveries, runs.run_at) == ("running", None, 1, None)
    assert f":{worker.pid}:" in (runs.owner or "")
    assert runs.lease_until is not None
    assert runs.lease_until_ms == round(runs.lease_until.timestamp() * 1000)
    assert timedelta(0) < runs.lease_until - datetime.now(timezone.utc) <= timedelta(seconds=61)
    assert exists(lab.app, first)
    # A session's leases end with the session: what is shown moves on with its renewals.
    go.touch()
    assert lab.app.AsyncResult(second).get(timeout=LATE) == "second"
    wait_for(lambda: not lab.unfinished(), LATE, "all is acknowledged")
    over = info(lab, second)
    assert (over.state, over.status, over.name, over.executions) == (
        "completed", "SUCCESS", "tests.workers.app.work", 0,
    )  # fmt: skip
    assert exists(lab.app, second)
    lab.app.AsyncResult(second).forget()
    assert inspect_task(second, app=lab.app) is None
    assert not exists(lab.app, second)


def test_what_waits_for_its_time_or_for_others(database_url: str, make: MakeLab) -> None:
    """An ETA, the parents that are still to come, and the reason of a cancellation are told."""
    lab = make(database_url)
    delayed = lab.send("work", countdown=3600)
    found = info(lab, delayed)
    assert (found.state, found.position) == ("pending", None)
    assert found.run_at is not None
    assert found.run_at - datetime.now(timezone.utc) > timedelta(minutes=59)
    assert found.run_at_ms == round(found.run_at.timestamp() * 1000)
    one, two = lab.send("work"), lab.send("work")
    child = lab.send("work", depends_on=[one, two])
    assert (info(lab, child).state, info(lab, child).waits_for) == ("blocked", tuple(sorted([one, two])))
    lab.app.backend.store_result(one, None, "SUCCESS")
    assert info(lab, child).waits_for == (two,)
    lab.app.backend.store_result(two, ValueError("no"), "FAILURE")
    canceled = info(lab, child)
    assert (canceled.state, canceled.reason, canceled.waits_for) == ("canceled", "parent", ())
    assert two in (canceled.detail or "")


def test_dead_letter_and_second_execution(database_url: str, make: MakeLab) -> None:
    """A dead letter shows why it was given up; of several executions the newest is shown (B67)."""
    lab = make(database_url, lease_lost_max=1)
    id = lab.send("work")
    lab.broker.fail(claimed(lab, id), FailKind.LOST, detail="killed")
    dead = info(lab, id)
    assert (dead.state, dead.reason, dead.detail, dead.lease_lost, dead.owner) == (
        "failed", "lease_lost", "killed", 1, "somebody",
    )  # fmt: skip
    assert exists(lab.app, id)
    (row,) = lab.rows(task_id=id)
    lab.broker.replay(row.id)
    again = info(lab, id)
    assert (again.state, again.executions, again.reason, again.deliveries) == ("pending", 2, None, 0)


def test_nothing_of_it_can_be_changed(main_url: str, make: MakeLab) -> None:
    """What is told is a picture of one moment."""
    found = info(lab := make(main_url), lab.send("work"))
    with pytest.raises(FrozenInstanceError):
        found.state = "other"  # type: ignore[misc]  # that is the point


# -- only one of the two is taskgate -----------------------------------------------------------------


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Celery]:
    app = Celery("inspecting", set_as_current=False)
    yield app
    app.pool.force_close_all()
    app.close()


@pytest.mark.parametrize("results", [None, "cache+memory://", "rpc://"])
def test_only_the_broker_is_taskgate(app: Celery, tmp_path: Path, results: str | None) -> None:
    """Where results are kept elsewhere, or nowhere, the broker's part is told, and what the backend can tell."""
    app.conf.update(broker_url=f"taskgate+sqlite:///{tmp_path}/a.db", result_backend=results)
    id = app.send_task("noop").id
    found = inspect_task(id, app=app)
    assert found is not None
    assert (found.state, found.position) == ("pending", 1)
    assert found.status == ("PENDING" if results == "cache+memory://" else None)
    assert inspect_task("never", app=app) is None
    broker = open_broker(BrokerSettings(f"sqlite:///{tmp_path}/a.db"))
    (claim,) = broker.dequeue(["celery"])
    broker.ack(claim)
    broker.close()
    if results == "cache+memory://":
        app.backend.store_result(id, 1, "SUCCESS")
        found = inspect_task(id, app=app)
        assert found is not None
        assert (found.state, found.status) == ("completed", "SUCCESS")
    else:
        assert inspect_task(id, app=app) is None


def test_only_the_results_are_taskgate(app: Celery, tmp_path: Path) -> None:
    """With another broker what the results say is told; of what waits nothing is known."""
    app.conf.update(broker_url="memory://", result_backend=f"taskgate+sqlite:///{tmp_path}/a.db")
    assert inspect_task("waiting", app=app) is None
    assert not exists(app, "waiting")
    app.backend.store_result("done", 1, "SUCCESS")
    assert inspect_task("done", app=app) == TaskInfo("done", status="SUCCESS")
    assert exists(app, "done")


def test_the_package_stays_light() -> None:
    """A program that only imports celery_ext loads neither Celery nor SQLAlchemy."""
    code = (
        "import sys, celery_ext; print([m for m in ('celery', 'kombu', 'sqlalchemy') if m in sys.modules]);"
        "print(celery_ext.inspect_task.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "inspect_task"]
