"""Those in this process who want to be told of something."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection

from .watch import Wake

_all: weakref.WeakSet[Watchers] = weakref.WeakSet()


class Watchers:
    """A list of callbacks; safe to use from any thread. After a fork nobody of the parent's is told here."""

    def __init__(self) -> None:
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._wakes: list[Wake] = []

    def add(self, wake: Wake) -> Callable[[], None]:
        """Tell somebody from now on; returns what ends that. Idempotent."""
        with self._lock:
            self._wakes.append(wake)

        def leave() -> None:
            with self._lock:
                if wake in self._wakes:
                    self._wakes.remove(wake)

        return leave

    def wake(self, names: Collection[str] | None) -> None:
        """Tell everybody."""
        # The usual case: nobody watches.
        if not self._wakes:
            return
        with self._lock:
            wakes = list(self._wakes)
        for wake in wakes:
            wake(names)


def _after_fork() -> None:
    for watchers in list(_all):
        watchers._reset()


os.register_at_fork(after_in_child=_after_fork)
