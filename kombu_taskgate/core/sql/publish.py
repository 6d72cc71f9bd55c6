"""enqueue and enqueue_many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from ..clock import to_ms
from ..errors import ConfigError, TaskExists, TaskNotFound
from ..model import FINAL, NewTask, Reason, State
from ..schema import LANE_BLOCKED, LANE_NONE, LANE_READY
from ..settings import check_name, check_payload
from . import waits
from .work import CHUNK, Work, chunks

#: Most payload bytes in one INSERT of many rows; servers bound the length of a statement.
MAX_STATEMENT = 1024 * 1024
#: Ten thousand years in milliseconds.
LAST = 10_000 * 366 * 86_400_000


def check(task: NewTask, max_payload: int) -> None:
    """Refuse what can't be stored, before anything is.

    Raises:
        ConfigError, PayloadTooLarge: see :class:`~kombu_taskgate.core.model.NewTask` for the bounds.
    """
    check_name(task.queue, "queue")
    for what in ("task_id", "root_id", "parent_task_id", "group_id", "key", "unique_key"):
        value = getattr(task, what)
        if value is not None:
            check_name(value, what)
    if task.type:
        check_name(task.type, "task type")
    if task.run_at is not None and task.delay is not None:
        raise ConfigError("give run_at or delay, not both")
    check_depends(task)
    check_times(task.run_at, task.delay)
    check_times(task.expires_at, task.expires_in)
    if not -32767 <= task.priority <= 32767:
        raise ConfigError(f"priority must fit 16 bits, not {task.priority}")
    check_payload(task.payload, f"message for queue {task.queue!r}", max_payload)


def check_depends(task: NewTask) -> None:
    """Raise ConfigError for parents that can't be."""
    for name in task.depends_on:
        check_name(name, "task id in depends_on")
        if name == task.task_id:
            raise ConfigError(f"task {name} can't depend on itself")


def check_times(instant: int | None, seconds: float | None) -> None:
    """Raise ConfigError for an instant (ms) or a duration (s) that no column and no calendar can hold."""
    if instant is not None and not -LAST <= instant <= LAST:
        raise ConfigError(f"an instant must be within 10,000 years, in milliseconds; {instant!r} is not")
    if seconds is not None and not abs(seconds) * 1000 <= LAST:
        raise ConfigError(f"a duration must be within 10,000 years, in seconds; {seconds!r} is not")


def plain(task: NewTask) -> dict[str, Any]:
    """The columns that every execution has, whatever it waits for."""
    return {
        "queue": task.queue,
        "rank_": -task.priority,
        "type": task.type,
        "task_id": task.task_id,
        "root_id": task.root_id,
        "parent_task_id": task.parent_task_id,
        "group_id": task.group_id,
        "max_retry": task.max_retry,
        "fail_fast": int(task.fail_fast),
        "payload": task.payload,
    }


@dataclass(slots=True)
class Stored:
    """Ids of what a transaction stored, and its mark where the database can say what became of it."""

    ids: list[int]
    mark: int | None


def enqueue(work: Work, tasks: Sequence[NewTask], *, returning: bool) -> Stored:
    """Store all of them. ``returning``: whether one statement can store many rows and tell their ids."""
    if len(tasks) == 1 or not returning or any(not simple(task) for task in tasks):
        parents = waits.expect(work, tasks)
        ids = [_enqueue_one(work, task, parents) for task in tasks]
    else:
        ids = _enqueue_simple(work, tasks)
    return Stored(ids, work.mark)


def _enqueue_simple(work: Work, tasks: Sequence[NewTask]) -> list[int]:
    statement = work.sql.insert_ready.returning(*work.sql.stored, sort_by_parameter_order=True)
    ids: list[int] = []
    for part in _parts(tasks):
        rows = [work.sql.time(expires_at=task.expires_at, **plain(task)) for task in part]
        for row in work.conn.execute(statement, rows):
            ids.append(row.id)
            work.mark = getattr(row, "mark", None)
    work.woken.update(task.queue for task in tasks)
    for id, task in zip(ids, tasks, strict=True):
        work.stored(id, task.queue, State.PENDING)
    return ids


def _parts(tasks: Sequence[NewTask]) -> Iterator[list[NewTask]]:
    """Cut into statements of bounded length."""
    part: list[NewTask] = []
    size = 0
    for task in tasks:
        if part and (len(part) >= CHUNK or size + len(task.payload) > MAX_STATEMENT):
            yield part
            part, size = [], 0
        part.append(task)
        size += len(task.payload)
    if part:
        yield part


def simple(task: NewTask) -> bool:
    """Whether it is ready now, and concerns no other execution."""
    alone = not task.parents and not task.depends_on and task.key is None and task.unique_key is None
    return alone and task.run_at is None and not task.delay and task.expires_in is None


