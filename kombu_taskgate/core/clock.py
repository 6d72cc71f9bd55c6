"""Time as the broker knows it.

An *instant* is an ``int``: milliseconds since 1970-01-01 UTC, by the **database's** clock. A *duration*
is a ``float`` in seconds. A caller's own clock never decides anything; local monotonic time may only make
a holder stop sooner. Tests pass a :class:`Clock`, whose reading then replaces the database's.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A replacement for the database's clock, for tests."""

    def now_ms(self) -> int:
        """The instant to use in place of the database's, in milliseconds since the epoch."""


def to_ms(seconds: float) -> int:
    """Convert a duration in seconds to whole milliseconds (rounded)."""
    return round(seconds * 1000)


#: The clock that goes on while the machine is suspended, where there is one (Linux).
_SUSPENDED_TOO: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def local_time() -> float:
    """Seconds by a local clock that is never set, and that counts the time for which the machine was suspended."""
    return time.monotonic() if _SUSPENDED_TOO is None else time.clock_gettime(_SUSPENDED_TOO)
