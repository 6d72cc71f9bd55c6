"""Unique tasks: refused or merged while another of the same key waits or runs."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain
from celery.exceptions import Reject
from celery.result import AsyncResult
from kombu import Producer

import celery_ext
from kombu_taskgate.core.errors import ConfigError, TaskExists
from kombu_taskgate.core.model import State
from kombu_taskgate.testing.threads import together
from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, holds_for, wait_for

EARLY = {"task_acks_late": False, "task_reject_on_worker_lost": None}
LONG = 60.0


# -- publishing ------------------------------------------------------------------------------------


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("unique", broker=f"taskgate+memory://{uuid.uuid4().hex}")
    app.conf.task_ignore_result = True
    yield app
    app.close()


def keys(app: Celery) -> list[str | None]:
    with app.connection_for_write() as connection:
        return [row.unique_key for row in connection.default_channel._open().broker.list()]


def make(app: Celery, **options: Any) -> Any:
    @app.task(name="invoice", shared=False, **options)
    def invoice(customer: str, number: int = 1, **more: int) -> None:
        """Send one."""

    return invoice


def test_an_option_of_apply_async(app: Celery) -> None:
    """Refused with who has it, as it is: no error of the connection, and only while the key is the same."""
    task = make(app)
    first = task.apply_async(("ann",), unique_key="invoice-7")
    with pytest.raises(TaskExists) as raised:
        task.apply_async(("bob",), unique_key="invoice-7")
    assert (raised.value.state, raised.value.task_id) == (State.PENDING, first.id)
    task.apply_async(("ann",), unique_key="invoice-8")
    task.apply_async(("ann",))
    app.send_task("elsewhere", unique_key="invoice-9")
    with pytest.raises(TaskExists):
        app.send_task("elsewhere", unique_key="invoice-8")
    assert keys(app) == ["invoice-7", "invoice-8", None, "invoice-9"]


def test_name_and_arguments(app: Celery) -> None:
    """unique_key=True: however the same arguments are written, and defaults count."""
    task = make(app, unique_key=True)
    task.delay("ann")
    for same in (lambda: task.delay(customer="ann"), lambda: task.delay("ann", 1), lambda: task.s("ann").delay()):
        with pytest.raises(TaskExists):
            same()
    task.delay("bob")
    task.delay("ann", 2)
    task.delay("ann", extra=1)
    task.apply_async(("ann",), unique_key=False)
    assert len(keys(app)) == 5
    assert all(key is None or key.startswith("invoice:") for key in keys(app))


def test_format_string_and_function(app: Celery) -> None:
    """Over the arguments by name or place; a function may answer that it needs no key."""
    make(app, unique_key="invoice-{customer}-{0}-{number}-{extra}").delay("ann", number=3, extra=5)
    by_function = Celery("other", broker=app.conf.broker_url)
    task = make(by_function, unique_key=lambda customer, number=1: f"f-{customer}" if number > 1 else None)
    task.delay("ann")
    task.delay("ann", 2)
    assert keys(app) == ["invoice-ann-ann-3-5", None, "f-ann"]
    by_function.close()


@pytest.mark.parametrize("option", ["invoice-{nobody}", lambda customer: 1 / 0, lambda customer: 7, 7, ""])
@pytest.mark.parametrize("base", [None, celery_ext.Task])
def test_a_key_that_can_not_be_made(app: Celery, option: Any, base: Any) -> None:
    """The publish is refused with the reason: without its lock the task must not go out."""
    task = make(app, unique_key=option, **({} if base is None else {"base": base}))
    with pytest.raises(ConfigError, match="unique key of task invoice"):
        task.delay("ann")
    assert keys(app) == []


@pytest.mark.parametrize("key", ["", "\0", 7, b"x"])
def test_a_key_that_can_not_be_meant(app: Celery, key: Any) -> None:
    """A key is a text that is not empty."""
    with pytest.raises(ConfigError, match="unique_key is a text"):
        app.send_task("t", unique_key=key)
    assert keys(app) == []


def test_long_keys_are_told_apart(app: Celery) -> None:
    """By their digests, where only the ends differ."""
    app.send_task("t", unique_key="x" * 300 + "a")
    app.send_task("t", unique_key="x" * 300 + "b")
    with pytest.raises(TaskExists):
        app.send_task("t", unique_key="x" * 300 + "a")


def test_merge(app: Celery) -> None:
    """apply_async returns the result of the task that is there."""
    merging = Celery("merging", broker=app.conf.broker_url, task_cls="celery_ext:Task")
    for task in (make(app, base=celery_ext.Task, unique_key=True, unique="merge"), make(merging, unique_key=True)):
        first = task.apply_async(("ann",), unique="merge")
        again = task.apply_async(("ann",), unique="merge")
        assert isinstance(again, AsyncResult)
        assert again.id == first.id
        with pytest.raises(TaskExists):
            task.apply_async(("ann",), unique="refuse")
        assert task.apply_async(("bob",), unique="merge").id != first.id
        with merging.connection_for_write() as connection:
            connection.default_channel.queue_purge("celery")
    merging.close()


def test_merge_needs_the_base_class(app: Celery) -> None:
    """Without it nobody could return the other result: an error at once, also where nothing is to be merged."""
    task = make(app, unique_key=True, unique="merge")
    for publish in (lambda: task.delay("ann"), lambda: app.send_task("t", unique_key="k", unique="merge")):
        with pytest.raises(ConfigError, match=r"celery_ext\.Task"):
            publish()
    with pytest.raises(ConfigError, match="'refuse' or 'merge'"):
        app.send_task("t", unique_key="k", unique="wait")
    assert keys(app) == []


def test_merge_of_what_has_more_to_it(app: Celery) -> None:
    """Callbacks and the rest of a chain would be lost: an error at once."""
    task = make(app, base=celery_ext.Task, unique_key=True, unique="merge")
    with pytest.raises(ConfigError, match="link"):
        task.apply_async(("ann",), link=task.si("bob"))
    with pytest.raises(ConfigError, match="chain"):
        chain(task.si("ann"), task.si("bob"))()
    assert keys(app) == []


def test_one_queue(app: Celery) -> None:
    """A key is one execution's."""
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        channel.exchange_declare("all", "fanout")
        for name in ("q1", "q2"):
            channel.queue_declare(name)
            channel.queue_bind(name, "all")
        with pytest.raises(ConfigError, match="q1, q2"):
            Producer(channel).publish("a", exchange="all", unique_key="k")


