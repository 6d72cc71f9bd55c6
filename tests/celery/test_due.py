"""Due times, compared with a slow reference that walks minute by minute and is written another way."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone, tzinfo
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, solar
from celery.schedules import schedule as interval
from celery.utils.time import LocalTimezone
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_ext.beat.due import latest_due, next_due

MINUTE = 60_000
DAY = 86_400_000
UTC = ZoneInfo("UTC")
BERLIN = ZoneInfo("Europe/Berlin")
NEW_YORK = ZoneInfo("America/New_York")
LORD_HOWE = ZoneInfo("Australia/Lord_Howe")
KOLKATA = ZoneInfo("Asia/Kolkata")
SAO_PAULO = ZoneInfo("America/Sao_Paulo")
ST_JOHNS = ZoneInfo("America/St_Johns")
APIA = ZoneInfo("Pacific/Apia")
PYONGYANG = ZoneInfo("Asia/Pyongyang")
#: Around a day on which the clocks are changed, or any day.
CHANGES = [
    (BERLIN, "2024-03-31"), (BERLIN, "2024-10-27"), (NEW_YORK, "2024-03-10"), (NEW_YORK, "2024-11-03"),
    (LORD_HOWE, "2024-04-07"), (LORD_HOWE, "2024-10-06"), (SAO_PAULO, "2018-02-18"), (SAO_PAULO, "2018-11-04"),
    (ST_JOHNS, "2005-04-03"), (ST_JOHNS, "2005-10-30"), (APIA, "2011-12-30"), (UTC, "2024-02-29"),
    (KOLKATA, "2023-03-01"), (PYONGYANG, "2018-05-04"),
]  # fmt: skip


def ms(text: str, zone: tzinfo = UTC) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=zone).timestamp() * 1000)


def local(instant: int, zone: tzinfo) -> str:
    return datetime.fromtimestamp(instant / 1000, zone).isoformat()


def reference(cron: crontab, start: int, end: int, zone: tzinfo) -> list[int]:
    """Due times in [start, end), found by looking at every minute since two days before."""

    def fits(clock: datetime) -> bool:
        return (
            clock.minute in cron.minute
            and clock.hour in cron.hour
            and clock.day in cron.day_of_month
            and clock.month in cron.month_of_year
            and clock.isoweekday() % 7 in cron.day_of_week
        )

    def clock_at(instant: int) -> datetime:
        return datetime.fromtimestamp(instant / 1000, zone).replace(tzinfo=None, fold=0)

    elapsed = cron.hour == set(range(24))
    due = []
    shown = clock_at(start - 2 * DAY - MINUTE)
    for instant in range(start - 2 * DAY, end, MINUTE):
        clock = clock_at(instant)
        if elapsed:
            hit = fits(clock)
        else:
            skipped = []
            while shown < clock:
                shown += timedelta(minutes=1)
                skipped.append(shown)
            # Only a zone that changes sides of the date line leaves out a day as a whole.
            whole = {day for day, minutes in Counter(each.date() for each in skipped).items() if minutes == 1440}
            hit = any(fits(each) for each in skipped if each.date() not in whole)
        if hit and instant >= start:
            due.append(instant)
    return due


def walked(schedule: BaseSchedule, start: int, end: int, zone: tzinfo) -> list[int]:
    """Due times in [start, end), one after the other."""
    found = []
    due = next_due(schedule, start - 1, zone)
    while due is not None and due < end:
        found.append(due)
        due = next_due(schedule, due, zone)
    return found


def field(least: int, most: int) -> st.SearchStrategy[set[int]]:
    every = st.just(set(range(least, most + 1)))
    numbers = st.integers(least, most)
    return st.one_of(every, st.sets(numbers, min_size=1, max_size=4), st.sets(numbers, min_size=1))


crontabs = st.builds(
    crontab,
    minute=field(0, 59),
    hour=st.one_of(field(0, 23), st.just({0, 1, 2, 3, 23})),
    day_of_week=field(0, 6),
    day_of_month=st.one_of(st.just(set(range(1, 32))), st.sets(st.integers(1, 31), min_size=20)),
    month_of_year=st.one_of(st.just(set(range(1, 13))), st.sets(st.integers(1, 12), min_size=10)),
)


@settings(max_examples=150, deadline=None)
@given(crontabs, st.sampled_from(CHANGES), st.integers(0, DAY))
@example(crontab(minute="*", hour="2"), (BERLIN, "2024-03-31"), 0)
@example(crontab(minute="*"), (ST_JOHNS, "2005-10-30"), 12345)
@example(crontab(minute="1,30", day_of_month="29"), (ST_JOHNS, "2005-10-30"), 0)
@example(crontab(minute="0", hour="0"), (SAO_PAULO, "2018-11-04"), 0)
@example(crontab(minute="0", hour="9"), (APIA, "2011-12-30"), 0)
@example(crontab(minute="2,35"), (PYONGYANG, "2018-05-04"), 0)
def test_crontabs_against_the_reference(cron: crontab, change: tuple[ZoneInfo, str], shift: int) -> None:
    zone, day = change
    start = ms(day) - DAY + shift
    end = start + 3 * DAY
    # The reference looks at whole minutes only.
    first_minute = -(-start // MINUTE) * MINUTE
    expected = reference(cron, first_minute, end, zone)
    assert walked(cron, start, end, zone) == expected
    for base in (start - 1, start + 7 * 3600_000):
        missed = [due for due in expected if base < due]
        assert latest_due(cron, base, end - 1, zone) == (missed[-1] if missed else None)


@pytest.mark.parametrize(
    ("zone", "day", "times"),
    [(BERLIN, "2024-03-31", 23), (BERLIN, "2024-10-27", 25), (NEW_YORK, "2024-11-03", 25), (KOLKATA, "2024-11-03", 24)],
)
def test_every_hour_follows_elapsed_time(zone: ZoneInfo, day: str, times: int) -> None:
    start = ms(day, zone)
    end = ms(str(datetime.fromisoformat(day) + timedelta(days=1)), zone)
    due = walked(crontab(minute=0), start, end, zone)
    assert len(due) == times
    assert {after - before for before, after in pairwise(due)} == {3600_000}
    assert len(walked(crontab(minute="*/15"), start, end, zone)) == 4 * times


@pytest.mark.parametrize("zone", [BERLIN, NEW_YORK, LORD_HOWE, UTC, KOLKATA, SAO_PAULO, ST_JOHNS])
@pytest.mark.parametrize(("hour", "minute"), [(0, 0), (0, 30), (1, 30), (2, 0), (2, 30), (3, 0), (23, 30)])
def test_a_daily_entry_runs_once_each_local_day(zone: ZoneInfo, hour: int, minute: int) -> None:
    due = walked(crontab(minute=minute, hour=hour), ms("2004-01-01", zone), ms("2019-01-01", zone), zone)
    days = [datetime.fromtimestamp(instant / 1000, zone).date() for instant in due]
    assert days == [days[0] + timedelta(days=count) for count in range(len(days))]
    assert len(days) == 15 * 365 + 4


def test_times_that_the_clocks_leave_out_and_repeat() -> None:
    gap = walked(crontab(minute="*/10", hour="2"), ms("2024-03-31", BERLIN), ms("2024-04-01", BERLIN), BERLIN)
    assert [local(due, BERLIN) for due in gap] == ["2024-03-31T03:00:00+02:00"]
    again = walked(crontab(minute="30", hour="2"), ms("2024-10-27", BERLIN), ms("2024-10-28", BERLIN), BERLIN)
    assert [local(due, BERLIN) for due in again] == ["2024-10-27T02:30:00+02:00"]
    half = walked(crontab(minute="15", hour="2"), ms("2024-10-06", LORD_HOWE), ms("2024-10-07", LORD_HOWE), LORD_HOWE)
    assert [local(due, LORD_HOWE) for due in half] == ["2024-10-06T02:30:00+11:00"]


def test_a_day_that_a_zone_leaves_out_is_not_made_up_for() -> None:
    due = walked(crontab(minute=0, hour=9), ms("2011-12-29", APIA), ms("2012-01-02", APIA), APIA)
    assert [local(each, APIA)[:16] for each in due] == ["2011-12-29T09:00", "2011-12-31T09:00", "2012-01-01T09:00"]


def test_a_base_between_two_occurrences_of_one_time() -> None:
    """02:40 the first time, then 02:20 the second time: nothing is due before tomorrow."""
    base = ms("2024-10-27T00:40")
    assert next_due(crontab(minute="20,50", hour="2"), base, BERLIN) == ms("2024-10-27T00:50")
    assert next_due(crontab(minute="20", hour="2"), base, BERLIN) == ms("2024-10-28T01:20")
    again = ms("2024-10-27T01:20")
    assert next_due(crontab(minute="50", hour="2"), again, BERLIN) == ms("2024-10-28T01:50")
    assert next_due(crontab(minute="50", hour="2,3"), again, BERLIN) == ms("2024-10-27T02:50")


@pytest.mark.parametrize("days", [{30, 31}, {31}])
def test_what_never_comes(days: set[int]) -> None:
    # Newer versions of Celery refuse to make it.
    cron = crontab(day_of_month=28, month_of_year=2)
    cron.day_of_month = days
    cron.month_of_year = {2, 4} if days == {31} else {2}
    assert next_due(cron, ms("2024-01-01"), UTC) is None
    assert latest_due(cron, ms("1990-01-01"), ms("2024-01-01"), UTC) is None
    cron.minute = set()
    assert next_due(cron, ms("2024-01-01"), UTC) is None


def test_leap_days_and_ends_of_months() -> None:
    leap = crontab(minute=0, hour=12, day_of_month=29, month_of_year=2)
    assert next_due(leap, ms("2024-02-29T12:00"), UTC) == ms("2028-02-29T12:00")
    assert next_due(leap, ms("2096-02-29T12:00"), UTC) == ms("2104-02-29T12:00")
    last = crontab(minute=0, hour=0, day_of_month=31)
    months = [local(due, UTC)[5:7] for due in walked(last, ms("2023-01-01"), ms("2024-01-01"), UTC)]
    assert months == ["01", "03", "05", "07", "08", "10", "12"]


def test_day_of_month_and_day_of_week_must_both_fit() -> None:
    friday = crontab(minute=0, hour=0, day_of_month=13, day_of_week="fri")
    assert [local(due, UTC)[:10] for due in walked(friday, ms("2023-01-01"), ms("2025-01-01"), UTC)] == [
        "2023-01-13", "2023-10-13", "2024-09-13", "2024-12-13",
    ]  # fmt: skip
    # The longest wait there is, of 40 years: a leap day on one day of the week, with 2100 in between.
    leap = crontab(minute=0, hour=0, day_of_month=29, month_of_year=2, day_of_week="mon")
    found = walked(leap, ms("2050-01-01"), ms("2150-01-01"), UTC)
    assert [local(due, UTC)[:4] for due in found] == ["2072", "2112", "2140"]


@settings(max_examples=100, deadline=None)
@given(
    crontabs,
    st.sampled_from([BERLIN, SAO_PAULO, UTC]),
    st.integers(ms("2015-01-01"), ms("2019-01-01")),
    st.integers(0, 400),
)
def test_the_latest_is_the_last_of_the_walk(cron: crontab, zone: ZoneInfo, base: int, hours: int) -> None:
    now = base + hours * 3600_000
    due = walked(cron, base + 1, now + 1, zone)
    assert latest_due(cron, base, now, zone) == (due[-1] if due else None)


def test_catching_up_years_asks_little(monkeypatch: pytest.MonkeyPatch) -> None:
    import celery_ext.beat.cron as module

    asked = []
    of = module.Cron.of
    monkeypatch.setattr(module.Cron, "of", staticmethod(lambda schedule: asked.append(1) or of(schedule)))
    now = ms("2024-05-05T10:07:30")
    assert latest_due(crontab(), ms("2004-01-01"), now, BERLIN) == ms("2024-05-05T10:07")
    assert len(asked) <= 47


# -- intervals ---------------------------------------------------------------------------------------


def test_an_interval_does_not_drift() -> None:
    every = interval(timedelta(seconds=7.5))
    base = ms("2024-01-01")
    assert next_due(every, base, UTC) == base + 7500
    now = base + 200 * DAY + 5000
    latest = latest_due(every, base, now, UTC)
    assert latest is not None
    assert (latest - base) % 7500 == 0
    assert now - 7500 < latest <= now
    assert latest_due(every, base, base + 7499, UTC) is None
    assert latest_due(every, base, base + 7500, UTC) == base + 7500
    # Celery knows an interval of nothing: due whenever it is asked.
    assert latest_due(interval(0), base, base + 5, UTC) == base + 5


@pytest.mark.parametrize(
    ("step", "base", "due"),
    [
        (timedelta(days=1), "2024-03-30T13:45:07", "2024-03-31T00:00"),
        (timedelta(hours=36), "2024-05-05T13:45", "2024-05-07T00:00"),
        (timedelta(hours=36), "2024-05-05T11:45", "2024-05-06T00:00"),
        (timedelta(hours=2), "2024-05-05T13:45", "2024-05-05T15:00"),
        (timedelta(minutes=90), "2024-05-05T13:45", "2024-05-05T15:00"),
        (timedelta(minutes=5), "2024-05-05T13:45:59", "2024-05-05T13:50"),
        (timedelta(seconds=10), "2024-05-05T13:45:59.700", "2024-05-05T13:46:09"),
        (timedelta(seconds=0.5), "2024-05-05T13:45:59.700", "2024-05-05T13:46:00.200"),
    ],
)
@pytest.mark.parametrize("zone", [UTC, BERLIN, KOLKATA])
def test_relative_intervals(step: timedelta, base: str, due: str, zone: ZoneInfo) -> None:
    every = interval(step, relative=True)
    assert next_due(every, ms(base, zone), zone) == ms(due, zone)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.integers(1, 100), st.integers(60, 7200), st.integers(3600, 10 * 86400)),
    st.sampled_from(CHANGES),
    st.integers(-DAY, DAY),
    st.integers(0, 300),
)
def test_relative_intervals_go_on_and_are_caught_up(
    seconds: int, change: tuple[ZoneInfo, str], shift: int, hundredths: int
) -> None:
    zone, day = change
    base = ms(day) + shift
    every = interval(timedelta(seconds=seconds), relative=True)
    end = base + seconds * 10 * hundredths
    due = []
    at = base
    while (found := next_due(every, at, zone)) is not None and found <= end:
        # A day of the calendar may have 25 hours.
        assert at < found <= at + seconds * 1000 + 90 * MINUTE + (DAY if zone is APIA else 0)
        due.append(found)
        at = found
    latest = latest_due(every, base, end, zone)
    if not due:
        assert latest is None
    else:
        assert latest is not None
        following = next_due(every, latest, zone)
        assert following is not None
        assert latest <= end < following


@settings(max_examples=200)
@given(
    st.one_of(st.integers(1, 100), st.integers(60, 7200), st.integers(3600, 10 * 86400)),
    st.sampled_from([UTC, BERLIN]),
    st.integers(ms("2024-01-01"), ms("2024-12-01")),
    st.integers(1, 30),
)
def test_relative_intervals_are_caught_up_with_what_was_due(
    seconds: int, zone: ZoneInfo, base: int, steps: int
) -> None:
    every = interval(timedelta(seconds=seconds), relative=True)
    due = [base]
    for _ in range(steps):
        following = next_due(every, due[-1], zone)
        assert following is not None
        due.append(following)
    assert latest_due(every, base, due[-1], zone) == due[-1]
    assert latest_due(every, base, due[-1] - 1, zone) == (due[-2] if steps > 1 else None)


def test_whole_hours_where_clocks_change_by_half_an_hour() -> None:
    due = walked(interval(3600, relative=True), ms("2024-04-06T14:00"), ms("2024-04-06T17:00"), LORD_HOWE)
    assert [local(each, LORD_HOWE)[11:] for each in due] == [
        "01:00:00+11:00", "01:30:00+10:30", "02:00:00+10:30", "03:00:00+10:30",
    ]  # fmt: skip


def test_relative_days_are_days_of_the_calendar() -> None:
    every = interval(timedelta(days=1), relative=True)
    due = walked(every, ms("2024-03-29", BERLIN), ms("2024-04-03", BERLIN), BERLIN)
    assert [local(each, BERLIN)[11:16] for each in due] == ["00:00"] * len(due)
    due = walked(every, ms("2018-11-02T00:01", SAO_PAULO), ms("2018-11-06", SAO_PAULO), SAO_PAULO)
    assert [local(each, SAO_PAULO)[:16] for each in due] == ["2018-11-03T00:00", "2018-11-04T01:00", "2018-11-05T00:00"]
    now = ms("2024-11-20T15:00", BERLIN)
    assert latest_due(every, ms("2024-01-01T15:00", BERLIN), now, BERLIN) == ms("2024-11-20", BERLIN)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([UTC, KOLKATA]),
    st.one_of(st.integers(1, 100), st.integers(60, 7200), st.integers(3600, 10 * 86400)),
    st.integers(ms("2024-01-01") // 1000, ms("2025-01-01") // 1000),
)
def test_relative_intervals_are_celerys_own(zone: ZoneInfo, seconds: int, base: int) -> None:
    """Without changes of clocks, where all versions of Celery agree."""
    app = Celery("due", set_as_current=False)
    last = datetime.fromtimestamp(base, zone)
    every = interval(timedelta(seconds=seconds), relative=True, nowfun=lambda: last, app=app)
    expected = last + every.remaining_estimate(last)
    assert next_due(every, base * 1000, zone) == round(expected.timestamp() * 1000)


@settings(max_examples=200, deadline=None)
@given(crontabs, st.integers(ms("2024-01-01") // 60_000, ms("2025-01-01") // 60_000))
def test_crontabs_are_celerys_own_in_utc(cron: crontab, base: int) -> None:
    """Without changes of clocks."""
    app = Celery("due", set_as_current=False)
    last = datetime.fromtimestamp(base * 60, timezone.utc)
    cron.nowfun = lambda: last
    cron.app = app
    expected = last + cron.remaining_estimate(last)
    assert next_due(cron, base * MINUTE, UTC) == round(expected.timestamp() * 1000)


# -- other kinds -------------------------------------------------------------------------------------


class EveryFiveMinutes(BaseSchedule):
    """Due at whole ones."""

    asked = 0

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        type(self).asked += 1
        assert last_run_at.tzinfo is not None
        seconds = int(last_run_at.timestamp()) // 300 * 300 + 300
        return datetime.fromtimestamp(seconds, timezone.utc) - self.now()


class Clocked(BaseSchedule):
    """Once, as django-celery-beat's."""

    def __init__(self, moment: datetime, app: Celery) -> None:
        super().__init__(app=app)
        self.moment = moment

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return self.moment - self.now()


