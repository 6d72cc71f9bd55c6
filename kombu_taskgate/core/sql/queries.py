"""get, list, counts and lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from ..model import WAITING, Filter, Inspection, State, Task
from ..schema import Tables
from ..statements import Statements
from .work import chunks

_SAME = (
    "id", "queue", "type", "task_id", "root_id", "parent_task_id", "group_id", "run_at", "created_at", "expires_at",
    "finished_at", "replay_of", "pending_parents", "attempts", "max_retry", "throttled", "lease_lost", "deliveries",
    "owner", "lease_until", "reason", "detail", "answer_at",
)  # fmt: skip


def to_task(row: Any) -> Task:
    """A row as a Task."""
    return Task(
        **{name: getattr(row, name) for name in _SAME},
        state=State(row.state),
        payload=bytes(row.payload),
        priority=-row.rank_,
        key=row.key_,
        fail_fast=bool(row.fail_fast),
        cancel_requested=bool(row.cancel_mark),
        begun=bool(row.begun),
        unique_key=row.unique_key,
        locks=row.lock_ is not None,
        result=None if row.result is None else bytes(row.result),
    )


def listing(tables: Tables, wanted: Filter) -> sa.Select[Any]:
    """The statement of ``list``: filter, sort, offset, limit."""
    t = tables.tasks.c
    query = sa.select(tables.tasks)
    for column, value in (
        (t.queue, wanted.queue),
        (t.type, wanted.type),
        (t.key_, wanted.key),
        (t.task_id, wanted.task_id),
        (t.group_id, wanted.group_id),
    ):
        if value is not None:
            query = query.where(column == value)
    if wanted.states is not None:
        query = query.where(t.state.in_([state.value for state in wanted.states]))
    return query.order_by(t.created_at, t.id).offset(wanted.offset).limit(wanted.limit)


def queue_lens(conn: sa.Connection, sql: Statements, queues: Iterable[str]) -> dict[str, int]:
    """Pending and retrying rows of each queue."""
    lengths = dict.fromkeys(queues, 0)
    for part in chunks(list(lengths)):
        for queue, number in conn.execute(sql.queue_lens, {"p_queues": part}):
            lengths[queue] += number
    return lengths


def counts(conn: sa.Connection, sql: Statements) -> dict[tuple[str, State], int]:
    """Rows per (type, state)."""
    return {(row[0], State(row[1])): row[2] for row in conn.execute(sql.counts)}


def inspect(conn: sa.Connection, sql: Statements, task_id: str) -> Inspection | None:
    """What is stored of a task."""
    row = conn.execute(sql.newest_of_task, sql.time(p_task_id=task_id)).first()
    if row is None:
        return None
    task = to_task(row)
    found = Inspection(task, int(conn.execute(sql.count_executions, {"p_task_id": task_id}).scalar_one()))
    if task.state is State.RUNNING:
        found.lease_until = max(row.lease_until or 0, row.until_ or 0)
    elif task.state is State.BLOCKED:
        found.waits_for = sorted(conn.execute(sql.waits.unfinished_parents, {"p_id": task.id}).scalars())
    elif task.state in WAITING and task.run_at <= row.now:
        place = sql.time(p_queue=task.queue, p_rank=row.rank_, p_run_at=task.run_at, p_id=task.id)
        found.position = int(conn.execute(sql.count_before, place).scalar_one()) + 1
    return found


def running(conn: sa.Connection, sql: Statements, task_ids: Sequence[str]) -> set[str]:
    """Those of the task_ids under which something runs."""
    found: set[str] = set()
    for part in chunks(task_ids):
        found.update(conn.execute(sql.running, {"p_task_ids": part}).scalars())
    return found
