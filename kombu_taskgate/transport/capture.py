"""Collecting what is published instead of storing it, so that somebody can store it in a transaction of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ..core.model import NewTask
from ..core.settings import BrokerSettings


@dataclass(slots=True)
class Captured:
    """What is published to one broker in a block."""

    settings: BrokerSettings
    tasks: list[NewTask] = field(default_factory=list)


_captured: ContextVar[Captured | None] = ContextVar("taskgate_captured", default=None)


@contextmanager
def capturing(settings: BrokerSettings) -> Iterator[Captured]:
    """Collect what this thread (or greenlet) publishes to the broker of these settings in the block.

    Nothing is stored, and routes are looked up as ever. What is published to other brokers is published.
    """
    captured = Captured(settings)
    reset = _captured.set(captured)
    try:
        yield captured
    finally:
        _captured.reset(reset)


def capture(settings: BrokerSettings, tasks: Sequence[NewTask]) -> bool:
    """Whether the executions were collected, so that they are not to be stored."""
    captured = _captured.get()
    if captured is None or captured.settings != settings:
        return False
    captured.tasks.extend(tasks)
    return True
