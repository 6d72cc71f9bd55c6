"""A pool runs what it claims, whatever becomes of a single run."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import ConfigError, StoreUnavailable, TaskNotFound
from kombu_taskgate.core.memory import MemoryBroker, MemoryStore
from kombu_taskgate.core.model import Claim, Filter, Lease, NewTask, Session, State
from kombu_taskgate.core.pool import Pool, back_off
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.stores import InDatabase, InMemory
from kombu_taskgate.testing.threads import DEADLINE, wait_until

QUEUE = "work"


class Flaky(MemoryBroker):
    """A broker whose claims and acknowledgements fail on demand, and whose renewals are counted."""

    down = False
    claims = 0
    acks = 0
    renewals = 0

    def dequeue(self, *arguments: Any, **options: Any) -> list[Claim]:
        self.claims += 1
        if self.down:
            raise StoreUnavailable("the cable is cut")
        return super().dequeue(*arguments, **options)

    def ack(self, lease: Lease, result: bytes | None = None) -> None:
        self.acks += 1
        if self.down:
            raise StoreUnavailable("the cable is cut")
        super().ack(lease, result)

    def renew_session(self, session: Session, *, look: bool = True) -> Any:
        self.renewals += 1
        return super().renew_session(session, look=look)


@pytest.fixture
def broker() -> Iterator[Flaky]:
    broker = Flaky(BrokerSettings("memory://", keep_completed=3600), store=MemoryStore())
    yield broker
    broker.close()


@pytest.fixture
def start(broker: Flaky) -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def start(run: Callable[[Claim, threading.Event], bytes | None], n: int = 2, **options: Any) -> Pool:
        pools.append(Pool(broker, QUEUE, run, n, **options))
        pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        pool.stop(0, then=DEADLINE)


def state(broker: Broker, id: int) -> State:
    return broker.get(id).state


def until(broker: Broker, id: int, wanted: State) -> None:
    wait_until(lambda: state(broker, id) is wanted, f"execution {id} is {wanted}")


def nothing(claim: Claim, stop: threading.Event) -> None:
    return None


def wait(claim: Claim, stop: threading.Event) -> None:
    """Until told to end."""
    assert stop.wait(DEADLINE)


def wait_and_raise(claim: Claim, stop: threading.Event) -> None:
    assert stop.wait(DEADLINE)
    raise InterruptedError


def test_runs_everything_once(store: InMemory | InDatabase) -> None:
    """On every store, by two pools, from two queues."""
    brokers = [store.open() for _ in range(2)]
    seen: list[bytes] = []

    def run(claim: Claim, stop: threading.Event) -> bytes:
        seen.append(claim.payload)
        return claim.payload.upper()

    pools = [Pool(broker, ["one", "two"], run, 3, claim_timeout=0.5) for broker in brokers]
    payloads = [b"task %d" % number for number in range(60)]
    brokers[0].enqueue_many([NewTask("one" if n % 3 else "two", payload) for n, payload in enumerate(payloads)])
    for pool in pools:
        pool.start()
        pool.start()
    wait_until(lambda: len(seen) >= 60, "all have run")
    assert all(pool.stop() for pool in pools)
    assert sorted(seen) == sorted(payloads)
    assert brokers[0].list(Filter(limit=1000)) == []


def test_result_is_stored(broker: Flaky, start: Callable[..., Pool]) -> None:
    id = broker.enqueue(NewTask(QUEUE, b"abc"))
    start(lambda claim, stop: claim.payload[::-1])
    until(broker, id, State.COMPLETED)
    assert broker.get(id).result == b"cba"


def test_n_at_a_time(broker: Flaky, start: Callable[..., Pool]) -> None:
    """No more are claimed than run."""
    ids = broker.enqueue_many([NewTask(QUEUE)] * 9)
    gate = threading.Semaphore(0)
    pool = start(lambda claim, stop: gate.acquire(timeout=DEADLINE) and None, 3)
    for done in range(7):
        wait_until(lambda done=done: broker.queue_len(QUEUE) == 6 - done and pool.running == 3, "three run")  # type: ignore[misc]
        assert [state(broker, id) for id in ids].count(State.RUNNING) == 3
        if done < 6:
            gate.release()
    gate.release(3)


@pytest.mark.parametrize("error", [ValueError("no good"), SystemExit(1), KeyboardInterrupt()])
def test_failure_stops_nothing(broker: Flaky, start: Callable[..., Pool], error: BaseException) -> None:
    """It runs again as often as it may, and is a dead letter then; the others go on."""

    def run(claim: Claim, stop: threading.Event) -> None:
        if claim.payload == b"bad":
            raise error

    told: list[tuple[int, BaseException]] = []
    bad = broker.enqueue(NewTask(QUEUE, b"bad", max_retry=2))
    pool = start(run, 1, retry_delay=lambda claim: 0.0, on_error=lambda claim, error: told.append((claim.id, error)))
    until(broker, bad, State.FAILED)
    assert told == [(bad, error)] * 3
    task = broker.get(bad)
    assert (task.attempts, task.reason) == (3, "business")
    assert type(error).__name__ in (task.detail or "")
    good = broker.enqueue(NewTask(QUEUE))
    until(broker, good, State.COMPLETED)
    assert pool.stop()


def test_failure_waits(broker: Flaky, start: Callable[..., Pool]) -> None:
    id = broker.enqueue(NewTask(QUEUE, max_retry=5))
    start(lambda claim, stop: 1 // 0, retry_delay=lambda claim: 1000.0 + claim.attempts)
    until(broker, id, State.RETRYING)
    task = broker.get(id)
    assert task.run_at - task.created_at >= 1_000_000


def test_back_off_grows() -> None:
    for attempts, longest in ((0, 1), (1, 2), (5, 32), (9, 512), (10, 600), (10_000, 600)):
        delays = [back_off(Claim(1, 1, attempts=attempts)) for _ in range(50)]
        assert all(longest / 2 <= delay <= longest for delay in delays)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_callback_that_raises(broker: Flaky, start: Callable[..., Pool], error: type[BaseException]) -> None:
    def refuse(*_: object) -> None:
        raise error

    ids = broker.enqueue_many([NewTask(QUEUE, max_retry=0)] * 2)
    start(lambda claim, stop: 1 // 0, 1, on_error=refuse)
    for id in ids:
        until(broker, id, State.FAILED)


@pytest.mark.parametrize("delay", [ValueError, SystemExit, float("nan"), float("inf"), "1", None])
def test_delay_that_is_none(broker: Flaky, start: Callable[..., Pool], delay: Any) -> None:
    """The failure counts all the same: given back, it would fail for ever."""

    def answer(claim: Claim) -> Any:
        if isinstance(delay, type):
            raise delay
        return delay

    id = broker.enqueue(NewTask(QUEUE, max_retry=5))
    start(lambda claim, stop: 1 // 0, 1, retry_delay=answer)
    until(broker, id, State.RETRYING)
    assert broker.get(id).attempts == 1


@pytest.mark.parametrize("result", ["text", 5, bytearray(b"x")])
def test_result_that_is_none(store: InMemory | InDatabase, result: Any) -> None:
    """A run that returns nonsense has failed, is tried again as often as it may be, and is then kept as failed."""
    broker = store.open()
    runs: list[int] = []

    def run(claim: Claim, stop: threading.Event) -> Any:
        runs.append(claim.id)
        return result

    bad = broker.enqueue(NewTask(QUEUE, max_retry=1))
    pool = Pool(broker, QUEUE, run, 1, retry_delay=lambda claim: 0.0)
    pool.start()
    until(broker, bad, State.FAILED)
    assert pool.stop()
    assert runs == [bad] * 2
    assert f"must return bytes or None, not {type(result).__name__}" in broker.get(bad).detail


def test_result_that_can_not_be_stored(broker: Flaky, start: Callable[..., Pool]) -> None:
    """It is a failure as well, and not the end of the thread."""
    bad = broker.enqueue(NewTask(QUEUE, b"bad", max_retry=1))
    good = broker.enqueue(NewTask(QUEUE))
    refused: list[int] = []
    told: list[BaseException] = []
    original = broker.ack

    def ack(lease: Lease, result: bytes | None = None) -> None:
        if result:
            refused.append(lease.id)
            raise ConfigError("too long")
        original(lease, result)

    broker.ack = ack  # type: ignore[method-assign]
    start(
        lambda claim, stop: claim.payload or None,
        1,
        retry_delay=lambda claim: 0.0,
        on_error=lambda claim, error: told.append(error),
    )
    until(broker, good, State.COMPLETED)
    until(broker, bad, State.FAILED)
    assert refused == [bad] * 2
    assert "could not be stored: too long" in broker.get(bad).detail
    assert [str(error) for error in told] == ["too long"] * 2


def test_database_that_is_away(broker: Flaky, start: Callable[..., Pool]) -> None:
    """Claims and acknowledgements are tried again; nothing runs twice."""
    id = broker.enqueue(NewTask(QUEUE))
    go = threading.Event()
    ran: list[int] = []

    def run(claim: Claim, stop: threading.Event) -> None:
        ran.append(claim.id)
        go.wait(DEADLINE)

    start(run, claim_timeout=0.01)
    wait_until(lambda: bool(ran), "it runs")
    broker.down = True
    go.set()
    wait_until(lambda: broker.acks >= 2, "it tries to acknowledge")
    failed = broker.claims
    wait_until(lambda: broker.claims >= failed + 2, "it tries to claim")
    broker.down = False
    until(broker, id, State.COMPLETED)
    other = broker.enqueue(NewTask(QUEUE))
    until(broker, other, State.COMPLETED)
    assert ran == [id, other]


def test_leases_are_renewed(broker: Flaky, start: Callable[..., Pool]) -> None:
    """Every heartbeat, not every third of the lease time; others that reap find nothing."""
    id = broker.enqueue(NewTask(QUEUE))
    pool = start(wait, lease_ttl=DEADLINE * 2, heartbeat=0.02)
    wait_until(lambda: broker.renewals > 3, "it renews")
    assert broker.reap_expired() == 0
    assert state(broker, id) is State.RUNNING
    pool.stop(0)


def test_canceled_run(broker: Flaky, start: Callable[..., Pool]) -> None:
    """Told by the next heartbeat; however it ends, it is canceled, and no failure."""
    told: list[BaseException] = []
    ids = broker.enqueue_many([NewTask(QUEUE, b"raise"), NewTask(QUEUE)])
    start(
        lambda claim, stop: wait_and_raise(claim, stop) if claim.payload else wait(claim, stop),
        heartbeat=0.02,
        on_error=lambda claim, error: told.append(error),
    )
    for id in ids:
        until(broker, id, State.RUNNING)
        broker.cancel(id)
    for id in ids:
        until(broker, id, State.CANCELED)
    assert told == []


def test_lost_lease(broker: Flaky, start: Callable[..., Pool]) -> None:
    """The run is told, and what it has done counts for nothing: another has it."""
    broker.enqueue(NewTask(QUEUE))
    stopped = threading.Event()

    def run(claim: Claim, stop: threading.Event) -> None:
        if claim.deliveries == 1:
            assert stop.wait(DEADLINE)
            stopped.set()

    pool = start(run, 1, heartbeat=0.02)
    wait_until(lambda: pool.running == 1, "it runs")
    (row,) = broker._store.tasks.values()
    with broker._store.changed:
        row.token, row.state, row.session = 0, State.PENDING, None
    wait_until(stopped.is_set, "it is told")
    until(broker, row.id, State.COMPLETED)
    assert broker.get(row.id).deliveries == 2


def test_leases_of_the_dead_are_reaped(broker: Flaky, start: Callable[..., Pool]) -> None:
    id = broker.enqueue(NewTask(QUEUE))
    dead = Pool(broker, QUEUE, nothing)
    session = broker.open_session("dead", 0.01)
    (claim,) = broker.dequeue([QUEUE], session=session)
    with broker._store.changed:
        broker._store.tasks[id].lease_until = 0
    start(nothing, lease_ttl=6.0, heartbeat=2.0)
    until(broker, id, State.COMPLETED)
    assert broker.get(id).lease_lost == 1
    assert claim.id == id
    assert dead.stop()


# -- stopping --------------------------------------------------------------------------------------


def test_stop_waits_for_what_runs(broker: Flaky, start: Callable[..., Pool]) -> None:
    id = broker.enqueue(NewTask(QUEUE))
    go = threading.Event()
    pool = start(lambda claim, stop: go.wait(DEADLINE) and None)
    wait_until(lambda: pool.running == 1, "it runs")
    later = threading.Timer(0.05, go.set)
    later.start()
    assert pool.stop(DEADLINE)
    assert state(broker, id) is State.COMPLETED
    other = broker.enqueue(NewTask(QUEUE))
    assert pool.stop()
    assert state(broker, other) is State.PENDING


def test_stop_tells_what_still_runs(broker: Flaky, start: Callable[..., Pool]) -> None:
    """What returns has done its work; what raises is given back, and is no failure."""
    ids = broker.enqueue_many([NewTask(QUEUE), NewTask(QUEUE, b"raise")])
    told: list[BaseException] = []
    pool = start(
        lambda claim, stop: wait_and_raise(claim, stop) if claim.payload else wait(claim, stop),
        on_error=lambda claim, error: told.append(error),
    )
    wait_until(lambda: pool.running == 2, "both run")
    assert pool.stop(0, then=DEADLINE)
    assert [state(broker, id) for id in ids] == [State.COMPLETED, State.PENDING]
    task = broker.get(ids[1])
    assert (task.attempts, task.lease_lost, told) == (0, 0, [])


def test_what_does_not_end_keeps_its_lease(broker: Flaky, start: Callable[..., Pool]) -> None:
    id = broker.enqueue(NewTask(QUEUE))
    go = threading.Event()
    pool = start(lambda claim, stop: go.wait(DEADLINE) and None, heartbeat=0.02)
    wait_until(lambda: pool.running == 1, "it runs")
    assert not pool.stop(0, then=0)
    renewed = broker.renewals
    wait_until(lambda: broker.renewals > renewed + 2, "it is renewed")
    assert state(broker, id) is State.RUNNING
    go.set()
    until(broker, id, State.COMPLETED)
    wait_until(lambda: not broker._store.sessions, "the leases are let go of")
    assert pool.stop()


def test_stop_gives_back_what_has_not_begun(broker: Flaky) -> None:
    """A claim that comes in the last moment has not been delivered."""
    id = broker.enqueue(NewTask(QUEUE))
    pool = Pool(broker, QUEUE, nothing, 1)
    original = broker.dequeue

    def dequeue(*arguments: Any, **options: Any) -> list[Claim]:
        claims = original(*arguments, **options)
        pool._stopping.set()
        return claims

    broker.dequeue = dequeue  # type: ignore[method-assign]
    pool.start()
    wait_until(pool._stopping.is_set, "it claims")
    assert pool.stop()
    task = broker.get(id)
    assert (task.state, task.deliveries) == (State.PENDING, 0)


def test_stop_without_start(broker: Flaky) -> None:
    assert Pool(broker, QUEUE, nothing).stop()


def test_start_after_stop(broker: Flaky) -> None:
    """It does not start again, also when it had not begun; nothing is left that renews what nobody uses."""
    pool = Pool(broker, QUEUE, nothing)
    assert pool.stop()
    pool.start()
    assert broker.renewals == 0
    assert pool._keeper.session is None
    assert pool._claimer is None


def test_start_while_the_database_is_away(broker: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told at once; a later attempt begins."""
    pool = Pool(broker, QUEUE, nothing)
    with monkeypatch.context() as patch:
        patch.setattr(broker, "open_session", lambda *_: (_ for _ in ()).throw(StoreUnavailable("the cable is cut")))
        with pytest.raises(StoreUnavailable):
            pool.start()
    id = broker.enqueue(NewTask(QUEUE))
    pool.start()
    until(broker, id, State.COMPLETED)
    assert pool.stop()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"queue": []}, "a queue"),
        ({"queue": None}, "a queue"),
        ({"n": 0}, "one thread"),
        ({"n": 2.5}, "one thread"),
        ({"n": "4"}, "one thread"),
        ({"heartbeat": "20"}, "heartbeat"),
        ({"lease_ttl": None}, "lease_ttl"),
        ({"queue": ""}, "queue name"),
        ({"owner": ""}, "owner name"),
        ({"heartbeat": 0}, "heartbeat"),
        ({"heartbeat": 50}, "at most half"),
        ({"lease_ttl": float("nan")}, "lease_ttl"),
        ({"claim_timeout": -1}, "claim_timeout"),
    ],
)
def test_what_does_not_fit(broker: Flaky, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Pool(broker, **{"queue": QUEUE, "run": nothing, **options})


def test_child_begins_anew(broker: Flaky, start: Callable[..., Pool]) -> None:
    id = broker.enqueue(NewTask(QUEUE))
    pool = start(wait)
    wait_until(lambda: pool.running == 1, "it runs")
    with warnings.catch_warnings():
        # Newer Pythons warn of forks with threads: that is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os._exit(0 if pool.running == 0 and pool.stop() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pool.running == 1
    with pytest.raises(TaskNotFound):
        broker.get(id + 1)
