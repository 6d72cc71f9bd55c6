"""Terms in memory: the reference for the shared table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .clock import Clock, to_ms
from .settings import check_name
from .terms import REMEMBERED, TOO_LONG, Candidate, Term, check

if TYPE_CHECKING:
    from .memory import MemoryStore


@dataclass(slots=True)
class TermRow:
    """A term as it is stored; instants and ``ttl_ms`` in milliseconds."""

    holder: str
    number: int
    acquired_at: int
    renewed_at: int
    until: int
    ttl_ms: int

    def valid_at(self, now: int) -> bool:
        """Not over, and not given before the clock was set back."""
        return now < self.until <= now + TOO_LONG * self.ttl_ms


class MemoryTerms:
    """The :class:`~kombu_taskgate.core.terms.LeaseStore` of a :class:`MemoryStore`."""

    def __init__(self, store: MemoryStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def try_acquire(self, key: str, holder: str, ttl: float, *, above: int = 0) -> Term | None:
        check(key, holder, ttl, above)
        with self._store.changed:
            now, ttl_ms = self._clock.now_ms(), to_ms(ttl)
            row = self._store.terms.get(key)
            if row is not None and row.valid_at(now):
                if row.holder != holder:
                    return None
                row.renewed_at, row.until, row.ttl_ms = now, now + ttl_ms, ttl_ms
            else:
                number = max(0 if row is None else row.number, above, now) + 1
                row = self._store.terms[key] = TermRow(holder, number, now, now, now + ttl_ms, ttl_ms)
            return _to_term(key, row, now)

    def release(self, key: str, holder: str) -> bool:
        check(key, holder)
        with self._store.changed:
            now, row = self._clock.now_ms(), self._store.terms.get(key)
            if row is None or row.holder != holder or not row.valid_at(now):
                return False
            row.until = now
            return True

    def current(self, key: str) -> Term | None:
        check_name(key, "term")
        with self._store.changed:
            row = self._store.terms.get(key)
            return None if row is None else _to_term(key, row, self._clock.now_ms())

    def is_current(self, term: Term) -> bool:
        """Whether the term is still its holder's and valid: the fence. The caller holds the lock."""
        row = self._store.terms.get(term.key)
        now = self._clock.now_ms()
        return row is not None and (row.holder, row.number) == (term.holder, term.number) and row.valid_at(now)

    def register(self, key: str, holder: str) -> None:
        check(key, holder)
        with self._store.changed:
            now = self._clock.now_ms()
            known, remembered_from = self._store.candidates, now - to_ms(REMEMBERED)
            for forgotten in [name for name, (_, seen_at) in known.items() if seen_at < remembered_from]:
                del known[forgotten]
            since, _ = known.get((key, holder), (now, now))
            known[key, holder] = (since, now)

    def withdraw(self, key: str, holder: str) -> None:
        check(key, holder)
        with self._store.changed:
            self._store.candidates.pop((key, holder), None)

    def candidates(self, key: str) -> list[Candidate]:
        check_name(key, "term")
        with self._store.changed:
            now = self._clock.now_ms()
            found = [
                Candidate(name, holder, since, seen_at, now)
                for (name, holder), (since, seen_at) in self._store.candidates.items()
                if name == key and seen_at >= now - to_ms(REMEMBERED)
            ]
        return sorted(found, key=lambda one: (-one.seen_at, one.holder))


def _to_term(key: str, row: TermRow, now: int) -> Term:
    return Term(key, row.holder, row.number, row.acquired_at, row.renewed_at, row.until, now)
