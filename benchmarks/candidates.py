"""The brokers that are compared: how each is set up for one run, and what is left of it is removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kombu import Connection
from throwaway import ask, bare, database, new_name

#: How a candidate is asked for; with the options that it uses.
NAMES = ("taskgate+postgresql", "taskgate+sqlite", "taskgate+mysql", "redis", "rabbitmq", "sqlalchemy+postgresql")
#: Settings of the app that all have.
COMMON: dict[str, Any] = {
    "task_acks_late": True,
    "worker_prefetch_multiplier": 16,
    "broker_connection_retry_on_startup": True,
    "result_expires": 3600,
}
Conf = dict[str, Any]


class Missing(Exception):
    """A candidate can't be measured; the text says why."""


@dataclass(frozen=True)
class Urls:
    """Where servers are; databases without ``taskgate+``.

    Args:
        postgresql, mysql: a database on which the user may connect; for each run another is created beside it.
        redis: an empty database, which is emptied after each run.
        rabbitmq: the server.
    """

    postgresql: str = "postgresql://postgres@127.0.0.1:5432/postgres"
    mysql: str = "mysql://root@127.0.0.1:3306/mysql"
    redis: str = "redis://127.0.0.1:6379/14"
    rabbitmq: str = "pyamqp://guest:guest@127.0.0.1:5672//"


@dataclass(frozen=True)
class Candidate:
    """One broker.

    Args:
        name: one of :data:`NAMES`.
        run: with a folder for files: a context in which it can be used, which gives the app's settings.
        version: of its server.
    """

    name: str
    run: Callable[[Path], AbstractContextManager[Conf]]
    version: Callable[[], str]

    def check(self, folder: Path) -> None:
        """Raise Missing when it can't be used."""
        try:
            with self.run(folder):
                pass
        except Missing:
            raise
        except Exception as error:  # each driver has its own, and a missing one is an ImportError
            raise Missing(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def candidates(urls: Urls) -> list[Candidate]:
    """All of them, whether they can be reached or not."""
    postgresql, mysql = bare(urls.postgresql), bare(urls.mysql)

    def at_postgresql() -> str:
        return f"PostgreSQL {str(ask(postgresql, 'SHOW server_version')).split()[0]}"

    return [
        Candidate("taskgate+postgresql", lambda _: _in_database(postgresql, "taskgate+", "taskgate+"), at_postgresql),
        Candidate("taskgate+sqlite", _in_file, _sqlite_version),
        Candidate("taskgate+mysql", lambda _: _in_database(mysql, "taskgate+", "taskgate+"), lambda: _mysql(mysql)),
        Candidate("redis", lambda _: _redis(urls.redis), lambda: _redis_version(urls.redis)),
        Candidate("rabbitmq", lambda _: _rabbitmq(urls.rabbitmq, urls.redis), lambda: _rabbitmq_version(urls.rabbitmq)),
        Candidate("sqlalchemy+postgresql", lambda _: _in_database(postgresql, "sqla+", "db+"), at_postgresql),
    ]


def conf(broker: str, backend: str) -> Conf:
    """Settings of the app for a new run: nothing is called as in any other."""
    name = new_name()
    names = ("task_default_queue", "control_exchange", "event_exchange")
    return {**COMMON, "broker_url": broker, "result_backend": backend, **dict.fromkeys(names, name)}


@contextmanager
def _in_database(url: str, broker: str, backend: str) -> Iterator[Conf]:
    with database(url) as made:
        text = made.render_as_string(hide_password=False)
        yield conf(f"{broker}{text}", f"{backend}{text}")


@contextmanager
def _in_file(folder: Path) -> Iterator[Conf]:
    path = folder / f"{new_name()}.db"
    url = f"taskgate+sqlite:///{path}"
    try:
        yield conf(url, url)
    finally:
        for left in folder.glob(f"{path.name}*"):
            left.unlink()


@contextmanager
def _emptied(url: str) -> Iterator[None]:
    """An empty Redis database, emptied again."""
    import redis

    client = redis.Redis.from_url(url)
    try:
        keys = client.dbsize()
        if keys:
            raise Missing(f"its database holds {keys} keys; name one that is empty (--redis): it is emptied afterwards")
        try:
            yield
        finally:
            client.flushdb()
    finally:
        client.close()


@contextmanager
def _redis(url: str) -> Iterator[Conf]:
    with _emptied(url):
        yield conf(url, url)


@contextmanager
def _rabbitmq(url: str, results: str) -> Iterator[Conf]:
    with _emptied(results), Connection(url, connect_timeout=5) as connection:
        connection.ensure_connection(max_retries=1, timeout=5)
        connection.release()
        made = conf(url, results)
        name = made["task_default_queue"]
        try:
            yield made
        finally:
            channel = connection.default_channel
            channel.queue_delete(name)
            for exchange in (name, f"{name}.pidbox", f"reply.{name}.pidbox"):
                channel.exchange_delete(exchange)


def _sqlite_version() -> str:
    import sqlite3

    return f"SQLite {sqlite3.sqlite_version}"


def _mysql(url: str) -> str:
    text = str(ask(url, "SELECT VERSION()"))
    return f"{'MariaDB' if 'mariadb' in text.lower() else 'MySQL'} {text.partition('-')[0]}"


def _redis_version(url: str) -> str:
    import redis

    client = redis.Redis.from_url(url)
    try:
        return f"Redis {client.info('server')['redis_version']}"
    finally:
        client.close()


def _rabbitmq_version(url: str) -> str:
    with Connection(url, connect_timeout=5) as connection:
        connection.ensure_connection(max_retries=1, timeout=5)
        return f"RabbitMQ {connection.connection.server_properties['version']}"
