"""The terms of all processes, in a table."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from ..clock import to_ms
from ..database import Database
from ..settings import check_name
from ..term_statements import TermStatements
from ..terms import TOO_LONG, Candidate, Term, check


class SqlTerms:
    """See :class:`~kombu_taskgate.core.terms.LeaseStore`.

    Every statement is a transaction of its own, so that a process that is frozen between two holds no lock that others
    would wait for. Which of several callers has won is decided by one statement, and read by the next.
    All of it runs on the connection that is kept for renewals, so that it never waits for a busy pool.

    Args:
        database: where.
        sql: the statements for its tables.
    """

    def __init__(self, database: Database, sql: TermStatements) -> None:
        self._database = database
        self._sql = sql
        #: By key, whose term this process has seen to be valid last: only a guess at what is to be renewed.
        self._held: dict[str, str] = {}

    def try_acquire(self, key: str, holder: str, ttl: float, *, above: int = 0) -> Term | None:
        """See the protocol."""
        check(key, holder, ttl, above)
        parameters = {"p_key": key, "p_holder": holder, "p_ttl": to_ms(ttl), "p_above": above}
        # Done twice it is a renewal.
        term = self._database.renew(lambda conn: self._acquire(conn, key, holder, parameters))
        mine = term is not None and term.holder == holder and term.left > 0
        if mine:
            self._held[key] = holder
        else:
            self._held.pop(key, None)
        return term if mine else None

    def _acquire(self, conn: sa.Connection, key: str, holder: str, parameters: dict[str, Any]) -> Term | None:
        if self._held.get(key) != holder:
            # Where a statement locks rows before it looks at them, one that is going to lose might wait for the leader.
            row = self._row(conn, key)
            if row is not None and row.holder != holder:
                if _is_valid(row):
                    return None
                if conn.execute(self._sql.term_is_free, {"p_key": key}).first() is None:
                    return None
        conn.execute(self._sql.acquire_term, self._sql.time(**parameters))
        row = self._row(conn, key)
        if row is None:
            conn.execute(self._sql.insert_term, self._sql.time(**parameters))
            row = self._row(conn, key)
        return None if row is None else _to_term(row)

    def _row(self, conn: sa.Connection, key: str) -> Any:
        return conn.execute(self._sql.current_term, self._sql.time(p_key=key)).first()

    def release(self, key: str, holder: str) -> bool:
        """See the protocol."""
        check(key, holder)
        self._held.pop(key, None)
        parameters = self._sql.time(p_key=key, p_holder=holder)
        return bool(self._database.renew(lambda conn: conn.execute(self._sql.release_term, parameters).rowcount))

    def current(self, key: str) -> Term | None:
        """See the protocol."""
        check_name(key, "term")
        row = self._database.renew(lambda conn: self._row(conn, key))
        return None if row is None else _to_term(row)

    def register(self, key: str, holder: str) -> None:
        """See the protocol."""
        check(key, holder)
        parameters = self._sql.time(p_key=key, p_holder=holder)
        self._database.renew(lambda conn: self._register(conn, parameters))

    def _register(self, conn: sa.Connection, parameters: dict[str, Any]) -> None:
        if conn.execute(self._sql.see_candidate, parameters).rowcount == 0:
            conn.execute(self._sql.insert_candidate, parameters)
            conn.execute(self._sql.forget_candidates, self._sql.time())

    def withdraw(self, key: str, holder: str) -> None:
        """See the protocol."""
        check(key, holder)
        parameters = {"p_key": key, "p_holder": holder}
        self._database.renew(lambda conn: conn.execute(self._sql.withdraw_candidate, parameters))

    def candidates(self, key: str) -> list[Candidate]:
        """See the protocol."""
        check_name(key, "term")
        parameters = self._sql.time(p_key=key)
        rows = self._database.renew(lambda conn: conn.execute(self._sql.list_candidates, parameters).all())
        return [Candidate(row.key_, row.holder, row.since, row.seen_at, row.now) for row in rows]


def _is_valid(row: Any) -> bool:
    return _to_term(row).left > 0 and not row.until_ > row.seen_at + TOO_LONG * row.ttl_ms


def _to_term(row: Any) -> Term:
    return Term(row.key_, row.holder, row.number, row.acquired_at, row.renewed_at, row.until_, row.seen_at)
