"""SinglePod: a job that runs again and again, in one process at a time.

The guarantee: a process begins a run only while it trusts its lock, and tells the run to stop before the lock can be
another's; so no two processes run the job at once, as long as it ends when it is told to. The guarantee it does not
give: a job that does not look at ``stop``, or whose process is frozen, goes on beside the next one.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from .clock import local_time
from .errors import ConfigError, NotLeader
from .locks import Lock, RedisLock, SqlLock, TermLock
from .settings import LONGEST, is_number
from .terms import check

__all__ = ["Lock", "RedisLock", "SinglePod", "SinglePodConfig", "SqlLock", "TermLock"]

logger = logging.getLogger("kombu_taskgate.singlepod")

#: Part of the ttl for which the lock is trusted after the start of the last renewal that succeeded.
TRUST = 0.8
#: A renewal may come later than planned by this factor.
SLACK = 1.2
#: Longest time in seconds between two looks at the clock: a timer does not count the time of a suspended machine.
LONGEST_SLEEP = 1.0

_pods: weakref.WeakSet[SinglePod] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class SinglePodConfig:
    """Times of a SinglePod, in seconds.

    Args:
        ttl: the lock is over when it was not renewed for this long.
        renew_every: between two renewals; a third of the ttl when not given.
        pause: between the end of a run and the next one.
        standby: between two attempts to get the lock, with jitter; a third of the ttl when not given.
        max_run: a run that takes longer is told to stop; ``None``: as long as it likes.
        stop_within: how long :meth:`SinglePod.stop` waits for a run to end.

    Raises:
        ConfigError: the times do not fit.
    """

    ttl: float = 15.0
    renew_every: float | None = None
    pause: float = 1.0
    standby: float | None = None
    max_run: float | None = None
    stop_within: float = 30.0

    def __post_init__(self) -> None:
        for name in ("ttl", "renew_every", "standby", "max_run"):
            value = getattr(self, name)
            if value is None and name != "ttl":
                continue
            if not (is_number(value) and 0 < value <= LONGEST):
                raise ConfigError(f"{name} must be more than 0 seconds and at most 100 years, not {value!r}")
        for name in ("pause", "stop_within"):
            value = getattr(self, name)
            if not (is_number(value) and 0 <= value <= LONGEST):
                raise ConfigError(f"{name} must be 0 seconds to 100 years, not {value!r}")
        if not self.trusted > self.between_renewals * SLACK:
            raise ConfigError(
                f"renew_every {self.between_renewals:g} s is too long for a ttl of {self.ttl:g} s: "
                f"it must be less than {self.trusted / SLACK:g} s, otherwise a process that is well loses its lock"
            )

    @property
    def between_renewals(self) -> float:
        """``renew_every``, or what it is when not given."""
        return self.ttl / 3 if self.renew_every is None else self.renew_every

    @property
    def between_attempts(self) -> float:
        """``standby``, or what it is when not given."""
        return self.ttl / 3 if self.standby is None else self.standby

    @property
    def trusted(self) -> float:
        """For how long the lock is trusted after a renewal."""
        return self.ttl * TRUST


class _Life:
    """What the threads of one start are told."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        #: Something has changed that the supervising thread should look at.
        self.wake = threading.Event()
        self.held: _Held | None = None
        self.runner: threading.Thread | None = None


