"""Queues, exchanges and bindings in tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ..clock import to_ms
from ..database import Database
from ..errors import ConfigError
from ..settings import check_name
from ..statements import Statements
from ..topology import Binding, Exchange, Queue
from .work import chunks, repeat


class SqlTopology:
    """What all processes that use the database agree on."""

    def __init__(self, database: Database, sql: Statements) -> None:
        self._database = database
        self._sql = sql
        self._tables = sql.tables

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

    def unbind(self, binding: Binding) -> None:
        """Remove it if it exists."""
        b = self._tables.bindings
        self._write(sa.delete(b).where(b.c.digest == _digest(binding)))

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
        q = self._tables.queues
        statement = sa.update(q).where(q.c.name.in_(sa.bindparam("p_names", expanding=True)))
        statement = statement.values(touched_at=self._sql.now)

        def work(conn: sa.Connection) -> None:
            for part in chunks(sorted(names)):
                conn.execute(statement, self._sql.time(p_names=part))

        self._database.transaction(work)

    def unused(self) -> list[str]:
        """Names of queues whose time without use has passed."""
        q = self._tables.queues
        query = sa.select(q.c.name).where(q.c.expires_ms.is_not(None), q.c.touched_at + q.c.expires_ms < self._sql.now)
        return [row.name for row in self._rows(query.order_by(q.c.name), timed=True)]

    # -- helpers -----------------------------------------------------------------------------------

    def _rows(self, query: sa.Select[Any], *, timed: bool = False) -> Sequence[sa.Row[Any]]:
        parameters = self._sql.time() if timed else {}
        return self._database.read(lambda conn: conn.execute(query, parameters).all())

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
