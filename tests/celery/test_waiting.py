"""Waiting for results: who is woken, by what, and what is left over (report B66)."""

from __future__ import annotations

import gc
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, states
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult, GroupResult
from kombu.exceptions import ContentDisallowed

from celery_ext import waiting
from kombu_taskgate.core.errors import StoreUnavailable
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.threads import errors_of, together
from tests.celery.results import an_app, succeed
from tests.workers.harness import wait_for

LONG = 30.0


@pytest.fixture
def app(broker_settings: BrokerSettings) -> Iterator[Celery]:
    """An app on each store in turn."""
    with an_app(broker_settings) as app:
        yield app


@pytest.fixture
def other(broker_settings: BrokerSettings) -> Iterator[Celery]:
    """An app that shares tables with the other one and nothing else, as another process would."""
    with an_app(broker_settings, options={"pool_timeout": 29.0}) as app:
        yield app


def new_id() -> str:
    return uuid.uuid4().hex


class Getting(threading.Thread):
    """Gets a result in a thread."""

    def __init__(self, app: Celery, task_id: str, **options: Any) -> None:
        super().__init__(daemon=True)
        self.result = app.AsyncResult(task_id)
        self.options = {"timeout": LONG, **options}
        self.value: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.result.get(**self.options)
        except BaseException as error:
            self.error = error

    def done(self) -> Any:
        self.join(LONG + 10)
        assert not self.is_alive(), "get() does not return"
        if self.error is not None:
            raise self.error
        return self.value


def consumer(app: Celery) -> waiting.ResultConsumer:
    found = app.backend.result_consumer
    assert isinstance(found, waiting.ResultConsumer)
    return found


def until_waiting(app: Celery, number: int = 1) -> None:
    wait_for(lambda: consumer(app)._waiters >= number, LONG, "they wait")


# -- who is woken ----------------------------------------------------------------------------------


def test_get_returns_what_is_stored_later(app: Celery, other: Celery) -> None:
    """A result that another process stores ends the wait."""
    id = new_id()
    getting = Getting(app, id)
    until_waiting(app)
    succeed(other, id, {"a": [1, None]})
    assert getting.done() == {"a": [1, None]}


def test_a_result_beside_another_one_is_not_overlooked(app: Celery, other: Celery) -> None:
    """A look for one task, which somebody told of, does not count as one for all."""
    known, unknown = new_id(), new_id()
    look = consumer(app)
    waits = Getting(app, unknown)
    until_waiting(app)
    wait_for(lambda: look._mark is not None or look._count > 1, LONG, "it has looked")
    original = look._look_together
    stored: list[str] = []

    def slow(ids: list[str], **how: Any) -> None:
        # Both are stored before the look, and it is told of one of them. A look that is due anyway may be for both.
        if known in ids and not stored:
            stored.append(unknown)
            succeed(other, unknown, "unknown")
            other.backend.result_consumer.stop()
        original(ids, **how)

    look._look_together = slow  # type: ignore[method-assign]
    also = Getting(app, known)
    wait_for(lambda: known in look._watched, LONG, "it is watched")
    succeed(app, known, "known")
    assert also.done() == "known"
    assert waits.done() == "unknown"


