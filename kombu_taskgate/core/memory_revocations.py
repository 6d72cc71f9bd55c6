"""Revocations in memory: the reference for the shared table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import revocations
from .clock import Clock, to_ms
from .model import FINAL
from .revocations import Revocation

if TYPE_CHECKING:
    from .memory import MemoryStore


class MemoryRevocations:
    """The :class:`~kombu_taskgate.core.revocations.Revocations` of a :class:`MemoryStore`."""

    def __init__(self, store: MemoryStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def add(self, revoked: Sequence[Revocation], keep: float) -> None:
        revocations.check(revoked, keep)
        with self._store.changed:
            until = self._clock.now_ms() + to_ms(keep)
            known = self._store.revocations
            known.update((one, max(until, known.get(one, until))) for one in revoked)

    def any(self) -> bool:
        return bool(self._store.revocations)

    def find(self, asked: Sequence[Revocation]) -> set[Revocation]:
        with self._store.changed:
            return {one for one in asked if one in self._store.revocations}

    def count(self) -> int:
        return len(self._store.revocations)

    def sweep(self, limit: int = 1000) -> int:
        with self._store.changed:
            known, now = self._store.revocations, self._clock.now_ms()
            old = sorted((one for one, until in known.items() if until < now), key=lambda one: known[one])
            going = {row.task_id for row in self._store.tasks.values() if row.state not in FINAL} if old else set()
            swept = [one for one in old if one.header or one.value not in going][:limit]
            for one in swept:
                del known[one]
            return len(swept)