class Weekly(crontab):
    """Overrides what computes."""

    def remaining_estimate(self, last_run_at: datetime, ffwd: type = object) -> timedelta:
        return last_run_at + timedelta(days=7) - self.now()


class Holidays(crontab):
    """Overrides only what says that it is due."""

    def is_due(self, last_run_at: datetime) -> tuple[bool, datetime]:
        raise AssertionError("not asked")


def test_a_schedule_of_another_kind_is_asked() -> None:
    app = Celery("due", set_as_current=False)
    base = ms("2024-01-01T00:00:30")
    own = EveryFiveMinutes(app=app)
    assert next_due(own, base, BERLIN) == ms("2024-01-01T00:05")
    assert latest_due(own, base, ms("2024-03-01T00:04"), BERLIN) == ms("2024-03-01T00:00")
    assert EveryFiveMinutes.asked < 100
    once = Clocked(datetime(2024, 1, 2, tzinfo=timezone.utc), app)
    assert next_due(once, base, UTC) == ms("2024-01-02")
    assert latest_due(once, base, ms("2024-06-01"), UTC) == ms("2024-01-02")
    assert next_due(once, ms("2024-01-02"), UTC) is None
    assert next_due(Weekly(app=app), ms("2024-01-01"), UTC) == ms("2024-01-08")
    assert next_due(Holidays(minute=0, hour=9, app=app), ms("2024-01-01T10:00"), UTC) == ms("2024-01-02T09:00")


