"""What is due when: taskgate's own scheduler, under a clock of the test's."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import crontab
from celery.schedules import schedule as interval
from kombu.exceptions import OperationalError

from celery_ext.beat.native import Native
from celery_ext.beat.plan import code_entries
from celery_ext.beat.publishing import Publisher
from celery_ext.beat.sending import NotSent, Sender
from celery_ext.result_settings import broker_settings
from kombu_taskgate.core.errors import ConfigError, StoreBusy, StoreUnavailable
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.schedules import Entry, TickState
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.clock import FakeClock
from tests.celery import results


def at(text: str) -> int:
    """Milliseconds of an instant in UTC."""
    return int(datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp() * 1000)


NOON = at("2026-06-01 12:00:00")


class Scene:
    """An app whose beat leads, on a clock that the test moves."""

    def __init__(self, settings: BrokerSettings, start: int = NOON, *, apart: bool = False, **conf: Any) -> None:
        self.clock = FakeClock(start)
        self.apart = apart
        self.app: Celery = results.make_app(settings, result_expires=None, **conf)
        self.broker = open_broker(settings, clock=self.clock)
        self.deadline: float | None = None
        self.publisher = Publisher(self.app)
        self.lead("one")
        self.tick()

    def lead(self, holder: str) -> None:
        """A new term, with a scheduler that knows nothing."""
        term = self.broker.terms.current("k")
        if term is not None:
            self.broker.terms.release("k", term.holder)
        term = self.broker.terms.try_acquire("k", holder, 10**8)
        assert term is not None
        self.term = term
        own = None if self.apart else broker_settings(self.app)
        settings = SimpleNamespace(starting_deadline=self.deadline)
        stores: Any = SimpleNamespace(key="k", schedules=self.broker.schedules, settings=settings)
        sender = Sender(self.broker.schedules, self.term, lambda: True, own)
        code = code_entries(self.app)
        now, publisher = self.clock.now_ms, self.publisher
        self.native = Native(self.app, stores, sender, code, now, publisher, look_every=0.0)

    def tick(self) -> float:
        return self.native.tick()

    def run(self, seconds: float, step: float = 1.0) -> None:
        """Pass after pass, this many seconds apart."""
        for _ in range(round(seconds / step)):
            self.clock.advance(step)
            self.tick()

    def sent(self, name: str | None = None) -> list[float]:
        """Due times of what was sent, in seconds after noon."""
        names = [] if name is None else [name]
        ticks = self.broker.schedules.ticks("k", names, 10_000)
        return sorted((tick.due_at - NOON) / 1000 for tick in ticks if tick.state is TickState.SENT)

    def add(self, name: str, schedule: str, **values: Any) -> None:
        assert self.broker.schedules.add("k", Entry(name, task="t", schedule=schedule, **values))
        self.tick()

    def entry(self, name: str) -> Entry:
        return next(entry for entry in self.broker.schedules.entries("k") if entry.name == name)

    def close(self) -> None:
        self.publisher.close()
        self.broker.close()
        results.close(self.app)


@pytest.fixture
def make(broker_settings: BrokerSettings) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def made(*args: Any, **options: Any) -> Scene:
        scenes.append(Scene(broker_settings, *args, **options))
        return scenes[-1]

    yield made
    for scene in scenes:
        scene.close()


#: What is about times alone needs no database.
@pytest.fixture
def scene_in_memory() -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def made(*args: Any, **options: Any) -> Scene:
        scenes.append(Scene(BrokerSettings(f"memory://{uuid.uuid4().hex}"), *args, **options))
        return scenes[-1]

    yield made
    for scene in scenes:
        scene.close()


Make = Callable[..., Scene]


def test_entries_of_code_and_store(make: Make) -> None:
    """Both are sent at their times, with what they carry, and by whoever leads."""
    schedule = {
        "code": {"task": "t", "schedule": 2.0, "args": [1], "kwargs": {"a": 2}, "options": {"queue": "own"}},
        "cron": {"task": "t", "schedule": crontab(minute="*/1"), "args": [BeatLazyFunc(lambda: "lazy")]},
    }
    scene = make(beat_schedule=schedule)
    scene.add("added", "interval 3", args="[7]", options='{"queue": "own", "priority": 4}')
    scene.tick()
    assert scene.sent() == []
    assert {entry.name for entry in scene.broker.schedules.entries("k")} == {"code", "cron", "added"}
    scene.run(6)
    assert scene.sent("code") == [2, 4, 6]
    assert scene.sent("added") == [3, 6]
    scene.run(54)
    assert scene.sent("cron") == [60]
    claims = scene.broker.dequeue(["own"], 100)
    assert len(claims) == 50
    assert sorted({claim.priority for claim in claims}) == [0, 4]
    (lazy,) = scene.broker.dequeue(["celery"], 10)
    assert b"lazy" in lazy.payload
    assert b"periodic_task_name" in lazy.payload
    scene.lead("two")
    scene.run(2)
    assert scene.sent("code")[-1] == 62


def test_missed_once(scene_in_memory: Make) -> None:
    """B88: however many due times were missed, one tick makes up for them; then the entry goes on."""
    scene = scene_in_memory(
        beat_schedule={
            "often": {"task": "t", "schedule": 10.0},
            "cron": {"task": "t", "schedule": crontab()},
        }
    )
    scene.run(20)
    scene.clock.advance(305)  # of 30 and 5 due times
    scene.lead("two")
    scene.tick()
    assert scene.sent("often") == [10, 20, 320]
    assert scene.sent("cron") == [300]
    scene.run(15)
    # 5 s late is a new rhythm; a crontab has its own.
    assert scene.sent("often") == [10, 20, 320, 335]
    scene.run(20)
    assert scene.sent("cron") == [300, 360]


def test_a_little_late_keeps_the_rhythm(scene_in_memory: Make) -> None:
    scene = scene_in_memory(beat_schedule={"often": {"task": "t", "schedule": 10.0}})
    scene.tick()
    scene.clock.advance(10.9)
    scene.tick()
    scene.run(20, 0.1)
    assert scene.sent() == [10, 20, 30]


@pytest.mark.parametrize("how", ["entry", "celery", "taskgate"])
def test_starting_deadline(scene_in_memory: Make, how: str) -> None:
    """B88: what is later than that is left out; what is not is sent."""
    own = {"starting_deadline": 30} if how == "entry" else {}
    conf = {"beat_cron_starting_deadline": 30} if how == "celery" else {}
    scene = scene_in_memory(beat_schedule={"cron": {"task": "t", "schedule": crontab(minute="*/5"), **own}}, **conf)
    scene.deadline = 30.0 if how == "taskgate" else None
    scene.tick()
    scene.clock.advance(300 + 31)
    scene.lead("two")
    scene.tick()
    assert scene.sent() == []
    scene.clock.advance(269 + 30)  # 600, and the deadline
    scene.lead("three")
    scene.tick()
    assert scene.sent() == [600]


def test_nothing_new_is_sent_at_once(make: Make) -> None:
    """B88: new, resumed and changed entries count from the moment at which they are seen."""
    scene = make()
    scene.tick()
    scene.add("cron", "crontab */10 * * * *")
    scene.run(5)
    assert scene.sent() == []
    scene.broker.schedules.change("k", "cron", enabled=False)
    scene.run(3600, 600)
    scene.broker.schedules.change("k", "cron", enabled=True)
    scene.run(5)
    assert scene.sent() == []
    assert scene.tick() <= 600
    scene.broker.schedules.change("k", "cron", schedule="crontab 59 * * * *")
    scene.run(5)
    assert scene.sent() == []
    scene.run(3600, 60)
    assert len(scene.sent()) == 1


def test_rows_by_hand(sql_store: Any) -> None:
    """B90: inserted, changed, disabled and enabled with SQL alone, while beat runs."""
    import sqlalchemy as sa

    settings = BrokerSettings(sql_store.url, **sql_store.settings)
    scene = Scene(settings)
    table = f"{settings.table_prefix}entries"

    def sql(text: str) -> None:
        with sql_store.engine().begin() as conn:
            conn.execute(sa.text(text.replace("ENTRIES", table)))

    scene.tick()
    sql("INSERT INTO ENTRIES (key_, name, task, schedule) VALUES ('k', 'hand', 't', 'interval 10')")
    scene.run(12)
    assert scene.sent() == [11]  # seen after a second
    sql("UPDATE ENTRIES SET enabled = 0 WHERE name = 'hand'")
    scene.run(60)
    sql("UPDATE ENTRIES SET enabled = 1 WHERE name = 'hand'")
    scene.run(9)
    assert scene.sent() == [11]
    scene.run(4)
    assert len(scene.sent()) == 2
    sql("UPDATE ENTRIES SET schedule = 'interval 1' WHERE name = 'hand'")
    scene.run(5)
    assert len(scene.sent()) == 7
    sql("DELETE FROM ENTRIES WHERE name = 'hand'")
    scene.run(5)
    assert len(scene.sent()) == 7
    scene.close()


def test_removed_from_the_code(make: Make) -> None:
    """B94: it does not come back; what was added at run time stays."""
    scene = make(beat_schedule={"old": {"task": "t", "schedule": 1.0}, "kept": {"task": "t", "schedule": 1.0}})
    scene.add("added", "interval 1")
    scene.run(3)
    scene.app.conf.beat_schedule = {"kept": {"task": "t", "schedule": 1.0}}
    scene.lead("two")
    scene.run(3)
    assert scene.sent("old")[-1] == 3
    assert scene.sent("kept")[-1] == scene.sent("added")[-1] == 6


def test_added_in_place_of_code(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    scene = make()
    scene.add("both", "interval 5")
    scene.app.conf.beat_schedule = {"both": {"task": "t", "schedule": 1.0}}
    scene.lead("two")
    scene.run(6)
    assert scene.sent() == [5]
    assert caplog.text.count("was added at run time as well") == 1


def test_no_overlap_and_one_off(make: Make) -> None:
    scene = make()
    scene.add("long", "interval 1", no_overlap=True)
    scene.add("once", "interval 2", one_off=True)
    scene.run(5)
    assert scene.sent("long") == [1]
    assert scene.sent("once") == [2]
    assert not scene.entry("once").enabled
    for claim in scene.broker.dequeue(["celery"], 10):
        scene.broker.ack(claim)
    scene.run(2)
    assert scene.sent("long") == [1, 6]


def test_no_overlap_elsewhere(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """It can't be promised there, so such an entry is not sent at all."""
    scene = make(apart=True)
    scene.add("long", "interval 1", no_overlap=True)
    scene.add("other", "interval 1")
    scene.run(3)
    assert scene.sent("long") == []
    assert len(scene.sent("other")) == 3
    assert caplog.text.count("no_overlap needs") == 1


