"""Announcements: every state change is told once, after it is done, and is one that the model allows."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection
from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import TaskgateError
from kombu_taskgate.core.model import FINAL, TRANSITIONS, Claim, FailKind, Filter, NewTask, State, StateChange
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import QUEUE, Cases, put, put_many, state_of, take
from .store import Store

QUEUES = ("a", "b")


class TransitionCases(Cases):
    """The notify callback and the table of transitions."""

    def test_notify(self, store: Store, clock: FakeClock) -> None:
        """Notify: each change with what was before and after, in order, once it can be read."""
        told: list[StateChange] = []
        broker: Broker

        def notify(change: StateChange) -> None:
            told.append(change)
            if change.after is not State.COMPLETED:
                assert broker.get(change.id).state is change.after

        broker = store.open(clock=clock, lease_ttl=10, notify=notify)
        parent = put(broker)
        child = put(broker, "later", parents=[parent])
        broker.fail(take(broker))
        claim = take(broker)
        clock.advance(11)
        broker.reap_expired()
        broker.requeue(take(broker))
        broker.ack(take(broker))
        broker.cancel(child)
        new = broker.replay(child)
        assert claim.id == parent
        steps: list[tuple[int, State | None, State]] = [
            (parent, None, State.PENDING),
            (child, None, State.BLOCKED),
            (parent, State.PENDING, State.RUNNING),
            (parent, State.RUNNING, State.RETRYING),
            (parent, State.RETRYING, State.RUNNING),
            (parent, State.RUNNING, State.PENDING),
            (parent, State.PENDING, State.RUNNING),
            (parent, State.RUNNING, State.PENDING),
            (parent, State.PENDING, State.RUNNING),
            (parent, State.RUNNING, State.COMPLETED),
            (child, State.BLOCKED, State.PENDING),
            (child, State.PENDING, State.CANCELED),
            (new, None, State.PENDING),
        ]
        queues = {parent: QUEUE, child: "later", new: "later"}
        assert told == [StateChange(id, queues[id], before, after) for id, before, after in steps]

    def test_notify_of_a_cascade(self, store: Store, clock: FakeClock) -> None:
        """Everything that one call changes is told, each once."""
        told: list[StateChange] = []
        broker = store.open(clock=clock, notify=told.append)
        root = put(broker)
        sides = [put(broker, parents=[root]) for _ in range(2)]
        bottom = put(broker, parents=sides)
        told.clear()
        broker.cancel(root)
        assert sorted(change.id for change in told) == [root, *sides, bottom]
        assert {change.after for change in told} == {State.CANCELED}
        told.clear()
        doomed = put(broker, parents=[root])
        assert told == [StateChange(doomed, QUEUE, None, State.CANCELED)]

    def test_nothing_to_tell(self, store: Store, clock: FakeClock) -> None:
        """What was refused, and what only extends a lease, is no change."""
        told: list[StateChange] = []
        broker = store.open(clock=clock, notify=told.append)
        id = put(broker, key="k")
        claim = take(broker)
        told.clear()
        broker.heartbeat(claim)
        broker.heartbeat_many([claim])
        broker.cancel(id)
        calls: list[Callable[[], object]] = [
            partial(put, broker, key="k"),
            partial(put, broker, parents=[10**12]),
            partial(broker.heartbeat, claim),
            partial(broker.replay, id),
            partial(broker.cancel, 10**12),
        ]
        for call in calls:
            with pytest.raises(TaskgateError):
                call()
        assert broker.dequeue([QUEUE]) == []
        assert told == []

    def test_callback_that_raises(self, store: Store, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
        """A callback that raises harms nothing: the change is done, the next one is told."""
        told: list[State] = []

        def notify(change: StateChange) -> None:
            told.append(change.after)
            raise RuntimeError("callback")

        broker = store.open(clock=clock, notify=notify)
        with caplog.at_level(logging.CRITICAL + 1):
            ids = put_many(broker, 2)
            first, second = broker.dequeue([QUEUE], 2)
            broker.ack(first)
            broker.fail(second)
        assert told == [State.PENDING] * 2 + [State.RUNNING] * 2 + [State.COMPLETED, State.RETRYING]
        assert state_of(broker, ids[1]) is State.RETRYING

    def test_callback_that_uses_the_broker(self, store: Store, clock: FakeClock) -> None:
        """A callback is outside of every lock and transaction: it may call the broker."""
        broker: Broker
        stored: list[int] = []

        def notify(change: StateChange) -> None:
            if change.after is State.RUNNING:
                stored.append(put(broker, "log", type="started"))

        broker = store.open(clock=clock, notify=notify)
        put(broker)
        take(broker)
        assert [claim.id for claim in broker.dequeue(["log"], 5)][:1] == stored[:1]

    def test_transitions(self, store: Store, clock: FakeClock) -> None:
        """Many random calls: each announced change is allowed, and each row's changes form one history."""
        told: list[StateChange] = []
        broker = store.open(
            clock=clock,
            lease_ttl=10,
            lease_lost_max=2,
            throttled_max=2,
            max_deliveries=4,
            keep_completed=10**6,
            notify=told.append,
        )
        _random_calls(broker, clock, random.Random(7), 400)
        self._check(broker, told)

    def test_every_transition(self, store: Store, clock: FakeClock) -> None:
        """Each transition that the model allows can be reached, and is announced."""
        told: list[StateChange] = []
        broker = store.open(clock=clock, max_deliveries=2, notify=told.append)
        parent = put(broker)
        put(broker, "later", parents=[parent])
        broker.ack(take(broker))
        canceled = put(broker)
        put(broker, parents=[canceled])
        broker.cancel(canceled)
        put(broker, parents=[canceled])
        # A retry itself never reaches the cap; one that waits is over it for a broker with a lower one.
        strict = store.open(clock=clock, max_deliveries=1, notify=told.append)
        for last, next in ((broker.requeue, broker), (broker.fail, strict)):
            put(broker)
            broker.requeue(take(broker))
            last(take(broker))
            assert next.dequeue([QUEUE]) == []
        put(broker)
        broker.fail(take(broker), FailKind.SKIP)
        put(broker)
        broker.finish_canceled(take(broker))
        retrying = put(broker)
        broker.fail(take(broker))
        broker.fail(take(broker), delay=60)
        broker.cancel(retrying)
        self._check(broker, told, removed={parent})
        seen = {(change.before, change.after) for change in told}
        allowed = {(before, after) for before, states in TRANSITIONS.items() for after in states}
        assert seen == allowed, f"never seen: {allowed - seen}"

    def test_transitions_under_race(self, store: Store, clock: FakeClock) -> None:
        """The same from four threads, each with a broker of its own."""
        told: list[StateChange] = []
        brokers = [
            store.open(clock=clock, lease_ttl=10, lease_lost_max=2, keep_completed=10**6, notify=told.append)
            for _ in range(4)
        ]
        calls = [partial(_random_calls, broker, clock, random.Random(seed), 60) for seed, broker in enumerate(brokers)]
        assert errors_of(together(calls)) == []
        for change in told:
            assert change.after in TRANSITIONS[change.before], change
        ended = [change.id for change in told if change.after in FINAL]
        assert len(ended) == len(set(ended))
        final = {task.id for task in brokers[0].list(Filter(limit=10**6)) if task.state in FINAL}
        assert set(ended) == final

    def _check(self, broker: Broker, told: list[StateChange], removed: Collection[int] = ()) -> None:
        last: dict[int, State] = {}
        for change in told:
            assert change.after in TRANSITIONS[change.before], change
            assert last.get(change.id) == change.before, change
            last[change.id] = change.after
        assert {id: state for id, state in last.items() if id not in removed} == {
            task.id: task.state for task in broker.list(Filter(limit=10**6))
        }