def test_it_does_not_matter_how_long_a_schedule_thinks() -> None:
    """While it computes, its clock goes on; what it means is a whole second."""
    readings = iter(datetime(2024, 1, 1, tzinfo=timezone.utc) + timedelta(milliseconds=7 * count) for count in range(9))
    own = Clocked(datetime(2024, 1, 2, tzinfo=timezone.utc), Celery("due", set_as_current=False))
    own.nowfun = lambda: next(readings)
    assert next_due(own, ms("2024-01-01"), UTC) == ms("2024-01-02")


def test_a_time_without_a_zone_is_utc_as_celery_has_it() -> None:
    app = Celery("due", set_as_current=False)
    now = datetime(2024, 1, 1)  # noqa: DTZ001
    own = Clocked(datetime(2024, 1, 2), app)  # noqa: DTZ001
    own.nowfun = lambda: now
    assert next_due(own, ms("2024-01-01"), BERLIN) == ms("2024-01-02")


# -- zones -------------------------------------------------------------------------------------------


@pytest.fixture
def machine_in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("machine_in_new_york")
def test_the_machines_zone() -> None:
    """Celery's class for it, which an app without enable_utc and timezone has."""
    zone = LocalTimezone()
    for cron in (crontab(minute=30, hour="1,2"), crontab(minute="*/20")):
        for day in ("2024-03-09", "2024-11-02", "2024-07-01"):
            start = ms(day)
            assert walked(cron, start, start + 3 * DAY, zone) == walked(cron, start, start + 3 * DAY, NEW_YORK)


