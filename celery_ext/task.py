"""A base class for tasks that can merge with one that waits or runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import celery

from kombu_taskgate.core.errors import ConfigError, TaskExists
from kombu_taskgate.transport.unique import KEY, MERGE, MODE, REFUSE

from .unique import HEADER, inherited, key_for, option

#: What would be lost with a publish that is merged: nobody adds it to the task that is there.
_MORE = ("link", "link_error", "chain", "chord", "group_id")


class Task(celery.Task):
    """``celery.Task`` with ``unique="merge"``: ``Celery(task_cls="celery_ext:Task")`` or ``@app.task(base=Task)``.

    ``unique="refuse"``, the default, needs no base class.
    """

    abstract = True

    def apply_async(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, *more: Any, **options: Any
    ) -> Any:
        """As Celery's. With ``unique="merge"`` and a unique key that is taken: the result of the task that has it.

        Raises:
            TaskExists: with ``unique="refuse"``: the unique key is taken.
            ConfigError: the key can't be made of the arguments, or what is to be merged has callbacks or is part of a
                chain, group or chord, which would be lost.
        """
        task_id = more[0] if more else options.get("task_id")
        if KEY not in options and HEADER not in (options.get("headers") or {}) and inherited(task_id) is None:
            key = key_for(self, args, kwargs)
            if key is not None:
                options[KEY] = key
        wanted = options.get(MODE) or option(self, MODE)
        if wanted != MERGE or options.get("retries") or options.get("replaced_task_nesting"):
            if wanted == MERGE:
                options[MODE] = REFUSE
            return super().apply_async(args, kwargs, *more, **options)
        lost = [name for name in _MORE if options.get(name)]
        if lost:
            raise ConfigError(
                f"task {self.name} has unique='merge' and {', '.join(lost)}: that would be lost when it is merged; "
                "use unique='refuse' here"
            )
        options[MODE] = REFUSE
        try:
            return super().apply_async(args, kwargs, *more, **options)
        except TaskExists as error:
            if not error.unique or error.task_id is None:
                raise
            return self.AsyncResult(error.task_id)
