"""Tasks that wait in the broker until others have succeeded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery, group

from kombu_taskgate.core.errors import ConfigError, TaskNotFound
from kombu_taskgate.core.model import State, Task
from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, holds_for, wait_for

LATE = 60.0


@pytest.fixture
def make(make_lab: MakeLab) -> MakeLab:
    """Labs whose results are in the broker's own tables."""

    def make(url: str, conf: dict[str, Any] | None = None, **options: Any) -> Lab:
        results = {"result_backend": f"taskgate+{url}", "task_ignore_result": False}
        return make_lab(url, {**results, **(conf or {})}, **options)

    return make


def row(lab: Lab, task_id: str) -> Task:
    """The only execution of a task."""
    (found,) = lab.rows(task_id=task_id)
    return found


def is_canceled(lab: Lab, task_id: str) -> bool:
    return row(lab, task_id).state is State.CANCELED


def test_waits_for_the_success_of_its_parents(database_url: str, make: MakeLab) -> None:
    """A child is blocked while a parent runs, and starts when the last one has stored its success."""
    lab = make(database_url)
    lab.start_worker("-c2")
    go = lab.folder / "go"
    quick, slow = lab.send("work", 0, "quick"), lab.send("hold_until", str(go))
    child = lab.send("work", 0, "child", depends_on=[quick, lab.app.AsyncResult(slow)])
    wait_for(lambda: lab.journal.starts(slow) and lab.journal.ends(quick), LATE, "the parents have started")
    wait_for(lambda: row(lab, child).pending_parents == 1, LATE, "one parent was counted")
    assert row(lab, child).state is State.BLOCKED
    assert lab.app.AsyncResult(child).state == "PENDING"
    go.touch()
    assert lab.app.AsyncResult(child).get(timeout=LATE) == "child"
    (end,), (start,) = lab.journal.of("end", slow), lab.journal.of("start", child)
    assert start["time"] >= end["time"]


def test_a_parent_that_retries_goes_on(database_url: str, make: MakeLab) -> None:
    """A child does not start, nor is it canceled, between the tries of its parent."""
    lab = make(database_url)
    parent = lab.send("flaky", 2, 0.3)
    child = lab.send("work", 0, "child", depends_on=[parent])
    lab.start_worker("-c2")
    assert lab.app.AsyncResult(child).get(timeout=LATE) == "child"
    assert lab.journal.starts(parent) == 3
    assert lab.journal.of("start", child)[0]["time"] >= lab.journal.of("end", parent)[0]["time"]


def test_a_parent_that_fails(database_url: str, make: MakeLab) -> None:
    """Its children are canceled and say why; one that ignores the failures of its parents runs."""
    lab = make(database_url)
    parent = lab.send("work", "no number")
    child = lab.send("work", 0, "child", depends_on=[parent])
    tolerant = lab.send("work", 0, "tolerant", depends_on=[parent], ignore_parent_failure=True)
    lab.start_worker("-c2")
    assert lab.app.AsyncResult(tolerant).get(timeout=LATE) == "tolerant"
    assert lab.app.AsyncResult(parent).state == "FAILURE"
    found = row(lab, child)
    assert (found.state, found.reason) == (State.CANCELED, "parent")
    assert found.detail is not None
    assert parent in found.detail
    assert "FAILURE" in found.detail
    late = lab.send("work", 0, "late", depends_on=[parent])
    assert is_canceled(lab, late)
    assert lab.journal.starts(child) == 0


def test_a_parent_that_ignores_its_result(database_url: str, make: MakeLab) -> None:
    """It can't be seen to succeed: its child is canceled when it is over, with a word about that."""
    lab = make(database_url, lease_ttl=3)
    parent = lab.send("work", 0, ignore_result=True)
    child = lab.send("work", 0, "child", depends_on=[parent])
    lab.start_worker("-c1")
    wait_for(lambda: is_canceled(lab, child), LATE, "the child is canceled")
    detail = row(lab, child).detail
    assert detail is not None
    assert parent in detail
    assert "ignore" in detail


@pytest.mark.crash
def test_a_parent_whose_worker_is_killed(database_url: str, make: MakeLab) -> None:
    """A child goes on waiting while its parent is lost with its worker, and runs when another has run the parent."""
    lab = make(database_url, lease_ttl=3)
    go = lab.folder / "go"
    parent = lab.send("hold_until", str(go))
    child = lab.send("work", 0, "child", depends_on=[parent])
    victim = lab.start_worker("-c1")
    wait_for(lambda: lab.journal.starts(parent), LATE, "the parent runs")
    victim.kill()
    lab.start_worker("-c1")
    wait_for(lambda: lab.journal.starts(parent) >= 2, LATE, "the parent runs again")
    assert row(lab, child).state is State.BLOCKED
    go.touch()
    assert lab.app.AsyncResult(child).get(timeout=LATE) == "child"


