"""Requests by themselves: which failure is a loss, and which request may still be given back."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError, Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker import state
from celery.worker.request import create_request_cls

from celery_ext.worker.request import forget, request_class, waiting
from kombu_taskgate.core.model import State, Task

logger = logging.getLogger(__name__)


def nothing() -> None:
    """Do it."""


class Bench:
    """One message of a task, and the request that a worker would make of it."""

    def __init__(self, **task: Any) -> None:
        self.app = Celery("bench", set_as_current=False, broker=f"taskgate+memory://{uuid.uuid4().hex}")
        options = {"acks_late": True, "reject_on_worker_lost": True, "ignore_result": True, **task}
        self.task = self.app.task(name="nothing", shared=False, **options)(nothing)
        self.connection = self.app.connection_for_read()
        self.channel = self.connection.channel()
        self.task.delay()
        self.message = self.channel.basic_get("celery")
        self.request = request_class(self.task.Request)(
            self.message,
            app=self.app,
            task=self.task,
            hostname="worker@bench",
            headers=self.message.headers,
            on_ack=self.message.ack_log_error,
            on_reject=self.message.reject_log_error,
        )

    def row(self) -> Task | None:
        self.connection.connection.engine.flush()
        rows = self.connection.connection.broker.list()
        return rows[0] if rows else None

    def fails_with(self, error: BaseException) -> None:
        try:
            raise error  # noqa: TRY301  # the information is made of what is being handled
        except BaseException:
            self.request.on_failure(ExceptionInfo(), send_failed_event=False)

    def close(self) -> None:
        state.reset_state()
        forget(self.app, "worker@bench")
        self.connection.release()
        self.app.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def counts(row: Task | None) -> tuple[State, int, int]:
    assert row is not None
    return row.state, row.lease_lost, row.deliveries


def test_dead_process_is_a_loss(bench: Bench) -> None:
    bench.fails_with(WorkerLostError("signal 9"))
    assert counts(bench.row()) == (State.PENDING, 1, 1)


def test_hard_time_limit_is_a_loss_unless_it_is_acknowledged(bench: Bench) -> None:
    bench.task.acks_on_failure_or_timeout = bench.task.acks_on_timeout = False
    bench.request.on_timeout(True, 1)
    assert counts(bench.row()) == (State.RUNNING, 0, 1), "the soft limit is the task's own matter"
    bench.request.on_timeout(False, 1)
    bench.fails_with(TimeLimitExceeded(1))
    assert counts(bench.row()) == (State.PENDING, 1, 1)


def test_rejection_by_the_task_is_none(bench: Bench) -> None:
    bench.fails_with(Reject("not now", requeue=True))
    assert counts(bench.row()) == (State.PENDING, 0, 1)


@pytest.mark.parametrize("flag", [0, 1, True])
def test_death_in_a_cold_shutdown_is_none(bench: Bench, monkeypatch: pytest.MonkeyPatch, flag: Any) -> None:
    """The worker has killed its processes itself; the flag is its exit code, often 0."""
    monkeypatch.setattr(state, "should_terminate", flag)
    bench.fails_with(WorkerLostError("signal 15"))
    assert counts(bench.row()) == (State.PENDING, 0, 1)


def test_death_after_a_cancel_is_none(bench: Bench) -> None:
    bench.request._already_cancelled = True
    bench.fails_with(WorkerLostError("signal 15"))
    assert counts(bench.row()) == (State.PENDING, 0, 1)


def test_termination_is_none(bench: Bench) -> None:
    bench.fails_with(Terminated(15))
    assert bench.row() is None, "revoked is acknowledged"


def test_what_waits_can_be_given_back(bench: Bench) -> None:
    """In no pool yet: given back whatever the pool is, once, and it runs no more."""
    assert waiting(bench.app, "worker@bench") == [bench.request]
    assert waiting(bench.app, "other@bench") == []
    state.task_reserved(bench.request)
    assert bench.request.give_back(None)
    assert not bench.request.give_back(None)
    assert counts(bench.row()) == (State.PENDING, 0, 0)
    assert waiting(bench.app, "worker@bench") == []
    with pytest.raises(TaskRevokedError):
        bench.request.execute_using_pool(None)
    bench.request.acknowledge()
    assert counts(bench.row()) == (State.PENDING, 0, 0), "nobody settles it any more"


def test_what_a_pool_of_processes_has_is_kept(bench: Bench) -> None:
    state.task_reserved(bench.request)
    assert not bench.request.revoked()
    assert not bench.request.give_back(None)
    assert counts(bench.row()) == (State.RUNNING, 0, 1)


def test_what_waits_for_a_thread_is_kept_from_beginning(bench: Bench) -> None:
    state.task_reserved(bench.request)
    assert not bench.request.revoked()
    assert bench.request.give_back(TaskRevokedError)
    with pytest.raises(TaskRevokedError):
        bench.request.on_accepted(1, 0.0)
    assert bench.request not in state.active_requests
    assert counts(bench.row()) == (State.PENDING, 0, 0)


def test_what_runs_is_kept(bench: Bench) -> None:
    state.task_reserved(bench.request)
    assert not bench.request.revoked()
    bench.request.on_accepted(1, 0.0)
    assert waiting(bench.app, "worker@bench") == []
    assert not bench.request.give_back(TaskRevokedError)
    assert counts(bench.row()) == (State.RUNNING, 0, 1)


def test_a_look_at_the_message_hands_nothing_over(bench: Bench) -> None:
    """Celery asks whether it is revoked when it comes, too: it is in no pool then."""
    assert not bench.request.revoked()
    assert bench.request.give_back(None)


def test_other_strategies_keep_what_they_have() -> None:
    """How a strategy of the app's own starts tasks is not known, so nothing of it is given back early."""
    bench = Bench(Strategy="tests.workers.requests:a_strategy")
    assert waiting(bench.app, "worker@bench") == []
    bench.close()


