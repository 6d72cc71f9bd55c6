"""Bad input gives one clear error at once, and leaves everything as it was."""

from __future__ import annotations

import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import kombu
import pytest
from kombu.exceptions import OperationalError

from kombu_taskgate.core.errors import ConfigError, PayloadTooLarge, StoreUnavailable
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.settings import BrokerSettings
from tests.workers.fixtures import MakeLab
from tests.workers.servers import free_port


def connect(url: str, **options: object) -> kombu.Connection:
    return kombu.Connection(url, transport_options=options).connect()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("taskgate+oracle://u:secret@h/x", "does not support 'oracle'"),
        ("taskgate+sqlite://", "in memory"),
        ("taskgate+sqlite:////no/such/folder/x.db", "folder /no/such/folder"),
        ("taskgate+postgresql+nodriver://u:secret@h/x", "driver 'nodriver' is not supported"),
        ("taskgate+mysql+mysqldb://u:secret@h/x", "driver 'mysqldb' is not installed"),
        ("taskgate://x", "taskgate+"),
    ],
)
def test_urls(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(url)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


def test_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'celery-taskgate\[postgresql\]'"):
        open_broker(BrokerSettings("postgresql://u:secret@127.0.0.1/x"))


def test_driver_is_found_without_being_named(postgresql_url: str) -> None:
    broker = open_broker(BrokerSettings(postgresql_url.replace("+psycopg", ""), table_prefix="found_"))
    broker.close()


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_unreachable_server(scheme: str, request: pytest.FixtureRequest) -> None:
    port = free_port()
    connection = kombu.Connection(f"taskgate+{scheme}://u:secret@127.0.0.1:{port}/x")
    with pytest.raises(StoreUnavailable) as caught:
        connection.connect()
    assert str(port) in str(caught.value)
    assert "secret" not in str(caught.value)


def test_publishing_to_an_unreachable_server_ends(make_lab: MakeLab, tmp_path: Path) -> None:
    """The publisher is told in bounded time, with kombu's error."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db")
    app = lab.make_app(broker_url=f"taskgate+postgresql://u:secret@127.0.0.1:{free_port()}/x")
    started = time.monotonic()
    with pytest.raises(OperationalError) as caught:
        lab.send("work", 0, app=app, retry=True, retry_policy={"max_retries": 2, "interval_start": 0.05})
    assert time.monotonic() - started < 30
    assert "secret" not in str(caught.value)
    app.close()


def test_unknown_option_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lease_tll.*lease_ttl"):
        connect(f"taskgate+sqlite:///{tmp_path}/x.db", lease_tll=5)


def test_options_of_other_transports_are_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"visibility_timeout": 3600, "fanout_prefix": True, "priority_steps": [0, 9], "socket_timeout": 5}
    with caplog.at_level(logging.INFO, logger="kombu_taskgate"):
        kombu.Connection(f"taskgate+sqlite:///{tmp_path}/x.db", transport_options=options).connect()
    lines = [record.getMessage() for record in caplog.records if "visibility_timeout" in record.getMessage()]
    assert len(lines) == 1
    assert all(name in lines[0] for name in options)


def test_wrong_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lease_ttl"):
        connect(f"taskgate+sqlite:///{tmp_path}/x.db", lease_ttl="soon")


def test_read_only_database(tmp_path: Path) -> None:
    """A file opened read-only: said when it is opened, and not tried for ever."""
    path = tmp_path / "x.db"
    open_broker(BrokerSettings(f"sqlite:///{path}")).close()
    url = f"sqlite:///file:{path}?mode=ro&uri=true"
    broker = open_broker(BrokerSettings(url))
    from kombu_taskgate.core.model import NewTask

    with pytest.raises(ConfigError, match="readonly"):
        broker.enqueue(NewTask("q"))
    broker.close()
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("select count(*) from taskgate_tasks").fetchone() == (0,)


def test_message_over_the_limit(make_lab: MakeLab, database_url: str) -> None:
    """apply_async raises kombu's error, which is ours too, and nothing is stored."""
    lab = make_lab(database_url, max_payload=100_000)
    with pytest.raises(OperationalError, match="at most 100000 bytes") as caught:
        lab.send("echo", "x" * 200_000)
    assert isinstance(caught.value, PayloadTooLarge)
    assert lab.rows() == []
    lab.send("echo", "x" * 50_000)
    assert len(lab.rows()) == 1


def test_message_over_the_servers_limit(make_lab: MakeLab, mysql_url: str) -> None:
    """The server's own bound counts where it is lower than ours."""
    lab = make_lab(mysql_url, max_payload=2**31)
    with pytest.raises(PayloadTooLarge):
        lab.send("echo", "x" * 20 * 2**20)


def test_megabytes_round_trip(make_lab: MakeLab, database_url: str) -> None:
    """Nothing is cut at 64 KB."""
    lab = make_lab(database_url)
    lab.start_worker("-c1", "-Psolo")
    from tests.workers.harness import wait_for

    id = lab.send("work", 0, "x" * 2**20)
    line = wait_for(lambda: lab.journal.of("end", id), 30, "it runs")[0]
    assert line["tag"] == "x" * 2**20


@pytest.mark.parametrize("queue", ["", "x" * 256, "a\0b"])
def test_queue_names(tmp_path: Path, queue: str) -> None:
    with kombu.Connection(f"taskgate+sqlite:///{tmp_path}/x.db") as connection, connection.channel() as channel:
        with pytest.raises((ConfigError, kombu.exceptions.ChannelError, OperationalError)):
            connection.Producer(channel).publish("x", routing_key=queue, exchange="")
        assert channel.queue_declare("fine").message_count == 0
