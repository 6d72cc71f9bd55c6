"""Leases: extended by heartbeats, taken back when they ran out, by the store's clock."""

from __future__ import annotations

import time
from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import LeaseLost
from kombu_taskgate.core.model import HeartbeatResult, Lease, State
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import QUEUE, Cases, put, put_many, state_of, take
from .store import SERVER_CLOCK, Store, require


class LeaseCases(Cases):
    """heartbeat, heartbeat_many and reap_expired."""

    def test_heartbeat_extends(self, broker: Broker, clock: FakeClock) -> None:
        """A heartbeat counts from now, not from the old end, and is visible to all."""
        id = put(broker)
        claim = take(broker)
        for _ in range(5):
            clock.advance(7)
            until = broker.heartbeat(claim)
            assert until == broker.get(id).lease_until == clock.now_ms() + 10_000
            assert broker.reap_expired() == 0
        assert (broker.get(id).deliveries, broker.get(id).lease_lost) == (1, 0)

    def test_heartbeat_many(self, broker: Broker, clock: FakeClock) -> None:
        """One call extends all that are held; the lost and the canceled are named."""
        put_many(broker, 4)
        good, marked, acked, also_good = claims = broker.dequeue([QUEUE], 4)
        broker.cancel(marked.id)
        broker.ack(acked)
        clock.advance(8)
        found = broker.heartbeat_many([*claims, Lease(10**12, 3)])
        assert found.lost == [acked, Lease(10**12, 3)]
        assert found.canceled == [marked]
        for lease in (good, marked, also_good):
            assert broker.get(lease.id).lease_until == clock.now_ms() + 10_000
        assert broker.heartbeat_many([]) == HeartbeatResult()

    def test_lease_reap(self, broker: Broker, clock: FakeClock) -> None:
        """LeaseReap: a lease that ran out is taken back and counted; at the cap it is a dead letter."""
        id = put(broker)
        child = put(broker, parents=[id])
        for loss in (1, 2, 3):
            claim = take(broker, owner=f"worker {loss}")
            assert (claim.deliveries, claim.lease_lost) == (loss, loss - 1)
            clock.advance(10)
            assert broker.reap_expired() == 0, "at lease_until itself a lease is still valid"
            clock.advance(0.001)
            assert broker.reap_expired() == 1
            assert broker.get(id).lease_lost == loss
            assert broker.reap_expired() == 0
        task = broker.get(id)
        assert (task.state, task.reason, task.attempts) == (State.FAILED, "lease_lost", 0)
        assert (task.owner, task.lease_until, task.finished_at) == ("worker 3", None, clock.now_ms())
        assert (state_of(broker, child), broker.get(child).reason) == (State.CANCELED, "parent")
        assert broker.dequeue([QUEUE]) == []

    def test_reaped_keeps_its_place(self, broker: Broker, clock: FakeClock) -> None:
        """What comes back from a dead worker goes before what was published later."""
        first, second = put_many(broker, 2)
        run_at = broker.get(first).run_at
        take(broker)
        clock.advance(11)
        broker.reap_expired()
        assert (state_of(broker, first), broker.get(first).run_at) == (State.PENDING, run_at)
        assert [take(broker).id, take(broker).id] == [first, second]

    def test_reap_counts_only_lost_leases(self, broker: Broker, clock: FakeClock) -> None:
        """reap_expired answers how many it took back and leaves all others alone."""
        ids = put_many(broker, 6)
        claims = broker.dequeue([QUEUE], 4)
        clock.advance(6)
        broker.heartbeat_many(claims[2:])
        take(broker)
        clock.advance(5)
        assert broker.reap_expired() == 2
        assert [state_of(broker, id).value for id in ids] == ["pending"] * 2 + ["running"] * 3 + ["pending"]
        assert [broker.get(id).lease_lost for id in ids] == [1, 1, 0, 0, 0, 0]

    def test_many_lost_leases(self, broker: Broker, clock: FakeClock) -> None:
        """However many leases a dead worker held, they come back; none twice."""
        put_many(broker, 1200)
        assert len(broker.dequeue([QUEUE], 1200)) == 1200
        clock.advance(11)
        total = 0
        while reaped := broker.reap_expired():
            total += reaped
        assert total == 1200
        assert broker.queue_len(QUEUE) == 1200
        assert {task.lease_lost for task in broker.list()} == {1}

    def test_two_reapers(self, store: Store, clock: FakeClock) -> None:
        """Reapers that race take each lease back once, and each dead letter is made once."""
        changes: list[State] = []
        brokers = [
            store.open(clock=clock, lease_ttl=10, lease_lost_max=2, notify=lambda change: changes.append(change.after))
            for _ in range(4)
        ]
        ids = put_many(brokers[0], 60)
        for loss in (1, 2):
            assert len(brokers[0].dequeue([QUEUE], 100)) == 60
            clock.advance(10.001)
            outcomes = together([broker.reap_expired for broker in brokers])
            assert errors_of(outcomes) == []
            reaped = sum(outcome for outcome in outcomes if isinstance(outcome, int))
            while more := brokers[0].reap_expired():
                reaped += more
            assert reaped == 60
            assert {brokers[0].get(id).lease_lost for id in ids} == {loss}
        assert {state_of(brokers[0], id) for id in ids} == {State.FAILED}
        assert changes.count(State.FAILED) == 60

    def test_reaper_against_holder(self, store: Store, clock: FakeClock) -> None:
        """A reaper and a holder that race: one of them has its way, and the other knows."""
        brokers = [store.open(clock=clock, lease_ttl=10, lease_lost_max=100, max_deliveries=100) for _ in range(3)]
        id = put(brokers[0])
        for _ in range(10):
            claim = take(brokers[0])
            clock.advance(10.001)
            beat, reaped, _ = together(
                [partial(brokers[1].heartbeat, claim), brokers[0].reap_expired, brokers[2].reap_expired]
            )
            if isinstance(beat, LeaseLost):
                assert state_of(brokers[0], id) is State.PENDING
            else:
                assert isinstance(beat, int), beat
                task = brokers[0].get(id)
                if task.state is State.RUNNING:
                    assert task.lease_until == clock.now_ms() + 10_000
                    brokers[0].requeue(claim)
            assert not isinstance(reaped, BaseException), reaped

    def test_reap_wakes_who_waits(self, store: Store, clock: FakeClock) -> None:
        """What a reaper takes back is given to a caller that waits."""
        brokers = [store.open(clock=clock, lease_ttl=10) for _ in range(2)]
        put(brokers[0])
        dead = take(brokers[0])
        clock.advance(11)
        claimed, reaped = together([lambda: take(brokers[1], timeout=30).id, brokers[0].reap_expired])
        assert (claimed, reaped) == (dead.id, 1)

    @pytest.mark.parametrize("hours", [1, -1])
    def test_wrong_clock_of_the_caller(self, store: Store, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
        """A caller whose clock is an hour wrong changes nothing: the store's own clock decides."""
        require(store, SERVER_CLOCK)
        right = store.open(lease_ttl=600)
        put(right, payload=b"held")
        held = take(right)
        real_time, real_time_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: real_time() + hours * 3600)
        monkeypatch.setattr(time, "time_ns", lambda: real_time_ns() + hours * 3600 * 10**9)
        wrong = store.open(lease_ttl=600)
        now_ms = real_time() * 1000
        near = 600_000  # the tolerance: neither side's hour, and more than a test server's clock can be off

        assert wrong.reap_expired() == 0
        session = wrong.open_session("wrong", 600)
        put(wrong, delay=1200)
        ready = put(wrong)
        claim = take(wrong, session=session)
        assert claim.id == ready
        assert abs(claim.lease_until - 600_000 - now_ms) < near
        assert abs(wrong.heartbeat(claim) - 600_000 - now_ms) < near
        assert [abs(task.created_at - now_ms) < near for task in wrong.list()] == [True] * 3
        assert wrong.renew_session(session).held == {claim.id: claim.token}
        assert right.reap_expired() == 0
        reservation = wrong.queue_quota("calls", 1, 86400.0)
        assert reservation is not None
        assert abs(reservation.window_start - now_ms) < 86_400_000 + near
        assert right.release_quota(reservation)
        assert wrong.prune() == 0
        wrong.ack(claim)
        right.ack(held)
