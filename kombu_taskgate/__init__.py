"""taskgate: a SQL database as a first-class Celery broker.

Importing this package adds the transport's names to kombu's table and stays light: neither SQLAlchemy nor a
driver is loaded before a connection is opened. An installed distribution needs no import at all, see
:mod:`kombu_taskgate.registration`.
"""

from __future__ import annotations

from .registration import register

__all__ = ["register"]

register()