class _Held:
    """One leadership: renews the lock in a thread of its own."""

    def __init__(self, lock: Lock, id: str, config: SinglePodConfig, since: float, wake: Callable[[], None]) -> None:
        self._lock = lock
        self._id = id
        self._config = config
        self._wake = wake
        self._next = since + config.between_renewals
        self._ended = threading.Event()
        self._lost = False
        #: By the local clock.
        self.until = since + config.trusted
        self._thread = threading.Thread(target=self._run, name=f"taskgate-lock-{id}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether the lock can't be trusted any more. Once it is, it stays so."""
        if local_time() >= self.until:
            self._lost = True
        return self._lost

    def end(self) -> None:
        """Renew no more. A renewal that gets no answer is left behind."""
        self._ended.set()
        self._thread.join(max(0.0, min(LONGEST_SLEEP, self.until - local_time())))

    def _run(self) -> None:
        failing = False
        while not self._ended.wait(max(0.0, self._next - local_time())):
            attempt = local_time()
            try:
                kept = self._lock.renew(self._id, self._config.ttl)
            except BaseException as error:  # noqa: BLE001  # a lock of the user's may raise anything
                if not failing:
                    logger.warning("lock %s can't be renewed now, which is tried again: %s", self._id, error)
                failing = True
                self._next = local_time() + min(1.0, self._config.between_renewals / 4)
                continue
            if failing:
                logger.warning("lock %s is renewed again", self._id)
                failing = False
            if not kept or self.lost:
                self._lost = True
                self._wake()
                return
            self.until, self._next = attempt + self._config.trusted, attempt + self._config.between_renewals


class SinglePod:
    """Runs a job again and again, in the one process that has the lock.

    Args:
        id: names the lock; 1 to 255 characters.
        lock: :class:`SqlLock`, :class:`RedisLock`, or anything else with these methods.
        run: the job. Called with an event that is set when it has to end: because of :meth:`stop`, because the lock was
            lost, or because it has taken longer than ``max_run``.
        cleanup: called after the last run of each leadership, before the lock is given back.
        config: times.
        on_error: called with what ``run``, ``cleanup`` and ``lock`` raise, with a ``NotLeader`` when the lock is lost,
            and with a ``TimeoutError`` when a run takes too long. All of that is logged as well.

    Raises:
        ConfigError: the id is out of bounds.
    """

    def __init__(
        self,
        id: str,
        lock: Lock,
        run: Callable[[threading.Event], object],
        cleanup: Callable[[], object] | None = None,
        config: SinglePodConfig | None = None,
        *,
        on_error: Callable[[BaseException], object] | None = None,
    ) -> None:
        self.config = SinglePodConfig() if config is None else config
        check(id, "holder", self.config.ttl)
        self.id = id
        self._lock = lock
        self._job = run
        self._cleanup = cleanup
        self._on_error = on_error
        self._reset()
        _pods.add(self)

    def _reset(self) -> None:
        self._guard = threading.Lock()
        self._life = _Life()
        self._thread: threading.Thread | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this process has the lock and can trust it now."""
        held = self._life.held
        return held is not None and not held.lost

    def start(self) -> None:
        """Compete for the lock. Idempotent; does not wait, and does not raise when the store is away."""
        with self._guard:
            # One whose last run has not ended yet excludes the next by its lock.
            if self._thread is None or self._life.stopping.is_set():
                self._life = _Life()
                self._thread = threading.Thread(
                    target=self._compete, args=(self._life,), name=f"taskgate-pod-{self.id}", daemon=True
                )
                self._thread.start()

    def stop(self) -> bool:
        """Have the run end, and give the lock back; returns whether that came about in ``stop_within`` seconds.

        If not, it still happens when the run ends; until then the lock is renewed, so that nobody else begins.
        Idempotent. Called by the run itself it does not wait.
        """
        with self._guard:
            thread = self._thread
            self._life.stopping.set()
            self._life.wake.set()
            own = threading.current_thread() in {thread, self._life.runner}
        if thread is None or own:
            return thread is None
        thread.join(self.config.stop_within)
        if thread.is_alive():
            logger.warning("the run of %s has not ended within %g s", self.id, self.config.stop_within)
            return False
        with self._guard:
            if self._thread is thread:
                self._thread = None
        return True

    def _compete(self, life: _Life) -> None:
        failing = False
        while not life.stopping.is_set():
            since = local_time()
            try:
                won = self._lock.lock(self.id, self.config.ttl)
                failing = False
            except BaseException as error:  # noqa: BLE001  # as above
                if not failing:
                    self._report(error, "its lock can't be asked for now, which is tried again")
                won, failing = False, True
            if won:
                self._lead(life, since)
            else:
                pause = self.config.between_attempts
                life.stopping.wait(random.uniform(pause / 2, pause))

    def _lead(self, life: _Life, since: float) -> None:
        life.held = held = _Held(self._lock, self.id, self.config, since, life.wake.set)
        logger.info("this process has lock %s", self.id)
        while not life.stopping.is_set() and not held.lost:
            self._run_once(life, held)
            self._sleep(life, held, local_time() + self.config.pause)
        if self._cleanup is not None:
            try:
                self._cleanup()
            except BaseException as error:  # noqa: BLE001  # as above
                self._report(error, "the cleanup failed")
        held.end()
        life.held = None
        try:
            # Harmless when it was lost.
            self._lock.unlock(self.id)
        except BaseException as error:  # noqa: BLE001  # as above
            self._report(error, "its lock could not be given back, and runs out by itself")
        logger.info("this process has lock %s no more", self.id)

    def _run_once(self, life: _Life, held: _Held) -> None:
        stop, done = threading.Event(), threading.Event()

        def run() -> None:
            try:
                self._job(stop)
            except BaseException as error:  # noqa: BLE001  # it ends this run, and nothing else
                self._report(error, "a run failed")
            done.set()
            life.wake.set()

        limit = None if self.config.max_run is None else local_time() + self.config.max_run
        life.runner = threading.Thread(target=run, name=f"taskgate-run-{self.id}", daemon=True)
        try:
            life.runner.start()
        except RuntimeError as error:
            # No more threads are to be had: the lock is renewed by one that runs, so it would be kept for nothing.
            self._report(error, "a run could not be started, which is tried again")
            return
        told_lost = False
        while not done.is_set():
            now = local_time()
            if life.stopping.is_set():
                stop.set()
            if held.lost and not told_lost:
                told_lost = True
                stop.set()
                self._report(NotLeader(f"lock {self.id!r} was lost while its run was under way"), "its lock was lost")
            if limit is not None and now >= limit:
                limit = None
                stop.set()
                late = TimeoutError(f"a run of {self.id!r} has taken {self.config.max_run:g} s and was told to stop")
                self._report(late, "a run takes too long")
            self._wait(life, min([LONGEST_SLEEP, *([held.until - now] if not told_lost else []), *_left(limit, now)]))

    def _sleep(self, life: _Life, held: _Held, until: float) -> None:
        while not life.stopping.is_set() and not held.lost and (left := until - local_time()) > 0:
            self._wait(life, min(LONGEST_SLEEP, left, held.until - local_time()))

    def _wait(self, life: _Life, seconds: float) -> None:
        life.wake.wait(max(0.0, seconds))
        life.wake.clear()

    def _report(self, error: BaseException, what: str) -> None:
        logger.error("%s: %s: %s", self.id, what, error, exc_info=error)
        if self._on_error is not None:
            try:
                self._on_error(error)
            except BaseException:
                # A SystemExit, too, would end nothing but this thread; the lock would be kept, and nobody would run.
                logger.exception("the error callback of %s raised", self.id)


def _left(limit: float | None, now: float) -> list[float]:
    return [] if limit is None else [limit - now]


def _after_fork() -> None:
    # The threads are the parent's, and so is the lock.
    for pod in list(_pods):
        pod._reset()


os.register_at_fork(after_in_child=_after_fork)
