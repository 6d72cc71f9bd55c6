"""The request that a worker would have made of a message, for those who answer for tasks that will not run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from kombu_taskgate.transport.codec import Envelope

from .bodies import body_of

logger = logging.getLogger("celery_ext.contexts")


@dataclass(slots=True)
class Subject:
    """A task that somebody is to be told of.

    Args:
        task_id: Celery's id of it.
        name: of the task.
        task: the registered task; ``None`` where its code is not known.
        backend: its result backend.
        request: Celery's ``Context``.
        stores: whether its result is wanted.
    """

    task_id: str
    name: str
    task: Any | None
    backend: Any
    request: Any
    stores: bool


def subject_of(app: Any, message: Envelope) -> Subject:
    """What is known of the task of a message.

    A body that can't be read leaves out callbacks and the rest of a chain; a chord only where the result backend is
    another than this one, which keeps what its chords end in.

    Raises:
        StoreUnavailable: such a chord can't be looked up now.
    """
    task_id, name = str(message.headers.get("id")), str(message.headers.get("task"))
    task = app.tasks.get(name)
    payload = _payload(app, message)
    request = _request(message, payload or ((), {}, {}))
    backend = app.backend if task is None else task.backend
    if payload is None and request.group:
        # Imported late: a process that only publishes needs no result backend.
        from .chords import ChordMixin

        request.chord = backend.body_of_chord(request.group) if isinstance(backend, ChordMixin) else None
    return Subject(task_id, name, task, backend, request, _stores(app, task, request))


def _stores(app: Any, task: Any | None, request: Any) -> bool:
    """Whether the result is wanted: the message's word, then the task's, then the app's."""
    ignored = request.ignore_result
    if ignored is None:
        ignored = app.conf.task_ignore_result if task is None else task.ignore_result
    even_if = app.conf.task_store_errors_even_if_ignored if task is None else task.store_errors_even_if_ignored
    return bool(not ignored or even_if)


def _request(message: Envelope, payload: tuple[Any, Any, dict[str, Any]]) -> Any:
    from celery.app.task import Context

    properties = message.properties
    args, kwargs, embed = payload
    return Context(
        {
            **message.headers,
            "properties": properties,
            "reply_to": properties.get("reply_to"),
            "correlation_id": properties.get("correlation_id"),
            "delivery_info": {
                "exchange": message.exchange,
                "routing_key": message.routing_key,
                "priority": properties.get("priority"),
                "redelivered": False,
            },
            "args": args,
            "kwargs": kwargs,
            **embed,
        }
    )


def _payload(app: Any, message: Envelope) -> tuple[Any, Any, dict[str, Any]] | None:
    """Arguments, and what goes with them; ``None``: they can't be read."""
    try:
        args, kwargs, embed = body_of(app, message)
        return args, kwargs, dict(embed or {})
    except Exception as error:  # noqa: BLE001  # a serializer may raise anything
        logger.warning("the body of task %s can't be read: %s", message.headers.get("id"), error)
        return None
