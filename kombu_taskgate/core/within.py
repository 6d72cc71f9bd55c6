"""Waiting for something for a limited time only."""

from __future__ import annotations

import threading
from collections.abc import Callable


def within(seconds: float, work: Callable[[], object], name: str) -> bool:
    """Run something that may get no answer; returns whether it ended in time. Later it ends behind the caller's back.

    Args:
        seconds: how long it is waited for.
        work: what; what it raises in time is raised here.
        name: of the thread that runs it.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # the caller gets it
            raised.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # The interpreter is ending and starts no more threads.
        run()
    else:
        thread.join(seconds)
        if thread.is_alive():
            return False
    if raised:
        raise raised[0]
    return True
