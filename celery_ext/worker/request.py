"""Requests that tell the transport what Celery can't: that a run was lost, and that one never began.

A lost pool process, a hard time limit and a task's own ``Reject(requeue=True)`` all reach a transport as the same
``reject(requeue=True)``. The class that a worker makes of each message is Celery's documented extension point
(``Task.Request``); here it knows why a request is rejected, and whether it has been handed to the pool.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionWithTraceback
from celery import VERSION
from celery.exceptions import Reject, TimeLimitExceeded, WorkerLostError
from celery.utils.imports import symbol_by_name
from celery.worker import state

from celery_ext.throttled import Throttled
from kombu_taskgate.transport.message import ETA_HEADER, Message

if TYPE_CHECKING:
    from celery.worker.request import Request as _Base
else:
    _Base = object

logger = logging.getLogger("celery_ext.worker")

#: What a request fails with when the process that ran it is gone (see ``Request.on_failure``; the last two are told
#: by newer versions of billiard).
_DEATHS = (WorkerLostError, SystemExit, KeyboardInterrupt)

#: From this version on Celery itself stores a failure for a task that rejects its message.
REJECT_IS_TOLD = (5, 7)

#: The strategy that asks :meth:`TaskgateRequest.revoked` before it hands anything to the pool.
_STRATEGY = "celery.worker.strategy:default"

#: Guards who has each request: the pool, or nobody yet. Held for a few instructions only.
_lock = threading.Lock()
#: Requests that have not begun, as far as is known. Strong references: Celery drops its own when it closes.
_waiting: set[TaskgateRequest] = set()


class TaskgateRequest(_Base):
    """Mixed into the request class of each task; see :func:`request_class`."""

    acknowledged: bool  # the Request's
    id: str
    name: str
    _request_dict: dict[str, Any]
    _loss: str | None = None
    #: A run has failed, and Celery tells its caller, before or after it settles the message.
    _told = False
    _timed_out = False
    #: Celery is about to tell that its process died, and what settles the message before it has.
    _tells = False
    _held: Callable[[], None] | None = None
    #: The pool has been asked to run it.
    _handed = False
    #: It has begun to run.
    _begun = False
    _given_back = False
    #: :meth:`on_accepted` is being called, where a message that is not to be acknowledged late is.
    _accepting = False
    #: It was acknowledged when it began, and its execution is kept until it ends.
    _kept = False
    #: What the task has raised to run later.
    _throttled: Throttled | None = None
    #: What keeps a run that was given back from beginning.
    _stop: type[BaseException] | None = None

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        if isinstance(message, Message):
            # For the task to see. The worker has looked by now, and would have put it on its own timer.
            self._request_dict["eta"] = message.headers.get(ETA_HEADER, self._request_dict.get("eta"))
        # Another strategy may start what it has in ways that are not known here.
        if isinstance(message, Message) and self.task.Strategy == _STRATEGY:
            _waiting.add(self)

    # -- losses ------------------------------------------------------------------------------------

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """Celery calls it when a run has failed, also when its process died."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        self._throttled = error if isinstance(error, Throttled) else None
        # What is rejected for good in there has been told by Celery, or will be in a moment.
        self._told = not isinstance(error, Reject) or VERSION >= REJECT_IS_TOLD
        with (
            self._ending(failed=True),
            self._losing(error, isinstance(error, TimeLimitExceeded)),
            self._telling_first(error),
        ):
            return super().on_failure(exc_info, *args, **kwargs)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """Celery calls it when a time limit has passed; the process is killed when it was the hard one."""
        # What follows on a soft limit is the task's own matter.
        ending = nullcontext() if soft else self._ending(failed=True)
        with ending, self._losing(None if soft else TimeLimitExceeded(timeout), not soft):
            return super().on_timeout(soft, timeout)

    @contextmanager
    def _telling_first(self, error: Any) -> Iterator[None]:
        """Celery settles a message whose process died before it tells of that; should it fail to, nobody would know."""
        self._tells = isinstance(error, _DEATHS) and isinstance(self.message, Message)
        try:
            yield
        except BaseException:
            if self._held is not None:
                self._told = False
                self._held = partial(self.reject, requeue=False)
            raise
        finally:
            self._tells = False
            held, self._held = self._held, None
            if held is not None:
                self.acknowledged = False
                held()

    def _hold(self, settle: Callable[[], None]) -> bool:
        """Whether this settlement waits until Celery has told."""
        if not self._tells or self.acknowledged:
            return False
        self._held, self.acknowledged = settle, True
        return True

    @contextmanager
    def _losing(self, error: Any, timed_out: bool) -> Iterator[None]:
        """What is requeued in here was lost, unless the worker itself has ended the run."""
        if not (self._already_cancelled or self._already_revoked or _terminating()):
            if timed_out:
                self._loss, self._timed_out = f"hard time limit exceeded: {error}", True
            elif isinstance(error, _DEATHS):
                self._loss = str(error) or type(error).__name__
        try:
            yield
        finally:
            self._loss, self._timed_out, self._told = None, False, False

    # -- early acknowledgements ----------------------------------------------------------------------

    def on_success(self, *args: Any, **kwargs: Any) -> Any:
        """Celery calls it when the pool has run the task, whatever has become of that."""
        with self._ending():
            return super().on_success(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Celery makes a class of each task's for speed, with an ``on_success`` that does not call this one's."""
        super().__init_subclass__(**kwargs)
        if "on_success" in vars(cls):
            cls.on_success = _and_end(vars(cls)["on_success"])  # type: ignore[method-assign]  # that is the purpose

    @contextmanager
    def _ending(self, *, failed: bool = False) -> Iterator[None]:
        """When this is over, the run is; a message that was acknowledged when it began has served.

        Not if what raises here was to tell that the run has failed: then somebody has to answer for it.
        """
        try:
            yield
        except BaseException as error:
            if failed and self._kept:
                self._kept = False
                self.message.interrupted(f"its failure could not be told: {error!r}")
            raise
        finally:
            self._end()

    def _end(self) -> None:
        if not self._kept:
            return
        self._kept = False
        if self._already_cancelled and not self._already_revoked:
            # Celery leaves such a message to be delivered again, which this one never is.
            self.message.interrupted("the worker ended its run")
        else:
            self.message.done()

    def acknowledge(self) -> None:
        """Acknowledge the message; one whose run begins is kept until that has ended."""
        _waiting.discard(self)
        if self._kept:
            self._end()
        elif self._accepting and not self.acknowledged and isinstance(self.message, Message):
            self.message.begin()
            self.acknowledged = self._kept = True
        elif not self._hold(super().acknowledge):
            super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        """Reject the message; one that goes back because its run was lost says so."""
        _waiting.discard(self)
        if self._throttled is not None and isinstance(self.message, Message):
            self._throttle(self._throttled)
            return
        self._end()
        # Celery 5.4 rejects for good here what newer versions put back.
        requeue = requeue or self._timed_out
        if not requeue and self._hold(partial(self.reject, requeue=False)):
            return
        if isinstance(self.message, Message):
            if requeue and self._loss is not None:
                self.message.lost = self._loss
            # Celery tells of a hard time limit also when it puts the task back.
            self.message.told = self._timed_out if requeue else self._told
        super().reject(requeue=requeue)

    def _throttle(self, error: Throttled) -> None:
        """Put the message back for later; also one that was acknowledged when it began: its row is still there."""
        if self.acknowledged and not self._kept:
            return
        try:
            if self.task.track_started and self.store_errors:
                # The result says STARTED, which will not be true any more. Of an execution that waits already a run has
                # nothing to say.
                self.task.backend.mark_as_retry(self.id, error, request=self._context)
        finally:
            self._kept = False
            self.message.throttle(error.retry_after, str(error))
            self.acknowledged = True
        self.send_event("task-rejected", requeue=True)

    # -- what a pool can't do ------------------------------------------------------------------------

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Celery calls it for ``revoke(terminate=True)``."""
        with self._going_on_if_it_must("terminated"):
            try:
                super().terminate(pool, signal)
            except BaseException as ended:
                # It was to end as soon as it begins, and so has ended the greenlet that is in here: before Celery could
                # tell anybody, and settle the message.
                if _is_greenlet_exit(ended) and not self._already_revoked:
                    self._announce_revoked("terminated", True, signal, False)
                raise

    def cancel(self, pool: Any, *args: Any, **kwargs: Any) -> None:
        """Celery calls it when its connection is lost and ``worker_cancel_long_running_tasks_on_connection_loss``."""
        with self._going_on_if_it_must("canceled"):
            super().cancel(pool, *args, **kwargs)

    @contextmanager
    def _going_on_if_it_must(self, what: str) -> Iterator[None]:
        """Threads can't be ended, and their pool says so with an exception: the others still are to be dealt with."""
        try:
            yield
        # What threads have not begun has no method for it either.
        except (NotImplementedError, AttributeError) as error:
            logger.warning("task %s[%s] can't be %s and goes on: %s", self.name, self.id, what, error)

    # -- giving back -------------------------------------------------------------------------------

    def revoked(self) -> bool:
        """Whether it must not run. Celery asks when the message comes, and again right before the pool gets it."""
        # It is reserved from the moment when it is on its way to the pool, and not before.
        if self in state.reserved_requests:
            with _lock:
                if self._given_back:
                    return True
                self._handed = True
        answer: bool = super().revoked()
        return answer

    def on_accepted(self, pid: int, time_accepted: float) -> Any:
        """Celery calls it when a run begins: before the task in pools of threads, after the fact in others.

        It raises what :meth:`give_back` was told to, when that was quicker; the task is not called then.
        """
        with _lock:
            if self._given_back and self._stop is not None:
                raise self._stop
            self._begun = True
        _waiting.discard(self)
        self._accepting = not self.task.acks_late
        try:
            return super().on_accepted(pid, time_accepted)
        finally:
            self._accepting = False

    def give_back(self, stop: type[BaseException] | None) -> bool:
        """Give the message back as never delivered, if the task has certainly not begun and can be kept from it.

        Args:
            stop: what to raise in :meth:`on_accepted` to keep the task from being called; ``None`` where that comes
                too late, so that what the pool has can't be stopped.

        Returns:
            whether it was given back.
        """
        with _lock:
            if self._given_back or self._begun or self.acknowledged or (self._handed and stop is None):
                return False
            self._given_back, self._stop = True, stop
            # Whoever of Celery's parts still has it settles it no more.
            self.acknowledged = True
        _waiting.discard(self)
        self.message.give_back()
        return True


def _and_end(on_success: Any) -> Any:
    @wraps(on_success)
    def ends(self: TaskgateRequest, *args: Any, **kwargs: Any) -> Any:
        with self._ending():
            return on_success(self, *args, **kwargs)

    return ends


def _is_greenlet_exit(error: BaseException) -> bool:
    """Whether a greenlet was killed; without importing greenlet, which only some pools need."""
    greenlet = sys.modules.get("greenlet")
    return greenlet is not None and isinstance(error, greenlet.GreenletExit)


def _terminating() -> bool:
    """Whether the worker ends without waiting for what runs. The flag is an exit code, so 0 is a yes."""
    return state.should_terminate is not None and state.should_terminate is not False


def waiting(app: Any, hostname: str) -> list[TaskgateRequest]:
    """Requests of a worker that have not begun, as far as is known."""
    return [request for request in tuple(_waiting) if request.app is app and request.hostname == hostname]


def forget(app: Any, hostname: str) -> None:
    """Let go of them: their connection is lost, and Celery has dropped them.

    The transport gives back what nobody has any more, and it can't see that as long as it is kept here.
    """
    dropped = waiting(app, hostname)
    _waiting.difference_update(dropped)
    for one in dropped:
        # Celery before 5.7 means to drop it here too, but looks for it under a wrong key.
        if state.requests.get(one.id) is one:
            del state.requests[one.id]


@cache
def _mixed(base: Any) -> type[Any]:
    return type(base.__name__, (TaskgateRequest, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def request_class(named: Any) -> type[Any]:
    """The class for a task's requests: the one that the task names, a class or its path, with ours mixed in."""
    base: Any = symbol_by_name(named)
    return base if issubclass(base, TaskgateRequest) else _mixed(base)


def mix_in(tasks: Mapping[str, Any]) -> bool:
    """Give all tasks their request class; returns whether any did not have it yet."""
    changed = False
    for task in tasks.values():
        wanted = request_class(task.Request)
        if task.Request is not wanted:
            task.Request = wanted
            changed = True
    return changed
