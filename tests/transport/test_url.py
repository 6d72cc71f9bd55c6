"""URLs: all the ways in which kombu hands them over, what is shown of them, and failing over."""

from __future__ import annotations

import pickle
import socket
from itertools import pairwise

import kombu
import pytest
from kombu.utils.url import url_to_parts

from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.transport.errors import BrokerUnavailable
from kombu_taskgate.transport.url import database_url, masked
from tests.transport.helpers import get, publish

FULL = [
    "postgresql://user:p%40ss@db.example:5433/app?sslmode=require",
    "postgresql+psycopg://user:pw@db.example/app",
    "mysql+pymysql://user:pw@[::1]:3307/app?charset=utf8mb4",
    "mariadb://db.example/app",
    "sqlite:////var/lib/app/taskgate.db",
    "sqlite:///taskgate.db",
    "sqlite+pysqlite:///taskgate.db?timeout=5",
    "memory://",
    "memory://Name",
]


def connected_to(connection: kombu.Connection) -> str:
    """The database URL, as an attempt to connect would use it."""
    return database_url(connection.transport.client)


@pytest.mark.parametrize("url", FULL)
def test_the_first_url(url):
    assert connected_to(kombu.Connection(f"taskgate+{url}")) == url
    assert connected_to(kombu.Connection([f"taskgate+{url}"])) == url
    if "+" not in url.partition("://")[0]:  # kombu takes what is before a + for the transport
        assert connected_to(kombu.Connection(url, transport="taskgate")) == url


@pytest.mark.parametrize("url", FULL)
def test_an_alternate(url):
    connection = kombu.Connection(f"taskgate+postgresql://x:y@dead:1/z;taskgate+{url}")
    connection.transport  # noqa: B018  # kombu makes it before it can fail over
    connection.maybe_switch_next()
    assert connected_to(connection) == url
    assert connection.port == url_to_parts(f"taskgate+{url}").port
    assert connection.as_uri(include_password=True) == f"taskgate+{url}"
    connection.maybe_switch_next()
    assert connected_to(connection) == "postgresql://x:y@dead:1/z"


@pytest.mark.parametrize("url", FULL)
def test_copies_before_and_after_a_failover(url):
    connection = kombu.Connection([f"taskgate+{url}", f"taskgate+{url}"])
    for switched in (False, True):
        if switched:
            connection.transport  # noqa: B018
            connection.maybe_switch_next()
        once = connection.clone()
        copies = [once, once.clone(), pickle.loads(pickle.dumps(connection)), connection.Pool(1).acquire()]
        assert [connected_to(copy) for copy in copies] == [url] * 4
        assert {copy.as_uri() for copy in copies} == {connection.as_uri()}


def test_ports_do_not_leak_from_one_alternate_to_the_next():
    urls = ["taskgate+postgresql://a/x", "taskgate+postgresql://b:5433/x", "taskgate+postgresql://c/x"]
    connection = kombu.Connection(";".join(urls))
    ports = []
    for _ in urls:
        assert connected_to(connection) == urls[len(ports)].removeprefix("taskgate+")
        ports.append(connection.port)
        connection.maybe_switch_next()
    assert ports == [None, 5433, None]


def test_a_url_to_switch_to_that_is_no_alternate():
    connection = kombu.Connection("taskgate+memory://")
    for url, expected in [
        ("taskgate+postgresql+psycopg://us%2Fer:p%40w@db:5433/app", "postgresql+psycopg://us%2Fer:p%40w@db:5433/app"),
        ("taskgate+sqlite:////abs/file.db", "sqlite:////abs/file.db"),
        ("taskgate+mysql://u@[::1]:3307/app", "mysql://u@[::1]:3307/app"),
    ]:
        connection.switch(url)
        assert connected_to(connection) == expected


def test_parts_given_one_by_one():
    connection = kombu.Connection("db", "user", "p@w", "app", 5433, transport="taskgate+postgresql")
    assert connected_to(connection) == "postgresql://user:p%40w@db:5433/app"


