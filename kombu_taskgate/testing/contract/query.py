"""Asking: get, list, counts and lengths agree with what was done; purge and prune remove what they should."""

from __future__ import annotations

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import AlreadyFinal, TaskNotFound
from kombu_taskgate.core.model import FailKind, Filter, NewTask, State
from kombu_taskgate.testing.clock import FakeClock

from .base import QUEUE, Cases, ids_of, put, put_many, state_of, take
from .store import Store


class QueryCases(Cases):
    """get, list, counts, queue_len, purge and prune."""

    def test_get_unknown(self, broker: Broker) -> None:
        """An id that nobody issued is not found."""
        for id in (0, -1, 10**12):
            with pytest.raises(TaskNotFound):
                broker.get(id)

    def test_counts_consistency(self, broker: Broker, clock: FakeClock) -> None:
        """CountsConsistency: counts are sparse and equal what list shows, through all states."""
        assert broker.counts() == {}
        put(broker, type="a", key="done")
        broker.ack(take(broker))
        put(broker, type="a", priority=1)
        broker.fail(take(broker), FailKind.SKIP)
        put(broker, type="b", priority=1)
        broker.fail(take(broker), delay=60)
        parent = put(broker, type="b", priority=1)
        take(broker)
        put(broker, type="c", parents=[parent])
        broker.cancel(put(broker, type="c"))
        put_many(broker, 2, type="c")
        put(broker, type="c", delay=60)
        put(broker, "other")
        counts = broker.counts()
        assert counts == {
            ("a", State.COMPLETED): 1,
            ("a", State.FAILED): 1,
            ("b", State.RETRYING): 1,
            ("b", State.RUNNING): 1,
            ("c", State.BLOCKED): 1,
            ("c", State.CANCELED): 1,
            ("c", State.PENDING): 3,
            ("", State.PENDING): 1,
        }
        for (type_, state), number in counts.items():
            assert len(broker.list(Filter(type=type_, states=[state]))) == number
        assert broker.queue_len(QUEUE) == 4
        assert broker.queue_lens([QUEUE, "other", "none"]) == {QUEUE: 4, "other": 1, "none": 0}
        assert broker.queue_len("none") == 0
        assert broker.queue_lens([]) == {}

    def test_list_filter(self, broker: Broker) -> None:
        """ListFilter: each field restricts, all of them together."""
        ids = broker.enqueue_many(
            [
                NewTask("a", type="x", task_id="1", group_id="g", key="k1"),
                NewTask("a", type="y", task_id="2", group_id="g"),
                NewTask("b", type="x", task_id="1"),
                NewTask("b", type="", task_id="3", delay=60),
            ]
        )
        claim = take(broker, "a")

        def found(**wanted: object) -> list[int]:
            return [ids.index(task.id) for task in broker.list(Filter(**wanted))]  # type: ignore[arg-type]

        assert found() == [0, 1, 2, 3]
        assert [ids.index(task.id) for task in broker.list()] == [0, 1, 2, 3]
        assert found(queue="a") == [0, 1]
        assert found(type="x") == [0, 2]
        assert found(type="") == [3]
        assert found(task_id="1") == [0, 2]
        assert found(group_id="g") == [0, 1]
        assert found(key="k1") == [0]
        assert found(states=[State.RUNNING]) == [ids.index(claim.id)]
        assert found(states=[State.PENDING, State.RUNNING], queue="a") == [0, 1]
        assert found(states=[]) == []
        assert found(queue="b", type="x", task_id="1") == [2]
        assert found(queue="b", group_id="g") == []
        assert found(queue="A") == found(type="X") == found(key="K1") == []

    def test_list_pagination(self, broker: Broker, clock: FakeClock) -> None:
        """ListPagination: sorted by creation, then id; offset and limit cut pages without gap or overlap."""
        ids: list[int] = []
        for _ in range(5):
            ids += put_many(broker, 5, priority=-len(ids))
            clock.advance(1)
        pages = [ids_of(broker.list(Filter(offset=offset, limit=7))) for offset in range(0, 28, 7)]
        assert pages == [ids[0:7], ids[7:14], ids[14:21], ids[21:25]]
        assert broker.list(Filter(offset=25)) == []
        assert broker.list(Filter(limit=0)) == []
        put_many(broker, 100)
        assert len(broker.list()) == 100

    def test_business_key_query(self, broker: Broker, clock: FakeClock) -> None:
        """BusinessKeyQuery: listing by key gives the chain of its executions, oldest first."""
        put(broker, key="other")
        chain = [put(broker, key="order", priority=1)]
        for _ in range(3):
            broker.fail(take(broker), FailKind.SKIP)
            clock.advance(1)
            chain.append(broker.replay(chain[-1]))
        rows = broker.list(Filter(key="order"))
        assert ids_of(rows) == chain
        assert [row.replay_of for row in rows] == [None, *chain[:-1]]
        assert [row.state.value for row in rows] == ["failed"] * 3 + ["pending"]
        assert broker.list(Filter(key="unknown")) == []

    def test_purge(self, broker: Broker, clock: FakeClock) -> None:
        """Everything that waits in the queue goes, delayed and retrying too; what runs or has ended stays."""
        running = put(broker)
        take(broker)
        failed = put(broker)
        broker.fail(take(broker), FailKind.SKIP)
        put(broker)
        broker.fail(take(broker), delay=60)
        put_many(broker, 3)
        put(broker, delay=60)
        put(broker, parents=[running])
        other = put(broker, "other")
        assert broker.purge(QUEUE) == 6
        assert ids_of(broker.list()) == [running, failed, other]
        assert (broker.queue_len(QUEUE), broker.queue_len("other")) == (0, 1)
        assert broker.purge(QUEUE) == 0
        clock.advance(100)
        assert broker.dequeue([QUEUE], 9) == []

    def test_purge_tells_children(self, broker: Broker) -> None:
        """A purged parent's children in other queues do not wait for ever."""
        parent = put(broker)
        waits = put(broker, "other", parents=[parent])
        patient = put(broker, "other", parents=[parent], fail_fast=False)
        grandchild = put(broker, "third", parents=[waits])
        assert broker.purge(QUEUE) == 1
        assert (state_of(broker, parent), broker.get(parent).reason) == (State.CANCELED, "canceled")
        assert (state_of(broker, waits), broker.get(waits).reason) == (State.CANCELED, "parent")
        assert state_of(broker, patient) is State.PENDING
        assert state_of(broker, grandchild) is State.CANCELED
        with pytest.raises(AlreadyFinal):
            broker.cancel(parent)

    def test_purge_of_parent_and_child(self, broker: Broker) -> None:
        """A parent and its child in one queue: nothing of them waits or runs afterwards."""
        parent = put(broker)
        child = put(broker, parents=[parent])
        put(broker, parents=[child], fail_fast=False)
        assert broker.purge(QUEUE) == 3
        assert broker.queue_len(QUEUE) == 0
        assert {task.state for task in broker.list()} <= {State.CANCELED}
        assert broker.dequeue([QUEUE], 9) == []

    def test_purge_frees_the_key(self, broker: Broker) -> None:
        """What was purged was never there: its business key is free."""
        put(broker, key="k")
        assert broker.purge(QUEUE) == 1
        assert put(broker, key="k")

    def test_purge_of_many(self, broker: Broker) -> None:
        """A large queue is purged by one call."""
        put_many(broker, 3000)
        assert broker.purge(QUEUE) == 3000
        assert broker.counts() == {}

    def test_prune(self, store: Store, clock: FakeClock) -> None:
        """Final executions go when their keeping time has passed, at most so many at once; no others ever do."""
        broker = store.open(clock=clock, keep_completed=100, keep_failed=1000)
        put_many(broker, 3)
        put(broker, key="k")
        completed = broker.dequeue([QUEUE], 4)
        assert broker.ack_many(completed) == []
        failed = put_many(broker, 3)
        for claim in broker.dequeue([QUEUE], 3):
            broker.fail(claim, FailKind.SKIP)
        running = put(broker)
        take(broker, session=broker.open_session("w", 10**6))
        child = put(broker, "later", parents=[running])
        delayed = put(broker, delay=10**6)
        clock.advance(99)
        assert broker.prune() == 0
        clock.advance(2)
        assert broker.prune() == 3
        keyed = completed[3].id
        assert ids_of(broker.list()) == [keyed, *failed, running, child, delayed]
        clock.advance(1000)
        assert [broker.prune(3), broker.prune(3), broker.prune(3)] == [3, 1, 0]
        assert ids_of(broker.list()) == [running, child, delayed]
        assert put(broker, key="k")

    def test_prune_leaves_what_is_linked(self, store: Store, clock: FakeClock) -> None:
        """A child whose first parent is gone still learns of its second."""
        broker = store.open(clock=clock, keep_completed=100)
        put_many(broker, 2)
        first, second = broker.dequeue([QUEUE], 2, session=broker.open_session("w", 10**6))
        child = put(broker, "later", parents=[first.id, second.id])
        broker.ack(first)
        clock.advance(101)
        broker.prune()
        broker.reap_expired()
        assert state_of(broker, child) is State.BLOCKED
        broker.ack(second)
        assert state_of(broker, child) is State.PENDING
