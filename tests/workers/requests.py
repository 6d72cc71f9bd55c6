"""Classes that an app may have of its own; the workers of some tests are told to use them."""

from __future__ import annotations

import logging

from celery import Task
from celery.worker.request import Request

logger = logging.getLogger("tests.workers.requests")


class OwnRequest(Request):  # type: ignore[misc]  # Celery has no types
    """A request that says it is there."""

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        logger.warning("own request of %s", self.id)
        super().on_accepted(pid, time_accepted)


class OwnTask(Task):  # type: ignore[misc]  # as above
    """A task whose requests are of that class."""

    abstract = True
    Request = OwnRequest
