"""Doing several things at the same moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

#: Seconds after which a test gives up waiting. Nothing is expected to take long: a busy machine may.
DEADLINE = 60.0


def together(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each function in a thread of its own, all let go at once; returns what each returned or raised.

    Raises:
        TimeoutError: one of them did not come back.
    """
    barrier = threading.Barrier(len(functions))
    outcomes: list[Any] = [None] * len(functions)
    done = [False] * len(functions)

    def run(place: int) -> None:
        try:
            barrier.wait(DEADLINE)
            outcomes[place] = functions[place]()
        except BaseException as error:  # noqa: BLE001  # the caller looks at it
            outcomes[place] = error
        done[place] = True

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    give_up = time.monotonic() + DEADLINE
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))
    if not all(done):
        raise TimeoutError(f"{done.count(False)} of {len(functions)} threads did not come back in {DEADLINE:g} s")
    return outcomes


def errors_of(outcomes: Sequence[object]) -> list[BaseException]:
    """Those outcomes of :func:`together` that are exceptions."""
    return [outcome for outcome in outcomes if isinstance(outcome, BaseException)]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds.

    Raises:
        TimeoutError: it did not come true in time; names ``what`` was waited for.
    """
    give_up = time.monotonic() + DEADLINE
    while True:
        # Looked at once more when the time is over: this process may have been paused since the last look.
        late = time.monotonic() > give_up
        if condition():
            return
        if late:
            raise TimeoutError(f"waited {DEADLINE:g} s in vain: {what}")
        time.sleep(0.005)