def _random_calls(broker: Broker, clock: FakeClock, dice: random.Random, number: int) -> None:
    """Publish, claim, settle, cancel, reap and replay at random; only our own errors are expected."""
    held: list[Claim] = []
    ids: list[int] = []

    def publish() -> None:
        parents = dice.sample(ids, min(len(ids), dice.choice([0, 0, 1, 2])))
        expires_at = clock.now_ms() + 3000 if dice.random() < 0.2 else None
        delay = dice.choice([None, 2, 8])
        ids.append(
            broker.enqueue(
                NewTask(
                    dice.choice(QUEUES),
                    parents=parents,
                    delay=delay,
                    expires_at=expires_at,
                    fail_fast=dice.random() < 0.7,
                    max_retry=1,
                )
            )
        )

    def claim() -> None:
        held.extend(broker.dequeue(QUEUES, dice.randint(1, 4), owner="w"))

    def settle() -> None:
        if not held:
            return
        lease = held.pop(dice.randrange(len(held)))
        ways: list[Callable[[Claim], object]] = [
            broker.ack,
            broker.requeue,
            broker.finish_canceled,
            broker.heartbeat,
            partial(broker.fail, delay=dice.choice([0, 5])),
            partial(broker.fail, kind=FailKind.THROTTLED, delay=1),
            partial(broker.fail, kind=FailKind.SKIP),
            partial(broker.fail, kind=FailKind.LOST),
        ]
        dice.choice(ways)(lease)

    def cancel() -> None:
        if ids:
            broker.cancel(dice.choice(ids))

    def replay() -> None:
        if ids:
            ids.append(broker.replay(dice.choice(ids), allow_completed=True))

    def time_passes() -> None:
        clock.advance(dice.choice([0.5, 3, 11]))
        broker.reap_expired()

    steps = [publish] * 5 + [claim] * 5 + [settle] * 4 + [cancel, replay, time_passes]
    for _ in range(number):
        try:
            dice.choice(steps)()
        except TaskgateError as error:
            assert type(error).__name__ in _EXPECTED, repr(error)


_EXPECTED = {
    "AlreadyFinal",
    "AlreadyReplayed",
    "LeaseLost",
    "ReplayNotFinal",
    "TaskCanceled",
    "TaskNotFound",
}
