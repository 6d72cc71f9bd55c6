"""Databases and tables that are there for one measurement."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import sqlalchemy as sa

from kombu_taskgate.core.database import Database
from kombu_taskgate.core.migrations import drop
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker
from kombu_taskgate.core.urls import resolve


def new_name() -> str:
    """A name that nothing else has."""
    return f"bench_{uuid.uuid4().hex[:8]}"


def bare(url: str) -> str:
    """The database's URL, with or without ``taskgate+`` before it."""
    return url.removeprefix("taskgate+")


def ask(url: str, *texts: str) -> Any:
    """Execute statements, each a transaction of its own, and return the value that the last one gives, if any.

    Raises:
        TaskgateError: the server can't be reached, or refuses.
    """
    found, dialect = resolve(url)
    database = Database(BrokerSettings(url, pool_size=1), dialect, found)

    def one(conn: sa.Connection, text: str) -> Any:
        done = conn.exec_driver_sql(text)
        return done.scalar() if done.returns_rows else None

    try:
        value = None
        for text in texts:
            value = database.write(partial(one, text=text))
        return value
    finally:
        database.dispose()


@contextmanager
def database(url: str) -> Iterator[sa.URL]:
    """A new database on the server of this URL, dropped after the block; the URL names the driver.

    Raises:
        TaskgateError: the server can't be reached, or the user may not create databases.
    """
    found, _ = resolve(url)
    name = new_name()
    forced = " WITH (FORCE)" if found.get_backend_name() == "postgresql" else ""
    ask(url, f"CREATE DATABASE {name}")
    try:
        yield found.set(database=name)
    finally:
        ask(url, f"DROP DATABASE {name}{forced}")


@contextmanager
def broker(url: str, **settings: Any) -> Iterator[SqlBroker]:
    """A broker on tables of its own in this database, which are dropped after the block.

    Args:
        url: of the database.
        settings: of the broker, see :class:`~kombu_taskgate.core.settings.BrokerSettings`.

    Raises:
        TaskgateError: the database can't be used.
    """
    made = SqlBroker(BrokerSettings(bare(url), table_prefix=f"{new_name()}_", **settings))
    try:
        yield made
    finally:
        drop(made.database, made.tables)
        made.close()
