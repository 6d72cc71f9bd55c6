"""Others who want to know that this transport is used in a process.

The transport knows no Celery. Whoever is registered in the entry point group ``kombu_taskgate.plugin`` is called
when the transport's class is first looked at, and each time a :class:`~.transport.Transport` is made, which is
before its first connection: a callable without arguments that is quick, may be called any number of times, and does
nothing where it has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points

GROUP = "kombu_taskgate.plugin"


@cache
def _plugins() -> tuple[Callable[[], object], ...]:
    """Imported once in a process."""
    return tuple(point.load() for point in entry_points(group=GROUP))


def tell() -> None:
    """Call everybody."""
    for plugin in _plugins():
        plugin()