# -- early acknowledgements ------------------------------------------------------------------------


@pytest.fixture
def early() -> Iterator[Bench]:
    """A message that is acknowledged when its run begins, and whose run has begun."""
    made = Bench(acks_late=False)
    state.task_reserved(made.request)
    made.request.on_accepted(1, 0.0)
    yield made
    made.close()


def begun(bench: Bench) -> bool:
    row = bench.row()
    return row is not None and row.begun


def test_early_acknowledgement_keeps_the_row(early: Bench) -> None:
    assert begun(early)
    assert early.request.acknowledged
    early.request.on_timeout(True, 1)
    assert begun(early), "the soft limit is the task's own matter"
    early.request.on_success((False, None, 0.1))
    assert early.row() is None


def test_every_class_for_requests_tells_the_end(early: Bench) -> None:
    """Celery makes one for each task, which does not call ours."""
    made = create_request_cls(type(early.request), early.task, FakePool(), "worker@bench", None, app=early.app)
    assert "on_success" in vars(made)
    made.on_success(early.request, (False, None, 0.1))
    assert early.row() is None


class FakePool:
    def apply_async(self) -> None:
        """Nothing is handed to it."""


@pytest.mark.parametrize(
    "error", [ValueError("no"), Retry(), Ignore(), Reject(requeue=True), Reject(), Terminated(9), WorkerLostError("9")]
)
def test_early_acknowledged_run_that_fails_is_settled(early: Bench, error: BaseException) -> None:
    early.fails_with(error)
    assert early.row() is None


def test_early_acknowledged_run_past_its_time_limit_is_settled(early: Bench) -> None:
    early.request.on_timeout(False, 1)
    assert early.row() is None


def test_early_acknowledged_run_that_the_worker_ends_is_lost(early: Bench) -> None:
    """Celery tells its caller that it is going to be tried again, and nobody will."""
    early.request._already_cancelled = True
    early.fails_with(Terminated(15))
    row = early.row()
    assert row is not None
    assert (row.state, row.reason) == (State.FAILED, "lost")
    assert (row.detail or "").startswith("the worker ended its run: ")


def test_revoke_before_the_run_begins_is_settled_when_it_does() -> None:
    """revoke(terminate=True) of what the pool has not announced: it is ended as soon as it begins."""
    bench = Bench(acks_late=False)
    state.task_reserved(bench.request)
    ended: list[Any] = []
    pool = SimpleNamespace(terminate_job=lambda pid, signal: ended.append(pid))
    bench.request.terminate(pool, "TERM")
    bench.request.on_accepted(7, 0.0)
    assert ended == [7]
    assert bench.row() is None
    bench.close()


@pytest.mark.parametrize("way", ["process", "limit", "memory"])
def test_a_failure_that_can_not_be_told_is_answered_for(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Acknowledged when it began, and the result backend is away when it dies: a dead letter, to be told of."""

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no result backend")

    bench = Bench(acks_late=False)
    bench.request.on_accepted(1, 0.0)
    monkeypatch.setattr(bench.task.backend, "mark_as_failure", fails)
    dies = {
        "process": lambda: bench.fails_with(WorkerLostError("signal 9")),
        "limit": lambda: bench.request.on_timeout(False, 1),
        "memory": lambda: bench.fails_with(MemoryError()),
    }
    with pytest.raises((OSError, MemoryError)):
        dies[way]()
    row = bench.row()
    assert row is not None
    assert (row.state, row.reason, row.answer_at is None) == (State.FAILED, "lost", False)
    assert "could not be told" in (row.detail or "")
    bench.close()


@pytest.mark.parametrize("acks_on_failure", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_lost_run_is_settled_once_it_is_told(
    monkeypatch: pytest.MonkeyPatch, acks_on_failure: bool, fails: bool
) -> None:
    """Not before, as Celery does it: where the result backend is away a dead letter is left, to be told of."""
    seen: list[tuple[State, bool]] = []

    def tells(*_: Any, **__: Any) -> None:
        row = bench.row()
        assert row is not None
        seen.append((row.state, bench.request.acknowledged))
        if fails:
            raise OSError("no result backend")

    bench = Bench(reject_on_worker_lost=False)
    bench.task.acks_on_failure_or_timeout = bench.task.acks_on_failure = acks_on_failure
    monkeypatch.setattr(bench.task.backend, "mark_as_failure", tells)
    if fails:
        with pytest.raises(OSError, match="no result backend"):
            bench.fails_with(WorkerLostError("signal 9"))
    else:
        bench.fails_with(WorkerLostError("signal 9"))
    assert seen == [(State.RUNNING, True)]
    row = bench.row()
    if fails or not acks_on_failure:
        assert row is not None
        assert (row.state, row.reason, row.answer_at is not None) == (State.FAILED, "rejected", fails)
    else:
        assert row is None
    bench.request.acknowledge()
    bench.close()
