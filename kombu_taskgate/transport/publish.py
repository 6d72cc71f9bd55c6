"""From a message to the executions that the broker stores, one by one or in batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import tzinfo
from typing import TYPE_CHECKING, Any

from ..core.broker import Broker
from ..core.errors import ConfigError, TaskgateError
from ..core.model import NewTask
from . import depends
from .capture import capture
from .codec import Envelope, encode
from .columns import columns_of, new_task
from .errors import kombu_errors
from .routing import Router

if TYPE_CHECKING:
    from .channel import Channel


logger = logging.getLogger("kombu_taskgate.transport")

#: Shortest time in seconds between two looks for what has expired in a queue.
SHORTEST = 1.0
#: Queues whose last look is remembered.
_MOST = 1000
#: What delivery_mode says of a message that may be lost (AMQP 0-9-1, basic.delivery-mode; kombu also takes the name).
TRANSIENT = (1, "transient")


def route(router: Router, envelope: Envelope) -> list[str]:
    """Queues that the message goes to.

    Raises:
        NotFound: there is no such exchange.
    """
    # A task is never among what may be lost, whatever its sender's default delivery mode says.
    is_task = envelope.headers.get("task") is not None
    transient = not is_task and envelope.properties.get("delivery_mode") in TRANSIENT
    return router.route(envelope.exchange, envelope.routing_key, envelope.headers, transient=transient)


def prepare(router: Router, envelope: Envelope, queues: Sequence[str], naive: tzinfo) -> list[NewTask]:
    """One execution for each of the queues.

    Raises:
        ConfigError: it has a unique key that can't be right, or goes to several queues with one.
    """
    columns = columns_of(envelope, naive)
    if columns.unique_key is not None and len(queues) > 1:
        raise ConfigError(
            f"a message with a unique key (here {columns.unique_key!r}) goes to one queue, since one execution has the "
            f"key; exchange {envelope.exchange!r} sends this one to {', '.join(sorted(queues))}"
        )
    payload = encode(envelope)
    return [new_task(queue, payload, columns, router.message_ttl(queue)) for queue in queues]


class Trimmer:
    """Keeps queues of short-lived messages short, on behalf of consumers that do not claim (docs/reports.md, B42).

    Who publishes to such a queue looks once in the time that its messages live, whether the first of them are past
    it. So a queue holds at most what is published in twice that time, whether its consumer is slow, frozen or dead.

    Args:
        broker: where.
        router: knows the queues.
    """

    def __init__(self, broker: Broker, router: Router) -> None:
        self._broker = broker
        self._router = router
        self._next: dict[str, float] = {}

    def published(self, queues: Sequence[str]) -> None:
        """Something was published to these queues. Does not raise."""
        now = time.monotonic()
        due = [name for name in queues if self._due(name, now)]
        if not due:
            return
        try:
            self._broker.drop_expired(due)
        except TaskgateError as error:
            logger.debug("what has expired in %s could not be dropped now: %s", due, error)

    def _due(self, name: str, now: float) -> bool:
        lives = self._router.short_lived(name)
        if lives is None or now < self._next.get(name, 0.0):
            return False
        if len(self._next) >= _MOST:
            self._next.clear()
        first = name not in self._next
        self._next[name] = now + max(SHORTEST, lives)
        return not first


class PublishBatch:
    """Messages that are stored together: all in one transaction, or none.

    Args:
        channel: where they are published; kombu asks for it.
        max_size: so many are stored at once when more come.
    """

    def __init__(self, channel: Channel, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._tasks: list[NewTask] = []

    def publish(
        self, message: Mapping[str, Any], exchange: str | None = "", routing_key: str | None = "", **kwargs: Any
    ) -> None:
        """Add a message. Raises as ``basic_publish``, but for what only storing it can tell."""
        connection = self.channel._open()
        envelope = self.channel._envelope(message, exchange, routing_key)
        with kombu_errors():
            queues = route(connection.router, envelope)
            tasks = prepare(connection.router, envelope, queues, connection.options.naive)
            depends.check(connection, tasks)
            self._tasks.extend(tasks)
        if len(self._tasks) >= self._max_size:
            self.flush()

    def flush(self) -> None:
        """Store what has been added. Raises as ``basic_publish``; it is not stored then, and not kept either."""
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        connection = self.channel._open()
        with kombu_errors():
            if capture(connection.settings, tasks):
                return
            connection.broker.enqueue_many(tasks)
        connection.published(list(dict.fromkeys(task.queue for task in tasks)))

    def discard(self) -> None:
        """Forget what has been added."""
        self._tasks.clear()

    def close(self) -> None:
        """Forget what has not been stored."""
        self.discard()
