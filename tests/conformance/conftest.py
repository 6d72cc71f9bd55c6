"""Sources of kombu and Celery, and databases of a test's own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pymysql
import pytest
import sqlalchemy as sa

from tests import services
from tests.conformance.sdists import installed_sdist, unpack

Unpack = Callable[[str, str], Path]


@pytest.fixture
def unpack_sdist(request: pytest.FixtureRequest, tmp_path: Path) -> Unpack:
    """Unpacks a folder of an installed package's source distribution; skips, or fails in CI, where there is none."""

    def unpack_part(name: str, part: str) -> Path:
        with services.skip_if_missing():
            return unpack(installed_sdist(name, request.config.cache.mkdir("sdists")), part, tmp_path / "sdist")
        raise AssertionError("unreachable: skip_if_missing swallows nothing")

    return unpack_part


@pytest.fixture
def own_database_url(sql_store_name: str, sql_store_url: str) -> Iterator[str]:
    """A database of the test's own on each kind, for programs that can't be told a table prefix."""
    if sql_store_name == "sqlite":
        yield sql_store_url
        return
    url = sa.make_url(sql_store_url)
    name = f"taskgate_{uuid.uuid4().hex[:12]}"
    execute = _on_mysql if sql_store_name == "mysql" else _on_postgresql
    execute(url, f"CREATE DATABASE {name}")
    try:
        yield url.set(database=name).render_as_string(hide_password=False)
    finally:
        execute(url, f"DROP DATABASE {name}")


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
