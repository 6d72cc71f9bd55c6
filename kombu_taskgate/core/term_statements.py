"""Every SQL statement about terms and candidates: one named attribute each, with a sentence. See statements.py."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import sqlalchemy as sa

from .clock import to_ms
from .parameters import number, text
from .statements import Statement, Statements
from .terms import REMEMBERED, TOO_LONG


class TermStatements:
    """All of them for one set of tables.

    Args:
        sql: the broker's statements for the same tables.
    """

    def __init__(self, sql: Statements) -> None:
        self._sql = sql
        self.tables = sql.tables
        self.dialect = sql.dialect
        self._t = self.tables.terms.c
        self._c = self.tables.candidates.c

    def time(self, **parameters: Any) -> dict[str, Any]:
        """See :meth:`.statements.Statements.time`."""
        return self._sql.time(**parameters)

    # -- terms ---------------------------------------------------------------------------------------

    @property
    def _its(self) -> sa.ColumnElement[bool]:
        return self._t.key_ == text("p_key")

    @property
    def _valid(self) -> sa.ColumnElement[bool]:
        """Not over, and not given before the clock was set back."""
        t = self._t
        return (t.until_ > self._sql.now) & (t.until_ <= self._sql.now + TOO_LONG * t.ttl_ms)

    @property
    def _goes_on(self) -> sa.ColumnElement[bool]:
        """Valid, and the caller's."""
        return (self._t.holder == text("p_holder")) & self._valid

    @property
    def _next_number(self) -> sa.ColumnElement[int]:
        """The highest of the last number, what the caller has seen, and the time; and one more."""
        last, above, now = self._t.number, number("p_above"), self._sql.now
        return sa.case(((last >= above) & (last >= now), last), (above >= now, above), else_=now) + 1

    @cached_property
    def current_term(self) -> Statement:
        """The newest term of a key, and the time. Locks nothing."""
        return sa.select(self.tables.terms, self._sql.now.label("seen_at")).where(self._its)

    @cached_property
    def term_is_free(self) -> Statement:
        """The newest term of a key, unless somebody is just writing under it, where that can be told."""
        return sa.select(self._t.number).where(self._its).with_for_update(skip_locked=True)

    @cached_property
    def acquire_term(self) -> sa.Update:
        """Renew the caller's term, or begin a new one in place of one that is over; nothing if it is another's."""
        t, now = self._t, self._sql.now
        # In this order: some databases assign from left to right, and then show the new values.
        return (
            sa.update(self.tables.terms)
            .where(self._its, (t.holder == text("p_holder")) | ~self._valid)
            .ordered_values(
                (t.number, sa.case((self._goes_on, t.number), else_=self._next_number)),
                (t.acquired_at, sa.case((self._goes_on, t.acquired_at), else_=now)),
                (t.holder, text("p_holder")),
                (t.renewed_at, now),
                (t.until_, now + number("p_ttl")),
                (t.ttl_ms, number("p_ttl")),
            )
        )

    @cached_property
    def insert_term(self) -> sa.Insert:
        """Begin the first term of a key, unless somebody else has."""
        now, above, t = self._sql.now, number("p_above"), self.tables.terms
        values = {
            t.c.key_: text("p_key"),
            t.c.holder: text("p_holder"),
            t.c.number: sa.case((above >= now, above), else_=now) + 1,
            t.c.acquired_at: now,
            t.c.renewed_at: now,
            t.c.until_: now + number("p_ttl"),
            t.c.ttl_ms: number("p_ttl"),
        }
        return self.dialect.insert_or_ignore(t).values({column.name: value for column, value in values.items()})

    @cached_property
    def release_term(self) -> sa.Update:
        """End the caller's term now, if it is valid."""
        return sa.update(self.tables.terms).where(self._its, self._goes_on).values({self._t.until_: self._sql.now})

    @cached_property
    def term_is_current(self) -> Statement:
        """The fence: a term's number, if it is still its holder's and valid, which it stays until the transaction ends.

        For the transaction of whoever writes under the term: nobody else can begin a term before that has ended.
        """
        t = self._t
        return sa.select(t.number).where(self._its, self._goes_on, t.number == number("p_number")).with_for_update()

    # -- candidates ----------------------------------------------------------------------------------

    @property
    def _remembered_from(self) -> sa.ColumnElement[int]:
        return self._sql.now - to_ms(REMEMBERED)

    @property
    def _this(self) -> sa.ColumnElement[bool]:
        return (self._c.key_ == text("p_key")) & (self._c.holder == text("p_holder"))

    @cached_property
    def see_candidate(self) -> sa.Update:
        """A candidate is alive; one that was forgotten begins anew."""
        c, now = self._c, self._sql.now
        # In this order, see acquire_term.
        return (
            sa.update(self.tables.candidates)
            .where(self._this)
            .ordered_values(
                (c.since, sa.case((c.seen_at < self._remembered_from, now), else_=c.since)),
                (c.seen_at, now),
            )
        )

    @cached_property
    def insert_candidate(self) -> sa.Insert:
        """Note a new candidate, unless it is there."""
        now = self._sql.now
        values = {"key_": text("p_key"), "holder": text("p_holder"), "since": now, "seen_at": now}
        return self.dialect.insert_or_ignore(self.tables.candidates).values(values)

    @cached_property
    def forget_candidates(self) -> sa.Delete:
        """Delete the candidates of all keys that have not been seen for too long."""
        return sa.delete(self.tables.candidates).where(self._c.seen_at < self._remembered_from)

    @cached_property
    def withdraw_candidate(self) -> sa.Delete:
        """Delete one candidate."""
        return sa.delete(self.tables.candidates).where(self._this)

    @cached_property
    def list_candidates(self) -> Statement:
        """The candidates of a key, the most recent first, and the time."""
        c = self._c
        return (
            sa.select(self.tables.candidates, self._sql.now.label("now"))
            .where(c.key_ == text("p_key"), c.seen_at >= self._remembered_from)
            .order_by(c.seen_at.desc(), c.holder)
        )
