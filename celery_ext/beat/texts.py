"""Schedules as text: what the store keeps of them, and what people read and write.

- ``interval 30``: seconds, with decimals if need be; also ``30s``, ``5m``, ``2h``, ``1d``. With ``relative`` behind it
  it is rounded to whole days, hours or minutes, as Celery's option does.
- ``crontab 0 9 * * 1-5``: minute, hour, day of month, month, day of week, in cron's order.
- ``solar sunset 52.5 13.4``: an event, latitude and longitude.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from datetime import timedelta, tzinfo
from functools import cache
from typing import Any, NoReturn
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from celery.exceptions import ImproperlyConfigured
from celery.schedules import BaseSchedule, ParseException, crontab, solar
from celery.schedules import schedule as interval

from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.model import MAX_NAME
from kombu_taskgate.core.settings import LONGEST

#: The shortest interval, in seconds: a due time has whole milliseconds.
SHORTEST = 0.001
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_RIGHT = "write 'interval 30', 'crontab 0 9 * * 1-5' or 'solar sunset 52.5 13.4'"
_PART = re.compile(r"(\*|\w+(-\w+)?)(/0*[1-9]\d*)?")
#: The fields of a crontab in cron's order, with what is allowed, and how Celery calls them.
_FIELDS = (
    ("minute", "0-59", "minute"),
    ("hour", "0-23", "hour"),
    ("day of month", "1-31", "day_of_month"),
    ("month", "1-12 or jan-dec", "month_of_year"),
    ("day of week", "0-6, where 0 is Sunday, or sun-sat", "day_of_week"),
)
_NAMES = "janfebmaraprmayjunjulaugsepoctnovdec"
_MONTHS = {name: str(number) for number, name in enumerate(re.findall("...", _NAMES), 1)}


def parse(text: str, app: Any, timezone: str = "") -> BaseSchedule:
    """The schedule that a text means.

    Args:
        text: see the module.
        app: the Celery app that the schedule is for.
        timezone: name of the zone in which its times are meant; empty: the app's.

    Raises:
        ConfigError: the text or the zone can't be right.
    """
    name, *words = str(text).split() or [""]
    name = name.lower()
    make = _KINDS.get(name)
    if make is None:
        _refuse(text, f"{name!r} is no kind of schedule" if name else "it is empty", _RIGHT)
    schedule = make(str(text), words, app)
    if timezone:
        schedule.tz = zone(timezone)
    return schedule


def show(schedule: Any) -> str:
    """The text of a schedule, at most 255 characters; of kinds that no text means it is what Python shows of it."""
    if type(schedule) is interval:
        relative = " relative" if schedule.relative else ""
        return f"interval {_number(schedule.run_every.total_seconds())}{relative}"
    if type(schedule) is crontab:
        return "crontab " + " ".join(_fields(schedule))
    if type(schedule) is solar:
        return f"solar {schedule.event} {_number(schedule.lat)} {_number(schedule.lon)}"
    try:
        shown = repr(schedule)
    except Exception as error:  # noqa: BLE001  # a user's class; it need not be shown for its entry to work
        shown = f"<{type(schedule).__name__}: {type(error).__name__}>"
    # An address is another one in each process, and would look like a change.
    shown = re.sub(r" at 0x[0-9a-fA-F]+", "", shown)
    return shown.replace("\0", "").encode("utf-8", "replace").decode()[:MAX_NAME]


def zone(name: str) -> ZoneInfo:
    """The time zone of this name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    names = {each.lower(): each for each in _zone_names()}
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {names[near[0]]}?" if near else "write a name such as Europe/Berlin"
    raise ConfigError(f"the time zone {name[:60]!r} is not known: {hint}")


@cache
def _zone_names() -> frozenset[str]:
    # All files of the system's zones are looked at.
    return frozenset(available_timezones())


def zone_name(of: tzinfo) -> str | None:
    """The name under which :func:`zone` finds a zone; ``None`` when it has none."""
    name = getattr(of, "key", None) or getattr(of, "zone", None) or str(of)
    return name if isinstance(name, str) and name in _zone_names() else None


def own_zone(schedule: Any) -> tzinfo | None:
    """The time zone that was set for a schedule; ``None``: that of its app counts."""
    overridden = getattr(type(schedule), "tz", None) is not BaseSchedule.tz
    if isinstance(schedule, BaseSchedule) and "tz" not in vars(schedule) and not overridden:
        return None
    found = getattr(schedule, "tz", None)
    if isinstance(found, str):
        return zone(found)
    return found if isinstance(found, tzinfo) else None


