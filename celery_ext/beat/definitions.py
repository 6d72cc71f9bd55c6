"""From what a caller says of an entry to what the store keeps: checked at once, not when it is first due."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from celery.schedules import BaseSchedule, crontab, solar
from celery.schedules import schedule as interval
from kombu.utils.json import dumps, loads

from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.settings import LONGEST

from . import texts

#: Options of ``apply_async`` that a tick can have.
OPTIONS = frozenset(
    {
        "argsrepr", "compression", "countdown", "delivery_mode", "depends_on", "exchange", "expires", "headers",
        "ignore_parent_failure", "ignore_result", "immediate", "kwargsrepr", "link", "link_error", "mandatory",
        "priority", "queue", "retry", "retry_policy", "routing_key", "serializer", "shadow", "soft_time_limit",
        "stamped_headers", "time_limit", "unique", "unique_key",
    }
)  # fmt: skip
#: Those that it can't, and why.
_NOT = {
    "task_id": "each tick has an id of its own",
    "eta": "the entry's times say when it is due; countdown makes it later",
    "args": "args are given beside the options",
    "kwargs": "kwargs are given beside the options",
    "producer": "beat has its own",
    "connection": "beat has its own",
}


def text_of(app: Any, *, every: Any, crontab: Any, solar: Any, schedule: Any) -> str:
    """The text of the times that a caller gives in one of four ways.

    Raises:
        ConfigError: it is not exactly one, or can't be right.
    """
    given = {"every": every, "crontab": crontab, "solar": solar, "schedule": schedule}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        shown = " and ".join(named) or "none"
        raise ConfigError(f"an entry has one of every, crontab, solar and schedule; given: {shown}")
    if every is not None:
        return _every(app, every)
    if schedule is not None and not isinstance(schedule, str):
        return _object(schedule)
    if crontab is not None:
        return _object(crontab) if isinstance(crontab, BaseSchedule) else f"crontab {crontab}"
    if solar is not None:
        if isinstance(solar, BaseSchedule):
            return _object(solar)
        return f"solar {solar if isinstance(solar, str) else ' '.join(map(str, solar))}"
    return str(schedule)


def _every(app: Any, every: Any) -> str:
    if isinstance(every, timedelta):
        every = every.total_seconds()
    if isinstance(every, str):
        return f"interval {every}"
    if isinstance(every, bool) or not isinstance(every, (int, float)):
        raise ConfigError(f"every is a number of seconds, a timedelta, or a text such as '5m', not {every!r}")
    return texts.show(texts.checked_interval(f"interval {every}", float(every), app))


def _object(schedule: Any) -> str:
    if type(schedule) not in {interval, crontab, solar}:
        raise ConfigError(
            f"a schedule of the kind {type(schedule).__name__} can't be stored, only Celery's schedule, crontab "
            "and solar: put the entry into beat_schedule"
        )
    return texts.show(schedule)


def zone_of(schedule: Any, timezone: Any) -> str:
    """The name of the zone that a caller gives, with the schedule or beside it; empty: the app's.

    Raises:
        ConfigError: it has no name.
    """
    found = timezone if timezone is not None else texts.own_zone(schedule)
    if found is None or isinstance(found, str):
        return found or ""
    name = texts.zone_name(found)
    if name is None:
        raise ConfigError(f"the time zone {found!r} has no name that could be stored: give one such as 'Europe/Berlin'")
    return name


def seconds(name: str, value: Any, *, least: float = 0.0) -> float | None:
    """A duration that may be left out.

    Raises:
        ConfigError: it is none, or out of bounds.
    """
    if value is None:
        return None
    if isinstance(value, timedelta):
        value = value.total_seconds()
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not least <= value <= LONGEST:
        raise ConfigError(f"{name} must be {least:g} seconds to 100 years, not {value!r}")
    return float(value)


def json_of(name: str, value: Any) -> str:
    """The JSON that the store keeps; empty for nothing.

    Raises:
        ConfigError: it is not JSON.
    """
    if not value:
        return ""
    try:
        text: str = dumps(value)
        loads(text)
    except (TypeError, ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(
            f"the {name} can't be stored: {error}; texts, numbers, lists, dictionaries, dates and UUIDs can"
        ) from None
    return text


def from_json(text: str) -> Any:
    """What a JSON text means, as kombu reads it.

    Raises:
        ConfigError: it is none, or is nested too deeply, or names a type and gives what can't be of it.
    """
    try:
        return loads(text)
    except Exception as error:  # what kombu makes of types that are named raises whatever those do
        raise ConfigError(str(error) or type(error).__name__) from error


def task_of(task: Any) -> str:
    """The name of a task, which may be given by itself.

    Raises:
        ConfigError: it has none.
    """
    name = getattr(task, "name", task)
    if not isinstance(name, str):
        raise ConfigError(f"the task must be its name, or a task of the app, not {task!r}")
    return name


def checked_args(args: Any) -> list[Any]:
    """Positional arguments as a list.

    Raises:
        ConfigError: they are none.
    """
    if args is None:
        return []
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ConfigError(f"the args must be a list, not {args!r}")
    return list(args)


def checked_kwargs(name: str, kwargs: Any) -> dict[str, Any]:
    """A dictionary with texts as keys.

    Raises:
        ConfigError: it is none.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise ConfigError(f"the {name} must be a dictionary whose keys are texts, not {kwargs!r}")
    return dict(kwargs)


def checked_headers(options: Mapping[str, Any]) -> None:
    """Raise ConfigError when the headers among options of ``apply_async`` are none: beat adds its own to them."""
    headers = options.get("headers")
    if headers is not None:
        checked_kwargs("headers", headers)


def checked_options(options: Any, expires: Any, *, no_overlap: bool) -> dict[str, Any]:
    """Options of ``apply_async``.

    Raises:
        ConfigError: one is not known, or can't be right.
    """
    found = checked_kwargs("options", options)
    for name in found:
        if name in _NOT:
            raise ConfigError(f"the option {name} can't be given to an entry: {_NOT[name]}")
        if name not in OPTIONS:
            near = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(OPTIONS))}"
            raise ConfigError(f"the option {name!r} is not known: {hint}")
    if expires is not None:
        if "expires" in found:
            raise ConfigError("expires is given twice: beside the options and among them")
        found["expires"] = seconds("expires", expires, least=0.001)
    elif "expires" in found and not isinstance(found["expires"], datetime):
        found["expires"] = seconds("the option expires", found["expires"], least=0.001)
    checked_keys(found, no_overlap=no_overlap)
    return found


def checked_keys(options: Mapping[str, Any], *, no_overlap: bool) -> None:
    """Raise ConfigError when an entry is to have two unique keys."""
    if no_overlap and "unique_key" in options:
        raise ConfigError("no_overlap and the option unique_key can't be given both: no_overlap has a key of its own")
