"""Connections to each store in turn, with tables of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import kombu
import pytest

import kombu_taskgate  # noqa: F401  # the checkout need not be installed
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.stores import InDatabase, InMemory, new_prefix
from kombu_taskgate.transport import connection as connection_module

Connect = Callable[..., kombu.Connection]


@pytest.fixture
def transport_url(store_url: str) -> str:
    """URL of each store in turn, as kombu takes it."""
    return f"taskgate+{store_url}"


@pytest.fixture
def transport_options(store: InMemory | InDatabase) -> dict[str, Any]:
    """Options that keep a test's tables apart; they are dropped after it."""
    return dict(store.settings) if isinstance(store, InDatabase) else {"table_prefix": new_prefix()}


@pytest.fixture
def connect(transport_url: str, transport_options: dict[str, Any]) -> Iterator[Connect]:
    """Opens connections, and closes them after the test."""
    yield from connections(transport_url, transport_options)


@pytest.fixture
def connect_memory() -> Iterator[Connect]:
    """The same on one store in memory, for what has nothing to do with the database."""
    yield from connections(f"taskgate+memory://{new_prefix()}", {})


@pytest.fixture
def connect_sql(sql_store_url: str, sql_store: InDatabase) -> Iterator[Connect]:
    """The same on each SQL store in turn."""
    yield from connections(f"taskgate+{sql_store_url}", dict(sql_store.settings))


def connections(url: str, options: dict[str, Any]) -> Iterator[Connect]:
    """A factory of connections with a URL and options; what it made is closed at the end."""
    opened: list[kombu.Connection] = []

    def connect(**more: Any) -> kombu.Connection:
        opened.append(kombu.Connection(url, transport_options={**options, **more}))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.release()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock for every broker that connections of this test open."""
    clock = FakeClock()
    monkeypatch.setattr(connection_module, "open_broker", lambda settings: open_broker(settings, clock=clock))
    return clock
