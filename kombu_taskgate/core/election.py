"""LeaderElector: of all who compete for a key, one leads.

The guarantee: of all electors of a key that a store knows, at most one trusts that it leads at any moment, as long as
local clocks run at the same rate to within the margin, the store's clock is not set, and nobody deletes or changes its
row (who did lead then learns of it by its next renewal). Terms have numbers that only grow. The guarantee it does not
give: fencing. A leader that is frozen right after it looked at :attr:`LeaderElector.is_leader` goes on with what it was
about to do when it is continued, although somebody else leads by then. Where that matters the number of the term has to
be checked by whatever is written to, in the transaction that writes.

How it works: the leader renews its term every ``interval``. It trusts it until the *start* of the last attempt that
succeeded + ``renew_deadline``, by a local clock; others may lead only when the store's ``ttl`` is over, which began
later. Standbys look every ``poll`` seconds, with a cheap read, and try to acquire the moment that the term is over.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any

from .clock import local_time
from .errors import ConfigError, StoreUnavailable, TaskgateError
from .model import MAX_NAME
from .settings import LONGEST, is_number
from .terms import LeaseStore, Term, check

logger = logging.getLogger("kombu_taskgate.election")

#: Part of the ttl for which a leader trusts its term; the rest is the margin for clocks that run at different rates.
TRUST = 0.8
#: Renewals come up to this factor earlier, so that leaders of many keys do not all ask at once; and are expected up to
#: this factor later.
JITTER = 1.2
#: Longest time in seconds between two looks of a standby.
POLL = 0.2
#: A term whose row has not changed for this many of its own ttl, by the local clock, is tried for whatever it says.
STALE = 1.5
#: How long in seconds a stop waits for each thread: the store may be away.
STOP_WITHIN = 3.0
#: How many threads that ask may hang in a store without an answer; then the next one is waited for.
MOST_HANGING = 4
#: Longest time in seconds for which the thread sleeps: its timer does not count the time of a suspended machine.
LONGEST_SLEEP = 1.0

_electors: weakref.WeakSet[LeaderElector] = weakref.WeakSet()


def new_holder() -> str:
    """A holder that nobody else is: host, pid, and what tells two starts with one pid."""
    return f"{socket.gethostname()[:200]}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class _Call:
    """One question to the store, asked in a thread of its own: it may get no answer for long."""

    def __init__(self, ask: Callable[[_Call], Any], done: Callable[[], None], now: float) -> None:
        #: By the local clock: what the store answers holds from then on.
        self.started = now
        self.answer: Any = None
        self.error: BaseException | None = None
        self.ended = False
        #: It tried to acquire.
        self.acquired = False
        #: Nobody waits for the answer any more.
        self.given_up = False
        self._ask = ask
        self._done = done

    def run(self) -> None:
        try:
            self.answer = self._ask(self)
        except BaseException as error:  # noqa: BLE001  # looked at by whoever asked
            self.error = error
        self.ended = True
        self._done()


class _Caller:
    """The thread that asks. One that hangs is left behind, and another one takes its place."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Condition()
        self._next: _Call | None = None
        self._stopped = False
        self.thread = threading.Thread(target=self._run, name=f"{name}-store", daemon=True)
        self.thread.start()

    def submit(self, call: _Call) -> None:
        with self._lock:
            self._next = call
            self._lock.notify()

    def stop(self) -> None:
        """Let the thread end when it has asked what it was given."""
        with self._lock:
            self._stopped = True
            self._lock.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                while self._next is None:
                    if self._stopped:
                        return
                    self._lock.wait()
                call, self._next = self._next, None
            call.run()


