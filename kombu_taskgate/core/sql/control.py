"""cancel, cancel_waiting, replay, purge, prune."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..clock import to_ms
from ..errors import AlreadyFinal, AlreadyReplayed, CompletedNotAllowed, ReplayNotFinal, TaskNotFound
from ..model import FINAL, Reason, State, Task
from ..schema import LANE_READY
from . import publish
from .links import Answer, finish, remove
from .queries import to_task
from .work import Work, chunks

#: A dead holder or a closed quota window is remembered for a day, for people who look.
REMEMBER = 86400.0
#: Rows purged in one transaction.
PURGE = 1000


def cancel(work: Work, id: int) -> State:
    """Cancel a waiting row; mark a running one."""
    row = work.run(work.sql.lock_task, p_id=id).first()
    if row is None:
        raise TaskNotFound(f"execution {id} does not exist: it never did, or it completed and was removed")
    state = State(row.state)
    if state in FINAL:
        raise AlreadyFinal(f"execution {id} has ended already: {state}")
    if state is State.RUNNING:
        work.run(work.sql.mark_canceled, p_id=id)
        return state
    finish(work, [row], State.CANCELED, Reason.CANCELED)
    return State.CANCELED


def cancel_waiting(work: Work, ids: Sequence[int], task_ids: Sequence[str]) -> list[Task]:
    """Cancel what waits under ids and task_ids; the others are left alone. Tells them as they were."""
    found: dict[int, Any] = {}
    for part in chunks(sorted(set(ids))):
        found.update((row.id, row) for row in work.run(work.sql.lock_waiting, p_ids=part))
    for names in chunks(sorted(set(task_ids))):
        found.update((row.id, row) for row in work.run(work.sql.lock_waiting_of, p_task_ids=names))
    rows = [found[id] for id in sorted(found)]
    finish(work, rows, State.CANCELED, Reason.CANCELED, answer=Answer.CLAIMED)
    return [to_task(row) for row in rows]


def replay(work: Work, id: int, payload: bytes | None, *, allow_completed: bool) -> int:
    """Copy a final row. Unique indexes keep two replays of one row, or of one key, from both succeeding."""
    row = work.run(work.sql.lock_task, p_id=id).first()
    if row is None:
        raise TaskNotFound(f"execution {id} does not exist: it never did, or it completed and was removed")
    state = State(row.state)
    if state not in FINAL:
        raise ReplayNotFinal(f"execution {id} is {state}: only one that has ended can be replayed")
    newer = work.run(work.sql.replayed_by, p_id=id).scalar()
    if newer is not None:
        raise AlreadyReplayed(f"execution {id} was replayed as {newer}: replay the newest of the chain")
    if state is State.COMPLETED and not allow_completed:
        raise CompletedNotAllowed(f"execution {id} completed: allow it explicitly to run it once more")
    if row.unique_key is not None:
        publish.free_lock(work, row.unique_key)
    copied = {
        name: getattr(row, name)
        for name in (
            "queue", "rank_", "type", "task_id", "root_id", "parent_task_id", "group_id", "key_", "max_retry",
            "fail_fast", "unique_key",
        )
    }  # fmt: skip
    new = publish.insert(
        work,
        work.sql.store_task,
        **copied,
        lock_=row.unique_key,
        payload=row.payload if payload is None else payload,
        seq=row.seq + 1,
        replay_of=id,
        state=State.PENDING.value,
        p_run_at=None,
        p_delay=0,
        p_expires_at=None,
        p_expires_in=None,
        p_lane=LANE_READY,
        p_final=0,
        p_answered_for=0,
    )
    work.woken.add(row.queue)
    work.stored(new, row.queue, State.PENDING)
    return new


def purge(work: Work, queue: str, lane: int) -> int:
    """Remove a part of what waits in one lane; parents are canceled instead, so that their children learn of it."""
    rows = work.run(work.sql.pick_waiting(lane), p_queue=queue, p_limit=PURGE).all()
    parents: set[int] = set()
    for part in chunks([row.id for row in rows if row.linked]):
        parents.update(work.run(work.sql.have_children, p_ids=part).scalars())
    childless = [row for row in rows if row.id not in parents]
    work.changed(childless, State.CANCELED)
    remove(work, [row.id for row in childless], [row.id for row in childless if row.linked])
    for row in rows:
        if row.id not in parents:
            continue
        # An earlier one may have canceled it already, as its child.
        current = work.run(work.sql.lock_task, p_id=row.id).one()
        if State(current.state) not in FINAL:
            finish(work, [current], State.CANCELED, Reason.CANCELED, answer=Answer.NONE)
    return len(rows)


def prune(work: Work, limit: int) -> int:
    """Delete old final rows, dead holders and closed quota windows."""
    rows = list(work.run_timed(work.sql.pick_old, p_limit=limit, p_keep=to_ms(work.settings.keep_failed)))
    if work.settings.keep_completed and len(rows) < limit:
        known = {row.id for row in rows}
        keep = to_ms(work.settings.keep_completed)
        more = work.run_timed(work.sql.pick_old_completed, p_limit=limit - len(rows), p_keep=keep)
        rows += [row for row in more if row.id not in known]
    remove(work, [row.id for row in rows], [row.id for row in rows if row.linked])
    work.run_timed(work.sql.delete_old_sessions, p_age=to_ms(REMEMBER))
    work.run(work.sql.delete_old_consumers)
    work.run_timed(work.sql.delete_old_quotas, p_age=to_ms(REMEMBER))
    return len(rows)
