"""Tells other processes that queues have work, seldom enough that it costs nothing.

A notification belongs to the transaction that makes the work, so it is sent exactly when the work is there. But the
database sends them one transaction after the other (PostgreSQL manual, NOTIFY: commits that notify take turns), so
a queue that was announced a moment ago is not announced again: who heard of it is still looking (see
:data:`.watch.LOOK_ON`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from .watch import ANNOUNCE_EVERY, LOOK_ON

#: PostgreSQL takes payloads of less than 8000 bytes.
LONGEST = 7900
_MOST = 1000
#: Results that a process announces by their task_id, per second and at once.
MOST_NAMED = 50
#: Task ids in one announcement, so many that the longest fit.
NAMED_AT_ONCE = 25

#: What a notification says, by its first character: queues have work, bindings have changed, somebody tests.
WORK, BINDINGS, RESULTS, TEST = "q", "b", "r", "?"


class Notifier:
    """Which queues are announced now. Safe to use from any thread, and after a fork: it has no lock."""

    def __init__(self) -> None:
        self._sent: dict[str, float] = {}

    def due(self, queues: Iterable[str]) -> list[str]:
        """Those that were not announced a moment ago."""
        now, sent = time.monotonic(), self._sent
        return [queue for queue in queues if now - sent.get(queue, -ANNOUNCE_EVERY) >= ANNOUNCE_EVERY]

    def sent(self, queues: Collection[str], since: float) -> None:
        """Note that they are announced: the transaction that did is committed.

        Args:
            queues: their names.
            since: monotonic time before its commit. When that is long ago, whoever heard may have stopped looking
                (this process may have been frozen right after the commit), and the next to come announces again.
        """
        now = time.monotonic()
        if now - since > LOOK_ON / 2:
            return
        if len(self._sent) > _MOST:
            # What other threads note meanwhile may be forgotten: it is announced once more than needed.
            self._sent = {queue: at for queue, at in list(self._sent.items()) if now - at < ANNOUNCE_EVERY}
        self._sent.update(dict.fromkeys(queues, now))


class ResultNotifier:
    """Whether a result is announced by name, as one of many, or not at all. Safe to use from any thread.

    A lone result is announced with its task_id, so that only those who wait for it look. A process that stores very
    many announces, every :data:`.watch.ANNOUNCE_EVERY` seconds, that there are some; whoever hears that, or has just
    begun to wait, goes on looking for :data:`.watch.LOOK_ON` seconds.
    """

    def __init__(self) -> None:
        self._left = float(MOST_NAMED)
        self._at = time.monotonic()
        self._flood_at = 0.0

    def text(self, task_id: str) -> str | None:
        """What to say of a result that is stored now; ``None``: nothing."""
        now = time.monotonic()
        # Two threads that do this at once may name one more or one less: no harm.
        self._left = min(float(MOST_NAMED), self._left + (now - self._at) * MOST_NAMED)
        self._at = now
        if self._left >= 1.0:
            self._left -= 1.0
            return text_of(RESULTS, [task_id])
        if now - self._flood_at >= ANNOUNCE_EVERY:
            self._flood_at = now
            return RESULTS
        return None


def text_of(kind: str, names: Collection[str]) -> str:
    """The text that announces queues or task ids; too many of them to name: any."""
    text = kind + json.dumps(sorted(names))
    return text if len(text) <= LONGEST else kind


def names_in(text: str) -> list[str] | None:
    """What :func:`text_of` said; ``None``: any."""
    try:
        return [str(name) for name in json.loads(text[1:])]
    except ValueError:
        return None


def work_in(queues: Collection[str]) -> str:
    """The text that announces queues."""
    return text_of(WORK, queues)


def listed(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Names in parts that :func:`text_of` can name."""
    for start in range(0, len(names), NAMED_AT_ONCE):
        yield names[start : start + NAMED_AT_ONCE]
