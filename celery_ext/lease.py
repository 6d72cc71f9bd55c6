"""Under which lease something is said of a task: what tells a late word from a new one."""

from __future__ import annotations

from typing import Any, NamedTuple

from kombu_taskgate.transport.message import LEASE_HEADER

#: Larger than every token: said when nobody holds the execution any more.
_AFTER_ALL = 2**62


class RunLease(NamedTuple):
    """An execution and the token of its lease; zeros: none is known."""

    execution: int = 0
    token: int = 0
    #: Whether the lease was given by the broker for a run, so that it can be looked up.
    held: bool = False


NONE = RunLease()


def lease_of(request: Any, task_id: str | None = None) -> RunLease:
    """The lease of the run that a request (or a context) is of.

    Args:
        request: as Celery hands it to its result backend; may be ``None``.
        task_id: the task that something is said of. What a run says of another task is said under no lease.
    """
    lease = getattr(request, LEASE_HEADER, None)
    if not isinstance(lease, (list, tuple)) or not lease or (task_id is not None and request.id != task_id):
        return NONE
    if len(lease) == 1:
        return RunLease(int(lease[0]), _AFTER_ALL)
    return RunLease(int(lease[0]), int(lease[1]), held=True)


def without_lease(execution: int) -> list[int]:
    """The header for what is said of an execution after all of its leases have ended."""
    return [execution]
