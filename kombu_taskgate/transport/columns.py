"""What the broker stores in columns beside the message, so that it can be asked for and acted upon."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timezone, tzinfo
from typing import Any

from ..core.model import NewTask
from .codec import Envelope
from .depends import DEPENDS_ON, IGNORE_FAILURE, task_ids
from .texts import id_text, short_text
from .times import parse_instant, with_zone
from .unique import continues, key_of

MIN_PRIORITY = 0
MAX_PRIORITY = 9


@dataclass(slots=True, frozen=True)
class Columns:
    """Columns of one message, whatever queue it goes to."""

    type: str
    task_id: str | None
    root_id: str | None
    parent_id: str | None
    group_id: str | None
    priority: int
    run_at: int | None
    expires_at: int | None
    #: Seconds from the database's now: a time to live means nothing on the publisher's clock.
    expires_in: float | None
    unique_key: str | None = None
    take_over: bool = False
    depends_on: tuple[str, ...] = ()
    #: A parent that has failed counts as done.
    ignore_failure: bool = False


def columns_of(envelope: Envelope, naive: tzinfo = timezone.utc) -> Columns:
    """Read the columns from a message's headers and properties.

    What can't be read is left to whoever consumes the message: it has the headers too, and knows how to
    reject them.

    Args:
        envelope: the message; its ``priority`` property is brought into 0..9, and an ``eta`` or ``expires`` that
            names no zone gets one, so that whoever consumes it reads the same instant. What a task depends on is taken
            out of its properties: it is the broker's business alone.
        naive: that zone.

    Raises:
        ConfigError: the unique key can't be right; see :func:`.unique.key_of`.
        ConfigError: it depends on something that is no task.
    """
    headers, properties = envelope.headers, envelope.properties
    priority = clamp_priority(properties.get("priority"))
    properties["priority"] = priority
    # Other messages have headers of these names too, with other meanings: remote control has its own "expires".
    is_task = headers.get("task") is not None
    if is_task:
        headers.update((name, with_zone(headers[name], naive)) for name in ("eta", "expires") if headers.get(name))
    parents = task_ids(properties.pop(DEPENDS_ON, None)) if is_task else []
    ignore_failure = bool(properties.pop(IGNORE_FAILURE, False)) if is_task else False
    return Columns(
        type=short_text(headers.get("task")) or "",
        task_id=id_text(headers.get("id")) or id_text(properties.get("correlation_id")),
        root_id=id_text(headers.get("root_id")),
        parent_id=id_text(headers.get("parent_id")),
        group_id=id_text(headers.get("group")),
        priority=priority,
        run_at=parse_instant(headers.get("eta"), naive) if is_task else None,
        expires_at=parse_instant(headers.get("expires"), naive) if is_task else None,
        expires_in=_seconds(properties.get("expiration")),
        unique_key=(unique_key := key_of(properties)),
        take_over=unique_key is not None and continues(headers),
        depends_on=tuple(id_text(name) or "" for name in parents),
        ignore_failure=ignore_failure,
    )


def new_task(queue: str, payload: bytes, columns: Columns, message_ttl: float | None) -> NewTask:
    """The execution to store in one queue; ``message_ttl`` (seconds) is the queue's own."""
    return NewTask(
        queue=queue,
        payload=payload,
        type=columns.type,
        task_id=columns.task_id,
        root_id=columns.root_id,
        parent_task_id=columns.parent_id,
        group_id=columns.group_id,
        priority=columns.priority,
        run_at=columns.run_at,
        expires_at=columns.expires_at,
        expires_in=_shortest(columns.expires_in, message_ttl),
        unique_key=columns.unique_key,
        take_over=columns.take_over,
        depends_on=columns.depends_on,
        fail_fast=not columns.ignore_failure,
    )


def clamp_priority(value: Any) -> int:
    """The nearest priority of 0..9; the lowest for what is no number."""
    try:
        return max(MIN_PRIORITY, min(MAX_PRIORITY, int(value)))
    except (TypeError, ValueError, OverflowError):
        return MIN_PRIORITY


def _seconds(value: Any) -> float | None:
    """AMQP writes ``expiration`` as text, in milliseconds."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number / 1000 if abs(number) < 1e15 else None


def _shortest(*seconds: float | None) -> float | None:
    return min((number for number in seconds if number is not None), default=None)
