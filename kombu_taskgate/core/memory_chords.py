"""Chords in memory: the reference for the shared tables."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .chords import REMEMBER, Chord, ChordPart, ChordState
from .clock import Clock, to_ms
from .model import NewTask
from .settings import BrokerSettings, check_name, check_payload

if TYPE_CHECKING:
    from .memory import MemoryStore

#: (task id, place).
_Key = tuple[str, int]


@dataclass(slots=True)
class ChordRow:
    """A chord and what nobody outside may see of it."""

    state: ChordState = ChordState.OPEN
    size: int | None = None
    by: int = 0
    past: int = 0
    claim: int | None = None
    claimed_until: int = 0
    touched_at: int = 0
    expires_at: int | None = None
    header: bytes | None = None
    body: bytes | None = None
    known: bool = False
    parts: dict[_Key, tuple[ChordPart, int]] = field(default_factory=dict)
    added: set[_Key] = field(default_factory=set)


class MemoryChords:
    """The :class:`~kombu_taskgate.core.chords.Chords` of a :class:`MemoryStore`."""

    def __init__(
        self,
        store: MemoryStore,
        clock: Clock,
        settings: BrokerSettings,
        enqueue: Callable[[Sequence[NewTask]], list[int]],
    ) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._enqueue = enqueue

    def begin(self, group_id: str, *, header: bytes | None, body: bytes | None, expires_in: float | None) -> None:
        """See the protocol."""
        check_name(group_id, "group id")
        for payload, what in ((header, "header"), (body, "body")):
            if payload is not None:
                check_payload(payload, f"{what} of chord {group_id}", self._settings.max_payload)
        with self._store.changed:
            row = self._row(group_id, expires_in)
            row.header = row.header if header is None else header
            row.body = row.body if body is None else body

    def _row(self, group_id: str, expires_in: float | None) -> ChordRow:
        """The chord, made if need be; touched. A part may have come before it, and waits in it."""
        row = self._store.chords.setdefault(group_id, ChordRow())
        now = self._clock.now_ms()
        if not row.known:
            row.known = True
            row.expires_at = None if expires_in is None else now + to_ms(expires_in)
        row.touched_at = now
        return row

    def set_size(self, group_id: str, size: int, *, by: int = 0, expires_in: float | None = None) -> None:
        """See the protocol."""
        check_name(group_id, "group id")
        with self._store.changed:
            row = self._row(group_id, expires_in)
            ended = row.state is not ChordState.OPEN
            if ended and by and by == row.by:
                return
            if ended:
                row.parts = {key: one for key, one in row.parts.items() if one[0].execution > row.past}
                row.added &= set(row.parts)
            row.size, row.by, row.state, row.claim = size, by, ChordState.OPEN, None
            row.expires_at = None if expires_in is None else self._clock.now_ms() + to_ms(expires_in)

    def add(self, group_id: str, task_id: str) -> None:
        """See the protocol."""
        check_name(group_id, "group id")
        with self._store.changed:
            row = self._store.chords.setdefault(group_id, ChordRow())
            key = (task_id, -1)
            if key not in row.parts and row.state is ChordState.OPEN:
                row.parts[key] = ChordPart(task_id, -1, "", b""), self._clock.now_ms()
                row.added.add(key)

    def put(self, group_id: str, part: ChordPart, *, expires_in: float | None = None) -> Chord:
        """See the protocol."""
        check_name(group_id, "group id")
        check_name(part.task_id, "task id")
        check_payload(part.payload, f"part of chord {group_id}", self._settings.max_payload)
        with self._store.changed:
            row = self._store.chords.setdefault(group_id, ChordRow())
            if not row.known:
                self._row(group_id, expires_in)
            late = row.state is not ChordState.OPEN and part.execution <= row.past
            key = (part.task_id, part.place)
            there = row.parts.get(key)
            if not late and self._store.is_current(part) and (there is None or not there[0].status):
                row.parts[key] = replace(part), self._clock.now_ms()
            return _chord(group_id, row)

    def get(self, group_id: str) -> Chord | None:
        """See the protocol."""
        with self._store.changed:
            row = self._store.chords.get(group_id)
            return _chord(group_id, row) if row is not None and row.known else None

    def contents(self, group_id: str) -> tuple[bytes | None, bytes | None]:
        """See the protocol."""
        with self._store.changed:
            row = self._store.chords.get(group_id, ChordRow())
            return row.header, row.body

    def parts(self, group_id: str) -> list[ChordPart]:
        """See the protocol."""
        with self._store.changed:
            row = self._store.chords.get(group_id, ChordRow())
            there = [one for one in row.parts.values() if one[0].status]
        there.sort(key=lambda one: (one[0].place < 0, one[0].place, one[1], one[0].task_id))
        return [replace(part, token=0, fenced=False) for part, _ in there]

    def claim(self, group_id: str, ttl: float) -> int | None:
        """See the protocol."""
        with self._store.changed:
            row = self._store.chords.get(group_id)
            now = self._clock.now_ms()
            if row is None or row.state is not ChordState.OPEN or (row.claim and row.claimed_until > now):
                return None
            row.claim, row.claimed_until = secrets.randbits(62) | 1, now + to_ms(ttl)
            return row.claim

    def end(self, group_id: str, state: ChordState, *, claim: int | None = None, tasks: Sequence[NewTask] = ()) -> bool:
        """See the protocol."""
        with self._store.changed:
            row = self._store.chords.get(group_id)
            if row is None or not row.known or row.state is not ChordState.OPEN or claim not in (None, row.claim):
                return False
            self._enqueue(tasks)
            row.past = max((part.execution for part, _ in row.parts.values()), default=0)
            row.state, row.claim, row.touched_at = state, None, self._clock.now_ms()
            row.parts.clear()
            row.added.clear()
            return True

    def stuck(self, older: float, limit: int = 100, *, since: float | None = None) -> list[Chord]:
        """See the protocol."""
        found = []
        with self._store.changed:
            now = self._clock.now_ms()
            rows = sorted(self._store.chords.items(), key=lambda item: item[1].touched_at)
            for group_id, row in rows:
                newest = max((at for _, at in row.parts.values()), default=None)
                chord = _chord(group_id, row)
                claimed = row.claim is not None and row.claimed_until > now
                if newest is None or not row.known or not chord.complete or claimed or newest > now - to_ms(older):
                    continue
                if since is None or newest >= now - to_ms(since):
                    found.append(chord)
        return found[:limit]

    def sweep(self, limit: int = 1000) -> int:
        """See the protocol."""
        with self._store.changed:
            now = self._clock.now_ms()
            old = [
                group_id
                for group_id, row in self._store.chords.items()
                if _over(row, now) or (row.state is not ChordState.OPEN and row.touched_at <= now - to_ms(REMEMBER))
            ][:limit]
            for group_id in old:
                del self._store.chords[group_id]
            return len(old)


def _over(row: ChordRow, now: int) -> bool:
    if row.expires_at is None or row.expires_at > now:
        return False
    since = now - (row.expires_at - row.touched_at)
    return row.state is not ChordState.OPEN or all(at <= since for _, at in row.parts.values())


def _chord(group_id: str, row: ChordRow) -> Chord:
    there = sum(bool(part.status) for part, _ in row.parts.values())
    return Chord(group_id, row.state, row.size, there, len(row.added), row.body is not None)
