"""``revoke`` and ``revoke_by_stamped_headers`` beyond the memory of workers.

Celery broadcasts a revocation to the workers that are up, and each remembers it. Here it is also stored in the
broker, where it holds for workers that start later, and what waits in the broker is canceled at once. The broadcast
goes on as ever: only a worker can drop what it has prefetched, or terminate what it runs.

Running executions are not marked as canceled: to revoke a task that runs means to let it end, and to let it count,
unless ``terminate`` is asked for. If its worker dies, or it retries, the next claim finds the stored revocation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.model import Task
from kombu_taskgate.core.revocations import Revocation
from kombu_taskgate.transport.codec import Envelope, decode
from kombu_taskgate.transport.connection import Connection
from kombu_taskgate.transport.control import SUFFIX
from kombu_taskgate.transport.errors import Undecodable
from kombu_taskgate.transport.revocations import of_stamp, of_task, revocable_by, several

from .apps import app_of
from .bodies import body_of, with_body

logger = logging.getLogger("celery_ext.control")

#: Seconds for which Celery's workers remember a revocation (celery.worker.state.REVOKE_EXPIRES) unless told otherwise.
REMEMBERED = 10800.0
#: Most task ids that are canceled, and waiting executions that are looked through, at once.
PART, PAGE = 400, 500
#: Most ids that are broadcast as they are. Of longer lists workers are told what they can have: that is enough to drop
#: what is prefetched, and spares each of them megabytes of memory and one look into the result backend per id. To
#: terminate they need all: a task that is acknowledged before it runs is not in the broker any more.
MOST = 5000


class RevokeObserver:
    """Makes revocations durable. See :class:`~kombu_taskgate.transport.control.ControlObserver`."""

    def published(self, connection: Connection, message: Envelope) -> Envelope:
        """Store a revocation, cancel what waits, and tell its callers."""
        app = app_of(connection, message.exchange.removesuffix(SUFFIX))
        if app is None:
            return message
        command = body_of(app, message)
        arguments = command.get("arguments") if isinstance(command, Mapping) else None
        if not isinstance(arguments, Mapping) or not _for_everybody(command):
            return message
        if command.get("method") == "revoke":
            ids = _revoke_ids(app, connection, arguments.get("task_id"))
            if len(ids) > MOST and not arguments.get("terminate"):
                running = sorted(connection.broker.running(ids))
                return with_body(message, {**command, "arguments": {**arguments, "task_id": running}})
        elif command.get("method") == "revoke_by_stamped_headers":
            _revoke_stamped(app, connection, arguments.get("headers"))
        return message


OBSERVER = RevokeObserver()


def _for_everybody(command: Mapping[str, Any]) -> bool:
    """Whether a command is for all workers: "that worker shall not run it" says nothing about the others."""
    return not command.get("destination") and not (command.get("pattern") and command.get("matcher"))


def _revoke_ids(app: Any, connection: Connection, given: Any) -> list[str]:
    revoked = [one for one in map(of_task, several(given)) if one is not None]
    _store(connection, revoked)
    ids = list(dict.fromkeys(one.value for one in revoked))
    for start in range(0, len(ids), PART):
        _tell(app, connection.broker, connection.broker.cancel_waiting(task_ids=ids[start : start + PART]))
    return ids


def _revoke_stamped(app: Any, connection: Connection, given: Any) -> None:
    revoked = set(_stamps(given))
    if not revoked:
        return
    _store(connection, revoked)
    broker, after = connection.broker, 0
    while page := broker.waiting(after, PAGE):
        after = page[-1].id
        ids = [task.id for task in page if task.type and not revoked.isdisjoint(_revocable_by(task))]
        if ids:
            _tell(app, broker, broker.cancel_waiting(ids))


def _stamps(given: Any) -> Iterable[Revocation]:
    """The values of headers, given as a mapping or, by the command line, as a list of ``name=value``."""
    if isinstance(given, list):
        given = dict(pair.split("=")[:2] for pair in given if isinstance(pair, str) and "=" in pair)
    if not isinstance(given, Mapping):
        return
    for header, values in given.items():
        for value in several(values):
            one = of_stamp(header, value)
            if one is not None:
                yield one


def _store(connection: Connection, revoked: Iterable[Revocation]) -> None:
    keep = connection.options.revoke_expires
    connection.broker.revocations.add(list(revoked), _remembered() if keep is None else keep)
    connection.revoked()


def _remembered() -> float:
    given = os.environ.get("CELERY_WORKER_REVOKE_EXPIRES")
    try:
        return REMEMBERED if given is None else max(0.0, float(given))
    except ValueError:
        logger.warning("CELERY_WORKER_REVOKE_EXPIRES is no number of seconds: %r; %g is used", given, REMEMBERED)
        return REMEMBERED


def _revocable_by(task: Task) -> list[Revocation]:
    try:
        return revocable_by(decode(task.payload))
    except Undecodable as error:
        logger.debug("execution %d can't be decoded: %s", task.id, error)
        return []


def _tell(app: Any, broker: Broker, canceled: Iterable[Task]) -> None:
    """Tell the callers now. Where that fails, or this process ends, a worker does it later."""
    # Here, because programs without Celery load this module too.
    from .answers import REVOKED, answer

    told = []
    for task in canceled:
        logger.info("task %s[%s] is revoked and will not run (execution %d)", task.type, task.task_id, task.id)
        try:
            answer(app, task, lambda: REVOKED)
        except Exception:
            logger.exception(
                "task %s[%s] is revoked and will not run, but its caller could not be told; workers will go on trying",
                task.type,
                task.task_id,
            )
        else:
            told.append(task.id)
    broker.answered(told)
