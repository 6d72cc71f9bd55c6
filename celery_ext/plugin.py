"""How a worker gets taskgate's step without a line in the app.

The transport calls :func:`install` (entry point group ``kombu_taskgate.plugin``) when it is first used in a process.
A worker asks its transport whether it can be waited for in an event loop before it sends ``worker_init`` and before
it puts its steps together (``WorkController.setup_instance``), so the signal comes in time. Where Celery runs on
greenlets, or was told to do without a loop, it does not ask; there the worker's consumer looks at the transport's
class for the errors that it may raise, right before it puts its own steps together, in an app that is the current
one.
"""

from __future__ import annotations

import sys
from typing import Any

from .unique import before_publish

#: Names the receiver, so that it is connected once however often it is asked for.
_UID = "taskgate"


def install() -> None:
    """Let workers have the step, and messages their unique keys, if this process has Celery. Any number of times."""
    if "celery" not in sys.modules:
        return
    from celery import current_app, signals

    from . import errors  # noqa: F401  # Celery finds the class of a stored error only where its module is imported

    signals.worker_init.connect(_on_worker_init, weak=False, dispatch_uid=_UID)
    signals.before_task_publish.connect(before_publish, weak=False, dispatch_uid=_UID)
    if sys.modules.get("celery.worker.consumer") is not None:
        add_step(current_app)


def _on_worker_init(sender: Any, **_: Any) -> None:
    add_step(sender.app)


def add_step(app: Any) -> None:
    """Put the step into an app, once. A worker of the app with another broker leaves it out by itself.

    Args:
        app: the Celery app.
    """
    from .worker.step import WorkerStep

    # A set, as Celery documents it: twice is once.
    app.steps["consumer"].add(WorkerStep)
