"""Publishing: what goes in comes out, once, and nothing goes in by halves."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import ConfigError, PayloadTooLarge, TaskExists, TaskNotFound
from kombu_taskgate.core.model import MAX_NAME, NewTask, State
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together, wait_until

from .base import QUEUE, Cases, ids_of, put, put_many, state_of, take
from .store import PERSISTENT, Store, require


class RoundTripCases(Cases):
    """enqueue, enqueue_many and business keys."""

    def test_round_trip(self, broker: Broker, clock: FakeClock) -> None:
        """RoundTrip: every column of a new task is stored, claimed and settled as it was given."""
        now = clock.now_ms()
        id = broker.enqueue(
            NewTask(
                "größe 🐘",
                bytes(range(256)),
                type="app.tasks.add 🐘",
                task_id="t-1",
                root_id="r-1",
                parent_task_id="p-1",
                group_id="g-1",
                priority=-7,
                run_at=now - 5,
                expires_at=now + 60_000,
                key="order 17",
                fail_fast=False,
                max_retry=8,
            )
        )
        task = broker.get(id)
        assert (task.id, task.queue, task.state, task.payload) == (id, "größe 🐘", State.PENDING, bytes(range(256)))
        assert (task.type, task.task_id, task.root_id) == ("app.tasks.add 🐘", "t-1", "r-1")
        assert (task.parent_task_id, task.group_id, task.key) == ("p-1", "g-1", "order 17")
        assert (task.priority, task.run_at, task.created_at, task.expires_at) == (-7, now - 5, now, now + 60_000)
        assert (task.fail_fast, task.max_retry, task.pending_parents) == (False, 8, 0)
        assert (task.attempts, task.throttled, task.lease_lost, task.deliveries) == (0, 0, 0, 0)
        assert (task.owner, task.lease_until, task.finished_at, task.replay_of) == (None, None, None, None)
        assert (task.reason, task.detail, task.result, task.cancel_requested) == (None, None, None, False)

        claim = take(broker, "größe 🐘", owner="worker 1")
        assert (claim.id, claim.queue, claim.payload, claim.type) == (id, task.queue, task.payload, task.type)
        assert (claim.task_id, claim.priority, claim.run_at, claim.created_at) == ("t-1", -7, now - 5, now)
        assert (claim.owner, claim.lease_until, claim.deliveries) == ("worker 1", now + 10_000, 1)
        assert (claim.attempts, claim.lease_lost) == (0, 0)
        assert claim.token != 0
        running = broker.get(id)
        assert (running.state, running.owner, running.lease_until) == (State.RUNNING, "worker 1", now + 10_000)

        clock.advance(1)
        broker.ack(claim, b"\x00result")
        done = broker.get(id)
        assert (done.state, done.result, done.finished_at) == (State.COMPLETED, b"\x00result", now + 1000)
        assert done.lease_until is None

    def test_completed_row_is_removed(self, broker: Broker) -> None:
        """An ack leaves nothing behind, unless the key has to stay known or rows are kept."""
        id = put(broker)
        broker.ack(take(broker))
        with pytest.raises(TaskNotFound):
            broker.get(id)

    def test_completed_row_is_kept_on_demand(self, store: Store, clock: FakeClock) -> None:
        """keep_completed: the row and its result stay."""
        broker = store.open(clock=clock, keep_completed=60)
        id = put(broker)
        broker.ack(take(broker), b"done")
        assert (broker.get(id).state, broker.get(id).result) == (State.COMPLETED, b"done")

    def test_large_payload(self, broker: Broker) -> None:
        """A message of several MB with every byte value comes back unchanged."""
        payload = bytes(range(256)) * (12 * 1024)
        put(broker, payload=payload)
        assert take(broker).payload == payload

    def test_payload_limit(self, store: Store, clock: FakeClock) -> None:
        """A message larger than max_payload is refused, the largest that fits is stored."""
        broker = store.open(clock=clock, max_payload=1000)
        put(broker, payload=b"x" * 1000)
        with pytest.raises(PayloadTooLarge):
            put(broker, payload=b"x" * 1001)
        assert len(broker.list()) == 1

    def test_longest_names(self, broker: Broker) -> None:
        """Names of 255 characters of four bytes are told apart by their last one."""
        first, second = "🐘" * (MAX_NAME - 1) + "a", "🐘" * (MAX_NAME - 1) + "b"
        one = put(broker, first, key=first, task_id=first, type=first, group_id=first)
        two = put(broker, second, key=second, task_id=second, type=second, group_id=second)
        assert broker.get(one).task_id == first
        assert take(broker, second).id == two
        assert take(broker, first).id == one

    def test_names_are_exact(self, broker: Broker) -> None:
        """Case, accents and trailing blanks make different queues, keys and types."""
        names = ["Work", "work", "work ", "wörk", "work\t"]
        ids = [put(broker, name, key=name, type=name) for name in names]
        assert broker.queue_lens(names) == dict.fromkeys(names, 1)
        assert broker.counts() == {(name, State.PENDING): 1 for name in names}
        assert [take(broker, name).id for name in names] == ids

    @pytest.mark.parametrize("name", ["", "x" * (MAX_NAME + 1), "a\0b", "\ud800"])
    def test_bad_names(self, broker: Broker, name: str) -> None:
        """Names that not every database can hold are refused before anything is stored."""
        with pytest.raises(ConfigError):
            put(broker, name)
        with pytest.raises(ConfigError):
            put(broker, key=name)
        assert broker.list() == []

    def test_priority_bounds(self, broker: Broker) -> None:
        """Priorities are 16-bit numbers."""
        low, high = put(broker, priority=-32767), put(broker, priority=32767)
        assert [take(broker).id, take(broker).id] == [high, low]
        with pytest.raises(ConfigError):
            put(broker, priority=32768)

    def test_run_at_or_delay(self, broker: Broker, clock: FakeClock) -> None:
        """A start time is an instant or a delay, not both."""
        with pytest.raises(ConfigError):
            put(broker, run_at=clock.now_ms(), delay=5)

    @pytest.mark.parametrize("name", ["run_at", "delay", "expires_at", "expires_in"])
    def test_times_out_of_bounds(self, broker: Broker, name: str) -> None:
        """Times that no calendar holds are refused, not stored as something else."""
        values: list[float] = [10**18, -(10**18)]
        if name in {"delay", "expires_in"}:
            values += [math.inf, -math.inf, math.nan]
        for value in values:
            wanted: dict[str, Any] = {name: value}
            with pytest.raises(ConfigError):
                broker.enqueue(NewTask(QUEUE, **wanted))
        assert broker.list() == []

    def test_business_key_idempotent(self, broker: Broker) -> None:
        """BusinessKeyIdempotent: a key is taken once, and stays taken in every state, also after the ack."""
        id = put(broker, key="order 1")

        def refused() -> TaskExists:
            with pytest.raises(TaskExists) as caught:
                put(broker, key="order 1", payload=b"again")
            assert len(broker.list()) == 1
            return caught.value

        assert (refused().key, refused().id, refused().state) == ("order 1", id, State.PENDING)
        claim = take(broker)
        assert refused().state is State.RUNNING
        broker.ack(claim)
        assert (refused().id, refused().state) == (id, State.COMPLETED)
        assert put(broker, key="order 2") > id

    def test_identity_race(self, store: Store, clock: FakeClock) -> None:
        """IdentityRace: of many callers with one new key, one stores it; all others learn its id."""
        brokers = [store.open(clock=clock) for _ in range(4)]
        for turn in range(5):
            calls = [partial(put, brokers[caller % 4], key=f"order {turn}") for caller in range(12)]
            outcomes = together(calls)
            winners = [outcome for outcome in outcomes if isinstance(outcome, int)]
            assert len(winners) == 1, outcomes
            for error in errors_of(outcomes):
                assert isinstance(error, TaskExists), error
                assert error.id == winners[0]
        assert len(brokers[0].list()) == 5

    def test_enqueue_many_keeps_order(self, broker: Broker) -> None:
        """enqueue_many: ids in the order given, which is the order of delivery."""
        ids = broker.enqueue_many([NewTask(QUEUE, b"%d" % number) for number in range(1200)])
        assert ids == sorted(set(ids))
        assert len(ids) == 1200
        claims = broker.dequeue([QUEUE], 1200)
        assert [(claim.id, claim.payload) for claim in claims] == [(id, b"%d" % n) for n, id in enumerate(ids)]

    def test_enqueue_many_of_nothing(self, broker: Broker) -> None:
        """enqueue_many of no tasks stores nothing."""
        assert broker.enqueue_many([]) == []
        assert broker.list() == []

    def test_enqueue_many_all_or_nothing(self, broker: Broker) -> None:
        """enqueue_many: one task that can't be stored keeps all the others out."""
        put(broker, key="taken")
        good = NewTask(QUEUE)
        for bad, error in [
            (NewTask(QUEUE, key="taken"), TaskExists),
            (NewTask(QUEUE, parents=[10**12]), TaskNotFound),
            (NewTask(""), ConfigError),
        ]:
            with pytest.raises(error):
                broker.enqueue_many([good, bad, good])
        with pytest.raises(TaskExists):
            broker.enqueue_many([NewTask(QUEUE, key="twice"), good, NewTask(QUEUE, key="twice")])
        assert len(broker.list()) == 1
        assert put(broker, key="twice")

    def test_enqueue_many_mixed(self, broker: Broker, clock: FakeClock) -> None:
        """enqueue_many: delayed, keyed and dependent tasks in one call."""
        parent = put(broker)
        ids = broker.enqueue_many(
            [
                NewTask(QUEUE, delay=5),
                NewTask(QUEUE, key="k"),
                NewTask(QUEUE, parents=[parent]),
                NewTask("other", priority=3),
            ]
        )
        assert [state_of(broker, id) for id in ids] == [State.PENDING, State.PENDING, State.BLOCKED, State.PENDING]
        assert broker.get(ids[0]).run_at == clock.now_ms() + 5000
        assert ids_of(broker.dequeue([QUEUE, "other"], 10)) in ([parent, ids[1], ids[3]], [ids[3], parent, ids[1]])

    def test_delayed_task(self, broker: Broker, clock: FakeClock) -> None:
        """DelayedTask: run_at and delay wait, to the millisecond, and the order is by time then."""
        later = put(broker, delay=20)
        sooner = put(broker, run_at=clock.now_ms() + 10_000)
        assert broker.dequeue([QUEUE], 10) == []
        assert broker.queue_len(QUEUE) == 2
        clock.advance(9.999)
        assert broker.dequeue([QUEUE], 10) == []
        clock.advance(0.001)
        assert ids_of(broker.dequeue([QUEUE], 10)) == [sooner]
        clock.advance(60)
        assert ids_of(broker.dequeue([QUEUE], 10)) == [later]

    def test_many_delayed_tasks(self, broker: Broker, clock: FakeClock) -> None:
        """However many become due at once, all are delivered."""
        put_many(broker, 700, delay=5)
        clock.advance(5)
        claimed: list[int] = []
        while claims := broker.dequeue([QUEUE], 100):
            claimed += ids_of(claims)
        assert len(set(claimed)) == len(claimed) == 700

    def test_ids_never_reused(self, store: Store, clock: FakeClock) -> None:
        """Ids grow and are never used again, also when the newest row is gone and the store was closed."""
        broker = store.open(clock=clock)
        seen: list[int] = []
        for _ in range(3):
            seen += put_many(broker, 2)
            for claim in broker.dequeue([QUEUE], 2):
                broker.ack(claim)
            assert broker.list() == []
            seen.append(put(broker))
            broker.purge(QUEUE)
            broker.close()
            broker = store.open(clock=clock)
        assert seen == sorted(set(seen))

    def test_outlives_brokers(self, store: Store) -> None:
        """What was stored is there for the next process."""
        require(store, PERSISTENT)
        first = store.open()
        id = put(first, payload=b"kept")
        first.close()
        first.close()
        assert store.open().get(id).payload == b"kept"

    def test_blocking_dequeue(self, store: Store) -> None:
        """BlockingDequeue: a waiting caller is woken by what another broker enqueues."""
        self._hand_over(store.open(), store.open())

    def test_blocking_dequeue_own_broker(self, broker: Broker) -> None:
        """A waiting caller is woken by what its own broker enqueues."""
        self._hand_over(broker, broker)

    def _hand_over(self, consumer: Broker, producer: Broker) -> None:
        """One publishes when the other has taken the last one and waits for more."""
        taken: list[int] = []

        def consume() -> None:
            for _ in range(20):
                claims = consumer.dequeue([QUEUE], 5, timeout=30)
                assert len(claims) == 1
                consumer.ack(claims[0])
                taken.append(claims[0].id)

        def produce() -> list[int]:
            stored: list[int] = []
            for _ in range(20):
                wait_until(lambda: len(taken) == len(stored), "the consumer takes what was published")
                stored.append(put(producer))
            return stored

        outcomes = together([consume, produce])
        assert outcomes == [None, taken]

    def test_blocking_dequeue_delayed(self, store: Store) -> None:
        """A waiting caller gets a delayed task when it is due, by the store's own time."""
        broker = store.open()
        id = put(broker, delay=0.2)
        assert take(broker, timeout=30).id == id

    def test_blocking_dequeue_stop(self, broker: Broker) -> None:
        """A waiting caller returns empty-handed when its stop event is set."""
        stop = threading.Event()
        outcomes = together([lambda: broker.dequeue([QUEUE], timeout=None, stop=stop), stop.set])
        assert outcomes == [[], None]

    def test_dequeue_stopped_before(self, broker: Broker) -> None:
        """A set stop event means: do not wait."""
        stop = threading.Event()
        stop.set()
        assert broker.dequeue([QUEUE], timeout=None, stop=stop) == []

    def test_wake_only_looks_again(self, broker: Broker) -> None:
        """wake() makes a waiting caller look again; it does not end the wait."""

        def wake_then_put() -> list[int]:
            for _ in range(3):
                broker.wake()
            return [put(broker)]

        claimed, stored = together([lambda: ids_of(broker.dequeue([QUEUE], timeout=30)), wake_then_put])
        assert claimed == stored
