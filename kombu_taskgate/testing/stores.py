"""Stores for the contract suite: in memory, and behind a database URL."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from kombu_taskgate.core.broker import Broker, Notify
from kombu_taskgate.core.clock import Clock
from kombu_taskgate.core.memory import MemoryBroker, MemoryStore
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.contract.store import FORK, PERSISTENT, SERVER_CLOCK, SQL

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kombu_taskgate.core.sql import SqlBroker


def new_prefix() -> str:
    """A table prefix that nobody else has."""
    return f"t{uuid.uuid4().hex[:12]}_"


class InMemory:
    """Brokers that share one :class:`~kombu_taskgate.core.memory.MemoryStore`."""

    capabilities: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._store = MemoryStore()

    def open(self, *, clock: Clock | None = None, notify: Notify | None = None, **settings: Any) -> Broker:
        """See :class:`~kombu_taskgate.testing.contract.store.Store`."""
        return MemoryBroker(BrokerSettings("memory://", **settings), store=self._store, clock=clock, notify=notify)

    def engine(self) -> sa.Engine:
        """There is no database."""
        raise NotImplementedError("a store in memory has no engine: ask for the capability sql first")

    def close(self) -> None:
        """Nothing is left behind."""


class InDatabase:
    """Brokers on tables of their own in a database; the tables are dropped at the end.

    Args:
        url: database URL, without ``taskgate+``.
        settings: defaults for every broker opened.
    """

    capabilities = frozenset({SQL, PERSISTENT, FORK, SERVER_CLOCK})

    def __init__(self, url: str, **settings: Any) -> None:
        self.url = url
        self.settings = {"table_prefix": new_prefix(), **settings}
        self._opened: list[Broker] = []
        self._engine: sa.Engine | None = None

    def open(self, *, clock: Clock | None = None, notify: Notify | None = None, **settings: Any) -> Broker:
        """See :class:`~kombu_taskgate.testing.contract.store.Store`."""
        from kombu_taskgate.core.sql import SqlBroker

        broker = SqlBroker(BrokerSettings(self.url, **{**self.settings, **settings}), clock=clock, notify=notify)
        self._opened.append(broker)
        return broker

    def engine(self) -> sa.Engine:
        """An engine with SQLAlchemy's own defaults, made from the same URL."""
        if self._engine is None:
            import sqlalchemy as sa

            from kombu_taskgate.core.urls import resolve

            self._engine = sa.create_engine(resolve(self.url)[0])  # noqa: TID251  # it is the test's, not ours
        return self._engine

    def clear(self) -> None:
        """Empty the tables, which is quicker than making new ones."""
        import sqlalchemy as sa

        broker = self._own()
        tables = [table for table in broker.tables.metadata.sorted_tables if table is not broker.tables.version]

        def work(conn: sa.Connection) -> None:
            for table in tables:
                conn.execute(sa.delete(table))

        broker.database.transaction(work)

    def _own(self) -> SqlBroker:
        """Some broker on the tables that are this store's."""
        from kombu_taskgate.core.sql import SqlBroker

        for broker in self._opened:
            if isinstance(broker, SqlBroker) and broker.tables.prefix == self.settings["table_prefix"]:
                return broker
        self.open()
        return self._own()

    def close(self) -> None:
        """Drop the tables and close every broker opened."""
        from kombu_taskgate.core import migrations

        broker = self._own()
        migrations.drop(broker.database, broker.tables)
        for opened in self._opened:
            opened.close()
        self._opened.clear()
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None
