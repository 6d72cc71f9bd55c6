"""Terms in Redis, for those who have no database at hand, or whose broker is Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .clock import Clock, to_ms
from .redis_link import RedisLink, milliseconds
from .settings import check_name
from .terms import REMEMBERED, TOO_LONG, Candidate, Term, check

if TYPE_CHECKING:
    from .redis_link import Server

#: Reads a term from the hash KEYS[1]. For scripts that write under a term, too: those have to ask ``valid``.
READ_TERM = f"""
local row = redis.call('HMGET', KEYS[1], 'holder', 'number', 'acquired_at', 'renewed_at', 'until', 'ttl_ms')
local holder = row[1]
local number, acquired_at, renewed_at = tonumber(row[2]) or 0, tonumber(row[3]) or 0, tonumber(row[4]) or 0
local ends, ttl_ms = tonumber(row[5]) or 0, tonumber(row[6]) or 0
-- Not over, and not given before the clock was set back.
local valid = holder and ends > now and ends <= now + {TOO_LONG} * ttl_ms
"""

# ARGV: now, holder, ttl in ms, above.
_ACQUIRE = (
    READ_TERM
    + """
if valid and holder ~= ARGV[2] then return false end
if not valid then
  number = math.max(number, tonumber(ARGV[4]), now) + 1
  acquired_at = now
end
ends = now + tonumber(ARGV[3])
-- It never expires: the next number must be above this one.
redis.call('HSET', KEYS[1], 'holder', ARGV[2], 'number', text(number), 'acquired_at', text(acquired_at),
           'renewed_at', text(now), 'until', text(ends), 'ttl_ms', ARGV[3])
return {ARGV[2], text(number), text(acquired_at), text(now), text(ends), text(now)}
"""
)

# ARGV: now, holder.
_RELEASE = (
    READ_TERM
    + """
if not valid or holder ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'until', text(now))
return 1
"""
)

# ARGV: now.
_CURRENT = (
    READ_TERM
    + """
if not holder then return false end
return {holder, text(number), text(acquired_at), text(renewed_at), text(ends), text(now)}
"""
)

# KEYS: candidates by when they were last seen; since when each stands by.
# ARGV: now, holder, for how long one is remembered in ms.
_REGISTER = """
local old = '(' .. text(now - tonumber(ARGV[3]))
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', old)) do
  redis.call('ZREM', KEYS[1], gone)
  redis.call('HDEL', KEYS[2], gone)
end
redis.call('HSETNX', KEYS[2], ARGV[2], text(now))
redis.call('ZADD', KEYS[1], text(now), ARGV[2])
return 1
"""

# KEYS as above. ARGV: now, holder.
_WITHDRAW = """
redis.call('ZREM', KEYS[1], ARGV[2])
redis.call('HDEL', KEYS[2], ARGV[2])
return 1
"""

# KEYS as above. ARGV: now, how long to remember in ms.
_CANDIDATES = """
local found = {}
for _, holder in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], text(now - tonumber(ARGV[2])), '+inf')) do
  local seen_at = redis.call('ZSCORE', KEYS[1], holder)
  found[#found + 1] = {holder, redis.call('HGET', KEYS[2], holder) or seen_at, seen_at, text(now)}
end
return found
"""

_MS = to_ms(REMEMBERED)


class RedisTerms:
    """A :class:`~kombu_taskgate.core.terms.LeaseStore` in Redis 5 or newer, by the clock of the server.

    The guarantee is what Redis itself can give: a server that lost its last writes, in a crash or because a replica
    took over that did not have them yet, may have forgotten a term that its holder still trusts. Numbers grow all the
    same, as long as the clock goes on and callers say what they have seen.

    Args:
        server: URL (``redis://``, ``rediss://`` or ``unix://``), or a client of the package redis, which the caller
            closes.
        prefix: put before the name of every key.
        clock: replaces the server's time in tests.

    Raises:
        ConfigError: the URL or the prefix is wrong, or the package redis is not installed.
    """

    def __init__(self, server: Server, prefix: str = "taskgate:", *, clock: Clock | None = None) -> None:
        self._link = RedisLink(server, prefix, clock)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._link.shown}>"

    def try_acquire(self, key: str, holder: str, ttl: float, *, above: int = 0) -> Term | None:
        check(key, holder, ttl, above)
        return _to_term(key, self._link.run(_ACQUIRE, self._link.names(key, "term"), holder, to_ms(ttl), above))

    def release(self, key: str, holder: str) -> bool:
        check(key, holder)
        return bool(self._link.run(_RELEASE, self._link.names(key, "term"), holder))

    def current(self, key: str) -> Term | None:
        check_name(key, "term")
        return _to_term(key, self._link.run(_CURRENT, self._link.names(key, "term")))

    def register(self, key: str, holder: str) -> None:
        check(key, holder)
        self._link.run(_REGISTER, self._candidates(key), holder, _MS)

    def withdraw(self, key: str, holder: str) -> None:
        check(key, holder)
        self._link.run(_WITHDRAW, self._candidates(key), holder)

    def candidates(self, key: str) -> list[Candidate]:
        check_name(key, "term")
        rows = self._link.run(_CANDIDATES, self._candidates(key), _MS)
        found = [Candidate(key, row[0], *map(milliseconds, row[1:])) for row in rows]
        return sorted(found, key=lambda one: (-one.seen_at, one.holder))

    def _candidates(self, key: str) -> list[str]:
        return self._link.names(key, "candidates", "since")

    def close(self) -> None:
        """Close the connections, unless the client is the caller's. Idempotent."""
        self._link.close()


def _to_term(key: str, row: Any) -> Term | None:
    return None if row is None else Term(key, row[0], *map(milliseconds, row[1:]))
