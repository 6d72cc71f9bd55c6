"""Faults at planned places, for the hook that a store offers (``broker.database.fault``)."""

from __future__ import annotations

import threading
from collections.abc import Callable


class FailAt:
    """A hook that raises when a named point is passed, and counts how often each point was passed.

    Args:
        point: where to raise, e.g. ``before_commit``.
        error: makes the exception to raise; an exception class will do.
        times: how often it raises; afterwards the point is passed unharmed.
        skip: how many passings it lets through first.
    """

    def __init__(self, point: str, error: Callable[[], Exception], *, times: int = 1, skip: int = 0) -> None:
        self.point = point
        self.passed: dict[str, int] = {}
        self.raised = 0
        self._error = error
        self._times = times
        self._skip = skip
        self._lock = threading.Lock()

    def __call__(self, point: str) -> None:
        """Pass a point."""
        with self._lock:
            self.passed[point] = self.passed.get(point, 0) + 1
            if point != self.point or self.passed[point] <= self._skip or self.raised >= self._times:
                return
            self.raised += 1
        raise self._error()
