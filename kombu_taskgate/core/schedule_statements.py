"""Every SQL statement about schedules and ticks: one named attribute each, with a sentence. See statements.py."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import sqlalchemy as sa

from .parameters import among, number, text
from .statements import Statement, Statements

#: Literal, not bound: a partial index is only used when the planner sees the value.
_SENDING: sa.ColumnElement[str] = sa.literal_column("'sending'", sa.String)


def _flag(name: str) -> sa.BindParameter[int]:
    return sa.bindparam(name, type_=sa.SmallInteger)


class ScheduleStatements:
    """All of them for one set of tables.

    Args:
        sql: the broker's statements for the same tables.
    """

    def __init__(self, sql: Statements) -> None:
        self._sql = sql
        self.tables = sql.tables
        self._e = self.tables.entries.c
        self._t = self.tables.ticks.c

    def time(self, **parameters: Any) -> dict[str, Any]:
        """See :meth:`.statements.Statements.time`."""
        return self._sql.time(**parameters)

    @property
    def current_time(self) -> Statement:
        """The time that decides."""
        return self._sql.current_time

    # -- entries -------------------------------------------------------------------------------------

    @property
    def _this_entry(self) -> sa.ColumnElement[bool]:
        return (self._e.key_ == text("p_key")) & (self._e.name == text("p_name"))

    @cached_property
    def see_entries(self) -> Statement:
        """All entries of a schedule."""
        return sa.select(self.tables.entries).where(self._e.key_ == text("p_key"))

    @cached_property
    def see_entry(self) -> Statement:
        """One entry."""
        return sa.select(self.tables.entries).where(self._this_entry)

    @cached_property
    def lock_entries(self) -> Statement:
        """All entries of a schedule, locked."""
        query = sa.select(self.tables.entries).where(self._e.key_ == text("p_key"))
        return query.order_by(self._e.name).with_for_update()

    @cached_property
    def lock_entry(self) -> Statement:
        """One entry, locked."""
        return sa.select(self.tables.entries).where(self._this_entry).with_for_update()

    @property
    def _definition(self) -> dict[str, Any]:
        return {
            "source": text("p_source"),
            "task": text("p_task"),
            "schedule": text("p_schedule"),
            "timezone": text("p_timezone"),
            "args": text("p_args"),
            "kwargs": text("p_kwargs"),
            "options": text("p_options"),
            "enabled": _flag("p_enabled"),
            "no_overlap": _flag("p_no_overlap"),
            "one_off": _flag("p_one_off"),
            "starting_deadline": sa.bindparam("p_starting_deadline", type_=sa.Float(53)),
            "base_at": number("p_base_at"),
            "changed_at": number("p_changed_at"),
        }

    @cached_property
    def insert_entry(self) -> sa.Insert:
        """Store a new entry."""
        return sa.insert(self.tables.entries).values(
            key_=text("p_key"),
            name=text("p_name"),
            **self._definition,
            last_run_at=number("p_last_run_at"),
            last_due_at=number("p_last_due_at"),
            total_run_count=number("p_total_run_count"),
            requested_at=number("p_requested_at"),
            created_at=number("p_created_at"),
        )

    @cached_property
    def define_entry(self) -> Statement:
        """Change the definition of a locked entry."""
        return sa.update(self.tables.entries).where(self._this_entry).values(self._definition)

    @cached_property
    def advance_entry(self) -> Statement:
        """Change how far a locked entry has come."""
        return (
            sa.update(self.tables.entries)
            .where(self._this_entry)
            .values(
                enabled=_flag("p_enabled"),
                base_at=number("p_base_at"),
                last_run_at=number("p_last_run_at"),
                last_due_at=number("p_last_due_at"),
                total_run_count=number("p_total_run_count"),
                requested_at=number("p_requested_at"),
            )
        )

    @cached_property
    def rebase_entry(self) -> Statement:
        """Change an entry's base if it is what was seen."""
        seen = self._e.base_at.is_not_distinct_from(number("p_seen_base"))
        return sa.update(self.tables.entries).where(self._this_entry, seen).values(base_at=number("p_base_at"))

    @cached_property
    def request_entry(self) -> Statement:
        """Note that an entry is wanted now; no two requests are of the same instant."""
        e, now = self._e, self._sql.now
        return (
            sa.update(self.tables.entries)
            .where(self._this_entry)
            .values(requested_at=sa.case((e.requested_at >= now, e.requested_at + 1), else_=now))
        )

    @cached_property
    def delete_entry(self) -> Statement:
        """Forget an entry."""
        return sa.delete(self.tables.entries).where(self._this_entry)

    @cached_property
    def delete_entries(self) -> Statement:
        """Forget several entries of a schedule."""
        return sa.delete(self.tables.entries).where(self._e.key_ == text("p_key"), among(self._e.name, "p_names"))

    # -- ticks ---------------------------------------------------------------------------------------

    @property
    def _this_tick(self) -> list[sa.ColumnElement[bool]]:
        t = self._t
        return [t.key_ == text("p_key"), t.name == text("p_name"), t.due_at == number("p_due_at")]

    @cached_property
    def see_tick(self) -> Statement:
        """One tick."""
        return sa.select(self.tables.ticks).where(*self._this_tick)

    @cached_property
    def insert_tick(self) -> sa.Insert:
        """Store a tick."""
        return sa.insert(self.tables.ticks).values(
            key_=text("p_key"),
            name=text("p_name"),
            due_at=number("p_due_at"),
            state=text("p_state"),
            task_id=text("p_task_id"),
            sent_at=number("p_sent_at"),
            term=number("p_term"),
        )

    @cached_property
    def tick_sent(self) -> Statement:
        """A tick that was being sent has been sent, or is not to be."""
        change = sa.update(self.tables.ticks).where(*self._this_tick, self._t.state == _SENDING)
        return change.values(state=text("p_state"), sent_at=self._sql.now)

    @cached_property
    def unsent_ticks(self) -> Statement:
        """Ticks of a schedule that are being sent."""
        t = self._t
        query = sa.select(self.tables.ticks).where(t.state == _SENDING, t.key_ == text("p_key"))
        return query.order_by(t.due_at, t.name)

    @cached_property
    def newest_ticks(self) -> Statement:
        """The newest ticks of a schedule."""
        t = self._t
        query = sa.select(self.tables.ticks).where(t.key_ == text("p_key"))
        return query.order_by(t.due_at.desc(), t.name).limit(number("p_limit"))

    @cached_property
    def newest_ticks_of(self) -> Statement:
        """The newest ticks of some entries."""
        t = self._t
        query = sa.select(self.tables.ticks).where(t.key_ == text("p_key"), among(t.name, "p_names"))
        return query.order_by(t.due_at.desc(), t.name).limit(number("p_limit"))

    @cached_property
    def pick_old_ticks(self) -> Statement:
        """Ticks that were sent long ago, the oldest first; those that are being sent are left alone."""
        t = self._t
        query = sa.select(t.key_, t.name, t.due_at)
        query = query.where(t.sent_at < self._sql.now - number("p_keep"), t.state != _SENDING)
        return query.order_by(t.sent_at).limit(number("p_limit")).with_for_update(skip_locked=True)

    @cached_property
    def delete_ticks(self) -> Statement:
        """Forget ticks."""
        t = self._t
        these = sa.tuple_(t.key_, t.name, t.due_at).in_(sa.bindparam("p_ticks", expanding=True))
        return sa.delete(self.tables.ticks).where(among(t.key_, "p_keys"), these)
