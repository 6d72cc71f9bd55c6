"""Dependencies: a child runs when its parents have succeeded, and not when they can't."""

from __future__ import annotations

from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import TaskNotFound
from kombu_taskgate.core.model import FailKind, NewTask, State
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import QUEUE, Cases, ids_of, put, put_many, state_of, take
from .store import Store


class DependencyCases(Cases):
    """parents, pending_parents, fail_fast."""

    def test_dep_wake(self, broker: Broker) -> None:
        """DepWake: each ack takes one from pending_parents; at zero the child wakes."""
        parents = put_many(broker, 3)
        child = put(broker, "later", parents=parents)
        assert (state_of(broker, child), broker.get(child).pending_parents) == (State.BLOCKED, 3)
        assert broker.dequeue(["later"]) == []
        assert broker.queue_len("later") == 0
        first, second, third = broker.dequeue([QUEUE], 3)
        broker.ack(first)
        assert broker.get(child).pending_parents == 2
        assert broker.ack_many([second]) == []
        assert (state_of(broker, child), broker.get(child).pending_parents) == (State.BLOCKED, 1)
        broker.ack(third)
        assert (state_of(broker, child), broker.get(child).pending_parents) == (State.PENDING, 0)
        assert take(broker, "later").id == child

    def test_dep_wake_in_one_batch(self, broker: Broker) -> None:
        """All parents acked by one call: the child wakes once."""
        parents = put_many(broker, 5)
        children = [put(broker, "later", parents=parents) for _ in range(3)]
        assert broker.ack_many(broker.dequeue([QUEUE], 5)) == []
        assert ids_of(broker.dequeue(["later"], 9)) == children

    def test_dep_wake_race(self, store: Store, clock: FakeClock) -> None:
        """Parents that are acked at the same moment wake their common child: no wake-up is lost."""
        brokers = [store.open(clock=clock) for _ in range(4)]
        for _ in range(10):
            parents = put_many(brokers[0], 4)
            child = put(brokers[0], "later", parents=parents)
            claims = brokers[0].dequeue([QUEUE], 4)
            acks = [partial(broker.ack, claim) for broker, claim in zip(brokers, claims, strict=True)]
            assert errors_of(together(acks)) == []
            assert (state_of(brokers[0], child), brokers[0].get(child).pending_parents) == (State.PENDING, 0)
            brokers[0].ack(take(brokers[0], "later"))

    def test_child_stored_while_parent_ends(self, store: Store, clock: FakeClock) -> None:
        """A child that is published while its parent is acked waits for nobody afterwards."""
        brokers = [store.open(clock=clock, keep_completed=60) for _ in range(3)]
        for turn in range(10):
            parent = put(brokers[0])
            claim = take(brokers[0])
            publish = [partial(put, broker, f"later {turn}", parents=[parent]) for broker in brokers[1:]]
            outcomes = together([partial(brokers[0].ack, claim), *publish])
            assert errors_of(outcomes) == []
            children = [outcome for outcome in outcomes[1:] if isinstance(outcome, int)]
            assert [state_of(brokers[0], child) for child in children] == [State.PENDING] * 2
            assert len(brokers[0].dequeue([f"later {turn}"], 9)) == 2

    def test_child_stored_while_parent_fails(self, store: Store, clock: FakeClock) -> None:
        """A child that is published while its parent fails is canceled, whoever is first."""
        brokers = [store.open(clock=clock) for _ in range(3)]
        for _ in range(10):
            parent = put(brokers[0])
            claim = take(brokers[0])
            publish = [partial(put, broker, "later", parents=[parent]) for broker in brokers[1:]]
            outcomes = together([partial(brokers[0].fail, claim, FailKind.SKIP), *publish])
            assert errors_of(outcomes) == []
            children = [outcome for outcome in outcomes[1:] if isinstance(outcome, int)]
            assert [state_of(brokers[0], child) for child in children] == [State.CANCELED] * 2

    def test_parent_must_exist(self, broker: Broker) -> None:
        """A parent that never was, or is gone because it completed, is an error and stores nothing."""
        gone = put(broker)
        broker.ack(take(broker))
        here = put(broker)
        for parents in ([10**12], [gone], [here, gone]):
            with pytest.raises(TaskNotFound):
                put(broker, parents=parents)
        assert ids_of(broker.list()) == [here]
        assert broker.get(here).state is State.PENDING
        broker.ack(take(broker))

    def test_parent_named_twice(self, broker: Broker) -> None:
        """Naming a parent twice is naming it once."""
        parent = put(broker)
        child = put(broker, "later", parents=[parent, parent])
        assert broker.get(child).pending_parents == 1
        broker.ack(take(broker))
        assert state_of(broker, child) is State.PENDING

    def test_parent_completed_before(self, store: Store, clock: FakeClock) -> None:
        """Parents that have completed and are kept are not waited for."""
        broker = store.open(clock=clock, keep_completed=60)
        done, running = put(broker), put(broker)
        first, second = broker.dequeue([QUEUE], 2)
        broker.ack(first)
        assert state_of(broker, put(broker, "later", parents=[done])) is State.PENDING
        child = put(broker, "later", parents=[done, running])
        assert (state_of(broker, child), broker.get(child).pending_parents) == (State.BLOCKED, 1)
        broker.ack(second)
        assert state_of(broker, child) is State.PENDING

    def test_child_of_a_failed_parent(self, broker: Broker, clock: FakeClock) -> None:
        """A fail-fast child of a parent that has failed already is stored canceled; the other kind is ready."""
        parent, alive = put(broker), put(broker)
        broker.fail(take(broker), FailKind.SKIP)
        child = broker.get(put(broker, "later", parents=[parent]))
        assert (child.state, child.reason, child.finished_at) == (State.CANCELED, "parent", clock.now_ms())
        assert state_of(broker, put(broker, "later", parents=[parent, alive])) is State.CANCELED
        patient = put(broker, "later", parents=[parent], fail_fast=False)
        assert state_of(broker, patient) is State.PENDING
        waits = put(broker, "later", parents=[parent, alive], fail_fast=False)
        assert broker.get(waits).pending_parents == 1
        grandchild = put(broker, "later", parents=[child.id])
        assert state_of(broker, grandchild) is State.CANCELED
        assert ids_of(broker.dequeue(["later"], 9)) == [patient]

    @pytest.mark.parametrize("how", ["skip", "business", "throttled", "cancel", "finish_canceled", "reap", "expire"])
    def test_cascade_cancel(self, store: Store, clock: FakeClock, how: str) -> None:
        """CascadeCancel: whatever ends a parent without success cancels its children, chain-wise."""
        broker = store.open(clock=clock, lease_ttl=10, lease_lost_max=1, throttled_max=1)
        expires_at = clock.now_ms() + 5000 if how == "expire" else None
        root = put(broker, max_retry=0, expires_at=expires_at)
        child = put(broker, "later", parents=[root])
        grandchild = put(broker, "later", parents=[child])
        last = put(broker, "later", parents=[grandchild, child])
        other_parent = put(broker, "other")
        both = put(broker, "later", parents=[other_parent, root])
        patient = put(broker, "later", parents=[root], fail_fast=False)
        waits = put(broker, "later", parents=[root, other_parent], fail_fast=False)
        heir = put(broker, "later", parents=[patient])
        if how == "cancel":
            broker.cancel(root)
        elif how == "expire":
            clock.advance(5)
            assert broker.dequeue([QUEUE]) == []
        else:
            claim = take(broker)
            clock.advance(10.001)
            end = {
                "skip": lambda: broker.fail(claim, FailKind.SKIP),
                "business": lambda: broker.fail(claim, FailKind.BUSINESS),
                "throttled": lambda: broker.fail(claim, FailKind.THROTTLED),
                "finish_canceled": lambda: broker.finish_canceled(claim),
                "reap": broker.reap_expired,
            }
            end[how]()
        for id in (child, grandchild, last, both):
            task = broker.get(id)
            assert (task.state, task.reason, task.finished_at) == (State.CANCELED, "parent", clock.now_ms()), id
        assert state_of(broker, patient) is State.PENDING
        assert (state_of(broker, waits), broker.get(waits).pending_parents) == (State.BLOCKED, 1)
        assert state_of(broker, heir) is State.BLOCKED
        assert ids_of(broker.dequeue(["later"], 9)) == [patient]
        broker.ack(take(broker, "other"))
        assert state_of(broker, both) is State.CANCELED
        assert state_of(broker, waits) is State.PENDING

    def test_retry_is_not_an_end(self, broker: Broker) -> None:
        """A parent that will be tried again keeps its children waiting, and wakes them when it succeeds."""
        parent = put(broker)
        child = put(broker, "later", parents=[parent])
        broker.fail(take(broker))
        broker.requeue(take(broker))
        assert state_of(broker, child) is State.BLOCKED
        broker.ack(take(broker))
        assert state_of(broker, child) is State.PENDING

    def test_long_chain(self, broker: Broker) -> None:
        """A cancel runs down a chain of hundreds."""
        chain = [put(broker)]
        for _ in range(300):
            chain.append(put(broker, "later", parents=chain[-1:]))
        broker.cancel(chain[0])
        assert broker.counts() == {("", State.CANCELED): 301}

    def test_diamond(self, broker: Broker) -> None:
        """A child reached on two ways is canceled once."""
        root = put(broker)
        sides = [put(broker, "later", parents=[root]) for _ in range(2)]
        bottom = put(broker, "later", parents=sides)
        broker.cancel(root)
        assert {state_of(broker, id) for id in (*sides, bottom)} == {State.CANCELED}

    def test_many_children(self, broker: Broker) -> None:
        """A parent of more than a thousand wakes them all."""
        parent = put(broker)
        broker.enqueue_many([NewTask("later", parents=[parent]) for _ in range(1100)])
        broker.ack(take(broker))
        assert broker.queue_len("later") == 1100

    def test_delayed_child(self, broker: Broker, clock: FakeClock) -> None:
        """A child with a start time waits for its parents and for its time."""
        parent = put(broker)
        child = put(broker, "later", parents=[parent], delay=30)
        broker.ack(take(broker))
        assert (state_of(broker, child), broker.dequeue(["later"])) == (State.PENDING, [])
        clock.advance(30)
        assert take(broker, "later").id == child

    def test_children_of_what_was_requeued(self, broker: Broker, clock: FakeClock) -> None:
        """A parent that changes hands wakes its children once, when the last holder acks."""
        parent = put(broker)
        child = put(broker, "later", parents=[parent])
        stale = take(broker)
        clock.advance(11)
        broker.reap_expired()
        assert broker.ack_many([stale]) == [stale]
        assert state_of(broker, child) is State.BLOCKED
        broker.ack(take(broker))
        assert state_of(broker, child) is State.PENDING
