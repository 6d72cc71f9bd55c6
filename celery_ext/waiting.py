"""Waiting for results: woken when there is one, on any number of threads or greenlets, over one connection.

Nobody looks in the background. Of those who wait, one at a time looks for the results of all, when it has been told
of some or thinks it is time, and delivers what it finds; the others sleep until it has. So a thread that waits costs
nothing but itself.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from celery.backends.asynchronous import BaseResultConsumer, Drainer
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import ResultSet

from kombu_taskgate.core.errors import StoreUnavailable
from kombu_taskgate.core.results import Finality, Result, Results
from kombu_taskgate.core.watch import LOOK_ON, Watch

logger = logging.getLogger("celery_ext.backend")

#: Seconds between two looks of those who are told: while it is likely that there is something, and in case that a word
#: was lost.
LOOK_EVERY, LOOK_ANYWAY = 0.005, 5.0
#: Shortest and longest pause of those who are not told: where a look is a question to the server, and where it is
#: first found out, for next to nothing, whether anybody has written at all.
ASK_MIN, ASK_MAX = 0.002, 0.1
PROBE_MIN, PROBE_MAX = 0.001, 0.02
#: By what pauses grow.
GROWTH = 1.3
#: Longest pause while the database does not answer.
UNAVAILABLE = 2.0
#: Seconds between two calls of ``on_interval``.
TICK = 1.0
#: Seconds after which a process in which nobody waits any more stops listening.
IDLE = 30.0
#: Before everything that is stored.
_NOTHING = (0, 0)
_consumers: weakref.WeakSet[ResultConsumer] = weakref.WeakSet()

OnMessage = Callable[[Any], object]


class _Listener:
    """One of those who want to hear every word about some tasks."""

    def __init__(self, ids: set[str], on_message: OnMessage) -> None:
        self.ids = ids
        self.error: Exception | None = None
        self._on_message = on_message

    def tell(self, meta: Any) -> None:
        """Whoever looks tells everybody; what a callback raises is the business of whoever has given it."""
        if self.error is None:
            try:
                self._on_message(meta)
            except Exception as error:  # noqa: BLE001  # raised again in its own thread
                self.error = error


class _Waiting(Drainer):
    """What Celery calls the drainer: here whoever waits does it."""

    def drain_events_until(
        self, p: Any, timeout: float | None = None, interval: float = 1, on_interval: Any = None, wait: Any = None
    ) -> Iterator[None]:
        yield from self.result_consumer.until(p, timeout=timeout, on_interval=on_interval)


class ResultConsumer(BaseResultConsumer):
    """Delivers results to those who wait for them in this process."""

    drainer: Any
    buckets: Any

    def __init__(self, backend: Any, *args: Any) -> None:
        super().__init__(backend, *args)
        self.drainer = _Waiting(self)
        self._reset()
        _consumers.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._delivering = threading.RLock()
        #: Task id, as the tables have it here and below -> when, and as which version, the newest word about it that
        #: was delivered was stored.
        self._watched: dict[str, tuple[int, int]] = {}
        self._new: set[str] = set()
        self._told: set[str] = set()
        self._all = False
        #: Task id -> why its result can't be read.
        self._broken: dict[str, Exception] = {}
        self._count = 0
        self._looking = False
        self._due = 0.0
        self._pause = 0.0
        self._look_on_until = 0.0
        self._mark: object | None = None
        self._failing = False
        self._watch: Watch | None = None
        self._waiters = 0
        self._idle_since = 0.0
        self._timer: threading.Timer | None = None
        self._listeners: list[_Listener] = []
        #: Task id -> the result objects that somebody waits for now. Celery knows one of them, before 5.7, and forgets
        #: it when any other result object of the same task goes.
        self._waited: dict[str, list[Any]] = {}
        #: Task ids that Celery has no interest in any more, but of which somebody waits for a result.
        self._leaving: set[str] = set()

    def after_fork(self) -> None:
        """In the child: those who wait are threads of the parent."""
        self._reset()
        self.buckets = weakref.WeakKeyDictionary()

    # -- what Celery's backend mixin calls -----------------------------------------------------------

    def start(self, initial_task_id: str, **kwargs: Any) -> None:
        """Nothing to do before somebody waits."""

    def stop(self) -> None:
        """Listen no more."""
        with self._changed:
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def consume_from(self, task_id: str) -> None:
        """Somebody is interested in a task."""
        key = self.backend.key_of(task_id)
        with self._changed:
            if key not in self._watched:
                self._watched[key] = _NOTHING
                self._new.add(key)
                self._changed.notify_all()

    def cancel_for(self, task_id: str) -> None:
        """Nobody is any more. Called when a result object is destroyed, so in the middle of anything: no lock."""
        key = self.backend.key_of(task_id)
        if key in self._waited:
            self._leaving.add(key)
        else:
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._watched.pop(key, None)
        self._new.discard(key)
        self._broken.pop(key, None)

    def drain_events(self, timeout: float | None = None) -> None:
        """Look, or wait until somebody has."""
        self._step(self._count, time.monotonic() + (TICK if timeout is None else timeout))

    def _wait_for_pending(
        self,
        result: Any,
        timeout: float | None = None,
        on_interval: Any = None,
        on_message: Any = None,
        **kwargs: Any,
    ) -> Iterator[None]:
        leaves = [(self.backend.key_of(one.id), one) for one in _leaves(result)]
        ids = {key for key, _ in leaves}
        with self._waited_for(leaves), self._listening(ids, on_message) as listener:
            self._watch_again(leaves)
            yield from self.until(result.on_ready, timeout=timeout, on_interval=on_interval, ids=ids, listener=listener)

    @contextmanager
    def _waited_for(self, leaves: list[tuple[str, Any]]) -> Iterator[None]:
        """Deliver to these result objects while the block runs, whatever becomes of others of the same tasks."""
        with self._changed:
            for key, one in leaves:
                self._waited.setdefault(key, []).append(one)
        try:
            yield
        finally:
            with self._changed:
                for key, one in leaves:
                    # Not by their equality: all results of a task are equal.
                    others = [other for other in self._waited.get(key, ()) if other is not one]
                    if others:
                        self._waited[key] = others
                        continue
                    self._waited.pop(key, None)
                    if key in self._leaving:
                        self._leaving.discard(key)
                        self._drop(key)

    def _watch_again(self, leaves: list[tuple[str, Any]]) -> None:
        """What Celery takes to be watched may not be: after a fork, or when its result could not be read."""
        for key, one in leaves:
            if one._cache is None:
                if key in self._broken:
                    self._drop(key)
                self.consume_from(one.id)

    # -- waiting -------------------------------------------------------------------------------------

    def until(
        self,
        ready: Any,
        *,
        timeout: float | None = None,
        on_interval: Any = None,
        ids: Collection[str] = (),
        listener: _Listener | None = None,
    ) -> Iterator[None]:
        """Wait until a promise is fulfilled; yields now and then, at least whenever something has been delivered.

        Args:
            ready: the promise.
            timeout: longest wait in seconds.
            on_interval: called about every second, and when the promise has been fulfilled while it was waited for.
            ids: tasks that it depends on: an unreadable result of one of them raises here.
            listener: what its callback raises is raised here.

        Raises:
            celery.exceptions.TimeoutError: it has taken longer.
        """
        now = time.monotonic()
        deadline = None if timeout is None else now + timeout
        tick = now + TICK
        with self._waiting():
            while True:
                seen = self._count
                if self._over(ready, ids, listener):
                    return
                if deadline is not None and time.monotonic() >= deadline:
                    self._last_look(ids)
                    if self._over(ready, ids, listener):
                        return
                    raise CeleryTimeoutError("The operation timed out.")
                self._step(seen, tick if deadline is None else min(tick, deadline))
                # Also when what was waited for has come: Celery looks there whether a parent has failed, whose error
                # goes before the result's own.
                if ready.ready or time.monotonic() >= tick:
                    tick = time.monotonic() + TICK
                    if on_interval:
                        on_interval()
                yield

    def _over(self, ready: Any, ids: Collection[str], listener: _Listener | None) -> bool:
        if listener is not None and listener.error is not None:
            raise listener.error
        if ready.ready:
            return True
        for id in ids if self._broken else ():
            error = self._broken.get(id)
            if error is not None:
                raise error
        return False

    def _last_look(self, ids: Collection[str]) -> None:
        try:
            self._look(ids)
        except StoreUnavailable as error:
            raise CeleryTimeoutError(f"The operation timed out, and the database can't be asked: {error}") from error

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._changed:
            self._waiters += 1
        try:
            # Where the database is away, whoever looks tries again.
            if self._watch is None:
                with suppress(StoreUnavailable):
                    self._begin_to_listen()
            yield
        finally:
            with self._changed:
                self._waiters -= 1
                self._idle_since = time.monotonic()
                if not self._waiters and self._timer is None and self._watch is not None:
                    self._set_timer(IDLE)

    def _begin_to_listen(self) -> None:
        watch = self._results.watch(self._wake)
        with self._changed:
            if self._watch is None:
                self._watch = watch
                return
        watch.close()

    def _set_timer(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._rest)
        timer.daemon = True
        timer.name = "taskgate-results-rest"
        try:
            timer.start()
        except RuntimeError:
            return  # the interpreter is ending
        self._timer = timer

    def _rest(self) -> None:
        """Stop listening if nobody has waited for a while."""
        with self._changed:
            self._timer = None
            left = self._idle_since + IDLE - time.monotonic()
            if self._waiters:
                return
            if left > 0:
                self._set_timer(left)
                return
        self.stop()

    @contextmanager
    def _listening(self, ids: set[str], on_message: OnMessage | None) -> Iterator[_Listener | None]:
        if on_message is None:
            yield None
            return
        listener = _Listener(ids, on_message)
        with self._changed:
            self._listeners.append(listener)
        try:
            yield listener
        finally:
            with self._changed:
                self._listeners.remove(listener)

    # -- looking -------------------------------------------------------------------------------------

    def _wake(self, ids: Collection[str] | None) -> None:
        """The store tells of results; in another thread."""
        with self._changed:
            if ids is None:
                self._all = True
                self._look_on_until = time.monotonic() + LOOK_ON
            else:
                mine = [id for id in ids if id in self._watched]
                if not mine:
                    return
                self._told.update(mine)
            self._changed.notify_all()

    def _step(self, seen: int, until: float) -> None:
        """Look if it is time and nobody else does; else wait, at most until then or until something was delivered."""
        with self._changed:
            if self._count != seen:
                return
            now = time.monotonic()
            urgent = bool(self._new or self._told or self._all)
            if self._looking or not (urgent or now >= self._due):
                end = until if self._looking else min(until, self._due)
                self._changed.wait(max(0.0, end - now))
                return
            self._looking = True
            if self._new:
                self._look_on_until = now + LOOK_ON
                self._pause = 0.0
            everything = self._all or now >= self._due
            ids = list(self._watched) if everything else [*self._new, *self._told]
            self._new.clear()
            self._told.clear()
            self._all = False
        try:
            self._look_together(ids, sure=urgent, everything=everything)
        finally:
            with self._changed:
                self._looking = False
                self._count += 1
                self._changed.notify_all()

    def _look_together(self, ids: list[str], *, sure: bool, everything: bool) -> None:
        began = time.monotonic()
        live, mark = False, None
        try:
            watch = self._watch
            if watch is None:
                self._begin_to_listen()
                watch = self._watch
            live = watch is not None and watch.live
            mark = None if live else self._results.change_mark()
            # Where nobody has written since the last look there is nothing to find.
            found = bool(ids) and (sure or mark is None or mark != self._mark) and self._look(ids)
        except StoreUnavailable as error:
            self._unavailable(error, ids)
            return
        self._failing = False
        now = time.monotonic()
        if live:
            self._pause = LOOK_EVERY if now < self._look_on_until else LOOK_ANYWAY
        else:
            shortest, longest = (ASK_MIN, ASK_MAX) if mark is None else (PROBE_MIN, PROBE_MAX)
            self._pause = shortest if found or not self._pause else min(longest, self._pause * GROWTH)
        # Whoever waits for thousands does not ask the server for them all the time.
        due = now + max(self._pause, 4 * (now - began))
        if everything:
            self._due, self._mark = due, mark
        else:
            # It says nothing of the others: they are looked for when they would have been.
            self._due = min(self._due, due)

    def _unavailable(self, error: StoreUnavailable, ids: list[str]) -> None:
        if not self._failing:
            self._failing = True
            logger.warning("waiting for results goes on, but the database can't be asked now: %s", error)
        self._pause = min(UNAVAILABLE, max(0.05, self._pause * 2))
        self._due = time.monotonic() + self._pause
        self._mark = None

    @property
    def _results(self) -> Results:
        results: Results = self.backend.broker.results
        return results

    def _look(self, ids: Collection[str]) -> bool:
        """Fetch results and deliver them; returns whether there was anything new."""
        if not ids:
            return False
        # Only those who want to hear every word are interested in results that are not final.
        found = self._results.get(ids, ended=not self._listeners)
        delivered = False
        with self._delivering:
            for result in found.values():
                delivered = self._deliver(result) or delivered
        if delivered:
            with self._changed:
                self._count += 1
                self._changed.notify_all()
        return delivered

    def _deliver(self, result: Result) -> bool:
        task_id = result.task_id
        known = self._watched.get(task_id)
        # The version alone begins anew when the result was deleted meanwhile.
        word = (result.stored_at, result.version)
        if known is None or known >= word:
            return False
        self._watched[task_id] = word
        try:
            meta = self.backend.meta_of(result)
        except Exception as error:  # noqa: BLE001  # whoever waits for it gets it
            self._broken[task_id] = error
            return True
        with self._changed:
            listeners = [listener for listener in self._listeners if task_id in listener.ids]
        for listener in listeners:
            listener.tell(meta)
        try:
            self.on_state_change(meta, None)
        except Exception:
            # A callback of then(): whoever looks has nothing to do with it.
            logger.exception("a callback for the result of task %s failed", task_id)
        if result.finality is not Finality.OPEN:
            self._deliver_last(task_id, meta)
        return True

    def _deliver_last(self, key: str, meta: Any) -> None:
        with self._changed:
            # Together: who begins to wait from now on has it looked for anew.
            waited = list(self._waited.get(key, ()))
            self._watched.pop(key, None)
        for one in waited:
            if one._cache is None:
                try:
                    one._maybe_set_cache(meta)
                except Exception:
                    logger.exception("a callback for the result of task %s failed", key)


def _leaves(result: Any) -> Iterator[Any]:
    """The results of single tasks that a result, or a set of them, is of."""
    if isinstance(result, ResultSet):
        for one in result.results:
            yield from _leaves(one)
    else:
        yield result


def _after_fork() -> None:
    for consumer in list(_consumers):
        consumer.after_fork()


os.register_at_fork(after_in_child=_after_fork)
