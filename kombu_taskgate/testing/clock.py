"""A clock that only moves when it is told to."""

from __future__ import annotations

import threading

from kombu_taskgate.core.clock import to_ms

#: 2023-11-14 22:13:20 UTC.
START_MS = 1_700_000_000_000


class FakeClock:
    """A :class:`~kombu_taskgate.core.clock.Clock` under the control of a test; safe to use from any thread.

    Args:
        start_ms: its first reading, in milliseconds since the epoch.
    """

    def __init__(self, start_ms: int = START_MS) -> None:
        self._lock = threading.Lock()
        self._now_ms = start_ms

    def now_ms(self) -> int:
        """The reading, in milliseconds since the epoch."""
        with self._lock:
            return self._now_ms

    def advance(self, seconds: float) -> int:
        """Move on by a duration (negative: back) and return the new reading in milliseconds."""
        with self._lock:
            self._now_ms += to_ms(seconds)
            return self._now_ms
