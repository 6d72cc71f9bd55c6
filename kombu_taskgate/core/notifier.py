"""Tells other processes that queues have work, seldom enough that it costs nothing.

A notification belongs to the transaction that makes the work, so it is sent exactly when the work is there. But the
database sends them one transaction after the other (PostgreSQL manual, NOTIFY: commits that notify take turns), so
a queue that was announced a moment ago is not announced again: who heard of it is still looking (see
:data:`.watch.LOOK_ON`). How long that moment is depends on how long the announcing transaction took: no process spends
more than a fixed part of its time on announcing. So where few publish, nearly everything is announced, and where many
wait for each other at their commits, hardly anything is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from .watch import ANNOUNCE_EVERY, LOOK_ON

#: PostgreSQL takes payloads of less than 8000 bytes.
LONGEST = 7900
_MOST = 1000
#: How many times as long as an announcement took nothing is announced after it.
SILENCE = 5.0
#: Shortest time in seconds between two announcements of a queue.
ANNOUNCE_MIN = 0.004
#: Seconds' worth of announcements of results by their task_id that may be made at once; each is taken to have cost
#: SILENCE times as long as it took, and ANNOUNCE_MIN at the least.
CREDIT = 0.25
#: Task ids in one announcement, so many that the longest fit.
NAMED_AT_ONCE = 25

#: What a notification says, by its first character: queues have work, bindings have changed, somebody tests.
WORK, BINDINGS, RESULTS, TEST = "q", "b", "r", "?"


class Notifier:
    """Which queues are announced now. Safe to use from any thread, and after a fork: it has no lock."""

    def __init__(self) -> None:
        #: By queue: when it was announced, and until when it need not be again.
        self._sent: dict[str, tuple[float, float]] = {}

    def due(self, queues: Iterable[str]) -> list[str]:
        """Those that were not announced a moment ago."""
        now, sent = time.monotonic(), self._sent
        return [queue for queue in queues if queue not in sent or now >= sent[queue][1]]

    def overdue(self, queues: Iterable[str]) -> list[str]:
        """Those whose last announcement is so long ago that whoever heard of it may soon stop looking."""
        now, sent = time.monotonic(), self._sent
        return [queue for queue in queues if queue not in sent or now - sent[queue][0] >= ANNOUNCE_EVERY]

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
            self._sent = {queue: sent for queue, sent in list(self._sent.items()) if now < sent[1]}
        self._sent.update(dict.fromkeys(queues, (now, now + min(ANNOUNCE_EVERY, cost_of(now - since)))))


def cost_of(seconds: float) -> float:
    """For how long in seconds nothing more is announced after an announcement that took so long."""
    return max(ANNOUNCE_MIN, SILENCE * seconds)


class ResultNotifier:
    """Whether a result is announced by name, as one of many, or not at all. Safe to use from any thread.

    A lone result is announced with its task_id, so that only those who wait for it look. A process that stores very
    many announces, every :data:`.watch.ANNOUNCE_EVERY` seconds, that there are some; whoever hears that, or has just
    begun to wait, goes on looking for :data:`.watch.LOOK_ON` seconds.
    """

    def __init__(self) -> None:
        self._left = CREDIT
        self._at = time.monotonic()
        self._cost = ANNOUNCE_MIN
        self._flood_at = 0.0

    def text(self, task_id: str) -> str | None:
        """What to say of a result that is stored now; ``None``: nothing."""
        now = time.monotonic()
        # Two threads that do this at once may name one more or one less: no harm.
        self._left = min(CREDIT, self._left + now - self._at)
        self._at = now
        if self._left >= self._cost:
            self._left -= self._cost
            return text_of(RESULTS, [task_id])
        if now - self._flood_at >= ANNOUNCE_EVERY:
            self._flood_at = now
            return RESULTS
        return None

    def took(self, seconds: float) -> None:
        """Note how long it took to store a result that was announced by name."""
        self._cost = min(CREDIT, cost_of(seconds))


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