class _Life:
    """What one run of the elector's thread knows. Its own, so that one left behind does no harm."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.stopping = False
        self.wake = threading.Event()
        #: The term, and until when by the local clock it is trusted.
        self.held: tuple[Term, float] | None = None
        #: Somebody asked for it to be given back.
        self.giving_back = False


class LeaderElector:
    """Competes for a key until it is stopped.

    Args:
        store: where the terms are.
        key: what is led.
        holder: unique to this process and start; made up when not given. A forked child adds its pid to it, and a
            number is added when it can't be known what became of the last word under it.
        ttl: seconds after which a term that is not renewed is over.
        interval: seconds between two renewals; a third of the ttl when not given.
        on_gained: called with the new term.
        on_lost: called with the term that is lost; not when it is given back by :meth:`stop`.
        renew_deadline: seconds for which a renewal is trusted; 0.8 of the ttl when not given.
        poll: seconds between two looks of a standby; 0.2, or the interval if that is less, when not given.
        fit: asked before each renewal and attempt; one that is not fit resigns, and does not compete.
        clock: the local clock in seconds, for tests.

    Callbacks run in the elector's thread, one after the other, and so does ``fit``; while one of them runs no term is
    renewed, so they must not take long. What they raise is logged, and ends nothing: not a ``SystemExit`` either.

    Raises:
        ConfigError: the times do not fit: ``ttl > renew_deadline > interval * 1.2`` must hold.
    """

    def __init__(
        self,
        store: LeaseStore,
        key: str,
        holder: str | None = None,
        ttl: float = 15.0,
        interval: float | None = None,
        on_gained: Callable[[Term], object] | None = None,
        on_lost: Callable[[Term], object] | None = None,
        *,
        renew_deadline: float | None = None,
        poll: float | None = None,
        fit: Callable[[], bool] | None = None,
        clock: Callable[[], float] = local_time,
    ) -> None:
        self.store = store
        self.key = key
        self.holder = new_holder() if holder is None else holder
        self._given_holder = holder
        self._renamed = 0
        for what, seconds in (("ttl", ttl), ("interval", 0 if interval is None else interval)):
            if not is_number(seconds):
                raise ConfigError(f"the {what} of term {key!r} must be a number of seconds, not {seconds!r}")
        self.ttl = ttl
        self.interval = ttl / 3 if interval is None else interval
        self.renew_deadline = ttl * TRUST if renew_deadline is None else renew_deadline
        self.poll = min(self.interval, POLL) if poll is None else poll
        self._check()
        self._on_gained = on_gained
        self._on_lost = on_lost
        self._fit = fit
        self._clock = clock
        self._lock = threading.Lock()
        self._reset()
        _electors.add(self)

    def _check(self) -> None:
        times = (self.ttl, self.interval, self.renew_deadline, self.poll)
        if not all(is_number(time) and 0 < time <= LONGEST for time in times):
            raise ConfigError(
                f"ttl {self.ttl!r}, interval {self.interval!r}, renew_deadline {self.renew_deadline!r} and poll "
                f"{self.poll!r} must be more than 0 seconds and at most 100 years"
            )
        check(self.key, self.holder, self.ttl)
        if not self.ttl > self.renew_deadline > self.interval * JITTER:
            raise ConfigError(
                f"ttl {self.ttl:g} s must be more than renew_deadline {self.renew_deadline:g} s, and that more than "
                f"{JITTER:g} times interval {self.interval:g} s: otherwise a leader that is well loses its term"
            )

    def _reset(self) -> None:
        self._life = _Life(self.holder)
        self._thread: threading.Thread | None = None
        #: Highest number that was seen; a new term is above it.
        self._highest = 0
        #: Number of the newest term under which this one has led and leads no more.
        self._ended = 0
        self._store_time: tuple[int, float] | None = None
        self._answered_at: float | None = None
        self._hold_off_until = 0.0

    # -- what others ask -----------------------------------------------------------------------------

    @property
    def term(self) -> Term | None:
        """The term under which this one leads now; ``None``: it does not."""
        life = self._life
        held = life.held
        if held is None or life.stopping or life.giving_back:
            return None
        term, until = held
        return term if self._clock() < until else None

    @property
    def is_leader(self) -> bool:
        """Whether it leads now. False from the instant on at which its term can't be trusted, whatever threads do."""
        return self.term is not None

    def now_ms(self) -> int | None:
        """The store's time in milliseconds, as of its last answer and counted on; ``None`` before the first."""
        known = self._store_time
        if known is None:
            return None
        instant, at = known
        return instant + int((self._clock() - at) * 1000)

    def check(self, tolerance: float = 0.0) -> None:
        """Whether this one is well: it has had an answer of the store lately, or was just started.

        Args:
            tolerance: seconds beyond the ttl.

        Raises:
            StoreUnavailable: the last answer is older than the ttl and the tolerance.
        """
        at = self._answered_at
        if self._thread is None or at is None:
            raise StoreUnavailable(f"the elector of {self.key!r} is not running")
        silent = self._clock() - at
        if silent > self.ttl + tolerance:
            raise StoreUnavailable(f"the elector of {self.key!r} has had no answer of its store for {silent:.1f} s")

    # -- running -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Compete, at once. Idempotent; does not wait, and does not raise when the store is away."""
        with self._lock:
            if self._thread is not None:
                return
            self._life = _Life(self.holder)
            self._answered_at = self._clock()
            self._hold_off_until = 0.0
            name = f"taskgate-elector-{self.key}"
            self._thread = threading.Thread(target=_Run(self, self._life, name).run, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop competing, and resign. Idempotent. Waits for its threads for a while; does not call ``on_lost``."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._life.stopping = True
            self._life.wake.set()
        if thread is None:
            return
        if thread is not threading.current_thread():
            thread.join(2 * STOP_WITHIN)
        if thread.is_alive():
            # It has yet to resign, in the name that it has.
            self._rename()

    def resign(self, hold_off: float = 0.0) -> None:
        """Give the term back so that somebody else may lead. It is not trusted from now on; the rest is not waited for.

        Args:
            hold_off: seconds for which this one does not compete.
        """
        life = self._life
        self._hold_off_until = self._clock() + hold_off
        life.giving_back = True
        life.wake.set()

    def _rename(self) -> str:
        """Be somebody else from now on: whatever is still on its way to the store ends no term of this one."""
        self._renamed += 1
        name = new_holder() if self._given_holder is None else self._given_holder
        self.holder = _extended(name, f"/{self._renamed}")
        return self.holder

    def _is_fit(self) -> bool:
        if self._fit is None:
            return True
        try:
            return bool(self._fit())
        except BaseException:
            logger.exception("whether %s is fit to lead %s can't be told; taken for unfit", self.holder, self.key)
            return False

    def _tell(self, callback: Callable[[Term], object] | None, term: Term) -> None:
        if callback is not None:
            try:
                callback(term)
            except BaseException:
                # A SystemExit, too, would end nothing but this thread, and with it the candidate.
                logger.exception("a callback of the elector of %s raised", self.key)


class _Run:
    """The thread: decides, and calls back. What it asks of the store is asked by another one."""

    def __init__(self, elector: LeaderElector, life: _Life, name: str) -> None:
        self._e = elector
        self._life = life
        self._name = name
        self._caller = _Caller(name)
        #: Those that were left behind.
        self._hanging: list[_Caller] = []
        self._call: _Call | None = None
        #: From when on the call under way is waited for once more.
        self._patient_from = 0.0
        self._answered: Callable[[_Call], object] = lambda call: None
        self._next = elector._clock()
        self._failures = 0
        #: The term of another as last read, and since when by the local clock it has been the same.
        self._seen: tuple[tuple[int, int], float] | None = None
        self._registered_at: float | None = None

    def run(self) -> None:
        e = self._e
        while not self._life.stopping:
            try:
                wait = self._round()
            except Exception:
                # A thread that ended silently would leave nobody to compete here.
                logger.exception("a round of the elector of %s failed", e.key)
                wait = e.poll
            self._life.wake.wait(wait)
            self._life.wake.clear()
        self._end()

    def _round(self) -> float:
        e, life = self._e, self._life
        if self._call is not None and self._call.ended:
            call, self._call = self._call, None
            self._answered(call)
        now = e._clock()
        held = life.held
        giving_back = life.giving_back
        if held is not None and now >= held[1]:
            self._step_down("its term could not be renewed in time")
        elif held is not None and (giving_back or not e._is_fit()):
            self._step_down("it resigns")
            self._release()
        if giving_back:
            # Not without having seen it set: somebody may ask just now.
            life.giving_back = False
        if self._call is not None and now - self._waits_since(self._call) > e.ttl:
            self._leave_behind(now)
        if self._call is None and now >= self._next:
            self._begin(now)
        deadlines = [self._next] if self._call is None else [self._waits_since(self._call) + e.ttl + 0.01]
        if life.held is not None:
            deadlines.append(life.held[1])
        return min(LONGEST_SLEEP, max(0.0, min(deadlines) - e._clock()))

    def _waits_since(self, call: _Call) -> float:
        return max(call.started, self._patient_from)

    def _leave_behind(self, now: float) -> None:
        """Give up a call that gets no answer: that would tell nothing that is still so."""
        self._hanging = [caller for caller in self._hanging if caller.thread.is_alive()]
        if len(self._hanging) >= MOST_HANGING:
            # More threads would help nobody. A late answer does no harm: it counts from when it was asked for.
            self._patient_from = now
            return
        if self._call is not None:
            self._call.given_up = True
        releasing, self._call = self._answered == self._released, None
        self._caller.stop()
        self._hanging.append(self._caller)
        self._caller = _Caller(self._name)
        self._failed("no answer")
        if releasing:
            self._rename()

    def _begin(self, now: float) -> None:
        e, holder = self._e, self._life.holder
        if self._life.held is not None:
            self._ask(lambda _: e.store.try_acquire(e.key, holder, e.ttl, above=e._highest), self._renewed)
        elif now < e._hold_off_until or not e._is_fit():
            self._next = now + e.poll
            if self._due_to_register(now):
                self._ask(lambda _: e.store.register(e.key, holder), self._heard)
        else:
            self._ask(lambda call: self._look(call, holder), self._looked)

    def _ask(self, ask: Callable[[_Call], Any], answered: Callable[[_Call], object]) -> None:
        self._call, self._answered = _Call(ask, self._life.wake.set, self._e._clock()), answered
        self._caller.submit(self._call)

    # -- standing by ---------------------------------------------------------------------------------

    def _due_to_register(self, now: float) -> bool:
        return self._registered_at is None or now - self._registered_at >= self._e.interval

    def _look(self, call: _Call, holder: str) -> Term | None:
        """In the thread that asks: the term of this one, if it could be had; else that of another."""
        e = self._e
        now = e._clock()
        term = e.store.current(e.key)
        if term is not None:
            e._highest = max(e._highest, term.number)
        if term is not None and term.left > 0 and not self._is_ours(term) and not self._is_stale(term, now):
            if self._due_to_register(now):
                e.store.register(e.key, holder)
                self._registered_at = now
            return term
        if call.given_up:
            # What it acquired nobody would give back: this one may have been stopped meanwhile.
            return None
        call.started, call.acquired = e._clock(), True
        return e.store.try_acquire(e.key, holder, e.ttl, above=e._highest)

    def _is_ours(self, term: Term) -> bool:
        """Whether it is this one's to go on with; not one that it has told to be over, which may be valid yet."""
        return term.holder == self._life.holder and term.number > self._e._ended

    def _is_stale(self, term: Term, now: float) -> bool:
        """Whether a term that says it is valid was not renewed for long: the store's clock may have been set back."""
        state = (term.number, term.renewed_at)
        if self._seen is None or self._seen[0] != state:
            self._seen = (state, now)
        return now - self._seen[1] > STALE * (term.until - term.renewed_at) / 1000

    def _looked(self, call: _Call) -> None:
        if not self._succeeded(call):
            return
        e, holder, term = self._e, self._life.holder, call.answer
        if term is not None and self._is_ours(term):
            if e._clock() < e._hold_off_until:
                # It resigned meanwhile.
                e._ended = term.number
                self._release()
                return
            self._hold(call, term)
            if self._life.held is not None:
                self._registered_at = None
                self._ask(lambda _: e.store.withdraw(e.key, holder), self._succeeded)
            return
        if term is not None and term.holder == holder and call.acquired:
            self._release()
            return
        left = term.left if term is not None and term.left > 0 else 0.0
        self._next = e._clock() + (min(e.poll, left + 0.005) if left else e.poll)

    # -- leading -------------------------------------------------------------------------------------

    def _hold(self, call: _Call, term: Term) -> None:
        e, life = self._e, self._life
        before = life.held
        e._highest = max(e._highest, term.number)
        e._store_time = (term.seen_at, e._clock())
        until = call.started + e.renew_deadline
        self._next = call.started + random.uniform(e.interval / JITTER, e.interval)
        if before is not None and before[0].number == term.number:
            life.held = (term, until)
            return
        if before is not None:
            self._step_down("its term was taken away")
        if e._clock() >= until:
            # The answer came too late to be trusted; the next attempt renews the term.
            self._next = e._clock()
            return
        life.held = (term, until)
        logger.info("%s leads %s, term %d", self._life.holder, e.key, term.number)
        e._tell(e._on_gained, term)

    def _renewed(self, call: _Call) -> None:
        if not self._succeeded(call):
            return
        if call.answer is None:
            self._step_down("somebody else has its term")
            self._next = self._e._clock()
        elif self._life.held is not None:
            self._hold(call, call.answer)
        else:
            # It was stepped down from meanwhile: the store need not wait for it to run out.
            self._release()

    def _release(self) -> None:
        e, holder = self._e, self._life.holder
        self._ask(lambda _: e.store.release(e.key, holder), self._released)

    def _released(self, call: _Call) -> None:
        if self._succeeded(call):
            self._next = self._e._clock() + self._e.poll
        else:
            # It may still be on its way, and would then end the next term of this holder.
            self._rename()

    def _rename(self) -> None:
        if self._e._life is self._life:
            self._life.holder = self._e._rename()

    def _heard(self, call: _Call) -> None:
        if self._succeeded(call):
            self._registered_at = call.started

    def _step_down(self, why: str) -> None:
        e = self._e
        held, self._life.held = self._life.held, None
        if held is None:
            return
        e._ended = max(e._ended, held[0].number)
        logger.warning("%s leads %s no more, term %d: %s", held[0].holder, e.key, held[0].number, why)
        self._next = min(self._next, e._clock() + e.poll)
        e._tell(e._on_lost, held[0])

    # -- answers -------------------------------------------------------------------------------------

    def _succeeded(self, call: _Call) -> bool:
        e = self._e
        if call.error is None:
            e._answered_at = e._clock()
            if self._failures:
                logger.warning("the store of %s answers again", e.key)
            self._failures = 0
            return True
        if not isinstance(call.error, TaskgateError):
            logger.error("the elector of %s could not ask its store", e.key, exc_info=call.error)
        self._failed(str(call.error))
        return False

    def _failed(self, why: str) -> None:
        e = self._e
        if not self._failures:
            logger.warning("the store of %s can't be asked, which is tried again: %s", e.key, why)
        self._failures += 1
        pause = min(e.interval / 4, 0.05 * 2 ** min(self._failures, 10))
        self._next = e._clock() + random.uniform(pause / 2, pause)

    def _end(self) -> None:
        """Resign. In the thread that asks, so that a store that is away holds nobody up for long."""
        e, holder = self._e, self._life.holder
        held, self._life.held = self._life.held, None
        if held is not None:
            e._ended = max(e._ended, held[0].number)
        # What is under way, or was not looked at any more, may have acquired one.
        may_hold = held is not None or self._call is not None

        def part(_: _Call) -> None:
            if may_hold:
                e.store.release(e.key, holder)
            e.store.withdraw(e.key, holder)

        done = threading.Event()
        last = _Call(part, done.set, e._clock())
        self._caller.submit(last)
        self._caller.stop()
        if not done.wait(STOP_WITHIN) or last.error is not None:
            why = "no answer" if last.error is None else last.error
            logger.warning("%s could not resign from %s; its term runs out by itself: %s", holder, e.key, why)
            self._rename()
        else:
            self._caller.thread.join(STOP_WITHIN)


def _extended(name: str, end: str) -> str:
    return name[: MAX_NAME - len(end)] + end


def _after_fork() -> None:
    # The threads are the parent's, and so is the term; and the name, since the parent may compete under it later.
    for elector in list(_electors):
        given = elector._given_holder
        elector.holder = new_holder() if given is None else _extended(given, f":{os.getpid()}")
        elector._given_holder = None if given is None else elector.holder
        elector._lock = threading.Lock()
        elector._reset()


os.register_at_fork(after_in_child=_after_fork)