def seconds_of(text: str) -> float:
    """The seconds that an interval's text means, ``5m`` say.

    Raises:
        ValueError: it is not a number with or without a unit.
    """
    found = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|[+-]?nan|[+-]?inf)([smhd]?)", text.lower())
    if found is None:
        raise ValueError(text)
    return float(found[1]) * _UNITS[found[2]]


def checked_interval(text: object, seconds: float, app: Any, *, relative: bool = False) -> interval:
    """An interval of that many seconds.

    Raises:
        ConfigError: the number is out of bounds. The error shows ``text``.
    """
    if not SHORTEST <= seconds <= LONGEST:
        _refuse(text, "the interval is out of bounds", f"it can be {SHORTEST} seconds to 100 years")
    return interval(timedelta(seconds=seconds), relative=relative, app=app)


def _interval(text: str, words: list[str], app: Any) -> BaseSchedule:
    relative = words[1:] == ["relative"]
    if len(words) != 1 + relative:
        _refuse(text, f"an interval is one number, not {len(words)} words", "write 'interval 30' or 'interval 5m'")
    try:
        seconds = seconds_of(words[0])
    except ValueError:
        _refuse(text, f"{words[0]!r} is no number of seconds", "write 'interval 30' or 'interval 5m'")
    return checked_interval(text, seconds, app, relative=relative)


def _crontab(text: str, words: list[str], app: Any) -> BaseSchedule:
    if len(words) != 5:
        _refuse(text, f"it has {len(words)} fields", "write five: minute, hour, day of month, month, day of week")
    fields = {}
    for word, (shown, allowed, name) in zip(words, _FIELDS, strict=True):
        value = _numbered(word) if name == "month_of_year" else word.lower()
        try:
            if not all(_PART.fullmatch(part) for part in value.split(",")):
                raise ValueError("it is not written as cron has it")  # noqa: TRY301  # told below
            crontab(**{name: value})
        except (ValueError, ParseException) as error:
            _refuse(
                text, f"the {shown} {word!r} can't be read ({error})", f"allowed is {allowed}, as *, 1,2, 1-5 or */2"
            )
        fields[name] = value
    try:
        schedule = crontab(**fields, app=app)
    except ValueError as error:
        _refuse(text, str(error), "name a day that comes")
    return schedule


def _numbered(word: str) -> str:
    """Names of months as numbers: Celery knows them since 5.5."""
    return re.sub(r"[a-z]+", lambda found: _MONTHS.get(found[0][:3], found[0]), word.lower())


def _solar(text: str, words: list[str], app: Any) -> BaseSchedule:
    right = "write 'solar sunset 52.5 13.4': event, latitude, longitude"
    if len(words) != 3:
        _refuse(text, f"it has {len(words)} words after 'solar'", right)
    event = words[0].lower()
    known = sorted(solar._all_events)
    if event not in known:
        near = difflib.get_close_matches(event, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        _refuse(text, f"the sun has no event {event!r}", f"{hint}it has {', '.join(known)}")
    try:
        latitude, longitude = float(words[1]), float(words[2])
    except ValueError:
        _refuse(text, "latitude and longitude are no numbers", right)
    if not (abs(latitude) <= 90 and abs(longitude) <= 180):
        _refuse(text, "there is no such place", "latitude is -90 to 90, longitude -180 to 180")
    try:
        return solar(event, latitude, longitude, app=app)
    except (ImportError, ImproperlyConfigured):
        _refuse(text, "the package ephem is not installed, which knows the sun", "pip install 'celery[solar]'")


_KINDS: dict[str, Callable[[str, list[str], Any], BaseSchedule]] = {
    "interval": _interval,
    "crontab": _crontab,
    "solar": _solar,
}


def _refuse(text: object, wrong: str, right: str) -> NoReturn:
    raise ConfigError(f"the schedule {str(text)[:MAX_NAME]!r} can't be used: {wrong}; {right}") from None


def _number(value: float) -> str:
    """Plain decimals, to the microsecond and to a tenth of a meter on the ground."""
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _fields(schedule: Any) -> list[str]:
    """In cron's order: as they were written, unless that is too long for the store."""
    written = [_as_written(getattr(schedule, f"_orig_{name}"), getattr(schedule, name)) for _, _, name in _FIELDS]
    if sum(map(len, written)) + len("crontab     ") <= MAX_NAME:
        return written
    return [_ranges(getattr(schedule, name)) for _, _, name in _FIELDS]


def _as_written(original: Any, numbers: Iterable[int]) -> str:
    if isinstance(original, str):
        return "".join(original.split())
    return ",".join(map(str, sorted(numbers)))


def _ranges(numbers: Iterable[int]) -> str:
    """``0-3,5`` of 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
