"""Texts of schedules, and what they mean."""

from __future__ import annotations

import builtins
import sys
from datetime import timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, solar
from celery.schedules import schedule as interval
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_ext.beat.texts import own_zone, parse, show, zone, zone_name
from kombu_taskgate.core.errors import ConfigError


@pytest.fixture(scope="module")
def app() -> Celery:
    return Celery("texts", set_as_current=False)


@pytest.mark.parametrize(
    ("text", "seconds", "shown"),
    [
        ("interval 30", 30, "interval 30"),
        ("interval 30s", 30, "interval 30"),
        ("interval 0.25", 0.25, "interval 0.25"),
        ("  Interval   5m ", 300, "interval 300"),
        ("interval 2h", 7200, "interval 7200"),
        ("interval 1.5d", 129600, "interval 129600"),
        ("interval 0.001", 0.001, "interval 0.001"),
        ("interval 1e3", 1000, "interval 1000"),
        ("interval 1h relative", 3600, "interval 3600 relative"),
    ],
)
def test_intervals(app: Celery, text: str, seconds: float, shown: str) -> None:
    made = parse(text, app)
    assert made.run_every == timedelta(seconds=seconds)
    assert made.relative is shown.endswith("relative")
    assert made.app is app
    assert show(made) == shown
    assert parse(shown, app) == made


@pytest.mark.parametrize(
    ("text", "same", "shown"),
    [
        ("crontab 0 9 * * 1-5", crontab(0, 9, "1-5"), "crontab 0 9 * * 1-5"),
        ("crontab */15 8-18/2 1,15 * mon-fri", crontab("*/15", "8-18/2", "mon-fri", "1,15"), None),
        ("crontab 0 0 1 jan,Jul SUN", crontab(0, 0, 0, 1, "1,7"), "crontab 0 0 1 1,7 sun"),
        ("crontab 0 22-2 * * *", crontab(0, "22-2"), None),
        ("crontab * * * * *", crontab(), None),
    ],
)
def test_crontabs(app: Celery, text: str, same: crontab, shown: str | None) -> None:
    made = parse(text, app)
    assert made == same
    assert show(made) == (shown or text)
    assert parse(show(made), app) == made


sets = [st.sets(st.integers(low, high), min_size=1) for low, high in [(0, 59), (0, 23), (0, 6), (1, 28), (1, 12)]]


@settings(max_examples=100, deadline=None)
@given(st.builds(crontab, *sets))
def test_crontabs_of_numbers_go_there_and_back(cron: crontab) -> None:
    text = show(cron)
    assert len(text) <= 255
    assert parse(text, Celery("texts", set_as_current=False)) == cron


def test_a_crontab_too_long_for_the_store_is_written_in_ranges(app: Celery) -> None:
    long = crontab(set(range(60)), set(range(23)), set(range(7)), set(range(1, 32)), set(range(1, 13)))
    assert show(long) == "crontab 0-59 0-22 1-31 1-12 0-6"
    assert parse(show(long), app) == long


