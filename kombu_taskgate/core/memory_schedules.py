"""Schedules in memory: the reference for the shared tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from . import schedule_rules as rules
from .clock import Clock, to_ms
from .memory_terms import MemoryTerms
from .model import NewTask
from .schedules import Entry, Progress, Tick, TickState
from .terms import Term

if TYPE_CHECKING:
    from .memory import MemoryStore


class MemorySchedules:
    """The :class:`~kombu_taskgate.core.schedules.Schedules` of a :class:`MemoryStore`.

    Args:
        store: the data.
        clock: what time it is.
        terms: who leads, in the same store.
        enqueue: stores executions.
    """

    def __init__(
        self,
        store: MemoryStore,
        clock: Clock,
        terms: MemoryTerms,
        enqueue: Callable[[Sequence[NewTask]], list[int]],
    ) -> None:
        self._store = store
        self._clock = clock
        self._terms = terms
        self._enqueue = enqueue

    def _of(self, key: str) -> dict[str, Entry]:
        return self._store.entries.setdefault(key, {})

    def _fence(self, term: Term) -> None:
        if not self._terms.is_current(term):
            raise rules.not_leader(term)

    # -- entries -------------------------------------------------------------------------------------

    def entries(self, key: str) -> list[Entry]:
        """See the protocol."""
        rules.check_key(key)
        with self._store.changed:
            return [replace(entry) for _, entry in sorted(self._store.entries.get(key, {}).items())]

    def add(self, key: str, entry: Entry, *, replace: bool = False) -> bool:
        """See the protocol."""
        rules.check_key(key)
        rules.check_added(entry)
        with self._store.changed:
            known, now = self._of(key), self._clock.now_ms()
            there = known.get(entry.name)
            if there is None:
                known[entry.name] = rules.added(entry, now)
                return True
            after = rules.replaced(there, entry, now)
            if replace:
                known[entry.name] = after
            return replace

    def change(self, key: str, name: str, **changes: object) -> bool:
        """See the protocol."""
        rules.check_key(key)
        rules.check_changes(name, changes)
        with self._store.changed:
            known = self._of(key)
            if name not in known:
                return False
            known[name] = rules.changed(known[name], changes, self._clock.now_ms())
            return True

    def remove(self, key: str, name: str) -> bool:
        """See the protocol."""
        rules.check_key(key)
        with self._store.changed:
            known = self._of(key)
            if name not in known:
                return False
            rules.refuse_to_remove(known[name])
            del known[name]
            return True

    def request(self, key: str, name: str) -> bool:
        """See the protocol."""
        rules.check_key(key)
        with self._store.changed:
            entry = self._of(key).get(name)
            if entry is None:
                return False
            entry.requested_at = rules.requested(entry, self._clock.now_ms())
            return True

    def sync(self, term: Term, entries: Sequence[Entry]) -> None:
        """See the protocol."""
        with self._store.changed:
            self._fence(term)
            known = self._of(term.key)
            found = rules.synced(known.values(), entries, self._clock.now_ms())
            known.update((entry.name, entry) for entry in [*found.new, *found.changed])
            for name in found.gone:
                del known[name]

    # -- ticks ---------------------------------------------------------------------------------------

    def tick(self, term: Term, tick: Tick, progress: Progress, tasks: Sequence[NewTask] = ()) -> bool:
        """See the protocol."""
        rules.check_tick(tick)
        with self._store.changed:
            self._fence(term)
            known, now = self._of(term.key), self._clock.now_ms()
            place = (term.key, tick.name, tick.due_at)
            advance = rules.advanced(known.get(tick.name), tick, progress, known=place in self._store.ticks, now=now)
            if advance.stored:
                # First: what it refuses changes nothing.
                self._enqueue(tasks)
                self._store.ticks[place] = replace(tick, sent_at=now, term=term.number)
            if advance.entry is not None:
                known[tick.name] = advance.entry
            return advance.stored

    def rebase(self, term: Term, name: str, seen_base: int | None, base_at: int | None) -> bool:
        """See the protocol."""
        with self._store.changed:
            self._fence(term)
            entry = self._of(term.key).get(name)
            if entry is None or entry.base_at != seen_base:
                return False
            entry.base_at = base_at
            return True

    def sent(self, key: str, name: str, due_at: int, state: TickState = TickState.SENT) -> None:
        """See the protocol."""
        rules.check_key(key)
        with self._store.changed:
            tick = self._store.ticks.get((key, name, due_at))
            if tick is not None and tick.state is TickState.SENDING:
                tick.state, tick.sent_at = state, self._clock.now_ms()

    def unsent(self, key: str) -> list[Tick]:
        """See the protocol."""
        rules.check_key(key)
        found = [tick for tick in self._ticks(key) if tick.state is TickState.SENDING]
        return sorted(found, key=lambda tick: (tick.due_at, tick.name))

    def ticks(self, key: str, names: Collection[str] = (), limit: int = 100) -> list[Tick]:
        """See the protocol."""
        rules.check_key(key)
        return rules.newest([tick for tick in self._ticks(key) if not names or tick.name in names], limit)

    def _ticks(self, key: str) -> list[Tick]:
        with self._store.changed:
            return [replace(tick) for (schedule, _, _), tick in self._store.ticks.items() if schedule == key]

    def sweep(self, keep: float, limit: int = 1000) -> int:
        """See the protocol."""
        with self._store.changed:
            before = self._clock.now_ms() - to_ms(keep)
            ticks = self._store.ticks
            old = [
                place for place, tick in ticks.items() if tick.state is not TickState.SENDING and tick.sent_at < before
            ]
            old = sorted(old, key=lambda place: ticks[place].sent_at)[: max(0, limit)]
            for place in old:
                del ticks[place]
            return len(old)
