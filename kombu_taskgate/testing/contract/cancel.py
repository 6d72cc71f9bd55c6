"""Canceling: what waits never runs, what runs is told."""

from __future__ import annotations

from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import AlreadyFinal, TaskCanceled, TaskNotFound
from kombu_taskgate.core.model import FailKind, State
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import together

from .base import QUEUE, Cases, error_of, put, state_of, take
from .store import Store


class CancelCases(Cases):
    """cancel and finish_canceled."""

    def test_cancel_states(self, broker: Broker, clock: FakeClock) -> None:
        """CancelStates: waiting states end at once, running is marked, final and unknown are errors."""
        pending = put(broker, "a")
        blocked = put(broker, "a", parents=[pending])
        delayed = put(broker, "a", delay=60)
        retrying = put(broker, "b")
        broker.fail(take(broker, "b"), delay=60)
        clock.advance(1)
        for id in (blocked, pending, delayed, retrying):
            assert broker.cancel(id) is State.CANCELED
            task = broker.get(id)
            assert (task.state, task.reason, task.finished_at) == (State.CANCELED, "canceled", clock.now_ms())
            with pytest.raises(AlreadyFinal):
                broker.cancel(id)
        clock.advance(60)
        assert broker.dequeue(["a", "b"], 9) == []
        with pytest.raises(TaskNotFound):
            broker.cancel(10**12)

    def test_cancel_running(self, broker: Broker, clock: FakeClock) -> None:
        """A running execution is marked; its heartbeat says so and renews the lease all the same."""
        id = put(broker)
        child = put(broker, parents=[id])
        claim = take(broker)
        assert broker.cancel(id) is State.RUNNING
        assert broker.cancel(id) is State.RUNNING
        assert (state_of(broker, id), broker.get(id).cancel_requested) == (State.RUNNING, True)
        assert state_of(broker, child) is State.BLOCKED
        for _ in range(3):
            clock.advance(8)
            with pytest.raises(TaskCanceled):
                broker.heartbeat(claim)
            assert broker.get(id).lease_until == clock.now_ms() + 10_000
            assert broker.reap_expired() == 0
        broker.finish_canceled(claim)
        task = broker.get(id)
        assert (task.state, task.reason, task.finished_at) == (State.CANCELED, "canceled", clock.now_ms())
        assert (state_of(broker, child), broker.get(child).reason) == (State.CANCELED, "parent")

    def test_finish_canceled_without_a_mark(self, broker: Broker) -> None:
        """A holder may end its execution as canceled on its own account."""
        id = put(broker)
        broker.finish_canceled(take(broker))
        assert (state_of(broker, id), broker.get(id).reason) == (State.CANCELED, "canceled")

    def test_reap_of_a_marked_execution(self, broker: Broker, clock: FakeClock) -> None:
        """A marked execution whose holder died is canceled, not run again, and its children know."""
        id = put(broker)
        child = put(broker, parents=[id])
        take(broker)
        broker.cancel(id)
        clock.advance(10.001)
        assert broker.reap_expired() == 1
        task = broker.get(id)
        assert (task.state, task.reason, task.lease_lost) == (State.CANCELED, "canceled", 0)
        assert state_of(broker, child) is State.CANCELED
        assert broker.dequeue([QUEUE], 5) == []

    def test_ack_of_a_marked_parent_wakes_children(self, broker: Broker) -> None:
        """Work that was done before it heard of the cancel is done."""
        id = put(broker)
        child = put(broker, parents=[id])
        claim = take(broker)
        broker.cancel(id)
        broker.ack(claim)
        assert state_of(broker, child) is State.PENDING

    def test_cancel_again_after_a_replay(self, broker: Broker) -> None:
        """A mark belongs to one execution; its replay starts without."""
        id = put(broker)
        claim = take(broker)
        broker.cancel(id)
        broker.fail(claim, FailKind.SKIP)
        copy = broker.replay(id)
        assert broker.get(copy).cancel_requested is False
        assert broker.heartbeat(take(broker)) > 0

    def test_cancel_race(self, store: Store, clock: FakeClock) -> None:
        """Cancel against claim: canceled and never delivered, or delivered and marked."""
        brokers = [store.open(clock=clock) for _ in range(2)]
        for _ in range(10):
            id = put(brokers[0])
            claims, state = together([partial(brokers[0].dequeue, [QUEUE]), partial(brokers[1].cancel, id)])
            assert not isinstance(claims, BaseException), claims
            if state is State.CANCELED:
                assert claims == []
                assert state_of(brokers[0], id) is State.CANCELED
            else:
                assert state is State.RUNNING, state
                assert isinstance(error_of(partial(brokers[0].heartbeat, claims[0])), TaskCanceled)
                brokers[0].finish_canceled(claims[0])

    def test_cancel_against_ack(self, store: Store, clock: FakeClock) -> None:
        """Cancel against ack: the ack succeeds; the cancel marked it before, or came too late."""
        brokers = [store.open(clock=clock, keep_completed=60) for _ in range(2)]
        for _ in range(10):
            id = put(brokers[0])
            claim = take(brokers[0])
            acked, canceled = together([partial(brokers[0].ack, claim), partial(brokers[1].cancel, id)])
            assert acked is None, acked
            assert canceled is State.RUNNING or isinstance(canceled, AlreadyFinal), canceled
            assert state_of(brokers[0], id) is State.COMPLETED
