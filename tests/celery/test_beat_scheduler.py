"""The scheduler that Celery's beat asks, when it is told to end, and around classes that do what they like."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.beat import Scheduler

from celery_ext.beat.scheduler import TaskgateScheduler
from celery_ext.beat.stores import Stores
from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.settings import BrokerSettings
from tests.celery import results
from tests.workers.harness import wait_for

Make = Callable[..., TaskgateScheduler]


@pytest.fixture
def make() -> Iterator[Make]:
    """Schedulers of one app, closed at the end."""
    app: Celery = results.make_app(BrokerSettings(f"memory://{uuid.uuid4().hex}"), result_expires=None)
    app.conf.update(beat_taskgate_lease_ttl=3.0, beat_schedule={"often": {"task": "t", "schedule": 0.05}})
    made: list[TaskgateScheduler] = []

    def scheduler(cls: type[Scheduler] | None = None) -> TaskgateScheduler:
        app.conf.beat_taskgate_scheduler = cls
        made.append(TaskgateScheduler(app))
        return made[-1]

    yield scheduler
    for one in made:
        one.close()
    results.close(app)


def run(scheduler: TaskgateScheduler, number: int = 2) -> None:
    """Pass after pass, until so many ticks were sent."""
    stores = scheduler._stores

    def sent() -> bool:
        scheduler.tick()
        return len(stores.schedules.ticks(stores.key)) >= number

    wait_for(sent, 20, f"{number} ticks", every=0.001)


def leader(scheduler: TaskgateScheduler) -> str | None:
    """Who leads by the store."""
    stores = scheduler._stores
    term = stores.terms.current(stores.key)
    return term.holder if term is not None and term.left > 0 else None


# -- told to end -------------------------------------------------------------------------------------


def test_while_it_is_made(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery's handler makes another one then, which must not wait for what the first one holds."""
    opened: list[Stores] = []

    def told(stores: Stores) -> None:
        opened.append(stores)
        assert len(opened) == 1, "it would wait for itself"
        make().close()
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Stores, "open", told)
        with pytest.raises(SystemExit):
            make()
    run(make())


def test_while_the_elector_starts(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds a lock then, which stopping it takes as well."""
    scheduler = make()
    run(scheduler)
    stopped: list[str] = []

    def told() -> None:
        scheduler.close()
        assert stopped == []
        raise SystemExit

    stop = scheduler._elector.stop
    with monkeypatch.context() as patch:
        patch.setattr(scheduler._elector, "start", told)
        patch.setattr(scheduler._elector, "stop", lambda: (stopped.append("stopped"), stop()))
        with pytest.raises(SystemExit):
            scheduler.tick()
        scheduler.close()
    assert stopped == ["stopped"]
    assert leader(scheduler) is None


def test_twice(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told again while it ends, it leaves that to the call that Celery makes when it has ended."""
    scheduler = make()
    run(scheduler)
    stop = scheduler._elector.stop
    stopped: list[str] = []

    def told() -> None:
        stopped.append("stopped")
        assert len(stopped) == 1, "it would wait for itself"
        scheduler.close()
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(scheduler._elector, "stop", told)
        with pytest.raises(SystemExit):
            scheduler.close()
        patch.setattr(scheduler._elector, "stop", stop)
        scheduler.close()
    assert leader(scheduler) is None


# -- around another class ----------------------------------------------------------------------------


class Raising(Scheduler):
    """It raises when it is made, when it is asked, and when it writes, each once."""

    left: list[str] = []  # noqa: RUF012  # of the class, since each term has an object of its own
    sync_every = 0

    def _raise(self, where: str) -> None:
        if where in self.left:
            self.left.remove(where)
            raise LookupError(f"in {where}")

    def setup_schedule(self) -> None:
        super().setup_schedule()
        self._raise("setup")

    def tick(self, *args: Any, **options: Any) -> float:
        self._raise("tick")
        return super().tick(*args, **options)

    def sync(self) -> None:
        self._raise("sync")

    def close(self) -> None:
        self._raise("close")


def test_what_it_raises_ends_nobody(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """It is told, with where it comes from, and tried again."""
    Raising.left[:] = ["setup", "tick", "sync", "close"]
    scheduler = make(Raising)
    run(scheduler)
    scheduler.close()
    assert Raising.left == []
    assert "in setup" in caplog.text
    assert any(record.exc_info for record in caplog.records)


class Strict(Scheduler):
    """It knows the arguments that Celery's beat gives, and no others."""

    def __init__(self, app: Any, max_interval: float | None = None, lazy: bool = False) -> None:
        super().__init__(app, max_interval=max_interval, lazy=lazy)


def test_it_is_given_what_beat_was_given(make: Make) -> None:
    run(make(Strict))


class Derived(TaskgateScheduler):
    """The app's own kind of this scheduler."""


def test_one_of_its_own_kind_is_not_wrapped(make: Make) -> None:
    """Two electors for one key in one process would wait for each other."""
    scheduler = make(Derived)
    assert scheduler._class is None
    scheduler.app.conf.beat_scheduler = Derived
    assert make()._class is None
    run(scheduler)


def test_entries_are_not_added_to_it(make: Make) -> None:
    with pytest.raises(ConfigError, match="add_periodic_task"):
        make().add(name="e", task="t", schedule=1.0)
