"""Who waits for a task that the broker has given up is told, once, whatever the result backend is (B04, B13, B21)."""

from __future__ import annotations

import gc
import time
import uuid
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord, states
from celery.exceptions import ChordError, TaskRevokedError

from celery_ext import DeadLettered
from celery_ext.backend import TaskgateBackend
from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.model import FailKind, State
from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, wait_for

pytestmark = [
    pytest.mark.redis,
    pytest.mark.crash,
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),  # Celery's backend calls it
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # and leaves a socket open
]

#: Leases that run out are not what ends a task here.
LONG = 60.0
PREFIX = "tests.workers.app."


@pytest.fixture(params=["redis", "taskgate"])
def results(request: pytest.FixtureRequest, main_url: str) -> dict[str, Any]:
    """Settings of an app that keeps its results in Redis, or where its broker is."""
    if request.param == "taskgate":
        return {"result_backend": f"taskgate+{main_url}", "task_ignore_result": False}
    redis_url = request.getfixturevalue("redis_url")
    return {
        "result_backend": redis_url,
        "task_ignore_result": False,
        "redis_socket_timeout": 5,
        "result_backend_transport_options": {"global_keyprefix": uuid.uuid4().hex},
    }


@pytest.fixture
def make_lab(make_lab: MakeLab) -> Iterator[MakeLab]:
    """Labs whose connections to Redis are closed in the end."""
    labs: list[Lab] = []

    def make(*args: Any, **options: Any) -> Lab:
        labs.append(make_lab(*args, **options))
        return labs[-1]

    yield make
    for lab in labs:
        backend = lab.app.backend
        if backend.as_uri() != "disabled://":
            backend.result_consumer.stop()
            if isinstance(backend, TaskgateBackend):
                backend.broker.close()
            else:
                backend.client.connection_pool.disconnect()
        vars(lab.app._local).pop("backend", None)
    # What Celery's Redis backend leaves open goes here, and not in the middle of some later test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def signature(lab: Lab, name: str, *args: Any) -> Any:
    """One of the tasks; it takes no result of another."""
    return lab.app.signature(PREFIX + name, args=args, immutable=True)


def with_errback(lab: Lab, name: str, *args: Any) -> Any:
    return signature(lab, name, *args).on_error(lab.app.signature(PREFIX + "on_error"))


def errbacks(lab: Lab, id: str) -> list[dict[str, Any]]:
    return lab.journal.of("errback", id)


def answered(lab: Lab, *ids: str) -> None:
    """Until nobody has to answer for these any more."""
    for id in ids:
        wait_for(
            lambda id=id: all(row.state is not State.RUNNING and row.answer_at is None for row in lab.rows(task_id=id)),  # type: ignore[misc]
            30,
            f"{id} is answered for",
        )


def state_of(lab: Lab, id: str) -> str:
    return str(lab.app.AsyncResult(id).state)


def check_caught(lab: Lab, id: str, error: DeadLettered, reason: str, *parts: str) -> None:
    """What the caller gets says what, why and how often."""
    assert error.reason == reason
    (row,) = lab.rows(task_id=id)
    assert (row.state, row.reason) == (State.FAILED, reason)
    assert (error.deliveries, error.lease_lost) == (row.deliveries, row.lease_lost)
    assert (f"last owner {row.owner}" if row.owner else "given up") in str(error)
    for part in (f"[{id}] was given up", f"deliveries {row.deliveries}", *parts):
        assert part in str(error)


def caught(lab: Lab, result: Any, timeout: float = 30) -> DeadLettered:
    with pytest.raises(DeadLettered) as info:
        result.get(timeout=timeout)
    answered(lab, result.id)
    return info.value