def test_user_and_password_given_beside_the_url():
    url = "taskgate+postgresql://db/app"
    assert connected_to(kombu.Connection(url, userid="u", password="p@w")) == "postgresql://u:p%40w@db/app"
    assert connected_to(kombu.Connection(url, userid="u", password=lambda: "secret")) == "postgresql://u:secret@db/app"
    given = kombu.Connection("taskgate+postgresql://a:b@db/app", userid="u", password="p")
    assert connected_to(given) == "postgresql://a:b@db/app"
    assert connected_to(kombu.Connection("taskgate+sqlite:///x.db", userid="u", password="p")) == "sqlite:///x.db"


@pytest.mark.parametrize("url", ["taskgate://", "taskgate://localhost", "taskgate:///file.db"])
def test_a_url_without_a_database_says_what_to_write(url):
    connection = kombu.Connection(url)
    with pytest.raises(ConfigError, match=r"names no database: write taskgate\+postgresql://"):
        connection.connect()
    assert connection.as_uri() == "taskgate://"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:s3cret@db:5432/app",
        "postgresql+psycopg://user:s3cret@db/app?application_name=x",
        "postgresql://user:s3cr/et@db/app",
        "postgresql://user:s3cr?et@db/app",
        "postgresql://user:s3cr@et@db/app",
        "postgresql://db/app?user=u&password=s3cret",
        "mysql+mysqldb://user@db/app?passwd=s3cret&charset=utf8mb4",
        "mariadb+mariadbconnector://user:s3cret@db/app?ssl_key_password=s3cret",
        "postgresql://:s3cret@db/app",
    ],
)
def test_passwords_are_shown_nowhere(url):
    connection = kombu.Connection(f"taskgate+{url}")
    shown = [connection.as_uri(), repr(connection), connection.clone().as_uri(), masked(url)]
    info = connection.info()
    info.pop("password")  # as Celery does before it answers "inspect stats"
    if "?" not in url:
        shown.append(repr(info))
    for text in shown:
        assert "s3c" not in text
        assert "et@" not in text
    assert "**" in connection.as_uri()
    assert "**" not in connection.as_uri(include_password=True)
    assert connection.as_uri(mask="hidden").count("hidden") == connection.as_uri().count("**")


def test_masking_leaves_the_rest_alone():
    assert masked("postgresql://user@db:5432/app?sslmode=require") == "postgresql://user@db:5432/app?sslmode=require"
    assert masked("sqlite:////var/lib/a@b.db") == "sqlite:////var/lib/a@b.db"
    assert masked("memory://name") == "memory://name"
    assert masked("postgresql://u:p@db/app?password=x&a=1") == "postgresql://u:**@db/app?password=**&a=1"


def unused_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.postgresql
def test_failing_over_from_a_dead_server(store_url, transport_options):
    dead = f"taskgate+postgresql+psycopg://postgres@127.0.0.1:{unused_port()}/none?connect_timeout=2"
    connection = kombu.Connection(f"{dead};taskgate+{store_url}", transport_options=transport_options)
    try:
        connection.connect()
        assert connection.as_uri() == f"taskgate+{masked(store_url)}"
        publish(connection, "q", 1)
        assert get(connection, "q") == 1
        clone = connection.clone()
        publish(clone, "q", 2)
        clone.release()
        assert get(connection, "q") == 2
    finally:
        connection.release()


@pytest.mark.postgresql
def test_a_dead_server_raises_when_connecting():
    connection = kombu.Connection(f"taskgate+postgresql+psycopg://postgres@127.0.0.1:{unused_port()}/none")
    for attempt in (connection.connect, lambda: connection.connection, connection.channel):
        with pytest.raises(BrokerUnavailable, match="not available"):
            attempt()
    with pytest.raises(kombu.exceptions.OperationalError):
        connection.ensure_connection(max_retries=1)


def test_failover_goes_round():
    urls = [f"taskgate+memory://{name}?x=1" for name in "abc"]
    connection = kombu.Connection(urls)
    seen = []
    for _ in range(7):
        seen.append(connected_to(connection))
        connection.maybe_switch_next()
    assert seen[:3] == seen[3:6]
    assert all(a != b for a, b in pairwise(seen))
