"""Instants are read as Celery's worker reads them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_taskgate.transport.times import parse_instant

#: Late enough for any zone.
AFTER_THE_EPOCH = datetime.fromisoformat("1970-01-03T00:00:00")
NOON = 1_790_856_000_000  # 2026-10-01 12:00 UTC


@pytest.mark.parametrize(
    "value",
    [
        "2026-10-01T12:00:00",
        "2026-10-01T12:00:00Z",
        "2026-10-01T12:00:00.000000+00:00",
        "2026-10-01T21:00:00+09:00",
        "2026-10-01T21:00+0900",
        "2026-10-01 07:00:00-05:00",
        NOON // 1000,
        NOON / 1000,
        datetime(2026, 10, 1, 12, tzinfo=timezone.utc).replace(tzinfo=None),
        datetime(2026, 10, 1, 21, tzinfo=timezone(timedelta(hours=9))),
    ],
)
def test_one_instant_in_many_spellings(value):
    assert parse_instant(value) == NOON


def test_a_naive_time_can_mean_another_zone():
    berlin = ZoneInfo("Europe/Berlin")
    assert parse_instant("2026-10-01T14:00:00", berlin) == NOON
    assert parse_instant("2026-10-01T14:00:00+02:00", ZoneInfo("Asia/Tokyo")) == NOON


@pytest.mark.parametrize(
    "value",
    ["", "soon", "2026-13-01T00:00:00", "2026-10-01T25:00:00", "12:00", None, True, 0, -1, float("nan"), float("inf")],
)
def test_garbage_is_no_instant(value):
    assert parse_instant(value) is None


@pytest.mark.parametrize("value", [[], {}, b"2026-10-01", 10**30, "2026-10-01T12:00:00+99:99:99x"])
def test_neither_are_other_types(value):
    assert parse_instant(value) is None


def test_the_ends_of_the_calendar():
    assert parse_instant("9999-12-31T23:59:59Z") == 253_402_300_799_000
    assert parse_instant("9999-12-31T23:59:59-12:00") == 253_402_300_799_000 + 12 * 3_600_000
    assert parse_instant("0001-01-01T00:00:00+12:00") == 0
    assert parse_instant("9999-12-31T23:59:59", ZoneInfo("America/New_York")) is not None


@given(st.datetimes(min_value=AFTER_THE_EPOCH, timezones=st.timezones()))
def test_isoformat_round_trip(when):
    expected = (when - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(milliseconds=1)
    assert parse_instant(when.isoformat()) == expected