def test_what_was_written_in_code_is_shown_as_it_was_written(app: Celery) -> None:
    assert show(crontab(minute="0, 30", hour=[9, 8], day_of_week="mon")) == "crontab 0,30 8,9 * * mon"
    assert show(crontab(minute=(each for each in (5, 3)))) == "crontab 3,5 * * * *"
    assert parse(show(crontab(minute="0, 30")), app) == crontab(minute="0,30")
    assert show(interval(timedelta(days=2))) == "interval 172800"


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("", "it is empty", "write 'interval 30'"),
        ("every 30", "'every' is no kind", "write 'interval 30'"),
        ("interval", "not 0 words", "interval 5m"),
        ("interval 1 2", "not 2 words", "interval 5m"),
        ("interval soon", "'soon' is no number", "interval 5m"),
        ("interval 5w", "'5w' is no number", "interval 5m"),
        ("interval 0", "out of bounds", "0.001 seconds to 100 years"),
        ("interval -5", "out of bounds", "0.001 seconds to 100 years"),
        ("interval nan", "out of bounds", "0.001 seconds to 100 years"),
        ("interval inf", "out of bounds", "0.001 seconds to 100 years"),
        ("interval 1e999", "out of bounds", "0.001 seconds to 100 years"),
        ("interval 36601d", "out of bounds", "0.001 seconds to 100 years"),
        ("crontab 0 9 * *", "it has 4 fields", "write five"),
        ("crontab 60 9 * * *", "the minute '60' can't be read", "0-59"),
        ("crontab 0 9 0 * *", "the day of month '0' can't be read", "1-31"),
        ("crontab 0 9 * 13 *", "the month '13' can't be read", "1-12 or jan-dec"),
        ("crontab 0 9 * * 7", "the day of week '7' can't be read", "0 is Sunday"),
        ("crontab 0 9 * * someday", "the day of week 'someday' can't be read", "sun-sat"),
        ("crontab */0 9 * * *", "the minute '*/0' can't be read", "*/2"),
        ("crontab 1-5-7 9 * * *", "the minute '1-5-7' can't be read", "1-5"),
        ("crontab ,1 9 * * *", "the minute ',1' can't be read", "1,2"),
        ("crontab 5/10 9 * * *", "the minute '5/10' can't be read", "*/2"),
        ("solar sunset 52", "it has 2 words", "latitude, longitude"),
        ("solar sunst 52 13", "no event 'sunst'", "did you mean sunset?"),
        ("solar sunset north 13", "no numbers", "latitude, longitude"),
        ("solar sunset 91 13", "no such place", "-90 to 90"),
        ("solar sunset nan 13", "no such place", "-90 to 90"),
    ],
)  # fmt: skip
def test_what_can_not_be_right(app: Celery, text: str, wrong: str, right: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text, app)
    assert repr(text) in str(raised.value)
    assert wrong in str(raised.value)
    assert right in str(raised.value)


def test_solar_events(app: Celery) -> None:
    pytest.importorskip("ephem")
    made = parse("solar sunset 52.5 -13.4", app)
    assert made == solar("sunset", 52.5, -13.4)
    assert show(made) == "solar sunset 52.5 -13.4"


def test_without_ephem_it_is_said_what_to_install(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ephem", None)
    with pytest.raises(ConfigError, match=r"ephem is not installed.*pip install 'celery\[solar\]'"):
        parse("solar sunset 52.5 13.4", app)


class Own(BaseSchedule):
    def __init__(self, text: str | None) -> None:
        super().__init__()
        self.text = text

    def __repr__(self) -> str:
        return object.__repr__(self) if self.text is None else self.text


def test_schedules_of_other_kinds_are_shown_as_python_shows_them() -> None:
    assert show(Own("x" * 300)) == "x" * 255
    # The same in every process, or each new leader would take it for a change.
    assert "0x" not in show(Own(None))
    assert show(Own(None)) == show(Own(None))
    assert show(Own("\ud800\0")) == "?"

    class Broken(crontab):
        def __repr__(self) -> str:
            raise builtins.RuntimeError("no")

    assert show(Broken()) == "<Broken: RuntimeError>"


def test_zones(app: Celery) -> None:
    made: Any = parse("crontab 0 9 * * *", app, "America/New_York")
    assert made.tz == ZoneInfo("America/New_York")
    assert own_zone(made) == made.tz
    assert own_zone(parse("crontab 0 9 * * *", app)) is None
    with pytest.raises(ConfigError, match=r"'europe/berln' is not known: did you mean Europe/Berlin\?"):
        parse("interval 30", app, "europe/berln")
    for name in ("America", "/etc/passwd", "../UTC", "", "\0", "x" * 1000):
        with pytest.raises(ConfigError, match="is not known"):
            zone(name)
    assert zone("UTC") == ZoneInfo("UTC")


def test_names_of_zones() -> None:
    assert zone_name(ZoneInfo("Europe/Berlin")) == "Europe/Berlin"
    assert zone_name(timezone.utc) == "UTC"
    assert zone_name(timezone(timedelta(hours=1))) is None


def test_a_zone_of_a_class_counts() -> None:
    class There(crontab):
        tz = ZoneInfo("Asia/Kolkata")

    class Child(There):
        pass

    assert own_zone(There()) == ZoneInfo("Asia/Kolkata")
    assert own_zone(Child()) == ZoneInfo("Asia/Kolkata")
