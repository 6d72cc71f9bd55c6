"""What is not stored is an error of the publisher, and what is no error is stored (reports B17)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from celery import Celery
from kombu.exceptions import OperationalError

from kombu_taskgate.core.database import Database
from kombu_taskgate.core.errors import PayloadTooLarge, StoreUnavailable
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.sql import SqlBroker
from kombu_taskgate.testing.stores import InDatabase
from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, proxy_for, wait_for

pytestmark = pytest.mark.crash


def publish_until_refused(lab: Lab, app: Celery, most: int, **options: object) -> tuple[int, Exception | None]:
    """Publish with Celery's own retries until a call fails; returns how many returned, and what the last one raised."""
    for number in range(most):
        try:
            lab.send("work", 0, "x" * 2000, app=app, **options)
        except Exception as error:
            return number, error
    return most, None


def database_of(app: Celery) -> Database:
    """Of the app's publishing connections, which share it."""
    connection = app.connection_for_write()
    connection.ensure_connection(max_retries=1)
    database: Database = connection.connection.broker.database
    return database


def test_a_full_disk(make_lab: MakeLab, tmp_path: Path) -> None:
    """SQLite with no room for more pages says what it says on a full disk."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db")
    app = lab.make_app()
    database = database_of(app)

    def full(connection: object, record: object) -> None:
        connection.execute("PRAGMA max_page_count = 60")  # type: ignore[attr-defined]

    sa.event.listen(database.engine, "connect", full)
    database.dispose()
    stored, error = publish_until_refused(lab, app, 200)
    assert isinstance(error, OperationalError), error
    assert isinstance(error, StoreUnavailable)
    assert "full" in str(error)
    assert 0 < stored < 200
    assert len(lab.rows()) == stored
    sa.event.remove(database.engine, "connect", full)
    database.dispose()
    lab.send("work", 0, "x" * 2000, app=app)
    assert len(lab.rows()) == stored + 1
    app.close()


def test_a_message_over_the_limit(make_lab: MakeLab, database_url: str) -> None:
    lab = make_lab(database_url)
    app = lab.make_app(broker_transport_options={**lab.options, "max_payload": 5000})
    lab.send("work", 0, "x", app=app)
    with pytest.raises(OperationalError, match="at most 5000 bytes") as caught:
        lab.send("work", 0, "x" * 10_000, app=app)
    assert isinstance(caught.value, PayloadTooLarge)
    assert len(lab.rows()) == 1
    app.close()


def test_a_database_that_is_away(make_lab: MakeLab, server_url: str) -> None:
    """With Celery's publish policy (3 retries within 0.6 s), and without: the caller is told, and nothing is stored."""
    with proxy_for(server_url, 5432 if server_url.startswith("postgresql") else 3306) as (proxy, url):
        lab = make_lab(server_url)
        app = lab.make_app(broker_url=f"taskgate+{url}")
        lab.send("work", 0, app=app)
        proxy.down()
        for options in ({}, {"retry": False}):
            stored, error = publish_until_refused(lab, app, 1, **options)
            assert (stored, isinstance(error, OperationalError)) == (0, True), error
        assert len(lab.rows()) == 1
        proxy.up()
        lab.send("work", 0, app=app)
        assert len(lab.rows()) == 2
        app.close()


def test_connections_that_are_cut_while_many_are_published(make_lab: MakeLab, server_url: str) -> None:
    """Each call that returned has stored one message; one that raised may have, and says that nobody knows."""
    with proxy_for(server_url, 5432 if server_url.startswith("postgresql") else 3306) as (proxy, url):
        lab = make_lab(server_url)
        app = lab.make_app(broker_url=f"taskgate+{url}")
        returned: list[str] = []
        unknown = 0
        for number in range(120):
            if number % 6 == 0:
                proxy.cut()
            try:
                returned.append(lab.send("work", 0, app=app, retry=False))
            except OperationalError as error:
                unknown += "unknown" in str(error)
        ids = [row.task_id for row in lab.rows()]
        assert len(ids) == len(set(ids)), "one was stored twice"
        assert set(returned) <= set(ids)
        assert len(ids) - len(returned) <= unknown
        app.close()


# -- too few connections ---------------------------------------------------------------------------


@pytest.fixture
def narrow(server_url: str) -> Iterator[SqlBroker]:
    store = InDatabase(server_url, pool_size=1, pool_timeout=0.2, listen=False)
    broker = store.open()
    assert isinstance(broker, SqlBroker)
    yield broker
    store.close()


def test_no_free_connection(narrow: SqlBroker) -> None:
    """B110: a retryable error that names the setting; renewals have a connection that nobody else is given."""
    session = narrow.open_session("me", 60.0)
    narrow.enqueue(NewTask("q"))
    (lease,) = narrow.dequeue(["q"], session=session)
    with narrow.database.engine.connect():
        with pytest.raises(StoreUnavailable, match="raise pool_size"):
            narrow.enqueue(NewTask("q"))
        assert narrow.renew_session(session).held == {lease.id: lease.token}
    narrow.enqueue(NewTask("q"))
    wait_for(lambda: narrow.queue_len("q") == 1, 30, "it works again")
