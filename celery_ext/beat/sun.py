"""When a solar schedule is due.

Celery's own answer is not asked for: it depends on when it is asked, up to Celery 5.4 ``dusk_astronomical`` is a dawn,
and a day without the event counts as one with it.
"""

from __future__ import annotations

from typing import Any

from .local_times import MINUTE, utc

#: Where the sun's center (its upper edge: rise and set) is, in degrees of arc, by event.
_HORIZONS = {
    "dawn_astronomical": "-18",
    "dawn_nautical": "-12",
    "dawn_civil": "-6",
    "sunrise": "-0:34",
    "solar_noon": "0",
    "sunset": "-0:34",
    "dusk_civil": "-6",
    "dusk_nautical": "-12",
    "dusk_astronomical": "-18",
}
#: Days to look ahead: where there is a polar night, there is an end to it.
_DAYS = 366
#: Instants (ms) between which the sun's place is known well: the years 1901 and 2200.
_FIRST, _LAST = -2_177_452_800_000, 7_258_118_400_000
#: Two results (ms) that are this close are one event, computed twice.
_SAME = 2000


def next_event(schedule: Any, base: int) -> int | None:
    """The first event (ms, whole seconds) after an instant; ``None``: there is none within a year."""
    if base >= _LAST:
        return None
    base = max(base, _FIRST)
    found = _search(schedule, base)
    if found is not None and found <= base + _SAME:
        found = _search(schedule, base + MINUTE)
    return found


def _search(schedule: Any, start: int) -> int | None:
    ephem = schedule.ephem
    observer = ephem.Observer()
    observer.lat, observer.lon, observer.elevation, observer.pressure = str(schedule.lat), str(schedule.lon), 0, 0
    observer.horizon = _HORIZONS[schedule.event]
    search = getattr(observer, schedule.method)
    options = {"use_center": True} if schedule.use_center else {}
    date = ephem.Date(utc(start).replace(tzinfo=None))
    for _ in range(_DAYS):
        try:
            moment = search(ephem.Sun(), start=date, **options)
        except ephem.CircumpolarError:
            date = observer.next_antitransit(ephem.Sun(), start=date)
        else:
            # Its dates are days since the last noon of 1899.
            return round((float(moment) - 25567.5) * 86400) * 1000
    return None
