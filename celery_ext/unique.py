"""Unique tasks: which key a task has, and where the transport finds it.

The transport takes the key from the message's properties, where unknown options of ``apply_async`` arrive. What a
task's own options say is put there by Celery's signal ``before_task_publish``. A message also carries its key in a
header, so that a retry, or what replaces the task, has it too.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kombu.utils import json

from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.transport.unique import ERROR, KEY, MODE

#: The header that carries the key.
HEADER = "taskgate_unique"


def option(task: Any, name: str) -> Any:
    """An option of a task as it was given: a function as it is, not as a method of the task."""
    found = inspect.getattr_static(task, name, None)
    return found.__func__ if isinstance(found, staticmethod) else found


def key_for(task: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> str | None:
    """The unique key that the option ``unique_key`` of a task gives to these arguments; ``None`` where it gives none.

    Raises:
        ConfigError: it can't be made of them.
    """
    wanted = option(task, KEY)
    if wanted is None or wanted is False:
        return None
    try:
        made = _make(task, wanted, tuple(args or ()), dict(kwargs or {}))
    except Exception as error:
        raise ConfigError(
            f"the unique key of task {task.name} can't be made of its arguments: {type(error).__name__}: {error}"
        ) from error
    if made is not None and (not isinstance(made, str) or not made):
        raise ConfigError(f"the unique key of task {task.name} must be a text that is not empty, not {made!r}")
    return made


def _make(task: Any, wanted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(wanted, str):
        return wanted.format(*args, **_by_name(task.run, args, kwargs))
    if callable(wanted):
        return wanted(*args, **kwargs)
    if wanted is not True:
        raise TypeError(f"unique_key is True, a format string or a function, not {wanted!r}")
    # As the worker gets them: the same call written in another way is the same.
    text = json.dumps(_by_name(task.run, args, kwargs), sort_keys=True)
    return f"{task.name}:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _by_name(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(run)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    found = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found.update(found.pop(name))
    return found


def inherited(task_id: object) -> str | None:
    """The key of the task that runs here, if what it publishes has its id: a retry, or what replaces it."""
    from celery._state import get_current_worker_task

    task = get_current_worker_task()
    if task is None or task_id is None or task.request.id != task_id:
        return None
    key: str | None = task.request.get(HEADER)
    return key


def before_publish(
    sender: str | None = None,
    body: Any = None,
    headers: dict[str, Any] | None = None,
    properties: dict[str, Any] | None = None,
    **_: Any,
) -> None:
    """Receiver of Celery's signal: give the message its key. Celery does not let it raise, so the transport does."""
    if headers is None or properties is None:
        return
    from celery import current_app

    task = current_app.tasks.get(sender)
    if KEY not in properties:
        key = inherited(headers.get("id")) or headers.get(HEADER)
        if key is None and task is not None:
            try:
                key = key_for(task, body[0], body[1])
            except ConfigError as error:
                properties[ERROR] = str(error)
        if key is not None:
            properties[KEY] = key
    if properties.get(KEY) in (None, False):
        headers.pop(HEADER, None)
        return
    headers[HEADER] = properties[KEY]
    mode = None if task is None else option(task, MODE)
    if mode is not None:
        properties.setdefault(MODE, mode)
