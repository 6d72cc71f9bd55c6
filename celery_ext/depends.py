"""Whether a task can wait for others: their results have to be stored in the broker's own database.

The broker wakes a task in the transaction that stores the result it waits for; results that are kept elsewhere it
never sees.
"""

from __future__ import annotations

from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.transport.connection import Connection
from kombu_taskgate.transport.url import PREFIX, masked

from .apps import app_of
from .result_settings import same_tables


def check_results(connection: Connection) -> None:
    """Refuse ``depends_on`` where it could never be fulfilled. Programs without Celery are not concerned.

    Args:
        connection: over which a task is published.

    Raises:
        ConfigError: the app keeps its results elsewhere.
    """
    app = app_of(connection)
    if app is None:
        return
    backend = app.backend
    settings = getattr(backend, "settings", None)
    if not isinstance(settings, BrokerSettings) or not same_tables(settings, connection.settings):
        broker = PREFIX + masked(connection.settings.url)
        raise ConfigError(
            f"depends_on needs the results in the tables of the broker, {broker}; those of app {app.main!r} go to "
            f"{backend.as_uri()}. Set result_backend to the URL of the broker"
        )
