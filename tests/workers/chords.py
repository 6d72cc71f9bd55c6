"""Tasks for chords, and a result backend that takes its worker along at a place that a test names.

A worker imports this where its setting ``imports`` says so. The place is what the file TASKGATE_TEST_KILL says; whoever
removes that file dies.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from celery import Task, chord, group, shared_task

from celery_ext.backend import TaskgateBackend
from celery_ext.lease import lease_of
from kombu_taskgate.core.chords import Chord
from tests.workers.app import note

#: Where a worker can be killed.
BEFORE_THE_LAST_PART, BEFORE_THE_BODY, AFTER_THE_BODY = "before the last part", "before the body", "after the body"
BEFORE_THE_COMMIT, AFTER_A_PART = "before the commit", "after a part"
KILL = Path(os.environ.get("TASKGATE_TEST_KILL", "none"))


def armed() -> str | None:
    """The place at which somebody is to die."""
    try:
        return KILL.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def die_at(place: str) -> None:
    """End the whole worker if this is the place."""
    if armed() != place:
        return
    try:
        KILL.unlink()
    except FileNotFoundError:
        return
    os.killpg(0, signal.SIGKILL)


class Victim(TaskgateBackend):
    """Dies before or after what it does for a chord."""

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        if request.group and armed() == BEFORE_THE_LAST_PART:
            self._die_last(self.key_of(request.group), request.group_index)
        super().on_chord_part_return(request, state, result, **kwargs)
        die_at(AFTER_A_PART)

    def _die_last(self, key: str, place: int) -> None:
        """The last of the header waits for all others, and dies."""
        known = self.broker.chords.get(key)
        while known is not None and known.size == place + 1:
            if known.parts == place:
                die_at(BEFORE_THE_LAST_PART)
            time.sleep(0.01)
            known = self.broker.chords.get(key)

    def _end_chord(self, chord: Chord, body: Any) -> None:
        die_at(BEFORE_THE_BODY)
        thread = threading.get_ident()

        def fault(point: str) -> None:
            if point == "before_commit" and threading.get_ident() == thread:
                die_at(BEFORE_THE_COMMIT)

        self.broker.database.fault = fault  # type: ignore[attr-defined]  # an SqlBroker
        super()._end_chord(chord, body)
        die_at(AFTER_THE_BODY)


@shared_task(bind=True)
def part(self: Task, value: Any) -> Any:
    """A task of a header."""
    note("part", self, value=value)
    return value


@shared_task(bind=True, ignore_result=True)
def silent(self: Task, value: Any) -> Any:
    """The same, whose result nobody asks for."""
    return value


@shared_task
def quick(value: Any) -> Any:
    """The same, without a journal."""
    return value


@shared_task(bind=True)
def fails(self: Task, value: Any) -> Any:
    """One that fails."""
    raise ValueError(f"no {value}")


@shared_task(bind=True, max_retries=5)
def retries(self: Task, value: Any, times: int = 2) -> Any:
    """One that succeeds later."""
    if self.request.retries < times:
        raise self.retry(countdown=0.2)
    return value


@shared_task(bind=True)
def replaced(self: Task, value: Any) -> Any:
    """One that another one takes the place of."""
    raise self.replace(part.s(value))


@shared_task(bind=True)
def becomes_group(self: Task, values: list[Any]) -> Any:
    """One that a group takes the place of."""
    raise self.replace(group(part.s(value) for value in values))


@shared_task(bind=True)
def invites(self: Task, value: Any) -> Any:
    """One that adds another one to the header."""
    self.add_to_chord(part.s(f"guest of {value}"))
    return value


@shared_task(bind=True)
def body(self: Task, values: Any) -> Any:
    """What a chord ends in."""
    run = lease_of(self.request).execution
    note("body", self, execution=run, values=len(values) if isinstance(values, list) and len(values) > 100 else values)
    return values


@shared_task(bind=True)
def told(self: Task, task_id: str) -> None:
    """An error callback."""
    note("told", self, of=task_id)


@shared_task(bind=True)
def parent(self: Task, header: int, kill: bool = False) -> Any:
    """Publish a chord, and the first time die after that."""
    note("parent", self)
    published = chord((part.s(number) for number in range(header)), body.s())()
    if kill and not self.request.delivery_info["redelivered"]:
        os.killpg(0, signal.SIGKILL)
    return published.id


@shared_task(bind=True)
def publishes(self: Task, signature: Any, kill: bool = False) -> None:
    """Publish a chord whose ids are in the message, and the first time die after that."""
    note("parent", self)
    self.app.signature(signature).apply_async()
    if kill and not self.request.delivery_info["redelivered"]:
        os.killpg(0, signal.SIGKILL)
