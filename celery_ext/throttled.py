"""What a task raises to run later because something is at its limit now."""

from __future__ import annotations

import math
from typing import Any

from celery.exceptions import Ignore, Reject

#: Longest time in seconds. What is longer is mostly an instant, or milliseconds.
LONGEST = 366 * 86400.0


class Throttled(Reject, Ignore):
    """Raised in a task: "not now". Its message comes back later; that is no failure, and uses up none of its retries.

    It is a :class:`celery.exceptions.Reject` with ``requeue``, which Celery lets through, and an ``Ignore``, since
    ``autoretry_for`` would take it for a failure otherwise. With a broker that is not taskgate it is no more than that.

    Args:
        retry_after: seconds until it may run again, 0 to a year.
        reason: why, in a few words; shown in the log, and kept if it becomes a dead letter.

    Raises:
        TypeError, ValueError: ``retry_after`` is no such number.
    """

    def __init__(self, retry_after: float, reason: str | None = None) -> None:
        if isinstance(retry_after, bool) or not isinstance(retry_after, (int, float)):
            raise TypeError(f"Throttled needs retry_after as a number of seconds, not {retry_after!r}")
        if not (math.isfinite(retry_after) and 0 <= retry_after <= LONGEST):
            raise ValueError(
                f"Throttled needs a retry_after of 0 to {LONGEST:.0f} seconds, not {retry_after!r}: it is the time to "
                "wait, not an instant"
            )
        super().__init__(reason, requeue=True)
        self.retry_after = float(retry_after)

    def __str__(self) -> str:
        return f"throttled for {self.retry_after:g} s" + ("" if self.reason is None else f": {self.reason}")

    __repr__ = __str__

    def __reduce__(self) -> tuple[Any, ...]:
        # Pools of processes send it through a pipe; whatever arguments a subclass takes, it need not take them again.
        return _again, (type(self), self.args, self.__dict__.copy())


def _again(kind: type[Throttled], args: tuple[Any, ...], state: dict[str, Any]) -> Throttled:
    made = kind.__new__(kind)
    made.args = args
    made.__dict__.update(state)
    return made
