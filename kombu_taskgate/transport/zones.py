"""Which zone a time without one is meant in.

The transport knows no Celery, so it asks whoever is registered in the entry point group
``kombu_taskgate.naive_zone``: callables without arguments that return a ``tzinfo`` or ``None``.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timezone, tzinfo
from functools import cache
from importlib.metadata import entry_points

GROUP = "kombu_taskgate.naive_zone"


def prepare() -> None:
    """Import those who are registered, when a connection is opened.

    At the first publish it would be too late: a child forked while another thread is in the middle of that
    import waits for the import's lock for ever.
    """
    _askable()


@cache
def _askable() -> tuple[Callable[[], tzinfo | None], ...]:
    return tuple(point.load() for point in entry_points(group=GROUP))


def naive_zone() -> tzinfo:
    """The first zone that anybody names; UTC when nobody does."""
    for ask in _askable():
        zone = ask()
        if zone is not None:
            return zone
    return timezone.utc
