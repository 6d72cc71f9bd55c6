"""Runs that were acknowledged when they began: kept until they end, and never repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.model import FailKind, Lease, State
from kombu_taskgate.testing.clock import FakeClock

from .base import QUEUE, Cases, put, put_many, state_of, take
from .store import Store

#: What makes an execution pending again that has not begun.
TAKEN_BACK: dict[str, Callable[[Broker, Lease], object]] = {
    "lost": lambda broker, lease: broker.fail(lease, FailKind.LOST, detail="killed"),
    "requeue": lambda broker, lease: broker.requeue(lease),
    "unseen": lambda broker, lease: broker.requeue(lease, delivered=False),
}


class BeginCases(Cases):
    """begin_many."""

    def test_begin_keeps_the_lease(self, broker: Broker, clock: FakeClock) -> None:
        """It stays running under its lease, which is renewed and settled as any other."""
        ids = put_many(broker, 3)
        claims = broker.dequeue([QUEUE], 3)
        assert broker.begin_many(claims[:2]) == []
        assert [broker.get(id).begun for id in ids] == [True, True, False]
        assert state_of(broker, ids[0]) is State.RUNNING
        clock.advance(7)
        broker.heartbeat(claims[0])
        clock.advance(7)
        broker.heartbeat(claims[0])
        assert broker.begin_many(claims[:1]) == [], "twice does no harm"
        assert broker.ack_many(claims[:2]) == []
        assert [task.id for task in broker.list()] == ids[2:]

    def test_begin_is_refused_without_the_lease(self, broker: Broker) -> None:
        """A lease that another has, or that was settled, begins nothing; the others of the call do."""
        put_many(broker, 3)
        acked, requeued, good = broker.dequeue([QUEUE], 3)
        broker.ack(acked)
        broker.requeue(requeued)
        again = take(broker)
        strange = Lease(10**12, 3)
        refused = broker.begin_many([acked, requeued, good, strange])
        assert sorted(lease.id for lease in refused) == sorted([acked.id, requeued.id, strange.id])
        assert (broker.get(again.id).begun, broker.get(good.id).begun) == (False, True)
        assert broker.begin_many([]) == []

    def test_begin_with_acks_and_claims(self, broker: Broker) -> None:
        """Beginnings go along with acks and claims."""
        put_many(broker, 3)
        acked, begun = broker.dequeue([QUEUE], 2)
        refused, claims = broker.ack_and_dequeue([acked], [QUEUE], 5, begin=[begun, acked])
        assert [lease.id for lease in refused] == [acked.id], "what is acked has ended"
        assert len(claims) == 1
        assert [task.begun for task in broker.list()] == [True, False]

    def test_reaped_after_it_began(self, store: Store, clock: FakeClock) -> None:
        """With its holder dead it fails at once, however many losses are allowed, and says what would change that."""
        broker = store.open(clock=clock, lease_ttl=10, lease_lost_max=100)
        session = broker.open_session("w", 10)
        id = put(broker)
        child = put(broker, parents=[id])
        broker.begin_many([take(broker, session=session, owner="w")])
        plain = put(broker)
        take(broker, session=session)
        clock.advance(10.001)
        assert broker.reap_expired() == 2
        task = broker.get(id)
        assert (task.state, task.reason, task.lease_lost, task.owner) == (State.FAILED, "lost", 1, "w")
        assert "task_acks_late" in (task.detail or "")
        assert state_of(broker, child) is State.CANCELED
        assert state_of(broker, plain) is State.PENDING

    @pytest.mark.parametrize("way", TAKEN_BACK)
    def test_never_pending_again(self, broker: Broker, way: str) -> None:
        """Whatever gives it back makes a dead letter of it."""
        id = put(broker)
        claim = take(broker)
        broker.begin_many([claim])
        TAKEN_BACK[way](broker, claim)
        task = broker.get(id)
        assert (task.state, task.reason, task.begun) == (State.FAILED, "lost", False)
        assert (task.detail or "").startswith("killed: ") == (way == "lost")
        assert broker.dequeue([QUEUE]) == []

    @pytest.mark.parametrize("told", [False, True])
    @pytest.mark.parametrize("kind", [FailKind.LOST, FailKind.SKIP])
    def test_answer_for_what_had_begun(self, broker: Broker, kind: FailKind, told: bool) -> None:
        """Whoever says that it is over also says whether its caller knows."""
        id = put(broker, type="t")
        claim = take(broker)
        broker.begin_many([claim])
        assert broker.fail(claim, kind, told=told) is State.FAILED
        assert (broker.get(id).answer_at is None) is told

    def test_session_closed_after_it_began(self, broker: Broker) -> None:
        """A holder that says goodbye without its end leaves a dead letter."""
        session = broker.open_session("w", 10)
        begun, plain = put_many(broker, 2)
        claims = broker.dequeue([QUEUE], 2, session=session)
        broker.begin_many(claims[:1])
        assert broker.close_session(session) == 2
        assert (state_of(broker, begun), broker.get(begun).reason) == (State.FAILED, "lost")
        assert state_of(broker, plain) is State.PENDING

    @pytest.mark.parametrize("way", ["reap", "requeue"])
    def test_canceled_after_it_began(self, broker: Broker, clock: FakeClock, way: str) -> None:
        """One that was to be canceled anyway is canceled."""
        id = put(broker)
        claim = take(broker)
        broker.begin_many([claim])
        broker.cancel(id)
        clock.advance(10.001)
        if way == "reap":
            assert broker.reap_expired() == 1
        else:
            broker.requeue(claim)
        assert (state_of(broker, id), broker.get(id).reason) == (State.CANCELED, "canceled")

    @pytest.mark.parametrize("kind", [FailKind.BUSINESS, FailKind.THROTTLED])
    def test_a_failure_puts_it_back(self, broker: Broker, clock: FakeClock, kind: FailKind) -> None:
        """What its holder puts back itself runs again, and has not begun then."""
        id = put(broker)
        claim = take(broker)
        broker.begin_many([claim])
        assert broker.fail(claim, kind, delay=5) is State.RETRYING
        assert broker.get(id).begun is False
        clock.advance(5)
        take(broker)
        clock.advance(10.001)
        broker.reap_expired()
        assert state_of(broker, id) is State.PENDING

    def test_replay_after_it_began(self, broker: Broker) -> None:
        """A replay of the dead letter is an execution like others."""
        claim = take_begun(broker)
        broker.fail(claim, FailKind.LOST)
        copy = broker.replay(claim.id)
        assert (state_of(broker, copy), broker.get(copy).begun) == (State.PENDING, False)


def take_begun(broker: Broker) -> Lease:
    """A lease whose run has begun."""
    put(broker)
    claim = take(broker)
    broker.begin_many([claim])
    return claim
