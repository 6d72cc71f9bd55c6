"""The keeper renews what is held, tells what is lost, and gives back what nobody knows."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kombu_taskgate.core.errors import StoreUnavailable
from kombu_taskgate.core.lease import LeaseKeeper
from kombu_taskgate.core.memory import MemoryBroker, MemoryStore
from kombu_taskgate.core.model import Claim, Lease, NewTask, Renewal, Session, State
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import DEADLINE
from kombu_taskgate.testing.threads import wait_until as wait_for

TTL = 0.3


class Flaky(MemoryBroker):
    """A broker whose renewals fail or hang on demand, and are counted."""

    down = False
    renewals = 0
    answers: threading.Event | None = None
    hanging = False
    closed = 0

    def renew_session(self, session: Session, *, look: bool = True) -> Renewal:
        if self.answers is not None:
            self.hanging = True
            self.answers.wait(DEADLINE)
        if self.down:
            raise StoreUnavailable("down")
        self.renewals += 1
        return super().renew_session(session, look=look)

    def close_session(self, session: Session) -> int:
        self.closed += 1
        return super().close_session(session)


@pytest.fixture
def clock() -> FakeClock:
    """The store's: its leases run out when a test lets time pass, and not when the machine is busy."""
    return FakeClock()


@pytest.fixture
def broker(clock: FakeClock) -> Iterator[Flaky]:
    broker = Flaky(BrokerSettings("memory://", lease_ttl=TTL), store=MemoryStore(), clock=clock)
    yield broker
    broker.close()


def pass_renewals(broker: Flaky, clock: FakeClock, number: int) -> None:
    """Let the third of a lease time pass after each of so many renewals."""
    for _ in range(number):
        seen = broker.renewals
        # The next one may have begun before the time passed; the one after that can't have.
        wait_for(lambda seen=seen: broker.renewals >= seen + 2, "two renewals")  # type: ignore[misc]
        clock.advance(TTL / 3)


class Kept:
    """A started keeper and what it told."""

    def __init__(self, broker: MemoryBroker, **ttls: float) -> None:
        self.lost: list[Lease] = []
        self.canceled: list[Lease] = []
        self.keeper = LeaseKeeper(broker, "me", TTL, ttls, on_lost=self.lost.extend, on_canceled=self.canceled.extend)
        self.keeper.start()


@pytest.fixture
def kept(broker: Flaky) -> Iterator[Kept]:
    kept = Kept(broker)
    yield kept
    kept.keeper.stop()


def claim(broker: MemoryBroker, keeper: LeaseKeeper, queue: str = "q") -> Claim:
    broker.enqueue(NewTask(queue))
    (lease,) = broker.dequeue([queue], session=keeper.session_for(queue))
    return lease


def test_held_leases_outlive_their_time(broker: Flaky, kept: Kept, clock: FakeClock) -> None:
    lease = claim(broker, kept.keeper)
    kept.keeper.hold([lease])
    pass_renewals(broker, clock, 7)
    assert broker.reap_expired() == 0
    broker.ack(lease)
    assert kept.lost == []


def test_one_renewal_a_round_however_many_leases(broker: Flaky, kept: Kept) -> None:
    broker.enqueue_many([NewTask("q") for _ in range(50)])
    kept.keeper.hold(broker.dequeue(["q"], 50, session=kept.keeper.session_for("q")))
    seen, began = broker.renewals, time.monotonic()
    wait_for(lambda: broker.renewals >= seen + 3, "three renewals")
    renewals = broker.renewals - seen
    rounds = (time.monotonic() - began) / (TTL / 3)
    assert renewals <= rounds + 1
    assert kept.keeper.held == 50


def test_what_another_took_is_told_once(broker: Flaky, kept: Kept) -> None:
    lease = claim(broker, kept.keeper)
    kept.keeper.hold([lease])
    broker.requeue(lease)  # as a reaper would
    wait_for(lambda: bool(kept.lost), "the loss is told")
    seen = broker.renewals
    wait_for(lambda: broker.renewals >= seen + 2, "two more rounds")
    assert kept.lost == [lease]
    assert kept.keeper.held == 0


def test_what_was_settled_is_not_lost(broker: Flaky, kept: Kept) -> None:
    lease = claim(broker, kept.keeper)
    kept.keeper.hold([lease])
    kept.keeper.drop([lease])
    broker.ack(lease)
    seen = broker.renewals
    wait_for(lambda: broker.renewals >= seen + 3, "three rounds")
    assert kept.lost == []


def test_cancel_is_told_once_and_the_lease_lives(broker: Flaky, kept: Kept, clock: FakeClock) -> None:
    lease = claim(broker, kept.keeper)
    kept.keeper.hold([lease])
    broker.cancel(lease.id)
    wait_for(lambda: bool(kept.canceled), "the cancel is told")
    pass_renewals(broker, clock, 7)
    assert kept.canceled == [lease]
    assert broker.reap_expired() == 0
    broker.finish_canceled(lease)


def test_claim_whose_answer_was_lost_is_given_back(broker: Flaky, kept: Kept) -> None:
    """The database says that we hold it, and nobody here knows: not ours to keep, and no loss counted."""
    lease = claim(broker, kept.keeper)  # and never held
    wait_for(lambda: broker.get(lease.id).state is State.PENDING, "given back")
    task = broker.get(lease.id)
    assert (task.deliveries, task.lease_lost) == (0, 0)


