"""Schedules in Redis keep the contract that those in databases keep."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
import redis
from redis.crc import key_slot

from kombu_taskgate.core import redis_link
from kombu_taskgate.core.errors import ConfigError, StoreUnavailable
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.redis_schedules import RedisSchedules
from kombu_taskgate.core.redis_terms import RedisTerms
from kombu_taskgate.core.schedules import Entry, Progress, Schedules, Tick
from kombu_taskgate.core.terms import LeaseStore
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.contract.schedules import KEY, ScheduleStoreCases, lead, new, picture, the


@pytest.fixture
def prefix(redis_url: str) -> Iterator[str]:
    """Of keys that are deleted after the test."""
    prefix = f"t{uuid.uuid4().hex[:12]}:"
    yield prefix
    with redis.Redis.from_url(redis_url) as client:
        names = list(client.scan_iter(f"{prefix}*"))
        if names:
            client.delete(*names)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def open_schedules(
    redis_url: str, prefix: str, clock: FakeClock
) -> Iterator[Callable[[], tuple[RedisTerms, RedisSchedules]]]:
    opened: list[RedisTerms | RedisSchedules] = []

    def open_schedules() -> tuple[RedisTerms, RedisSchedules]:
        both = RedisTerms(redis_url, prefix, clock=clock), RedisSchedules(redis_url, prefix, clock=clock)
        opened.extend(both)
        return both

    yield open_schedules
    for one in opened:
        one.close()


@pytest.fixture
def both(open_schedules: Callable[[], tuple[RedisTerms, RedisSchedules]]) -> tuple[RedisTerms, RedisSchedules]:
    return open_schedules()


class TestRedisSchedules(ScheduleStoreCases):
    @pytest.fixture
    def open_schedules(
        self, open_schedules: Callable[[], tuple[LeaseStore, Schedules]]
    ) -> Callable[[], tuple[LeaseStore, Schedules]]:
        return open_schedules

    @pytest.fixture
    def delete_term(self, redis_url: str, prefix: str) -> Iterator[Callable[[str], None]]:
        with redis.Redis.from_url(redis_url) as client:
            yield lambda key: client.delete(f"{prefix}{{{key}}}:term")


def test_it_has_no_queues(both: tuple[RedisTerms, RedisSchedules]) -> None:
    terms, schedules = both
    schedules.add(KEY, new())
    with pytest.raises(ConfigError, match="no queues"):
        schedules.tick(lead(terms), Tick("one", 1), Progress(None, 1), [NewTask("q")])
    assert (schedules.ticks(KEY), the(schedules).base_at) == ([], None)


def test_rows_by_hand(both: tuple[RedisTerms, RedisSchedules], redis_url: str, prefix: str) -> None:
    """What makes no sense counts as not said."""
    _, schedules = both
    rows = {
        "one": '{"task": "tasks.one", "schedule": "interval 30"}',
        "odd": '{"task": null, "source": 7, "enabled": [], "base_at": "x", "total_run_count": null}',
        "text": "nonsense",
    }
    with redis.Redis.from_url(redis_url) as client:
        client.hset(f"{prefix}{{{KEY}}}:entries", mapping=rows)
    assert schedules.entries(KEY) == [Entry("odd"), new(), Entry("text")]
    assert schedules.change(KEY, "odd", task="tasks.odd")
    assert the(schedules, "odd").task == "tasks.odd"


class Loses:
    """A client whose answers get lost after the server has done what it was asked."""

    def __init__(self, client: redis.Redis, script: str, times: int) -> None:
        self.client, self.script, self.left = client, script, times

    def eval(self, script: str, *arguments: object) -> object:
        answer = self.client.eval(script, *arguments)
        if self.script in script and self.left:
            self.left -= 1
            raise redis.exceptions.ConnectionError("lost")
        return answer


def test_lost_answer_to_a_tick(redis_url: str, prefix: str) -> None:
    """A tick that was stored and not answered is known to be this one."""
    with redis.Redis.from_url(redis_url) as client:
        losing = Loses(client, "KEYS[7]", 1)
        schedules = RedisSchedules(losing, prefix)  # type: ignore[arg-type]
        schedules.add(KEY, new())
        term = lead(RedisTerms(client, prefix), ttl=60.0)
        assert schedules.tick(term, Tick("one", 1), Progress(None, 1)) is True
        assert losing.left == 0
        assert (len(schedules.ticks(KEY)), the(schedules).total_run_count) == (1, 1)
        assert schedules.tick(term, Tick("one", 1), Progress(1, 1)) is False


def test_no_answers_to_a_tick(redis_url: str, prefix: str) -> None:
    """When no answer comes at all that is told."""
    with redis.Redis.from_url(redis_url) as client:
        losing = Loses(client, "", 0)
        schedules = RedisSchedules(losing, prefix)  # type: ignore[arg-type]
        schedules.add(KEY, new())
        term = lead(RedisTerms(client, prefix), ttl=60.0)
        losing.left = 100
        with pytest.raises(StoreUnavailable):
            schedules.tick(term, Tick("one", 1), Progress(None, 1))
        losing.left = 0
        assert schedules.tick(term, Tick("one", 1), Progress(None, 1)) is True


def test_a_script_that_is_sent_twice(
    redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    """The client of Redis sends again what got no answer: it has one effect, and the answer of the first time."""
    with redis.Redis.from_url(redis_url) as client:
        schedules = RedisSchedules(client, prefix, clock=clock)
        term = lead(RedisTerms(client, prefix, clock=clock))
        run = schedules._link.run

        def twice(*arguments: object) -> object:
            run(*arguments)
            return run(*arguments)

        monkeypatch.setattr(schedules._link, "run", twice)
        schedules.sync(term, [new("code")])
        assert schedules.add(KEY, new()) is True
        assert schedules.change(KEY, "one", args="[1]") is True
        assert schedules.request(KEY, "one") is True
        assert the(schedules).requested_at == clock.now_ms()
        assert schedules.tick(term, Tick("one", 1), Progress(None, 1)) is True
        assert schedules.rebase(term, "one", 1, 2) is True
        assert (the(schedules).total_run_count, the(schedules).base_at) == (1, 2)


def test_a_tick_that_is_sent_again_when_the_term_is_over(
    redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    """It was stored in time, so it was stored."""
    with redis.Redis.from_url(redis_url) as client:
        schedules = RedisSchedules(client, prefix, clock=clock)
        schedules.add(KEY, new())
        term = lead(RedisTerms(client, prefix, clock=clock))
        run = schedules._link.run

        def twice(script: str, *arguments: object) -> object:
            answer = run(script, *arguments)
            if "KEYS[7]" not in script:
                return answer
            clock.advance(11)
            return run(script, *arguments)

        monkeypatch.setattr(schedules._link, "run", twice)
        assert schedules.tick(term, Tick("one", 1), Progress(None, 1)) is True


@pytest.mark.parametrize("writes", ["tick", "rebase", "sync", "change"])
def test_changes_between_reading_and_writing(
    open_schedules: Callable[[], tuple[RedisTerms, RedisSchedules]], monkeypatch: pytest.MonkeyPatch, writes: str
) -> None:
    """What was worked out from an entry that is another by now is worked out again."""
    (terms, schedules), (_, other) = open_schedules(), open_schedules()
    term = lead(terms)
    schedules.sync(term, [new("code", base_at=1)])
    run, changed = schedules._link.run, []

    def in_between(script: str, *arguments: object) -> object:
        if "HSET" in script and not changed:
            changed.append(other.change(KEY, "code", enabled=False))
        return run(script, *arguments)

    monkeypatch.setattr(schedules._link, "run", in_between)
    calls: dict[str, Callable[[], object]] = {
        "tick": lambda: schedules.tick(term, Tick("code", 2), Progress(1, 2)),
        "rebase": lambda: schedules.rebase(term, "code", 1, 2),
        "sync": lambda: schedules.sync(term, [new("code", task="tasks.other")]),
        "change": lambda: schedules.request(KEY, "code"),
    }
    assert not calls[writes]() or writes == "change"
    found = the(schedules, "code")
    assert (changed, found.enabled, found.base_at, schedules.ticks(KEY)) == ([True], False, None, [])
    assert (found.task == "tasks.other", found.requested_at is not None) == (writes == "sync", writes == "change")


def test_nothing_is_left_of_what_was_swept(
    both: tuple[RedisTerms, RedisSchedules], clock: FakeClock, redis_url: str, prefix: str
) -> None:
    terms, schedules = both
    schedules.add(KEY, new("a:b"))
    schedules.tick(lead(terms), Tick("a:b", -5), Progress(None, 1))
    clock.advance(10)
    assert schedules.sweep(5) == 1
    assert picture(schedules)[1] == []
    with redis.Redis.from_url(redis_url) as client:
        left = {name.decode().partition("}:")[2] for name in client.scan_iter(f"{prefix}{{*")}
    assert left == {"term", "entries"}


def test_old_ticks_go_although_the_server_has_lost_its_data(
    both: tuple[RedisTerms, RedisSchedules], redis_url: str, prefix: str, clock: FakeClock
) -> None:
    """And with it the word of which schedules there are."""
    terms, schedules = both
    for due_at in (1, 2):
        with redis.Redis.from_url(redis_url) as client:
            client.delete(*client.scan_iter(f"{prefix}*"), "another")
        schedules.add(KEY, new("one"))
        assert schedules.tick(lead(terms), Tick("one", due_at), Progress(None, due_at))
    clock.advance(10)
    assert schedules.sweep(5) == 1
    assert picture(schedules)[1] == []


def test_keys_are_in_one_slot(redis_url: str) -> None:
    link = redis_link.RedisLink(redis_url, "taskgate:")
    kinds = ("term", "entries", "ticks", "due", "sent", "unsent", "due:{x}", "due:}")
    for key in ("beat", "{beat}", "}{"):
        assert len({key_slot(name.encode()) for name in link.names(key, *kinds)}) == 1


def test_no_password_is_shown() -> None:
    schedules = RedisSchedules("redis://me:secret@127.0.0.1:1/0")
    with pytest.raises(StoreUnavailable) as told:
        schedules.entries(KEY)
    assert "secret" not in f"{told.value} {schedules!r}"
