"""Answers by themselves: what callers are told of a dead letter whose run has left something behind."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chord, states

from celery_ext.dead_letters import DeadLetterAnswers
from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.model import Claim, FailKind, Filter, State
from kombu_taskgate.core.settings import BrokerSettings
from tests.celery.results import an_app, request, succeed

QUEUE = "celery"


@pytest.fixture
def app() -> Iterator[Celery]:
    with an_app(BrokerSettings(f"memory://{uuid.uuid4().hex}")) as made:
        made.task(name="work", shared=False)(work)
        yield made


def work(*args: Any) -> None:
    """Nobody runs it here."""


@pytest.fixture
def broker(app: Celery) -> Broker:
    return app.backend.broker  # type: ignore[no-any-return]  # Celery has no types


def take(broker: Broker) -> Claim:
    """The next message, as a worker takes it that acknowledges at the start."""
    (claim,) = broker.dequeue([QUEUE])
    assert broker.begin_many([claim]) == []
    return claim


def answer(app: Celery, broker: Broker) -> None:
    """What a worker's keeper does."""
    DeadLetterAnswers(app, broker, lambda: [QUEUE], lease_lost_max=3)(lambda: False)
    assert [row.id for row in broker.list(Filter(limit=1000)) if row.answer_at is not None] == []


def die(broker: Broker, claim: Claim) -> None:
    assert broker.fail(claim, FailKind.LOST) is State.FAILED


def test_a_retry_goes_on_for_a_run_that_was_lost(app: Celery, broker: Broker) -> None:
    """A worker that died after its task had published a retry: the caller waits for that, and hears of its end."""
    result = app.tasks["work"].apply_async()
    first = take(broker)
    app.tasks["work"].apply_async(task_id=result.id, retries=1)
    app.backend.store_result(
        result.id, ValueError("once more"), states.RETRY, request=request(result.id, first.id, first.token)
    )
    die(broker, first)
    answer(app, broker)
    assert result.state == states.RETRY
    second = take(broker)
    answer(app, broker)
    die(broker, second)
    answer(app, broker)
    assert result.state == states.FAILURE


@pytest.mark.parametrize("failed", [False, True])
def test_a_result_without_its_part_of_a_chord(app: Celery, broker: Broker, failed: bool) -> None:
    """A run whose worker died between the two: the part is left by whoever answers, and the chord ends."""
    body = app.signature("work")
    ended = chord([app.signature("work", args=(n,)) for n in range(2)], app=app)(body)
    first, second = take(broker), take(broker)
    one, other = ended.parent.results
    context = request(
        one.id, first.id, first.token, group=ended.parent.id, chord=body, group_index=0, delivery_info=None
    )
    app.backend.mark_as_done(one.id, 1, request=context)
    broker.ack(first)
    if failed:
        app.backend.store_result(
            other.id, ValueError("no"), states.FAILURE, request=request(other.id, second.id, second.token)
        )
    else:
        app.backend.store_result(other.id, 2, states.SUCCESS, request=request(other.id, second.id, second.token))
    die(broker, second)
    answer(app, broker)
    assert other.state == (states.FAILURE if failed else states.SUCCESS)
    if failed:
        assert ended.state == states.FAILURE
        assert "no" in str(ended.result)
    else:
        assert len(broker.list(Filter(states=[State.PENDING]))) == 1, "the body"


def test_an_errback_that_the_broker_refuses(app: Celery, broker: Broker) -> None:
    """Its unique key is taken: that is given up at once, and what is called in place is called once."""
    calls: list[str] = []

    def in_place(request: Any, error: BaseException, traceback: Any) -> None:
        calls.append(request.id)

    def published(task_id: str) -> None:
        """Nobody runs it here."""

    app.task(name="in_place", shared=False)(in_place)
    app.task(name="published", shared=False)(published)
    signature = app.signature("work").on_error(app.signature("in_place"))
    result = signature.on_error(app.signature("published").set(unique_key="k")).apply_async()
    claim = take(broker)
    app.tasks["work"].apply_async(unique_key="k")
    die(broker, claim)
    answer(app, broker)
    assert (result.state, calls) == (states.FAILURE, [result.id])


def test_a_run_that_ends_after_it_was_given_up(app: Celery, broker: Broker) -> None:
    """Its worker was frozen: what it stores counts until its caller was told, and changes nothing after that."""
    first, second = (app.signature("work").apply_async() for _ in range(2))
    early, late = take(broker), take(broker)
    die(broker, early)
    die(broker, late)
    succeed(app, first.id, 1, early.id, early.token)
    answer(app, broker)
    succeed(app, second.id, 1, late.id, late.token)
    assert (first.state, second.state) == (states.SUCCESS, states.FAILURE)


def test_the_parent_is_named(app: Celery, broker: Broker) -> None:
    """Who waited for a task that has failed is told which one it was."""
    parent = app.tasks["work"].apply_async()
    child = app.tasks["work"].apply_async(depends_on=[parent.id])
    first = take(broker)
    failure = request(parent.id, first.id, first.token)
    app.backend.store_result(parent.id, ValueError("no"), states.FAILURE, request=failure)
    answer(app, broker)
    assert child.state == states.REVOKED
    assert parent.id in str(child.result)
