"""What a leader knows of one entry: its message, its times, and how far it has come."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta, tzinfo
from typing import Any

from celery.beat import ScheduleEntry, Scheduler

from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.schedules import Entry, Source
from kombu_taskgate.core.settings import check_name

from . import definitions, texts

logger = logging.getLogger("celery_ext.beat")

#: What an entry in ``beat_schedule`` may say beyond what Celery knows.
OWN = ("timezone", "no_overlap", "one_off", "starting_deadline")


@dataclass(slots=True)
class Planned:
    """An entry, ready to be sent.

    Args:
        row: what the store knows of it.
        schedule: Celery's schedule object.
        zone: the time zone in which its times are meant.
        args, kwargs, options: of ``apply_async``; values may be Celery's BeatLazyFunc.
    """

    row: Entry
    schedule: Any
    zone: tzinfo
    args: Any = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def code_entries(app: Any) -> dict[str, Planned]:
    """The entries of the app's ``beat_schedule``, and those that Celery adds by itself.

    Raises:
        ConfigError: one of them can't be right.
    """
    own: dict[str, dict[str, Any]] = {}
    celerys: dict[str, Any] = {}
    schedule = app.conf.beat_schedule or {}
    if not isinstance(schedule, Mapping):
        raise ConfigError(f"beat_schedule must be a dictionary of entries by name, not {schedule!r}")
    for name, given in schedule.items():
        check_name(name, "beat_schedule entry")
        if not isinstance(given, (Mapping, ScheduleEntry)):
            raise ConfigError(f"the entry {name!r} of beat_schedule must be a dictionary, not {given!r}")
        values = dict(given)
        own[name] = {key: values.pop(key) for key in OWN if key in values}
        celerys[name] = values
    found: dict[str, Planned] = {}
    probe = Scheduler(app, lazy=True)
    for name, values in celerys.items():
        values.pop("app", None)
        values.pop("name", None)
        try:
            found[name] = _of_code(app, _entry(app, name, values), own[name])
        except Exception as error:  # a schedule may be of any class, and raise whatever that does
            raise ConfigError(f"the entry {name!r} of beat_schedule can't be used: {error}") from error
    probe.schedule = dict.fromkeys(found)
    probe.install_default_entries(probe.schedule)
    for name, entry in probe.schedule.items():
        if entry is not None and name not in found:
            found[name] = _of_code(app, entry, {})
    return found


def _entry(app: Any, name: str, values: Mapping[str, Any]) -> ScheduleEntry:
    """Celery's entry of what ``beat_schedule`` says."""
    times = values.get("schedule")
    if times is None or not isinstance(values.get("task"), str):
        raise ConfigError("it needs a task and a schedule")
    if not isinstance(times, (int, float, timedelta)) and not hasattr(times, "is_due"):
        raise ConfigError(
            f"its schedule must be a number of seconds, a timedelta, or one of Celery's schedules, not {times!r}"
        )
    return ScheduleEntry(name=name, app=app, **values)


def _of_code(app: Any, entry: ScheduleEntry, own: Mapping[str, Any]) -> Planned:
    timezone = definitions.zone_of(None, own.get("timezone"))
    options = definitions.checked_kwargs("options", entry.options or None)
    definitions.checked_headers(options)
    no_overlap = _flag(own, "no_overlap")
    definitions.checked_keys(options, no_overlap=no_overlap)
    row = Entry(
        name=entry.name,
        source=Source.CODE,
        task=entry.task,
        schedule=texts.show(entry.schedule),
        timezone=timezone,
        no_overlap=no_overlap,
        one_off=_flag(own, "one_off"),
        starting_deadline=definitions.seconds("starting_deadline", own.get("starting_deadline")),
    )
    zone = texts.zone(timezone) if timezone else zone_of(entry.schedule, app)
    return Planned(row, entry.schedule, zone, entry.args or (), entry.kwargs or {}, options)


def _flag(own: Mapping[str, Any], name: str) -> bool:
    value = own.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def zone_of(schedule: Any, app: Any) -> tzinfo:
    """The time zone of a schedule: its own, or the app's."""
    return texts.own_zone(schedule) or app.timezone


def of_row(app: Any, row: Entry) -> Planned:
    """An entry that was added at run time.

    Raises:
        ConfigError: its row can't be right.
    """
    schedule = texts.parse(row.schedule, app, row.timezone)
    zone = texts.zone(row.timezone) if row.timezone else zone_of(schedule, app)
    if not row.task:
        raise ConfigError("it names no task")
    options = _json(row.options, "options", dict)
    definitions.checked_headers(options)
    return Planned(row, schedule, zone, _json(row.args, "args", list), _json(row.kwargs, "kwargs", dict), options)


def _json(text: str, name: str, kind: type) -> Any:
    if not text:
        return kind()
    try:
        value = definitions.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"its {name} are no JSON: {error}") from error
    if not isinstance(value, kind):
        raise ConfigError(f"its {name} must be a JSON {'array' if kind is list else 'object'}, not {text[:60]!r}")
    return value


class Plans:
    """Makes plans of rows, and remembers them as long as the rows stay the same.

    Args:
        app: the Celery app.
        code: the entries of its code.
    """

    def __init__(self, app: Any, code: Mapping[str, Planned]) -> None:
        self._app = app
        self._code = code
        self._made: dict[str, tuple[tuple[object, ...], Planned | None]] = {}

    def of(self, rows: Iterable[Entry]) -> dict[str, Planned]:
        """What can be sent, by name. What can't is told once for each change of it."""
        made: dict[str, tuple[tuple[object, ...], Planned | None]] = {}
        for row in rows:
            if row.source is Source.FOREIGN:
                continue
            definition = (row.source, row.task, row.schedule, row.timezone, row.args, row.kwargs, row.options)
            before = self._made.get(row.name)
            plan = before[1] if before is not None and before[0] == definition else self._make(row)
            made[row.name] = (definition, plan)
        self._made = made
        plans = {}
        for row in rows:
            plan = made[row.name][1] if row.name in made else None
            if plan is not None:
                plans[row.name] = replace(plan, row=row)
        return plans

    def _make(self, row: Entry) -> Planned | None:
        if row.source is Source.CODE:
            # Of another version of the code, whose leader has not gone long.
            return self._code.get(row.name)
        if row.name in self._code:
            logger.warning(
                "beat: entry %r is in beat_schedule and was added at run time as well: the latter counts", row.name
            )
        try:
            return of_row(self._app, row)
        except ConfigError as error:
            # The row is wrong, not the code: a traceback would tell nobody anything.
            logger.error("beat: entry %r is left out until it is changed: %s", row.name, error)  # noqa: TRY400
            return None
