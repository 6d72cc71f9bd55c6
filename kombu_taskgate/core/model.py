"""What the broker talks about: tasks, their states, leases and sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

#: Longest queue name, task id, business key and owner, in characters (AMQP 0-9-1 short strings: 255 bytes).
MAX_NAME = 255

#: Lease token that no claim ever issues; it never matches.
NO_TOKEN = 0

#: Why an execution that had begun (see ``Broker.begin_many``) is not delivered again.
WAS_BEGUN = (
    "it was acknowledged when it started, and the end of its run was never told; acknowledge it when it has ended "
    "(in Celery: task_acks_late = True and task_reject_on_worker_lost = True) and it runs again instead"
)
#: How long in seconds whoever has claimed the answer for an execution has time for it, before another may.
ANSWER_WITHIN = 60.0


class State(str, Enum):
    """State of one execution; the last three are final."""

    BLOCKED = "blocked"
    PENDING = "pending"
    RUNNING = "running"
    RETRYING = "retrying"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"

    def __str__(self) -> str:
        return self.value


FINAL = frozenset({State.COMPLETED, State.FAILED, State.CANCELED})
WAITING = frozenset({State.BLOCKED, State.PENDING, State.RETRYING})

#: Which state may follow which. ``None`` is "not yet stored". docs/architecture.md draws the same graph.
TRANSITIONS: Mapping[State | None, frozenset[State]] = {
    None: frozenset({State.BLOCKED, State.PENDING, State.CANCELED}),
    State.BLOCKED: frozenset({State.PENDING, State.CANCELED}),
    State.PENDING: frozenset({State.RUNNING, State.CANCELED, State.FAILED}),
    State.RETRYING: frozenset({State.RUNNING, State.CANCELED, State.FAILED}),
    State.RUNNING: frozenset({State.COMPLETED, State.FAILED, State.RETRYING, State.PENDING, State.CANCELED}),
    State.COMPLETED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELED: frozenset(),
}


class FailKind(str, Enum):
    """Why a running execution is given back as not done."""

    #: The work itself failed: ``attempts`` grows; over ``max_retry`` it becomes ``failed``.
    BUSINESS = "business"
    #: A limit said "not now": ``throttled`` grows, ``attempts`` does not; at ``throttled_max`` it becomes ``failed``.
    THROTTLED = "throttled"
    #: Do not try again: ``failed`` at once.
    SKIP = "skip"
    #: What ran it died, as far as the holder of the lease can tell: ``lease_lost`` grows as when the lease is reaped,
    #: only at once; at ``lease_lost_max``, or when it had begun, it becomes ``failed``, else it is ``pending``.
    LOST = "lost"


class Reason(str, Enum):
    """Why an execution became ``failed`` or ``canceled`` (column ``reason``)."""

    BUSINESS = "business"
    THROTTLED = "throttled"
    REJECTED = "rejected"
    LEASE_LOST = "lease_lost"
    #: Its run had been acknowledged when it began, and nobody has told its end.
    LOST = "lost"
    MAX_DELIVERIES = "max_deliveries"
    UNDECODABLE = "undecodable"
    CANCELED = "canceled"
    EXPIRED = "expired"
    PARENT = "parent"

    def __str__(self) -> str:
        return self.value


@dataclass(slots=True)
class NewTask:
    """One execution to store.

    Args:
        queue: where it waits; 1 to 255 characters.
        payload: opaque bytes.
        type: what kind of work (for Celery: the task's name).
        task_id, root_id, parent_task_id, group_id: Celery's ids, so that operators can ask by them.
        priority: higher goes first; -32767 to 32767.
        run_at: instant (ms) before which it waits; ``None`` is now.
        delay: seconds from the database's now; only without ``run_at``.
        expires_at: instant (ms) from which it is dropped instead of claimed.
        expires_in: the same in seconds from the database's now; with both, the earlier one counts.
        key: business key; at most one chain of executions has it.
        unique_key: at most one execution that has not ended has it: it is locked until then, however that comes about.
        take_over: take the lock of ``unique_key`` from a running execution of the same task_id, if one has it.
        parents: ids that must complete first.
        depends_on: task_ids of tasks whose results must be a success first. A task_id may be of many executions, and
            its result is what counts.
        fail_fast: canceled when a parent fails or is canceled; otherwise such a parent counts as done.
        max_retry: business failures after which it is ``failed``.
    """

    queue: str
    payload: bytes = b""
    type: str = ""
    task_id: str | None = None
    root_id: str | None = None
    parent_task_id: str | None = None
    group_id: str | None = None
    priority: int = 0
    run_at: int | None = None
    delay: float | None = None
    expires_at: int | None = None
    expires_in: float | None = None
    key: str | None = None
    unique_key: str | None = None
    take_over: bool = False
    parents: Sequence[int] = ()
    depends_on: Sequence[str] = ()
    fail_fast: bool = True
    max_retry: int = 3


@dataclass(slots=True)
class Task:
    """One stored execution, as ``get`` and ``list`` show it.

    ``answer_at`` is the instant (ms) from which somebody may answer for it, see ``claim_answers``; ``None``: there is
    nothing to answer.
    """

    id: int
    queue: str
    state: State
    type: str = ""
    payload: bytes = b""
    task_id: str | None = None
    root_id: str | None = None
    parent_task_id: str | None = None
    group_id: str | None = None
    priority: int = 0
    run_at: int = 0
    created_at: int = 0
    expires_at: int | None = None
    finished_at: int | None = None
    key: str | None = None
    replay_of: int | None = None
    fail_fast: bool = True
    pending_parents: int = 0
    attempts: int = 0
    max_retry: int = 3
    throttled: int = 0
    lease_lost: int = 0
    deliveries: int = 0
    owner: str | None = None
    lease_until: int | None = None
    cancel_requested: bool = False
    begun: bool = False
    unique_key: str | None = None
    #: Whether it holds the lock of its unique key.
    locks: bool = False
    reason: str | None = None
    detail: str | None = None
    result: bytes | None = None
    answer_at: int | None = None


@dataclass(slots=True)
class Inspection:
    """What is stored of a task: its newest execution and what only the other tables know of it.

    Args:
        task: the newest execution.
        executions: how many are stored under its task_id.
        lease_until: when its lease ends (ms) unless it is renewed; ``None``: it does not run.
        position: place among those of its queue that can be claimed, 1 is the next; ``None``: it can't be.
        waits_for: task_ids of the parents that it still waits for.
    """

    task: Task
    executions: int
    lease_until: int | None = None
    position: int | None = None
    waits_for: Sequence[str] = ()


@dataclass(slots=True)
class Lease:
    """The right to settle one execution: it ends at ``lease_until`` (ms) unless renewed."""

    id: int
    token: int
    owner: str = ""
    lease_until: int = 0


@dataclass(slots=True)
class Claim(Lease):
    """A lease together with what the worker needs to do the work."""

    queue: str = ""
    payload: bytes = b""
    type: str = ""
    task_id: str | None = None
    priority: int = 0
    run_at: int = 0
    created_at: int = 0
    deliveries: int = 1
    attempts: int = 0
    lease_lost: int = 0


@dataclass(slots=True)
class Session:
    """One living process (or connection) under which many leases are held.

    A lease claimed under a session is valid while the session is renewed, however many leases that is: one
    row is written per renewal, not one per lease. ``ttl`` is in seconds.
    """

    id: int
    owner: str
    ttl: float


@dataclass(slots=True)
class Renewal:
    """What a renewal of a session found: the leases it still holds (id -> token) and those marked canceled."""

    held: dict[int, int] = field(default_factory=dict)
    canceled: set[int] = field(default_factory=set)


@dataclass(slots=True)
class HeartbeatResult:
    """What ``heartbeat_many`` found: leases that are lost, and leases that are renewed but marked canceled."""

    lost: list[Lease] = field(default_factory=list)
    canceled: list[Lease] = field(default_factory=list)


@dataclass(slots=True)
class StateChange:
    """Announced to the notify callback after commit. ``before`` is ``None`` for a new execution."""

    id: int
    queue: str
    before: State | None
    after: State


@dataclass(slots=True)
class Filter:
    """Which executions ``list`` shows; ``None`` does not restrict. Sorted by (created_at, id)."""

    queue: str | None = None
    states: Sequence[State] | None = None
    type: str | None = None
    key: str | None = None
    task_id: str | None = None
    group_id: str | None = None
    offset: int = 0
    limit: int = 100


@dataclass(slots=True)
class Reservation:
    """Part of a window's quota: ``n`` starts in the window that began at ``window_start`` (ms)."""

    key: str
    window: float
    window_start: int
    n: int