def test_another_broker_is_left_alone() -> None:
    """There nothing is refused."""
    app = Celery("elsewhere", broker="memory://")
    for _ in range(2):
        app.send_task("t", unique_key="k")
    app.close()


# -- workers ---------------------------------------------------------------------------------------


def hold(lab: Lab, name: str = "hold_until", **options: Any) -> str:
    """A task with the key k that runs until a file appears."""
    id = lab.send(name, str(lab.folder / "gate"), unique_key="k", **options)
    wait_for(lambda: lab.journal.starts(id) == 1, 30, "it runs")
    return id


def refused(lab: Lab) -> TaskExists:
    with pytest.raises(TaskExists) as raised:
        lab.send("work", unique_key="k")
    assert pickle.loads(pickle.dumps(raised.value)).id == raised.value.id
    return raised.value


def free(lab: Lab) -> bool:
    try:
        id = lab.send("work", unique_key="k")
    except TaskExists:
        return False
    return bool(wait_for(lambda: lab.journal.ends(id) == 1 and not lab.rows(task_id=id), 30, "the next has run"))


def test_fifty_publish_at_once(make_lab: MakeLab, database_url: str) -> None:
    """One wins, whoever it is; the others are told who."""
    lab = make_lab(database_url)
    apps = [lab.make_app() for _ in range(5)]
    outcomes = together([lambda at=at: lab.send("work", app=apps[at % 5], unique_key="k") for at in range(50)])
    won = [one for one in outcomes if isinstance(one, str)]
    assert len(won) == 1, outcomes
    assert {one.task_id for one in outcomes if isinstance(one, TaskExists)} == set(won)
    assert [row.task_id for row in lab.rows()] == won
    for app in apps:
        app.close()


@pytest.mark.crash
@pytest.mark.parametrize("conf", [{}, EARLY], ids=["late", "early"])
def test_free_after_every_end(make_lab: MakeLab, postgresql_url: str, conf: dict[str, Any]) -> None:
    """While it runs it is locked; free after success, failure, a rejection, retries, a revoke and an expiry."""
    lab = make_lab(postgresql_url, conf=conf, lease_ttl=LONG)
    lab.start_worker("-c2")
    hold(lab)
    assert refused(lab).state is State.RUNNING
    (lab.folder / "gate").touch()
    wait_for(lambda: free(lab), 30, "free after success")
    for name, *args in (("fail",), ("ignore",), ("kill_self",), ("flaky", 2)):
        lab.send(name, *args, unique_key="k")
        wait_for(lambda: free(lab), 30, f"free after {name}")
    waits = lab.send("work", unique_key="k", countdown=60)
    refused(lab)
    lab.app.control.revoke(waits)
    wait_for(lambda: free(lab), 30, "free after a revoke")
    lab.send("work", unique_key="k", countdown=1, expires=0.5)
    wait_for(lambda: free(lab), 30, "free after an expiry")
    lab.send("work", unique_key="k", countdown=60)
    lab.app.control.purge()
    wait_for(lambda: free(lab), 30, "free after a purge")


