"""Executions that wait for the results of tasks."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import ConfigError, TaskNotFound
from kombu_taskgate.core.model import FailKind, Filter, NewTask, State, StateChange
from kombu_taskgate.core.results import WAIT_EXPIRES, Finality, NewResult
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import QUEUE, Cases, put, state_of, take
from .store import Store

OPEN, ENDED, SUCCEEDED = Finality.OPEN, Finality.ENDED, Finality.SUCCEEDED


def parent(broker: Broker, name: str = "p", **values: Any) -> int:
    """Publish an execution of a task."""
    return put(broker, **{"type": "t", "task_id": name, "root_id": name, **values})


def child(broker: Broker, *names: str, **values: Any) -> int:
    """Publish an execution that depends on tasks."""
    return put(broker, **{"queue": "later", "type": "t", "depends_on": names, **values})


def say(
    broker: Broker, name: str = "p", finality: Finality = SUCCEEDED, status: str = "SUCCESS", **values: Any
) -> bool:
    """Store a result."""
    return broker.results.store(NewResult(name, status, finality, b"1", **values))


class WaitCases(Cases):
    """depends_on."""

    def test_wakes_with_the_last_success(self, broker: Broker) -> None:
        """A task waits until all it depends on have succeeded; what is said before the end wakes nobody."""
        for name in "ab":
            parent(broker, name)
        id = child(broker, "a", "b", "a")
        assert (state_of(broker, id), broker.get(id).pending_parents) == (State.BLOCKED, 2)
        say(broker, "a", OPEN, "STARTED")
        assert broker.get(id).pending_parents == 2
        assert say(broker, "a")
        assert (state_of(broker, id), broker.get(id).pending_parents) == (State.BLOCKED, 1)
        assert broker.dequeue(["later"]) == []
        assert say(broker, "b")
        assert (state_of(broker, id), broker.get(id).pending_parents) == (State.PENDING, 0)
        assert take(broker, "later").id == id

    def test_wakes_into_its_delay(self, broker: Broker, clock: FakeClock) -> None:
        """A delayed task is not claimed before its time, when it has woken before that."""
        parent(broker)
        id = child(broker, "p", delay=5)
        say(broker)
        assert broker.dequeue(["later"]) == []
        clock.advance(5.001)
        assert take(broker, "later").id == id

    def test_failure_cancels_down_the_line(self, broker: Broker) -> None:
        """The failure of a parent cancels what depends on it, and says which; so it goes for what depends on that."""
        parent(broker)
        id = child(broker, "p")
        grandchild = put(broker, "later", parents=[id])
        say(broker, "p", ENDED, "FAILURE")
        row = broker.get(id)
        assert (row.state, row.reason) == (State.CANCELED, "parent")
        assert row.detail is not None
        assert "parent p " in row.detail
        assert "FAILURE" in row.detail
        assert state_of(broker, grandchild) is State.CANCELED

    def test_ended_counts_as_done_on_demand(self, broker: Broker) -> None:
        """Without fail_fast a parent that has failed counts as done, before and after the child is published."""
        for name in "ab":
            parent(broker, name)
        id = child(broker, "a", "b", fail_fast=False)
        say(broker, "a", ENDED, "FAILURE")
        assert state_of(broker, id) is State.BLOCKED
        say(broker, "b")
        assert state_of(broker, id) is State.PENDING
        assert state_of(broker, child(broker, "a", "b", fail_fast=False)) is State.PENDING

    def test_child_of_what_has_ended(self, broker: Broker) -> None:
        """A child that is published after the end of its parents is pending, or canceled at once."""
        say(broker, "good")
        say(broker, "bad", ENDED, "REVOKED")
        assert state_of(broker, child(broker, "good")) is State.PENDING
        row = broker.get(child(broker, "bad", "good"))
        assert (row.state, row.reason, row.pending_parents) == (State.CANCELED, "parent", 0)
        assert row.detail is not None
        assert "bad" in row.detail
        assert "REVOKED" in row.detail

    def test_unknown_parent(self, broker: Broker) -> None:
        """What was never published is refused by name, with all that comes with it, and leaves nothing behind."""
        parent(broker)
        known = NewTask("later", type="t", depends_on=["p"])
        with pytest.raises(TaskNotFound, match="nobody-knows"):
            broker.enqueue_many([known, NewTask("later", type="t", depends_on=["p", "nobody-knows"])])
        assert broker.list(Filter(queue="later")) == []
        assert broker.results.get(["p", "nobody-knows"]) == {}
        with pytest.raises(ConfigError, match="itself"):
            child(broker, "x", task_id="x")
        # A message that carries a result has the id of the task as well.
        put(broker, task_id="reply")
        with pytest.raises(TaskNotFound, match="reply"):
            child(broker, "reply")

    def test_parent_and_child_together(self, broker: Broker) -> None:
        """What is stored earlier in the same transaction is a parent like others."""
        tasks = [NewTask(QUEUE, type="t", task_id="p"), NewTask("later", type="t", depends_on=["p"])]
        first, id = broker.enqueue_many(tasks)
        assert state_of(broker, first) is State.PENDING
        assert state_of(broker, id) is State.BLOCKED
        with pytest.raises(TaskNotFound):
            broker.enqueue_many([NewTask("later", type="t", depends_on=["q"]), NewTask(QUEUE, type="t", task_id="q")])
        say(broker)
        assert state_of(broker, id) is State.PENDING

    def test_being_waited_for_is_no_result(self, broker: Broker) -> None:
        """A task that others wait for has no result before it has one, and stores it as if nobody waited."""
        parent(broker)
        child(broker, "p")
        assert broker.results.get(["p"]) == {}
        assert broker.results.get(["p"], ended=True) == {}
        assert broker.results.forget(["p"]) == 0
        claim = take(broker)
        lease: dict[str, Any] = {"execution": claim.id, "token": claim.token, "fenced": True}
        assert say(broker, "p", OPEN, "STARTED", **lease)
        assert broker.results.get(["p"])["p"].version == 1
        assert say(broker, **lease, expires_in=60)
        stored = broker.results.get(["p"])["p"]
        assert (stored.status, stored.version, stored.execution) == ("SUCCESS", 2, claim.id)
        assert stored.expires_at == stored.stored_at + 60_000
        assert not say(broker, "p", ENDED, "FAILURE")

    def test_stale_word_wakes_nobody(self, broker: Broker, clock: FakeClock) -> None:
        """What is said under a lease that was taken over is refused, and nobody wakes from it."""
        parent(broker)
        id = child(broker, "p")
        stale = take(broker)
        clock.advance(11)
        assert broker.reap_expired() == 1
        lease: dict[str, Any] = {"execution": stale.id, "token": stale.token, "fenced": True}
        assert not say(broker, **lease)
        assert state_of(broker, id) is State.BLOCKED

    def test_parent_that_retries_goes_on(self, broker: Broker) -> None:
        """A retry is another execution of the same task: the end of the first one is not the end of the task."""
        parent(broker, root_id=None)
        id = child(broker, "p")
        first = take(broker)
        say(broker, "p", OPEN, "RETRY", execution=first.id, token=first.token)
        parent(broker, delay=60, root_id=None)
        broker.ack(first)
        broker.reap_expired()
        assert state_of(broker, id) is State.BLOCKED
        say(broker)
        assert state_of(broker, id) is State.PENDING

    def test_parent_that_leaves_no_result(self, broker: Broker) -> None:
        """When a task is over and has left no result, the next reap cancels who waits for it, and says why."""
        parent(broker)
        parent(broker, "q")
        id, tolerant = child(broker, "p", "q"), child(broker, "p", fail_fast=False)
        first, second = broker.dequeue([QUEUE], 2)
        broker.ack(first)
        broker.reap_expired()
        row = broker.get(id)
        assert (row.state, row.reason, state_of(broker, tolerant)) == (State.CANCELED, "parent", State.PENDING)
        assert row.detail is not None
        assert "parent p " in row.detail
        assert "no result" in row.detail
        # Nobody is left who waits for the other.
        assert say(broker, "q")
        broker.ack(second)

    def test_parent_that_was_replaced_goes_on(self, broker: Broker) -> None:
        """While something of the parent's workflow can run, the parent may still end: a workflow may replace a task."""
        parent(broker)
        id = child(broker, "p")
        first = take(broker)
        parent(broker, "part", root_id="p")
        broker.ack(first)
        broker.reap_expired()
        assert state_of(broker, id) is State.BLOCKED
        part = take(broker)
        last = parent(broker)
        broker.ack(part)
        broker.reap_expired()
        assert state_of(broker, id) is State.BLOCKED
        say(broker)
        broker.ack(take(broker))
        assert last
        assert state_of(broker, id) is State.PENDING

    def test_parent_that_ends_in_the_broker(self, broker: Broker) -> None:
        """A parent that the broker gives up or cancels, and that nobody answers for, cancels what waits at a reap."""
        parent(broker, "dead")
        parent(broker, "gone", queue="other")
        dead, gone = child(broker, "dead"), child(broker, "gone")
        broker.fail(take(broker), FailKind.SKIP)
        assert len(broker.cancel_waiting(task_ids=["gone"])) == 1
        broker.reap_expired()
        details = [broker.get(id).detail or "" for id in (dead, gone)]
        assert [state_of(broker, id) for id in (dead, gone)] == [State.CANCELED] * 2
        assert "parent dead " in details[0]
        assert "failed" in details[0]
        assert "parent gone " in details[1]
        assert "canceled" in details[1]

    def test_purged_parent(self, broker: Broker) -> None:
        """Who waits for a task that was purged does not wait for ever."""
        parent(broker)
        id = child(broker, "p")
        assert broker.purge(QUEUE) == 1
        broker.reap_expired()
        assert state_of(broker, id) is State.CANCELED

    @pytest.mark.parametrize("how", ["cancel", "purge"])
    def test_child_that_goes(self, broker: Broker, clock: FakeClock, how: str) -> None:
        """A child that is canceled or purged leaves nothing behind: the parent ends as ever, its result expires."""
        parent(broker)
        parent(broker, "q")
        id = child(broker, "p", "q")
        if how == "cancel":
            assert broker.cancel(id) is State.CANCELED
        else:
            assert broker.purge("later") == 1
        assert say(broker, expires_in=10)
        assert broker.list(Filter(queue="later", states=[State.PENDING, State.BLOCKED])) == []
        clock.advance(WAIT_EXPIRES + 1)
        assert broker.results.sweep() >= 1
        assert broker.results.get(["p"]) == {}
        assert broker.results.sweep() == 0
        # As if nobody had ever waited for it.
        assert say(broker, "q")

    def test_forgotten_parent(self, broker: Broker) -> None:
        """Forgetting what a parent has said hangs nobody, and changes nothing once it was counted."""
        for name in "abc":
            parent(broker, name)
        say(broker, "a")
        say(broker, "b", OPEN, "STARTED")
        id = child(broker, "a", "b", "c")
        assert broker.results.forget(["a", "b"]) == 2
        assert broker.results.get(["a", "b"]) == {}
        say(broker, "c")
        assert broker.results.forget(["c"]) == 1
        assert state_of(broker, id) is State.BLOCKED
        say(broker, "b")
        assert broker.results.get(["b"])["b"].version == 1
        assert state_of(broker, id) is State.PENDING

    def test_awaited_result_is_not_swept(self, broker: Broker, clock: FakeClock) -> None:
        """What a parent has said stays past its time as long as somebody waits for what follows."""
        for name in "ab":
            parent(broker, name)
        say(broker, "a", OPEN, "STARTED", expires_in=10)
        id = child(broker, "a", "b")
        until = broker.results.get(["a"])["a"].expires_at
        assert until is not None
        assert until - clock.now_ms() == WAIT_EXPIRES * 1000, "a sweep that has just seen it must not take it"
        clock.advance(3 * WAIT_EXPIRES)
        assert broker.results.sweep() == 0
        assert broker.results.get(["a", "b"])["a"].status == "STARTED"
        for name in "ab":
            say(broker, name, expires_in=10)
        assert state_of(broker, id) is State.PENDING
        clock.advance(11)
        assert broker.results.sweep() == 2

    def test_changes_are_announced(self, store: Store, clock: FakeClock) -> None:
        """Waking and canceling are told to the callback, as other changes are."""
        told: list[StateChange] = []
        broker = store.open(clock=clock, notify=told.append)
        for name in "ab":
            parent(broker, name)
        first, second = child(broker, "a"), child(broker, "b")
        told.clear()
        say(broker, "a")
        say(broker, "b", ENDED, "FAILURE")
        assert [(change.id, change.before, change.after) for change in told] == [
            (first, State.BLOCKED, State.PENDING),
            (second, State.BLOCKED, State.CANCELED),
        ]

    @pytest.mark.parametrize("finality", [SUCCEEDED, ENDED])
    def test_child_stored_while_parent_says_its_end(self, store: Store, clock: FakeClock, finality: Finality) -> None:
        """However publishing a child and storing its parent's result fall together, the child learns of it."""
        brokers = [store.open(clock=clock) for _ in range(8)]
        expected = State.PENDING if finality is SUCCEEDED else State.CANCELED
        for turn in range(8):
            name = f"p{turn}"
            parent(brokers[0], name)
            claim = take(brokers[0])
            lease: dict[str, Any] = {"execution": claim.id, "token": claim.token, "fenced": True}
            publish = [partial(child, broker, name) for broker in brokers[1:]]
            calls: list[Any] = [partial(say, brokers[0], name, finality, "X", **lease), *publish]
            random.Random(turn).shuffle(calls)
            outcomes = together(calls)
            assert errors_of(outcomes) == []
            brokers[0].ack(claim)
            states = [row.state for row in brokers[0].list(Filter(queue="later", offset=7 * turn))]
            assert states == [expected] * 7

    def test_parents_in_any_order_at_once(self, store: Store, clock: FakeClock) -> None:
        """Eight threads that publish children of the same parents and end these leave nobody waiting."""
        brokers = [store.open(clock=clock) for _ in range(8)]
        names = [f"p{number}" for number in range(6)]
        for name in names:
            parent(brokers[0], name)

        def publish(number: int) -> None:
            for turn in range(4):
                child(brokers[number], *random.Random(10 * number + turn).sample(names, 4))

        def end(number: int) -> None:
            for name in names[number::3]:
                assert say(brokers[5 + number], name)

        calls = [*(partial(publish, number) for number in range(5)), *(partial(end, number) for number in range(3))]
        assert errors_of(together(calls)) == []
        rows = brokers[0].list(Filter(queue="later"))
        assert [row.state for row in rows] == [State.PENDING] * 20

    def test_inspect(self, broker: Broker, clock: FakeClock) -> None:
        """What is stored of a task: its newest execution, its place, whom it waits for, when its lease ends."""
        assert broker.inspect("p") is None
        put(broker, task_id="reply")
        assert broker.inspect("reply") is None
        parent(broker, "first")
        by_id = parent(broker, "q")
        id = child(broker, "q", "first", parents=[by_id], task_id="c")
        found = broker.inspect("c")
        assert found is not None
        assert (found.task.id, found.waits_for, found.position, found.executions) == (id, ["first", "q"], None, 1)
        session = broker.open_session("w", 25)
        claim = take(broker, session=session)
        assert claim.task_id == "reply"
        claim = take(broker, session=session)
        found = broker.inspect("first")
        assert found is not None
        assert (found.task.id, found.lease_until, found.task.owner) == (claim.id, clock.now_ms() + 25_000, "")
        again = parent(broker, "first", delay=5)
        found = broker.inspect("first")
        assert found is not None
        assert (found.task.id, found.executions, found.position, found.lease_until) == (again, 2, None, None)

    def test_position(self, broker: Broker, clock: FakeClock) -> None:
        """The place in the queue is the order of claims: what is delayed counts when it is due, as does priority."""
        parent(broker, "late", delay=5)
        for number in range(3):
            parent(broker, f"low{number}")
        parent(broker, "high", priority=5)
        parent(broker, "other", queue="other", priority=9)

        def places() -> list[int | None]:
            found = [broker.inspect(name) for name in ("late", "low0", "low1", "low2", "high")]
            return [None if one is None else one.position for one in found]

        assert places() == [None, 2, 3, 4, 1]
        clock.advance(5.001)
        assert places() == [5, 2, 3, 4, 1]
        order = [claim.task_id for claim in broker.dequeue([QUEUE], 9)]
        assert order == ["high", "low0", "low1", "low2", "late"]
