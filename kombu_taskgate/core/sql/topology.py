"""Queues, exchanges and bindings in tables."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ..clock import to_ms
from ..database import Database
from ..errors import ConfigError
from ..model import Session
from ..settings import check_name
from ..statements import Statements
from ..topology import Binding, Exchange, Queue
from .work import chunks, repeat

#: Exchanges whose bindings are remembered.
_MOST = 1000
#: How long in seconds bindings that were read are recent, and how long when changes are told.
RECENT, RECENT_WHEN_TOLD = 1.0, 300.0


class SqlTopology:
    """What all processes that use the database agree on.

    Args:
        database: where.
        sql: the statements for its tables.
        changed: called when bindings have been stored or removed here, after the commit.
        told: whether this process learns of what others change.
    """

    def __init__(
        self, database: Database, sql: Statements, changed: Callable[[], None], told: Callable[[], bool]
    ) -> None:
        self._database = database
        self._sql = sql
        self._tables = sql.tables
        self._changed = changed
        self._told = told
        self._recent: dict[str, tuple[float, list[Binding]]] = {}
        #: Counts changes: what was read before one is not recent after it.
        self._version = 0

    def declare_exchange(self, exchange: Exchange) -> Exchange:
        """Store it unless one of that name exists; returns the stored one."""
        check_name(exchange.name, "exchange")
        known = self.exchange(exchange.name)
        if known is not None:
            return known
        row = {
            "name": exchange.name,
            "type": exchange.type,
            "durable": int(exchange.durable),
            "auto_delete": int(exchange.auto_delete),
        }
        self._insert(self._tables.exchanges, row)
        return self.exchange(exchange.name) or exchange

    def exchange(self, name: str) -> Exchange | None:
        """The exchange of that name."""
        e = self._tables.exchanges
        rows = self._rows(sa.select(e).where(e.c.name == name))
        return _exchange(rows[0]) if rows else None

    def exchanges(self) -> list[Exchange]:
        """All exchanges, by name."""
        e = self._tables.exchanges
        return [_exchange(row) for row in self._rows(sa.select(e).order_by(e.c.name))]

    def delete_exchange(self, name: str) -> None:
        """Remove it and its bindings."""
        e, b = self._tables.exchanges, self._tables.bindings
        self._write(sa.delete(b).where(b.c.exchange == name), sa.delete(e).where(e.c.name == name))
        self._bindings_changed()

    def declare_queue(self, queue: Queue) -> Queue:
        """Store it unless one of that name exists; returns the stored one."""
        check_name(queue.name, "queue")
        known = self.queue(queue.name)
        if known is not None:
            if known.expires is not None:
                self.touch([queue.name])
            return known
        row = self._sql.time(
            name=queue.name,
            durable=int(queue.durable),
            auto_delete=int(queue.auto_delete),
            exclusive=int(queue.exclusive),
            expires_ms=None if queue.expires is None else to_ms(queue.expires),
            message_ttl_ms=None if queue.message_ttl is None else to_ms(queue.message_ttl),
        )
        self._insert(self._tables.queues, row, touched_at=self._sql.now)
        return self.queue(queue.name) or queue

    def queue(self, name: str) -> Queue | None:
        """The queue of that name."""
        q = self._tables.queues
        rows = self._rows(sa.select(q).where(q.c.name == name))
        return _queue(rows[0]) if rows else None

    def queues(self) -> list[Queue]:
        """All queues, by name."""
        q = self._tables.queues
        return [_queue(row) for row in self._rows(sa.select(q).order_by(q.c.name))]

    def delete_queue(self, name: str) -> None:
        """Remove it and its bindings."""
        q, b = self._tables.queues, self._tables.bindings
        self._write(sa.delete(b).where(b.c.queue == name), sa.delete(q).where(q.c.name == name))
        self._bindings_changed()

    def bind(self, binding: Binding) -> None:
        """Store it unless it exists."""
        check_name(binding.exchange, "exchange")
        check_name(binding.queue, "queue")
        if binding.routing_key:
            check_name(binding.routing_key, "routing key")
        row = {
            "digest": _digest(binding),
            "exchange": binding.exchange,
            "queue": binding.queue,
            "routing_key": binding.routing_key,
            "arguments": _arguments(binding.arguments),
        }
        b = self._tables.bindings
        if not self._rows(sa.select(b.c.digest).where(b.c.digest == row["digest"])):
            self._insert(b, row)
            self._bindings_changed()

    def unbind(self, binding: Binding) -> None:
        """Remove it if it exists."""
        b = self._tables.bindings
        self._write(sa.delete(b).where(b.c.digest == _digest(binding)))
        self._bindings_changed()

    def _bindings_changed(self) -> None:
        self.forget_bindings()
        self._changed()

    def forget_bindings(self) -> None:
        """What was read is not recent any more."""
        self._version += 1
        self._recent.clear()

    def recent_bindings(self, exchange: str) -> list[Binding]:
        """Bindings of one exchange as they were a moment ago: for what is sent often and may be lost."""
        now = time.monotonic()
        until, bindings = self._recent.get(exchange, (0.0, []))
        if now < until:
            return bindings
        version = self._version
        bindings = self.bindings(exchange)
        if len(self._recent) >= _MOST:
            self._recent.clear()
        if version == self._version:
            self._recent[exchange] = (now + (RECENT_WHEN_TOLD if self._told() else RECENT), bindings)
        return bindings

    def bindings(self, exchange: str | None = None) -> list[Binding]:
        """Bindings of one exchange, or all of them."""
        b = self._tables.bindings
        query = sa.select(b).order_by(b.c.exchange, b.c.queue, b.c.routing_key)
        if exchange is not None:
            query = query.where(b.c.exchange == exchange)
        return [
            Binding(row.exchange, row.queue, row.routing_key, json.loads(row.arguments)) for row in self._rows(query)
        ]

    def touch(self, names: Sequence[str]) -> None:
        """Say that queues are in use now."""
        self._database.transaction(lambda conn: self._touch(conn, names), confirm=repeat)

    def _touch(self, conn: sa.Connection, names: Sequence[str]) -> None:
        for part in chunks(sorted(names)):
            conn.execute(self._sql.touch_queues, self._sql.time(p_names=part))

    def set_consumers(self, session: Session, numbers: Mapping[str, int]) -> None:
        """Say how many consumers a holder has on queues now."""

        def work(conn: sa.Connection) -> None:
            for queue, number in sorted(numbers.items()):
                names = {"p_queue": queue, "p_session": session.id}
                conn.execute(self._sql.drop_consumers, names)
                if number:
                    conn.execute(self._sql.add_consumers, {**names, "p_number": number})
            self._touch(conn, [queue for queue, number in numbers.items() if not number])

        if numbers:
            self._database.transaction(work, confirm=repeat)

    def consumers(self, queue: str, but: Collection[int] = ()) -> int:
        """How many consumers of living holders a queue has, but for these sessions' ids."""
        parameters = self._sql.time(p_queue=queue, p_but=sorted(but))
        return int(self._database.read(lambda conn: conn.execute(self._sql.count_consumers, parameters).scalar_one()))

    def unused(self) -> list[str]:
        """Names of queues whose time without use has passed."""
        parameters = self._sql.time()
        return list(self._database.read(lambda conn: conn.execute(self._sql.unused_queues, parameters).scalars().all()))

    # -- helpers -----------------------------------------------------------------------------------

    def _rows(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        return self._database.read(lambda conn: conn.execute(query).all())

    def _write(self, *statements: sa.Executable) -> None:
        def work(conn: sa.Connection) -> None:
            for statement in statements:
                conn.execute(statement)

        self._database.transaction(work)

    def _insert(self, table: sa.Table, row: Mapping[str, Any], **computed: sa.ColumnElement[Any]) -> None:
        statement = self._database.dialect.insert_or_ignore(table).values(**computed)

        def work(conn: sa.Connection) -> None:
            conn.execute(statement, dict(row))

        # Storing it twice does no harm, so a commit whose outcome is unknown is simply repeated.
        self._database.transaction(work, confirm=repeat)


def _exchange(row: sa.Row[Any]) -> Exchange:
    return Exchange(row.name, row.type, bool(row.durable), bool(row.auto_delete))


def _queue(row: sa.Row[Any]) -> Queue:
    return Queue(
        row.name,
        bool(row.durable),
        bool(row.auto_delete),
        bool(row.exclusive),
        None if row.expires_ms is None else row.expires_ms / 1000,
        None if row.message_ttl_ms is None else row.message_ttl_ms / 1000,
    )


def _arguments(arguments: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(arguments), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"binding arguments must be plain JSON values: {error}") from None


def _digest(binding: Binding) -> str:
    parts = [binding.exchange, binding.queue, binding.routing_key, _arguments(binding.arguments)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
