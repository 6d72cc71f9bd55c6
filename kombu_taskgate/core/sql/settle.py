"""ack, fail, requeue, finish_canceled: each only with the current lease token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from ..clock import to_ms
from ..errors import LeaseLost
from ..model import WAS_BEGUN, FailKind, Lease, Reason, State
from .links import Answer, finish, remove, tell_children
from .work import Work, chunks


def keys_of(leases: Sequence[Lease]) -> dict[str, Any]:
    """Parameters of the statements that ask for current leases."""
    return {"p_ids": [lease.id for lease in leases], "p_leases": [(lease.id, lease.token) for lease in leases]}


def held(work: Work, leases: Sequence[Lease]) -> dict[tuple[int, int], Any]:
    """The rows whose lease is current, locked, by (id, token)."""
    rows: dict[tuple[int, int], Any] = {}
    for part in chunks(sorted(leases, key=lambda lease: lease.id)):
        rows.update(((row.id, row.token), row) for row in work.run(work.sql.held, **keys_of(part)))
    return rows


def held_one(work: Work, lease: Lease) -> Any:
    """The row of one lease, locked.

    Raises:
        LeaseLost: the token is not current.
    """
    row = held(work, [lease]).get((lease.id, lease.token))
    if row is None:
        raise LeaseLost(f"the lease on execution {lease.id} is lost: it was taken over or settled")
    return row


def count_current(conn: sa.Connection, statement: sa.Executable, leases: Sequence[Lease]) -> int:
    """How many of the leases are current."""
    return sum(int(conn.execute(statement, keys_of(part)).scalar_one()) for part in chunks(leases))


def _refused(leases: Sequence[Lease], settled: set[tuple[int, int]]) -> list[Lease]:
    """What was not settled; of the same lease given twice, the second is."""
    refused = []
    for lease in leases:
        key = (lease.id, lease.token)
        if key in settled:
            settled.remove(key)
        else:
            refused.append(lease)
    return refused


def begin_many(work: Work, leases: Sequence[Lease]) -> list[Lease]:
    """Note that runs have begun; returns the refused leases. One statement, unless one is refused."""
    refused: list[Lease] = []
    for part in chunks(sorted(leases, key=lambda lease: lease.id)):
        keys = keys_of(part)
        if work.run(work.sql.begin, **keys).rowcount != len(part):
            current = {(row.id, row.token) for row in work.run(work.sql.marks, **keys)}
            refused.extend(lease for lease in part if (lease.id, lease.token) not in current)
    return refused


def ack_many(work: Work, leases: Sequence[Lease], *, returning: bool) -> list[Lease]:
    """Ack leases; returns the refused ones.

    ``returning``: whether DELETE … RETURNING exists, which settles rows without links in one statement.
    """
    settled: set[tuple[int, int]] = set()
    left: Sequence[Lease] = leases
    if returning and not work.settings.keep_completed and not work.announce:
        for part in chunks(leases):
            settled.update((row.id, row.token) for row in work.run(work.sql.delete_acked, **keys_of(part)))
        left = [lease for lease in leases if (lease.id, lease.token) not in settled]
    if left:
        rows = held(work, left)
        complete(work, list(rows.values()), None)
        settled |= set(rows)
    return _refused(leases, settled)


def complete(work: Work, rows: Sequence[Any], result: bytes | None) -> None:
    """End rows well: keep those that are to be kept, remove the others, wake children.

    A row with a business key is kept so that the key stays known, and a replay so that what it replays is not
    replayed again.
    """
    keep = [row for row in rows if work.settings.keep_completed or row.key_ is not None or row.replay_of is not None]
    kept = {row.id for row in keep}
    drop = [row for row in rows if row.id not in kept]
    if keep:
        finish(work, keep, State.COMPLETED, None, result=result)
    if drop:
        work.changed(drop, State.COMPLETED)
        linked = [row.id for row in drop if row.linked]
        tell_children(work, linked, completed=True)
        remove(work, [row.id for row in drop], linked)


def fail(
    work: Work,
    lease: Lease,
    kind: FailKind,
    *,
    retry_at: int | None,
    delay: float | None,
    reason: Reason | None,
    detail: str | None,
    told: bool,
) -> State:
    """Count the failure and let it wait or end; returns the new state."""
    row = held_one(work, lease)
    if kind is FailKind.LOST:
        return lose(work, [row], reason=reason, detail=detail, told=told)[row.id]
    attempts = row.attempts + (kind is FailKind.BUSINESS)
    throttled = row.throttled + (kind is FailKind.THROTTLED)
    if kind is not FailKind.SKIP:
        work.run(work.sql.count_failure, p_id=row.id, p_attempts=attempts, p_throttled=throttled)
    over = {
        FailKind.BUSINESS: attempts > row.max_retry,
        FailKind.THROTTLED: throttled >= work.settings.throttled_max,
        FailKind.SKIP: True,
    }[kind]
    if over:
        usual = {
            FailKind.BUSINESS: Reason.BUSINESS,
            FailKind.THROTTLED: Reason.THROTTLED,
            FailKind.SKIP: Reason.REJECTED,
        }[kind]
        finish(work, [row], State.FAILED, reason or usual, detail=detail, answer=_answer(told))
        return State.FAILED
    if row.cancel_mark:
        finish(work, [row], State.CANCELED, Reason.CANCELED)
        return State.CANCELED
    work.run_timed(work.sql.retry_later, p_ids=[row.id], p_run_at=retry_at, p_delay=to_ms(delay or 0.0))
    work.woken.add(row.queue)
    work.changed([row], State.RETRYING)
    return State.RETRYING


def _answer(told: bool) -> Answer:
    return Answer.NONE if told else Answer.DUE


def lose(
    work: Work,
    rows: Sequence[Any],
    *,
    reason: Reason | None = None,
    detail: str | None = None,
    told: bool = False,
) -> dict[int, State]:
    """Take locked running rows from a holder that is gone; returns their new states by id."""
    marked = [row for row in rows if row.cancel_mark]
    counted = [row for row in rows if not row.cancel_mark]
    for part in chunks(counted):
        work.run(work.sql.count_loss, p_ids=[row.id for row in part])
    begun = [row for row in counted if row.begun]
    worn = [row for row in counted if row.lease_lost + 1 >= work.settings.lease_lost_max and not row.begun]
    finish(work, marked, State.CANCELED, Reason.CANCELED)
    said = WAS_BEGUN if detail is None else f"{detail}: {WAS_BEGUN}"
    finish(work, begun, State.FAILED, reason or Reason.LOST, detail=said, answer=_answer(told))
    usual = f"{work.settings.lease_lost_max} workers lost their lease on it"
    finish(work, worn, State.FAILED, reason or Reason.LEASE_LOST, detail=detail or usual, answer=_answer(told))
    ended = {row.id for row in (*worn, *begun)}
    give_back(work, [row for row in counted if row.id not in ended])
    states = {row.id: State.PENDING for row in counted}
    states.update((row.id, State.CANCELED) for row in marked)
    states.update((id, State.FAILED) for id in ended)
    return states


def requeue_many(work: Work, leases: Sequence[Lease], *, delivered: bool) -> list[Lease]:
    """Requeue leases; returns the refused ones."""
    rows = held(work, leases)
    if not delivered:
        for part in chunks(list(rows.values())):
            work.run(work.sql.uncount_delivery, p_ids=[row.id for row in part])
    give_back(work, list(rows.values()))
    return _refused(leases, set(rows))


def give_back(work: Work, rows: Sequence[Any]) -> None:
    """Make locked running rows pending again, canceled where that was asked for, or failed where they had begun."""
    marked = [row for row in rows if row.cancel_mark]
    begun = [row for row in rows if row.begun and not row.cancel_mark]
    plain = [row for row in rows if not (row.cancel_mark or row.begun)]
    if marked:
        finish(work, marked, State.CANCELED, Reason.CANCELED)
    if begun:
        finish(work, begun, State.FAILED, Reason.LOST, detail=WAS_BEGUN)
    for part in chunks(plain):
        work.run(work.sql.give_back, p_ids=[row.id for row in part])
    work.woken.update(row.queue for row in plain)
    work.changed(plain, State.PENDING)


def finish_canceled(work: Work, lease: Lease) -> None:
    """End a running row as canceled."""
    finish(work, [held_one(work, lease)], State.CANCELED, Reason.CANCELED)
