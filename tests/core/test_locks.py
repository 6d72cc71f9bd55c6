"""Locks over every store of terms."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kombu_taskgate.core.errors import ConfigError, StoreUnavailable
from kombu_taskgate.core.locks import Lock, RedisLock, SqlLock, TermLock
from kombu_taskgate.core.memory import MemoryBroker, MemoryStore
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.terms import Term
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.stores import InDatabase
from kombu_taskgate.testing.threads import DEADLINE, together
from tests import services

JOB = "nightly"


@pytest.fixture(params=[*services.STORES, pytest.param("redis", marks=pytest.mark.redis)])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Lock, Lock]]:
    """Two locks on one store, as two processes have them."""
    if request.param == "redis":
        import redis

        url, prefix = request.getfixturevalue("redis_url"), f"t{uuid.uuid4().hex}:"
        locks: list[RedisLock | SqlLock] = [RedisLock(url, prefix) for _ in range(2)]
        yield locks[0], locks[1]
        with redis.Redis.from_url(url) as client:
            client.delete(f"{prefix}{{{JOB}}}:term")
        for lock in locks:
            lock.close()
        return
    url = services.url_of_store(request.param, request)
    if request.param == "memory":
        one, two = SqlLock(f"taskgate+{url}"), SqlLock(BrokerSettings(url))
        yield one, two
        one.close()
        two.close()
        return
    store = InDatabase(url)
    settings = BrokerSettings(url, table_prefix=store.settings["table_prefix"])
    one, two = SqlLock(settings), SqlLock(settings)
    yield one, two
    one.close()
    two.close()
    store.close()


def test_one_has_it(pair: tuple[Lock, Lock]) -> None:
    one, two = pair
    assert one.lock(JOB, 30)
    assert not two.lock(JOB, 30)
    assert not two.renew(JOB, 30)
    two.unlock(JOB)
    assert not two.lock(JOB, 30)
    assert one.renew(JOB, 30)
    assert not one.lock(JOB, 30), "two users of one object exclude each other too"
    assert two.lock("another job", 30)
    one.unlock(JOB)
    one.unlock(JOB)
    assert not one.renew(JOB, 30)
    assert two.lock(JOB, 30)


def test_ten_race(pair: tuple[Lock, Lock]) -> None:
    outcomes = together([partial(lock.lock, JOB, 30) for lock in pair * 5])
    assert outcomes.count(True) == 1, outcomes
    assert outcomes.count(False) == 9, outcomes


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class Lossy:
    """Terms in memory; the answer to the next attempt gets lost on demand."""

    def __init__(self, clock: FakeClock) -> None:
        self.terms = MemoryBroker(BrokerSettings("memory://"), store=MemoryStore(), clock=clock).terms
        self.losing = False

    def try_acquire(self, key: str, holder: str, ttl: float, *, above: int = 0) -> Term | None:
        term = self.terms.try_acquire(key, holder, ttl, above=above)
        if self.losing:
            raise StoreUnavailable("the answer is lost")
        return term

    def release(self, key: str, holder: str) -> bool:
        return self.terms.release(key, holder)


def test_lost_by_not_renewing(clock: FakeClock) -> None:
    """Although nobody else has had it, somebody could have."""
    terms = Lossy(clock)
    one, two = TermLock(terms), TermLock(terms)
    assert one.lock(JOB, 10)
    clock.advance(10)
    assert not one.renew(JOB, 10)
    assert two.lock(JOB, 10), "what the renewal had begun was given back"
    assert not one.renew(JOB, 10)
    one.unlock(JOB)
    assert two.renew(JOB, 10)


def test_answer_that_got_lost(clock: FakeClock) -> None:
    """Asked again, it is had; and if nobody asks again, it ends by itself."""
    terms = Lossy(clock)
    one, two = TermLock(terms), TermLock(terms)
    terms.losing = True
    with pytest.raises(StoreUnavailable):
        one.lock(JOB, 10)
    terms.losing = False
    assert not two.lock(JOB, 10)
    assert one.lock(JOB, 10)
    assert one.renew(JOB, 10)


def test_each_time_under_another_name(clock: FakeClock) -> None:
    """Else a word to unlock that arrives late would end the next lock."""
    terms = Lossy(clock)
    lock = TermLock(terms)
    names = []
    for _ in range(3):
        assert lock.lock(JOB, 10)
        names.append(terms.terms.current(JOB).holder)
        lock.unlock(JOB)
    assert len(set(names)) == 3


def test_two_threads_at_once(clock: FakeClock) -> None:
    """Of one that asks so slowly that the other has given the lock back meanwhile, nothing is left behind."""

    class Slow(Lossy):
        def try_acquire(self, key: str, holder: str, ttl: float, *, above: int = 0) -> Term | None:
            if threading.current_thread() is slow:
                asks.set()
                assert goes_on.wait(DEADLINE)
            return super().try_acquire(key, holder, ttl, above=above)

    asks, goes_on = threading.Event(), threading.Event()
    terms = Slow(clock)
    lock = TermLock(terms)
    answers: list[bool] = []
    slow = threading.Thread(target=lambda: answers.append(lock.lock(JOB, 10)), daemon=True)
    slow.start()
    assert asks.wait(DEADLINE)
    assert lock.lock(JOB, 10)
    lock.unlock(JOB)
    goes_on.set()
    slow.join(DEADLINE)
    assert answers == [False]
    assert TermLock(terms).lock(JOB, 10), "nobody has it, and nobody can get it"


def test_child_has_none_of_it(clock: FakeClock) -> None:
    lock = TermLock(Lossy(clock))
    assert lock.lock(JOB, 10)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not lock.renew(JOB, 10) and not lock.lock(JOB, 10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lock.renew(JOB, 10)


def test_what_does_not_fit_is_refused(clock: FakeClock) -> None:
    lock = TermLock(Lossy(clock))
    wrong: Any
    for id, wrong in (("", 10.0), (JOB, 0.0), (JOB, "10"), (JOB, None)):
        with pytest.raises(ConfigError):
            lock.lock(id, wrong)
    with pytest.raises(ConfigError, match="can't be read"):
        RedisLock("http://x")
    wrong = None  # of a variable of the environment that is not set, say
    with pytest.raises(ConfigError, match="not None"):
        RedisLock(wrong)
    with pytest.raises(ConfigError, match="not None"):
        SqlLock(wrong)
