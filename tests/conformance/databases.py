"""Databases of a run's own, for programs that can't be told a table prefix."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pymysql
import sqlalchemy as sa

STORES = ("postgresql", "sqlite", "mysql")


def store_of(url: str) -> str:
    """Which of STORES a database URL without ``taskgate+`` leads to."""
    name = sa.make_url(url).get_backend_name()
    return "mysql" if name == "mariadb" else name


@contextmanager
def own_database(url: str, folder: Path) -> Iterator[str]:
    """A URL like this one, of an empty database that is dropped at the end; on SQLite a file in the folder."""
    parsed = sa.make_url(url)
    if store_of(url) == "sqlite":
        yield parsed.set(database=str(folder / "taskgate.db")).render_as_string(hide_password=False)
        return
    name = f"taskgate_{uuid.uuid4().hex[:12]}"
    execute = _on_mysql if store_of(url) == "mysql" else _on_postgresql
    execute(parsed, f"CREATE DATABASE {name}")
    try:
        yield parsed.set(database=name).render_as_string(hide_password=False)
    finally:
        execute(parsed, f"DROP DATABASE {name}")


def _on_mysql(url: sa.URL, statement: str) -> None:
    with pymysql.connect(
        host=url.host, port=url.port or 3306, user=url.username, password=url.password or "", autocommit=True
    ) as connection:
        connection.cursor().execute(statement)


def _on_postgresql(url: sa.URL, statement: str) -> None:
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as connection:
        # A worker that was killed may have left sessions behind, and those keep a database from being dropped.
        left = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        connection.execute(left, [statement.rpartition(" ")[2]])
        connection.execute(statement)
