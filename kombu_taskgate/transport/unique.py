"""Unique keys of messages: properties of these names, which any publisher may set (not in AMQP)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..core.errors import ConfigError, TaskExists
from ..core.model import NewTask
from .texts import id_text

logger = logging.getLogger("kombu_taskgate.transport")

#: The key, a text. ``False``: none, whatever else would give one.
KEY = "unique_key"
#: What to do where it is taken. The transport can only refuse.
MODE = "unique"
REFUSE, MERGE = "refuse", "merge"
#: Why there is no key though there should be one; for those who have no other way to say it.
ERROR = "unique_error"


def key_of(properties: Mapping[str, Any]) -> str | None:
    """The unique key of a message as it is stored, or ``None``.

    Raises:
        ConfigError: it is no text, or something else is asked for than to refuse.
    """
    if properties.get(ERROR) is not None:
        raise ConfigError(str(properties[ERROR]))
    key, mode = properties.get(KEY), properties.get(MODE)
    if mode == MERGE:
        raise ConfigError(
            "unique='merge' needs a task that is based on celery_ext.Task, published with its own apply_async or "
            "delay: use @app.task(base=celery_ext.Task) or Celery(task_cls='celery_ext:Task'), or unique='refuse'"
        )
    if mode not in (None, REFUSE):
        raise ConfigError(f"unique is 'refuse' or 'merge', not {mode!r}")
    if key is None or key is False:
        return None
    stored = id_text(key)
    if stored is None:
        raise ConfigError(f"unique_key is a text that is not empty, not {key!r}")
    return stored


def continues(headers: Mapping[str, Any]) -> bool:
    """Whether a message is a retry, or takes the place of the task that publishes it: under the same task_id."""
    return any(
        isinstance(headers.get(name), int) and headers[name] > 0 for name in ("retries", "replaced_task_nesting")
    )


def is_there_already(task: NewTask, error: TaskExists) -> bool:
    """Whether what was refused is a continuation that waits already: then this one was published a second time.

    A worker may die between the two, so that the task is delivered again, and wants to be retried again.
    """
    there = error.unique and task.take_over and task.task_id is not None and error.task_id == task.task_id
    if there:
        logger.info("task_id %s goes on as execution %d already: nothing was published", task.task_id, error.id)
    return there
