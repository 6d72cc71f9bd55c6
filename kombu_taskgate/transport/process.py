"""What must happen to open connections when the process forks or ends."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol


class Open(Protocol):
    """Something open that a fork and the end of the process concern."""

    def after_fork(self) -> None:
        """In the child: forget what is the parent's, without touching it."""

    def at_exit(self) -> None:
        """Settle what can still be settled."""


class _Watched:
    """What is open, and the lock that guards the set: it grows in one thread while another goes through it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.things: weakref.WeakSet[Open] = weakref.WeakSet()


_watched = _Watched()


def watch(thing: Open) -> None:
    """Tell it of forks and of the end of the process, as long as it lives."""
    with _watched.lock:
        _watched.things.add(thing)


def watched() -> list[Open]:
    """Everything that is watched now."""
    with _watched.lock:
        return list(_watched.things)


def _after_fork() -> None:
    # The lock may have been held by a thread that is not here.
    _watched.lock = threading.Lock()
    for thing in watched():
        thing.after_fork()
    # The end of the child is not the end of what is the parent's.
    _watched.things.clear()


def _at_exit() -> None:
    for thing in watched():
        thing.at_exit()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
