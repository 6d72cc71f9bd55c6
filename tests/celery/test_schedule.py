"""The schedule at run time, on every store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab
from celery.schedules import schedule as interval

from celery_ext.beat.plan import code_entries
from celery_ext.schedule import EntryExists, EntryNotFound, Schedule
from kombu_taskgate.core.errors import ConfigError, StoreUnavailable
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.schedules import Entry, Progress, Source, Tick, TickState
from kombu_taskgate.core.settings import BrokerSettings
from tests.celery import results

BERLIN = ZoneInfo("Europe/Berlin")
NOW = 1_900_000_000_000


class Own(BaseSchedule):
    """A kind that no text means."""


@pytest.fixture
def app(broker_settings: BrokerSettings) -> Iterator[Celery]:
    with results.an_app(broker_settings, timezone="Europe/Berlin", beat_taskgate_key="k") as app:
        yield app


@pytest.fixture
def schedule(app: Celery) -> Iterator[Schedule]:
    with Schedule(app) as schedule:
        yield schedule


@pytest.fixture
def here() -> Iterator[Schedule]:
    """In memory, for what is refused before a store is asked."""
    with (
        results.an_app(BrokerSettings(f"memory://{uuid.uuid4().hex}"), timezone="Europe/Berlin") as app,
        Schedule(app) as schedule,
    ):
        yield schedule


def test_an_entry_comes_back_as_it_was_given(schedule: Schedule, app: Celery) -> None:
    @app.task(name="shop.report", shared=False)
    def report() -> None: ...

    moment = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
    added = schedule.add(
        "daily",
        report,
        crontab="0 9 * * mon-fri",
        args=[1, moment],
        kwargs={"a": {"b": [True, None]}, "id": uuid.UUID(int=1)},
        options={"queue": "big", "priority": 3},
        timezone="America/New_York",
        expires=timedelta(minutes=5),
        no_overlap=True,
        starting_deadline=60,
    )
    assert added == schedule.get("daily")
    assert schedule.list() == [added]
    assert (added.source, added.task, added.schedule) == ("added", "shop.report", "crontab 0 9 * * mon-fri")
    assert added.args == (1, moment)
    assert added.kwargs == {"a": {"b": [True, None]}, "id": uuid.UUID(int=1)}
    assert added.options == {"queue": "big", "priority": 3, "expires": 300.0}
    assert (added.timezone, added.no_overlap, added.one_off, added.starting_deadline) == (
        "America/New_York",
        True,
        False,
        60,
    )
    assert added.next_due is not None
    assert (added.next_due.hour, added.next_due.tzinfo) == (9, ZoneInfo("America/New_York"))
    assert added.created_at is not None
    assert abs(added.created_at - datetime.now(timezone.utc)) < timedelta(hours=1)
    assert (added.problem, added.last_run_at, added.requested_at) == (None, None, None)


def test_the_ways_to_say_when(here: Schedule) -> None:
    pytest.importorskip("ephem")
    given: list[tuple[dict[str, Any], str]] = [
        ({"every": 90}, "interval 90"),
        ({"every": 0.5}, "interval 0.5"),
        ({"every": timedelta(hours=2)}, "interval 7200"),
        ({"every": "5m"}, "interval 5m"),
        ({"crontab": crontab(minute=0, hour={9, 8})}, "crontab 0 8,9 * * *"),
        ({"solar": "sunset 52.5 13.4"}, "solar sunset 52.5 13.4"),
        ({"solar": ("sunset", 52.5, 13.4)}, "solar sunset 52.5 13.4"),
        ({"schedule": interval(timedelta(days=1), relative=True)}, "interval 86400 relative"),
        ({"schedule": "crontab 0 9 * * *"}, "crontab 0 9 * * *"),
    ]
    for number, (when, text) in enumerate(given):
        assert here.add(f"entry {number}", "t", **when).schedule == text


def test_the_zone_of_a_schedule_object_is_kept(here: Schedule) -> None:
    there = crontab(minute=0, hour=9)
    there.tz = ZoneInfo("Asia/Kolkata")
    assert here.add("there", "t", schedule=there).timezone == "Asia/Kolkata"
    assert here.add("app", "t", crontab=crontab(minute=0, hour=9)).timezone == "Europe/Berlin"
    assert here.add("said", "t", crontab=there, timezone=BERLIN).timezone == "Europe/Berlin"


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({}, "one of every, crontab, solar and schedule; given: none"),
        ({"every": 1, "crontab": "* * * * *"}, "given: every and crontab"),
        ({"every": 0}, "out of bounds"),
        ({"every": True}, "every is a number of seconds"),
        ({"every": float("nan")}, "out of bounds"),
        ({"every": timedelta(days=-1)}, "out of bounds"),
        ({"crontab": "0 9 * *"}, "it has 4 fields"),
        ({"crontab": "0 9 30 2 *"}, "never"),
        ({"schedule": Own()}, "a schedule of the kind Own can't be stored"),
        ({"schedule": 5}, "a schedule of the kind int can't be stored"),
        ({"every": 1, "timezone": "Europe/Berln"}, "did you mean Europe/Berlin?"),
        ({"every": 1, "timezone": timezone(timedelta(hours=1))}, "has no name that could be stored"),
        ({"every": 1, "args": "abc"}, "the args must be a list"),
        ({"every": 1, "args": [object()]}, "the args can't be stored"),
        ({"every": 1, "kwargs": {1: 2}}, "the kwargs must be a dictionary whose keys are texts"),
        ({"every": 1, "kwargs": {"a": {1, 2}}}, "the kwargs can't be stored"),
        ({"every": 1, "options": {"queu": "big"}}, "'queu' is not known: did you mean queue?"),
        ({"every": 1, "options": {"task_id": "1"}}, "each tick has an id of its own"),
        ({"every": 1, "options": {"headers": 5}}, "the headers must be a dictionary"),
        ({"every": 1, "options": {"expires": 5}, "expires": 6}, "expires is given twice"),
        ({"every": 1, "expires": -1}, "expires must be"),
        ({"every": 1, "starting_deadline": -1}, "starting_deadline must be 0 seconds to 100 years, not -1"),
        ({"every": 1, "no_overlap": True, "options": {"unique_key": "u"}}, "unique_key can't be given both"),
    ],
)
def test_what_can_not_be_right_is_refused_at_once(here: Schedule, values: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        here.add("entry", "t", **values)
    assert error in str(raised.value)
    assert here.list() == []


@pytest.mark.parametrize(("name", "task"), [("", "t"), ("x" * 256, "t"), ("a\0b", "t"), ("a", ""), ("a", "x" * 256)])
def test_names_out_of_bounds(here: Schedule, name: str, task: str) -> None:
    with pytest.raises(ConfigError):
        here.add(name, task, every=1)
    assert here.list() == []


def test_a_list_that_contains_itself_is_no_json(here: Schedule) -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(ConfigError, match="the args can't be stored"):
        here.add("entry", "t", every=1, args=ring)


def test_adding_twice(schedule: Schedule) -> None:
    schedule.add("entry", "one", every=60)
    with pytest.raises(EntryExists, match=r"'entry' already.*replace=True"):
        schedule.add("entry", "two", every=90)
    found = schedule.get("entry")
    assert found is not None
    assert (found.task, found.schedule) == ("one", "interval 60")
    assert schedule.add("entry", "two", every=90, replace=True).task == "two"
    assert [entry.schedule for entry in schedule.list()] == ["interval 90"]


def test_pausing_and_resuming(schedule: Schedule) -> None:
    schedule.add("entry", "t", every=60)
    paused = schedule.pause("entry")
    assert (paused.enabled, paused.next_due) == (False, None)
    assert schedule.resume("entry").next_due is not None
    assert schedule.add("other", "t", every=60, enabled=False).enabled is False


def test_running_now_and_removing(schedule: Schedule) -> None:
    schedule.add("entry", "t", every=60)
    assert schedule.run_now("entry").requested_at is not None
    schedule.remove("entry")
    assert schedule.get("entry") is None


def test_names_that_are_not_there(schedule: Schedule) -> None:
    schedule.add("reports", "t", every=60)
    for change in (schedule.pause, schedule.resume, schedule.remove, schedule.run_now):
        with pytest.raises(EntryNotFound, match=r"no entry 'report' in the schedule 'k': did you mean 'reports'\?"):
            change("report")
    with pytest.raises(EntryNotFound, match=r"no entry 'xyz' in the schedule 'k'$"):
        schedule.pause("xyz")
    assert schedule.get("xyz") is None


def test_how_far_it_has_come_and_its_ticks(schedule: Schedule, broker_settings: BrokerSettings) -> None:
    """As a leader leaves it."""
    schedule.add("entry", "t", every=60)
    schedule.add("other", "t", every=60)
    broker = open_broker(broker_settings)
    term = broker.terms.try_acquire("k", "me", 60)
    assert term is not None
    bases = {row.name: row.base_at for row in broker.schedules.entries("k")}
    for name, due in (("entry", NOW), ("entry", NOW + 60_000), ("other", NOW)):
        state = TickState.SKIPPED if name == "other" else TickState.SENT
        assert broker.schedules.tick(term, Tick(name, due, f"{name}-{due}", state), Progress(bases[name], due))
        bases[name] = due
    broker.close()
    found = schedule.get("entry")
    assert found is not None
    assert found.total_run_count == 2
    assert found.last_due_at == datetime.fromtimestamp(NOW / 1000 + 60, timezone.utc)
    assert found.last_due_at.tzinfo == BERLIN
    assert found.next_due == datetime.fromtimestamp(NOW / 1000 + 120, timezone.utc)
    assert found.last_run_at is not None
    ticks = schedule.ticks("entry")
    assert [(tick.name, tick.state, tick.task_id, tick.term) for tick in ticks] == [
        ("entry", "sent", f"entry-{NOW + 60_000}", term.number),
        ("entry", "sent", f"entry-{NOW}", term.number),
    ]
    assert ticks[0].due_at == found.last_due_at
    assert {tick.state for tick in schedule.ticks()} == {"sent", "skipped"}
    assert len(schedule.ticks(limit=1)) == 1


def test_entries_of_the_code_and_of_another_scheduler(
    schedule: Schedule, app: Celery, broker_settings: BrokerSettings
) -> None:
    app.conf.beat_schedule = {
        "code": {"task": "t", "schedule": crontab(minute=0, hour=9), "timezone": "Asia/Kolkata"},
        "own": {"task": "t", "schedule": Own()},
        "changed": {"task": "t", "schedule": 5.0},
    }
    broker = open_broker(broker_settings)
    term = broker.terms.try_acquire("k", "me", 60)
    assert term is not None
    rows = [planned.row for planned in code_entries(app).values()]
    rows.append(Entry("older", Source.CODE, "t", "interval 30"))
    rows = [replace(row, schedule="interval 1d") if row.name == "changed" else row for row in rows]
    broker.schedules.sync(term, rows)
    broker.schedules.tick(term, Tick("django", NOW), Progress(None, NOW, source=Source.FOREIGN))
    broker.close()
    found = {entry.name: entry for entry in schedule.list()}
    assert found["code"].next_due is not None
    assert (found["code"].source, found["code"].next_due.hour, found["code"].timezone) == ("code", 9, "Asia/Kolkata")
    # Of another version of the code, and of a kind that raises NotImplementedError.
    assert found["older"].next_due is not None
    assert found["changed"].next_due is not None
    assert found["changed"].next_due - datetime.now(timezone.utc) > timedelta(hours=1)
    assert (found["own"].next_due, found["own"].problem is None) == (None, False)
    assert (found["django"].source, found["django"].next_due) == ("foreign", None)
    assert schedule.pause("code").enabled is False
    assert schedule.run_now("code").requested_at is not None
    with pytest.raises(ConfigError):
        schedule.remove("code")
    for change in (schedule.pause, schedule.resume, schedule.run_now):
        with pytest.raises(ConfigError, match="'django' is another scheduler's"):
            change("django")


def test_rows_written_by_hand_are_listed_whatever_is_in_them(
    schedule: Schedule, broker_settings: BrokerSettings
) -> None:
    broker = open_broker(broker_settings)
    rows = [
        Entry("fine", task="t", schedule="interval 5"),
        Entry("schedule", task="t", schedule="sometimes"),
        Entry("zone", task="t", schedule="interval 5", timezone="Mars"),
        Entry("args", task="t", schedule="interval 5", args="{"),
        Entry("kwargs", task="t", schedule="interval 5", kwargs="[1]"),
        Entry("type", task="t", schedule="interval 5", args='[{"__type__": "uuid", "__value__": 5}]'),
        Entry("never", task="t", schedule="interval 5", base_at=2**62),
    ]
    for row in rows:
        assert broker.schedules.add("k", row)
    broker.close()
    found = {entry.name: entry for entry in schedule.list()}
    assert found["fine"].problem is None
    assert "'sometimes' can't be used" in str(found["schedule"].problem)
    assert "'Mars' is not known" in str(found["zone"].problem)
    assert "its args" in str(found["args"].problem)
    assert "its kwargs" in str(found["kwargs"].problem)
    assert "its args" in str(found["type"].problem)
    assert (found["never"].problem, found["never"].next_due) == (None, None)
    assert all(found[name].next_due is None for name in ("schedule", "zone", "args", "kwargs", "type"))


def test_a_broken_beat_schedule_does_not_hide_the_entries(here: Schedule) -> None:
    here.add("entry", "t", every=5)
    here._app.conf.beat_schedule = {"bad": 7}
    assert [entry.name for entry in here.list()] == ["entry"]


def test_no_overlap_needs_the_messages_in_the_same_database(redis_url: str) -> None:
    app = Celery("apart", broker=redis_url, set_as_current=False)
    app.conf.beat_taskgate_lease_url = f"memory://{uuid.uuid4().hex}"
    with Schedule(app) as schedule:
        with pytest.raises(ConfigError, match="no_overlap needs a taskgate broker"):
            schedule.add("entry", "t", every=5, no_overlap=True)
        assert schedule.add("entry", "t", every=5).name == "entry"
    app.close()


def test_a_store_that_is_away() -> None:
    app = Celery("away", broker="taskgate+postgresql://user:secret@127.0.0.1:1/x", set_as_current=False)
    with Schedule(app) as schedule, pytest.raises(StoreUnavailable) as raised:
        schedule.list()
    assert "secret" not in str(raised.value)
    app.close()


@pytest.mark.parametrize("task", [None, 5, len])
def test_what_is_no_task(here: Schedule, task: Any) -> None:
    with pytest.raises(ConfigError, match="the task must be its name"):
        here.add("entry", task, every=1)
    assert here.list() == []


@pytest.mark.parametrize("place", ["u:s3cret@127.0.0.1:1/d", "u@127.0.0.1:1/d?password=s3cret&connect_timeout=2"])
def test_a_password_is_not_shown(place: str) -> None:
    """Drivers read it in the query of a URL as well."""
    lost = Celery("lost", set_as_current=False, broker="memory://")
    lost.conf.beat_taskgate_lease_url = f"postgresql://{place}"
    with Schedule(lost) as schedule, pytest.raises(StoreUnavailable) as raised:
        schedule.list()
    assert "127.0.0.1:1/d" in str(raised.value)
    assert "s3cret" not in str(raised.value)


def test_the_current_app_is_asked_for_when_none_is_given(here: Schedule) -> None:
    with Schedule(stores=here._stores) as schedule:
        from celery import current_app

        assert schedule._app is current_app._get_current_object()
