"""How a consumer learns of work that other processes have made.

Every store can be asked ("is there anything?"), and the only question is how often that is worth while. Where the
database can tell by itself, seldom: only in case that a word of it was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

#: Called with the queues that have new work; ``None``: any may have, look now.
Wake = Callable[[Collection[str] | None], None]

#: A queue that was announced is not announced again for so many seconds at the most. Whoever hears of work goes on
#: looking for LOOK_ON seconds, so what comes in between is found without being announced, also when its commit takes a
#: while.
ANNOUNCE_EVERY = 0.05
LOOK_ON = 0.5


class Watch(Protocol):
    """One consumer's subscription, see :meth:`.broker.Broker.watch`."""

    @property
    def longest_pause(self) -> float:
        """Longest time in seconds between two looks for work that makes sense now."""

    @property
    def live(self) -> bool:
        """Whether the store tells of new work, and of changed bindings, by itself at this time."""

    def doubt(self) -> None:
        """Say that work was found which nobody had told of; the connection that should have is put to the test."""

    def close(self) -> None:
        """End it. Idempotent."""


class Polling:
    """Of a store that tells nothing by itself.

    Args:
        pause: longest time in seconds between two looks.
    """

    live = False

    def __init__(self, pause: float) -> None:
        self.longest_pause = pause

    def doubt(self) -> None:
        """Nobody was expected to tell."""

    def close(self) -> None:
        """There is nothing to end."""
