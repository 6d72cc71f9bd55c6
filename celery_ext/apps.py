"""Which Celery app a connection of the transport belongs to: kombu's connections do not tell."""

from __future__ import annotations

import logging
import sys
from typing import Any

from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.transport.connection import Connection
from kombu_taskgate.transport.options import parse_options
from kombu_taskgate.transport.url import database_url

logger = logging.getLogger("celery_ext.apps")


def app_of(connection: Connection, control_exchange: str | None = None) -> Any | None:
    """The app that uses this broker, the current one before others; ``None`` in a program without Celery.

    Args:
        connection: to the broker.
        control_exchange: only apps with this setting are considered.
    """
    exchanges = [(app, _control_exchange(app)) for app in _apps()]
    apps = [app for app, name in exchanges if name is not None and control_exchange in (None, name)]
    for app in apps:
        if _uses(app, connection):
            return app
    # An app can be given a connection to a broker that its settings do not name.
    return apps[0] if apps else None


def _control_exchange(app: Any) -> Any:
    """The setting, which none is without; ``None`` for an app that can't be used."""
    try:
        return app.conf.control_exchange
    except Exception as error:  # noqa: BLE001  # some other app of the process, whose settings can't be loaded
        logger.debug("the settings of %r can't be read: %s", app, error)
        return None


def _apps() -> list[Any]:
    """All apps of the process, the current one first."""
    if "celery" not in sys.modules:
        return []
    from celery import _state

    # Not celery.current_app, which makes an app where there is none. Of another thread's current app only the
    # default one is known.
    current = _state._tls.current_app or _state.default_app
    others = [app for app in list(_state._get_active_apps()) if app is not current]
    return others if current is None else [current, *others]


def _uses(app: Any, connection: Connection) -> bool:
    for client in (app.connection_for_write(), app.connection_for_read()):
        try:
            settings, _ = parse_options(database_url(client), client.transport_options, client.connect_timeout)
        except ConfigError:
            continue  # another kind of broker
        if settings == connection.settings:
            return True
    return False
