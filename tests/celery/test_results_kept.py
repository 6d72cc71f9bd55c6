"""Workers look after results by themselves, whatever their broker is."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from celery_ext.worker import results
from kombu_taskgate.core.results import Finality, NewResult
from kombu_taskgate.testing.threads import wait_until
from tests.workers.harness import wait_for


class Backend:
    """Counts what it is asked to do."""

    def __init__(self, rows: int = 0) -> None:
        self.rows = rows
        self.tended = self.swept = 0

    def tend_chords(self) -> int:
        self.tended += 1
        return 0

    def sweep(self) -> int:
        self.swept += 1
        rows, self.rows = min(self.rows, 10), max(0, self.rows - 10)
        return rows


class FakeKeeper:
    """Takes work and does it when it is told to."""

    def __init__(self) -> None:
        self.works: dict = {}

    def add(self, name, do, interval):
        self.works[name] = (do, interval)


def test_a_keeper_gets_the_work():
    """Stuck chords are looked for each time; a sweep that was not through goes on soon, another one later."""
    backend, keeper = Backend(rows=15), FakeKeeper()
    results.look_after(backend, keeper)
    chords, every = keeper.works["ending stuck chords"]
    assert (chords(lambda: False), every, backend.tended) == (None, results.CHORDS_EVERY, 1)
    sweep, every = keeper.works["deleting expired results"]
    assert [sweep(lambda: False) for _ in range(3)] == [results.GO_ON_AFTER, results.GO_ON_AFTER, None]
    assert (every, backend.swept) == (results.SWEEP_EVERY, 3)


def test_other_backends_are_left_alone():
    """A backend of Celery's own has nothing to look after."""
    keeper = FakeKeeper()
    results.look_after(object(), keeper)
    assert keeper.works == {}


def test_a_worker_deletes_what_has_expired(make_lab, main_url):
    """Results whose time is over go without a beat entry; others stay."""
    lab = make_lab(main_url, {"result_backend": f"taskgate+{main_url}", "task_ignore_result": False})
    stored = lab.broker.results
    for name, expires_in in (("old", 0.001), ("young", 3600.0)):
        stored.store(NewResult(name, "SUCCESS", Finality.SUCCEEDED, b"1", expires_in=expires_in))
    lab.start_worker("-P", "solo")
    wait_for(lambda: not stored.get(["old"]), 30, "the old result is gone")
    assert set(stored.get(["old", "young"])) == {"young"}


def test_a_worker_with_another_broker_has_a_keeper_of_its_own():
    """Where no step of ours runs, the signals of the worker start and end one."""
    backend = Backend()
    before = set(threading.enumerate())

    def keepers():
        return [thread for thread in set(threading.enumerate()) - before if thread.name == "taskgate-keeper"]

    app = SimpleNamespace(backend=backend)
    results._on_ready(SimpleNamespace(connection=SimpleNamespace(transport=object()), app=app))
    try:
        wait_until(lambda: backend.tended > 0 and backend.swept > 0, "the keeper has worked")
        assert keepers()
    finally:
        results._on_shutdown()
    assert not keepers()
