"""Answering: somebody is told to tell the caller of what has ended, and one at a time."""

from __future__ import annotations

from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.model import ANSWER_WITHIN, FailKind, State
from kombu_taskgate.core.topology import Queue
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import together

from .base import QUEUE, Cases, ids_of, put, put_many, take
from .store import Store


class AnswerCases(Cases):
    """claim_answers and answered."""

    @pytest.fixture
    def strict(self, store: Store, clock: FakeClock) -> Broker:
        """A broker that gives up at once."""
        return store.open(clock=clock, lease_ttl=10, lease_lost_max=1, throttled_max=1, max_deliveries=1)

    def _due(self, broker: Broker) -> list[int]:
        return sorted(ids_of(broker.claim_answers(100)))

    def test_what_wants_an_answer(self, strict: Broker, clock: FakeClock) -> None:
        """Each way to failed or canceled, from the very instant, for what has a type; nothing else."""
        broker = strict
        for type in ("t", ""):
            ids = [put(broker, queue, type=type) for queue in ("skip", "throttled", "lost", "reaped", "canceled")]
            broker.fail(take(broker, "skip"), FailKind.SKIP)
            broker.fail(take(broker, "throttled"), FailKind.THROTTLED, delay=5)
            broker.fail(take(broker, "lost"), FailKind.LOST)
            broker.finish_canceled(take(broker, "canceled"))
            ids.append(put(broker, "waits", type=type))
            broker.cancel(ids[-1])
            ids.append(put(broker, "often", type=type))
            broker.requeue(take(broker, "often"))
            assert broker.dequeue(["often"]) == []
            ids.append(put(broker, "expired", type=type, expires_in=1.0))
            take(broker, "reaped")
            ids.append(put(broker, "child", type=type, parents=[ids[-1]]))
            clock.advance(10.001)
            assert broker.reap_expired() == 1
            assert broker.dequeue(["expired"]) == []
            ids.append(put(broker, "late child", type=type, parents=[ids[-1]]))
            for id in ids:
                task = broker.get(id)
                assert task.state in {State.FAILED, State.CANCELED}
                assert task.answer_at == (task.finished_at if type else None), task
            assert self._due(broker) == (ids if type else [])
        done = put(broker, type="t")
        broker.ack(take(broker))
        assert self._due(broker) == []
        assert not [task for task in broker.list() if task.id == done]

    def test_told_already(self, strict: Broker) -> None:
        """Who has told the caller says so, and nobody is asked to do it again."""
        broker = strict
        for kind in (FailKind.SKIP, FailKind.LOST, FailKind.THROTTLED, FailKind.BUSINESS):
            id = put(broker, type="t", max_retry=0)
            assert broker.fail(take(broker), kind, told=True) is State.FAILED
            assert broker.get(id).answer_at is None
        assert self._due(broker) == []

    def test_one_claimer_at_a_time(self, broker: Broker, clock: FakeClock) -> None:
        """A claim puts the answer off for all others; a claimer that dies is followed by another."""
        (id,) = put_many(broker, 1, type="t")
        broker.cancel(id)
        (first,) = broker.claim_answers(5)
        assert (first.id, first.answer_at) == (id, first.finished_at)
        assert broker.claim_answers(5) == []
        clock.advance(ANSWER_WITHIN - 0.001)
        assert broker.claim_answers(5) == []
        clock.advance(0.001)
        (second,) = broker.claim_answers(5)
        assert (second.answer_at or 0) - (second.finished_at or 0) == ANSWER_WITHIN * 1000
        broker.answered([id, 10**12])
        clock.advance(2 * ANSWER_WITHIN)
        assert broker.claim_answers(5) == []
        assert broker.get(id).state is State.CANCELED

    def test_limit_and_order(self, broker: Broker, clock: FakeClock) -> None:
        """The longest due come first, as many as are asked for."""
        ids = put_many(broker, 5, type="t")
        for id in reversed(ids):
            broker.cancel(id)
            clock.advance(1)
        assert [ids_of(broker.claim_answers(2)) for _ in range(3)] == [[ids[4], ids[3]], [ids[2], ids[1]], [ids[0]]]

    def test_queues_of_others(self, broker: Broker, clock: FakeClock) -> None:
        """Own queues are given at once, others when they have waited."""
        own, other = put(broker, "own", type="t"), put(broker, "other", type="t")
        for id in (own, other):
            broker.cancel(id)
        assert ids_of(broker.claim_answers(5, ["own", "more"], older=30.0)) == [own]
        clock.advance(29.999)
        assert broker.claim_answers(5, ["own"], older=30.0) == []
        assert broker.claim_answers(5, [], older=30.0) == []
        clock.advance(0.001)
        assert ids_of(broker.claim_answers(5, ["own"], older=30.0)) == [other]

    def test_answers_are_claimed_once(self, broker: Broker) -> None:
        """However many ask at once, each is given to one."""
        ids = put_many(broker, 40, type="t")
        for id in ids:
            broker.cancel(id)
        got = together([partial(broker.claim_answers, 10) for _ in range(8)])
        found = [task.id for outcome in got for task in outcome]
        assert len(found) == len(set(found))
        assert sorted([*found, *self._due(broker)]) == ids

    def test_cancel_waiting_has_claimed_the_answers(self, broker: Broker, clock: FakeClock) -> None:
        """Its caller tells of what it named; of the children somebody else does, and of all should it die."""
        named = put(broker, type="t", task_id="x")
        child = put(broker, type="t", parents=[named])
        assert ids_of(broker.cancel_waiting(task_ids=["x"])) == [named]
        assert self._due(broker) == [child]
        broker.answered([child])
        clock.advance(ANSWER_WITHIN)
        assert self._due(broker) == [named]

    def test_nobody_answers_for_what_is_removed(self, store: Store, clock: FakeClock) -> None:
        """What is purged or pruned, or expires in a queue with an end, leaves nothing to answer."""
        broker = store.open(clock=clock, lease_ttl=10, keep_failed=100)
        broker.topology.declare_queue(Queue("ends", expires=60.0))
        put(broker, "ends", type="t", expires_in=1.0)
        canceled = put(broker, "other", type="t")
        broker.cancel(canceled)
        parent = put(broker, type="t")
        child = put(broker, "other", type="t", parents=[parent])
        clock.advance(2)
        assert broker.dequeue(["ends"]) == []
        assert broker.purge(QUEUE) == 1
        assert broker.get(parent).answer_at is None
        assert self._due(broker) == [canceled, child]
        clock.advance(100.001)
        broker.prune()
        assert self._due(broker) == []

    def test_replay_is_no_answer(self, broker: Broker, clock: FakeClock) -> None:
        """A replay leaves the answer for the old execution due, and has none of its own until it ends."""
        id = put(broker, type="t")
        broker.fail(take(broker), FailKind.SKIP)
        new = broker.replay(id)
        assert broker.get(new).answer_at is None
        assert self._due(broker) == [id]
        broker.answered([id])
        broker.fail(take(broker), FailKind.SKIP)
        assert self._due(broker) == [new]

    def test_who_answers_is_woken(self, strict: Broker, clock: FakeClock) -> None:
        """At once by what this process has ended, and by the reaper's look when something is due; by nothing else."""
        broker = strict
        woken: list[None] = []
        broker.to_answer.add(wake := partial(woken.append, None))
        put(broker, type="t")
        broker.ack(take(broker))
        broker.reap_expired()
        assert woken == []
        broker.cancel(put(broker, type="t"))
        assert len(woken) == 1
        broker.reap_expired()
        assert len(woken) == 2
        broker.claim_answers(5)
        broker.reap_expired()
        assert len(woken) == 2
        clock.advance(ANSWER_WITHIN)
        broker.reap_expired()
        assert len(woken) == 3
        put(broker, type="t")
        broker.fail(take(broker), FailKind.SKIP)
        assert len(woken) == 4
        broker.to_answer.remove(wake)
        broker.cancel(put(broker, type="t"))
        assert len(woken) == 4
