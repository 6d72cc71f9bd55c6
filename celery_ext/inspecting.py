"""What is known of a task: by the broker, and by the result backend, whatever the two are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from celery import states
from celery.backends.base import DisabledBackend

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.model import WAITING, Inspection
from kombu_taskgate.transport.texts import id_text

from .result_settings import broker_settings


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """What is known of a task; of several executions the newest one is shown.

    Args:
        task_id: Celery's id of the task.
        name: the task's name; ``None`` where only a result is known that does not tell it.
        state: of the execution: ``blocked``, ``pending``, ``running``, ``retrying``, ``completed``, ``failed`` or
            ``canceled``. ``completed`` also when it is removed and there is a final result. ``None``: the broker is not
            taskgate, or has no execution of it although it has not ended.
        status: Celery's; ``None`` where the app keeps no results, or keeps them where only the caller can look.
        queue: where it waits, or has waited.
        position: place among those of its queue that can be claimed, 1 is the next; ``None``: it can't be claimed now.
        run_at: before when it does not run (its ETA); ``None``: it does not wait.
        run_at_ms: the same in milliseconds since 1970 (UTC), by the database's clock.
        attempts: failures that the broker has counted. A retry of Celery's is another execution.
        deliveries: how often it was delivered.
        lease_lost: how many of its workers died or were given up.
        owner: who runs it, or has run it last (host, process, connection).
        lease_until: until when its worker lives without a further word; ``None``: it does not run.
        lease_until_ms: the same in milliseconds.
        waits_for: task ids of the parents that it still waits for.
        reason, detail: why it was given up or canceled.
        executions: how many are stored, retries and replays.
    """

    task_id: str
    name: str | None = None
    state: str | None = None
    status: str | None = None
    queue: str | None = None
    position: int | None = None
    run_at: datetime | None = None
    run_at_ms: int | None = None
    attempts: int = 0
    deliveries: int = 0
    lease_lost: int = 0
    owner: str | None = None
    lease_until: datetime | None = None
    lease_until_ms: int | None = None
    waits_for: tuple[str, ...] = ()
    reason: str | None = None
    detail: str | None = None
    executions: int = 0


def inspect_task(task_id: str, app: Any = None) -> TaskInfo | None:
    """What is known of a task.

    Args:
        task_id: Celery's id of the task.
        app: whose broker and results are asked; ``None``: the current app.

    Returns:
        ``None`` for a task that was never published, or of which nothing is left. Where the broker is not taskgate a
        task that waits can't be told from one that never was, and is ``None`` too.

    Raises:
        StoreUnavailable: the broker's database does not answer. What the result backend raises is raised as it is.
    """
    if app is None:
        from celery import current_app

        app = current_app
    # The execution first: one that ends in between has its result then.
    found = _execution(app, task_id)
    meta = _meta(app, task_id)
    status = None if meta is None else str(meta.get("status"))
    if found is None and status in {None, states.PENDING}:
        return None
    name = None if meta is None else meta.get("name")
    if found is None:
        ended = status in states.READY_STATES and broker_settings(app) is not None
        return TaskInfo(task_id, name=name, state="completed" if ended else None, status=status)
    task = found.task
    waits = task.state in WAITING
    return TaskInfo(
        task_id,
        name=task.type or name,
        state=task.state.value,
        status=status,
        queue=task.queue,
        position=found.position,
        run_at=_aware(task.run_at) if waits else None,
        run_at_ms=task.run_at if waits else None,
        attempts=task.attempts,
        deliveries=task.deliveries,
        lease_lost=task.lease_lost,
        owner=task.owner,
        lease_until=_aware(found.lease_until),
        lease_until_ms=found.lease_until,
        waits_for=tuple(found.waits_for),
        reason=task.reason,
        detail=task.detail,
        executions=found.executions,
    )


def _execution(app: Any, task_id: str) -> Inspection | None:
    with broker_of(app) as broker:
        return None if broker is None else broker.inspect(id_text(task_id) or "")


def _meta(app: Any, task_id: str) -> Mapping[str, Any] | None:
    """What the result backend says; ``None``: there is none that could be asked."""
    backend = app.backend
    # Results over rpc are messages to the process that has published the task, which takes them away by looking.
    if isinstance(backend, DisabledBackend) or backend.as_uri() == "rpc://":
        return None
    meta: Mapping[str, Any] = backend.get_task_meta(task_id, cache=False)
    return meta


@contextmanager
def broker_of(app: Any) -> Iterator[Broker | None]:
    """The broker that an app publishes to, for the block; ``None`` where that is not taskgate."""
    settings = broker_settings(app)
    if settings is None:
        yield None
        return
    broker = open_broker(settings)
    try:
        yield broker
    finally:
        broker.close()


def _aware(instant: int | None) -> datetime | None:
    """An instant (ms) as a datetime; ``None`` for one that no calendar has."""
    try:
        return None if instant is None else datetime.fromtimestamp(instant / 1000, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
