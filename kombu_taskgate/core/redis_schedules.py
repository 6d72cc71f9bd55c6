"""Schedules in Redis, beside the terms that are kept there.

What becomes of an entry is worked out here, by the rules that all stores share, from what was read; one script stores
it if all that was read is still so, and if the term is valid. Otherwise it is read and worked out again.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from . import schedule_rules as rules
from .clock import Clock, to_ms
from .errors import StoreUnavailable
from .model import NewTask
from .redis_link import RedisLink, milliseconds
from .redis_terms import READ_TERM
from .schedules import Entry, Progress, Tick, TickState
from .terms import Term

if TYPE_CHECKING:
    from .redis_link import Server

T = TypeVar("T")

#: How often something is worked out again because others have written meanwhile.
MAX_AGAIN = 100
#: How often a script is sent when no answer comes, and seconds between.
TRIES, PAUSE = 3, 0.2
#: What one schedule consists of: its term; entries by name; ticks by "due time:name"; the same by due time, by when
#: they were sent, and those that are being sent by due time. ``due`` is followed by a name for those of one entry.
_KINDS = ("term", "entries", "ticks", "due", "sent", "unsent")
#: The answers of a script that stores something.
_DONE, _AGAIN, _NOT_LEADER = 1, 0, -1

# KEYS: entries. ARGV: now.
_READ_ALL = "return {text(now), redis.call('HGETALL', KEYS[1])}"

# KEYS: entries, ticks. ARGV: now, name, tick ('': none).
_READ = """
return {text(now), redis.call('HGET', KEYS[1], ARGV[2]), ARGV[3] ~= '' and redis.call('HGET', KEYS[2], ARGV[3])}
"""

# KEYS: term, entries. ARGV: now, holder ('': not fenced), number, how many, and for each: name, what it was, what it is
# to be ('': nothing).
_STORE = (
    READ_TERM
    + f"""
if ARGV[2] ~= '' and not (valid and holder == ARGV[2] and text(number) == ARGV[3]) then return {_NOT_LEADER} end
local last = 4 + 3 * tonumber(ARGV[4])
for place = 5, last, 3 do
  local there = redis.call('HGET', KEYS[2], ARGV[place]) or ''
  -- What is there already was stored by an earlier try whose answer was lost: its mark is nobody else's.
  if there ~= ARGV[place + 1] and (there == '' or there ~= ARGV[place + 2]) then return {_AGAIN} end
end
for place = 5, last, 3 do
  if ARGV[place + 2] == '' then redis.call('HDEL', KEYS[2], ARGV[place])
  else redis.call('HSET', KEYS[2], ARGV[place], ARGV[place + 2]) end
end
return {_DONE}
"""
)

# KEYS: term, entries, ticks, due, sent, unsent, due of the entry. ARGV: now, holder, number, name, what the entry was,
# what it is to be, tick, what it is to be ('': it stays), due time, whether it is being sent.
_TICK = (
    READ_TERM
    + f"""
-- Stored by an earlier try whose answer was lost: its mark is nobody else's.
if ARGV[8] ~= '' and redis.call('HGET', KEYS[3], ARGV[7]) == ARGV[8] then return {_DONE} end
if not (valid and holder == ARGV[2] and text(number) == ARGV[3]) then return {_NOT_LEADER} end
-- Whoever stores a tick changes its entry, so that this tells of both.
if (redis.call('HGET', KEYS[2], ARGV[4]) or '') ~= ARGV[5] then return {_AGAIN} end
redis.call('HSET', KEYS[2], ARGV[4], ARGV[6])
if ARGV[8] ~= '' then
  redis.call('HSET', KEYS[3], ARGV[7], ARGV[8])
  redis.call('ZADD', KEYS[4], ARGV[9], ARGV[7])
  redis.call('ZADD', KEYS[7], ARGV[9], ARGV[7])
  if ARGV[10] == '1' then redis.call('ZADD', KEYS[6], ARGV[9], ARGV[7])
  else redis.call('ZADD', KEYS[5], text(now), ARGV[7]) end
