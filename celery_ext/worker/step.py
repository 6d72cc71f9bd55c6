"""The step that is added to the consumer of each worker whose broker is taskgate."""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps
from celery.exceptions import TaskRevokedError
from celery.worker import state
from celery.worker.consumer.tasks import Tasks
from kombu.common import ignore_errors

from kombu_taskgate.transport.transport import Transport
from kombu_taskgate.transport.url import masked

from . import request
from .answering import AnswerKeeper
from .names import warn_of_namesake
from .running import RunningJobs
from .shutdown import ShutdownWatch

logger = logging.getLogger("celery_ext.worker")

#: How often dead pool processes are looked for, in seconds. For each process it is one call of the system.
UPKEEP = 0.5
#: Pools that run a task in this process and say so right before.
_THREADED = frozenset({"celery.concurrency.solo", "celery.concurrency.thread"})


class WorkerStep(bootsteps.StartStopStep):
    """Losses, reserved tasks at the end, claims in step with the pool, and two lines for people.

    Steps that have nothing to do with each other start in any order, so what must come before another step is
    done in :meth:`create`.
    """

    name = "taskgate"
    label = "taskgate"
    requires = (Tasks,)

    def __init__(self, c: Any, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        self._watch: ShutdownWatch | None = None
        self._told = False
        self._upkeep: Any = None
        self._running = RunningJobs(c.pool)
        self._answers: AnswerKeeper | None = None

    def include_if(self, c: Any) -> bool:
        """Only where the broker is taskgate; the app's other workers may have another."""
        return isinstance(c.app.connection_for_read().transport, Transport)

    def create(self, c: Any) -> None:
        """Before any step of the consumer starts: the classes of its requests, and whether its name is free."""
        request.mix_in(c.app.tasks)
        if c.app.conf.worker_enable_remote_control:
            warn_of_namesake(c.app, c.hostname)

    def start(self, c: Any) -> None:
        """Each time the consumer has connected."""
        if request.mix_in(c.app.tasks):  # tasks that have come since
            c.update_strategies()
        if not self._told:
            self._told = True
            _tell_of_early_acks(c.app)
        c.task_consumer.channel.events["abandoned"].add(self._running.keep)
        if c.app.conf.get("worker_disable_prefetch"):
            logger.info("worker_disable_prefetch: taskgate claims no more than the pool can run (whatever Celery says)")
            c.task_consumer.channel.limit_claims(lambda: pool_room(c))
        if not c.disable_rate_limits:
            c.task_consumer.channel.put_aside(lambda: rate_limited(c))
        if self._answers is None:
            # Once for each worker: a lost connection is no reason to let go of what is being told.
            self._answers = AnswerKeeper(c)
            self._answers.start()
        self._stop_watch()
        self._watch = ShutdownWatch(c.hostname, lambda: give_back(c))
        self._watch.start()

    def register_with_event_loop(self, c: Any, hub: Any) -> None:
        """Each time the event loop starts: look after dead pool processes more often than every 5 s.

        Celery looks when the pipe of a process closes, which is a moment before the process can be waited for, so
        that it mostly finds nothing, and then not before its own timer, every 5 s.
        """
        if self._upkeep is not None:
            self._upkeep.cancel()
        self._upkeep = hub.call_repeatedly(UPKEEP, c.pool.maintain_pool)
        hub.call_soon(self._running.release)

    def info(self, c: Any) -> dict[str, Any]:
        """What ``inspect stats`` shows of the broker. Celery's own shows the query of the URL as it is."""
        if not c.connection:
            return {}
        shown = dict(c.connection.info())
        shown.pop("password", None)
        shown["hostname"] = masked(str(shown.get("hostname") or ""))
        shown["alternates"] = [masked(str(url)) for url in shown.get("alternates") or ()]
        return {"broker": shown}

    def close(self, c: Any) -> None:
        """The worker ends: the last look for what has not begun, after Celery has emptied its waiting lists."""
        give_back(c)

    def stop(self, c: Any) -> None:
        """The consumer stops, for good or to connect again."""
        self._stop_watch()
        self._running.put_back()
        request.forget(c.app, c.hostname)

    terminate = stop

    def shutdown(self, c: Any) -> None:
        """The pool has ended, the channel is about to be closed: acknowledge what ended meanwhile.

        Without an event loop Celery keeps these for its loop, which has ended; Celery 5.4 never looks again.
        """
        c.perform_pending_operations()
        answers, self._answers = self._answers, None
        if answers is not None:
            answers.stop()

    def _stop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()


def give_back(c: Any) -> int:
    """Consume no more, and give back what has not begun; returns how many tasks those were. From any thread."""
    # First, or they would come straight back.
    consumer = c.task_consumer
    if consumer is not None:
        ignore_errors(c, consumer.cancel)
    stop = _keeps_from_beginning(c.pool)
    number = sum(one.give_back(stop) for one in request.waiting(c.app, c.hostname))
    if number:
        logger.info("gave back %d reserved task(s) that had not begun", number)
    return number


def _keeps_from_beginning(pool: Any) -> type[BaseException] | None:
    """What to raise when a run is announced so that it does not begin; ``None`` where it has begun by then."""
    if getattr(pool, "is_green", False):
        from greenlet import GreenletExit

        exit: type[BaseException] = GreenletExit
        return exit
    if any(kind.__module__ in _THREADED for kind in type(pool).__mro__):
        refused: type[BaseException] = TaskRevokedError
        return refused
    return None


def pool_room(c: Any) -> int:
    """How many more tasks the pool could run now: what it may grow to, less what Celery has reserved.

    Tasks that run count as reserved, also those that were acknowledged when they began. Only Celery before 5.7 takes
    those that run while it connects again out of the reserved ones.
    """
    scaler = getattr(c.controller, "autoscaler", None)
    size = c.pool.num_processes if scaler is None else scaler.max_concurrency
    return int(size) - max(len(state.reserved_requests), len(state.active_requests))


def rate_limited(c: Any) -> int:
    """How many tasks wait in this worker for their ``rate_limit``."""
    # A copy: remote control may change a limit in another thread.
    return sum(len(bucket.contents) for bucket in list(c.task_buckets.values()) if bucket)


def _tell_of_early_acks(app: Any) -> None:
    if app.conf.task_acks_late or all(task.acks_late for name, task in app.tasks.items() if _is_own(name)):
        return
    # A warning: at the level of information most workers would never show what they lose.
    logger.warning(
        "task_acks_late is off: a task is acknowledged when it starts, so what runs when this worker dies is lost, "
        "and kept as a dead letter. "
        "To have it run again, set task_acks_late = True and task_reject_on_worker_lost = True"
    )


def _is_own(name: str) -> bool:
    return not name.startswith("celery.")
