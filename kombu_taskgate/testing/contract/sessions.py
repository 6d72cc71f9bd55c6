"""Sessions: one renewal keeps many leases."""

from __future__ import annotations

from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import LeaseLost
from kombu_taskgate.core.model import Renewal, State
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import QUEUE, Cases, put, put_many, state_of, take
from .store import Store


class SessionCases(Cases):
    """open_session, renew_session and close_session, and what the reaper makes of them."""

    def test_session_outlives_lease(self, broker: Broker, clock: FakeClock) -> None:
        """A lease claimed under a session is good as long as the session is renewed."""
        session = broker.open_session("w", 5)
        assert (session.owner, session.ttl) == ("w", 5)
        id = put(broker)
        claim = take(broker, owner="w", session=session)
        for _ in range(20):
            clock.advance(4)
            assert broker.renew_session(session).held == {id: claim.token}
            assert broker.reap_expired() == 0
        assert broker.get(id).deliveries == 1
        broker.ack(claim)
        assert broker.renew_session(session) == Renewal()

    def test_renewal_without_a_look(self, broker: Broker, clock: FakeClock) -> None:
        """It renews all the same, and tells nothing."""
        session = broker.open_session("w", 5)
        id = put(broker)
        claim = take(broker, owner="w", session=session)
        for _ in range(20):
            clock.advance(4)
            assert broker.renew_session(session, look=False) == Renewal()
            assert broker.reap_expired() == 0
        assert broker.renew_session(session).held == {id: claim.token}

    def test_session_boundary(self, broker: Broker, clock: FakeClock) -> None:
        """At the session's end itself its leases are still valid; a millisecond later they are not."""
        session = broker.open_session("w", 30)
        id = put(broker)
        take(broker, owner="w", session=session)
        clock.advance(30)
        assert broker.reap_expired() == 0
        clock.advance(0.001)
        assert broker.reap_expired() == 1
        assert (state_of(broker, id), broker.get(id).lease_lost) == (State.PENDING, 1)

    def test_dead_session_with_living_lease(self, broker: Broker, clock: FakeClock) -> None:
        """The session's end alone takes nothing back: the lease has its own time, at the least."""
        session = broker.open_session("w", 2)
        id = put(broker)
        claim = take(broker, owner="w", session=session)
        clock.advance(9)
        broker.heartbeat(claim)
        clock.advance(10)
        assert broker.reap_expired() == 0
        clock.advance(0.001)
        assert broker.reap_expired() == 1
        assert state_of(broker, id) is State.PENDING

    def test_dead_session_loses_all(self, broker: Broker, clock: FakeClock) -> None:
        """When both times have passed all leases of the session are taken back, and only those."""
        dead, alive = broker.open_session("dead", 30), broker.open_session("alive", 30)
        lost = put_many(broker, 3)
        stale = broker.dequeue([QUEUE], 3, owner="dead", session=dead)
        put(broker)
        kept = take(broker, owner="alive", session=alive)
        clock.advance(20)
        broker.renew_session(alive)
        clock.advance(11)
        assert broker.reap_expired() == 3
        assert {state_of(broker, id) for id in lost} == {State.PENDING}
        assert state_of(broker, kept.id) is State.RUNNING
        assert broker.ack_many(stale) == stale
        assert broker.renew_session(dead) == Renewal()

    def test_renewal_revives(self, broker: Broker, clock: FakeClock) -> None:
        """A session renewed after its end, before a reaper came, holds what it held."""
        session = broker.open_session("w", 5)
        id = put(broker)
        claim = take(broker, owner="w", session=session)
        clock.advance(1000)
        assert broker.renew_session(session).held == {id: claim.token}
        assert broker.reap_expired() == 0
        broker.ack(claim)

    def test_renewal_after_long_absence(self, broker: Broker, clock: FakeClock) -> None:
        """A session that was dead so long that the store has tidied up is good again once renewed."""
        session = broker.open_session("w", 5)
        clock.advance(40 * 86400)
        broker.reap_expired()
        broker.prune()
        assert broker.renew_session(session) == Renewal()
        id = put(broker)
        claim = take(broker, owner="w", session=session)
        for _ in range(5):
            clock.advance(4)
            assert broker.renew_session(session).held == {id: claim.token}
        assert broker.reap_expired() == 0

    def test_renewal_reports(self, broker: Broker) -> None:
        """A renewal tells what is held, under which token, and what was asked to stop."""
        session = broker.open_session("w", 5)
        put_many(broker, 4)
        claims = broker.dequeue([QUEUE], 4, owner="w", session=session)
        broker.ack(claims[0])
        broker.cancel(claims[1].id)
        broker.requeue(claims[2])
        other = take(broker)
        assert other.id == claims[2].id
        renewal = broker.renew_session(session)
        assert renewal.held == {claim.id: claim.token for claim in (claims[1], claims[3])}
        assert renewal.canceled == {claims[1].id}

    def test_close_session(self, broker: Broker) -> None:
        """Closing gives back what is held, as delivered, loses nothing and counts no loss."""
        session = broker.open_session("w", 5)
        ids = put_many(broker, 3)
        claims = broker.dequeue([QUEUE], 3, owner="w", session=session)
        broker.ack(claims[0])
        assert broker.close_session(session) == 2
        for id in ids[1:]:
            task = broker.get(id)
            assert (task.state, task.deliveries, task.lease_lost) == (State.PENDING, 1, 0)
        with pytest.raises(LeaseLost):
            broker.ack(claims[1])
        assert broker.close_session(session) == 0
        assert [claim.deliveries for claim in broker.dequeue([QUEUE], 5)] == [2, 2]

    def test_close_does_not_lose_a_cancel(self, broker: Broker) -> None:
        """What was asked to stop does not run again unnoticed after the session's end."""
        session = broker.open_session("w", 5)
        id = put(broker)
        take(broker, owner="w", session=session)
        broker.cancel(id)
        assert broker.close_session(session) == 1
        again = broker.dequeue([QUEUE])
        canceled = broker.heartbeat_many(again).canceled
        assert canceled == again
        assert again or state_of(broker, id) is State.CANCELED

    def test_sessions_do_not_share(self, broker: Broker, clock: FakeClock) -> None:
        """Two sessions of one owner are two."""
        one, two = broker.open_session("w", 5), broker.open_session("w", 5)
        assert one.id != two.id
        put_many(broker, 2)
        first, second = take(broker, owner="w", session=one), take(broker, owner="w", session=two)
        assert broker.renew_session(one).held == {first.id: first.token}
        assert broker.close_session(one) == 1
        assert broker.renew_session(two).held == {second.id: second.token}

    def test_claim_without_session(self, broker: Broker, clock: FakeClock) -> None:
        """A lease that was given back and claimed plainly does not live by the old session."""
        session = broker.open_session("w", 1000)
        put(broker)
        broker.requeue(take(broker, owner="w", session=session))
        take(broker)
        clock.advance(10.001)
        assert broker.renew_session(session).held == {}
        assert broker.reap_expired() == 1

    def test_many_dead_sessions(self, broker: Broker, clock: FakeClock) -> None:
        """However many dead sessions there are, one of them that holds a lease is found."""
        for _ in range(250):
            broker.open_session("gone", 1)
        put(broker)
        take(broker, owner="w", session=broker.open_session("w", 1))
        for _ in range(250):
            broker.open_session("gone", 1)
        clock.advance(11)
        assert broker.reap_expired() == 1

    def test_renewal_against_reaper(self, store: Store, clock: FakeClock) -> None:
        """A renewal and reapers that race: either all is held, or the renewal says what is gone."""
        brokers = [store.open(clock=clock, lease_ttl=1, lease_lost_max=100, max_deliveries=100) for _ in range(3)]
        session = brokers[0].open_session("w", 1)
        ids = put_many(brokers[0], 5)
        for _ in range(10):
            claims = brokers[0].dequeue([QUEUE], 5, owner="w", session=session)
            clock.advance(2)
            outcomes = together(
                [partial(brokers[0].renew_session, session), brokers[1].reap_expired, brokers[2].reap_expired]
            )
            assert errors_of(outcomes) == []
            held = brokers[0].renew_session(session).held
            running = {id for id in ids if state_of(brokers[0], id) is State.RUNNING}
            assert set(held) == running
            refused = brokers[0].requeue_many(claims)
            assert {lease.id for lease in refused} == set(ids) - running