def test_zones_of_other_makes() -> None:
    from dateutil.tz import gettz

    zone = gettz("Europe/Berlin")
    assert zone is not None
    cron = crontab(minute=30, hour=2)
    for day in ("2024-03-30", "2024-10-26"):
        assert walked(cron, ms(day), ms(day) + 3 * DAY, zone) == walked(cron, ms(day), ms(day) + 3 * DAY, BERLIN)


def test_instants_that_no_calendar_has() -> None:
    for schedule in (crontab(), crontab(hour=3), interval(5), interval(3600, relative=True)):
        assert next_due(schedule, 10**17, UTC) is None
        assert latest_due(schedule, 10**17, 10**17 + DAY, UTC) is None
        assert next_due(schedule, -(10**17), BERLIN) is not None
        assert latest_due(schedule, 0, ms("2024-01-01"), BERLIN) is not None


def test_a_schedule_that_was_pickled_is_due_at_the_same_time() -> None:
    cron = crontab(minute="*/7", hour="9-17", day_of_week="mon-fri")
    base = ms("2024-05-03T17:59")
    assert next_due(pickle.loads(pickle.dumps(cron)), base, BERLIN) == next_due(cron, base, BERLIN)


# -- the sun -----------------------------------------------------------------------------------------


def test_sunsets() -> None:
    pytest.importorskip("ephem")
    sunset = solar("sunset", 52.5, 13.4)
    due = walked(sunset, ms("2024-06-01"), ms("2024-06-11"), BERLIN)
    assert [local(each, BERLIN)[:10] for each in due] == [f"2024-06-{day:02}" for day in range(1, 11)]
    last = datetime(2024, 6, 1, tzinfo=timezone.utc)
    asked = solar("sunset", 52.5, 13.4, nowfun=lambda: last, app=Celery("due", set_as_current=False))
    assert due[0] == pytest.approx((last + asked.remaining_estimate(last)).timestamp() * 1000, abs=1000)
    assert latest_due(sunset, ms("2024-06-01"), ms("2024-06-11"), BERLIN) == due[-1]
    assert {each % 1000 for each in due} == {0}


def test_no_sunrise_in_the_polar_night() -> None:
    pytest.importorskip("ephem")
    tromso = solar("sunrise", 69.65, 18.96)
    assert next_due(tromso, ms("2024-12-01"), UTC) == pytest.approx(ms("2025-01-15"), abs=3 * DAY)
    longyearbyen = solar("sunrise", 78.22, 15.63)
    due = walked(longyearbyen, ms("2024-01-01"), ms("2025-01-01"), UTC)
    assert [local(due[0], UTC)[:7], local(due[-1], UTC)[:7]] == ["2024-02", "2024-10"]
    assert max(after - before for before, after in pairwise(due)) > 100 * DAY


def test_dusk_is_in_the_evening_with_every_version_of_celery() -> None:
    pytest.importorskip("ephem")
    due = next_due(solar("dusk_astronomical", 52.5, 13.4), ms("2024-01-01T12:00"), BERLIN)
    assert due is not None
    assert local(due, BERLIN)[:13] == "2024-01-01T18"
