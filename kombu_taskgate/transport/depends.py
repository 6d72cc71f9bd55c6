"""``depends_on`` and ``ignore_parent_failure``: properties of a message that hold it back until tasks have succeeded.

Celery hands options that it does not know to the message's properties. Whether the results of those tasks will come to
be seen in the broker's database, only who knows Celery can tell: whoever is registered in the entry point group
``kombu_taskgate.depends_checker``, a callable that takes a :class:`~.connection.Connection`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigError
from ..core.model import NewTask

if TYPE_CHECKING:
    from .connection import Connection

GROUP = "kombu_taskgate.depends_checker"
#: The properties.
DEPENDS_ON = "depends_on"
IGNORE_FAILURE = "ignore_parent_failure"

#: Raises ConfigError where results are not stored in the database of the connection's broker.
Checker = Callable[["Connection"], object]


@cache
def checkers() -> tuple[Checker, ...]:
    """Those who are registered; asked for when a connection is opened, as :func:`.control.observers` are."""
    return tuple(point.load() for point in entry_points(group=GROUP))


def check(connection: Connection, tasks: Sequence[NewTask]) -> None:
    """Refuse what would wait for ever.

    Raises:
        ConfigError: the results are not stored where the broker sees them.
    """
    if any(task.depends_on for task in tasks):
        for checker in checkers():
            checker(connection)


def task_ids(value: Any) -> list[str]:
    """The ids of tasks, each once: of ids, results that have one, and groups of results.

    Args:
        value: one of them, or any number.

    Raises:
        ConfigError: it is something else.
    """
    return list(dict.fromkeys(_ids(value)))


def _ids(value: Any) -> Iterator[str]:
    # A group has an id too, which is no task's.
    inner = getattr(value, "results", None)
    if value is None:
        return
    if isinstance(value, str):
        yield value
    elif isinstance(inner, (list, tuple)):
        yield from _ids(inner)
    elif isinstance(getattr(value, "id", None), str):
        yield value.id
    elif isinstance(value, Iterable) and not isinstance(value, (bytes, dict)):
        for one in value:
            yield from _ids(one)
    else:
        raise ConfigError(f"{DEPENDS_ON} takes ids of tasks or their results, not {value!r}")