def test_no_claims_while_renewal_fails() -> None:
    """Trust ends before the lease does, by the clocks of the machine, and comes back with the next renewal."""
    broker = Flaky(BrokerSettings("memory://", lease_ttl=TTL), store=MemoryStore())
    kept = Kept(broker)
    wait_for(lambda: kept.keeper.may_claim, "trusted")
    lease = claim(broker, kept.keeper)
    kept.keeper.hold([lease])
    broker.down = True
    while True:
        reaped = broker.reap_expired()
        # Asked afterwards: what is trusted now was valid then, however long either took.
        if not kept.keeper.may_claim:
            break
        assert reaped == 0, "a lease was taken while the keeper was still trusted"
        time.sleep(0.001)
    broker.down = False
    wait_for(lambda: kept.keeper.may_claim, "trusted again")
    kept.keeper.stop()
    broker.close()


@pytest.mark.parametrize("where", ["renewal", "callback"])
def test_a_bug_does_not_end_the_thread(broker: Flaky, kept: Kept, where: str, caplog: pytest.LogCaptureFixture) -> None:
    lease = claim(broker, kept.keeper)
    kept.keeper.hold([lease])
    bugs = [RuntimeError("a bug"), RuntimeError("another")]

    def fail(*args: object, **options: object) -> Any:
        if bugs:
            raise bugs.pop()
        return renew(*args, **options)  # type: ignore[arg-type]

    renew = broker.renew_session
    if where == "renewal":
        broker.renew_session = fail  # type: ignore[method-assign]
    else:
        kept.keeper._on_canceled = fail
        broker.cancel(lease.id)
        bugs.pop()
    wait_for(lambda: "failed" in caplog.text and not bugs, "the bug is told")
    seen = broker.renewals
    wait_for(lambda: broker.renewals >= seen + 3, "it goes on")
    assert broker.reap_expired() == 0
    wait_for(lambda: kept.keeper.may_claim, "it is trusted")


def test_stop_gives_everything_back(broker: Flaky) -> None:
    kept = Kept(broker)
    lease = claim(broker, kept.keeper)
    kept.keeper.hold([lease])
    kept.keeper.stop()
    kept.keeper.stop()
    assert broker.get(lease.id).state is State.PENDING
    assert not any(thread.name == "taskgate-lease-keeper" and thread.is_alive() for thread in threading.enumerate())


def test_stop_does_not_wait_for_an_answer_that_never_comes(
    broker: Flaky, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kombu_taskgate.core.lease.STOP_WITHIN", 0.1)
    kept = Kept(broker)
    kept.keeper.hold([claim(broker, kept.keeper)])
    first = kept.keeper._thread
    assert first is not None
    answers = broker.answers = threading.Event()
    wait_for(lambda: broker.hanging, "a renewal hangs")
    kept.keeper.stop()
    assert first.is_alive()
    assert broker.closed == 0, "nothing is asked of a database that does not answer"
    assert "they end by themselves" in caplog.text
    broker.answers = None
    kept.keeper.start()
    answers.set()
    first.join(DEADLINE)
    assert not first.is_alive(), "the old thread does not go on beside the new one"
    assert kept.lost == []
    seen = broker.renewals
    wait_for(lambda: broker.renewals >= seen + 2, "the new one renews")
    kept.keeper.stop()


def test_queues_with_a_time_of_their_own(broker: Flaky, clock: FakeClock) -> None:
    kept = Kept(broker, slow=30.0, other=30.0)
    keeper = kept.keeper
    assert keeper.session_for("slow") is keeper.session_for("other")
    assert keeper.session_for("slow") is not keeper.session_for("q")
    assert (keeper.session_for("slow").ttl, keeper.session_for("q").ttl) == (30.0, TTL)
    slow, quick = claim(broker, keeper, "slow"), claim(broker, keeper)
    keeper.hold([slow, quick])
    pass_renewals(broker, clock, 7)
    assert broker.reap_expired() == 0
    assert kept.lost == []
    keeper.stop()


def test_queue_with_a_shorter_time_than_the_others(broker: Flaky) -> None:
    """The keeper sleeps for a third of the usual time when the first claim of a quicker queue comes."""
    keeper = LeaseKeeper(broker, "me", 300.0, {"quick": TTL})
    keeper.start()
    keeper.hold([claim(broker, keeper, "quick")])
    wait_for(lambda: broker.renewals >= 3, "it is renewed in its own time")
    assert broker.reap_expired() == 0
    keeper.stop()


def test_child_of_a_fork_keeps_nothing(broker: Flaky, kept: Kept) -> None:
    """The leases are the parent's: the child neither renews nor closes them."""
    lease = claim(broker, kept.keeper)
    kept.keeper.hold([lease])
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept.keeper.stop()
        os.write(write, f"{kept.keeper.held} {kept.keeper.may_claim}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"0 False"
    os.close(read)
    os.close(write)
    assert broker.get(lease.id).state is State.RUNNING
    assert kept.keeper.held == 1
