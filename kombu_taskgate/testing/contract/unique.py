"""Unique keys: locked by one execution until it has ended, and taken over by its own successor."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import ConfigError, TaskExists
from kombu_taskgate.core.model import FailKind, Lease, NewTask, State
from kombu_taskgate.core.topology import Queue
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import together

from .base import QUEUE, Cases, put, put_many, state_of, take
from .store import Store

#: How a running execution ends.
ENDS: dict[str, Callable[[Broker, Lease], object]] = {
    "ack": lambda broker, lease: broker.ack(lease),
    "ack with a result": lambda broker, lease: broker.ack(lease, b"result"),
    "ack many": lambda broker, lease: broker.ack_many([lease]),
    "skip": lambda broker, lease: broker.fail(lease, FailKind.SKIP),
    "business": lambda broker, lease: broker.fail(lease, FailKind.BUSINESS),
    "canceled": lambda broker, lease: broker.finish_canceled(lease),
    "lost after it began": lambda broker, lease: broker.begin_many([lease]) or broker.fail(lease, FailKind.LOST),
}
#: What a running execution goes on after.
GOES_ON: dict[str, Callable[[Broker, Lease], object]] = {
    "requeue": lambda broker, lease: broker.requeue(lease),
    "throttled": lambda broker, lease: broker.fail(lease, FailKind.THROTTLED),
    "lost": lambda broker, lease: broker.fail(lease, FailKind.LOST),
    "begun": lambda broker, lease: broker.begin_many([lease]),
}


def refused(broker: Broker, key: str = "k", **values: object) -> TaskExists:
    """The error of enqueuing with a locked key, after which nothing more is stored."""
    before = [task.id for task in broker.list()]
    with pytest.raises(TaskExists) as raised:
        broker.enqueue(NewTask(QUEUE, unique_key=key, **values))  # type: ignore[arg-type]  # fields of NewTask
    assert [task.id for task in broker.list()] == before
    return raised.value


class UniqueCases(Cases):
    """unique_key and take_over."""

    def test_unique_while_it_waits_and_runs(self, broker: Broker, clock: FakeClock) -> None:
        """Refused with who has it, whether that is delayed, ready or running; others are not concerned."""
        id = put(broker, unique_key="k", task_id="t", delay=5)
        error = refused(broker)
        assert (error.key, error.id, error.state, error.task_id, error.unique) == ("k", id, State.PENDING, "t", True)
        assert "'k'" in str(error)
        clock.advance(5)
        put(broker, unique_key="other")
        put_many(broker, 2)
        assert (broker.get(id).unique_key, broker.get(id).locks) == ("k", True)
        claim = take(broker)
        assert refused(broker).state is State.RUNNING
        broker.ack(claim)
        put(broker, unique_key="k")

    def test_unique_while_it_is_blocked(self, broker: Broker) -> None:
        """One that waits for its parents has the lock, and loses it when a parent fails."""
        parent = put(broker)
        child = put(broker, unique_key="k", parents=[parent])
        assert refused(broker).state is State.BLOCKED
        broker.cancel(parent)
        assert (state_of(broker, child), broker.get(child).locks) == (State.CANCELED, False)
        doomed = put(broker, unique_key="k", parents=[parent])
        assert (state_of(broker, doomed), broker.get(doomed).locks) == (State.CANCELED, False)
        put(broker, unique_key="k")

    @pytest.mark.parametrize("keep", [0, 60])
    @pytest.mark.parametrize("way", ENDS)
    def test_unique_until_it_ends(self, store: Store, clock: FakeClock, way: str, keep: int) -> None:
        """Free after any end, whether the row is kept or not."""
        broker = store.open(clock=clock, lease_ttl=10, keep_completed=keep)
        put(broker, unique_key="k", max_retry=0)
        ENDS[way](broker, take(broker))
        again = put(broker, unique_key="k")
        assert [task.id for task in broker.list() if task.locks] == [again]

    @pytest.mark.parametrize("way", GOES_ON)
    def test_unique_as_long_as_it_goes_on(self, broker: Broker, way: str) -> None:
        """What comes back has kept its lock."""
        id = put(broker, unique_key="k")
        GOES_ON[way](broker, take(broker))
        assert (refused(broker).id, broker.get(id).locks) == (id, True)

    def test_unique_until_it_is_reaped_for_good(self, store: Store, clock: FakeClock) -> None:
        """No time-out frees it, neither a lease that has run out nor its being taken back; the dead letter does."""
        broker = store.open(clock=clock, lease_ttl=10, lease_lost_max=2)
        put(broker, unique_key="k")
        for _ in range(2):
            take(broker)
            clock.advance(10_000)
            refused(broker)
            assert broker.reap_expired() == 1
        put(broker, unique_key="k")

    @pytest.mark.parametrize("queue", [QUEUE, "short"])
    def test_unique_until_it_expires(self, broker: Broker, clock: FakeClock, queue: str) -> None:
        """Free when it is dropped."""
        broker.topology.declare_queue(Queue("short", expires=600))
        put(broker, queue, unique_key="k", expires_in=5)
        clock.advance(5)
        assert broker.dequeue([queue]) == []
        put(broker, unique_key="k")

    def test_unique_until_it_is_canceled_or_purged(self, broker: Broker) -> None:
        """Whoever removes what waits frees its keys."""
        broker.cancel(put(broker, unique_key="k"))
        broker.cancel_waiting([put(broker, unique_key="k")])
        put(broker, unique_key="k", delay=60)
        put(broker, unique_key="l", parents=[put(broker)])
        broker.purge(QUEUE)
        put(broker, unique_key="k")
        put(broker, unique_key="l")

    def test_unique_until_it_was_delivered_too_often(self, store: Store, clock: FakeClock) -> None:
        """What a claim drops frees its key."""
        broker = store.open(clock=clock, max_deliveries=1)
        put(broker, unique_key="k")
        broker.requeue(take(broker))
        assert broker.dequeue([QUEUE]) == []
        put(broker, unique_key="k")

    def test_unique_in_a_batch(self, broker: Broker) -> None:
        """All or none: one that is refused keeps the others from being stored, also if another of the batch has it."""
        id = put(broker, unique_key="k")
        for keys in (["a", "k", "b"], ["a", "b", "a"]):
            with pytest.raises(TaskExists):
                broker.enqueue_many([NewTask(QUEUE, unique_key=key) for key in keys])
            assert [task.id for task in broker.list()] == [id]
        assert len(broker.enqueue_many([NewTask(QUEUE, unique_key=key) for key in "ab"])) == 2

    def test_lock_is_taken_over(self, broker: Broker) -> None:
        """By an execution of the same task_id, from one that runs; then by no other, and its end frees nothing."""
        id = put(broker, unique_key="k", task_id="t")
        refused(broker, task_id="t", take_over=True)  # it waits
        claim = take(broker)
        refused(broker, task_id="t")
        refused(broker, task_id="other", take_over=True)
        refused(broker, take_over=True)
        successor = put(broker, unique_key="k", task_id="t", take_over=True, delay=5)
        assert (broker.get(id).locks, broker.get(id).unique_key, broker.get(successor).locks) == (False, "k", True)
        broker.ack(claim)
        assert refused(broker).id == successor
        put(broker, unique_key="free", task_id="t", take_over=True)

    def test_replay_locks(self, broker: Broker) -> None:
        """A replay has its original's key, if that is free."""
        id = put(broker, unique_key="k")
        broker.fail(take(broker), FailKind.SKIP)
        other = put(broker, unique_key="k")
        with pytest.raises(TaskExists) as raised:
            broker.replay(id)
        assert raised.value.id == other
        broker.ack(take(broker))
        copy = broker.replay(id)
        assert (broker.get(copy).unique_key, broker.get(copy).locks) == ("k", True)
        assert refused(broker).id == copy

    def test_race_for_a_unique_key(self, store: Store) -> None:
        """Of 50 that publish one key at once, one stores it and the others are told who; as often as it is free."""
        brokers = [store.open() for _ in range(5)]
        for _ in range(3):
            outcomes = together([lambda at=at: put(brokers[at % 5], unique_key="k") for at in range(50)])  # type: ignore[misc]  # mypy can't infer a lambda with a default
            won = [one for one in outcomes if isinstance(one, int)]
            lost = [one for one in outcomes if isinstance(one, TaskExists)]
            assert (len(won), len(lost)) == (1, 49), outcomes
            assert {error.id for error in lost} == set(won)
            brokers[0].ack(take(brokers[0]))

    def test_unique_keys_have_bounds(self, broker: Broker) -> None:
        """1 to 255 characters, as other names."""
        for key in ("", "x" * 256):
            with pytest.raises(ConfigError):
                put(broker, unique_key=key)
        put(broker, unique_key="x" * 255)

    def test_refusal_survives_a_pipe(self, broker: Broker) -> None:
        """A task that publishes may raise it in a process of a pool."""
        put(broker, unique_key="k", task_id="t")
        error = refused(broker)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), vars(again)) == (str(error), vars(error))
