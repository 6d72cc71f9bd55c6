"""The broker contract. These docstrings are the specification; the contract suite tests them.

Two implementations: :class:`~kombu_taskgate.core.memory.MemoryBroker`, the reference, and
:class:`~kombu_taskgate.core.sql.SqlBroker` for every SQL dialect.

Every method may be called from any thread. Every method may raise ``StoreUnavailable`` when the database
can't be reached; nothing was changed then, unless its message says that the outcome is unknown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from .chords import Chords
from .model import (
    Claim,
    FailKind,
    Filter,
    HeartbeatResult,
    Inspection,
    Lease,
    NewTask,
    Reason,
    Renewal,
    Reservation,
    Session,
    State,
    StateChange,
    Task,
)
from .results import Results
from .revocations import Revocations
from .schedules import Schedules
from .terms import LeaseStore
from .topology import Topology
from .wakeup import Wakeup
from .watch import Wake, Watch

Notify = Callable[[StateChange], None]


class Broker(Protocol):
    """A lease/heartbeat/reap broker."""

    @property
    def topology(self) -> Topology:
        """Queues, exchanges and bindings that all processes share."""

    @property
    def revocations(self) -> Revocations:
        """What is revoked, in all processes."""

    @property
    def results(self) -> Results:
        """Results of tasks."""

    @property
    def chords(self) -> Chords:
        """Headers of tasks that wait for each other."""

    @property
    def terms(self) -> LeaseStore:
        """Who leads what, among all processes."""

    @property
    def schedules(self) -> Schedules:
        """Periodic entries, and the ticks that were sent; :meth:`prune` sweeps them."""

    @property
    def to_answer(self) -> Wakeup:
        """Woken when there may be something for ``claim_answers``.

        At once for what this process has ended, and after a look of ``reap_expired`` for what others left behind.
        """

    # -- publishing ---------------------------------------------------------------------------------

    def enqueue(self, task: NewTask) -> int:
        """Store one execution in one transaction and return its id (increasing, never used again).

        The first state comes from the parents: ``blocked`` while any has not ended, ``canceled`` at once
        when one has failed or was canceled and ``fail_fast`` is set (its own fail-fast children can't exist
        yet), else ``pending``. A future ``run_at`` or ``delay`` waits.

        A task_id of ``depends_on`` is a parent too. It has ended when a result that SUCCEEDED or ENDED is stored for
        it, whatever becomes of its executions meanwhile; ENDED is a failure. The execution wakes, or is canceled with a
        ``detail`` that names the parent, in the transaction that stores the result.

        Raises:
            TaskNotFound: a parent does not exist: of a task_id neither an execution nor a result is stored, nor is it
                of an earlier one of these tasks. Nothing is stored.
            TaskExists: the business key has an execution, final ones included; or the unique key is locked, by an
                execution that has not ended. Nothing is stored.
            PayloadTooLarge, ConfigError: the payload or a name is out of bounds. Nothing is stored.
        """

    def enqueue_many(self, tasks: Sequence[NewTask]) -> list[int]:
        """Store all of them in one transaction, or none; ids in the order given. Raises as ``enqueue``."""

    # -- claiming -----------------------------------------------------------------------------------

    def dequeue(
        self,
        queues: Sequence[str],
        limit: int = 1,
        timeout: float | None = 0.0,
        *,
        owner: str = "",
        session: Session | None = None,
        stop: threading.Event | None = None,
    ) -> list[Claim]:
        """Claim up to ``limit`` ready executions, each by one caller only.

        Waits until something is ready, ``timeout`` seconds have passed (``None``: for ever, 0: do not wait)
        or ``stop`` is set; then returns what there is, possibly nothing. Order: priority (high first), then
        ``run_at``, then id; several queues share the limit fairly, and no queue starves another.
        Each claim gets a new lease token, a lease of the queue's lease_ttl, and one more delivery. Claimed
        under a ``session``, the lease also lives while the session is renewed.
        Expired executions met on the way become ``canceled`` (reason ``expired``), or are removed where their queue
        has an ``expires`` (see :class:`.topology.Queue`) and nothing is linked to them; those already delivered
        ``max_deliveries`` times become ``failed`` (reason ``max_deliveries``). A delivery that ended in a business
        failure or a throttling is not among these: those have caps of their own.

        Raises:
            ConfigError: no queues, or limit < 1.
        """

    def ack_and_dequeue(
        self,
        leases: Sequence[Lease],
        queues: Sequence[str],
        limit: int,
        *,
        owner: str = "",
        session: Session | None = None,
        begin: Sequence[Lease] = (),
    ) -> tuple[list[Lease], list[Claim]]:
        """``ack_many(leases)``, ``begin_many(begin)`` and a ``dequeue`` that does not wait, in one transaction.

        Returns the refused leases and the claims. ``limit`` 0 or no queues: nothing is claimed.
        """

    # -- settling -----------------------------------------------------------------------------------

    def begin_many(self, leases: Sequence[Lease]) -> list[Lease]:
        """Note that these runs have begun and must not be repeated; return those whose token is not current.

        The execution stays ``running`` under its lease until it is settled. What would make it ``pending`` again
        (a lost lease, whatever ``lease_lost_max`` says; ``requeue``; ``close_session``) makes it ``failed`` from now
        on (reason ``lost``), or ``canceled`` if it is marked. ``fail`` may still put it back: then it has not begun.
        """

    def ack(self, lease: Lease, result: bytes | None = None) -> None:
        """Settle as ``completed`` and wake children in the same transaction.

        The row is deleted unless ``keep_completed`` is set, it has a business key (kept so that the key stays
        known) or it is a replay (kept so that what it replays is not replayed again). Each child's
        pending_parents falls by one; at zero it becomes ``pending``.

        Raises:
            LeaseLost: the token is not current. Nothing is changed.
        """

    def ack_many(self, leases: Sequence[Lease]) -> list[Lease]:
        """Ack all in one transaction; return those refused because their token is not current."""

    def fail(
        self,
        lease: Lease,
        kind: FailKind = FailKind.BUSINESS,
        *,
        retry_at: int | None = None,
        delay: float | None = None,
        reason: Reason | None = None,
        detail: str | None = None,
        told: bool = False,
    ) -> State:
        """Give back as not done; returns the new state.

        Business: attempts+1; more than ``max_retry`` → ``failed``, else ``retrying`` at ``retry_at`` (ms) or
        after ``delay`` (s). Throttled: throttled+1, attempts untouched; at ``throttled_max`` → ``failed``.
        Skip: ``failed``. Lost: what ``reap_expired`` does with a lease that has run out, at once: canceled-marked →
        ``canceled``, else lease_lost+1 → ``failed`` at ``lease_lost_max``, or ``pending`` where it stood; it takes no
        time. Of one that has begun see ``begin_many``. Entering ``failed`` cancels fail-fast children, chain-wise; the
        others see a parent that has ended. ``told``: whoever waits for it has been told of the failure already, so
        nobody needs to answer for it.
        ``reason`` defaults to the kind's (skip: rejected, lost: lease_lost). What would be ``retrying`` but is
        canceled-marked becomes ``canceled``.

        Raises:
            ConfigError: a time is given for a kind that does not wait.
            LeaseLost: the token is not current.
        """

    def requeue(self, lease: Lease, *, delivered: bool = True) -> None:
        """Back to ``pending``; no counter moves and ``run_at`` stays. Canceled-marked: ``canceled`` instead.

        ``delivered=False`` says that nobody has seen the message: the claim's delivery is taken back too.

        Raises:
            LeaseLost: the token is not current.
        """

    def requeue_many(self, leases: Sequence[Lease], *, delivered: bool = True) -> list[Lease]:
        """Requeue all in one transaction; return those refused because their token is not current."""

    def finish_canceled(self, lease: Lease) -> None:
        """Settle a running execution as ``canceled`` (reason ``canceled``) and propagate as ``cancel`` does.

        Raises:
            LeaseLost: the token is not current.
        """

    # -- leases -------------------------------------------------------------------------------------

    def heartbeat(self, lease: Lease) -> int:
        """Extend one lease by its queue's lease_ttl from now; returns the new ``lease_until`` (ms).

        Raises:
            LeaseLost: the token is not current.
            TaskCanceled: cancel was asked for; the lease is renewed all the same.
        """

    def heartbeat_many(self, leases: Sequence[Lease]) -> HeartbeatResult:
        """Extend all of them in one statement."""

    def open_session(self, owner: str, ttl: float) -> Session:
        """Register a holder of leases that lives ``ttl`` seconds at a time."""

    def renew_session(self, session: Session, *, look: bool = True) -> Renewal:
        """Extend the session by its ttl from now (also after it ran out) and tell which leases it holds.

        ``look=False``: who holds nothing need not know; the answer is empty.
        """

    def close_session(self, session: Session) -> int:
        """End the session; what it still holds is requeued (as delivered). Returns how many. Idempotent."""

    def reap_expired(self) -> int:
        """Take back leases that have run out; returns how many.

        A lease has run out when its ``lease_until`` has passed and, if it was claimed under a session, the
        session's end has passed too (at ``lease_until`` exactly it is still valid). Canceled-marked →
        ``canceled``; else lease_lost+1 → ``failed`` (reason ``lease_lost``) at ``lease_lost_max``, or
        ``pending``. Also wakes or cancels blocked executions whose parents have all ended, among them those that
        depend on a task of which nothing goes on and that has no result after which nothing follows: it is taken for
        failed, unless something of its workflow (its root_id) goes on. Wakes ``to_answer`` when an answer is due.
        """

    def drop_expired(self, queues: Sequence[str]) -> int:
        """Do to expired executions at the front of these queues what ``dequeue`` does; returns how many.

        For queues whose consumers may be slow or gone. Behind one that has not expired others may stay.
        """

    def reap_in(self) -> float:
        """How many seconds at the least no lease can run out, by the last look of ``reap_expired``; 0 if not known.

        For holders whose lease times are not shorter than this broker's.
        """

    def runs_out_in(self) -> float:
        """In how many seconds the first lease would run out that nobody renews, by the last look of ``reap_expired``.

        Infinite when nothing is held, or when that is not known; 0 when the time has come.
        """

    def prune(self, limit: int = 1000) -> int:
        """Delete at most ``limit`` final executions past their keeping time, and what only they needed.

        Also at most ``limit`` revocations and ``limit`` ticks past theirs. Returns the largest of these numbers.
        """

    # -- control ------------------------------------------------------------------------------------

    def cancel(self, id: int) -> State:
        """Cancel; returns the state it has now.

        A waiting execution becomes ``canceled`` and its fail-fast children with it, chain-wise. A running
        one is marked: its next heartbeat reports TaskCanceled.

        Raises:
            TaskNotFound: no such id.
            AlreadyFinal: it has ended.
        """

    def cancel_waiting(self, ids: Sequence[int] = (), *, task_ids: Sequence[str] = ()) -> Sequence[Task]:
        """Cancel those that wait of the executions with these ids, and with these task_ids and any type.

        What has a task_id and no type is no task, but a message about one, such as its result.
        Each becomes ``canceled`` and its fail-fast children with it, as by ``cancel``. What runs, has ended or does
        not exist is left alone. Returns the executions as they were before, in id order, without the children.
        The caller has claimed the answers for these (not for the children), as by ``claim_answers``.
        """

    def replay(self, id: int, *, payload: bytes | None = None, allow_completed: bool = False) -> int:
        """Copy a final execution, the newest of its chain, to a new ``pending`` one; returns the new id.

        ``replay_of`` is set, counters are zero, the payload is kept or replaced; the old row is untouched. The new one
        locks the unique key of the old.

        Raises:
            TaskNotFound, ReplayNotFinal, AlreadyReplayed: as named; a chain never forks, also under a race.
            TaskExists: another execution has locked its unique key.
            CompletedNotAllowed: it completed and ``allow_completed`` is not set.
        """

    def purge(self, queue: str) -> int:
        """Remove everything that waits in the queue (ready, delayed, blocked); returns how many."""

    # -- answering ----------------------------------------------------------------------------------

    def claim_answers(self, limit: int, queues: Sequence[str] | None = None, *, older: float = 0.0) -> Sequence[Task]:
        """Claim up to ``limit`` executions that have ended and want an answer; each by one caller only.

        An execution that has a type becomes due (``answer_at`` is that instant) in the transaction that makes it
        ``failed`` or ``canceled``, unless that was told (see ``fail``) or it is removed at once. Its caller then has
        to be told that it will not be done. Those of ``queues`` (``None``: of all) are given at once, those of other
        queues when they have been due for ``older`` seconds; the longest due first.
        Each is due again after ANSWER_WITHIN seconds, so that a claimer that dies is followed by another: call
        ``answered`` before. Returns them as they were before: ``answer_at`` is later than ``finished_at`` when
        somebody has claimed them already.
        """

    def answered(self, ids: Sequence[int]) -> None:
        """Nobody needs to answer for these any more. What has no answer due, or does not exist, is left alone."""

    # -- asking -------------------------------------------------------------------------------------

    def get(self, id: int) -> Task:
        """One execution. Raises TaskNotFound."""

    def list(self, filter: Filter | None = None) -> list[Task]:
        """Filter, then sort by (created_at, id), then offset, then limit."""

    def waiting(self, after: int = 0, limit: int = 1000) -> Sequence[Task]:
        """A page of the waiting executions of all queues: the first ``limit`` with ids above ``after``, in id order."""

    def inspect(self, task_id: str) -> Inspection | None:
        """What is stored of a task (executions with a type), or ``None``: no execution is stored."""

    def running(self, task_ids: Sequence[str]) -> set[str]:
        """Those of the task_ids under which an execution that has a type is running."""

    def queue_len(self, queue: str) -> int:
        """How many are ``pending`` or ``retrying`` in the queue, delayed ones included."""

    def queue_lens(self, queues: Iterable[str]) -> Mapping[str, int]:
        """``queue_len`` of several queues at once; 0 for those with nothing."""

    def counts(self) -> dict[tuple[str, State], int]:
        """How many executions per (type, state); only pairs that have any."""

    # -- quotas -------------------------------------------------------------------------------------

    def queue_quota(self, key: str, limit: int, window: float, n: int = 1) -> Reservation | None:
        """Reserve ``n`` starts of the ``limit`` that a window of ``window`` seconds allows, or ``None``.

        Windows are aligned to the epoch on the database's clock. A failure always admits less, never more.
        """

    def release_quota(self, reservation: Reservation) -> bool:
        """Give a reservation back to its own window; ``False`` when that window has passed."""

    # -- life ---------------------------------------------------------------------------------------

    def watch(self, wake: Wake) -> Watch:
        """Be told of new work of other processes, as far as the store can; close it in the end.

        ``wake`` is called (in another thread) with the queues that have got some, or with ``None`` when any may
        have. A word may be lost and may come for nothing: whoever watches looks by itself every
        :attr:`.watch.Watch.longest_pause` seconds and, having heard or found something, goes on looking for
        :data:`.watch.LOOK_ON` seconds.
        """

    def due_in(self, queues: Sequence[str]) -> float:
        """How many seconds at the least there will be nothing to claim from these queues, unless somebody adds it.

        By the last dequeue from them: 0 unless that has shown that they hold nothing that could be claimed, otherwise
        the time until the first delayed execution is due, which may be infinite.
        """

    def wake(self) -> None:
        """Wake this process's waiting ``dequeue`` calls, so that they look again."""

    def close(self) -> None:
        """Release every connection. Idempotent."""
