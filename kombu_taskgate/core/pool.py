"""Pool: threads that claim from a broker's queues and run what they get, without Celery.

The guarantee is the broker's: at least once. What was claimed and not settled runs again, here or elsewhere, and a run
whose lease was lost can settle nothing.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import traceback
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from .broker import Broker
from .clock import local_time
from .errors import ConfigError, LeaseLost, StoreUnavailable, TaskgateError
from .lease import LeaseKeeper
from .model import Claim, FailKind, Lease
from .reaper import Reaper
from .settings import LONGEST, check_name, is_number

logger = logging.getLogger("kombu_taskgate.pool")

#: Longest pause in seconds between attempts while the database is away.
LONGEST_PAUSE = 2.0
#: Longest ``detail`` of a failure, in characters.
DETAIL = 10_000

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def back_off(claim: Claim) -> float:
    """Seconds before the next try: 1, 2, 4 … up to ten minutes, with jitter."""
    return min(600.0, 2.0 ** min(claim.attempts, 10)) * random.uniform(0.5, 1.0)


def _checked(result: object) -> bytes | None:
    if result is None or isinstance(result, bytes):
        return result
    raise TypeError(f"a run must return bytes or None, not {type(result).__name__}")


class _Run:
    """One claim and what its run is told."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        #: Set when it has to end: then one of these says why, or the pool ends.
        self.stop = threading.Event()
        self.lost = False
        self.canceled = False
        #: It is given back when it fails: it was told to end, and is not to blame.
        self.interrupted = False


