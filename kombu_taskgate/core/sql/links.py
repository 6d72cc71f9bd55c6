"""Waking and canceling the executions that depend on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any

from ..clock import to_ms
from ..model import ANSWER_WITHIN, Reason, State
from .work import Work, chunks


class Answer(Enum):
    """Whether somebody has to answer for rows that end, and in how many milliseconds the next may."""

    DUE = 0
    #: The caller does, and has time for it.
    CLAIMED = to_ms(ANSWER_WITHIN)
    #: It was told already, or nobody will.
    NONE = None


def finish(
    work: Work,
    rows: Sequence[Any],
    state: State,
    reason: Reason | None,
    *,
    detail: str | None = None,
    result: bytes | None = None,
    answer: Answer = Answer.DUE,
) -> None:
    """Make rows (id, queue, state, linked, type) final and tell their children."""
    _end(work, rows, state, reason, detail=detail, result=result, answer=answer)
    work.changed(rows, state)
    linked = [row.id for row in rows if row.linked]
    leave(work, linked)
    tell_children(work, linked, completed=state is State.COMPLETED)


def _end(
    work: Work,
    rows: Sequence[Any],
    state: State,
    reason: Reason | None,
    *,
    detail: str | None = None,
    result: bytes | None = None,
    answer: Answer = Answer.DUE,
) -> None:
    if state is State.COMPLETED:
        answer = Answer.NONE
    for part in chunks(rows):
        work.run_timed(
            work.sql.finish,
            p_ids=[row.id for row in part],
            p_state=state.value,
            p_reason=None if reason is None else reason.value,
            p_detail=detail,
            p_result=result,
            p_answer_in=answer.value,
        )
    work.to_answer |= answer is Answer.DUE and any(row.type for row in rows)


def leave(work: Work, linked: Sequence[int]) -> None:
    """Rows with links have ended: they wait for nobody. Note it if others wait for what they may have left undone."""
    for part in chunks(linked):
        work.run(work.sql.waits.delete_waits_of, p_ids=part)
        work.unserved = work.unserved or work.run(work.sql.waits.waited_for, p_ids=part).first() is not None


def tell_children(work: Work, parents: Sequence[int], *, completed: bool) -> None:
    """The parents have ended: wake blocked children that wait for nobody else; cancel fail-fast ones otherwise."""
    ended = list(parents)
    while ended:
        links = [child for part in chunks(ended) for child in work.run(work.sql.blocked_children, p_ids=part)]
        ended, completed = release(work, links, completed=completed), False


def release(work: Work, links: Sequence[Any], *, completed: bool, detail: str | None = None) -> list[int]:
    """Parents of blocked children (a row per link) have ended; returns which of the children are canceled."""
    canceled: dict[int, Any] = {}
    freed: dict[int, Any] = {}
    fewer: Counter[int] = Counter()
    for child in links:
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
    cancel_blocked(work, list(canceled.values()), detail)
    return list(canceled)


def wake(work: Work, rows: Sequence[Any]) -> None:
    """Blocked rows (id, queue) may run."""
    for part in chunks(rows):
        work.run_timed(work.sql.unblock, p_ids=[row.id for row in part])
    work.woken.update(row.queue for row in rows)
    work.became(rows, State.BLOCKED, State.PENDING)


def cancel_blocked(work: Work, rows: Sequence[Any], detail: str | None = None) -> None:
    """Blocked rows (id, queue, type) will never run: a parent failed. Their children are the caller's business."""
    _end(work, rows, State.CANCELED, Reason.PARENT, detail=detail)
    leave(work, [row.id for row in rows])
    work.became(rows, State.BLOCKED, State.CANCELED)


def remove(work: Work, ids: Sequence[int], linked: Sequence[int]) -> None:
    """Delete rows, and the links of those that have any."""
    leave(work, linked)
    for part in chunks(linked):
        work.run(work.sql.delete_deps, p_ids=part)
    for part in chunks(ids):
        work.run(work.sql.delete_tasks, p_ids=part)
