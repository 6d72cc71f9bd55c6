"""What must happen to open connections when the process forks or ends."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Open(Protocol):
    """Something open that a fork and the end of the process concern."""

    def after_fork(self) -> None:
        """In the child: forget what is the parent's, without touching it."""

    def at_exit(self) -> None:
        """Settle what can still be settled."""


_open: weakref.WeakSet[Open] = weakref.WeakSet()


def watch(thing: Open) -> None:
    """Tell it of forks and of the end of the process, as long as it lives."""
    _open.add(thing)


def watched() -> list[Open]:
    """Everything that is watched now."""
    return list(_open)


def _after_fork() -> None:
    for thing in watched():
        thing.after_fork()
    # The end of the child is not the end of what is the parent's.
    _open.clear()


def _at_exit() -> None:
    for thing in watched():
        thing.at_exit()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
