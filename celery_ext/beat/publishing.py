"""Beat's own connection to the broker: one attempt at a time, so that a broker that is away holds nobody up."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kombu.exceptions import OperationalError

logger = logging.getLogger("celery_ext.beat")


def connect_once(connection: Any) -> Any:
    """Connect, or raise; Celery's beat would go on trying, and its replica would lead without sending anything.

    RabbitMQ is to confirm what is published, unless the app's transport options say otherwise. Without that a message
    that it refuses, or loses with its connection, would count as sent, and the next one's publishing would fail for it.

    Args:
        connection: a kombu connection.

    Raises:
        OperationalError: it can't be reached.
    """
    if connection.transport.driver_name == "py-amqp":
        connection.transport_options = {"confirm_publish": True, **(connection.transport_options or {})}
    try:
        connection.connect()
    except connection.recoverable_connection_errors as error:
        raise OperationalError(f"the broker {connection.as_uri()} can't be reached: {error}") from error
    return connection


class Publisher:
    """Publishes over a connection of its own, which is opened when it is needed and again after an error.

    Args:
        app: the Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._connection: Any = None
        self._producer: Any = None

    def publish(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> object:
        """Call a task by its name. Raises what ``apply_async`` raises."""
        task = self._app.tasks.get(name)
        producer = self._connect()
        try:
            if task is not None:
                return task.apply_async(args, kwargs, producer=producer, **options)
            return self._app.send_task(name, args, kwargs, producer=producer, **options)
        except Exception:
            # It may be the connection's fault, and the next tick must not depend on finding out.
            self.close()
            raise

    def warm(self) -> None:
        """Connect now, so that the first message does not have to wait for it. Does not raise."""
        try:
            self._connect()
        except Exception as error:  # noqa: BLE001  # it is tried again when there is something to publish
            logger.debug("the broker can't be reached yet: %s", error)
            self.close()

    def _connect(self) -> Any:
        if self._producer is None:
            self._connection = self._app.connection_for_write()
            connection = connect_once(self._connection)
            self._producer = self._app.amqp.Producer(connection, auto_declare=False)
        return self._producer

    def close(self) -> None:
        """Close the connection. Idempotent; does not raise."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with suppress(Exception):
                connection.release()
