"""The stored revocations of all processes, in a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from ..clock import to_ms
from ..database import Database
from ..revocations import Revocation, check
from ..statements import Statements
from .work import chunks, repeat

#: Most that one transaction stores: it must not keep other writers waiting for long.
PART = 4000


class SqlRevocations:
    """See :class:`~kombu_taskgate.core.revocations.Revocations`."""

    def __init__(self, database: Database, sql: Statements) -> None:
        self._database = database
        self._sql = sql

    def add(self, revoked: Sequence[Revocation], keep: float) -> None:
        """See the protocol."""
        check(revoked, keep)
        # In one order everywhere, so that two who store the same do not wait for each other in a circle.
        distinct = sorted(set(revoked), key=lambda one: (one.value, one.header))
        for start in range(0, len(distinct), PART):
            part = distinct[start : start + PART]
            # Done twice it only lasts longer.
            self._database.transaction(lambda conn, part=part: self._add(conn, part, to_ms(keep)), confirm=repeat)  # type: ignore[misc]  # mypy can't infer a lambda with a default

    def _add(self, conn: sa.Connection, part: Sequence[Revocation], keep: int) -> None:
        until = conn.execute(self._sql.current_time, self._sql.time()).scalar_one() + keep
        rows = [{"p_value": one.value, "p_header": one.header, "p_until": until} for one in part]
        conn.execute(self._sql.insert_revocation, rows)
        for keys in _by_header(part):
            conn.execute(self._sql.prolong_revocations, {**keys, "p_until": until})

    def any(self) -> bool:
        """See the protocol."""
        return self._database.read(lambda conn: conn.execute(self._sql.any_revocation).first() is not None)

    def find(self, asked: Sequence[Revocation]) -> set[Revocation]:
        """See the protocol."""
        wanted = set(asked)
        values = sorted({one.value for one in wanted})

        def look(conn: sa.Connection) -> set[Revocation]:
            found: set[Revocation] = set()
            for part in chunks(values):
                rows = conn.execute(self._sql.find_revocations, {"p_values": part})
                found.update(Revocation(row.value_, row.header) for row in rows)
            return found

        return self._database.read(look) & wanted if wanted else set()

    def count(self) -> int:
        """See the protocol."""
        return int(self._database.read(lambda conn: conn.execute(self._sql.count_revocations).scalar_one()))

    def sweep(self, limit: int = 1000) -> int:
        """See the protocol."""
        return self._database.transaction(lambda conn: self._sweep(conn, limit), confirm=repeat)

    def _sweep(self, conn: sa.Connection, limit: int) -> int:
        rows = conn.execute(self._sql.pick_old_revocations, self._sql.time(p_limit=limit)).all()
        for keys in _by_header([Revocation(row.value_, row.header) for row in rows]):
            conn.execute(self._sql.delete_revocations, keys)
        return len(rows)


def _by_header(revoked: Sequence[Revocation]) -> Iterator[dict[str, Any]]:
    """Parameters of the statements that are about revocations of one header."""
    values: dict[str, list[str]] = {}
    for one in revoked:
        values.setdefault(one.header, []).append(one.value)
    for header, all_of_it in values.items():
        for part in chunks(all_of_it):
            yield {"p_header": header, "p_values": part}
