"""Telling the callers of a task that the broker has ended: it failed for good, or it will not run.

What a worker of Celery's does for a task that fails (``mark_as_failure``) or is revoked (see
``celery.worker.request.Request._announce_revoked``): the result backend stores it, a chord learns of it, the rest of a
chain is ended, errbacks are called, and a signal is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kombu_taskgate.core.model import Reason, State, Task
from kombu_taskgate.transport.codec import Envelope, decode
from kombu_taskgate.transport.errors import Undecodable
from kombu_taskgate.transport.message import LEASE_HEADER

from .contexts import Subject, subject_of
from .errors import DeadLettered
from .lease import without_lease

logger = logging.getLogger("celery_ext.answers")

#: What callers see as the reason of REVOKED.
REVOKED = "revoked"
#: Milliseconds after its end from which an answer that is due must have been claimed before.
AT_ONCE = 1000


class Unreachable(Exception):
    """A result backend can't be asked now.

    Args:
        backend: which.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.backend = backend


def answer(
    app: Any,
    task: Task,
    why_canceled: Callable[[], str],
    *,
    lease_lost_max: int = 0,
    avoid: Callable[[Any], bool] = lambda backend: False,
) -> None:
    """Tell whoever waits for the task of a failed or canceled execution, unless it has ended for them already.

    Args:
        app: the Celery app.
        task: the execution, as ``claim_answers`` gives it.
        why_canceled: the reason of one that was canceled, asked for if it is needed.
        lease_lost_max: the most losses that are allowed, for the text.
        avoid: whether a result backend is not to be asked.

    Raises:
        Unreachable: the result backend can't be asked. Nothing was done.
        Exception: whatever the result backend or an errback's publish raises. A part may have been done.
    """
    subject = subject_of(app, message_of(task))
    if avoid(subject.backend):
        raise Unreachable(subject.backend)
    state, result = _stored(subject)
    if task.state is State.FAILED:
        _answer_dead(subject, task, state, result, lease_lost_max)
    else:
        _answer_canceled(subject, task, state, why_canceled)


def message_of(task: Task) -> Envelope:
    """The message of an execution; of one that can't be read what the row tells."""
    try:
        message = decode(task.payload)
    except Undecodable as error:
        logger.debug("execution %d can't be decoded: %s", task.id, error)
        message = Envelope(b"")
    known = {
        "id": task.task_id,
        "task": task.type,
        "root_id": task.root_id,
        "parent_id": task.parent_task_id,
        "group": task.group_id,
    }
    for name, value in known.items():
        if message.headers.get(name) is None:
            message.headers[name] = value
    # What is said after all leases have ended is the last word on this execution.
    message.headers[LEASE_HEADER] = without_lease(task.id)
    return message


def claimed_before(task: Task) -> bool:
    """Whether somebody has claimed the answer before, who may have done a part of it."""
    return (task.answer_at or 0) - (task.finished_at or 0) > AT_ONCE


def _stored(subject: Subject) -> tuple[str | None, Any]:
    """State and result that the backend has, if that can be asked."""
    backend = subject.backend
    if backend.as_uri() == "rpc://":
        return None, None  # its results are on their way to the caller: to ask for one would fetch it, if anything
    try:
        state = backend.get_state(subject.task_id)
        return state, backend.get_result(subject.task_id) if state in backend.EXCEPTION_STATES else None
    except NotImplementedError:
        return None, None  # a backend that keeps nothing
    except Exception as error:
        raise Unreachable(backend) from error


def _answer_dead(subject: Subject, task: Task, state: str | None, result: Any, lease_lost_max: int) -> None:
    from celery import states
    from celery.exceptions import NotRegistered

    error: BaseException = dead_letter(task, lease_lost_max)
    if state in states.READY_STATES:
        kind = type(result).__name__  # not every process that stores results can import what it reads
        if state == states.FAILURE and kind == NotRegistered.__name__ and task.reason == Reason.REJECTED:
            # Celery stores that for a task whose code a worker does not know, and tells neither chords nor errbacks.
            error = result
        elif not (state == states.FAILURE and kind == DeadLettered.__name__ and claimed_before(task)):
            _tell_the_rest(subject, state)
            return
    subject.backend.mark_as_failure(
        subject.task_id, error, request=subject.request, store_result=subject.stores, call_errbacks=True
    )
    if subject.task is not None:
        _send_failure(subject, error)


