"""Replaying: a dead letter runs again as a new execution, once."""

from __future__ import annotations

from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import (
    AlreadyReplayed,
    CompletedNotAllowed,
    PayloadTooLarge,
    TaskExists,
    TaskNotFound,
)
from kombu_taskgate.core.model import FailKind, State
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import QUEUE, Cases, put, state_of, take
from .store import Store


class ReplayCases(Cases):
    """replay."""

    def test_replay_basic(self, broker: Broker, clock: FakeClock) -> None:
        """ReplayBasic: a copy with zero counters that is ready now; the old row is not touched."""
        old_id = put(
            broker,
            payload=b"p",
            type="t",
            task_id="1",
            root_id="2",
            parent_task_id="3",
            group_id="4",
            priority=5,
            max_retry=0,
            expires_at=clock.now_ms() + 5000,
        )
        broker.fail(take(broker), detail="no")
        old = broker.get(old_id)
        clock.advance(60)
        new_id = broker.replay(old_id)
        new = broker.get(new_id)
        assert new_id > old_id
        assert broker.get(old_id) == old
        assert (new.state, new.replay_of, new.payload, new.queue) == (State.PENDING, old_id, b"p", QUEUE)
        assert (new.type, new.task_id, new.root_id, new.parent_task_id, new.group_id) == ("t", "1", "2", "3", "4")
        assert (new.priority, new.max_retry, new.expires_at) == (5, 0, None)
        assert (new.run_at, new.created_at) == (clock.now_ms(), clock.now_ms())
        assert (new.attempts, new.throttled, new.lease_lost, new.deliveries) == (0, 0, 0, 0)
        assert (new.reason, new.detail, new.finished_at, new.owner) == (None, None, None, None)
        claim = take(broker)
        assert (claim.id, claim.deliveries, claim.attempts) == (new_id, 1, 0)

    def test_replay_with_another_payload(self, store: Store, clock: FakeClock) -> None:
        """The payload may be replaced, within its bound; the empty one too."""
        broker = store.open(clock=clock, max_payload=10)
        id = put(broker, payload=b"bad")
        broker.cancel(id)
        with pytest.raises(PayloadTooLarge):
            broker.replay(id, payload=b"x" * 11)
        new = broker.replay(id, payload=b"")
        assert (broker.get(new).payload, broker.get(id).payload) == (b"", b"bad")

    def test_replay_of_completed(self, store: Store, clock: FakeClock) -> None:
        """What completed is replayed only on an explicit word."""
        broker = store.open(clock=clock, keep_completed=60)
        id = put(broker)
        broker.ack(take(broker), b"result")
        with pytest.raises(CompletedNotAllowed):
            broker.replay(id)
        new = broker.replay(id, allow_completed=True)
        assert (state_of(broker, new), broker.get(new).result) == (State.PENDING, None)

    def test_replay_unknown(self, broker: Broker) -> None:
        """What does not exist can't be replayed."""
        with pytest.raises(TaskNotFound):
            broker.replay(10**12)

    def test_replay_chain(self, broker: Broker) -> None:
        """ReplayChain: only the newest of a chain can be replayed; the key stays known through all of it."""
        chain = [put(broker, key="k")]
        for _ in range(3):
            broker.fail(take(broker), FailKind.SKIP)
            chain.append(broker.replay(chain[-1]))
            for old in chain[:-1]:
                with pytest.raises(AlreadyReplayed):
                    broker.replay(old)
            with pytest.raises(TaskExists) as caught:
                put(broker, key="k")
            assert (caught.value.id, caught.value.state) == (chain[-1], State.PENDING)
        assert [broker.get(id).replay_of for id in chain] == [None, *chain[:-1]]
        broker.ack(take(broker))
        with pytest.raises(TaskExists) as caught:
            put(broker, key="k")
        assert (caught.value.id, caught.value.state) == (chain[-1], State.COMPLETED)

    def test_replay_of_what_succeeded_meanwhile(self, broker: Broker) -> None:
        """A dead letter whose replay has completed is not run a third time by a second replay of it."""
        id = put(broker)
        broker.fail(take(broker), FailKind.SKIP)
        broker.replay(id)
        broker.ack(take(broker))
        with pytest.raises(AlreadyReplayed):
            broker.replay(id)
        assert broker.queue_len(QUEUE) == 0

    def test_replay_race(self, store: Store, clock: FakeClock) -> None:
        """Of many that replay one execution one succeeds: chains do not fork."""
        brokers = [store.open(clock=clock) for _ in range(4)]
        for key in (None, "k"):
            id = put(brokers[0], key=key)
            brokers[0].cancel(id)
            outcomes = together([partial(broker.replay, id) for broker in brokers * 2])
            assert len([outcome for outcome in outcomes if isinstance(outcome, int)]) == 1, outcomes
            assert all(isinstance(error, AlreadyReplayed) for error in errors_of(outcomes)), outcomes
        assert brokers[0].queue_len(QUEUE) == 2

    def test_replay_of_a_child(self, broker: Broker) -> None:
        """A replay has no parents: who replays a canceled child means it."""
        parent = put(broker)
        child = put(broker, "later", parents=[parent])
        broker.cancel(parent)
        new = broker.replay(child)
        assert (state_of(broker, new), broker.get(new).pending_parents) == (State.PENDING, 0)
        assert take(broker, "later").id == new
        assert state_of(broker, broker.replay(parent)) is State.PENDING
        assert state_of(broker, child) is State.CANCELED
