"""What a worker does for the result backend beside its work: end chords whose worker died, delete what has expired.

A worker whose broker is taskgate has a keeper, which does this too. With another broker the worker gets one here.
"""

from __future__ import annotations

from typing import Any

from celery import signals

from kombu_taskgate.transport.transport import Transport

from ..keeper import Keeper

#: Seconds between two looks for chords that nobody ends, and for what has expired.
CHORDS_EVERY, SWEEP_EVERY = 30.0, 300.0
#: Seconds after which a sweep that was not through goes on: the database has other things to do as well.
GO_ON_AFTER = 1.0

_keepers: list[Keeper] = []


def look_after(backend: Any, keeper: Keeper) -> None:
    """Add the work for a result backend to a keeper; nothing where it is another kind of backend."""
    tend_chords, sweep = getattr(backend, "tend_chords", None), getattr(backend, "sweep", None)
    if tend_chords is None or sweep is None:
        return

    def chords(stopping: object) -> None:
        tend_chords()

    def expired(stopping: object) -> float | None:
        return GO_ON_AFTER if sweep() else None

    keeper.add("ending stuck chords", chords, CHORDS_EVERY)
    keeper.add("deleting expired results", expired, SWEEP_EVERY)


def install() -> None:
    """Let workers of this process look after their results, whatever their broker is. Any number of times."""
    signals.worker_ready.connect(_on_ready, weak=False, dispatch_uid="taskgate-results")
    signals.worker_shutdown.connect(_on_shutdown, weak=False, dispatch_uid="taskgate-results")


def _on_ready(sender: Any, **_: Any) -> None:
    """The worker's consumer runs."""
    if isinstance(sender.connection.transport, Transport):
        return  # its step has a keeper
    keeper = Keeper()
    look_after(sender.app.backend, keeper)
    keeper.start()
    _keepers.append(keeper)


def _on_shutdown(**_: Any) -> None:
    while _keepers:
        _keepers.pop().stop()
