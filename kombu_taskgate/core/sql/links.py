"""Waking and canceling the executions that depend on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..model import Reason, State
from .work import Work, chunks


def finish(
    work: Work,
    rows: Sequence[Any],
    state: State,
    reason: Reason | None,
    *,
    detail: str | None = None,
    result: bytes | None = None,
) -> None:
    """Make rows (id, queue, state, linked) final and tell their children."""
    for part in chunks(rows):
        work.run_timed(
            work.sql.finish,
            p_ids=[row.id for row in part],
            p_state=state.value,
            p_reason=None if reason is None else reason.value,
            p_detail=detail,
            p_result=result,
        )
    work.changed(rows, state)
    tell_children(work, [row.id for row in rows if row.linked], completed=state is State.COMPLETED)


def tell_children(work: Work, parents: Sequence[int], *, completed: bool) -> None:
    """The parents have ended: wake blocked children that wait for nobody else; cancel fail-fast ones otherwise."""
    ended = list(parents)
    while ended:
        canceled: dict[int, Any] = {}
        freed: dict[int, Any] = {}
        fewer: Counter[int] = Counter()
        for part in chunks(ended):
            for child in work.run(work.sql.blocked_children, p_ids=part):
                if child.fail_fast and not completed:
                    canceled[child.id] = child
                else:
                    freed[child.id] = child
                    fewer[child.id] += 1
        for id, number in fewer.items():
            if id not in canceled:
                work.run(work.sql.fewer_parents, p_id=id, p_number=number)
        free = [child for id, child in freed.items() if id not in canceled and child.pending_parents <= fewer[id]]
        wake(work, free)
        cancel_blocked(work, list(canceled.values()))
        ended, completed = list(canceled), False


def wake(work: Work, rows: Sequence[Any]) -> None:
    """Blocked rows (id, queue) may run."""
    for part in chunks(rows):
        work.run_timed(work.sql.unblock, p_ids=[row.id for row in part])
    work.woken.update(row.queue for row in rows)
    work.became(rows, State.BLOCKED, State.PENDING)


def cancel_blocked(work: Work, rows: Sequence[Any]) -> None:
    """Blocked rows (id, queue) will never run: a parent failed. Their children are the caller's business."""
    for part in chunks(rows):
        work.run_timed(
            work.sql.finish,
            p_ids=[row.id for row in part],
            p_state=State.CANCELED.value,
            p_reason=Reason.PARENT.value,
            p_detail=None,
            p_result=None,
        )
    work.became(rows, State.BLOCKED, State.CANCELED)


def remove(work: Work, ids: Sequence[int], linked: Sequence[int]) -> None:
    """Delete rows, and the links of those that have any."""
    for part in chunks(linked):
        work.run(work.sql.delete_deps, p_ids=part)
    for part in chunks(ids):
        work.run(work.sql.delete_tasks, p_ids=part)
