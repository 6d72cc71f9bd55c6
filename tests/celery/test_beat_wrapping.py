"""Scheduler classes of others: which one is wrapped, and what it is told."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery.beat import PersistentScheduler, ScheduleEntry, Scheduler
from celery.schedules import schedstate

from celery_ext.beat.sending import Sender, task_id_of
from celery_ext.beat.wrapping import Foreign, scheduler_class, scheduler_name
from celery_ext.result_settings import broker_settings
from kombu_taskgate.core.errors import ConfigError, NotLeader, StoreUnavailable
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.schedules import Source
from kombu_taskgate.core.settings import BrokerSettings
from tests.celery import results
from tests.workers.harness import wait_for


class Ours(PersistentScheduler):
    """A class of a user's, which says what it did."""

    said: list[str] = []  # noqa: RUF012  # of the class, since each term has an object of its own

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self.said.append(f"apply {entry.name}")
        super().apply_entry(entry, producer=producer)

    def sync(self) -> None:
        self.said.append("sync")
        super().sync()


class Scene:
    def __init__(self, cls: type[Scheduler] = Ours) -> None:
        Ours.said.clear()
        settings = BrokerSettings(f"memory://{uuid.uuid4().hex}")
        self.cls = cls
        self.app = results.make_app(settings, result_expires=None)
        self.app.conf.beat_schedule = {"often": {"task": "t", "schedule": 0.05, "options": {"queue": "own"}}}
        self.broker = open_broker(settings)
        self.stores: Any = SimpleNamespace(key="k", schedules=self.broker.schedules)
        self.leads = True

    def lead(self, holder: str = "one", ttl: float = 60.0) -> Foreign:
        term = self.broker.terms.try_acquire("k", holder, ttl)
        assert term is not None
        sender = Sender(self.broker.schedules, term, lambda: self.leads, broker_settings(self.app))
        return Foreign(
            self.cls, self.app, {"schedule_filename": "/nowhere/at/all"}, self.stores, sender, lambda: self.leads
        )

    def ticks(self) -> list[Any]:
        return self.broker.schedules.ticks("k")[::-1]

    def run(self, foreign: Foreign, number: int) -> None:
        wanted = len(self.ticks()) + number

        def sent() -> bool:
            foreign.tick()
            return len(self.ticks()) >= wanted

        wait_for(sent, 20, f"{number} ticks", every=0.001)

    def close(self) -> None:
        self.broker.close()
        results.close(self.app)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_it_sends_once_and_as_it_likes(scene: Scene) -> None:
    """Its own methods are called, its messages and ticks belong together, and it has no file."""
    foreign = scene.lead()
    scene.run(foreign, 3)
    assert Ours.said.count("apply often") == 3
    messages = [task.task_id for task in scene.broker.list()]
    assert messages == [tick.task_id for tick in scene.ticks()]
    assert messages == [task_id_of("k", "often", tick.due_at) for tick in scene.ticks()]
    assert {task.queue for task in scene.broker.list()} == {"own"}
    (row,) = scene.broker.schedules.entries("k")
    assert (row.source, row.total_run_count) == (Source.CODE, 3)
    assert scene.app.conf.beat_schedule["often"]["options"] == {"queue": "own"}
    foreign.close()


def test_the_next_one_knows_what_was_sent(scene: Scene) -> None:
    """A new scheduler believes the store and not its own beginning; nothing is sent for a time that is over."""
    scene.app.conf.beat_schedule = {"seldom": {"task": "t", "schedule": 3600.0}}
    foreign = scene.lead()
    now = datetime.now(timezone.utc)
    foreign.schedule["seldom"].last_run_at = now - timedelta(hours=5)
    scene.run(foreign, 1)
    foreign.tick()
    assert len(scene.ticks()) == 1
    scene.broker.terms.release("k", "one")
    second = scene.lead("two")
    # As a class does that keeps its state elsewhere, and has written it down long ago.
    second.schedule["seldom"].last_run_at = now - timedelta(hours=5)
    for _ in range(3):
        second.tick()
    assert len(scene.ticks()) == len(scene.broker.list()) == 1


def test_who_leads_no_more(scene: Scene) -> None:
    """It sends nothing and writes nothing."""
    foreign = scene.lead()
    scene.run(foreign, 1)
    scene.broker.terms.release("k", "one")
    scene.broker.terms.try_acquire("k", "two", 60)
    with pytest.raises(NotLeader):
        scene.run(foreign, 1)
    with pytest.raises(NotLeader):
        scene.run(foreign, 1)
    scene.leads = False
    Ours.said.clear()
    foreign.sync()
    foreign.close()
    assert len(scene.ticks()) == len(scene.broker.list()) == 1


def test_a_store_that_is_away(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it believes to have sent and has not is forgotten with it."""
    foreign = scene.lead()
    scene.run(foreign, 1)

    def away(*_: Any, **__: Any) -> bool:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(type(scene.broker.schedules), "tick", away)
        with pytest.raises(StoreUnavailable):
            scene.run(foreign, 1)
    with pytest.raises(StoreUnavailable):
        foreign.tick()
    again = scene.lead()
    scene.run(again, 1)
    assert len(scene.broker.list()) == 2


class OnceEntry(ScheduleEntry):
    """Due until it was sent, as one-off entries of django-celery-beat are."""

    def is_due(self) -> Any:
        return schedstate(self.total_run_count == 0, 0.01)


class Once(Scheduler):
    Entry = OnceEntry


def test_sent_once_and_for_all() -> None:
    """The next leader knows that it was sent, although the class that sent it has not written that down."""
    scene = Scene(Once)
    foreign = scene.lead()
    scene.run(foreign, 1)
    scene.broker.terms.release("k", "one")
    second = scene.lead("two")
    second.schedule["often"].last_run_at -= timedelta(hours=1)
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        second.tick()
    assert len(scene.broker.list()) == 1
    scene.close()


def test_paused_and_resumed(scene: Scene) -> None:
    """An entry of the code can be paused here too; when it is resumed it goes on."""
    foreign = scene.lead()
    scene.run(foreign, 2)
    scene.broker.schedules.change("k", "often", enabled=False)
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        foreign.tick()
    assert len(scene.ticks()) == 2
    scene.broker.schedules.change("k", "often", enabled=True)
    scene.run(foreign, 2)
    assert len(scene.broker.list()) == 4


def test_which_one_is_wrapped(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    conf, name = scene.app.conf, scheduler_name
    assert name(scene.app, "") == ""
    assert name(scene.app, "a:B") == "a:B"
    assert name(scene.app, "taskgate") == ""
    for own in ("taskgate", "celery.beat:PersistentScheduler"):
        conf.beat_scheduler = own
        assert name(scene.app, "") == ""
    conf.beat_scheduler = "a:B"
    assert name(scene.app, "") == "a:B"
    assert name(scene.app, "taskgate") == ""
    conf.beat_scheduler = "taskgate"
    registry = SimpleNamespace(ready=True, is_installed=lambda app: app == "django_celery_beat")
    monkeypatch.setitem(__import__("sys").modules, "django.apps", SimpleNamespace(apps=registry))
    monkeypatch.setitem(__import__("sys").modules, "django_celery_beat", SimpleNamespace())
    assert name(scene.app, "") == "django_celery_beat.schedulers:DatabaseScheduler"
    assert name(scene.app, "taskgate") == ""
    assert scheduler_class(f"{__name__}:Ours").__name__ == "Ours"
    for wrong in ("no.such:Thing", "celery:Celery"):
        with pytest.raises(ConfigError, match=wrong):
            scheduler_class(wrong)
