"""Settling: only who holds the lease may, once, and every counter says what happened."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import (
    AlreadyFinal,
    ConfigError,
    LeaseLost,
    ReplayNotFinal,
    TaskCanceled,
    TaskNotFound,
)
from kombu_taskgate.core.model import NO_TOKEN, FailKind, Lease, Reason, State
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import QUEUE, Cases, error_of, put, put_many, settlers, state_of, take
from .store import Store


class SettleCases(Cases):
    """ack, fail, requeue, finish_canceled and the token that guards them."""

    def test_ack_fail(self, broker: Broker, clock: FakeClock) -> None:
        """AckFail: business failures count up to max_retry, then the execution is a dead letter."""
        id = put(broker, max_retry=2)
        assert broker.fail(take(broker), FailKind.BUSINESS, delay=5) is State.RETRYING
        task = broker.get(id)
        assert (task.state, task.attempts, task.run_at) == (State.RETRYING, 1, clock.now_ms() + 5000)
        assert (task.lease_until, task.reason, task.finished_at) == (None, None, None)
        assert broker.dequeue([QUEUE]) == []
        clock.advance(5)
        claim = take(broker)
        assert (claim.attempts, claim.deliveries) == (1, 2)
        assert broker.fail(claim, retry_at=clock.now_ms() + 7000) is State.RETRYING
        assert broker.get(id).run_at == clock.now_ms() + 7000
        clock.advance(7)
        assert broker.fail(take(broker), detail="ValueError: 7") is State.FAILED
        task = broker.get(id)
        assert (task.state, task.attempts, task.reason, task.detail) == (State.FAILED, 3, "business", "ValueError: 7")
        assert (task.finished_at, task.lease_until) == (clock.now_ms(), None)

    def test_fail_without_a_time_retries_now(self, broker: Broker, clock: FakeClock) -> None:
        """A failure that names no time is ready again at once."""
        id = put(broker)
        clock.advance(3)
        assert broker.fail(take(broker)) is State.RETRYING
        assert broker.get(id).run_at == clock.now_ms()
        assert take(broker).id == id

    def test_no_retry_allowed(self, broker: Broker) -> None:
        """max_retry 0: the first business failure is the last."""
        put(broker, max_retry=0)
        assert broker.fail(take(broker)) is State.FAILED

    def test_throttled(self, store: Store, clock: FakeClock) -> None:
        """Throttling counts by itself; at throttled_max it ends, the attempts untouched."""
        broker = store.open(clock=clock, throttled_max=3)
        id = put(broker, max_retry=0)
        for count in (1, 2):
            assert broker.fail(take(broker), FailKind.THROTTLED, delay=1) is State.RETRYING
            assert (broker.get(id).throttled, broker.get(id).attempts) == (count, 0)
            clock.advance(1)
        assert broker.fail(take(broker), FailKind.THROTTLED, delay=1) is State.FAILED
        task = broker.get(id)
        assert (task.throttled, task.attempts, task.reason) == (3, 0, "throttled")

    def test_skip(self, broker: Broker) -> None:
        """Skip: a dead letter at once, no counter moves."""
        id = put(broker)
        assert broker.fail(take(broker, owner="w"), FailKind.SKIP, detail="no such task") is State.FAILED
        task = broker.get(id)
        assert (task.state, task.reason, task.detail) == (State.FAILED, "rejected", "no such task")
        assert (task.attempts, task.throttled, task.lease_lost, task.owner) == (0, 0, 0, "w")

    def test_lost(self, store: Store, clock: FakeClock) -> None:
        """A holder that tells the loss: counted as by the reaper, ready at once at its old place, ended at the cap."""
        broker = store.open(clock=clock, lease_lost_max=3)
        first, second = put_many(broker, 2)
        run_at = broker.get(first).run_at
        for count in (1, 2):
            clock.advance(3)
            assert broker.fail(take(broker, owner="w"), FailKind.LOST, detail="signal 9") is State.PENDING
            task = broker.get(first)
            assert (task.state, task.lease_lost, task.deliveries, task.run_at) == (State.PENDING, count, count, run_at)
            assert (task.attempts, task.throttled, task.lease_until, task.owner) == (0, 0, None, None)
            assert (task.reason, task.detail) == (None, None)
        assert broker.fail(take(broker, owner="w"), FailKind.LOST, detail="signal 9") is State.FAILED
        task = broker.get(first)
        assert (task.state, task.lease_lost, task.reason) == (State.FAILED, 3, "lease_lost")
        assert (task.detail, task.owner, task.finished_at) == ("signal 9", "w", clock.now_ms())
        assert take(broker).id == second

    def test_losses_of_both_kinds_are_one_count(self, store: Store, clock: FakeClock) -> None:
        """What was reaped and what was told add up, and end in the same words."""
        broker = store.open(clock=clock, lease_ttl=10, lease_lost_max=2)
        id = put(broker)
        take(broker)
        clock.advance(11)
        assert broker.reap_expired() == 1
        assert broker.fail(take(broker), FailKind.LOST) is State.FAILED
        told = broker.get(id)
        other = put(broker)
        broker.fail(take(broker), FailKind.LOST)
        take(broker)
        clock.advance(11)
        assert broker.reap_expired() == 1
        reaped = broker.get(other)
        assert (told.lease_lost, told.reason, told.detail) == (reaped.lease_lost, reaped.reason, reaped.detail)

    def test_lost_takes_no_time(self, broker: Broker) -> None:
        """What was lost is ready at once: a time is an error, and changes nothing."""
        id = put(broker)
        claim = take(broker)
        for time in ({"delay": 0.0}, {"retry_at": 0}):
            assert isinstance(error_of(partial(broker.fail, claim, FailKind.LOST, **time)), ConfigError)
        assert state_of(broker, id) is State.RUNNING

    def test_reason_of_the_caller(self, broker: Broker) -> None:
        """A caller that knows the reason better says so."""
        id = put(broker)
        broker.fail(take(broker), FailKind.SKIP, reason=Reason.UNDECODABLE)
        assert broker.get(id).reason == "undecodable"

    def test_long_detail(self, broker: Broker) -> None:
        """A traceback of any length, with any characters, is kept."""
        id = put(broker)
        detail = "Zeile 🐘\n" * 20_000
        broker.fail(take(broker), FailKind.SKIP, detail=detail)
        assert broker.get(id).detail == detail

    def test_stale_token(self, broker: Broker, clock: FakeClock) -> None:
        """StaleToken: after another claim every write with the old token is refused, the new one is good."""
        id = put(broker)
        stale = take(broker, owner="frozen")
        clock.advance(10.001)
        assert broker.reap_expired() == 1
        current = take(broker, owner="quick")
        assert current.token != stale.token
        before = broker.get(id)
        for name, settle in settlers(broker).items():
            for lease in (stale, Lease(id, NO_TOKEN), Lease(id, -1)):
                assert isinstance(error_of(partial(settle, lease)), LeaseLost), name
        assert broker.ack_many([stale]) == broker.requeue_many([stale]) == [stale]
        assert broker.ack_and_dequeue([stale], [], 0) == ([stale], [])
        assert broker.heartbeat_many([stale, current]).lost == [stale]
        assert broker.get(id) == before
        assert broker.heartbeat(current) == clock.now_ms() + 10_000
        broker.ack(current)
        with pytest.raises(TaskNotFound):
            broker.get(id)

    @pytest.mark.parametrize(
        "name", ["ack", "fail", "throttle", "skip", "lose", "requeue", "heartbeat", "finish_canceled"]
    )
    def test_token_ends_with_the_lease(self, broker: Broker, clock: FakeClock, name: str) -> None:
        """A token is good for nothing while nobody holds the execution, whatever gave it back."""
        settle = settlers(broker)[name]
        put_many(broker, 3)
        requeued, retried, reaped = broker.dequeue([QUEUE], 3)
        clock.advance(10.001)
        broker.heartbeat_many([requeued, retried])
        broker.requeue(requeued)
        broker.fail(retried, delay=60)
        assert broker.reap_expired() == 1
        for lease in (requeued, retried, reaped):
            before = broker.get(lease.id)
            with pytest.raises(LeaseLost):
                settle(lease)
            with pytest.raises(LeaseLost):
                settle(Lease(lease.id, NO_TOKEN))
            assert broker.get(lease.id) == before

    def test_empty_token_never_matches(self, broker: Broker) -> None:
        """The empty token settles nothing, not even what was never claimed."""
        id = put(broker)
        for name, settle in settlers(broker).items():
            assert isinstance(error_of(partial(settle, Lease(id, NO_TOKEN))), LeaseLost), name
        assert broker.ack_many([Lease(id, NO_TOKEN)]) == [Lease(id, NO_TOKEN)]
        assert broker.get(id).state is State.PENDING

    def test_each_claim_has_a_new_token(self, broker: Broker) -> None:
        """No token is issued twice for one execution, and later ones are greater."""
        put(broker)
        tokens = []
        for _ in range(10):
            claim = take(broker)
            tokens.append(claim.token)
            broker.requeue(claim)
        assert tokens == sorted(set(tokens))

    def test_one_settles(self, store: Store, clock: FakeClock) -> None:
        """Of many that settle one lease at once, in different ways, one succeeds."""
        brokers = [store.open(clock=clock, keep_completed=60) for _ in range(4)]
        ways = ["ack", "skip", "requeue", "finish_canceled"]
        for _ in range(5):
            id = put(brokers[0])
            claim = take(brokers[0])
            outcomes = together([partial(settlers(b)[way], claim) for b, way in zip(brokers, ways, strict=True)])
            errors = errors_of(outcomes)
            assert len(errors) == 3, outcomes
            assert all(isinstance(error, LeaseLost) for error in errors), outcomes
            winner = next(way for way, outcome in zip(ways, outcomes, strict=True) if outcome not in errors)
            ends = {"ack": "completed", "skip": "failed", "requeue": "pending", "finish_canceled": "canceled"}
            assert state_of(brokers[0], id).value == ends[winner]
            brokers[0].purge(QUEUE)

    def test_settling_unknown_ids(self, broker: Broker) -> None:
        """A lease on what does not exist is lost."""
        for name, settle in settlers(broker).items():
            assert isinstance(error_of(partial(settle, Lease(10**12, 1))), LeaseLost), name

    def test_late_but_not_reaped(self, broker: Broker, clock: FakeClock) -> None:
        """A lease that ran out and was not taken back can still be settled: nobody else has it."""
        put(broker)
        claim = take(broker)
        clock.advance(100)
        assert broker.heartbeat(claim) == clock.now_ms() + 10_000
        clock.advance(100)
        broker.ack(claim)
        assert broker.reap_expired() == 0

    def test_retrying_reclaim(self, broker: Broker, clock: FakeClock) -> None:
        """RetryingReclaim: a retrying execution is claimed like a pending one, in the order of its new run_at."""
        retried = put(broker)
        broker.fail(take(broker), delay=5)
        waiting = put(broker, delay=4)
        assert broker.queue_len(QUEUE) == 2
        clock.advance(5)
        claims = broker.dequeue([QUEUE], 5)
        assert [(claim.id, claim.attempts, claim.deliveries) for claim in claims] == [(waiting, 0, 1), (retried, 1, 2)]
        assert state_of(broker, retried) is State.RUNNING

    def test_requeue_no_count(self, broker: Broker, clock: FakeClock) -> None:
        """RequeueNoCount: back to its place; only the delivery has been counted, by the claim."""
        first, second = put_many(broker, 2)
        run_at = broker.get(first).run_at
        clock.advance(3)
        broker.requeue(take(broker, owner="w"))
        task = broker.get(first)
        assert (task.state, task.run_at, task.deliveries) == (State.PENDING, run_at, 1)
        assert (task.attempts, task.throttled, task.lease_lost) == (0, 0, 0)
        assert (task.lease_until, task.owner, task.reason) == (None, None, None)
        assert [take(broker).id, take(broker).id] == [first, second]

    def test_requeue_of_what_nobody_saw(self, broker: Broker) -> None:
        """delivered=False takes the claim's delivery back, one by one and in a batch."""
        ids = put_many(broker, 3)
        first, *others = broker.dequeue([QUEUE], 3)
        broker.requeue(first, delivered=False)
        assert broker.requeue_many([first, *others], delivered=False) == [first]
        assert [broker.get(id).deliveries for id in ids] == [0, 0, 0]
        assert [claim.deliveries for claim in broker.dequeue([QUEUE], 3)] == [1, 1, 1]

    def test_requeue_of_retried_keeps_its_time(self, broker: Broker, clock: FakeClock) -> None:
        """A requeued retry goes back to where it was, with its attempts."""
        id = put(broker)
        broker.fail(take(broker), delay=5)
        clock.advance(8)
        run_at = broker.get(id).run_at
        broker.requeue(take(broker))
        task = broker.get(id)
        assert (task.state, task.run_at, task.attempts) == (State.PENDING, run_at, 1)

    def test_illegal_transition(self, broker: Broker, clock: FakeClock) -> None:
        """IllegalTransition: what a state does not allow is refused by name and changes nothing."""
        ended: dict[State, tuple[int, Callable[[Lease], object]]] = {
            State.COMPLETED: (put(broker, key="c"), broker.ack),
            State.FAILED: (put(broker), partial(broker.fail, kind=FailKind.SKIP)),
            State.CANCELED: (put(broker), broker.finish_canceled),
        }
        for state, (id, end) in ended.items():
            claim = take(broker)
            assert claim.id == id
            end(claim)
            before = broker.get(id)
            assert before.state is state
            clock.advance(1)
            for settle in settlers(broker).values():
                with pytest.raises(LeaseLost):
                    settle(claim)
            with pytest.raises(AlreadyFinal):
                broker.cancel(id)
            assert broker.get(id) == before
        assert broker.dequeue([QUEUE], 5) == []
        assert broker.reap_expired() == 0

    def test_illegal_replay(self, broker: Broker, clock: FakeClock) -> None:
        """What has not ended can't be replayed, in any state."""
        parent = put(broker)
        blocked = put(broker, parents=[parent])
        retrying = put(broker, priority=1)
        broker.fail(take(broker), delay=60)
        running = put(broker, priority=1)
        take(broker)
        states = {parent: "pending", blocked: "blocked", retrying: "retrying", running: "running"}
        for id, state in states.items():
            assert state_of(broker, id).value == state
            with pytest.raises(ReplayNotFinal):
                broker.replay(id)
        assert len(broker.list()) == 4

    def test_settling_a_marked_execution(self, broker: Broker, clock: FakeClock) -> None:
        """Who holds an execution that was asked to stop may still settle it as it ended."""
        for name, end in [("ack", State.COMPLETED), ("skip", State.FAILED), ("finish_canceled", State.CANCELED)]:
            id = put(broker, key=name)
            claim = take(broker)
            broker.cancel(id)
            settlers(broker)[name](claim)
            assert state_of(broker, id) is end

    @pytest.mark.parametrize("name", ["requeue", "fail", "throttle", "lose"])
    def test_giving_back_does_not_lose_a_cancel(self, broker: Broker, clock: FakeClock, name: str) -> None:
        """A marked execution that is given back is canceled, or whoever claims it next is told at once."""
        id = put(broker)
        claim = take(broker)
        broker.cancel(id)
        settlers(broker)[name](claim)
        again = broker.dequeue([QUEUE])
        if again:
            with pytest.raises(TaskCanceled):
                broker.heartbeat(again[0])
        else:
            assert (state_of(broker, id), broker.get(id).reason) == (State.CANCELED, "canceled")
