"""What callers of a task get when the broker has given it up."""

from __future__ import annotations

from celery.exceptions import TaskError


class DeadLettered(TaskError):
    """The broker has given the task up: its caller will get no other answer.

    Celery's result backends store the class by its name and its arguments, and find it where this module is imported,
    which is so in every process that uses taskgate as its broker.

    Args:
        message: one sentence: what was given up, why, and how often it was tried.
        reason: ``lease_lost``, ``lost``, ``max_deliveries``, ``rejected``, ``undecodable``, ``throttled`` or
            ``business``.
        deliveries: how often it was delivered.
        lease_lost: how often whoever ran it was lost.
    """

    def __init__(self, message: str = "", reason: str = "", deliveries: int = 0, lease_lost: int = 0) -> None:
        super().__init__(message, reason, deliveries, lease_lost)
        self.reason = reason
        self.deliveries = deliveries
        self.lease_lost = lease_lost

    def __str__(self) -> str:
        return str(self.args[0])
