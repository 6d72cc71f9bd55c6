"""Which app a connection belongs to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_ext.apps import app_of


@pytest.fixture
def apps() -> Iterator[list[Celery]]:
    """Apps to be closed after the test."""
    made: list[Celery] = []
    yield made
    for app in made:
        app.close()


def make(apps: list[Celery], **conf: Any) -> Celery:
    app = Celery(f"app{len(apps)}", set_as_current=False)
    app.conf.update({"broker_url": f"taskgate+memory://{uuid.uuid4().hex}", **conf})
    apps.append(app)
    return app


def test_the_app_whose_broker_it_is(apps: list[Celery]) -> None:
    """By its URL and its options, for whatever direction it is used."""
    one, other = make(apps), make(apps)
    url = f"taskgate+memory://{uuid.uuid4().hex}"
    prefixed = [make(apps, broker_url=url, broker_transport_options={"table_prefix": f"{name}_"}) for name in "ab"]
    reads = make(apps, broker_read_url=f"taskgate+memory://{uuid.uuid4().hex}")
    make(apps, broker_url="amqp://")
    for app in (one, other, *prefixed, reads):
        with app.connection_for_read() as connection:
            assert app_of(connection.connection) is app
            assert app_of(connection.connection, "celery") is app


def test_only_apps_with_that_control_exchange(apps: list[Celery]) -> None:
    """Two apps on one broker are told apart by their control exchanges; an exchange that nobody has is nobody's."""
    url = f"taskgate+memory://{uuid.uuid4().hex}"
    one, other = (make(apps, broker_url=url, control_exchange=name) for name in ("one", "other"))
    with one.connection_for_write() as connection:
        assert app_of(connection.connection, "one") is one
        assert app_of(connection.connection, "other") is other
        assert app_of(connection.connection, "reply.one") is None


def test_a_connection_that_no_settings_name(apps: list[Celery]) -> None:
    """An app may be handed another broker's connection: its exchange tells."""
    app = make(apps, control_exchange="mine")
    with make(apps).connection_for_write() as connection:
        assert app_of(connection.connection, "mine") is app


def test_an_app_that_can_not_be_used_is_passed_over(apps: list[Celery]) -> None:
    """Somebody else's broken settings do not keep a revocation from being stored."""
    broken = Celery("broken", set_as_current=False)
    apps.append(broken)
    broken.config_from_object("no.such.module", silent=False)
    app = make(apps)
    with app.connection_for_write() as connection:
        assert app_of(connection.connection, "celery") is app
