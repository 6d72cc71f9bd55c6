"""Telling the callers of a revoked task what has become of it, as a worker of Celery's does.

See ``celery.worker.request.Request._announce_revoked``: the result backend of the task stores REVOKED, a chord that
it is part of learns of it, and the signal ``task_revoked`` is sent.
"""

from __future__ import annotations

import logging
from typing import Any

from kombu_taskgate.transport.codec import Envelope

from .bodies import body_of

logger = logging.getLogger("celery_ext.revoked")

REASON = "revoked"


def announce(app: Any, message: Envelope) -> None:
    """Tell that the task of this message will not run.

    Does not raise: the revocation holds all the same, so what goes wrong here (the result backend does not answer)
    is logged.
    """
    task_id, name = message.headers.get("id"), message.headers.get("task")
    try:
        _announce(app, app.tasks.get(name), str(task_id), message)
    except Exception:
        logger.exception("task %s[%s] is revoked and will not run, but its caller could not be told", name, task_id)


def _announce(app: Any, task: Any | None, task_id: str, message: Envelope) -> None:
    from celery.signals import task_revoked

    backend = app.backend if task is None else task.backend
    if _has_ended(backend, task_id):
        # The error handler of a chord tells the callers of its body first, and revokes it then.
        return
    request = _request(app, message)
    backend.mark_as_revoked(task_id, REASON, request=request, store_result=_stores(app, task, request))
    if task is not None:
        task_revoked.send(task, request=request, terminated=False, signum=None, expired=False)


def _has_ended(backend: Any, task_id: str) -> bool:
    from celery import states

    if backend.as_uri() == "rpc://":
        return False  # its results are on their way to the caller: to ask for one would fetch it, if anything
    try:
        return backend.get_state(task_id) in states.READY_STATES
    except NotImplementedError:
        return False  # a backend that keeps nothing


def _stores(app: Any, task: Any | None, request: Any) -> bool:
    """Whether the result is wanted: the message's word, then the task's, then the app's."""
    ignored = request.ignore_result
    if ignored is None:
        ignored = app.conf.task_ignore_result if task is None else task.ignore_result
    even_if = app.conf.task_store_errors_even_if_ignored if task is None else task.store_errors_even_if_ignored
    return bool(not ignored or even_if)


def _request(app: Any, message: Envelope) -> Any:
    """The context that a worker would have made of the message."""
    from celery.app.task import Context

    properties = message.properties
    args, kwargs, embed = _payload(app, message)
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


def _payload(app: Any, message: Envelope) -> tuple[Any, Any, dict[str, Any]]:
    """Arguments and embedded callbacks; without them a chord can't be told, but the caller can."""
    try:
        args, kwargs, embed = body_of(app, message)
    except Exception as error:  # noqa: BLE001  # a serializer may raise anything
        logger.warning("the body of task %s can't be read: %s", message.headers.get("id"), error)
        return (), {}, {}
    return args, kwargs, dict(embed or {})
