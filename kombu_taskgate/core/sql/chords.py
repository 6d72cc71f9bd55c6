"""The stored chords of all processes, in tables."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from ..chords import REMEMBER, Chord, ChordPart, ChordState
from ..clock import to_ms
from ..database import Database
from ..model import NewTask
from ..result_statements import ResultStatements
from ..settings import check_name, check_payload
from . import publish
from .work import Together, Work, chunks, repeat

#: Parts that are deleted in the transaction that ends their chord; of larger ones the sweep does it.
AT_ONCE = 1000


class SqlChords:
    """See :class:`~kombu_taskgate.core.chords.Chords`.

    Args:
        database: where.
        sql: the statements for its tables.
        together: runs a transaction of the broker's.
        max_payload: largest payload in bytes.
        returning: whether an INSERT can return the id of its row.
    """

    def __init__(
        self, database: Database, sql: ResultStatements, together: Together, max_payload: int, returning: bool
    ) -> None:
        self._database = database
        self._sql = sql
        self._together = together
        self._max_payload = max_payload
        self._returning = returning

    def begin(self, group_id: str, *, header: bytes | None, body: bytes | None, expires_in: float | None) -> None:
        """See the protocol."""
        check_name(group_id, "group id")
        for payload, what in ((header, "header"), (body, "body")):
            if payload is not None:
                check_payload(payload, f"{what} of chord {group_id}", self._max_payload)
        parameters = self._sql.time(p_group_id=group_id, p_header=header, p_body=body, p_expires_in=_ms(expires_in))
        self._database.write(lambda conn: conn.execute(self._sql.begin_chord, parameters))

    def set_size(self, group_id: str, size: int, *, by: int = 0, expires_in: float | None = None) -> None:
        """See the protocol."""
        check_name(group_id, "group id")
        parameters = self._sql.time(p_group_id=group_id, p_size=size, p_by=by, p_expires_in=_ms(expires_in))

        def work(conn: sa.Connection) -> None:
            conn.execute(self._sql.size_chord, parameters)
            chord = conn.execute(self._sql.lock_chord, {"p_group_id": group_id}).one()
            ended = chord.state != ChordState.OPEN
            if ended and by and by == chord.applied_by:
                return
            if ended:
                conn.execute(self._sql.delete_past_parts, {"p_group_id": group_id, "p_past": chord.past})
            if ended or chord.size != size or chord.applied_by != by:
                conn.execute(self._sql.resize_chord, parameters)

        self._database.transaction(work, confirm=repeat)

    def add(self, group_id: str, task_id: str) -> None:
        """See the protocol."""
        check_name(group_id, "group id")
        self._put(group_id, ChordPart(task_id, -1, "", b""), added=1)

    def put(self, group_id: str, part: ChordPart, *, expires_in: float | None = None) -> Chord:
        """See the protocol."""
        check_name(group_id, "group id")
        check_name(part.task_id, "task id")
        check_payload(part.payload, f"part of chord {group_id}", self._max_payload)
        if not (part.place < 0 and self._fill(group_id, part)):
            self._put(group_id, part, added=0)
        # After the commit of the part: of several who come last at once, the one whose commit is last sees all.
        chord = self.get(group_id)
        if chord is None:
            self.begin(group_id, header=None, body=None, expires_in=expires_in)
            chord = self.get(group_id)
        return chord or Chord(group_id, ChordState.OPEN)

    def _put(self, group_id: str, part: ChordPart, *, added: int) -> None:
        parameters = self._sql.time(p_added=added, **_parameters(group_id, part), p_place=part.place)
        self._database.write(lambda conn: conn.execute(self._sql.put_part, parameters))

    def _fill(self, group_id: str, part: ChordPart) -> bool:
        parameters = self._sql.time(**_parameters(group_id, part))
        return self._database.write(lambda conn: conn.execute(self._sql.fill_part, parameters).rowcount > 0)

    def get(self, group_id: str) -> Chord | None:
        """See the protocol."""
        row = self._database.read(lambda conn: conn.execute(self._sql.see_chord, {"p_group_id": group_id}).first())
        return None if row is None else _chord(row)

    def contents(self, group_id: str) -> tuple[bytes | None, bytes | None]:
        """See the protocol."""
        asked = {"p_group_id": group_id}
        row = self._database.read(lambda conn: conn.execute(self._sql.chord_contents, asked).first())
        return (None, None) if row is None else (_bytes(row.header), _bytes(row.body))

    def parts(self, group_id: str) -> list[ChordPart]:
        """See the protocol."""
        rows = self._database.read(lambda conn: conn.execute(self._sql.chord_parts, {"p_group_id": group_id}).all())
        return [ChordPart(row.task_id, row.place, row.status, bytes(row.payload), row.execution) for row in rows]

    def claim(self, group_id: str, ttl: float) -> int | None:
        """See the protocol."""
        claim = secrets.randbits(62) | 1
        parameters = self._sql.time(p_group_id=group_id, p_claim=claim, p_ttl=to_ms(ttl))
        # Not repeated blindly: the second attempt would find the first's claim.
        taken = self._database.transaction(
            lambda conn: conn.execute(self._sql.claim_chord, parameters).rowcount > 0, confirm=lambda conn, _: None
        )
        return claim if taken else None

    def end(self, group_id: str, state: ChordState, *, claim: int | None = None, tasks: Sequence[NewTask] = ()) -> bool:
        """See the protocol."""
        for task in tasks:
            publish.check(task, self._max_payload)

        def part(work: Work) -> bool:
            ended = work.run_timed(
                self._sql.end_chord, p_group_id=group_id, p_state=state.value, p_claim=claim or 0
            ).rowcount
            if not ended:
                return False
            if tasks:
                publish.enqueue(work, tasks, returning=self._returning)
            count = work.run(self._sql.see_chord, p_group_id=group_id).one().parts
            if count <= AT_ONCE:
                work.run(self._sql.delete_parts_of, p_group_ids=[group_id])
            return True

        def confirm(conn: sa.Connection, ended: bool) -> bool:
            # If the state is not there it was not committed, and doing it again does no harm.
            row = conn.execute(self._sql.chord_ended, {"p_group_id": group_id, "p_state": state.value}).first()
            return not ended or row is not None

        return self._together(part, confirm)

    def stuck(self, older: float, limit: int = 100, *, since: float | None = None) -> list[Chord]:
        """See the protocol."""
        parameters = self._sql.time(p_older=to_ms(older), p_limit=limit)
        statement = self._sql.stuck_chords
        if since is not None:
            statement, parameters = self._sql.freshly_stuck_chords, {**parameters, "p_since": to_ms(since)}
        ids = self._database.read(lambda conn: conn.execute(statement, parameters).scalars().all())
        found = [self.get(group_id) for group_id in ids]
        return [chord for chord in found if chord is not None and chord.complete]

    def sweep(self, limit: int = 1000) -> int:
        """See the protocol."""
        return self._database.transaction(lambda conn: self._sweep(conn, limit), confirm=repeat)

    def _sweep(self, conn: sa.Connection, limit: int) -> int:
        left = conn.execute(self._sql.pick_left_parts, {"p_limit": limit}).all()
        for part in chunks(left):
            keys = {"p_group_ids": sorted({row.group_id for row in part}), "p_parts": [tuple(row) for row in part]}
            conn.execute(self._sql.delete_parts, keys)
        old = (
            conn.execute(self._sql.pick_old_chords, self._sql.time(p_limit=limit, p_keep=to_ms(REMEMBER)))
            .scalars()
            .all()
        )
        for ids in chunks(old):
            conn.execute(self._sql.delete_parts_of, {"p_group_ids": ids})
            conn.execute(self._sql.delete_chords, {"p_group_ids": ids})
        return max(len(left), len(old))


def _parameters(group_id: str, part: ChordPart) -> dict[str, Any]:
    return {
        "p_group_id": group_id,
        "p_task_id": part.task_id,
        "p_status": part.status,
        "p_execution": part.execution,
        "p_token": part.token,
        "p_fence": part.execution if part.fenced else 0,
        "p_payload": part.payload,
    }


def _chord(row: Any) -> Chord:
    return Chord(
        group_id=row.group_id,
        state=ChordState(row.state),
        size=row.size,
        parts=row.parts,
        added=row.added,
        has_body=bool(row.has_body),
    )


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else to_ms(seconds)
