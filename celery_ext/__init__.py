"""The Celery face of taskgate.

A broker needs nothing from here: with ``broker_url = "taskgate+…"`` kombu finds the transport by itself.
This package is the home of what needs to know Celery, and has the names that apps import.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kombu_taskgate.core.errors import TaskExists

    from .errors import DeadLettered
    from .inspecting import TaskInfo, inspect_task
    from .task import Task
    from .throttled import Throttled

__all__ = ["DeadLettered", "Task", "TaskExists", "TaskInfo", "Throttled", "__version__", "inspect_task"]

#: Where the names come from. They need Celery, which a program with kombu alone does not load.
_HOMES = {
    "DeadLettered": ".errors",
    "Task": ".task",
    "TaskExists": "kombu_taskgate.core.errors",
    "TaskInfo": ".inspecting",
    "Throttled": ".throttled",
    "inspect_task": ".inspecting",
}

#: Version of the installed distribution celery-taskgate.
__version__: str = version("celery-taskgate")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
