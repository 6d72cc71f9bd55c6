"""Revocations, and canceling what waits under task ids."""

from __future__ import annotations

from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.model import FailKind, State, StateChange
from kombu_taskgate.core.revocations import Revocation
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import QUEUE, Cases, ids_of, put, state_of, take
from .store import Store

ONE, OTHER = Revocation("one"), Revocation("other")
STAMP = Revocation('"one"', "customer")


class RevocationCases(Cases):
    """revocations, cancel_waiting, waiting."""

    def test_revocations_are_found_by_value_and_header(self, broker: Broker) -> None:
        """What is stored is found, by exactly its value and header; what is asked for and not stored is not."""
        stored = broker.revocations
        assert stored.any() is False
        assert stored.find([ONE]) == set()
        assert stored.find([]) == set()
        stored.add([ONE, STAMP, ONE], 60)
        assert (stored.any(), stored.count()) == (True, 2)
        asked = [ONE, OTHER, STAMP, Revocation("one", "customer"), Revocation('"one"'), Revocation("ONE")]
        assert stored.find(asked) == {ONE, STAMP}

    def test_revocations_are_shared(self, store: Store, clock: FakeClock) -> None:
        """Whoever opens the same data sees them."""
        store.open(clock=clock).revocations.add([ONE], 60)
        assert store.open(clock=clock).revocations.find([ONE, OTHER]) == {ONE}

    def test_revocations_end(self, broker: Broker, clock: FakeClock) -> None:
        """They are kept for their time, and swept after it in batches, by prune too."""
        stored = broker.revocations
        stored.add([ONE], 60)
        stored.add([Revocation(f"short {number}") for number in range(5)], 10)
        clock.advance(10)
        assert stored.sweep() == 0
        clock.advance(0.001)
        assert stored.sweep(2) == 2
        assert broker.prune(2) == 2
        assert broker.prune() == 1
        assert (stored.count(), stored.find([ONE])) == (1, {ONE})
        clock.advance(50)
        assert broker.prune() == 1
        assert stored.any() is False

    def test_revoked_again_lasts_longer(self, broker: Broker, clock: FakeClock) -> None:
        """A second revocation prolongs the first, and never shortens it."""
        stored = broker.revocations
        stored.add([ONE, STAMP], 10)
        stored.add([ONE], 60)
        stored.add([ONE], 1)
        clock.advance(59)
        assert stored.sweep() == 1
        assert stored.find([ONE, STAMP]) == {ONE}

    def test_revocation_outlives_its_time_while_the_task_goes_on(self, broker: Broker, clock: FakeClock) -> None:
        """A task id stays revoked as long as an execution under it has not ended; a header's value does not."""
        put(broker, task_id="one")
        put(broker, task_id='"one"')
        claims = broker.dequeue([QUEUE], 2)
        broker.revocations.add([ONE, STAMP], 10)
        clock.advance(10.001)
        assert broker.revocations.sweep() == 1
        assert broker.revocations.find([ONE, STAMP]) == {ONE}
        broker.fail(claims[0], FailKind.SKIP)
        assert broker.revocations.sweep() == 1

    def test_many_revocations(self, broker: Broker) -> None:
        """More than one statement holds, stored and found and stored once more."""
        many = [Revocation(f"id-{number}") for number in range(4_500)]
        broker.revocations.add(many, 60)
        broker.revocations.add(many[:1_000], 60)
        assert broker.revocations.count() == len(many)
        assert broker.revocations.find([*many[-700:], OTHER]) == set(many[-700:])

    def test_wrong_revocations(self, broker: Broker) -> None:
        """What no store can hold is refused, and nothing of the call is stored."""
        for wrong, keep in ((Revocation(""), 1.0), (Revocation("x" * 256), 1.0), (Revocation("x", "h" * 256), 1.0)):
            with pytest.raises(ConfigError):
                broker.revocations.add([ONE, wrong], keep)
        for keep in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ConfigError):
                broker.revocations.add([ONE], keep)
        assert broker.revocations.any() is False

    def test_two_revoke_the_same(self, store: Store, clock: FakeClock) -> None:
        """Two who store the same at once do not hinder each other."""
        brokers = [store.open(clock=clock) for _ in range(2)]
        many = [Revocation(f"id-{number}") for number in range(500)]
        orders = (many, list(reversed(many)))
        calls = [partial(broker.revocations.add, order, 60) for broker, order in zip(brokers, orders, strict=True)]
        assert errors_of(together(calls)) == []
        assert brokers[0].revocations.count() == 500

    def test_cancel_waiting(self, store: Store, clock: FakeClock) -> None:
        """All that waits under a task id or an id is canceled and told as it was; the rest is left alone."""
        told: list[StateChange] = []
        broker = store.open(clock=clock, lease_ttl=10, notify=told.append)
        running = put(broker, "r", type="t", task_id="one")
        take(broker, "r")
        ended = put(broker, "r", type="t", task_id="one")
        broker.fail(take(broker, "r"), FailKind.SKIP)
        retrying = put(broker, "r", type="t", task_id="one")
        broker.fail(take(broker, "r"), delay=60)
        delayed = put(broker, "a", type="t", task_id="one", delay=60, payload=b"body")
        pending = put(broker, "b", type="t", task_id="two", priority=3)
        blocked = put(broker, "a", type="t", task_id="one", parents=[running])
        others = [put(broker, "a", type="t", task_id="three"), put(broker, "a"), put(broker, "a", task_id="one")]
        child = put(broker, "a", parents=[delayed])
        put(broker, "m", task_id="message")
        take(broker, "m")
        told.clear()
        assert broker.running(["one", "two", "message", "unknown"]) == {"one"}
        found = broker.cancel_waiting([pending, running, ended, 10**12], task_ids=["one", "unknown"])
        assert ids_of(found) == [retrying, delayed, pending, blocked]
        states = [State.RETRYING, State.PENDING, State.PENDING, State.BLOCKED]
        assert [task.state for task in found] == states
        assert (found[1].payload, found[1].task_id, found[2].queue) == (b"body", "one", "b")
        for id in ids_of(found):
            task = broker.get(id)
            assert (task.state, task.reason, task.finished_at) == (State.CANCELED, "canceled", clock.now_ms())
        assert (state_of(broker, child), broker.get(child).reason) == (State.CANCELED, "parent")
        assert (state_of(broker, running), broker.get(running).cancel_requested) == (State.RUNNING, False)
        assert state_of(broker, ended) is State.FAILED
        assert [state_of(broker, id) for id in others] == [State.PENDING] * 3
        assert sorted((change.id, change.before) for change in told) == sorted(
            [*zip(ids_of(found), states, strict=True), (child, State.BLOCKED)]
        )
        assert broker.cancel_waiting(task_ids=["one"]) == []
        assert broker.cancel_waiting() == []

    def test_cancel_waiting_parent_and_child_at_once(self, broker: Broker) -> None:
        """Of a parent and its child, both meant, each is canceled on its own account and told once."""
        parent = put(broker, type="t", task_id="p")
        child = put(broker, type="t", task_id="c", parents=[parent])
        assert ids_of(broker.cancel_waiting(task_ids=["p", "c"])) == [parent, child]
        assert [broker.get(id).reason for id in (parent, child)] == ["canceled", "canceled"]

    def test_cancel_waiting_against_claim(self, store: Store, clock: FakeClock) -> None:
        """Against a claim: canceled and never delivered, or delivered and left alone."""
        brokers = [store.open(clock=clock) for _ in range(2)]
        for _ in range(10):
            put(brokers[0], type="t", task_id="one")
            claims, canceled = together(
                [partial(brokers[0].dequeue, [QUEUE]), partial(brokers[1].cancel_waiting, task_ids=["one"])]
            )
            assert not isinstance(claims, BaseException), claims
            assert not isinstance(canceled, BaseException), canceled
            assert len(claims) + len(canceled) == 1
            assert brokers[0].ack_many(claims) == []

    def test_waiting_pages(self, broker: Broker) -> None:
        """What waits can be walked through in pages, while it changes."""
        ids = [put(broker, queue, delay=delay) for queue in ("a", "b") for delay in (0, 60, 0)]
        running = take(broker, "a").id
        blocked = put(broker, "a", parents=[running])
        left = [*(id for id in ids if id != running), blocked]
        page = broker.waiting(limit=3)
        assert ids_of(page) == left[:3]
        broker.cancel(left[0])
        broker.cancel(left[4])
        assert ids_of(broker.waiting(page[-1].id, 3)) == [left[3], left[5]]
        assert broker.waiting(left[5]) == []