class Pool:
    """Claims from queues and calls a function with each claim, ``n`` at a time.

    Args:
        broker: where; the caller closes it after :meth:`stop`.
        queue: a queue, or several, which get equal shares.
        run: called with a claim and an event that is set when it has to end early: because it was canceled, because its
            lease was lost, or because the pool stops and has waited long enough. What it returns (bytes or ``None``) is
            stored as the result. What it raises is a failure: it runs again after ``retry_delay`` as often as its
            ``max_retry`` says; so is a result that can't be stored. What it raises when it was told to end because the
            pool stops is none: it is given back.
        n: how many run at a time.
        owner: shown to operators; made up when not given.
        heartbeat: seconds between two renewals of the leases.
        lease_ttl: seconds without a renewal after which others may take what this pool holds.
        claim_timeout: longest wait in seconds in one attempt to claim.
        retry_delay: seconds before a failure is tried again. Where it raises, or answers nonsense, :func:`back_off`
            counts.
        on_error: called with the claim and what its run has raised, which is logged as well.
        reap: take back the leases of others that have died; off where somebody else does.

    Raises:
        ConfigError: no queue, or a number that can't be right.
    """

    def __init__(
        self,
        broker: Broker,
        queue: str | Sequence[str],
        run: Callable[[Claim, threading.Event], bytes | None],
        n: int = 4,
        *,
        owner: str | None = None,
        heartbeat: float = 20.0,
        lease_ttl: float = 90.0,
        claim_timeout: float = 5.0,
        retry_delay: Callable[[Claim], float] = back_off,
        on_error: Callable[[Claim, BaseException], object] | None = None,
        reap: bool = True,
    ) -> None:
        self.queues = [queue] if isinstance(queue, str) else list(queue or ())
        if not self.queues or not (isinstance(n, int) and n >= 1):
            raise ConfigError(f"a pool needs a queue and at least one thread, not {len(self.queues)} and {n!r}")
        for name in self.queues:
            check_name(name, "queue")
        for what, value in (("heartbeat", heartbeat), ("lease_ttl", lease_ttl), ("claim_timeout", claim_timeout)):
            if not (is_number(value) and 0 < value <= LONGEST):
                raise ConfigError(f"{what} must be more than 0 seconds and at most 100 years, not {value!r}")
        if heartbeat > lease_ttl / 2:
            raise ConfigError(
                f"heartbeat {heartbeat:g} s is too long for a lease_ttl of {lease_ttl:g} s: at most half of it, "
                "so that there is time to try again"
            )
        self.n = n
        self.owner = f"pool:{os.getpid()}:{uuid.uuid4().hex[:8]}" if owner is None else check_name(owner, "owner")
        self._broker = broker
        self._do = run
        self._claim_timeout = claim_timeout
        self._retry_delay = retry_delay
        self._on_error = on_error
        self._keeper = LeaseKeeper(
            broker, self.owner, lease_ttl, on_lost=self._lost, on_canceled=self._canceled, every=heartbeat
        )
        self._reaper = Reaper(broker, lease_ttl / 3) if reap else None
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._begun = False
        self._claimer: threading.Thread | None = None
        self._waiting: deque[_Run] = deque()
        self._running: dict[tuple[int, int], _Run] = {}
        self._free = self.n
        self._ended = True

    # -- what others call ----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to claim. Idempotent. A pool that was stopped does not start again.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        with self._changed:
            if self._begun or self._stopping.is_set():
                return
            self._keeper.start()
            self._begun, self._ended = True, False
            self._claimer = threading.Thread(target=self._claim, name="taskgate-pool-claim", daemon=True)
            self._claimer.start()
            for number in range(self.n):
                threading.Thread(target=self._serve, name=f"taskgate-pool-{number}", daemon=True).start()
        if self._reaper is not None:
            self._reaper.start()

    @property
    def running(self) -> int:
        """How many run now."""
        return len(self._running)

    def stop(self, within: float = 30.0, *, then: float = 5.0) -> bool:
        """Claim no more, give back what has not begun, and wait for what runs; returns whether all of it has ended.

        Not for a run to call, which would wait for itself.

        Args:
            within: seconds to wait. Then the event of each run that is left is set.
            then: seconds to wait after that. What still runs then keeps its lease for as long as the process lives.
        """
        until = local_time() + within
        self._stopping.set()
        self._broker.wake()
        with self._changed:
            self._changed.notify_all()
        claimer = self._claimer
        if claimer is not None and claimer is not threading.current_thread():
            claimer.join(within)
        self._give_back()
        if not self._wait_for_runs(until - local_time()):
            with self._changed:
                for run in self._running.values():
                    run.interrupted = True
                    run.stop.set()
            if not self._wait_for_runs(then):
                logger.warning("%d runs of the pool %s have not ended", self.running, self.owner)
                return False
        self._end()
        return True

    def _wait_for_runs(self, seconds: float) -> bool:
        until = local_time() + seconds
        with self._changed:
            while self._running and (left := until - local_time()) > 0:
                self._changed.wait(min(1.0, left))
            return not self._running

    def _end(self) -> None:
        """Let go of the leases; the last of those who could is the one who does."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
        if self._reaper is not None:
            self._reaper.stop()
        self._keeper.stop()

    # -- claiming ------------------------------------------------------------------------------------

    def _claim(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            with self._changed:
                while self._free == 0 and not self._stopping.is_set():
                    self._changed.wait()
                free = self._free
            if self._stopping.is_set():
                break
            if not self._keeper.may_claim:
                self._stopping.wait(0.1)
                continue
            try:
                session = self._keeper.session
                claims = self._broker.dequeue(
                    self.queues,
                    free,
                    self._claim_timeout,
                    owner=self.owner,
                    session=session,
                    stop=self._stopping,
                )
                if failures:
                    logger.warning("the pool %s claims again", self.owner)
                failures = 0
            except Exception as error:
                # A thread that ended silently would leave the queue to nobody.
                if not failures:
                    logger.warning(
                        "the pool %s can't claim now, which is tried again: %s",
                        self.owner,
                        error,
                        exc_info=None if isinstance(error, TaskgateError) else error,
                    )
                failures += 1
                self._stopping.wait(random.uniform(0.5, 1.0) * min(LONGEST_PAUSE, 0.05 * 2 ** min(failures, 10)))
                continue
            if claims:
                self._keeper.hold(claims)
                with self._changed:
                    self._free -= len(claims)
                    self._waiting.extend(map(_Run, claims))
                    self._changed.notify_all()
        # What came in the last moment.
        self._give_back()

    def _give_back(self) -> None:
        with self._changed:
            runs = list(self._waiting)
            self._waiting.clear()
        if runs:
            leases = [run.claim for run in runs]
            try:
                self._broker.requeue_many(leases, delivered=False)
            except TaskgateError as error:
                logger.warning(
                    "%d claims could not be given back; their leases end by themselves: %s", len(runs), error
                )
            self._keeper.drop(leases)

    # -- running -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stopping.is_set():
                    self._changed.wait()
                if self._stopping.is_set():
                    return
                run = self._waiting.popleft()
                self._running[run.claim.id, run.claim.token] = run
            try:
                self._work(run)
            finally:
                self._keeper.drop([run.claim])
                with self._changed:
                    del self._running[run.claim.id, run.claim.token]
                    self._free += 1
                    last = self._stopping.is_set() and not self._running and not self._waiting
                    self._changed.notify_all()
                if last:
                    self._end()

    def _work(self, run: _Run) -> None:
        claim = run.claim
        try:
            result = _checked(self._do(claim, run.stop))
        except BaseException as error:  # noqa: BLE001  # whatever one run raises, the pool goes on
            self._report(run, error)
            detail = "".join(traceback.format_exception(error))[-DETAIL:]
            self._settle(run, lambda: self._failed(run, detail))
        else:
            if run.canceled:
                self._settle(run, lambda: self._broker.finish_canceled(claim))
            else:
                self._settle(run, lambda: self._broker.ack(claim, result), self._not_stored)

    def _failed(self, run: _Run, detail: str) -> None:
        if run.canceled:
            self._broker.finish_canceled(run.claim)
        elif run.interrupted:
            self._broker.requeue(run.claim)
        else:
            self._broker.fail(run.claim, FailKind.BUSINESS, delay=self._delay(run.claim), detail=detail)

    def _delay(self, claim: Claim) -> float:
        try:
            delay = self._retry_delay(claim)
            if is_number(delay) and abs(delay) <= LONGEST:
                return delay
            logger.error("the retry_delay of the pool %s answers %r, which is no number of seconds", self.owner, delay)
        except BaseException:
            logger.exception("the retry_delay of the pool %s raised", self.owner)
        return back_off(claim)

    def _not_stored(self, run: _Run, error: Exception) -> None:
        """A failure like any other: given back, it would run again and again, and nobody would count."""
        self._report(run, error)
        self._failed(run, f"its result could not be stored: {error}"[:DETAIL])

    def _settle(
        self, run: _Run, settle: Callable[[], object], refused: Callable[[_Run, Exception], object] | None = None
    ) -> None:
        """Tell the broker, for as long as the lease is this pool's. ``refused``: what else to tell it if it refuses."""
        pause = 0.05
        while not run.lost:
            try:
                settle()
            except LeaseLost:
                run.lost = True
            except StoreUnavailable as error:
                if pause == 0.05:
                    logger.warning("execution %d can't be settled now, which is tried again: %s", run.claim.id, error)
                time.sleep(pause)
                pause = min(LONGEST_PAUSE, pause * 2)
            except Exception as error:
                if refused is None:
                    logger.exception("execution %d could not be settled; it runs again", run.claim.id)
                    return
                settle, refused = partial(refused, run, error), None
            else:
                return
        logger.warning("the lease of execution %d was lost: it runs again elsewhere, or has", run.claim.id)

    def _report(self, run: _Run, error: BaseException) -> None:
        if run.interrupted or run.canceled or run.lost:
            logger.info("execution %d was told to end: %r", run.claim.id, error)
            return
        logger.error("execution %d (%s) failed", run.claim.id, run.claim.type or "no type", exc_info=error)
        if self._on_error is not None:
            try:
                self._on_error(run.claim, error)
            except BaseException:
                logger.exception("the error callback of the pool %s raised", self.owner)

    # -- told by the keeper --------------------------------------------------------------------------

    def _lost(self, leases: list[Lease]) -> None:
        for run in self._of(leases):
            run.lost = True
            run.stop.set()

    def _canceled(self, leases: list[Lease]) -> None:
        for run in self._of(leases):
            run.canceled = True
            run.stop.set()

    def _of(self, leases: Sequence[Lease]) -> list[_Run]:
        with self._changed:
            known = {**self._running, **{(run.claim.id, run.claim.token): run for run in self._waiting}}
        return [known[lease.id, lease.token] for lease in leases if (lease.id, lease.token) in known]


def _after_fork() -> None:
    # The threads are the parent's, and so are the leases.
    for pool in list(_pools):
        pool._reset()


os.register_at_fork(after_in_child=_after_fork)
