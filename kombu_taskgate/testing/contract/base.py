"""Fixtures and shorthand that all cases share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import TaskgateError
from kombu_taskgate.core.model import Claim, FailKind, Lease, NewTask, State
from kombu_taskgate.testing.clock import FakeClock

from .store import Store

QUEUE = "work"


class Cases:
    """A group of contract cases; the fixture ``store`` comes from who runs them."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def broker(self, store: Store, clock: FakeClock) -> Broker:
        """A broker under the fake clock, with short leases."""
        return store.open(clock=clock, lease_ttl=10)


def put(broker: Broker, queue: str = QUEUE, **values: Any) -> int:
    """Enqueue one task; its id."""
    return broker.enqueue(NewTask(queue, **values))


def put_many(broker: Broker, number: int, queue: str = QUEUE, **values: Any) -> list[int]:
    """Enqueue several equal tasks; their ids."""
    return broker.enqueue_many([NewTask(queue, **values) for _ in range(number)])


def take(broker: Broker, queue: str = QUEUE, **options: Any) -> Claim:
    """Claim one task that must be ready."""
    claims = broker.dequeue([queue], **options)
    assert len(claims) == 1, f"queue {queue!r} had {len(claims)} ready tasks, not 1"
    return claims[0]


def state_of(broker: Broker, id: int) -> State:
    """State of one execution."""
    return broker.get(id).state


def ids_of(rows: Sequence[Any]) -> list[int]:
    """The ids of claims, leases or tasks, in their order."""
    return [row.id for row in rows]


def settlers(broker: Broker) -> dict[str, Callable[[Lease], object]]:
    """Every call that a lease token guards, by name."""
    return {
        "ack": broker.ack,
        "fail": lambda lease: broker.fail(lease, FailKind.BUSINESS),
        "throttle": lambda lease: broker.fail(lease, FailKind.THROTTLED),
        "skip": lambda lease: broker.fail(lease, FailKind.SKIP),
        "lose": lambda lease: broker.fail(lease, FailKind.LOST),
        "requeue": broker.requeue,
        "heartbeat": broker.heartbeat,
        "finish_canceled": broker.finish_canceled,
    }


def error_of(call: Callable[[], object]) -> TaskgateError | None:
    """The error of ours that a call raises, or ``None``."""
    try:
        call()
    except TaskgateError as error:
        return error
    return None
