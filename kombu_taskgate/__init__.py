"""taskgate: a SQL database as a first-class Celery broker.

Importing this package adds the transport's names to kombu's table and stays light: neither SQLAlchemy nor a
driver is loaded before a connection is opened. A Celery app needs no import at all, see
:mod:`kombu_taskgate.registration`; a program that uses kombu alone does, for kombu.Connection by itself looks for no
entry points.
"""

from __future__ import annotations

from .registration import register

__all__ = ["register"]

register()