def _enqueue_one(work: Work, task: NewTask, known: dict[str, waits.Parent]) -> int:
    if simple(task):
        id = insert(work, work.sql.store_ready, expires_at=task.expires_at, **plain(task))
        state = State.PENDING
    else:
        if task.key is not None:
            refuse_known_key(work, task.key)
        if task.unique_key is not None:
            free_lock(work, task.unique_key, task.task_id if task.take_over else None)
        parents = sorted(set(task.parents))
        awaited, failure = waits.first_state(task, known)
        state, pending = _first_state(work, task, parents)
        if failure is not None:
            state = State.CANCELED
        elif awaited and state is not State.CANCELED:
            state, pending = State.BLOCKED, pending + len(awaited)
        id = insert(
            work,
            work.sql.store_task,
            **plain(task),
            **_schedule(task, state),
            key_=task.key,
            unique_key=task.unique_key,
            lock_=None if state in FINAL else task.unique_key,
            pending_parents=pending if state is State.BLOCKED else 0,
            linked=int(bool(parents or awaited)),
            state=state.value,
            reason=Reason.PARENT.value if state is State.CANCELED else None,
            detail=failure,
        )
        if parents:
            _link(work, id, parents)
        if state is State.BLOCKED:
            waits.wait(work, id, awaited, known)
        work.to_answer |= state is State.CANCELED and bool(task.type)
    if task.task_id in known and task.type:
        known[task.task_id].known = True
        known[task.task_id].root_id = task.root_id
    if state is State.PENDING:
        # A delayed one too: who sleeps until the next is due may have to wake earlier.
        work.woken.add(task.queue)
    work.stored(id, task.queue, state)
    return id


def store_and_tell(work: Work, task: NewTask, channel: str, text: str) -> int:
    """Store what is :func:`simple`, and announce it in the same statement; returns its id."""
    told = {"p_channel": channel, "p_text": text}
    id = insert(work, work.sql.store_ready_and_tell, expires_at=task.expires_at, **plain(task), **told)
    work.woken.add(task.queue)
    return id


def insert(work: Work, statement: sa.Insert, **parameters: Any) -> int:
    """Store a row and return its id; on databases that can say what became of a transaction, note its mark."""
    done = work.run_timed(statement, **parameters)
    if done.returns_rows:
        row = done.one()
        work.mark = row.mark
        return int(row.id)
    key: Any = done.inserted_primary_key
    return int(key[0])


def _schedule(task: NewTask, state: State) -> dict[str, Any]:
    lanes = {State.PENDING: LANE_READY, State.BLOCKED: LANE_BLOCKED, State.CANCELED: LANE_NONE}
    return {
        "p_run_at": task.run_at,
        "p_delay": to_ms(task.delay or 0.0),
        "p_expires_at": task.expires_at,
        "p_expires_in": None if task.expires_in is None else to_ms(task.expires_in),
        "p_lane": lanes[state],
        "p_final": int(state in FINAL),
        "p_answered_for": int(state in FINAL and bool(task.type)),
    }


def refuse_known_key(work: Work, key: str) -> None:
    """Raise TaskExists when the key has any execution. A race is decided by the unique index."""
    row = work.run(work.sql.newest_of_key, p_key=key).first()
    if row is not None:
        raise TaskExists(key, row.id, State(row.state), row.task_id)


def free_lock(work: Work, key: str, task_id: str | None = None) -> None:
    """Raise TaskExists when the unique key is locked; a running execution of ``task_id`` gives the lock up instead.

    A race is decided by the unique index.
    """
    if task_id is not None:
        work.run(work.sql.take_lock_over, p_key=key, p_task_id=task_id)
    row = work.run(work.sql.holder_of_lock, p_key=key).first()
    if row is not None:
        raise TaskExists(key, row.id, State(row.state), row.task_id, unique=True)


def _first_state(work: Work, task: NewTask, parents: Sequence[int]) -> tuple[State, int]:
    if not parents:
        return State.PENDING, 0
    states: dict[int, State] = {}
    for part in chunks(parents):
        states.update((row.id, State(row.state)) for row in work.run(work.sql.lock_parents, p_ids=part))
    missing = [id for id in parents if id not in states]
    if missing:
        raise TaskNotFound(f"parent {missing[0]} does not exist: it never did, or it completed and was removed")
    if task.fail_fast and any(state in (State.FAILED, State.CANCELED) for state in states.values()):
        return State.CANCELED, 0
    waiting = sum(state not in FINAL for state in states.values())
    return (State.BLOCKED, waiting) if waiting else (State.PENDING, 0)


def _link(work: Work, child: int, parents: Sequence[int]) -> None:
    for part in chunks(parents):
        work.run(work.sql.link, p_ids=part)
        work.conn.execute(work.sql.insert_dep, [{"child_id": child, "parent_id": id} for id in part])
