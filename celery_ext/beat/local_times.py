"""Between instants and what the clocks of a time zone show.

Only the way from an instant to the clock is asked of a zone, so that zones of every make will do: those of zoneinfo,
dateutil and pytz, and Celery's own for the machine's zone. Instants are milliseconds (UTC); what a clock shows is a
``datetime`` without a zone.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone, tzinfo

from celery.utils.time import LocalTimezone

MINUTE = 60_000
DAY = 86_400_000
#: Instants (ms) outside of which no clock is asked: the years 1901 and 9000.
FIRST, LAST = -2_177_452_800_000, 221_845_392_000_000
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  # what clocks show has no zone


def shown(instant: int, zone: tzinfo) -> datetime:
    """What the clocks of a zone show at an instant, in whole seconds."""
    seconds = instant // 1000
    if isinstance(zone, LocalTimezone):
        # Celery's class for the machine's zone is wrong on days of change, and before 5.7 west of Greenwich too.
        return datetime.fromtimestamp(seconds)  # noqa: DTZ006  # the machine's zone is meant
    return datetime.fromtimestamp(seconds, zone).replace(tzinfo=None, fold=0)


def occurrences(clock: datetime, zone: tzinfo) -> list[int]:
    """The instants at which the clocks of a zone show this: one, two when it is repeated, none when it is left out."""
    plain = _as_if_utc(clock)
    offsets = {_offset(plain + shift, zone) for shift in (-DAY, 0, DAY)}
    return sorted(plain - offset for offset in offsets if shown(plain - offset, zone) == clock)


def first(clock: datetime, zone: tzinfo) -> int:
    """The first instant at which the clocks show this; when they leave it out, the instant at which they leap."""
    found = occurrences(clock, zone)
    return found[0] if found else _leap(clock, zone)


def exists(day: datetime, zone: tzinfo) -> bool:
    """Whether a zone has any part of this day: some have left out one when they changed sides of the date line."""
    return bool(
        occurrences(day, zone)
        or occurrences(day + timedelta(hours=23, minutes=59), zone)
        or _leap(day, zone) != _leap(day + timedelta(hours=23, minutes=59), zone)
    )


def _as_if_utc(clock: datetime) -> int:
    return (clock - _EPOCH) // timedelta(milliseconds=1)


def _offset(instant: int, zone: tzinfo) -> int:
    """Milliseconds by which the clocks are ahead of UTC."""
    return _as_if_utc(shown(instant, zone)) - instant // 1000 * 1000


def _leap(clock: datetime, zone: tzinfo) -> int:
    """The instant before which the clocks show less, and from which on they show more."""
    plain = _as_if_utc(clock)
    before, after = (plain - DAY) // 1000, (plain + DAY) // 1000
    while after - before > 1:
        middle = (before + after) // 2
        if shown(middle * 1000, zone) < clock:
            before = middle
        else:
            after = middle
    return after * 1000


def utc(instant: int) -> datetime:
    """An instant as an aware datetime in UTC."""
    return datetime.fromtimestamp(instant // 1000, timezone.utc).replace(microsecond=instant % 1000 * 1000)