end
return {_DONE}
"""
)

# KEYS: ticks, sent, unsent. ARGV: now, tick, what it was, what it is to be, when it was sent.
_SENT = f"""
if (redis.call('HGET', KEYS[1], ARGV[2]) or '') ~= ARGV[3] then return {_AGAIN} end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[4])
redis.call('ZREM', KEYS[3], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[5], ARGV[2])
return {_DONE}
"""

# KEYS: ticks by some order, ticks. ARGV: now, how many ('-1': all), 'newest' or 'oldest'.
_LIST = """
local command = ARGV[3] == 'newest' and 'ZREVRANGE' or 'ZRANGE'
local ids = redis.call(command, KEYS[1], 0, ARGV[2])
local found = {}
for place, id in ipairs(ids) do found[place] = redis.call('HGET', KEYS[2], id) or '' end
return found
"""

# KEYS: ticks by when they were sent. ARGV: now, how long to keep in ms, how many.
_OLD = """
local before = '(' .. text(now - tonumber(ARGV[2]))
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', before, 'LIMIT', 0, ARGV[3])
"""

# KEYS: ticks, due, sent, due of the entry. ARGV: now, and the ticks.
_DELETE = """
local gone = 0
for place = 2, #ARGV do
  -- What is not in there has been swept by another, or is being sent again.
  if redis.call('ZREM', KEYS[3], ARGV[place]) == 1 then
    gone = gone + 1
    redis.call('HDEL', KEYS[1], ARGV[place])
    redis.call('ZREM', KEYS[2], ARGV[place])
    redis.call('ZREM', KEYS[4], ARGV[place])
  end
