"""Every SQL statement about results and chords: one named attribute each, with a sentence. See statements.py."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import sqlalchemy as sa

from .chords import ChordState
from .model import State
from .parameters import among, data, number, text
from .results import Finality
from .statements import Statement, Statements


class ResultStatements:
    """All of them for one set of tables.

    Args:
        sql: the broker's statements for the same tables.
    """

    def __init__(self, sql: Statements) -> None:
        self._sql = sql
        self.tables = sql.tables
        self.dialect = sql.dialect
        self._r = self.tables.results.c
        self._g = self.tables.groups.c
        self._c = self.tables.chords.c
        self._p = self.tables.chord_parts.c
        self.waits = sql.waits

    def time(self, **parameters: Any) -> dict[str, Any]:
        """See :meth:`.statements.Statements.time`."""
        return self._sql.time(**parameters)

    @property
    def _expires(self) -> sa.ColumnElement[int]:
        # NULL when there is no time after which it expires.
        return self._sql.now + number("p_expires_in")

    # -- results -------------------------------------------------------------------------------------

    @property
    def _lease_is_current(self) -> sa.ColumnElement[bool]:
        """False when the execution p_fence is somebody else's by now, or nobody's. 0: no execution has it."""
        t = self.tables.tasks.c
        waiting = t.state.in_([State.PENDING.value, State.RETRYING.value, State.BLOCKED.value])
        foreign: sa.Select[Any] = sa.select(sa.literal_column("1")).where(
            t.id == number("p_fence"), (t.token != number("p_token")) | waiting
        )
        return ~foreign.exists()

    @property
    def _may_replace(self) -> sa.ColumnElement[bool]:
        """Whether the stored result gives way; see :meth:`.results.Results.store`."""
        r, execution, token = self._r, number("p_execution"), number("p_token")
        newer = execution > r.execution
        as_new = newer | ((execution == r.execution) & (token >= r.token))
        under_none = execution == 0
        return ((r.finality == int(Finality.OPEN)) & (under_none | as_new)) | (
            (r.finality == int(Finality.ENDED)) & (under_none | newer)
        )

    @property
    def _may_be_replaced_unseen(self) -> sa.ColumnElement[bool]:
        """The same, and nobody waits for what follows."""
        return (self._r.awaited == 0) & self._may_replace

    @property
    def _new(self) -> dict[sa.Column[Any], Any]:
        r = self._r
        return {
            r.task_id: text("p_task_id"),
            r.status: text("p_status"),
            r.finality: sa.bindparam("p_finality", type_=sa.SmallInteger),
            r.type: text("p_type"),
            r.execution: number("p_execution"),
            r.token: number("p_token"),
            r.stored_at: self._sql.now,
            r.expires_at: self._expires,
            r.content_type: text("p_content_type"),
            r.content_encoding: text("p_content_encoding"),
            r.payload: data("p_payload"),
        }

    @cached_property
    def store_result(self) -> sa.Insert:
        """Store a result if its lease is current, and in place of another one only if that gives way to it.

        Not where executions may wait for it: see store_awaited_result.
        """
        return self._store_where(self._may_be_replaced_unseen)

    @cached_property
    def store_awaited_result(self) -> sa.Insert:
        """As store_result, also where executions may wait for it: who runs it looks after them, in its transaction."""
        return self._store_where(self._may_replace)

    def _store_where(self, may_replace: sa.ColumnElement[bool]) -> sa.Insert:
        new = self._new
        source = sa.select(*new.values()).where(self._lease_is_current)
        insert = self.dialect.insert(self.tables.results).from_select([column.name for column in new], source)
        r = self._r
        replaced = [r.status, r.finality, r.type, r.stored_at, r.expires_at]
        replaced += [r.content_type, r.content_encoding, r.payload]
        # What is said under no lease does not make an older lease the current one again.
        lease = {
            column.name: sa.case((number("p_execution") == 0, column), else_=self.dialect.inserted(insert, column))
            for column in (r.execution, r.token)
        }
        return self.dialect.upsert(
            insert,
            keys=[r.task_id],
            values={
                **{column.name: self.dialect.inserted(insert, column) for column in replaced},
                **lease,
                "version": r.version + 1,
                "awaited": sa.case(
                    (self.dialect.inserted(insert, r.finality) == int(Finality.OPEN), r.awaited), else_=0
                ),
            },
            where=may_replace,
            outcome=r.outcome,
        )

    @cached_property
    def store_result_and_tell(self) -> Statement:
        """As store_result; tells p_channel p_text when it has stored something."""
        return self.store_result.returning(self.dialect.telling(text("p_channel"), text("p_text")))

    @cached_property
    def tell_of_result(self) -> Statement:
        """Tell p_channel p_text."""
        return self.dialect.notification(text("p_channel"), text("p_text"))

    def _shown(self) -> list[sa.Column[Any]]:
        r = self._r
        return [
            r.task_id, r.status, r.finality, r.payload, r.content_type, r.content_encoding, r.type, r.version,
            r.execution, r.token, r.stored_at, r.expires_at,
        ]  # fmt: skip

    @cached_property
    def get_results(self) -> Statement:
        """Results by task_id."""
        return sa.select(*self._shown()).where(among(self._r.task_id, "p_task_ids"), self._r.status != "")

    @cached_property
    def get_ended_results(self) -> Statement:
        """Results by task_id, those only after which nothing follows."""
        r = self._r
        return sa.select(*self._shown()).where(among(r.task_id, "p_task_ids"), r.finality != int(Finality.OPEN))

    @cached_property
    def delete_results(self) -> Statement:
        """Forget results that nobody waits for."""
        return sa.delete(self.tables.results).where(among(self._r.task_id, "p_task_ids"), self._r.awaited == 0)

    @cached_property
    def blank_results(self) -> Statement:
        """Forget what is said by results for whose end executions may wait."""
        r = self._r
        said = (among(r.task_id, "p_task_ids"), r.awaited == 1, r.status != "")
        return sa.update(self.tables.results).where(*said).values(status="", payload=b"", version=0)

    @cached_property
    def delete_expired_results(self) -> Statement:
        """Delete what pick_expired_results has found."""
        return sa.delete(self.tables.results).where(among(self._r.task_id, "p_task_ids"))

    @cached_property
    def pick_expired_results(self) -> Statement:
        """Results whose time is over, the oldest first; those that somebody is writing or waits for are left alone."""
        r, w = self._r, self.tables.waits.c
        query = sa.select(r.task_id).where(r.expires_at.is_not(None), r.expires_at <= self._sql.now)
        query = query.where((r.awaited == 0) | ~sa.exists().where(w.parent_task_id == r.task_id))
        return (
            query.order_by(r.expires_at)
            .limit(number("p_limit"))
            .with_for_update(skip_locked=True, of=self.tables.results)
        )

    # -- groups --------------------------------------------------------------------------------------

    @cached_property
    def save_group(self) -> sa.Insert:
        """Store what a group consists of."""
        g = self._g
        insert = self.dialect.insert(self.tables.groups).values(
            group_id=text("p_group_id"),
            stored_at=self._sql.now,
            expires_at=self._expires,
            payload=data("p_payload"),
        )
        replaced = {
            column.name: self.dialect.inserted(insert, column) for column in (g.stored_at, g.expires_at, g.payload)
        }
        return self.dialect.upsert(insert, keys=[g.group_id], values=replaced)

    @cached_property
    def get_group(self) -> Statement:
        """What a group consists of."""
        return sa.select(self._g.payload).where(self._g.group_id == text("p_group_id"))

    @cached_property
    def delete_group(self) -> Statement:
        """Forget a group."""
        return sa.delete(self.tables.groups).where(among(self._g.group_id, "p_group_ids"))

    @cached_property
    def pick_expired_groups(self) -> Statement:
        """Groups whose time is over, the oldest first."""
        g = self._g
        query = sa.select(g.group_id).where(g.expires_at.is_not(None), g.expires_at <= self._sql.now)
        return query.order_by(g.expires_at).limit(number("p_limit")).with_for_update(skip_locked=True)

    # -- chords --------------------------------------------------------------------------------------

    @property
    def _new_chord(self) -> dict[str, Any]:
        return {
            "group_id": text("p_group_id"),
            "state": ChordState.OPEN.value,
            "touched_at": self._sql.now,
            "expires_at": self._expires,
        }

    @cached_property
    def begin_chord(self) -> sa.Insert:
        """Note what a chord consists of, and keep what is known already."""
        c = self._c
        insert = self.dialect.insert(self.tables.chords).values(
            **self._new_chord, header=data("p_header"), body=data("p_body")
        )
        kept = {
            column.name: sa.func.coalesce(self.dialect.inserted(insert, column), column)
            for column in (c.header, c.body)
        }
        return self.dialect.upsert(insert, keys=[c.group_id], values={**kept, "touched_at": self._sql.now})

    @cached_property
    def size_chord(self) -> sa.Insert:
        """Say how many parts a chord needs, if it is not there yet; lock it if it is."""
        c = self._c
        insert = self.dialect.insert(self.tables.chords).values(
            **self._new_chord, size=sa.bindparam("p_size", type_=sa.Integer), applied_by=number("p_by")
        )
        return self.dialect.upsert(insert, keys=[c.group_id], values={"touched_at": self._sql.now})

    @cached_property
    def lock_chord(self) -> Statement:
        """One chord, locked."""
        return sa.select(self.tables.chords).where(self._c.group_id == text("p_group_id")).with_for_update()

    @cached_property
    def resize_chord(self) -> Statement:
        """Say how many parts a locked chord needs, and open it if it is not."""
        return (
            sa.update(self.tables.chords)
            .where(self._c.group_id == text("p_group_id"))
            .values(
                size=sa.bindparam("p_size", type_=sa.Integer),
                applied_by=number("p_by"),
                state=ChordState.OPEN.value,
                claim_=None,
                claimed_until=None,
                touched_at=self._sql.now,
                expires_at=self._expires,
            )
        )

    @cached_property
    def put_part(self) -> sa.Insert:
        """Store a part unless it is there already, or comes late to a chord that has ended."""
        c, p = self._c, self._p
        ended: sa.Select[Any] = sa.select(sa.literal_column("1")).where(
            c.group_id == text("p_group_id"),
            c.state != ChordState.OPEN.value,
            number("p_execution") <= c.past,
        )
        new: dict[sa.Column[Any], Any] = {
            p.group_id: text("p_group_id"),
            p.task_id: text("p_task_id"),
            p.place: sa.bindparam("p_place", type_=sa.Integer),
            p.status: text("p_status"),
            p.added: sa.bindparam("p_added", type_=sa.SmallInteger),
            p.execution: number("p_execution"),
            p.stored_at: self._sql.now,
            p.payload: data("p_payload"),
        }
        source = sa.select(*new.values()).where(~ended.exists(), self._lease_is_current)
        insert = self.dialect.insert(self.tables.chord_parts).from_select([column.name for column in new], source)
        return self.dialect.ignore_known(insert, [p.group_id, p.task_id, p.place])

    @cached_property
    def fill_part(self) -> Statement:
        """Give a task that was added to the header its part; it may be asked to do so again."""
        p = self._p
        return (
            sa.update(self.tables.chord_parts)
            .where(
                p.group_id == text("p_group_id"),
                p.task_id == text("p_task_id"),
                p.added == 1,
                p.status == "",
                self._lease_is_current,
            )
            .values(
                status=text("p_status"),
                execution=number("p_execution"),
                stored_at=self._sql.now,
                payload=data("p_payload"),
            )
        )

    @cached_property
    def see_chord(self) -> Statement:
        """A chord and how many parts it has."""
        c = self._c
        has_body = c.body.is_not(None).label("has_body")
        return sa.select(
            c.group_id, c.state, c.size, has_body, self._parts.label("parts"), self._added.label("added")
        ).where(c.group_id == text("p_group_id"))

    @cached_property
    def chord_contents(self) -> Statement:
        """Header and body of a chord."""
        return sa.select(self._c.header, self._c.body).where(self._c.group_id == text("p_group_id"))

    @property
    def _parts(self) -> sa.ScalarSelect[int]:
        p = self._p
        count = sa.select(sa.func.count()).where(p.group_id == self._c.group_id, p.status != "")
        return count.correlate(self.tables.chords).scalar_subquery()

    @property
    def _added(self) -> sa.ScalarSelect[int]:
        p = self._p
        count = sa.select(sa.func.count()).where(p.group_id == self._c.group_id, p.added == 1)
        return count.correlate(self.tables.chords).scalar_subquery()

    @cached_property
    def chord_parts(self) -> Statement:
        """The parts of a chord in the order of its header."""
        p = self._p
        place = sa.case((p.place < 0, 2**31 - 1), else_=p.place)
        return (
            sa.select(p.task_id, p.place, p.status, p.payload, p.execution)
            .where(p.group_id == text("p_group_id"), p.status != "")
            .order_by(place, p.stored_at, p.task_id)
        )

    @cached_property
    def claim_chord(self) -> Statement:
        """Take it upon oneself to end a chord, if nobody else does."""
        c = self._c
        return (
            sa.update(self.tables.chords)
            .where(
                c.group_id == text("p_group_id"),
                c.state == ChordState.OPEN.value,
                c.claimed_until.is_(None) | (c.claimed_until <= self._sql.now),
            )
            .values(claim_=number("p_claim"), claimed_until=self._sql.now + number("p_ttl"))
        )

    @cached_property
    def end_chord(self) -> Statement:
        """End an open chord that nobody else is ending; p_claim 0: whoever is."""
        c, p = self._c, self._p
        newest = sa.select(sa.func.max(p.execution)).where(p.group_id == c.group_id).correlate(self.tables.chords)
        mine = (number("p_claim") == 0) | (c.claim_ == number("p_claim"))
        return (
            sa.update(self.tables.chords)
            .where(c.group_id == text("p_group_id"), c.state == ChordState.OPEN.value, mine)
            .values(
                state=text("p_state"),
                past=sa.func.coalesce(newest.scalar_subquery(), 0),
                touched_at=self._sql.now,
                claim_=None,
                claimed_until=None,
            )
        )

    @cached_property
    def chord_ended(self) -> Statement:
        """Whether a chord has the state p_state."""
        c = self._c
        return sa.select(c.group_id).where(c.group_id == text("p_group_id"), c.state == text("p_state"))

    @cached_property
    def delete_past_parts(self) -> Statement:
        """Delete the parts of a run of the header that is over."""
        p = self._p
        return sa.delete(self.tables.chord_parts).where(
            p.group_id == text("p_group_id"), p.execution <= number("p_past")
        )

    def _stuck(self, recent: bool) -> sa.Select[Any]:
        c, p, now = self._c, self._p, self._sql.now
        newest = sa.select(sa.func.max(p.stored_at)).where(p.group_id == c.group_id).correlate(self.tables.chords)
        query = sa.select(c.group_id).where(
            c.state == ChordState.OPEN.value,
            c.size.is_not(None),
            c.claimed_until.is_(None) | (c.claimed_until <= now),
            self._parts >= c.size + self._added,
            newest.scalar_subquery() <= now - number("p_older"),
        )
        if recent:
            fresh = sa.select(p.group_id).where(p.stored_at >= now - number("p_since"))
            query = query.where(c.group_id.in_(fresh))
        return query.order_by(c.touched_at).limit(number("p_limit"))

    @cached_property
    def stuck_chords(self) -> Statement:
        """Open chords that are complete, and that nobody is ending."""
        return self._stuck(recent=False)

    @cached_property
    def freshly_stuck_chords(self) -> Statement:
        """The same of those only that got a part lately."""
        return self._stuck(recent=True)

    @cached_property
    def pick_left_parts(self) -> Statement:
        """Parts of chords that have ended."""
        c, p = self._c, self._p
        return (
            sa.select(p.group_id, p.task_id, p.place)
            .join(self.tables.chords, c.group_id == p.group_id)
            .where(c.state != ChordState.OPEN.value, p.execution <= c.past)
            .limit(number("p_limit"))
        )

    @cached_property
    def delete_parts(self) -> Statement:
        """Delete single parts."""
        p = self._p
        return sa.delete(self.tables.chord_parts).where(
            among(p.group_id, "p_group_ids"),
            sa.tuple_(p.group_id, p.task_id, p.place).in_(sa.bindparam("p_parts", expanding=True)),
        )

    @cached_property
    def pick_old_chords(self) -> Statement:
        """Chords whose time is over, unless parts still come to them, and those that ended long ago."""
        c, p, now = self._c, self._p, self._sql.now
        # Named, so that the index can be used.
        ended = c.state.in_([ChordState.DONE.value, ChordState.FAILED.value])
        fresh: sa.Select[Any] = sa.select(sa.literal_column("1")).where(
            p.group_id == c.group_id, p.stored_at > now - (c.expires_at - c.touched_at)
        )
        over = (
            c.expires_at.is_not(None) & (c.expires_at <= now) & (ended | ~fresh.correlate(self.tables.chords).exists())
        )
        query = sa.select(c.group_id).where(over | (ended & (c.touched_at <= now - number("p_keep"))))
        return query.limit(number("p_limit"))

    @cached_property
    def delete_chords(self) -> Statement:
        """Delete chords."""
        return sa.delete(self.tables.chords).where(among(self._c.group_id, "p_group_ids"))

    @cached_property
    def delete_parts_of(self) -> Statement:
        """Delete all parts of chords."""
        return sa.delete(self.tables.chord_parts).where(among(self._p.group_id, "p_group_ids"))
