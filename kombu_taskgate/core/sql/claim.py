"""dequeue: promote what is due, claim from each queue its share, drop what must not be delivered."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..clock import to_ms
from ..model import Claim, Reason, Session, State
from ..statements import TOKEN_STEP
from .links import finish
from .work import Work, chunks

#: Delayed rows promoted at once.
PROMOTE = 500
#: Expired rows dropped at once, and how many times in one transaction.
DROP = 1000
ROUNDS = 8


@dataclass(slots=True)
class Claimer:
    """Who claims, and how.

    ``returning``: in one statement. It does not see the state a row had before, so it is not for brokers that
    announce state changes.
    """

    owner: str
    session: Session | None
    returning: bool


def promote(work: Work) -> int:
    """Move delayed rows whose time has come into the claim index; returns how many."""
    ids = list(work.run_timed(work.sql.pick_due, p_limit=PROMOTE).scalars())
    if ids:
        work.run(work.sql.promote, p_ids=ids)
    return len(ids)


def queue_parameters(queues: Sequence[str]) -> dict[str, str]:
    """Parameters of the statements that ask for several queues at once."""
    return {f"p_q{place}": name for place, name in enumerate(queues)}


def claim(work: Work, queues: Sequence[str], limit: int, claimer: Claimer) -> list[Claim]:
    """Up to ``limit`` rows of the queues, in the order in which the queues are given a share."""
    if len(queues) > 1:
        ready: list[str] = []
        for part in chunks(queues):
            places = work.run(work.sql.ready_queues(len(part)), **queue_parameters(part)).scalars()
            ready.extend(part[place] for place in sorted(places))
        queues = ready
    claims: list[Claim] = []
    full = list(queues)
    # Each queue gets an equal part; what some do not use goes to those that have more.
    while full and len(claims) < limit:
        again = []
        for place, queue in enumerate(full):
            share = -(-(limit - len(claims)) // (len(full) - place))
            if share <= 0:
                break
            got = _claim_queue(work, queue, share, claimer)
            claims.extend(got)
            if len(got) == share:
                again.append(queue)
        full = again
    return claims


def _claim_queue(work: Work, queue: str, limit: int, claimer: Claimer) -> list[Claim]:
    good: list[Claim] = []
    for _ in range(ROUNDS):
        rows = _take(work, queue, limit - len(good), claimer)
        expired = [row for row in rows if row.expires_at is not None and row.expires_at <= row.now]
        gone = {row.id for row in expired}
        worn = [row for row in rows if _unsettled(row) > work.settings.max_deliveries and row.id not in gone]
        bad = gone | {row.id for row in worn}
        taken = [row for row in rows if row.id not in bad]
        good.extend(_claim_of(row, claimer, work.settings.ttl_of(queue)) for row in taken)
        # What is dropped went through "running" only inside this transaction, and reached nobody.
        if bad:
            for part in chunks(sorted(bad)):
                work.run(work.sql.undo_claim, p_ids=part)
            _expire(work, expired)
            detail = f"delivered {work.settings.max_deliveries} times without being settled"
            finish(work, worn, State.FAILED, Reason.MAX_DELIVERIES, detail=detail)
        work.changed(taken, State.RUNNING)
        if expired:
            # More of the same kind is likely behind.
            drop_expired(work, queue)
        if not bad or len(good) >= limit:
            break
    return good


def _unsettled(row: Any) -> int:
    """Deliveries that nobody told the end of; business failures and throttlings have caps of their own."""
    return int(row.deliveries - row.attempts - row.throttled)


def drop_expired(work: Work, queue: str) -> int:
    """Drop a part of what has expired in a queue, without claiming it first; returns how many that were."""
    ids = list(work.run_timed(work.sql.see_expired, p_queue=queue, p_limit=DROP).scalars())
    number = 0
    for part in chunks(ids):
        rows = work.run(work.sql.pick_expired, p_ids=part).all()
        _expire(work, rows)
        number += len(rows)
    return number


def _expire(work: Work, rows: Sequence[Any]) -> None:
    """End rows that nobody wants any more; of those in a queue that will go itself nothing is kept."""
    finish(work, rows, State.CANCELED, Reason.EXPIRED)
    for part in chunks(sorted(row.id for row in rows)):
        work.run(work.sql.delete_traceless, p_ids=part)


def _take(work: Work, queue: str, limit: int, claimer: Claimer) -> list[Any]:
    """Lease rows; sorted, since an UPDATE returns them in any order."""
    low = secrets.randbelow(TOKEN_STEP)
    lease = {
        "p_low": low,
        "p_owner": claimer.owner[:255],
        "p_session": None if claimer.session is None else claimer.session.id,
        "p_ttl": to_ms(work.settings.ttl_of(queue)),
    }
    if claimer.returning:
        rows = work.run_timed(work.sql.claim, p_queue=queue, p_limit=limit, **lease).all()
        return sorted(rows, key=lambda row: (row.rank_, row.run_at, row.id))
    picked = work.run_timed(work.sql.claim_pick, p_queue=queue, p_limit=limit).all()
    for part in chunks(picked):
        work.run_timed(work.sql.claim_take, p_ids=[row.id for row in part], **lease)
    return [_as_taken(row, low) for row in picked]


def _as_taken(row: Any, low: int) -> Any:
    """A row locked by claim_pick as claim_take has changed it; its state is still the one before."""
    token = row.token - row.token % TOKEN_STEP + TOKEN_STEP + low
    return SimpleNamespace(**{**row._asdict(), "token": token, "deliveries": row.deliveries + 1})


def _claim_of(row: Any, claimer: Claimer, ttl: float) -> Claim:
    return Claim(
        id=row.id,
        token=row.token,
        owner=claimer.owner,
        lease_until=row.now + to_ms(ttl),
        queue=row.queue,
        payload=bytes(row.payload),
        type=row.type,
        task_id=row.task_id,
        priority=-row.rank_,
        run_at=row.run_at,
        created_at=row.created_at,
        deliveries=row.deliveries,
        attempts=row.attempts,
        lease_lost=row.lease_lost,
    )
