"""A worker that starts under the name of one that lives.

Both then share one queue for remote control, so each command reaches one of them, and ``inspect`` shows one of them
(celery/celery#2938). Tasks and their leases are not concerned: a lease's owner is a process, not a name.
"""

from __future__ import annotations

import logging
from typing import Any

from kombu.exceptions import OperationalError

from kombu_taskgate.core.errors import TaskgateError
from kombu_taskgate.transport.errors import NotFound

logger = logging.getLogger("celery_ext.worker")

#: How long a worker of the same name may take to answer, in seconds.
PATIENCE = 1.0


def warn_of_namesake(app: Any, hostname: str) -> None:
    """Ask whether anybody answers to the name, and warn when somebody does.

    Called before the worker listens itself. Only where the name's queue exists anybody is waited for: a worker
    that was killed leaves it behind for some seconds, and does not answer.

    Args:
        app: the Celery app.
        hostname: the worker's name.
    """
    try:
        with app.connection_for_read() as connection:
            connection.connect()  # tries once; whatever else connects would go on trying, and say nothing
            mailbox = app.control.mailbox(connection)
            queue = mailbox.get_queue(hostname)
            queue(connection.default_channel).queue_declare(passive=True)
            answers = app.control.ping(destination=[hostname], timeout=PATIENCE, connection=connection)
    except (NotFound, OperationalError, TaskgateError) as error:
        # No such queue, the usual case; or a database that can't be used, of which the worker will tell in a moment.
        logger.debug("nobody else seems to be %s: %s", hostname, error)
        return
    if answers:
        logger.warning(
            "DuplicateNodenameWarning: another worker that lives is named %s too. Both work on tasks, but remote "
            "control commands reach only one of them: give each its own name, e.g. celery worker -n worker1@%%h",
            hostname,
        )