def _tell_the_rest(subject: Subject, state: str | None) -> None:
    """Who stored the result may have died before it told the task's chord, and the rest of its chain if it failed.

    Other result backends count the parts of a chord, so that they must not be told twice.
    """
    from celery import states

    from .chords import ChordMixin

    backend, request = subject.backend, subject.request
    if not isinstance(backend, ChordMixin) or not (request.chord or request.chain):
        return
    result = backend.get_result(subject.task_id)
    if state in states.PROPAGATE_STATES:
        backend.mark_as_failure(
            subject.task_id, result, request=request, store_result=subject.stores, call_errbacks=False, state=state
        )
    elif request.chord:
        backend.on_chord_part_return(request, str(state), result)


def _send_failure(subject: Subject, error: BaseException) -> None:
    from billiard.einfo import ExceptionInfo
    from celery import signals

    task, request = subject.task, subject.request
    assert task is not None
    try:
        raise error
    except type(error):
        info = ExceptionInfo()
    # As Celery does it: handlers look at the task's request.
    task.request_stack.push(request)
    try:
        signals.task_failure.send(
            sender=task,
            task_id=subject.task_id,
            exception=error,
            args=request.args,
            kwargs=request.kwargs,
            traceback=None,
            einfo=info,
        )
    finally:
        task.request_stack.pop()


def _answer_canceled(subject: Subject, task: Task, state: str | None, why_canceled: Callable[[], str]) -> None:
    from celery import signals, states
    from celery.exceptions import TaskRevokedError

    if state in states.READY_STATES and not (state == states.REVOKED and claimed_before(task)):
        # The error handler of a chord tells the callers of its body first, and revokes it then.
        _tell_the_rest(subject, state)
        return
    expired = task.reason == Reason.EXPIRED
    if task.reason == Reason.CANCELED:
        reason = why_canceled()
    else:
        # Of what waited for a task the detail names it.
        reason = "expired" if expired else task.detail or "a task before it failed"
    # Unlike mark_as_revoked it ends the rest of a chain too.
    subject.backend.mark_as_failure(
        subject.task_id,
        TaskRevokedError(reason),
        request=subject.request,
        store_result=subject.stores,
        call_errbacks=False,
        state=states.REVOKED,
    )
    if subject.task is not None:
        signals.task_revoked.send(subject.task, request=subject.request, terminated=False, signum=None, expired=expired)


def dead_letter(task: Task, lease_lost_max: int) -> DeadLettered:
    """The error that the caller of a dead letter gets."""
    why = {
        Reason.LEASE_LOST: f"its worker was lost {task.lease_lost} times, as often as lease_lost_max allows",
        Reason.LOST: "its worker died while it ran",
        Reason.MAX_DELIVERIES: f"it was delivered {task.deliveries} times and never settled",
        Reason.REJECTED: "it was rejected",
        Reason.UNDECODABLE: "its message can't be decoded",
        Reason.THROTTLED: f"it was throttled {task.throttled} times",
        Reason.BUSINESS: f"it failed {task.attempts} times",
    }
    reason = task.reason or ""
    known = {str(key): text for key, text in why.items()}
    facts = [
        f"reason {reason}",
        f"deliveries {task.deliveries}",
        f"lost leases {task.lease_lost}" + (f" of {lease_lost_max}" if lease_lost_max else ""),
    ]
    if task.owner:  # it is not kept of one that went back to its queue
        facts.append(f"last owner {task.owner}")
    if task.detail:
        facts.append(f"detail: {task.detail}")
    sentence = f"task {task.type}[{task.task_id}] was given up because {known.get(reason, 'it failed')}"
    return DeadLettered(f"{sentence} ({', '.join(facts)})", reason, task.deliveries, task.lease_lost)
