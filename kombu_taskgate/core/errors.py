"""Every error the broker raises.

The docstring of a class is its default message, so that an exception raised without arguments still
tells a person what happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import State


class TaskgateError(Exception):
    """The taskgate broker could not do what was asked."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message if message is not None else " ".join((self.__doc__ or "").split()))


class TaskExists(TaskgateError):
    """An execution with this business key exists already, or one that has not ended holds this unique key.

    Args:
        key: the business key, or the unique key.
        id: the newest execution of the business key, or the one that holds the unique key.
        state: its state.
        task_id: its task_id.
        unique: it is a unique key.
    """

    def __init__(self, key: str, id: int, state: State, task_id: str | None = None, *, unique: bool = False) -> None:
        if unique:
            shown = "" if task_id is None else f" (task_id {task_id})"
            super().__init__(f"unique key {key!r} is taken: execution {id}{shown} is {state.value}")
        else:
            super().__init__(f"business key {key!r} exists already: newest execution {id} is {state.value}")
        self.key = key
        self.id = id
        self.state = state
        self.task_id = task_id
        self.unique = unique

    def __reduce__(self) -> tuple[Any, ...]:
        # A task that publishes may raise it, and then it goes through the pipe of a pool's process.
        return _task_exists, (self.key, self.id, self.state, self.task_id, self.unique)


def _task_exists(key: str, id: int, state: State, task_id: str | None, unique: bool) -> TaskExists:
    return TaskExists(key, id, state, task_id, unique=unique)


class TaskNotFound(TaskgateError):
    """No execution has this id: it never existed, or it was finished and removed."""


class LeaseLost(TaskgateError):
    """The lease token is not the current one: another worker holds this execution, or it is settled."""


class TaskCanceled(TaskgateError):
    """The execution was canceled while it ran; its lease is still valid until it is settled."""


class AlreadyFinal(TaskgateError):
    """The execution has ended already and can't be changed."""


class ReplayNotFinal(TaskgateError):
    """Only an execution that has ended can be replayed."""


class AlreadyReplayed(TaskgateError):
    """The execution has been replayed already; replay the newest one of its chain."""


class CompletedNotAllowed(TaskgateError):
    """The execution has completed; replaying it must be allowed explicitly."""


class NotLeader(TaskgateError):
    """This process does not hold the term it writes under."""


class StoreUnavailable(TaskgateError):
    """The database can't be reached or refused to work just now; the same call may succeed later."""


class StoreBusy(StoreUnavailable):
    """What the call needs stayed locked by others; the database is well, and other calls may succeed."""


class SchemaError(TaskgateError):
    """The tables in the database do not fit this version of taskgate."""


class ConfigError(TaskgateError):
    """A URL, an option or a name is wrong."""


class PayloadTooLarge(TaskgateError):
    """The message is larger than max_payload allows; nothing was stored."""
