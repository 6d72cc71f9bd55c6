"""What the parts of one transaction share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa

from ..database import Confirm
from ..model import State, StateChange
from ..settings import BrokerSettings
from ..statements import Statements

T = TypeVar("T")

#: Most values in one IN list, queues in one look, and rows in one INSERT: databases bound the parameters of a
#: statement, and one turns lists of 1000 values into a table without an index.
CHUNK = 400


def chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Cut a sequence into parts that fit into one statement."""
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]


def repeat(conn: sa.Connection, result: object) -> bool:
    """For work that does no harm when it is done twice: after a commit whose outcome is unknown, do it again."""
    return False


class Work:
    """One transaction: its connection, the statements, what to announce after commit, who has work."""

    __slots__ = ("announce", "changes", "conn", "mark", "settings", "sql", "to_answer", "told", "unserved", "woken")

    def __init__(self, conn: sa.Connection, sql: Statements, settings: BrokerSettings, *, announce: bool) -> None:
        self.announce = announce
        self.conn = conn
        self.sql = sql
        self.settings = settings
        self.changes: list[StateChange] = []
        #: Names the transaction where the database can say afterwards what became of it.
        self.mark: int | None = None
        #: Queues that have got work which somebody may wait for.
        self.woken: set[str] = set()
        #: Queues whose new work has been announced in this transaction already.
        self.told: list[str] = []
        #: A task has ended, and somebody may wait for a result that it has not left.
        self.unserved = False
        #: Whether something has ended that somebody should answer for.
        self.to_answer = False

    def run(self, statement: sa.Executable, **parameters: Any) -> sa.CursorResult[Any]:
        """Run a statement that does not ask for the time."""
        return self.conn.execute(statement, parameters)

    def run_timed(self, statement: sa.Executable, **parameters: Any) -> sa.CursorResult[Any]:
        """Run a statement that asks for the time."""
        return self.conn.execute(statement, self.sql.time(**parameters))

    def changed(self, rows: Iterable[Any], after: State) -> None:
        """Note that rows (id, queue, state) have a new state."""
        if self.announce:
            self.changes.extend(StateChange(row.id, row.queue, State(row.state), after) for row in rows)

    def became(self, rows: Iterable[Any], before: State, after: State) -> None:
        """Note that rows (id, queue), all in the same state before, have a new state."""
        if self.announce:
            self.changes.extend(StateChange(row.id, row.queue, before, after) for row in rows)

    def stored(self, id: int, queue: str, state: State) -> None:
        """Note a new execution."""
        if self.announce:
            self.changes.append(StateChange(id, queue, None, state))


class Together(Protocol):
    """Runs something in one of the broker's transactions, see ``SqlBroker.work_together``."""

    def __call__(self, part: Callable[[Work], T], confirm: Confirm[T] | None) -> T: ...
