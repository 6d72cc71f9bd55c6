"""Heartbeats, sessions and reaping."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from ..clock import to_ms
from ..model import HeartbeatResult, Lease, Renewal, Session
from .links import cancel_blocked, tell_children, wake
from .settle import give_back, keys_of, lose
from .work import Work, chunks

#: Rows taken back in one round of one reap.
REAP = 500


def heartbeat_many(
    work: Work, leases: Sequence[Lease], extend: sa.Executable
) -> tuple[HeartbeatResult, dict[int, int]]:
    """Extend leases; returns what was found and each lease's new end, by id."""
    found = HeartbeatResult()
    ends: dict[int, int] = {}
    for part in chunks(sorted(leases, key=lambda lease: lease.id)):
        keys = keys_of(part)
        work.run_timed(extend, **keys)
        marks = {(row.id, row.token): row for row in work.run(work.sql.marks, **keys)}
        for lease in part:
            row = marks.get((lease.id, lease.token))
            if row is None:
                found.lost.append(lease)
                continue
            ends[lease.id] = row.lease_until
            if row.cancel_mark:
                found.canceled.append(lease)
    return found, ends


def open_session(work: Work, owner: str, ttl: float) -> Session:
    """Register a holder under a number that nobody can guess or meet again."""
    session = Session(secrets.randbits(62) | 1, owner, ttl)
    _insert(work, session)
    return session


def _insert(work: Work, session: Session) -> None:
    work.run_timed(work.sql.insert_session, id=session.id, owner=session.owner[:255], p_ttl=to_ms(session.ttl))


def renew_session(work: Work, session: Session, *, look: bool) -> Renewal:
    """Extend a holder's leases. Its row may have been removed since, if it slept for days."""
    if not work.run_timed(work.sql.renew_session, p_id=session.id, p_ttl=to_ms(session.ttl)).rowcount:
        _insert(work, session)
    renewal = Renewal()
    if not look:
        return renewal
    for row in work.run(work.sql.session_leases, p_id=session.id):
        renewal.held[row.id] = row.token
        if row.cancel_mark:
            renewal.canceled.add(row.id)
    return renewal


def close_session(work: Work, session: Session) -> int:
    """Give back what the holder holds, and forget it."""
    rows = work.run(work.sql.lock_session_leases, p_id=session.id).all()
    give_back(work, rows)
    work.run_timed(work.sql.touch_consumed, p_id=session.id)
    work.run(work.sql.delete_consumers, p_id=session.id)
    work.run(work.sql.delete_session, p_id=session.id)
    return len(rows)


def reap(work: Work, *, repair: bool) -> int:
    """Take back one round of leases that have run out. ``repair``: look after blocked rows too, which is slower."""
    number = _take_back(work, lambda limit: work.run_timed(work.sql.pick_lost, p_limit=limit).all())
    dead = list(work.run_timed(work.sql.dead_sessions).scalars())
    if dead:
        number += _take_back(
            work, lambda limit: work.run_timed(work.sql.pick_orphaned, p_sessions=dead, p_limit=limit).all()
        )
    number += _take_back(work, lambda limit: work.run_timed(work.sql.pick_stray, p_limit=limit).all())
    if repair:
        _repair(work)
    return number


def _take_back(work: Work, pick: Callable[[int], Sequence[Any]]) -> int:
    rows = pick(REAP)
    if not rows:
        return 0
    lose(work, rows)
    return len(rows)


def _repair(work: Work) -> None:
    """Blocked rows that no parent will ever wake: a parent was removed by hand, or an old version forgot them."""
    rows = work.run(work.sql.pick_forgotten, p_limit=REAP).all()
    if not rows:
        return
    failed: set[int] = set()
    for part in chunks(rows):
        failed.update(work.run(work.sql.failed_parents, p_ids=[row.id for row in part]).scalars())
    lost = [row for row in rows if row.fail_fast and row.id in failed]
    ended = {row.id for row in lost}
    cancel_blocked(work, lost)
    tell_children(work, sorted(ended), completed=False)
    wake(work, [row for row in rows if row.id not in ended])
