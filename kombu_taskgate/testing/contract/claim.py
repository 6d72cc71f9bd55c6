"""Claiming: each execution by one caller, in order, fairly, and not what nobody may get any more."""

from __future__ import annotations

from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.model import FailKind, Lease, State
from kombu_taskgate.core.topology import Queue
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import QUEUE, Cases, ids_of, put, put_many, state_of, take
from .store import Store


class ClaimCases(Cases):
    """dequeue, ack_many and ack_and_dequeue."""

    def test_claim_mutex(self, store: Store, clock: FakeClock) -> None:
        """ClaimMutex: of 100 callers one gets the execution."""
        brokers = [store.open(clock=clock) for _ in range(4)]
        # The first time most of them are busy connecting.
        for _ in range(4):
            id = put(brokers[0])
            outcomes = together([partial(brokers[caller % 4].dequeue, [QUEUE]) for caller in range(100)])
            assert errors_of(outcomes) == []
            assert [claim.id for claims in outcomes for claim in claims] == [id]
            assert brokers[0].get(id).deliveries == 1

    def test_claim_race(self, store: Store, clock: FakeClock) -> None:
        """Many executions, many callers with batches: each is claimed and acked once."""
        brokers = [store.open(clock=clock) for _ in range(4)]
        ids = put_many(brokers[0], 200)

        def work(broker: Broker) -> list[int]:
            claimed = []
            while claims := broker.dequeue([QUEUE], 7):
                assert broker.ack_many(claims) == []
                claimed += ids_of(claims)
            return claimed

        outcomes = together([partial(work, broker) for broker in brokers])
        assert errors_of(outcomes) == []
        assert sorted(id for outcome in outcomes if isinstance(outcome, list) for id in outcome) == ids
        assert brokers[0].list() == []

    def test_priority_order(self, broker: Broker, clock: FakeClock) -> None:
        """High priority first, then the earlier run_at, then the lower id; the caller's batches do not matter."""
        now = clock.now_ms()
        normal = put(broker, priority=0)
        low = put(broker, priority=-1)
        high = put(broker, priority=9)
        early = put(broker, priority=0, run_at=now - 1000)
        also_high = put(broker, priority=9)
        assert [take(broker).id, *ids_of(broker.dequeue([QUEUE], 10))] == [high, also_high, early, normal, low]

    def test_claim_of_nothing(self, broker: Broker) -> None:
        """Empty and unknown queues give nothing, at once or after the time-out."""
        put(broker, "other")
        assert broker.dequeue([QUEUE, "never heard of"], 5) == []
        assert broker.dequeue([QUEUE], 5, timeout=0.05) == []
        assert broker.queue_len("other") == 1

    def test_claim_arguments(self, broker: Broker) -> None:
        """No queues, or a limit below one, is a mistake of the caller."""
        with pytest.raises(ConfigError):
            broker.dequeue([])
        with pytest.raises(ConfigError):
            broker.dequeue([QUEUE], 0)

    def test_batch_claim(self, broker: Broker) -> None:
        """A batch has at most the limit, each with a token of its own, and the rest stays."""
        ids = put_many(broker, 25)
        claims = broker.dequeue([QUEUE], 10)
        assert ids_of(claims) == ids[:10]
        assert {state_of(broker, claim.id) for claim in claims} == {State.RUNNING}
        assert broker.queue_len(QUEUE) == 15
        assert broker.ack_many([Lease(claims[0].id, claims[0].token + 1)]) != []
        assert ids_of(broker.dequeue([QUEUE], 100)) == ids[10:]

    def test_batch_ack(self, broker: Broker, clock: FakeClock) -> None:
        """A batch of acks settles what is held and names what is not."""
        put_many(broker, 4)
        claims = broker.dequeue([QUEUE], 4)
        lost, twice = claims[0], claims[1]
        broker.ack(twice)
        clock.advance(10.001)
        broker.heartbeat_many(claims[1:])
        assert broker.reap_expired() == 1
        refused = broker.ack_many([*claims, Lease(10**12, 1)])
        assert refused == [lost, twice, Lease(10**12, 1)]
        assert [(task.id, task.state) for task in broker.list()] == [(lost.id, State.PENDING)]
        assert broker.ack_many([]) == []

    def test_large_batch(self, broker: Broker) -> None:
        """Batches of more than a thousand work."""
        put_many(broker, 1500)
        claims = broker.dequeue([QUEUE], 1500)
        assert len(claims) == 1500
        held = broker.heartbeat_many(claims)
        assert (held.lost, held.canceled) == ([], [])
        assert broker.requeue_many(claims[:700]) == []
        assert broker.ack_many(claims) == claims[:700]
        assert broker.queue_len(QUEUE) == 700

    def test_ack_and_dequeue(self, broker: Broker, clock: FakeClock) -> None:
        """One call acks, names what it could not ack, and claims."""
        ids = put_many(broker, 5)
        claims = broker.dequeue([QUEUE], 2)
        broker.ack(claims[0])
        session = broker.open_session("w", 30)
        refused, more = broker.ack_and_dequeue(claims, [QUEUE], 2, owner="w", session=session)
        assert refused == [claims[0]]
        assert ids_of(more) == ids[2:4]
        assert broker.get(ids[2]).owner == "w"
        assert set(broker.renew_session(session).held) == set(ids[2:4])
        assert broker.ack_and_dequeue(more, [QUEUE], 0) == ([], [])
        assert broker.ack_and_dequeue([], [], 5) == ([], [])
        assert ids_of(broker.list()) == ids[4:]

    def test_ack_and_dequeue_wakes_children(self, broker: Broker) -> None:
        """What an ack frees is stored with it."""
        parent = put(broker)
        child = put(broker, parents=[parent])
        broker.ack_and_dequeue([take(broker)], [QUEUE], 5)
        assert state_of(broker, child) in {State.PENDING, State.RUNNING}

    def test_several_queues_share_a_batch(self, broker: Broker) -> None:
        """A batch over several queues: none gets less than its share while it has work."""
        many, more, few = put_many(broker, 40, "many"), put_many(broker, 40, "more"), put_many(broker, 2, "few")
        claims = broker.dequeue(["many", "more", "few"], 12)
        got = {queue: [claim.id for claim in claims if claim.queue == queue] for queue in ("many", "more", "few")}
        assert len(claims) == 12
        assert got["few"] == few
        assert got["many"] == many[: len(got["many"])]
        assert got["more"] == more[: len(got["more"])]
        assert min(len(got["many"]), len(got["more"])) >= 4

    def test_what_one_queue_leaves_others_use(self, broker: Broker) -> None:
        """A queue that is empty costs the others nothing."""
        ids = put_many(broker, 10, "full")
        assert ids_of(broker.dequeue(["empty", "full", "also empty"], 10)) == ids

    def test_no_queue_starves(self, broker: Broker) -> None:
        """One at a time from several queues: each is served, whatever its place and its priorities."""
        put_many(broker, 30, "a", priority=9)
        put_many(broker, 30, "b")
        put_many(broker, 30, "c", priority=-9)
        served = [broker.dequeue(["a", "b", "c"])[0].queue for _ in range(24)]
        assert min(served.count(queue) for queue in "abc") >= 4, served

    def test_repeated_queue_name(self, broker: Broker) -> None:
        """Naming a queue twice is naming it once."""
        ids = put_many(broker, 3)
        assert ids_of(broker.dequeue([QUEUE, QUEUE], 10)) == ids

    def test_expired_is_not_delivered(self, broker: Broker, clock: FakeClock) -> None:
        """From expires_at on an execution is canceled instead of claimed, and its children with it."""
        expired = put(broker, expires_at=clock.now_ms() + 5000)
        child = put(broker, parents=[expired])
        on_time = put(broker, expires_at=clock.now_ms() + 5001)
        clock.advance(5)
        assert ids_of(broker.dequeue([QUEUE], 10)) == [on_time]
        task = broker.get(expired)
        assert (task.state, task.reason, task.deliveries) == (State.CANCELED, "expired", 0)
        assert task.finished_at == clock.now_ms()
        assert (state_of(broker, child), broker.get(child).reason) == (State.CANCELED, "parent")

    def test_expired_in_a_queue_with_an_end(self, broker: Broker, clock: FakeClock) -> None:
        """Of a queue that will go itself nothing is kept, but for what others are linked to."""
        broker.topology.declare_queue(Queue(QUEUE, expires=60.0))
        gone = put_many(broker, 3, expires_in=5.0)
        parent = put(broker, expires_in=5.0)
        child = put(broker, parents=[parent])
        clock.advance(5)
        assert broker.dequeue([QUEUE], 10) == []
        assert [task.id for task in broker.list()] == [parent, child]
        assert broker.get(parent).reason == "expired"
        assert not {task.id for task in broker.list()} & set(gone)

    def test_drop_expired(self, broker: Broker, clock: FakeClock) -> None:
        """What has expired goes although nobody claims, as if it had been met by a claim, and nothing else does."""
        broker.topology.declare_queue(Queue("ends", expires=60.0))
        put_many(broker, 3, "ends", expires_in=5.0)
        kept = [
            put(broker, expires_in=5.0),
            put(broker, "ends", expires_in=5.001),
            put(broker, "other", expires_in=5.0),
        ]
        assert broker.drop_expired(["ends", QUEUE]) == 0
        clock.advance(5)
        assert broker.drop_expired(["ends", QUEUE, "unknown"]) == 4
        assert broker.drop_expired(["ends", QUEUE]) == 0
        assert broker.drop_expired([]) == 0
        assert [(task.id, task.state) for task in broker.list()] == [
            (kept[0], State.CANCELED),
            (kept[1], State.PENDING),
            (kept[2], State.PENDING),
        ]

    def test_expires_in(self, broker: Broker, clock: FakeClock) -> None:
        """expires_in counts from the store's now; with expires_at the earlier one holds."""
        now = clock.now_ms()
        times = [(None, 5.0), (now + 9000, 5.0), (now + 5000, 9.0), (now + 5000, None)]
        ids = [put(broker, expires_at=at, expires_in=seconds) for at, seconds in times]
        late = put(broker, expires_in=5.001)
        assert [broker.get(id).expires_at for id in (*ids, late)] == [now + 5000] * 4 + [now + 5001]
        clock.advance(5)
        assert ids_of(broker.dequeue([QUEUE], 9)) == [late]
        assert {broker.get(id).reason for id in ids} == {"expired"}

    def test_expired_do_not_use_up_the_limit(self, broker: Broker, clock: FakeClock) -> None:
        """However many have expired in front, what is good is found by the same call."""
        put_many(broker, 50, expires_at=clock.now_ms() + 1000, priority=5)
        good = put(broker)
        clock.advance(1)
        assert ids_of(broker.dequeue([QUEUE], 2)) == [good]

    def test_expiry_counts_after_redelivery(self, broker: Broker, clock: FakeClock) -> None:
        """An execution that ran on time and was given back expires like any other."""
        id = put(broker, expires_at=clock.now_ms() + 5000)
        claim = take(broker)
        clock.advance(6)
        broker.requeue(claim)
        assert broker.dequeue([QUEUE]) == []
        assert broker.get(id).reason == "expired"

    def test_max_deliveries(self, store: Store, clock: FakeClock) -> None:
        """What was delivered max_deliveries times and never settled becomes a dead letter."""
        broker = store.open(clock=clock, max_deliveries=3)
        id = put(broker)
        child = put(broker, parents=[id])
        for delivery in range(1, 4):
            claim = take(broker)
            assert claim.deliveries == delivery
            broker.requeue(claim)
        assert broker.dequeue([QUEUE]) == []
        task = broker.get(id)
        assert (task.state, task.reason, task.deliveries) == (State.FAILED, "max_deliveries", 3)
        assert (state_of(broker, child), broker.get(child).reason) == (State.CANCELED, "parent")

    @pytest.mark.parametrize("kind", [FailKind.BUSINESS, FailKind.THROTTLED])
    def test_told_failures_are_not_worn(self, store: Store, clock: FakeClock, kind: FailKind) -> None:
        """A delivery whose end was told as a failure or a throttling has its own cap; max_deliveries is for others."""
        broker = store.open(clock=clock, max_deliveries=3, throttled_max=9)
        id = put(broker, max_retry=9)
        for _ in range(6):
            assert broker.fail(take(broker), kind) is State.RETRYING
        for delivery in range(7, 10):
            claim = take(broker)
            assert claim.deliveries == delivery
            broker.requeue(claim)
        assert broker.dequeue([QUEUE]) == []
        task = broker.get(id)
        assert (task.state, task.reason, task.deliveries) == (State.FAILED, "max_deliveries", 9)
        assert task.detail == "delivered 3 times without being settled"

    def test_worn_do_not_use_up_the_limit(self, store: Store, clock: FakeClock) -> None:
        """A dead letter in front does not hide what is good behind it."""
        broker = store.open(clock=clock, max_deliveries=1)
        put_many(broker, 3, priority=5)
        broker.requeue_many(broker.dequeue([QUEUE], 3))
        good = put(broker)
        assert ids_of(broker.dequeue([QUEUE])) == [good]

    def test_queues_have_their_own_lease_time(self, store: Store, clock: FakeClock) -> None:
        """queue_lease_ttl replaces lease_ttl for the queue it names, at the claim and at the heartbeat."""
        broker = store.open(clock=clock, lease_ttl=10, queue_lease_ttl={"quick": 2})
        put(broker)
        put(broker, "quick")
        slow, quick = take(broker), take(broker, "quick")
        assert (slow.lease_until, quick.lease_until) == (clock.now_ms() + 10_000, clock.now_ms() + 2000)
        clock.advance(1)
        assert broker.heartbeat(quick) == clock.now_ms() + 2000
        assert broker.heartbeat(slow) == clock.now_ms() + 10_000
        clock.advance(2.001)
        assert broker.reap_expired() == 1
        assert (state_of(broker, quick.id), state_of(broker, slow.id)) == (State.PENDING, State.RUNNING)