@pytest.mark.crash
def test_killed_worker_of_a_late_acknowledged_task(make_lab: MakeLab, database_url: str) -> None:
    """Locked all the time: until the lease is reaped, and while it runs again."""
    lab = make_lab(database_url, lease_ttl=4.0)
    worker = lab.start_worker("-c1")
    id = hold(lab)
    worker.kill()
    assert refused(lab).task_id == id
    lab.start_worker("-c1")
    wait_for(lambda: lab.journal.starts(id) == 2, 30, "it runs again")
    assert refused(lab).task_id == id
    (lab.folder / "gate").touch()
    wait_for(lambda: free(lab), 30, "free at its end")


@pytest.mark.crash
def test_killed_worker_of_an_early_acknowledged_task(make_lab: MakeLab, database_url: str) -> None:
    """Locked until the lease is reaped, and free then: it does not run again."""
    lab = make_lab(database_url, conf=EARLY, lease_ttl=4.0)
    worker = lab.start_worker("-c1")
    id = hold(lab)
    wait_for(lambda: lab.rows()[0].begun, 30, "that is known")
    worker.kill()
    assert refused(lab).task_id == id
    lab.start_worker("-c1")
    wait_for(lambda: free(lab), 30, "free when it is a dead letter")
    assert [(row.task_id, row.reason) for row in lab.rows(states=[State.FAILED])] == [(id, "lost")]
    assert lab.journal.starts(id) == 1


@pytest.mark.crash
@pytest.mark.parametrize("conf", [{}, EARLY], ids=["late", "early"])
def test_retry_takes_the_lock_over(make_lab: MakeLab, postgresql_url: str, conf: dict[str, Any]) -> None:
    """Between two runs it is locked, by the execution that waits; no retry is refused."""
    lab = make_lab(postgresql_url, conf=conf, lease_ttl=LONG)
    lab.start_worker("-c1")
    id = lab.send("flaky", 2, 4.0, unique_key="k")
    for retry in (1, 2):
        wait_for(lambda: lab.journal.starts(id) == retry, 30, f"run {retry}")  # noqa: B023  # it is called at once
        wait_for(lambda: [row.state for row in lab.rows()] == [State.PENDING], 30, "it waits")
        error = refused(lab)
        assert (error.state, error.task_id) == (State.PENDING, id)
    wait_for(lambda: lab.journal.ends(id) == 1, 30, "it ends")
    wait_for(lambda: free(lab), 30, "free at its end")


@pytest.mark.crash
def test_replacement_takes_the_lock_over(make_lab: MakeLab, postgresql_url: str) -> None:
    """What takes the task's place has its id, and its lock."""
    lab = make_lab(postgresql_url, lease_ttl=LONG)
    lab.start_worker("-c1")
    id = lab.send("replace", str(lab.folder / "gate"), unique_key="k")
    wait_for(lambda: lab.journal.starts(id) == 2, 30, "the replacement runs")
    holds_for(lambda: refused(lab).task_id == id, 0.3, "locked")
    (lab.folder / "gate").touch()
    wait_for(lambda: free(lab), 30, "free at its end")


@pytest.mark.crash
def test_throttled_keeps_the_lock(make_lab: MakeLab, postgresql_url: str) -> None:
    """It waits, and is the same execution."""
    lab = make_lab(postgresql_url, lease_ttl=LONG)
    lab.start_worker("-c1")
    id = lab.send("throttle", 1, 4.0, unique_key="k")
    wait_for(lambda: [row.state for row in lab.rows()] == [State.RETRYING], 30, "it waits")
    assert refused(lab).task_id == id
    wait_for(lambda: lab.journal.ends(id) == 1, 30, "it ends")
    wait_for(lambda: free(lab), 30, "free at its end")


def test_retry_that_was_published_already(app: Celery) -> None:
    """A worker that died after it had published the retry: the second run publishes it once more, and nothing comes."""
    options = {"task_id": "t", "unique_key": "k", "retries": 1}
    app.send_task("t", **options)
    app.send_task("t", **options)
    assert keys(app) == ["k"]
    for other in ({"task_id": "other", "retries": 1}, {"task_id": "t"}):
        with pytest.raises(TaskExists):
            app.send_task("t", unique_key="k", **other)
    assert keys(app) == ["k"]


def test_refused_inside_a_task(app: Celery) -> None:
    """It is an error like others there: no rejection, and no reason to deliver again."""
    assert not issubclass(TaskExists, Reject)
    app.send_task("t", unique_key="k")
    task = make(app, unique_key="k")
    with pytest.raises(TaskExists):
        task.apply_async(("ann",), retry=True, retry_policy={"max_retries": 3, "interval_start": 60})
