"""When a schedule is due: what depends on nothing but the schedule, the instant it is counted from, and the time zone.

Every replica of beat, whatever its Celery's version, so comes to the same due time. Instants are milliseconds (UTC).

- An interval is due its time after the last one; a ``relative`` one where a clock shows a whole day, hour or minute.
- A crontab: see :mod:`.cron`. A solar event: see :mod:`.sun`.
- Any other schedule, also a subclass with its own ``remaining_estimate`` or ``remaining_delta``, is asked for its
  ``remaining_estimate``. A ``is_due`` of its own is not asked, nor is the ``nowfun`` of the kinds above.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any

from celery.schedules import crontab, solar
from celery.schedules import schedule as interval

from .cron import Cron
from .local_times import FIRST, LAST, first, occurrences, shown, utc
from .sun import next_event

_MS = timedelta(milliseconds=1)


def next_due(schedule: Any, base_ms: int, zone: tzinfo) -> int | None:
    """The first due time after an instant.

    Args:
        schedule: Celery's schedule object.
        base_ms: the instant.
        zone: the time zone in which its times are meant.

    Returns:
        ``None`` when it is never due again: 30 February, say. That is found out by a bounded search.

    Raises:
        Exception: whatever a schedule of another kind raises.
    """
    due = _next(schedule, base_ms, zone)
    return due if due is not None and base_ms < due < LAST else None


def latest_due(schedule: Any, base_ms: int, now_ms: int, zone: tzinfo) -> int | None:
    """The latest due time after an instant, up to another: the one tick that makes up for all that were missed.

    Not every due time in between is looked at: intervals are divided, and for all others the time in between is halved
    again and again, at most 45 times.

    Args:
        schedule: Celery's schedule object.
        base_ms: the instant it is counted from.
        now_ms: the latest instant that counts.
        zone: the time zone in which its times are meant.

    Returns:
        ``None`` when nothing was due.

    Raises:
        Exception: whatever a schedule of another kind raises.
    """
    due = next_due(schedule, base_ms, zone)
    if due is None or due > now_ms:
        return None
    if _own(schedule, interval, "remaining_estimate"):
        step = _step(schedule)
        if not _aligned(schedule):
            return due + (now_ms - due) // step * step
        due = _skip(schedule, due, now_ms, zone)
        while (following := next_due(schedule, due, zone)) is not None and following <= now_ms:
            due = following
        return due
    # Due is ``due``, and nothing after ``until``.
    until = now_ms
    while due < until:
        middle = (due + until) // 2
        found = next_due(schedule, middle, zone)
        if found is not None and found <= now_ms:
            due = found
        else:
            until = middle
    return due


def _own(schedule: Any, kind: type, *methods: str) -> bool:
    """Whether a schedule is of one of Celery's kinds, and computes as that does."""
    return isinstance(schedule, kind) and all(
        getattr(type(schedule), method, None) is getattr(kind, method) for method in methods
    )


def _next(schedule: Any, base: int, zone: tzinfo) -> int | None:
    if _own(schedule, interval, "remaining_estimate"):
        return _next_aligned(schedule, base, zone) if _aligned(schedule) else base + _step(schedule)
    if _own(schedule, crontab, "remaining_estimate", "remaining_delta"):
        return Cron.of(schedule).next(base, zone)
    if _own(schedule, solar, "remaining_estimate"):
        return next_event(schedule, base)
    return _asked(schedule, base, zone)


# -- intervals ---------------------------------------------------------------------------------------


def _step(schedule: Any) -> int:
    """Milliseconds of an interval; Celery also knows intervals of nothing, which are due all the time."""
    step: int = round(schedule.run_every / _MS)
    return max(1, step)


def _aligned(schedule: Any) -> bool:
    """Whether it is due where a clock shows something whole."""
    return bool(schedule.relative) and _step(schedule) >= 1000


def _unit(step: int) -> int:
    """To which whole unit (ms) a relative interval is rounded down."""
    return next((unit for unit in (86_400_000, 3_600_000, 60_000) if step >= unit), 1000)


def _next_aligned(schedule: Any, base: int, zone: tzinfo) -> int:
    """Celery's rule: the interval, rounded down to the whole day, hour, minute or second that clocks show."""
    step = _step(schedule)
    unit = _unit(step)
    end = base + step
    if not FIRST < base < end < LAST:
        return end
    if unit == 86_400_000:
        # Days are days of the calendar, of 23 to 25 hours.
        clock = shown(base, zone) + timedelta(milliseconds=step)
        midnight = clock.replace(hour=0, minute=0, second=0)
        found = [instant for instant in (*occurrences(midnight, zone), first(midnight, zone)) if instant > base]
        return found[0] if found else end
    clock = shown(end, zone)
    over = (clock - clock.replace(hour=0, minute=0, second=0)) % timedelta(milliseconds=unit)
    whole = end // 1000 * 1000 - over // _MS
    if shown(whole, zone) != clock - over:
        # The clocks were changed in between by a part of the unit.
        found = [first(clock - over, zone), *occurrences(clock - over, zone)]
        whole = max((instant for instant in found if instant <= end), default=end)
    return whole if whole > base else end


def _skip(schedule: Any, due: int, now: int, zone: tzinfo) -> int:
    """A due time of a relative interval that is at most a few steps before the latest one."""
    step = _step(schedule)
    unit = _unit(step)
    whole = step // unit * unit
    if not FIRST < due <= now < LAST:
        return due
    if unit == 86_400_000:
        start, end = shown(due, zone), shown(now, zone)
        days = whole // unit
        target = start + timedelta(days=((end - start).days // days - 1) * days)
        return max(due, first(target.replace(hour=0, minute=0, second=0), zone))
    return max(due, _round(due + ((now - due) // whole - 2) * whole, unit, zone))


def _round(instant: int, unit: int, zone: tzinfo) -> int:
    clock = shown(instant, zone)
    over = (clock - clock.replace(hour=0, minute=0, second=0)) % timedelta(milliseconds=unit)
    return instant // 1000 * 1000 - over // _MS


# -- other kinds -------------------------------------------------------------------------------------


def _asked(schedule: Any, base: int, zone: tzinfo) -> int:
    """What a schedule says itself: its ``now`` and its ``remaining_estimate``."""
    last_run = utc(base).astimezone(zone)
    before = _instant(schedule.now())
    remaining: int = round(schedule.remaining_estimate(last_run) / timedelta(microseconds=1))
    after = _instant(schedule.now())
    # The same due time is to come out whenever it is asked, so a whole second that may be meant is meant.
    earliest, latest = before + remaining, after + remaining
    whole = latest // 1_000_000 * 1_000_000
    return max(whole, earliest) // 1000


def _instant(now: datetime) -> int:
    """Microseconds; a time without a zone is UTC, as Celery has it."""
    aware = now if now.tzinfo is not None else now.replace(tzinfo=timezone.utc)
    return (aware - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1)
