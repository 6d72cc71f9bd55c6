"""When a crontab is due, and what becomes of it on days on which the clocks are changed.

A crontab that names hours means what clocks show. It is due once for each time that it names: the first time only,
when the clocks are put back and show it again, and at the instant of the change when they are put forward and leave it
out. One whose hours are all hours of the day means time that passes: whenever the clocks show one of its minutes, which
is 23 or 25 times on those days for one minute in the hour.

Day of month and day of week must both fit, as Celery has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any

from .local_times import DAY, FIRST, LAST, MINUTE, exists, first, shown

#: Years within which every day comes that ever comes: 29 February on a given day of the week, around 2100.
_YEARS = 41


@dataclass(slots=True, frozen=True)
class Cron:
    """The times of a crontab, each field sorted; Sunday is day 0 of the week."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    weekdays: frozenset[int]
    days: tuple[int, ...]
    months: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Any) -> Cron:
        """The times of Celery's object."""
        return cls(
            tuple(sorted(schedule.minute)),
            tuple(sorted(schedule.hour)),
            frozenset(schedule.day_of_week),
            tuple(sorted(schedule.day_of_month)),
            tuple(sorted(schedule.month_of_year)),
        )

    def next(self, base: int, zone: tzinfo) -> int | None:
        """The first due time (ms) after an instant; ``None``: there is none."""
        if not (self.minutes and self.hours) or base >= LAST:
            return None
        base = max(base, FIRST)
        return self._passing(base, zone) if len(self.hours) == 24 else self._shown(base, zone)

    def _fits(self, day: datetime) -> bool:
        return day.month in self.months and day.day in self.days and day.isoweekday() % 7 in self.weekdays

    def _days(self, start: datetime) -> Iterator[datetime]:
        """The days that fit, from one on, as midnights."""
        for year in range(start.year, start.year + _YEARS):
            for month in self.months:
                if (year, month) < (start.year, start.month):
                    continue
                for number in self.days:
                    try:
                        day = datetime(year, month, number)  # noqa: DTZ001  # what clocks show
                    except ValueError:
                        break
                    if day.date() >= start.date() and day.isoweekday() % 7 in self.weekdays:
                        yield day

    def _shown(self, base: int, zone: tzinfo) -> int | None:
        """The next one of those that mean what clocks show.

        What clocks show grows with the instant it is due at. So whatever they show up to now was due, and no more than
        the times that they show again can be skipped below.
        """
        clock = shown(base, zone)
        for day in self._days(clock):
            if not exists(day, zone):
                continue
            today = day.date() == clock.date()
            for hour in self.hours:
                if today and hour < clock.hour:
                    continue
                for minute in self.minutes:
                    wanted = day.replace(hour=hour, minute=minute)
                    if wanted > clock:
                        due = first(wanted, zone)
                        if due > base:
                            return due
        return None

    def _passing(self, base: int, zone: tzinfo) -> int | None:
        """The next one of those that mean time that passes."""
        last = base + _YEARS * 366 * DAY
        instant = _minute_after(base, zone)
        while instant <= last:
            clock = shown(instant, zone)
            if clock.second:
                # The zone has changed to an offset of its own.
                instant = _minute_after(instant, zone)
            elif not self._fits(clock):
                following = self._day_after(instant, clock, zone)
                if following is None:
                    return None
                instant = following
            elif clock.minute in self.minutes:
                return instant
            else:
                minute = next((minute for minute in self.minutes if minute > clock.minute), 60)
                instant = _forward(instant, clock, timedelta(minutes=minute - clock.minute), zone)
        return None

    def _day_after(self, instant: int, clock: datetime, zone: tzinfo) -> int | None:
        """Where to look further, when the day that the clocks show does not fit."""
        if shown(instant + DAY, zone) - clock < timedelta(days=1):
            # They may be put back to the day before.
            return instant + MINUTE
        day = next(self._days(clock + timedelta(days=1)), None)
        return None if day is None else max(first(day, zone), instant + MINUTE)


def _minute_after(instant: int, zone: tzinfo) -> int:
    """The next instant at which the clocks show a whole minute, if they are not changed before."""
    return instant // 1000 * 1000 + (60 - shown(instant, zone).second) * 1000


def _forward(instant: int, clock: datetime, step: timedelta, zone: tzinfo) -> int:
    """The instant a step of up to an hour later, or the next minute when the clocks are changed on the way."""
    later = instant + step // timedelta(milliseconds=1)
    return later if shown(later, zone) == clock + step else instant + MINUTE
