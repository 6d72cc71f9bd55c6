"""Tells other processes that queues have work, seldom enough that it costs nothing.

A notification belongs to the transaction that makes the work, so it is sent exactly when the work is there. But the
database sends them one transaction after the other (PostgreSQL manual, NOTIFY: commits that notify take turns), so
a queue that was announced a moment ago is not announced again: who heard of it is still looking (see
:data:`.watch.LOOK_ON`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable

from .watch import ANNOUNCE_EVERY, LOOK_ON

#: PostgreSQL takes payloads of less than 8000 bytes.
LONGEST = 7900
_MOST = 1000

#: What a notification says, by its first character: queues have work, bindings have changed, somebody tests.
WORK, BINDINGS, TEST = "q", "b", "?"


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


def work_in(queues: Collection[str]) -> str:
    """The text that announces queues; too many of them to name: any queue."""
    text = WORK + json.dumps(sorted(queues))
    return text if len(text) <= LONGEST else WORK


def queues_of(text: str) -> list[str] | None:
    """What :func:`work_in` said; ``None``: any queue."""
    try:
        return [str(queue) for queue in json.loads(text[1:])]
    except ValueError:
        return None
