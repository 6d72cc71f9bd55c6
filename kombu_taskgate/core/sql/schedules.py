"""The schedules of all processes, in tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from .. import schedule_rules as rules
from ..clock import to_ms
from ..database import Database
from ..model import NewTask
from ..schedule_statements import ScheduleStatements
from ..schedules import Entry, Progress, Tick, TickState
from ..term_statements import TermStatements
from ..terms import Term
from . import publish
from .work import Together, Work, chunks, repeat

#: Seconds of silence after which the server ends a transaction that locks the row of a term or of an entry: whoever is
#: frozen inside would keep all others from leading, or the leader from going on.
SILENCE = 2.0
#: Longest wait in seconds for a lock at a stretch, in such a transaction: whoever waits under a term keeps it from
#: being renewed.
WAIT = 1.0


class SqlSchedules:
    """See :class:`~kombu_taskgate.core.schedules.Schedules`.

    Rows are locked in one order everywhere: the term's, the entry's, the tick's, those of executions.

    Args:
        database: where.
        sql: the statements for its tables.
        terms: those for the tables of terms.
        together: runs a transaction of the broker's.
        max_payload: largest payload in bytes.
        returning: whether an INSERT can return the id of its row.
    """

    def __init__(
        self,
        database: Database,
        sql: ScheduleStatements,
        terms: TermStatements,
        together: Together,
        max_payload: int,
        returning: bool,
    ) -> None:
        self._database = database
        self._sql = sql
        self._terms = terms
        self._together = together
        self._max_payload = max_payload
        self._returning = returning

    def _fence(self, conn: sa.Connection, term: Term) -> None:
        """Make sure that the term is valid, and stays so until the transaction ends."""
        self._keep_short(conn)
        parameters = self._terms.time(p_key=term.key, p_holder=term.holder, p_number=term.number)
        if conn.execute(self._terms.term_is_current, parameters).first() is None:
            raise rules.not_leader(term)

    def _keep_short(self, conn: sa.Connection) -> None:
        self._database.dialect.keep_short(conn, SILENCE, WAIT)

    def _now(self, conn: sa.Connection) -> int:
        return int(conn.execute(self._sql.current_time, self._sql.time()).scalar_one())

    def _locked(self, conn: sa.Connection, key: str, name: str) -> Entry | None:
        row = conn.execute(self._sql.lock_entry, _place(key, name)).first()
        return None if row is None else _entry(row)

    # -- entries -------------------------------------------------------------------------------------

    def entries(self, key: str) -> list[Entry]:
        """See the protocol."""
        rules.check_key(key)
        rows = self._database.read(lambda conn: conn.execute(self._sql.see_entries, {"p_key": key}).all())
        # By code points: each database has an order of its own.
        return sorted((_entry(row) for row in rows), key=lambda entry: entry.name)

    def add(self, key: str, entry: Entry, *, replace: bool = False) -> bool:
        """See the protocol."""
        rules.check_key(key)
        rules.check_added(entry)

        def work(conn: sa.Connection) -> Entry | None:
            self._keep_short(conn)
            there, now = self._locked(conn, key, entry.name), self._now(conn)
            if there is None:
                new = rules.added(entry, now)
                conn.execute(self._sql.insert_entry, _row(key, new))
                return new
            after = rules.replaced(there, entry, now)
            if not replace:
                return None
            conn.execute(self._sql.define_entry, _definition(key, after))
            return after

        def confirm(conn: sa.Connection, done: Entry | None) -> bool:
            # Another's of the same instant would have to say the same as well.
            row = conn.execute(self._sql.see_entry, _place(key, entry.name)).first()
            return done is None or (row is not None and rules.same_definition(_entry(row), done))

        return self._database.transaction(work, confirm=confirm) is not None

    def change(self, key: str, name: str, **changes: object) -> bool:
        """See the protocol."""
        rules.check_key(key)
        rules.check_changes(name, changes)

        def work(conn: sa.Connection) -> bool:
            self._keep_short(conn)
            there = self._locked(conn, key, name)
            if there is None:
                return False
            after = rules.changed(there, changes, self._now(conn))
            if after is not there:
                conn.execute(self._sql.define_entry, _definition(key, after))
            return True

        # Done twice it changes nothing more.
        return self._database.transaction(work, confirm=repeat)

    def remove(self, key: str, name: str) -> bool:
        """See the protocol."""
        rules.check_key(key)

        def work(conn: sa.Connection) -> bool:
            self._keep_short(conn)
            there = self._locked(conn, key, name)
            if there is None:
                return False
            rules.refuse_to_remove(there)
            conn.execute(self._sql.delete_entry, _place(key, name))
            return True

        def confirm(conn: sa.Connection, removed: bool) -> bool:
            return not removed or conn.execute(self._sql.see_entry, _place(key, name)).first() is None

        return self._database.transaction(work, confirm=confirm)

    def request(self, key: str, name: str) -> bool:
        """See the protocol."""
        rules.check_key(key)
        parameters = self._sql.time(**_place(key, name))
        return self._database.write(lambda conn: conn.execute(self._sql.request_entry, parameters).rowcount > 0)

    def sync(self, term: Term, entries: Sequence[Entry]) -> None:
        """See the protocol."""

        def work(conn: sa.Connection) -> None:
            self._fence(conn, term)
            rows = conn.execute(self._sql.lock_entries, {"p_key": term.key}).all()
            found = rules.synced([_entry(row) for row in rows], entries, self._now(conn))
            for part in chunks(found.new):
                conn.execute(self._sql.insert_entry, [_row(term.key, entry) for entry in part])
            for entry in found.changed:
                conn.execute(self._sql.define_entry, _definition(term.key, entry))
            for names in chunks(found.gone):
                conn.execute(self._sql.delete_entries, {"p_key": term.key, "p_names": names})

        self._database.transaction(work, confirm=repeat)

    # -- ticks ---------------------------------------------------------------------------------------

    def tick(self, term: Term, tick: Tick, progress: Progress, tasks: Sequence[NewTask] = ()) -> bool:
        """See the protocol."""
        rules.check_tick(tick)
        for task in tasks:
            publish.check(task, self._max_payload)
        place = {**_place(term.key, tick.name), "p_due_at": tick.due_at}

        def part(work: Work) -> bool:
            self._fence(work.conn, term)
            entry = self._locked(work.conn, term.key, tick.name)
            known = work.run(self._sql.see_tick, **place).first() is not None
            now = self._now(work.conn)
            advance = rules.advanced(entry, tick, progress, known=known, now=now)
            if advance.entry is not None:
                if advance.made:
                    work.run(self._sql.insert_entry, **_row(term.key, advance.entry))
                else:
                    work.run(self._sql.advance_entry, **_advance(term.key, advance.entry))
            if advance.stored:
                work.run(
                    self._sql.insert_tick,
                    **place,
                    p_state=tick.state.value,
                    p_task_id=tick.task_id,
                    p_sent_at=now,
                    p_term=term.number,
                )
                if tasks:
                    publish.enqueue(work, tasks, returning=self._returning)
            return advance.stored

        def confirm(conn: sa.Connection, stored: bool) -> bool:
            # What stored nothing does no harm when it is done again; nor does what was not committed.
            row = conn.execute(self._sql.see_tick, place).first() if stored else None
            return row is not None and (row.term, row.task_id) == (term.number, tick.task_id)

        return self._together(part, confirm)

    def rebase(self, term: Term, name: str, seen_base: int | None, base_at: int | None) -> bool:
        """See the protocol."""

        def work(conn: sa.Connection) -> bool:
            self._fence(conn, term)
            parameters = {**_place(term.key, name), "p_seen_base": seen_base, "p_base_at": base_at}
            return conn.execute(self._sql.rebase_entry, parameters).rowcount > 0

        def confirm(conn: sa.Connection, done: bool) -> bool:
            row = conn.execute(self._sql.see_entry, _place(term.key, name)).first() if done else None
            return row is not None and row.base_at == base_at

        return self._database.transaction(work, confirm=confirm)

    def sent(self, key: str, name: str, due_at: int, state: TickState = TickState.SENT) -> None:
        """See the protocol."""
        rules.check_key(key)
        parameters = self._sql.time(**_place(key, name), p_due_at=due_at, p_state=state.value)
        self._database.write(lambda conn: conn.execute(self._sql.tick_sent, parameters))

    def unsent(self, key: str) -> list[Tick]:
        """See the protocol."""
        rules.check_key(key)
        rows = self._database.read(lambda conn: conn.execute(self._sql.unsent_ticks, {"p_key": key}).all())
        return sorted((_tick(row) for row in rows), key=lambda tick: (tick.due_at, tick.name))

    def ticks(self, key: str, names: Collection[str] = (), limit: int = 100) -> list[Tick]:
        """See the protocol."""
        rules.check_key(key)
        if limit < 1:
            return []
        asked = {"p_key": key, "p_limit": limit}

        def look(conn: sa.Connection) -> list[Any]:
            if not names:
                return [*conn.execute(self._sql.newest_ticks, asked)]
            parts = chunks(sorted(set(names)))
            return [
                row for part in parts for row in conn.execute(self._sql.newest_ticks_of, {**asked, "p_names": part})
            ]

        return rules.newest([_tick(row) for row in self._database.read(look)], limit)

    def sweep(self, keep: float, limit: int = 1000) -> int:
        """See the protocol."""
        return self._database.transaction(lambda conn: self._sweep(conn, keep, limit), confirm=repeat)

    def _sweep(self, conn: sa.Connection, keep: float, limit: int) -> int:
        parameters = self._sql.time(p_keep=to_ms(keep), p_limit=max(0, limit))
        old = conn.execute(self._sql.pick_old_ticks, parameters).all()
        for part in chunks(old):
            keys = sorted({row.key_ for row in part})
            conn.execute(self._sql.delete_ticks, {"p_keys": keys, "p_ticks": [tuple(row) for row in part]})
        return len(old)


def _entry(row: Any) -> Entry:
    return rules.entry_of(dict(row._mapping))


def _tick(row: Any) -> Tick:
    return rules.tick_of(dict(row._mapping))


def _place(key: str, name: str) -> dict[str, Any]:
    return {"p_key": key, "p_name": name}


def _definition(key: str, entry: Entry) -> dict[str, Any]:
    return {
        **_place(key, entry.name),
        "p_source": entry.source.value,
        "p_task": entry.task,
        "p_schedule": entry.schedule,
        "p_timezone": entry.timezone,
        "p_args": entry.args or None,
        "p_kwargs": entry.kwargs or None,
        "p_options": entry.options or None,
        "p_enabled": int(entry.enabled),
        "p_no_overlap": int(entry.no_overlap),
        "p_one_off": int(entry.one_off),
        "p_starting_deadline": entry.starting_deadline,
        "p_base_at": entry.base_at,
        "p_changed_at": entry.changed_at,
    }


def _advance(key: str, entry: Entry) -> dict[str, Any]:
    return {
        **_place(key, entry.name),
        "p_enabled": int(entry.enabled),
        "p_base_at": entry.base_at,
        "p_last_run_at": entry.last_run_at,
        "p_last_due_at": entry.last_due_at,
        "p_total_run_count": entry.total_run_count,
        "p_requested_at": entry.requested_at,
    }


def _row(key: str, entry: Entry) -> dict[str, Any]:
    return {**_definition(key, entry), **_advance(key, entry), "p_created_at": entry.created_at}