def test_task_that_kills_its_process(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """B04: its caller gets DeadLettered, its errback runs once, and the twenty tasks behind it succeed."""
    lab = make_lab(main_url, results, lease_ttl=LONG)
    worker = lab.start_worker("-c1")
    killer = with_errback(lab, "kill_self").apply_async()
    others = [lab.app.send_task(PREFIX + "work", [0, str(number)]) for number in range(20)]
    error = caught(lab, killer)
    assert (error.deliveries, error.lease_lost) == (3, 3)
    check_caught(lab, killer.id, error, "lease_lost", "lost 3 times", "lost leases 3 of 3", "SIGKILL")
    for other in others:
        other.get(timeout=30)
    assert [line["error"] for line in errbacks(lab, killer.id)] == ["DeadLettered"]
    assert lab.journal.starts(killer.id) == 3
    assert worker.alive


def test_task_that_kills_its_worker(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """B04: its caller gets DeadLettered within the lease time for each loss and five seconds, and B13: not before."""
    ttl, losses = 4.0, 3
    lab = make_lab(main_url, results, lease_ttl=ttl, lease_lost_max=losses)
    lab.start_worker("-c1", "-Q", "other")  # reaps, and answers for what nobody else does
    killer = with_errback(lab, "kill_worker").apply_async(queue="deadly")
    for number in range(1, losses + 1):
        worker = lab.start_worker("-c1", "-Q", "deadly", ready=False)  # it may be dead before it says so
        wait_for(lambda worker=worker: not worker.alive, 30, f"worker {number} is killed")  # type: ignore[misc]
        told = state_of(lab, killer.id)  # before the row is looked at, for it may be given up any moment
        assert told == states.PENDING or lab.rows(task_id=killer.id)[0].state is State.FAILED
        died = time.monotonic()
        wait_for(lambda number=number: lab.rows(task_id=killer.id)[0].lease_lost == number, 30, "the loss")  # type: ignore[misc]
        late = time.monotonic() - died - ttl
        print(f"loss {number} found {late:.2f} s after the lease time")  # noqa: T201  # a figure for people
    lab.start_worker("-c1", "-Q", "deadly")
    check_caught(lab, killer.id, caught(lab, killer), "lease_lost", "lost leases 3 of 3")
    assert len(errbacks(lab, killer.id)) == 1
    assert lab.journal.starts(killer.id) == losses


def test_chord_with_a_dead_letter(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """B04: the body of a chord fails, and its errback is called once."""
    lab = make_lab(main_url, results, lease_ttl=LONG)
    lab.start_worker("-c1")
    header = [signature(lab, "work", 0), signature(lab, "kill_self"), signature(lab, "work", 0)]
    end = lab.app.signature(PREFIX + "body").on_error(lab.app.signature(PREFIX + "on_error"))
    result = chord(header, app=lab.app)(end)
    with pytest.raises(ChordError, match="DeadLettered"):
        result.get(timeout=30, follow_parents=False)
    killer = result.parent[1]
    check_caught(lab, killer.id, caught(lab, killer), "lease_lost")
    assert [line["error"] for line in errbacks(lab, result.id)] == ["ChordError"]


def test_chain_with_a_dead_letter(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """B04: whoever waits for the end of a chain learns of it."""
    lab = make_lab(main_url, results, lease_ttl=LONG)
    lab.start_worker("-c1")
    result = chain(*(signature(lab, name) for name in ("work", "kill_self", "work", "work")), app=lab.app)()
    with pytest.raises(DeadLettered):
        result.get(timeout=30, follow_parents=False)
    wait_for(lambda: state_of(lab, result.parent.id) == states.FAILURE, 30, "so does what waits in the middle")
    answered(lab, result.parent.parent.id)
    assert lab.journal.starts() == 4


def test_errbacks_of_ignored_results(make_lab: MakeLab, main_url: str) -> None:
    """A task without a result calls its errbacks of both kinds, once, also without any result backend."""
    lab = make_lab(main_url, lease_ttl=LONG)
    lab.start_worker("-c1")
    killer = with_errback(lab, "kill_self")
    id = killer.on_error(lab.app.signature(PREFIX + "on_error_id")).apply_async().id
    wait_for(lambda: len(errbacks(lab, id)) == 2, 30, "both errbacks")
    answered(lab, id)
    assert sorted(line["error"] for line in errbacks(lab, id)) == ["", "DeadLettered"]


def test_rejected_undecodable_and_delivered_too_often(
    make_lab: MakeLab, main_url: str, results: dict[str, Any]
) -> None:
    """Each way to a dead letter ends with its caller being told the reason."""
    lab = make_lab(main_url, {**results, "task_serializer": "json"}, lease_ttl=LONG, max_deliveries=2)
    lab.start_worker("-c1")
    unreadable = lab.app.AsyncResult(publish(lab, "work", b"(not json", "application/json"))
    strange = lab.app.AsyncResult(publish(lab, "work", b"?", "application/x-strange"))
    for result in (unreadable, strange):
        check_caught(lab, result.id, caught(lab, result), "undecodable", "can't be decoded")
    often = with_errback(lab, "reject", 9).apply_async()
    check_caught(lab, often.id, caught(lab, often), "max_deliveries", "delivered 2 times")
    assert len(errbacks(lab, often.id)) == 1


def publish(lab: Lab, name: str, body: bytes, content_type: str) -> str:
    """Publish the message of a task with this body; its id."""
    id = str(uuid.uuid4())
    with lab.app.connection_for_write() as connection:
        connection.default_channel.queue_declare(queue="celery")
        connection.Producer().publish(
            body,
            routing_key="celery",
            content_type=content_type,
            content_encoding="utf-8",
            headers={"task": PREFIX + name, "id": id, "lang": "py", "root_id": id},
        )
    return id


def test_rejected_by_the_task(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """A task that rejects its message for good fails for its caller, whether Celery tells that or not, and once."""
    lab = make_lab(main_url, results, lease_ttl=LONG)
    lab.start_worker("-c1")
    result = with_errback(lab, "refuse").apply_async()
    with pytest.raises(Exception, match=r"never|was rejected"):
        result.get(timeout=30)
    answered(lab, result.id)
    silent = with_errback(lab, "refuse").apply_async(ignore_result=True)
    wait_for(lambda: errbacks(lab, silent.id), 30, "the errback")
    answered(lab, silent.id)
    assert [len(errbacks(lab, one.id)) for one in (result, silent)] == [1, 1]


@pytest.mark.parametrize("ignore", [False, True])
def test_failed_run_that_is_not_acknowledged(
    make_lab: MakeLab, main_url: str, results: dict[str, Any], ignore: bool
) -> None:
    """What Celery has told of itself and then rejects is not told again, also when the result is ignored."""
    lab = make_lab(main_url, {**results, "task_acks_on_failure_or_timeout": False}, lease_ttl=LONG)
    lab.start_worker("-c1")
    result = with_errback(lab, "fail").apply_async(ignore_result=ignore)
    wait_for(lambda: lab.states() == {State.FAILED: 1}, 30, "the dead letter")
    (row,) = lab.rows()
    assert (row.reason, row.answer_at) == ("rejected", None)
    barrier = with_errback(lab, "kill_self").apply_async()
    caught(lab, barrier)
    assert [line["error"] for line in errbacks(lab, result.id)] == ["ValueError"]
    if not ignore:
        assert state_of(lab, result.id) == states.FAILURE


def test_throttled_too_often(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """What a limit has refused too often is answered for by a worker that does not even consume its queue."""
    lab = make_lab(main_url, results, lease_ttl=LONG)
    id = throttled_out(lab)
    lab.start_worker("-c1")
    result = lab.app.AsyncResult(id)
    check_caught(lab, id, caught(lab, result), "throttled", "throttled 2 times")


def throttled_out(lab: Lab) -> str:
    """A dead letter that this process leaves behind, as if it had died then."""
    id = str(lab.app.send_task(PREFIX + "work").id)
    broker = open_broker(lab.settings(throttled_max=2))
    for _ in range(2):
        (claim,) = broker.dequeue(["celery"], timeout=10)
        state = broker.fail(claim, FailKind.THROTTLED)
    assert state is State.FAILED
    broker.close()
    return id


def test_task_whose_code_nobody_has(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """Its caller, its errback and its chord learn of it, each once."""
    lab = make_lab(main_url, results, lease_ttl=LONG)
    lab.start_worker("-c1")
    result = with_errback(lab, "nowhere").apply_async()
    with pytest.raises(Exception, match="nowhere"):
        result.get(timeout=30)
    answered(lab, result.id)
    assert len(errbacks(lab, result.id)) == 1
    end = lab.app.signature(PREFIX + "body").on_error(lab.app.signature(PREFIX + "on_error"))
    ended = chord([signature(lab, "work", 0), signature(lab, "nowhere")], app=lab.app)(end)
    with pytest.raises(ChordError, match="nowhere"):
        ended.get(timeout=30, follow_parents=False)
    assert len(errbacks(lab, ended.id)) == 1


@pytest.mark.timeout(300)
def test_many_expired_in_front_of_a_live_one(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """B21: the live one starts before all are told, the worker stays, and each of the expired ends REVOKED."""
    lab = make_lab(main_url, results, lease_ttl=LONG)
    work = signature(lab, "work", 0)
    with lab.app.producer_or_acquire() as producer:
        ids = [work.apply_async(producer=producer, expires=0.001).id for _ in range(2000)]
    live = work.apply_async()
    worker = lab.start_worker("-c1")
    pid = worker.pid
    live.get(timeout=60)
    still = sum(row.answer_at is not None for row in lab.rows(states=[State.CANCELED]))
    sample = [ids[0], ids[999], ids[-1]]
    for id in sample:
        with pytest.raises(TaskRevokedError, match="expired"):
            lab.app.AsyncResult(id).get(timeout=180)
    answered(lab, *sample)
    wait_for(lambda: not [r for r in lab.rows(states=[State.CANCELED]) if r.answer_at is not None], 120, "all told")
    assert (worker.pid, worker.alive) == (pid, True)
    print(f"{still} of 2000 were still to be told when the live task had ended")  # noqa: T201  # a figure for people
    assert {state_of(lab, id) for id in ids[::100]} == {states.REVOKED}
    assert lab.journal.starts() == 1


def test_canceled_while_it_waits(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """What broker.cancel ends, and what waited for it, ends REVOKED for its callers; so does the rest of a chain."""
    lab = make_lab(main_url, results, lease_ttl=4.0)
    result = chain(signature(lab, "work", 0), signature(lab, "work", 0), app=lab.app)()
    lab.broker.cancel(lab.rows(task_id=result.parent.id)[0].id)
    lab.start_worker("-c1")
    for one in (result.parent, result):
        with pytest.raises(TaskRevokedError, match="canceled"):
            one.get(timeout=30, follow_parents=False)


def test_canceled_while_it_runs(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """A mark counts when the worker is lost: what is reaped then ends REVOKED."""
    lab = make_lab(main_url, results, lease_ttl=2.0)
    first = lab.start_worker("-c1")
    result = signature(lab, "hold_until", str(lab.folder / "never")).apply_async()
    wait_for(lambda: lab.journal.starts(result.id), 30, "it runs")
    lab.broker.cancel(lab.rows(task_id=result.id)[0].id)
    lab.start_worker("-c1")
    first.kill()
    with pytest.raises(TaskRevokedError, match="canceled"):
        result.get(timeout=30)


def test_parent_that_failed(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """What waited in the broker for a task that became a dead letter is REVOKED."""
    lab = make_lab(main_url, results, lease_ttl=4.0)
    parent = with_errback(lab, "kill_self").apply_async()
    child = signature(lab, "work", 0).apply_async(countdown=3600)
    make_child(lab, parent.id, child.id)
    lab.start_worker("-c1")
    caught(lab, parent)
    with pytest.raises(TaskRevokedError, match="before it failed"):
        lab.app.AsyncResult(f"{child.id}-blocked").get(timeout=30)


def make_child(lab: Lab, parent: str, like: str) -> None:
    """Store an execution that waits for another, with the message of a third."""
    from kombu_taskgate.core.model import NewTask

    (row,), (before,) = lab.rows(task_id=like), lab.rows(task_id=parent)
    payload = row.payload.replace(like.encode(), f"{like}-blocked".encode())
    lab.broker.enqueue(NewTask("celery", payload, type=row.type, task_id=f"{like}-blocked", parents=[before.id]))


def test_two_workers_answer_once(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """However many could, one answers for each."""
    lab = make_lab(main_url, results, lease_ttl=LONG)
    for _ in range(2):
        lab.start_worker("-c2")
    killers = [with_errback(lab, "kill_self").apply_async(ignore_result=place % 2 == 0) for place in range(6)]
    wait_for(lambda: len(lab.journal.of("errback")) >= len(killers), 60, "an errback of each")
    answered(lab, *(killer.id for killer in killers))
    assert [len(errbacks(lab, killer.id)) for killer in killers] == [1] * len(killers)


def test_answerer_that_is_killed(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """What it was in the middle of, another worker does when the time for it is over."""
    lab = make_lab(main_url, results, lease_ttl=LONG)
    gate = lab.folder / "gate"
    first = lab.start_worker("-c1", TASKGATE_TEST_ERRBACK_GATE=str(gate))
    killer = with_errback(lab, "kill_self").apply_async()
    wait_for(lambda: lab.journal.of("errback begins", killer.id), 30, "the first one is in the middle")
    first.kill()
    (row,) = lab.rows(task_id=killer.id)
    assert row.answer_at is not None
    assert not errbacks(lab, killer.id)
    make_due(lab.broker, row.id)
    lab.start_worker("-c1", "-Q", "celery")
    answered(lab, killer.id)
    assert isinstance(caught(lab, killer), DeadLettered)
    assert len(errbacks(lab, killer.id)) == 1


def make_due(broker: Broker, id: int) -> None:
    """Let the minute pass that a claimer has for its answer."""
    from sqlalchemy import update

    database, tasks = broker.database, broker.tables.tasks  # type: ignore[attr-defined]  # an SqlBroker
    passed = (
        update(tasks)
        .where(tasks.c.id == id)
        .values(answer_at=tasks.c.answer_at - 60_000, finished_at=tasks.c.finished_at - 60_000)
    )
    database.transaction(lambda conn: conn.execute(passed))
