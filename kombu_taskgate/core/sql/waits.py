"""Executions that wait for the results of tasks, whatever becomes of the executions of those."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..clock import to_ms
from ..errors import TaskNotFound
from ..model import FINAL, NewTask, State
from ..results import WAIT_EXPIRES, Finality, left_nothing, parent_ended
from .links import release, tell_children
from .work import Work, chunks

#: Parents that are looked after in one round.
AT_ONCE = 5000


@dataclass(slots=True)
class Parent:
    """What is known of a task that others are to wait for."""

    status: str
    finality: Finality
    #: Whether an execution or a result of it is stored.
    known: bool
    root_id: str | None = None


def expect(work: Work, tasks: Sequence[NewTask]) -> dict[str, Parent]:
    """What is known of all parents of the tasks, by task_id; their results are locked from now on, in their order."""
    names = sorted({name for task in tasks for name in task.depends_on})
    if not names:
        return {}
    for name in names:
        work.run_timed(work.sql.waits.expect, p_task_id=name, p_expires_in=to_ms(WAIT_EXPIRES))
    parents: dict[str, Parent] = {}
    for part in chunks(names):
        for row in work.run(work.sql.waits.see_results, p_task_ids=part):
            parents[row.task_id] = Parent(row.status, Finality(row.finality), known=bool(row.status))
    _see_executions(work, parents)
    return parents


def _see_executions(work: Work, parents: dict[str, Parent]) -> None:
    """Look at the executions of those that go on; when one of them ends, it will be looked for those that wait."""
    going_on = [name for name, parent in parents.items() if parent.finality is Finality.OPEN]
    for part in chunks(going_on):
        rows = work.run(work.sql.waits.executions_of, p_task_ids=part).all()
        for row in rows:
            parents[row.task_id].known = True
            parents[row.task_id].root_id = row.root_id
        live = [row for row in rows if State(row.state) not in FINAL]
        if live:
            work.run(work.sql.link, p_ids=[row.id for row in live])
        if {row.task_id for row in live} != set(part):
            work.unserved = True


def first_state(task: NewTask, parents: dict[str, Parent]) -> tuple[list[str], str | None]:
    """The task_ids that a new execution has to wait for, and why it can't succeed if one has failed.

    Raises:
        TaskNotFound: nothing is stored of one of them.
    """
    waits, failure = [], None
    for name in sorted(set(task.depends_on)):
        parent = parents[name]
        if not parent.known:
            raise TaskNotFound(left_nothing(name, known=False))
        if parent.finality is Finality.OPEN:
            waits.append(name)
        elif parent.finality is Finality.ENDED and task.fail_fast:
            failure = failure or parent_ended(name, parent.status)
    return waits, failure


def wait(work: Work, child: int, names: Iterable[str], parents: dict[str, Parent]) -> None:
    """Note what a new execution waits for."""
    rows = [{"child_id": child, "parent_task_id": name, "root_id": parents[name].root_id} for name in names]
    if rows:
        work.conn.execute(work.sql.waits.insert_wait, rows)


def ended(work: Work, task_id: str, detail: str, finality: Finality) -> None:
    """A task, whose result is locked, has ended: wake who waits for it, or cancel them for the reason given."""
    links = work.run(work.sql.waits.blocked_by, p_task_ids=[task_id]).all()
    work.run(work.sql.waits.delete_waits_for, p_task_ids=[task_id])
    completed = finality is Finality.SUCCEEDED
    canceled = release(work, links, completed=completed, detail=detail)
    tell_children(work, canceled, completed=False)


def look_after(work: Work) -> None:
    """Take tasks for failed that others wait for, that have left no result, and of which nothing goes on.

    A task may have been replaced by a workflow, the last of which ends in its name: then that goes on for it.
    """
    rows = work.run(work.sql.waits.unserved, p_limit=AT_ONCE).all()
    roots = sorted({row.root_id for row in rows if row.root_id is not None})
    going_on: set[str] = set()
    for part in chunks(roots):
        going_on.update(work.run(work.sql.waits.roots_going_on, p_root_ids=part).scalars())
    names = {row.parent_task_id for row in rows} - {row.parent_task_id for row in rows if row.root_id in going_on}
    for name in sorted(names):
        said = work.run(work.sql.waits.lock_result, p_task_id=name).first()
        if said is not None and Finality(said.finality) is not Finality.OPEN:
            ended(work, name, parent_ended(name, said.status), Finality(said.finality))
            continue
        states = [State(row.state) for row in work.run(work.sql.waits.executions_of, p_task_ids=[name])]
        if not states or states[-1] is State.COMPLETED:
            ended(work, name, left_nothing(name, known=True), Finality.ENDED)
        elif states[-1] in FINAL:
            ended(work, name, parent_ended(name, str(states[-1])), Finality.ENDED)
