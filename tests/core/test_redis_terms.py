"""Terms in Redis keep the contract that those in databases keep, and name what is wrong."""

from __future__ import annotations

import socket
import sys
import uuid
from collections.abc import Callable, Iterator

import pytest
import redis
from redis.crc import key_slot

from kombu_taskgate.core.errors import ConfigError, StoreUnavailable
from kombu_taskgate.core.redis_link import RedisLink
from kombu_taskgate.core.redis_terms import RedisTerms
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.contract.terms import KEY, LeaseStoreCases, elect


@pytest.fixture
def prefix(redis_url: str) -> Iterator[str]:
    """Of keys that are deleted after the test."""
    prefix = f"t{uuid.uuid4().hex[:12]}:"
    yield prefix
    with redis.Redis.from_url(redis_url) as client:
        names = list(client.scan_iter(f"{prefix}*"))
        if names:
            client.delete(*names)


class TestRedisTerms(LeaseStoreCases):
    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def open_terms(self, redis_url: str, prefix: str, clock: FakeClock) -> Iterator[Callable[[], RedisTerms]]:
        opened: list[RedisTerms] = []

        def open_terms() -> RedisTerms:
            opened.append(RedisTerms(redis_url, prefix, clock=clock))
            return opened[-1]

        yield open_terms
        for terms in opened:
            terms.close()

    @pytest.fixture
    def terms(self, open_terms: Callable[[], RedisTerms]) -> RedisTerms:
        return open_terms()

    @pytest.fixture
    def delete_term(self, redis_url: str, prefix: str) -> Iterator[Callable[[str], None]]:
        with redis.Redis.from_url(redis_url) as client:
            yield lambda key: client.delete(f"{prefix}{{{key}}}:term")


def test_time_is_the_servers(redis_url: str, prefix: str) -> None:
    terms = RedisTerms(redis_url, prefix)
    with redis.Redis.from_url(redis_url) as client:
        before, term, after = client.time(), elect(terms), client.time()
    assert before[0] * 1000 + before[1] // 1000 <= term.renewed_at <= after[0] * 1000 + after[1] // 1000
    assert (term.acquired_at, term.seen_at, term.until) == (term.renewed_at, term.renewed_at, term.renewed_at + 10_000)
    terms.close()
    terms.close()


def test_a_term_never_expires_in_redis(redis_url: str, prefix: str) -> None:
    """Else the next number could be lower than this one."""
    elect(RedisTerms(redis_url, prefix), ttl=0.001)
    with redis.Redis.from_url(redis_url) as client:
        assert client.ttl(f"{prefix}{{{KEY}}}:term") == -1


@pytest.mark.parametrize("decode", [True, False])
def test_client_of_the_caller(redis_url: str, prefix: str, decode: bool) -> None:
    """It is used as it is, and stays open."""
    with redis.Redis.from_url(redis_url, decode_responses=decode) as client:
        terms = RedisTerms(client, prefix)
        term = elect(terms, "hölder")
        assert terms.current(KEY) is not None
        assert terms.candidates(KEY) == []
        terms.close()
        assert client.hget(f"{prefix}{{{KEY}}}:term", "number") == (str(term.number) if decode else b"%d" % term.number)


@pytest.mark.parametrize("key", ["beat", "{beat}", "}{", "a}b", "100%", "%7B"])
def test_keys_of_one_script_are_in_one_slot(redis_url: str, key: str) -> None:
    names = RedisLink(redis_url, "taskgate:").names(key, "term", "candidates", "since")
    assert len({key_slot(name.encode()) for name in names}) == 1
    assert len({name[: name.index("}")] for name in names}) == 1


def test_different_keys_have_different_names(redis_url: str) -> None:
    link = RedisLink(redis_url, "taskgate:")
    keys = ["{", "%7B", "%257B", "}", "%7D", "a", "{a}"]
    assert len({link.names(key, "term")[0] for key in keys}) == len(keys)


def test_server_that_is_not_there() -> None:
    """The error names the server, not the password; and comes at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        # Taken, so that nobody else comes to listen there; and refused, for nobody does.
        terms = RedisTerms(f"redis://me:secret@127.0.0.1:{port}/3")
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}") as told:
            terms.try_acquire(KEY, "a", 10.0)
    assert "secret" not in f"{told.value} {terms!r} {terms._link!r}"
    assert f"redis://127.0.0.1:{port}/3" in repr(terms)


def test_server_that_does_not_answer() -> None:
    """It is given up: the waits are bounded."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(8)
        terms = RedisTerms(f"redis://127.0.0.1:{deaf.getsockname()[1]}/0")
        with pytest.raises(StoreUnavailable, match="not available"):
            terms.current(KEY)


def test_connection_that_was_closed_is_opened_anew(redis_url: str, prefix: str) -> None:
    terms = RedisTerms(redis_url, prefix)
    term = elect(terms)
    with redis.Redis.from_url(redis_url) as client:
        client.client_kill_filter(_id=str(terms._link._client.client_id()))
    assert elect(terms).number == term.number
    terms.close()


def test_key_that_is_something_else(redis_url: str, prefix: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"{prefix}{{{KEY}}}:term", "a text")
    with pytest.raises(ConfigError, match="something else"):
        RedisTerms(redis_url, prefix).current(KEY)


def test_wrong_password(redis_url: str) -> None:
    wrong = redis_url.replace("redis://", "redis://nobody:secret@")
    with pytest.raises(ConfigError, match="refuses") as told:
        RedisTerms(wrong).current(KEY)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1", "redis://me:secret@host:secret", "", "secret"])
def test_wrong_url(url: str) -> None:
    with pytest.raises(ConfigError, match="can't be read") as told:
        RedisTerms(url)
    assert "secret" not in str(told.value)


def test_wrong_prefix() -> None:
    with pytest.raises(ConfigError, match="braces"):
        RedisTerms("redis://127.0.0.1", prefix="{x}")


def test_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"celery-taskgate\[redis\]"):
        RedisTerms("redis://127.0.0.1")
