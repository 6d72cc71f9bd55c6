"""Every SQL statement about executions that wait for results: one named attribute each, with a sentence."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import sqlalchemy as sa

from .model import FINAL, State
from .parameters import among, text
from .results import Finality

if TYPE_CHECKING:
    from .statements import Statement, Statements

_ENDED = [state.value for state in sorted(FINAL)]
_GOING_ON = [State.PENDING.value, State.RUNNING.value, State.RETRYING.value]


class WaitStatements:
    """All of them for one set of tables.

    Args:
        sql: the broker's statements for the same tables.
    """

    def __init__(self, sql: Statements) -> None:
        self._sql = sql
        self._tables = sql.tables
        self._t = sql.tables.tasks.c
        self._r = sql.tables.results.c
        self._w = sql.tables.waits.c

    # -- a child is stored ---------------------------------------------------------------------------

    @cached_property
    def expect(self) -> sa.Insert:
        """Have whoever stores the result of p_task_id look at the waits; locks it, also where it is there already.

        What is stored where there is none is no result: its status is empty.
        """
        r, dialect = self._r, self._sql.dialect
        insert = dialect.insert(self._tables.results).values(
            task_id=text("p_task_id"),
            status="",
            finality=int(Finality.OPEN),
            version=0,
            awaited=1,
            stored_at=self._sql.now,
            expires_at=self._sql.now + sa.bindparam("p_expires_in", type_=sa.BigInteger),
            payload=b"",
        )
        expires = dialect.inserted(insert, r.expires_at)
        still_open = r.finality == int(Finality.OPEN)
        # A sweep that has seen it expired must not delete it now. Comparisons with NULL are not true.
        later = sa.case((still_open & (r.expires_at < expires), expires), else_=r.expires_at)
        awaited = sa.case((still_open, 1), else_=r.awaited)
        return dialect.upsert(insert, keys=[r.task_id], values={"expires_at": later, "awaited": awaited})

    @cached_property
    def see_results(self) -> Statement:
        """What is stored under task_ids, results or not."""
        r = self._r
        return sa.select(r.task_id, r.status, r.finality).where(among(r.task_id, "p_task_ids"))

    @cached_property
    def executions_of(self) -> Statement:
        """Executions of tasks, by task_id."""
        t = self._t
        return (
            sa.select(t.id, t.task_id, t.root_id, t.state)
            .where(among(t.task_id, "p_task_ids"), t.type != "")
            .order_by(t.id)
        )

    @cached_property
    def insert_wait(self) -> sa.Insert:
        """Note that a child waits for a result."""
        return sa.insert(self._tables.waits)

    # -- a parent's result is stored -----------------------------------------------------------------

    @cached_property
    def lock_result(self) -> Statement:
        """What is stored under p_task_id, locked."""
        r = self._r
        return sa.select(r.status, r.finality).where(r.task_id == text("p_task_id")).with_for_update()

    @cached_property
    def is_awaited(self) -> Statement:
        """Whether an execution may wait for the result of p_task_id."""
        r = self._r
        return sa.select(r.task_id).where(r.task_id == text("p_task_id"), r.awaited == 1)

    @cached_property
    def blocked_by(self) -> Statement:
        """Blocked executions that wait for results, locked in id order; a row per wait."""
        t, w = self._t, self._w
        query = (
            sa.select(t.id, t.queue, t.fail_fast, t.pending_parents, t.type, w.parent_task_id)
            .select_from(self._tables.waits.join(self._tables.tasks, t.id == w.child_id))
            .where(among(w.parent_task_id, "p_task_ids"), t.state == State.BLOCKED.value)
            .order_by(t.id)
        )
        return query.with_for_update(of=self._tables.tasks)

    @cached_property
    def delete_waits_for(self) -> Statement:
        """Nobody waits for these results any more."""
        return sa.delete(self._tables.waits).where(among(self._w.parent_task_id, "p_task_ids"))

    @cached_property
    def delete_waits_of(self) -> Statement:
        """These executions (p_ids) wait for no result any more."""
        return sa.delete(self._tables.waits).where(among(self._w.child_id, "p_ids"))

    # -- a parent ends without a result --------------------------------------------------------------

    @cached_property
    def waited_for(self) -> Statement:
        """Those of the executions p_ids for whose task's result somebody waits."""
        t, w = self._t, self._w
        return sa.select(t.id).where(among(t.id, "p_ids"), sa.exists().where(w.parent_task_id == t.task_id))

    @cached_property
    def unserved(self) -> Statement:
        """Tasks that somebody waits for and of which no execution goes on."""
        t, w = self._t, self._w
        goes_on = sa.exists().where(t.task_id == w.parent_task_id, t.state.not_in(_ENDED), t.type != "")
        return sa.select(w.parent_task_id, w.root_id).distinct().where(~goes_on).limit(sa.bindparam("p_limit"))

    @property
    def waits_for_results(self) -> sa.ColumnElement[bool]:
        """True of an execution that waits for a result."""
        return sa.exists().where(self._w.child_id == self._t.id)

    @cached_property
    def roots_going_on(self) -> Statement:
        """Those of the workflows of which something can still run."""
        t = self._t
        return sa.select(t.root_id).distinct().where(among(t.root_id, "p_root_ids"), t.state.in_(_GOING_ON))

    # -- asking --------------------------------------------------------------------------------------

    @cached_property
    def unfinished_parents(self) -> Statement:
        """Task_ids of the parents that the execution p_id waits for."""
        t, w, d = self._t, self._w, self._tables.deps.c
        by_result = sa.select(w.parent_task_id).where(w.child_id == sa.bindparam("p_id", type_=sa.BigInteger))
        by_id = (
            sa.select(t.task_id)
            .select_from(self._tables.deps.join(self._tables.tasks, t.id == d.parent_id))
            .where(d.child_id == sa.bindparam("p_id", type_=sa.BigInteger), t.state.not_in(_ENDED))
            .where(t.task_id.is_not(None))
        )
        return sa.union(by_result, by_id)