def test_revoked_child_and_revoked_parent(main_url: str, make: MakeLab) -> None:
    """A child that is revoked does not run; one whose parent is revoked is canceled with it."""
    lab = make(main_url)
    first, second = lab.send("work", 0, "first"), lab.send("work", 0, "second")
    revoked = lab.send("work", 0, "revoked", depends_on=[first])
    orphan = lab.send("work", 0, "orphan", depends_on=[second])
    lab.app.control.revoke(revoked)
    assert is_canceled(lab, revoked)
    lab.app.control.revoke(second)
    assert is_canceled(lab, orphan)
    assert second in (row(lab, orphan).detail or "")
    lab.start_worker("-c1")
    assert lab.app.AsyncResult(first).get(timeout=LATE) == "first"
    holds_for(lambda: not lab.journal.starts(revoked) and not lab.journal.starts(orphan), 0.5, "nobody runs them")


# -- publishing --------------------------------------------------------------------------------------


def app_for(url: str, results: str | None, **conf: Any) -> Celery:
    app = Celery("depends", set_as_current=False)
    app.conf.update(broker_url=url, result_backend=results, **conf)

    @app.task(name="noop", shared=False)
    def noop(*args: object) -> None:
        pass

    return app


@pytest.fixture
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """An app with everything in one SQLite file."""
    url = f"taskgate+sqlite:///{tmp_path}/depends.db"
    app = app_for(url, url)
    yield app
    app.pool.force_close_all()
    app.close()


def test_signatures_groups_and_results_are_taken(app: Celery) -> None:
    """Ids, results and groups of results may be named, in apply_async and as an option of a signature."""
    noop = app.tasks["noop"]
    one, many = noop.delay(), group(noop.s() for _ in range(3)).apply_async()
    child = noop.si().set(depends_on=[one.id, *(each.id for each in many)]).apply_async()
    other = noop.apply_async(depends_on=many)
    alone = noop.apply_async(depends_on=one)
    chained = (noop.si().set(depends_on=[one.id]) | noop.si()).apply_async()
    broker = app.backend.broker
    waits = [broker.inspect(result.id) for result in (child, other, alone, chained.parent)]
    assert [None if one is None else one.task.state for one in waits] == [State.BLOCKED] * 4
    assert [len(found.waits_for) for found in waits if found is not None] == [4, 3, 1, 1]


def test_what_can_never_be_fulfilled_is_refused(app: Celery) -> None:
    """A task that nobody knows, the task itself, and what is no task are refused, and nothing is published."""
    noop = app.tasks["noop"]
    with pytest.raises(TaskNotFound, match="never-published"):
        noop.apply_async(depends_on=["never-published"])
    with pytest.raises(ConfigError, match="itself"):
        noop.apply_async(task_id="me", depends_on=["me"])
    with pytest.raises(ConfigError, match="42"):
        noop.apply_async(depends_on=[42])
    assert app.backend.broker.list() == []


@pytest.mark.parametrize("results", [None, "cache+memory://", "taskgate+memory://elsewhere"])
def test_results_that_are_kept_elsewhere(tmp_path: Path, results: str | None) -> None:
    """Where the broker never sees the results, waiting for them is refused with the reason; other tasks go on."""
    url = f"taskgate+sqlite:///{tmp_path}/depends.db"
    app = app_for(url, results)
    parent = app.tasks["noop"].delay()
    with pytest.raises(ConfigError, match="depends_on needs the results in the tables of the broker"):
        app.tasks["noop"].apply_async(depends_on=[parent.id])
    app.pool.force_close_all()
    app.close()


def test_results_in_the_same_tables_by_other_settings(tmp_path: Path) -> None:
    """How the connections for results are used makes no difference: the tables are the broker's."""
    url = f"taskgate+sqlite:///{tmp_path}/depends.db"
    app = app_for(url, url)
    app.conf.result_backend_transport_options = {"pool_size": 3}
    parent = app.tasks["noop"].delay()
    child = app.tasks["noop"].apply_async(depends_on=[parent.id])
    found = app.backend.broker.inspect(child.id)
    assert found is not None
    assert found.task.state is State.BLOCKED
    app.backend.broker.close()
    app.pool.force_close_all()
    app.close()