def test_run_now(make: Make) -> None:
    """Once for each request, beside the entry's own times, also while it is paused."""
    scene = make()
    scene.add("cron", "crontab 0 0 * * *")
    scene.run(2)
    assert scene.broker.schedules.request("k", "cron")
    scene.run(3)
    assert scene.sent() == [2]
    scene.broker.schedules.change("k", "cron", enabled=False)
    scene.run(3)
    assert scene.broker.schedules.request("k", "cron")
    scene.run(3)
    assert scene.sent() == [2, 8]
    assert not scene.entry("cron").enabled


def test_many_new_entries(scene_in_memory: Make) -> None:
    """What is due does not wait for thousands of others that are seen for the first time."""
    scene = scene_in_memory(beat_schedule={"often": {"task": "t", "schedule": 1.0}})
    for number in range(500):
        scene.broker.schedules.add("k", Entry(f"new {number}", task="t", schedule="interval 60"))
    scene.run(1)
    assert scene.sent() == [1]
    bases = [entry.base_at for entry in scene.broker.schedules.entries("k") if entry.name != "often"]
    assert 0 < sum(base is not None for base in bases) < 500
    scene.run(3)
    assert all(entry.base_at is not None for entry in scene.broker.schedules.entries("k"))
    scene.run(60)
    scene.run(0.02, 0.001)  # a hundred ticks at most in each pass
    assert sum(len(scene.sent(f"new {number}")) for number in range(500)) == 500