def test_words_about_others_do_not_put_off_the_look_for_all(
    app: Celery, other: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost word costs one pause, however many words come of other tasks."""
    monkeypatch.setattr(waiting, "LOOK_ANYWAY", 0.4)
    look = consumer(app)
    lost = new_id()
    original = look._wake
    look._wake = lambda told: original(None if told is None else [id for id in told if id != lost])  # type: ignore[method-assign]
    waits = Getting(app, lost)
    until_waiting(app)
    other.backend.broker.results.get([lost])
    wait_for(lambda: look._count > 1, LONG, "it has looked")
    ids = [new_id() for _ in range(400)]
    busy = [app.AsyncResult(id) for id in ids]
    for one in busy:
        one.then(lambda result: None)
    wait_for(lambda: time.monotonic() > look._look_on_until, LONG, "it looks seldom again")
    succeed(other, lost, "found")
    for id in ids:
        if not waits.is_alive():
            break
        succeed(app, id)
        time.sleep(0.05)
    assert not waits.is_alive(), "it was not looked for while others were told of"
    assert waits.done() == "found"


def test_a_result_that_was_forgotten_meanwhile_is_delivered(app: Celery) -> None:
    """The versions of a result begin anew when it was deleted, by hand or by age."""
    id = new_id()
    heard: list[str] = []
    getting = Getting(app, id, on_message=lambda meta: heard.append(meta["status"]))
    until_waiting(app)
    for percent in range(3):
        app.backend.store_result(id, percent, "PROGRESS")
    wait_for(lambda: heard, LONG, "it hears of the progress")
    app.backend.broker.results.forget([id])
    succeed(app, id, "end")
    assert getting.done() == "end"
    assert heard[-1] == states.SUCCESS


def test_fifty_threads_get_their_own_results(app: Celery, other: Celery) -> None:
    """Each thread gets what it waits for, and two that wait for one task both get it."""
    ids = [new_id() for _ in range(25)]
    threads = [Getting(app, id) for id in ids for _ in range(2)]
    until_waiting(app, len(threads))
    for number, id in enumerate(ids):
        succeed(other, id, number)
    assert [thread.done() for thread in threads] == [number for number in range(25) for _ in range(2)]


def test_results_that_were_there_before(app: Celery, other: Celery) -> None:
    """What is stored already is found at once, also with a timeout of zero."""
    id = new_id()
    succeed(other, id, 7)
    assert app.AsyncResult(id).get(timeout=0) == 7
    assert app.AsyncResult(id).get(timeout=LONG) == 7


@pytest.mark.parametrize("leave", ["ask", "time out", "forget"])
def test_other_results_of_the_same_task_come_and_go(app: Celery, other: Celery, leave: str) -> None:
    """Whoever waits gets the result, whatever becomes of other objects for the same task (celery#4925)."""
    task_id = new_id()
    waiting_here = [Getting(app, task_id) for _ in range(2)]
    wait_for(lambda: app.backend.result_consumer._waiters == 2, LONG, "both wait")
    if leave == "ask":
        assert app.AsyncResult(task_id).state == states.PENDING
    elif leave == "time out":
        with pytest.raises(CeleryTimeoutError):
            app.AsyncResult(task_id).get(timeout=0.05)
    else:
        app.AsyncResult(task_id).forget()
    gc.collect()
    succeed(other, task_id, "here")
    for one in waiting_here:
        one.join(LONG)
        assert one.value == "here", one.error
    consumer = app.backend.result_consumer
    wait_for(lambda: not (consumer._waited or consumer._leaving or consumer._watched), LONG, "nothing is left of it")


def test_threads_that_join_the_same_group(app: Celery, other: Celery) -> None:
    """Each gets all values; results of one task are equal, and must not take each other's place."""
    ids = [new_id() for _ in range(4)]
    consumer = app.backend.result_consumer

    def join(number: int) -> Any:
        if not number:
            wait_for(lambda: consumer._waiters == 3, LONG, "the others wait")
            for place, task_id in enumerate(ids):
                succeed(other, task_id, place)
        return GroupResult(new_id(), [app.AsyncResult(id) for id in ids], app=app).get(timeout=LONG)

    values: list[Any] = []
    errors: list[Exception] = []
    lock = threading.Lock()

    def run(number: int) -> None:
        try:
            value = join(number)
        except Exception as error:
            errors.append(error)
            return
        with lock:
            values.append(value)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not errors
    assert values == [[0, 1, 2, 3]] * 4


def test_a_group_in_a_group_is_joined(app: Celery, other: Celery) -> None:
    """Its values come as a list, in its place."""
    inner = GroupResult(new_id(), [app.AsyncResult(new_id()) for _ in range(2)], app=app)
    single = app.AsyncResult(new_id())
    outer = GroupResult(new_id(), [inner, single], app=app)
    for value, one in enumerate((*inner.results, single)):
        succeed(other, one.id, value)
    assert outer.get(timeout=LONG) == [[0, 1], 2]


def test_timeouts_of_many_threads(app: Celery) -> None:
    """Each ends by itself, and nothing of it is remembered."""
    ids = [new_id() for _ in range(20)]

    def give_up(id: str) -> None:
        with pytest.raises(CeleryTimeoutError):
            app.AsyncResult(id).get(timeout=0 if hash(id) % 2 else 0.2)

    assert errors_of(together([lambda id=id: give_up(id) for id in ids])) == []  # type: ignore[misc]
    gc.collect()
    wait_for(lambda: consumer(app)._watched == {}, LONG, "nothing is watched")
    assert [len(part) for part in app.backend._pending_results] == [0, 0]


def test_result_that_came_from_before_a_fork(app: Celery) -> None:
    """A result object that was being waited for in a parent can be got in its child."""
    result = app.AsyncResult(new_id())
    result.then(lambda ready: None)
    # What the module does in a child; the whole fork is tested with workers.
    consumer(app).after_fork()
    succeed(app, result.id, "here")
    assert result.get(timeout=LONG) == "here"


# -- those who are called back ---------------------------------------------------------------------


def test_callbacks_are_called_while_somebody_waits(app: Celery, other: Celery) -> None:
    """A then() of one result is called while another one is waited for."""
    first, second = app.AsyncResult(new_id()), app.AsyncResult(new_id())
    got: list[Any] = []
    first.then(lambda ready: got.append(ready.result))
    getting = Getting(app, second.id)
    until_waiting(app)
    succeed(other, first.id, 1)
    wait_for(lambda: got == [1], LONG, "it is called")
    succeed(other, second.id, 2)
    assert getting.done() == 2


def test_a_callback_that_raises_harms_nobody_else(app: Celery, other: Celery) -> None:
    """Whoever happened to look gets its own result, and not the error of another one's callback."""

    def fail(ready: AsyncResult) -> None:
        raise LookupError(ready.id)

    bad = app.AsyncResult(new_id())
    bad.then(fail)
    good = new_id()
    getting = Getting(app, good)
    until_waiting(app)
    succeed(other, bad.id)
    wait_for(lambda: bad._cache, LONG, "it was delivered")
    succeed(other, good, "good")
    assert getting.done() == "good"


def test_a_message_callback_that_raises_ends_its_own_wait(app: Celery, other: Celery) -> None:
    """What on_message raises reaches the get() that it was given to, and no other."""

    def fail(meta: Any) -> None:
        raise LookupError("on_message")

    ids = [new_id(), new_id()]
    failing, going_on = Getting(app, ids[0], on_message=fail), Getting(app, ids[1])
    until_waiting(app, 2)
    succeed(other, ids[0], 0)
    with pytest.raises(LookupError, match="on_message"):
        failing.done()
    succeed(other, ids[1], 1)
    assert going_on.done() == 1
    assert app.AsyncResult(ids[0]).get(timeout=LONG) == 0


def test_intervals_are_told_about_every_second(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """on_interval is called while nothing comes; a get() of Celery's hands the caller's on the first time only."""
    monkeypatch.setattr(waiting, "TICK", 0.02)
    told: list[None] = []

    def tell() -> None:
        told.append(None)
        if len(told) == 3:
            raise LookupError

    result = app.AsyncResult(new_id())
    app.backend.add_pending_result(result)
    with pytest.raises(LookupError):
        app.backend.wait_for_pending(result, timeout=LONG, on_interval=tell)
    with pytest.raises(CeleryTimeoutError):
        result.get(timeout=0.5, on_interval=lambda: told.append(None))


def test_an_unreadable_result_is_told_to_everybody_who_waits(app: Celery, broker_settings: BrokerSettings) -> None:
    """Each get() raises, also a later one, and others are not harmed."""
    id, good = new_id(), new_id()
    with an_app(broker_settings, result_serializer="pickle", accept_content=["pickle"]) as pickling:
        threads = [Getting(app, id), Getting(app, id), Getting(app, good)]
        until_waiting(app, 3)
        succeed(pickling, id, {1, 2})
        for thread in threads[:2]:
            with pytest.raises(ContentDisallowed):
                thread.done()
        with pytest.raises(ContentDisallowed):
            app.AsyncResult(id).get(timeout=LONG)
        succeed(app, good, 1)
        assert threads[2].done() == 1


# -- when the database is away ---------------------------------------------------------------------


def test_a_timeout_while_the_database_is_away(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a timeout, as the caller expects, and says why."""

    def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("nobody there")

    monkeypatch.setattr(consumer(app)._results.__class__, "get", away)
    with pytest.raises(CeleryTimeoutError) as raised:
        app.AsyncResult(new_id()).get(timeout=0.1)
    assert isinstance(raised.value.__cause__, StoreUnavailable)


# -- what is left over -----------------------------------------------------------------------------


def test_a_process_that_waits_no_more_listens_no_more(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time after the last wait the subscription, its thread and its connection are gone."""
    monkeypatch.setattr(waiting, "IDLE", 0.05)
    before = set(threading.enumerate())

    def left() -> list[str]:
        # The one that watches over answers ends by itself when there was nothing to watch for a while.
        names = [thread.name for thread in set(threading.enumerate()) - before]
        return [name for name in names if name != "taskgate-patience"]

    id = new_id()
    succeed(app, id, 1)
    assert app.AsyncResult(id).get(timeout=LONG) == 1
    wait_for(lambda: consumer(app)._watch is None, LONG, "it listens no more")
    wait_for(lambda: not left(), LONG, "its threads have ended")
    # And begins again.
    id = new_id()
    getting = Getting(app, id)
    until_waiting(app)
    succeed(app, id, 2)
    assert getting.done() == 2


@pytest.mark.parametrize("store_name", ["memory", "sqlite"])
def test_many_results_leave_nothing_behind(app: Celery) -> None:
    """Results that are got, looked at, called back or dropped leave no entry, and no thread."""
    threads = threading.active_count()

    def some(number: int) -> None:
        for _ in range(number):
            ids = [new_id() for _ in range(5)]
            dropped = app.AsyncResult(ids[0])
            dropped.then(lambda ready: None, weak=True)
            del dropped
            for id in ids[1:]:
                succeed(app, id, id)
            assert app.AsyncResult(ids[1]).get(timeout=LONG) == ids[1]
            assert (
                GroupResult(new_id(), [app.AsyncResult(id) for id in ids[2:4]], app=app).get(timeout=LONG) == ids[2:4]
            )
            assert app.AsyncResult(ids[4]).ready()
            app.backend.broker.results.forget(ids)

    some(20)
    gc.collect()
    look = consumer(app)

    def sizes() -> list[int]:
        pending = [len(part) for part in app.backend._pending_results]
        kept = [look._watched, look._new, look._told, look._broken, look._listeners, look.buckets]
        return [*pending, *(len(part) for part in kept), len(app.backend._pending_messages)]

    wait_for(lambda: sum(sizes()) == 0, LONG, "nothing is left")
    some(200)
    gc.collect()
    wait_for(lambda: sum(sizes()) == 0, LONG, "nothing is left")
    wait_for(lambda: threading.active_count() <= threads + 2, LONG, "nor any thread")
