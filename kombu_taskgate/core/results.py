"""Results of tasks, and of groups of them: what has become of a task, under its task_id.

The broker only keeps them. What a status is called and what a payload says is the business of whoever stores it; how
final it is decides which write wins.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from .errors import ConfigError
from .settings import check_name, check_payload
from .watch import Wake, Watch

#: Longest status, in characters.
MAX_STATUS = 64
#: Seconds for which is remembered, at the least, that somebody waits for a result. As long as somebody does it stays.
WAIT_EXPIRES = 86400.0


class Finality(IntEnum):
    """What may still come after a result."""

    #: More will follow.
    OPEN = 0
    #: The run has ended; only a later execution of the same task may say something else.
    ENDED = 1
    #: It ended well, and that stays.
    SUCCEEDED = 2


@dataclass(slots=True)
class NewResult:
    """A result to store.

    Args:
        task_id: 1 to 255 characters.
        status: as its reader calls it; at most 64 characters.
        finality: what may still come after it.
        payload: opaque bytes.
        content_type, content_encoding: how the payload is to be read.
        type: what kind of work it is of.
        execution, token: the lease under which it was found; 0: under none.
        fenced: the lease is one of this broker's, so whether it is still current can be, and is, looked up.
        expires_in: seconds after which it may be swept; ``None``: never.
    """

    task_id: str
    status: str
    finality: Finality
    payload: bytes
    content_type: str = ""
    content_encoding: str = ""
    type: str = ""
    execution: int = 0
    token: int = 0
    fenced: bool = False
    expires_in: float | None = None


@dataclass(slots=True)
class Result:
    """A stored result. ``version`` grows with each write; instants are milliseconds by the database's clock."""

    task_id: str
    status: str
    finality: Finality
    payload: bytes
    content_type: str = ""
    content_encoding: str = ""
    type: str = ""
    version: int = 1
    execution: int = 0
    token: int = 0
    stored_at: int = 0
    expires_at: int | None = None


def parent_ended(task_id: str, how: str) -> str:
    """Why an execution that waits for a task is canceled (column ``detail``)."""
    return f"parent {task_id} has ended: {how}"


def left_nothing(task_id: str, *, known: bool) -> str:
    """The same of a task that has no result: one that nobody knows, or one that is over."""
    if known:
        return f"parent {task_id} has ended and left no result: does it ignore its result?"
    return (
        f"parent {task_id} is not known: it was never published to this broker, or it has ended and its result "
        "is not kept"
    )


class Results(Protocol):
    """The stored results. Every method may be called from any thread, and may raise ``StoreUnavailable``."""

    def store(self, result: NewResult) -> bool:
        """Store a result under its task_id, if it may replace what is there; returns whether it did.

        One conditional statement where there is nothing to replace or it may be replaced. A result that SUCCEEDED
        stays. One that has ENDED gives way to what a later execution says, and to what is said under no lease. An OPEN
        one gives way unless it was stored under a newer lease. A ``fenced`` result whose lease is not current, because
        its execution was given back or is another's now, is refused; one whose row is gone or has ended is not.
        Whoever watches is told. Executions that depend on the task (:attr:`.model.NewTask.depends_on`) wake, or are
        canceled, in the same transaction when the result is one after which nothing follows.

        Raises:
            ConfigError: the task_id or the status is out of bounds.
            PayloadTooLarge: as it says. Nothing is stored.
        """

    def get(self, task_ids: Collection[str], *, ended: bool = False) -> dict[str, Result]:
        """Those of the results that are stored, by task_id; ``ended``: only those after which nothing follows."""

    def forget(self, task_ids: Collection[str]) -> int:
        """Delete results; returns how many there were. Who waits for what follows goes on waiting."""

    def save_group(self, group_id: str, payload: bytes, expires_in: float | None) -> None:
        """Store what a group consists of, in place of what was stored for it. Raises as :meth:`store`."""

    def group(self, group_id: str) -> bytes | None:
        """What a group consists of, if it is stored."""

    def delete_group(self, group_id: str) -> None:
        """Forget a group."""

    def sweep(self, limit: int = 1000) -> int:
        """Delete at most ``limit`` results, and as many groups, whose time is over; returns the larger number.

        A result that is OPEN while an execution waits for what follows stays.
        """

    def watch(self, wake: Wake) -> Watch:
        """Be told of new results, as far as the store can; close it in the end.

        ``wake`` is called, in another thread or by whoever stores here, with task_ids, or with ``None`` when any may
        have one. A word may be lost, and may come for nothing.
        """

    def change_mark(self) -> object | None:
        """What differs from the last answer once something may have been stored; ``None``: look instead."""


def check(result: NewResult, max_payload: int) -> None:
    """Refuse what can't be stored.

    Raises:
        ConfigError, PayloadTooLarge: what is out of bounds.
    """
    check_name(result.task_id, "task id")
    check_name(result.status, "status")
    if len(result.status) > MAX_STATUS:
        raise ConfigError(f"a status has at most {MAX_STATUS} characters, not {result.status[:40]!r}…")
    check_payload(result.payload, f"result of task {result.task_id}", max_payload)
