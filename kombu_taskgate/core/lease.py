"""LeaseKeeper: keeps the leases of one process alive, from its own thread and over a reserved connection.

A lease lives as long as its session is renewed. The keeper renews every third of the lease time: one row
written per round, however many leases are held. What the round finds is compared with what this process
believes it holds: what the database no longer knows is lost; what the database holds for us but nobody here
knows (the answer to a claim got lost) is given back.

The guarantee: ``may_claim`` turns false before any lease of this process can be taken by another. The
guarantee it does not give: a process that is stopped for longer than the lease time does not notice until it
runs again; the fencing token is what makes its late settles harmless.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping

from .broker import Broker
from .errors import TaskgateError
from .model import Lease, Session

logger = logging.getLogger("kombu_taskgate.lease")

#: Who holds nothing looks only in every so many rounds whether the database thinks otherwise.
LOOK_EVERY = 3
#: Part of the lease time after which a session that was not renewed is no longer trusted.
TRUST = 0.8
#: How long in seconds a stop waits for a round that is under way: it may hang in a dead network.
STOP_WITHIN = 5.0
Leases = Callable[[list[Lease]], None]
_keepers: weakref.WeakSet[LeaseKeeper] = weakref.WeakSet()


class _Kept:
    """One session and when it was last known to be alive (monotonic seconds, at the start of the attempt)."""

    def __init__(self, session: Session, attempt: float, every: float | None) -> None:
        self.session = session
        self.renewed = attempt
        self.next = attempt + (session.ttl / 3 if every is None else every)
        #: Leases that the last look found and nobody here knew: given back when seen twice.
        self.strange: dict[int, int] = {}
        self.rounds = 0


class LeaseKeeper:
    """Renews the sessions under which a process claims.

    Args:
        broker: where.
        owner: shown to operators as the holder, e.g. ``worker1@host``.
        lease_ttl: lease time in seconds of queues without their own.
        queue_lease_ttl: lease time in seconds of single queues, by name.
        on_lost: called (in the keeper's thread) with leases that another may have taken.
        on_canceled: called (in the keeper's thread), once each, with leases whose execution was canceled.
        every: seconds between two renewals; when not given, a third of the lease time, and half of it while nothing is
            held.
    """

    def __init__(
        self,
        broker: Broker,
        owner: str,
        lease_ttl: float,
        queue_lease_ttl: Mapping[str, float] | None = None,
        *,
        on_lost: Leases | None = None,
        on_canceled: Leases | None = None,
        every: float | None = None,
    ) -> None:
        self._broker = broker
        self._owner = owner
        self._default = lease_ttl
        self._ttls = dict(queue_lease_ttl or {})
        self._on_lost = on_lost
        self._on_canceled = on_canceled
        self._every = every
        self._reset()
        _keepers.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        # Of the thread that runs now: one that hangs in a dead network is no concern of the next.
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._kept: dict[float, _Kept] = {}
        self._held: dict[tuple[int, int], Lease] = {}
        self._told: set[tuple[int, int]] = set()
        self._failing = False

    # -- what others call ----------------------------------------------------------------------------

    def start(self) -> None:
        """Open the session of the usual lease time and start renewing. Idempotent.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        with self._lock:
            if self._thread is not None:
                return
            self._open(self._default)
            self._stop, self._wake = threading.Event(), threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._stop, self._wake), name="taskgate-lease-keeper", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop renewing and close the sessions; what they still hold is requeued. Idempotent.

        When a renewal gets no answer, nor would this: then the leases are left to end by themselves.
        """
        with self._lock:
            thread, self._thread = self._thread, None
            self._stop.set()
            self._wake.set()
        if thread is None:
            return
        if thread is not threading.current_thread():
            thread.join(STOP_WITHIN)
        with self._lock:
            kept, self._kept = self._kept, {}
            self._held.clear()
        self._give_back(list(kept.values()), "a renewal has not come back" if thread.is_alive() else None)

    def _give_back(self, kept: list[_Kept], hanging: str | None) -> None:
        why: object = hanging
        for one in kept:
            if why is None:
                try:
                    self._broker.close_session(one.session)
                except TaskgateError as error:
                    why = error
        if why is not None:
            logger.warning("leases of %s could not be given back; they end by themselves: %s", self._owner, why)

    @property
    def session(self) -> Session | None:
        """The session of the usual lease time; there is one from :meth:`start` to :meth:`stop`."""
        kept = self._kept.get(self._default)
        return None if kept is None else kept.session

    def session_for(self, queue: str) -> Session:
        """The session to claim under from a queue; queues of the same lease time share one."""
        ttl = self._ttls.get(queue, self._default)
        kept = self._kept.get(ttl)
        if kept is None:
            with self._lock:
                kept = self._kept.get(ttl) or self._open(ttl)
        return kept.session

    def hold(self, leases: Iterable[Lease]) -> None:
        """Note leases just claimed."""
        with self._lock:
            self._held.update(((lease.id, lease.token), lease) for lease in leases)

    def drop(self, leases: Iterable[Lease]) -> None:
        """Note leases just settled."""
        with self._lock:
            for lease in leases:
                self._held.pop((lease.id, lease.token), None)
                self._told.discard((lease.id, lease.token))

    @property
    def held(self) -> int:
        """How many leases this process believes it holds."""
        return len(self._held)

    @property
    def may_claim(self) -> bool:
        """Whether every session was renewed recently enough for its leases to be safe."""
        now = time.monotonic()
        kept = list(self._kept.values())
        return bool(kept) and all(now < one.renewed + one.session.ttl * TRUST for one in kept)

    # -- the thread ----------------------------------------------------------------------------------

    def _open(self, ttl: float) -> _Kept:
        attempt = time.monotonic()
        kept = _Kept(self._broker.open_session(self._owner, ttl), attempt, self._every)
        self._kept = {**self._kept, ttl: kept}
        # The thread may be asleep for longer than this session's lease time.
        self._wake.set()
        return kept

    def _run(self, stop: threading.Event, wake: threading.Event) -> None:
        while not stop.is_set():
            pause = min((kept.next for kept in self._kept.values()), default=0.0) - time.monotonic()
            if wake.wait(max(0.0, pause)):
                wake.clear()
                continue
            for kept in list(self._kept.values()):
                if time.monotonic() >= kept.next and not stop.is_set():
                    try:
                        self._round(kept, stop)
                    except Exception:
                        # A keeper that dies silently would let its holder's leases end while it works.
                        logger.exception("a round of renewing the leases of %s failed", self._owner)
                        self._soon(kept)

    def _round(self, kept: _Kept, stop: threading.Event) -> None:
        attempt = time.monotonic()
        with self._lock:
            mine = {key: lease for key, lease in self._held.items() if self._belongs(lease, kept)}
        kept.rounds += 1
        look = bool(mine or kept.strange) or kept.rounds % LOOK_EVERY == 0
        try:
            found = self._broker.renew_session(kept.session, look=look)
        except TaskgateError as error:
            self._soon(kept)
            if not self._failing and not stop.is_set():
                self._failing = True
                logger.warning("leases of %s can't be renewed now, will try again: %s", self._owner, error)
            return
        if stop.is_set():
            return
        if self._failing:
            self._failing = False
            logger.info("leases of %s are renewed again", self._owner)
        kept.renewed = attempt
        # Who holds nothing has less to lose, and enough time to try again all the same.
        kept.next = attempt + (kept.session.ttl / (3 if mine else 2) if self._every is None else self._every)
        if not look:
            return
        here = {(id, token) for id, token in found.held.items()}
        self._report_lost([lease for key, lease in mine.items() if key not in here])
        self._report_canceled([lease for key, lease in mine.items() if key in here and lease.id in found.canceled])
        self._return_strange(kept, found.held)

    def _soon(self, kept: _Kept) -> None:
        """Try again soon: half of the lease time, or more, is left for it."""
        kept.next = time.monotonic() + min(1.0, kept.session.ttl / 10)

    def _belongs(self, lease: Lease, kept: _Kept) -> bool:
        return self._ttls.get(getattr(lease, "queue", ""), self._default) == kept.session.ttl

    def _report_lost(self, leases: list[Lease]) -> None:
        with self._lock:
            # What was settled while the round was under way is not lost.
            gone = [lease for lease in leases if self._held.pop((lease.id, lease.token), None) is not None]
        if gone and self._on_lost is not None:
            self._on_lost(gone)

    def _report_canceled(self, leases: list[Lease]) -> None:
        new = [lease for lease in leases if (lease.id, lease.token) not in self._told]
        self._told.update((lease.id, lease.token) for lease in new)
        if new and self._on_canceled is not None:
            self._on_canceled(new)

    def _return_strange(self, kept: _Kept, held: Mapping[int, int]) -> None:
        """Give back what the database holds for us and nobody here knows; a claim under way is not strange yet."""
        with self._lock:
            strange = {id: token for id, token in held.items() if (id, token) not in self._held}
        again = [Lease(id, token, self._owner) for id, token in strange.items() if kept.strange.get(id) == token]
        kept.strange = strange
        if not again:
            return
        try:
            self._broker.requeue_many(again, delivered=False)
        except TaskgateError as error:
            logger.warning("%d leases that nobody works on could not be given back yet: %s", len(again), error)
        else:
            logger.info("gave back %d leases whose claim this process never learned of", len(again))


def _after_fork() -> None:
    # The parent's thread does not exist here, and its leases are the parent's.
    for keeper in list(_keepers):
        keeper._reset()


os.register_at_fork(after_in_child=_after_fork)
