"""Who answers for what has ended: claim_answers and answered."""

from __future__ import annotations

from collections.abc import Sequence

from ..clock import to_ms
from ..model import ANSWER_WITHIN, Task
from .queries import to_task
from .work import Work, chunks


def claim_answers(work: Work, limit: int, queues: Sequence[str] | None, older: float) -> list[Task]:
    """Put the answers for up to ``limit`` rows off for everybody else; returns the rows as they were."""
    if queues is None:
        rows = work.run_timed(work.sql.pick_answers, p_limit=limit).all()
    else:
        rows = work.run_timed(
            work.sql.pick_answers_of, p_limit=limit, p_queues=list(queues), p_older=to_ms(older)
        ).all()
    for part in chunks(rows):
        work.run_timed(work.sql.put_off_answers, p_ids=[row.id for row in part], p_wait=to_ms(ANSWER_WITHIN))
    return [to_task(row) for row in rows]


def answered(work: Work, ids: Sequence[int]) -> None:
    """Clear the answers of these rows."""
    for part in chunks(sorted(ids)):
        work.run(work.sql.clear_answers, p_ids=part)
