"""Entries and ticks as callers see them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone, tzinfo
from typing import Any

from celery.utils.time import LocalTimezone

from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.schedules import Entry, Source, Tick

from . import texts
from .due import next_due
from .plan import Planned, code_entries, of_row

logger = logging.getLogger("celery_ext.beat")


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """One entry of a schedule. Its instants are in its own time zone.

    Args:
        name: unique within the schedule.
        source: ``code`` (``beat_schedule``), ``added`` at run time, or ``foreign``: of another scheduler.
        task: name of the task.
        schedule: its times as text.
        timezone: name of the zone in which they are meant.
        args, kwargs, options: of ``apply_async``; of an entry that is not ``added`` they are empty.
        enabled: whether it is sent.
        no_overlap: no tick while the last one's task has not ended.
        one_off: disabled by its first tick.
        starting_deadline: seconds after a due time within which a missed tick is caught up; ``None``: the app's.
        next_due: when it is due next, or has been due since; ``None``: never, or it is not known here.
        last_run_at, last_due_at: when it was last sent, and for which due time.
        total_run_count: how often it was sent.
        requested_at: somebody wants it sent now, and it has not been yet.
        created_at, changed_at: of its definition; ``None``: not known.
        problem: why it can't be sent; ``None``: it can.
    """

    name: str
    source: str
    task: str
    schedule: str
    timezone: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    enabled: bool = True
    no_overlap: bool = False
    one_off: bool = False
    starting_deadline: float | None = None
    next_due: datetime | None = None
    last_run_at: datetime | None = None
    last_due_at: datetime | None = None
    total_run_count: int = 0
    requested_at: datetime | None = None
    created_at: datetime | None = None
    changed_at: datetime | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ScheduleTick:
    """What became of one due time of one entry. Instants are in UTC.

    Args:
        name: of the entry.
        due_at: the due time.
        state: ``sent``; ``skipped``: the last one's task still ran, or its message could not be made; ``sending``: it
            is being published to a broker that is elsewhere, or nobody knows whether it was.
        task_id: Celery's id of the task that it became.
        sent_at: when.
        term: number of the term under which.
    """

    name: str
    due_at: datetime | None
    state: str
    task_id: str
    sent_at: datetime | None
    term: int


class Listing:
    """Makes what callers see of what the store has.

    Args:
        app: the Celery app.
        now_ms: from when an entry counts that no leader has seen yet.
    """

    def __init__(self, app: Any, now_ms: int) -> None:
        self._app = app
        self._now_ms = now_ms
        self._code: Mapping[str, Planned] | None = None

    def entry(self, row: Entry) -> ScheduleEntry:
        """An entry; whatever may be wrong with it is told in ``problem``."""
        planned, problem = self._planned(row)
        zone = planned.zone if planned is not None else timezone.utc
        due = None
        if planned is not None and row.enabled:
            base = self._now_ms if row.base_at is None else row.base_at
            try:
                due = next_due(planned.schedule, base, zone)
            except Exception as error:  # noqa: BLE001  # a user's own schedule may raise anything
                problem = f"its next due time can't be told: {type(error).__name__}: {error}"
        added = planned is not None and row.source is Source.ADDED
        return ScheduleEntry(
            name=row.name,
            source=row.source.value,
            task=row.task,
            schedule=row.schedule,
            timezone=row.timezone or ("" if planned is None else texts.zone_name(zone) or "local"),
            args=tuple(planned.args) if planned is not None and added else (),
            kwargs=planned.kwargs if planned is not None and added else {},
            options=planned.options if planned is not None and added else {},
            enabled=row.enabled,
            no_overlap=row.no_overlap,
            one_off=row.one_off,
            starting_deadline=row.starting_deadline,
            next_due=aware(due, zone),
            last_run_at=aware(row.last_run_at, zone),
            last_due_at=aware(row.last_due_at, zone),
            total_run_count=row.total_run_count,
            requested_at=aware(row.requested_at, zone),
            created_at=aware(row.created_at or None, zone),
            changed_at=aware(row.changed_at or None, zone),
            problem=problem,
        )

    def _planned(self, row: Entry) -> tuple[Planned | None, str | None]:
        if row.source is Source.FOREIGN:
            return None, None
        try:
            if row.source is Source.CODE:
                found = self._of_code().get(row.name)
                # The code that is here may be another version's than the leader's.
                if found is not None and found.row.schedule == row.schedule:
                    return found, None
            return of_row(self._app, row), None
        except ConfigError as error:
            return None, str(error) if row.source is Source.ADDED else None

    def _of_code(self) -> Mapping[str, Planned]:
        if self._code is None:
            try:
                self._code = code_entries(self._app)
            except ConfigError as error:
                logger.debug("beat_schedule can't be used: %s", error)
                self._code = {}
        return self._code


def tick(row: Tick) -> ScheduleTick:
    """A tick."""
    due_at, sent_at = aware(row.due_at, timezone.utc), aware(row.sent_at, timezone.utc)
    return ScheduleTick(row.name, due_at, row.state.value, row.task_id, sent_at, row.term)


def aware(instant: int | None, zone: tzinfo) -> datetime | None:
    """An instant (ms) in a zone; ``None`` for one that no calendar has."""
    if instant is None:
        return None
    try:
        found = datetime.fromtimestamp(instant / 1000, timezone.utc)
        # Celery's class for the machine's zone is wrong on days of change.
        return found.astimezone() if isinstance(zone, LocalTimezone) else found.astimezone(zone)
    except (OverflowError, ValueError, OSError):
        return None
