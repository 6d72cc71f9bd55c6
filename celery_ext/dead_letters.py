"""Answering for what the broker has ended: the work of a worker's keeper.

The broker says what is due, and gives each to one claimer (``Broker.claim_answers``). What can't be answered because
its result backend is away stays due, for this worker or another; what fails although the backend can be asked is given
up after some tries.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection
from typing import Any

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import PayloadTooLarge, StoreUnavailable, TaskExists, TaskNotFound
from kombu_taskgate.core.model import ANSWER_WITHIN, FINAL, Filter, Reason, State, Task
from kombu_taskgate.transport.codec import decode
from kombu_taskgate.transport.errors import Undecodable
from kombu_taskgate.transport.revocations import revocable_by

from .answers import REVOKED, Unreachable, answer

logger = logging.getLogger("celery_ext.dead_letters")

#: Answers claimed at once.
BATCH = 20
#: Seconds after which a worker answers for queues that it does not consume: their own workers know better how.
OTHERS_AFTER = 30.0
#: Part of the time for an answer after which no more of a batch are begun.
ENOUGH = 0.5
#: How often one worker tries an answer that fails although its result backend can be asked.
TRIES = 5
#: Why the broker does not take the message of an errback, however often it is asked: its unique key is taken, it
#: depends on a task that never was, or it is too large.
_REFUSED = (PayloadTooLarge, TaskExists, TaskNotFound)
_GOES_ON = [state for state in State if state not in FINAL]


class DeadLetterAnswers:
    """Answers for dead letters, and for canceled and expired tasks.

    Args:
        app: the Celery app.
        broker: where they are.
        queues: the queues that this worker consumes, asked for each time.
        lease_lost_max: of the broker, for the text.
    """

    def __init__(self, app: Any, broker: Broker, queues: Callable[[], Collection[str]], *, lease_lost_max: int) -> None:
        self._app = app
        self._broker = broker
        self._queues = queues
        self._lease_lost_max = lease_lost_max
        self._tries: dict[int, int] = {}
        self._out = False

    def __call__(self, stopping: Callable[[], bool]) -> float | None:
        """Answer for all that is due; returns after how many seconds something is due again, if that is known."""
        left = False
        away: set[int] = set()
        while not stopping():
            tasks = self._broker.claim_answers(BATCH, sorted(self._queues()), older=OTHERS_AFTER)
            until = time.monotonic() + ENOUGH * ANSWER_WITHIN
            for task in tasks:
                if stopping() or time.monotonic() > until or not self._answer(task, away):
                    left = True
                    continue
                self._tries.pop(task.id, None)
                # One by one: should this process end now, nothing of what it has told is told again.
                self._broker.answered([task.id])
            if len(tasks) < BATCH:
                break
        self._tell_outage(bool(away))
        return ANSWER_WITHIN + random.uniform(0.5, 5.0) if left else None

    def _answer(self, task: Task, away: set[int]) -> bool:
        """Answer for one; returns whether that is settled. ``away``: result backends that can't be asked now."""
        try:
            if self._goes_on(task):
                logger.info("task %s[%s] goes on after execution %d", task.type, task.task_id, task.id)
                return True
            answer(
                self._app,
                task,
                lambda: self._why_canceled(task),
                lease_lost_max=self._lease_lost_max,
                avoid=lambda backend: id(backend) in away,
            )
        except Unreachable as error:
            if not away and not self._out:
                logger.warning("a result backend can't be reached to answer for tasks that ended: %s", error.__cause__)
            away.add(id(error.backend))
            return False
        except StoreUnavailable as error:
            logger.warning("can't answer for task %s[%s] now: %s", task.type, task.task_id, error)
            return False
        except _REFUSED as error:
            # It will be refused again, and each try calls the other errbacks once more.
            logger.error("task %s[%s] is answered for in part: %s", task.type, task.task_id, error)  # noqa: TRY400  # the message says it all
            return True
        except Exception:
            tries = self._tries[task.id] = self._tries.get(task.id, 0) + 1
            logger.exception(
                "answering for task %s[%s] failed (execution %d, %s), try %d of %d",
                task.type,
                task.task_id,
                task.id,
                task.reason,
                tries,
                TRIES,
            )
            return tries >= TRIES
        logger.info("answered for task %s[%s] (execution %d): %s", task.type, task.task_id, task.id, task.reason)
        return True

    def _goes_on(self, task: Task) -> bool:
        """Whether a later execution goes on for it (a retry, what replaces it, a replay): then that will tell."""
        # Nobody has begun one that expired or waited, so nobody has published what follows it.
        if task.task_id is None or task.reason in (Reason.EXPIRED, Reason.PARENT):
            return False
        rows = self._broker.list(Filter(task_id=task.task_id, states=_GOES_ON))
        return any(row.id > task.id and row.type for row in rows)

    def _tell_outage(self, out: bool) -> None:
        if self._out and not out:
            logger.warning("the result backend can be reached again")
        self._out = out

    def _why_canceled(self, task: Task) -> str:
        try:
            revoked = revocable_by(decode(task.payload))
        except Undecodable:
            revoked = []
        return REVOKED if revoked and self._broker.revocations.find(revoked) else "canceled"