def test_the_clock_is_set_back(make: Make) -> None:
    """Intervals go on; minutes that were sent are not sent again."""
    scene = make(beat_schedule={"often": {"task": "t", "schedule": 10.0}, "cron": {"task": "t", "schedule": crontab()}})
    scene.run(125)
    assert scene.sent("cron") == [60, 120]
    scene.clock.advance(-600)
    scene.run(25)
    assert len(scene.sent("often")) == 12 + 2
    scene.run(600, 5)
    assert scene.sent("cron") == [60, 120]
    scene.run(60, 5)
    assert scene.sent("cron") == [60, 120, 180]


def test_rows_that_can_not_be_right(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Each is told once, and again when it has been changed to something wrong; the others go on."""
    scene = make()
    scene.add("good", "interval 1")
    scene.add("bad", "every now and then")
    scene.add("args", "interval 1", args="[")
    scene.add("never", "crontab 0 0 30 2 *")
    scene.run(5)
    assert len(scene.sent("good")) == 5
    assert scene.sent("bad") == scene.sent("args") == scene.sent("never") == []
    assert caplog.text.count("'bad'") == caplog.text.count("'args'") == 1
    scene.broker.schedules.change("k", "bad", schedule="interval 0")
    scene.run(3)
    assert caplog.text.count("'bad'") == 2
    scene.broker.schedules.change("k", "bad", schedule="interval 1")
    scene.run(3)
    assert len(scene.sent("bad")) >= 2


@pytest.mark.parametrize(
    "entry",
    [
        {"task": "t"},
        {"schedule": 1.0},
        {"task": "t", "schedule": 1.0, "color": "red"},
        7,
        {"task": "t", "schedule": 1.0, "timezone": "Mars/Olympus"},
        {"task": "t", "schedule": 1.0, "timezone": 5},
        {"task": "t", "schedule": "every minute"},
        {"task": "t", "schedule": ("crontab", 5)},
        {"task": "t", "schedule": float("inf")},
        {"task": "t", "schedule": 1.0, "options": "queue"},
        {"task": "t", "schedule": 1.0, "options": {"headers": 5}},
        {"task": "t", "schedule": 1.0, "starting_deadline": -5},
        {"task": "t", "schedule": 1.0, "starting_deadline": float("nan")},
        {"task": "t", "schedule": 1.0, "no_overlap": "no"},
        {"task": "t", "schedule": 1.0, "one_off": 1},
        {"task": "t", "schedule": 1.0, "no_overlap": True, "options": {"unique_key": "k"}},
    ],
)
def test_code_that_can_not_be_right(entry: Any) -> None:
    """It is told at start, with the entry's name."""
    app = Celery("wrong", broker="memory://", set_as_current=False)
    app.conf.beat_schedule = {"the entry": entry}
    with pytest.raises(ConfigError, match="the entry"):
        code_entries(app)
    app.close()


def test_code_may_say_it_in_pythons_words() -> None:
    """A zone and a time span, as :meth:`.Schedule.add` takes them."""
    app = Celery("right", broker="memory://", set_as_current=False)
    times = {"timezone": ZoneInfo("Europe/Berlin"), "starting_deadline": timedelta(minutes=1)}
    app.conf.beat_schedule = {"e": {"task": "t", "schedule": 1.0, **times}}
    row = code_entries(app)["e"].row
    assert (row.timezone, row.starting_deadline) == ("Europe/Berlin", 60)
    app.close()


def test_a_schedule_that_is_none() -> None:
    app = Celery("wrong", broker="memory://", set_as_current=False)
    app.conf.beat_schedule = ["e"]
    with pytest.raises(ConfigError, match="beat_schedule must be a dictionary"):
        code_entries(app)
    app.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [('{"headers": 5}', "headers must be a dictionary"), ('{"depends_on": ["nobody"]}', "nobody")],
)
@pytest.mark.parametrize("apart", [False, True])
def test_one_that_can_not_be_sent_holds_up_no_other(
    make: Make, caplog: pytest.LogCaptureFixture, options: str, said: str, apart: bool
) -> None:
    """What is wrong with its message is told, and all others are sent."""
    scene = make(apart=apart)
    scene.add("a bad one", "interval 1", options=options)
    scene.add("good", "interval 1")
    scene.run(3)
    assert len(scene.sent("good")) == len(scene.broker.list()) == 3
    assert scene.sent("a bad one") == []
    assert said in caplog.text


