"""What the contract suite asks of a store under test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest

from kombu_taskgate.core.broker import Broker, Notify
from kombu_taskgate.core.clock import Clock

if TYPE_CHECKING:
    import sqlalchemy as sa

#: Its data are in SQL tables: the store has ``engine()``, and its brokers have ``database`` (with ``fault``),
#: ``tables`` and ``explain_claim``.
SQL = "sql"
#: Its data outlive the process that wrote them, so that another process sees them.
PERSISTENT = "persistent"
#: A broker may be used on both sides of a fork and works on the same data there.
FORK = "fork"
#: Time is told by a server, not by the process that asks.
SERVER_CLOCK = "server_clock"


class Store(Protocol):
    """A factory of brokers on one set of data, empty when the test begins."""

    #: What it can do; cases ask for a capability, never for a name.
    capabilities: frozenset[str]

    def open(self, *, clock: Clock | None = None, notify: Notify | None = None, **settings: Any) -> Broker:
        """A broker as another process would open it: it shares nothing with the others but the data.

        Who made the store closes the brokers after the test.

        Args:
            clock: replaces the store's time.
            notify: told each state change.
            settings: of :class:`~kombu_taskgate.core.settings.BrokerSettings`, but the URL.
        """

    def engine(self) -> sa.Engine:
        """An SQLAlchemy engine of the test's own on the database (only with the capability ``sql``)."""


def require(store: Store, capability: str) -> None:
    """Skip the case when the store can't do what it is about."""
    if capability not in store.capabilities:
        pytest.skip(f"the store does not have the capability {capability}")