end
return gone
"""

# KEYS: the keys of all schedules. ARGV: now, a key.
_NOTE = "return redis.call('SADD', KEYS[1], ARGV[2])"
_NOTED = "return redis.call('SMEMBERS', KEYS[1])"


class RedisSchedules:
    """The :class:`~kombu_taskgate.core.schedules.Schedules` of those who keep their terms in Redis, 5 or newer.

    It has no queues, so a tick can't take tasks along: they are sent elsewhere, between a tick that is SENDING and the
    word that it was sent. What :class:`~kombu_taskgate.core.redis_terms.RedisTerms` says of a server that has lost its
    last writes is so of these as well: such a server may have forgotten a tick.

    Args:
        server: URL (``redis://``, ``rediss://`` or ``unix://``), or a client of the package redis, which the caller
            closes.
        prefix: put before the name of every key; that of the terms.
        clock: replaces the server's time in tests.

    Raises:
        ConfigError: the URL or the prefix is wrong, or the package redis is not installed.
    """

    def __init__(self, server: Server, prefix: str = "taskgate:", *, clock: Clock | None = None) -> None:
        self._link = RedisLink(server, prefix, clock)
        self._all = f"{prefix}schedules"
        #: Schedules that are known to be noted there.
        self._noted: set[str] = set()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._link.shown}>"

    def close(self) -> None:
        """Close the connections, unless the client is the caller's. Idempotent."""
        self._link.close()

    # -- entries -------------------------------------------------------------------------------------

    def entries(self, key: str) -> list[Entry]:
        """See the protocol."""
        rules.check_key(key)
        return [entry for _, entry in sorted((entry.name, entry) for entry, _ in self._entries(key)[1].values())]

    def _entries(self, key: str) -> tuple[int, dict[str, tuple[Entry, str]]]:
        """The time, and all entries by name with the text that is stored of each."""
        now, flat = self._link.run(_READ_ALL, self._link.names(key, "entries"))
        texts = dict(zip(flat[::2], flat[1::2], strict=True))
        return milliseconds(now), {name: (_entry(name, text), text) for name, text in texts.items()}

    def _entry(self, key: str, name: str, tick: str = "") -> tuple[int, Entry | None, str, str]:
        """The time, an entry, the text that is stored of it, and that of a tick."""
        names = self._link.names(key, "entries", "ticks")
        now, text, ticked = self._link.run(_READ, names, name, tick)
        return milliseconds(now), None if text is None else _entry(name, text), text or "", ticked or ""

    def add(self, key: str, entry: Entry, *, replace: bool = False) -> bool:
        """See the protocol."""
        rules.check_key(key)
        rules.check_added(entry)

        def after(there: Entry | None, now: int) -> Entry | None:
            if there is None:
                return rules.added(entry, now)
            replaced = rules.replaced(there, entry, now)
            return replaced if replace else None

        return self._rewrite(key, entry.name, after)

    def change(self, key: str, name: str, **changes: object) -> bool:
        """See the protocol."""
        rules.check_key(key)
        rules.check_changes(name, changes)
        return self._rewrite(key, name, lambda there, now: there and rules.changed(there, changes, now))

    def request(self, key: str, name: str) -> bool:
        """See the protocol."""
        rules.check_key(key)
        return self._rewrite(key, name, lambda there, now: there and rules.wanted(there, now))

    def _rewrite(self, key: str, name: str, after: Callable[[Entry | None, int], Entry | None]) -> bool:
        """Store what becomes of an entry; ``None``: it is left alone. Returns whether it was stored."""
        mark = _new_mark()

        def attempt() -> bool | None:
            now, there, text, _ = self._entry(key, name)
            entry = after(there, now)
            if entry is None:
                return False
            return True if self._stores(key, [(name, text, _text(entry, mark))]) else None

        return self._until_done(attempt)

    def remove(self, key: str, name: str) -> bool:
        """See the protocol."""
        rules.check_key(key)

        def attempt() -> bool | None:
            _, there, text, _ = self._entry(key, name)
            if there is None:
                return False
            rules.refuse_to_remove(there)
            return True if self._stores(key, [(name, text, "")]) else None

        return self._until_done(attempt)

    def sync(self, term: Term, entries: Sequence[Entry]) -> None:
        """See the protocol."""

        def attempt() -> bool | None:
            now, known = self._entries(term.key)
            mark = _new_mark()
            found = rules.synced([entry for entry, _ in known.values()], entries, now)
            changes = [
                (entry.name, known[entry.name][1] if entry.name in known else "", _text(entry, mark))
                for entry in [*found.new, *found.changed]
            ]
            changes += [(name, known[name][1], "") for name in found.gone]
            return True if self._stores(term.key, changes, term) else None

        self._until_done(attempt)

    def _stores(self, key: str, changes: Sequence[tuple[str, str, str]], term: Term | None = None) -> bool:
        """Store (name, what it was, what it is to be) of entries; not when one is another by now."""
        fence = ("", 0) if term is None else (term.holder, term.number)
        flat = [part for change in changes for part in change]
        answer = self._link.run(_STORE, self._link.names(key, "term", "entries"), *fence, len(changes), *flat)
        if answer == _NOT_LEADER and term is not None:
            raise rules.not_leader(term)
        return bool(answer == _DONE)

    def _until_done(self, attempt: Callable[[], T | None]) -> T:
        """Work something out again until nobody else has written meanwhile."""
        for _ in range(MAX_AGAIN):
            done = attempt()
            if done is not None:
                return done
        raise StoreUnavailable(
            f"others have changed the same schedule in Redis at {self._link.shown} {MAX_AGAIN} times meanwhile: "
            "try again"
        )

    # -- ticks ---------------------------------------------------------------------------------------

    def tick(self, term: Term, tick: Tick, progress: Progress, tasks: Sequence[NewTask] = ()) -> bool:
        """See the protocol."""
        rules.check_tick(tick)
        rules.check_no_tasks(tasks, f"Redis at {self._link.shown}")
        self._note(term.key)
        # So that a tick which was stored without an answer is known to be this one.
        mark = _new_mark()
        id = _id(tick.name, tick.due_at)
        names = self._link.names(term.key, *_KINDS, _due_of(tick.name))

        def attempt() -> bool | None:
            now, entry, text, ticked = self._entry(term.key, tick.name, id)
            if ticked and _mark(ticked) == mark:
                return True
            advance = rules.advanced(entry, tick, progress, known=bool(ticked), now=now)
            if advance.entry is None:
                # Whether it is still led is asked all the same.
                self._stores(term.key, [], term)
                return False
            new = _tick_text(tick, now, term.number, mark) if advance.stored else ""
            sending = int(tick.state is TickState.SENDING)
            answer = self._link.run(
                _TICK, names, term.holder, term.number, tick.name, text, _text(advance.entry, mark), id, new,
                tick.due_at, sending,
            )  # fmt: skip
            if answer == _NOT_LEADER:
                raise rules.not_leader(term)
            return advance.stored if answer == _DONE else None

        return self._until_done(lambda: self._answered(attempt))

    def _answered(self, attempt: Callable[[], T]) -> T:
        """Try again for a while where no answer comes: done twice it is done once."""
        for left in reversed(range(TRIES)):
            try:
                return attempt()
            except StoreUnavailable:
                if not left:
                    raise
                time.sleep(PAUSE)
        raise AssertionError("unreachable")

    def rebase(self, term: Term, name: str, seen_base: int | None, base_at: int | None) -> bool:
        """See the protocol."""

        def attempt() -> bool | None:
            _, there, text, _ = self._entry(term.key, name)
            if there is None or there.base_at != seen_base:
                self._stores(term.key, [], term)
                return False
            there.base_at = base_at
            return True if self._stores(term.key, [(name, text, _text(there, _new_mark()))], term) else None

        return self._until_done(attempt)

    def sent(self, key: str, name: str, due_at: int, state: TickState = TickState.SENT) -> None:
        """See the protocol."""
        rules.check_key(key)
        id = _id(name, due_at)

        def attempt() -> bool | None:
            now, _, _, ticked = self._entry(key, name, id)
            if not ticked or _tick(ticked).state is not TickState.SENDING:
                return False
            row = {**json.loads(ticked), "state": state.value, "sent_at": now}
            names = self._link.names(key, "ticks", "sent", "unsent")
            return True if self._link.run(_SENT, names, id, ticked, json.dumps(row), now) == _DONE else None

        self._until_done(attempt)

    def unsent(self, key: str) -> list[Tick]:
        """See the protocol."""
        rules.check_key(key)
        return sorted(self._list(key, "unsent", -1, "oldest"), key=lambda tick: (tick.due_at, tick.name))

    def ticks(self, key: str, names: Collection[str] = (), limit: int = 100) -> list[Tick]:
        """See the protocol."""
        rules.check_key(key)
        if limit < 1:
            return []
        orders = [_due_of(name) for name in sorted(set(names))] if names else ["due"]
        return rules.newest((tick for order in orders for tick in self._list(key, order, limit - 1, "newest")), limit)

    def _list(self, key: str, order: str, last: int, which: str) -> list[Tick]:
        texts = self._link.run(_LIST, self._link.names(key, order, "ticks"), last, which)
        return [_tick(text) for text in texts if text]

    def sweep(self, keep: float, limit: int = 1000) -> int:
        """See the protocol."""
        total = 0
        # A server that has lost its data does not know what was noted before.
        for key in sorted({*self._link.run(_NOTED, [self._all]), *self._noted}):
            left = limit - total
            if left < 1:
                break
            old = self._link.run(_OLD, self._link.names(key, "sent"), to_ms(keep), left)
            by_name: dict[str, list[str]] = {}
            for id in old:
                by_name.setdefault(id.partition(":")[2], []).append(id)
            for name, ids in by_name.items():
                total += self._link.run(_DELETE, self._link.names(key, "ticks", "due", "sent", _due_of(name)), *ids)
        return total

    def _note(self, key: str) -> None:
        """Note that there are ticks of this schedule, for whoever sweeps."""
        if key not in self._noted:
            self._link.run(_NOTE, [self._all], key)
            self._noted.add(key)


def _id(name: str, due_at: int) -> str:
    return f"{due_at}:{name}"


def _due_of(name: str) -> str:
    return f"due:{name}"


def _new_mark() -> str:
    return secrets.token_hex(8)


def _text(entry: Entry, mark: str) -> str:
    return json.dumps({**asdict(entry), "source": entry.source.value, "mark": mark})


def _entry(name: str, text: str) -> Entry:
    return rules.entry_of({**_row(text), "name": name})


def _tick_text(tick: Tick, now: int, term: int, mark: str) -> str:
    return json.dumps({**asdict(tick), "state": tick.state.value, "sent_at": now, "term": term, "mark": mark})


def _tick(text: str) -> Tick:
    return rules.tick_of({"name": "", "due_at": 0, **_row(text)})


def _mark(text: str) -> object:
    return _row(text).get("mark")


def _row(text: str) -> Mapping[str, Any]:
    """What is stored of an entry or a tick; of what somebody else has put there, nothing."""
    try:
        row = json.loads(text)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