@pytest.mark.parametrize(
    "args",
    [
        "[" * 10_000 + "]" * 10_000,
        '[{"__type__": "datetime", "__value__": 5}]',
        '[{"__type__": [], "__value__": 5}]',
        '[{"__type__": "decimal", "__value__": "x"}]',
    ],
)
def test_json_that_can_not_be_read(scene_in_memory: Make, caplog: pytest.LogCaptureFixture, args: str) -> None:
    """Whatever reading it raises, all others are sent."""
    scene = scene_in_memory()
    scene.add("a bad one", "interval 1", args=args)
    scene.add("good", "interval 1")
    scene.run(3)
    assert len(scene.sent("good")) == len(scene.broker.list()) == 3
    assert "its args are no JSON" in caplog.text


def test_a_unique_key_elsewhere(make: Make) -> None:
    """A broker that refuses a second one is not away: the tick is over, and nobody sends it again."""
    scene = make(apart=True)
    scene.add("alone", "interval 1", options='{"unique_key": "u"}')
    scene.add("good", "interval 1")
    scene.run(3)
    assert (len(scene.sent("alone")), len(scene.sent("good"))) == (1, 3)
    assert len(scene.broker.list()) == 4
    assert scene.broker.schedules.unsent("k") == []


def test_one_that_rabbitmq_refuses(scene_in_memory: Make, rabbitmq_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """It closes the channel for it, which must not cost the next one its message."""
    queue = f"taskgate-test-{uuid.uuid4().hex}"
    nowhere = {"exchange": f"{queue}-nowhere", "routing_key": "nothing"}
    scene = scene_in_memory(
        apart=True,
        broker_url=rabbitmq_url,
        broker_transport_options={},
        beat_schedule={
            "a bad one": {"task": "t", "schedule": 1.0, "options": nowhere},
            "good": {"task": "t", "schedule": 1.0, "options": {"queue": queue}},
        },
    )
    with scene.app.connection_for_write() as connection:
        channel = connection.default_channel
        try:
            scene.run(4)
            assert channel.queue_declare(queue, passive=True).message_count == len(scene.sent("good")) == 4
        finally:
            channel.queue_delete(queue)
    assert "'a bad one' could not be sent" in caplog.text
    assert "'good' could not be sent" not in caplog.text


class Moody(interval):
    """A user's own, which does not always know."""

    moody = False

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        if self.moody:
            raise LookupError("no calendar")
        return super().remaining_estimate(last_run_at)


def test_a_schedule_that_does_not_know(scene_in_memory: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Whenever it raises the others go on, and it is asked again."""
    own = Moody(timedelta(seconds=1))
    scene = scene_in_memory(
        beat_schedule={"own": {"task": "t", "schedule": own}, "good": {"task": "t", "schedule": 1.0}}
    )
    scene.clock.advance(1)
    # What is due is known by now.
    own.moody = True
    scene.run(3)
    assert scene.sent("own") == []
    assert len(scene.sent("good")) == 3
    assert "no calendar" in caplog.text
    own.moody = False
    scene.run(3)
    assert len(scene.sent("own")) == 3


def test_a_database_that_is_away(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be sent is sent once it is back: one tick of an interval, not twenty."""
    scene = make(beat_schedule={"often": {"task": "t", "schedule": 1.0}})
    scene.run(3)
    before = scene.sent()

    def away(*_: Any, **__: Any) -> bool:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(scene.native._sender, "send", away)
        for _ in range(20):
            scene.clock.advance(1)
            with pytest.raises(StoreUnavailable):
                scene.tick()
    scene.tick()
    assert scene.sent() == [*before, 23]
    scene.run(2)
    assert scene.sent() == [*before, 23, 24, 25]


def test_an_entry_that_is_held_up(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By somebody's long transaction, which has its unique key, say: the others are sent; it is when it can be."""
    entry = {"task": "t", "schedule": 1.0}
    scene = make(beat_schedule={"a": entry, "held": entry, "z": entry})
    send, tries = scene.native._sender.send, []

    def held_up(due: Any, publish: Any) -> Any:
        if due.name == "held":
            tries.append(due.due_at)
            raise StoreBusy("locked")
        return send(due, publish)

    with monkeypatch.context() as patch:
        patch.setattr(scene.native._sender, "send", held_up)
        scene.run(20, step=0.5)
    # One that follows in the same pass is sent in the next one.
    assert len(scene.sent("a")) == 20
    assert len(scene.sent("z")) >= 18
    assert scene.sent("held") == []
    assert 3 <= len(tries) <= 5, "it is tried again, and not all the time"
    assert "'held' has to wait" in caplog.text
    scene.run(6)
    assert scene.sent("held")[-1] == 26


def test_an_entry_that_is_held_up_elsewhere(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been published and could not be marked as sent is seen to by whoever begins anew."""
    scene = make(apart=True, beat_schedule={"often": {"task": "t", "schedule": 1.0}})

    def held_up(*_: Any, **__: Any) -> bool:
        raise StoreBusy("locked")

    monkeypatch.setattr(scene.native._sender, "send", held_up)
    scene.clock.advance(1)
    with pytest.raises(StoreBusy):
        scene.tick()


def test_a_broker_that_is_away(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next leader sends what this one could not, under the same task id, and once."""
    scene = make(apart=True, beat_schedule={"often": {"task": "t", "schedule": 10.0}})
    scene.tick()
    scene.clock.advance(10)

    def away(*_: Any, **__: Any) -> None:
        raise OperationalError("away")

    with monkeypatch.context() as patch:
        patch.setattr(scene.publisher, "publish", away)
        with pytest.raises(NotSent):
            scene.tick()
    (tick,) = scene.broker.schedules.unsent("k")
    scene.lead("two")
    scene.tick()
    assert [task.task_id for task in scene.broker.list()] == [tick.task_id]
    assert scene.sent() == [10]
    scene.run(10)
    assert scene.sent() == [10, 20]


def test_one_tick_makes_up_for_both(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick that may not have been sent is not repeated when its entry is due again by then."""
    scene = make(apart=True, beat_schedule={"often": {"task": "t", "schedule": 10.0}})
    scene.clock.advance(10)

    def away(*_: Any, **__: Any) -> None:
        raise OperationalError("away")

    with monkeypatch.context() as patch:
        patch.setattr(scene.publisher, "publish", away)
        with pytest.raises(NotSent):
            scene.tick()
    scene.clock.advance(25)
    scene.lead("two")
    scene.tick()
    assert len(scene.broker.list()) == 1
    assert scene.broker.schedules.unsent("k") == []
    scene.run(10)
    assert len(scene.broker.list()) == 2


def test_an_hour_more_and_an_hour_less(scene_in_memory: Make) -> None:
    """On the days on which clocks change a daily entry runs once, an hourly one 23 and 25 times."""
    schedule = {
        "daily": {"task": "t", "schedule": crontab(minute="30", hour="2"), "timezone": "Europe/Berlin"},
        "hourly": {"task": "t", "schedule": crontab(minute="0"), "timezone": "Europe/Berlin"},
    }
    for day, hours in (("2026-03-28 23:00", 23), ("2026-10-24 22:00", 25)):
        start = at(day)
        scene = scene_in_memory(start - 1, beat_schedule=schedule)
        scene.tick()
        for _ in range(hours * 6):
            scene.tick()
            scene.clock.advance(600)
        assert len(scene.sent("hourly")) == hours
        assert len(scene.sent("daily")) == 1
