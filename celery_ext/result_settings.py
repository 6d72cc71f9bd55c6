"""From ``result_backend`` and ``result_backend_transport_options`` to the settings of the database."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.transport.options import parse_options
from kombu_taskgate.transport.url import PREFIX, database_url

logger = logging.getLogger("celery_ext.backend")

#: Options of other result backends that have nothing to do here. An app that moves brings them along.
FOREIGN = frozenset(
    {
        "additional_connection_errors", "credential_provider", "global_keyprefix", "health_check_interval",
        "master_name", "max_connections", "result_chord_ordered", "retry_on_timeout", "sentinel_kwargs",
        "socket_connect_timeout", "socket_keepalive", "socket_timeout", "visibility_timeout",
    }
)  # fmt: skip
_told: set[frozenset[str]] = set()


def result_settings(app: Any, url: str) -> tuple[BrokerSettings, Mapping[str, Any]]:
    """The settings of the database that holds the results, and how often a failing write is tried again.

    Where the broker is the same database its ``broker_transport_options`` hold for the results too, unless
    ``result_backend_transport_options`` says otherwise, so that both share tables and connections.

    Args:
        app: the Celery app.
        url: of the database, without ``taskgate+``.

    Raises:
        ConfigError: the URL or an option can't be right.
    """
    given = dict(app.conf.get("result_backend_transport_options") or {})
    retry_policy = given.pop("retry_policy", None) or {}
    if not isinstance(retry_policy, Mapping):
        raise ConfigError(f"retry_policy must be a mapping, not {retry_policy!r}")
    foreign = FOREIGN.intersection(given)
    if foreign and foreign not in _told:
        _told.add(foreign)
        logger.info(
            "options of result_backend_transport_options that are not used here: %s", ", ".join(sorted(foreign))
        )
    own = {name: value for name, value in given.items() if name not in foreign}
    shared = app.conf.broker_transport_options or {} if url in _broker_urls(app) else {}
    settings, _ = parse_options(url, {**shared, **own}, app.conf.broker_connection_timeout)
    return settings, retry_policy


def same_tables(one: BrokerSettings, other: BrokerSettings) -> bool:
    """Whether two settings mean the same tables; how they are used may differ."""
    return (one.url, one.table_prefix, one.schema) == (other.url, other.table_prefix, other.schema)


def _broker_urls(app: Any) -> set[str]:
    """The databases of the app's broker; none where it is another kind of broker."""
    urls = set()
    for connect in (app.connection_for_write, app.connection_for_read):
        client = connect()
        if isinstance(client.transport_cls, str) and client.transport_cls.startswith("taskgate"):
            urls.add(database_url(client).removeprefix(PREFIX))
    return urls


def broker_settings(app: Any) -> BrokerSettings | None:
    """The settings of the broker that the app publishes to; ``None`` where that is not taskgate."""
    client = app.connection_for_write()
    if not (isinstance(client.transport_cls, str) and client.transport_cls.startswith("taskgate")):
        return None
    settings, _ = parse_options(database_url(client), client.transport_options, client.connect_timeout)
    return settings
