"""The entry point for kombu."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from kombu.transport import base

from ..core.errors import ConfigError
from . import errors, plugins, url
from .channel import Channel
from .connection import Connection
from .options import parse_options


class Management(base.Management):
    """The little of AMQP's management interface that kombu knows."""

    def get_bindings(self) -> list[dict[str, str]]:
        """All bindings."""
        channel = self.transport.client.channel()
        try:
            return channel.get_bindings()  # type: ignore[no-any-return]  # kombu does not say whose channel it is
        finally:
            channel.close()


class Transport(base.Transport):
    """A SQL database as kombu's broker.

    Args:
        client: the :class:`kombu.Connection` that uses it.
    """

    Management = Management

    #: Celery switches events off for ``sql``, so that must not be its name.
    driver_type = "taskgate"
    driver_name = "taskgate"
    #: kombu then leaves the URL as it is.
    can_parse_url = True

    connection_errors = errors.CONNECTION_ERRORS  # type: ignore[assignment]  # kombu says: a tuple of one
    channel_errors = errors.CHANNEL_ERRORS  # type: ignore[assignment]  # as above
    recoverable_connection_errors = errors.RECOVERABLE_CONNECTION_ERRORS
    recoverable_channel_errors = ()

    implements = base.Transport.implements.extend(
        asynchronous=True,
        batch_publish=True,
        exchange_type=frozenset({"direct", "topic", "fanout", "headers"}),
        heartbeats=False,
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        plugins.tell()
        url.hide_password(client)
        url.forget_old_port(client)
        if client.cycle is not None and not isinstance(client.cycle, url.Alternates):
            client.cycle = url.Alternates(client.cycle)

    def establish_connection(self) -> Connection:
        """Connect to the database, and prepare its tables if that is needed and allowed.

        Raises:
            BrokerUnavailable: it does not answer.
            ConfigError, SchemaError: it will not work this way, however often it is tried.
        """
        client: Any = self.client
        if client.ssl:
            raise ConfigError(
                "broker_use_ssl (ssl=…) does nothing here, and ignoring it could leave the connection unencrypted: put "
                "the driver's own parameters into the URL, e.g. ?sslmode=verify-full, and remove it"
            )
        settings, options = parse_options(url.database_url(client), client.transport_options, client.connect_timeout)
        return Connection(client, settings, options)

    def verify_connection(self, connection: Connection) -> bool:
        """Whether the connection can be used in this process."""
        return connection.connected

    def close_connection(self, connection: Connection) -> None:
        """Close it: settle what waits, give back what is unsettled."""
        connection.close()

    def _collect(self, connection: Connection | None) -> None:
        """Let go of it without waiting for the database: after a fork, and when kombu gives a connection up."""
        if connection is not None:
            connection.abandon()

    def create_channel(self, connection: Connection) -> Channel:
        """Open a channel."""
        return Channel(connection)

    def close_channel(self, channel: Channel) -> None:
        """Close a channel."""
        channel.close()

    def drain_events(self, connection: Connection, timeout: float | None = None, **kwargs: Any) -> None:
        """Deliver one message; raises TimeoutError when there is none in time."""
        connection.drain_events(timeout)

    def register_with_event_loop(self, connection: Connection, loop: Any) -> None:
        """Deliver from an event loop."""
        connection.add_to_loop(loop, self.on_readable, connection, loop)

    def unregister_from_event_loop(self, connection: Connection, loop: Any) -> None:
        """Deliver from it no more."""
        connection.remove_from_loop(loop)

    def on_readable(self, connection: Connection, loop: Any) -> None:
        """Called by the event loop while there is something to deliver."""
        connection.deliver_ready()

    def driver_version(self) -> str:
        """The version of SQLAlchemy."""
        return importlib.metadata.version("SQLAlchemy")

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """The URL as people may see it."""
        return url.shown_url(self.client, include_password=include_password, mask=mask)


# A worker on greenlets looks at the class, right before it puts its steps together, and makes none until later.
plugins.tell()
