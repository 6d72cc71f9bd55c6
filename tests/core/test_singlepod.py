"""A job in one process at a time; its lock may be refused, lost, or out of reach."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kombu_taskgate.core.errors import ConfigError, NotLeader, StoreUnavailable
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.singlepod import SinglePod, SinglePodConfig, SqlLock
from kombu_taskgate.testing.stores import InDatabase
from kombu_taskgate.testing.threads import DEADLINE, wait_until

#: Times that let things happen soon; whatever is asserted does not depend on how soon.
QUICK = {"ttl": 5.0, "renew_every": 0.02, "pause": 0.0, "standby": 0.02}


class Key:
    """A lock that says what a test wants it to."""

    def __init__(self) -> None:
        self.free = True
        self.kept = True
        self.down = False
        self.calls: list[str] = []
        self.hang: threading.Event | None = None
        self.error: type[BaseException] = StoreUnavailable

    def lock(self, id: str, ttl: float) -> bool:
        self._say("lock")
        if self.free:
            self.free = False
            return True
        return False

    def renew(self, id: str, ttl: float) -> bool:
        self._say("renew")
        if self.hang is not None:
            self.hang.wait(DEADLINE)
        return self.kept

    def unlock(self, id: str) -> None:
        self._say("unlock")
        self.free = True

    def _say(self, word: str) -> None:
        self.calls.append(word)
        if self.down:
            raise self.error("the cable is cut")


class Job:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.errors: list[BaseException] = []
        self.work: Callable[[threading.Event], object] = lambda stop: stop.wait(DEADLINE)
        self.lock = threading.Lock()

    def run(self, stop: threading.Event) -> None:
        with self.lock:
            self.notes.append("begin")
        try:
            self.work(stop)
        finally:
            self.notes.append("end")

    def cleanup(self) -> None:
        self.notes.append("cleanup")


@pytest.fixture
def key() -> Key:
    return Key()


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def start(key: Key, job: Job) -> Iterator[Callable[..., SinglePod]]:
    pods: list[SinglePod] = []

    def start(**times: Any) -> SinglePod:
        config = SinglePodConfig(**{**QUICK, **times})
        pods.append(SinglePod("nightly", key, job.run, job.cleanup, config, on_error=job.errors.append))
        pods[-1].start()
        return pods[-1]

    yield start
    key.down = False
    if key.hang is not None:
        key.hang.set()
    for pod in pods:
        pod.stop()


def test_runs_again_and_again(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    job.work = lambda stop: None
    pod = start()
    wait_until(lambda: job.notes.count("end") >= 5, "it has run five times")
    assert pod.is_leader
    assert pod.stop()
    assert not pod.is_leader
    assert job.notes == ["begin", "end"] * (len(job.notes) // 2) + ["cleanup"]
    assert key.calls[0] == "lock"
    assert key.calls[-1] == "unlock"
    assert key.calls.count("lock") == 1
    assert job.errors == []
    notes = list(job.notes)
    assert pod.stop()
    assert job.notes == notes


def test_stop_ends_a_run(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    pod = start()
    wait_until(lambda: job.notes == ["begin"], "it runs")
    assert pod.stop()
    assert job.notes == ["begin", "end", "cleanup"]
    pod.start()
    wait_until(lambda: job.notes[3:] == ["begin"], "it runs again")


def test_lock_is_renewed_while_it_runs(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    start()
    wait_until(lambda: key.calls.count("renew") >= 5, "it is renewed")
    assert job.notes == ["begin"]


def test_pause_between_runs(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    """The lock is kept meanwhile, and a stop does not wait for it to pass."""
    job.work = lambda stop: None
    pod = start(pause=1000.0)
    wait_until(lambda: key.calls.count("renew") >= 5, "it is renewed")
    assert job.notes == ["begin", "end"]
    assert pod.stop()


def test_stands_by(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    key.free = False
    pod = start()
    wait_until(lambda: key.calls.count("lock") >= 5, "it tries")
    assert not pod.is_leader
    assert job.notes == []
    key.free = True
    wait_until(lambda: job.notes == ["begin"], "it runs")


def test_lost_lock(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    """The run is told to stop, what is left is cleaned up, and it competes again."""
    pod = start()
    wait_until(lambda: job.notes == ["begin"], "it runs")
    key.kept = False
    wait_until(lambda: "cleanup" in job.notes, "it has ended")
    key.kept = True
    wait_until(lambda: job.notes[3:4] == ["begin"], "it runs again")
    assert job.notes[:3] == ["begin", "end", "cleanup"]
    assert [type(error) for error in job.errors] == [NotLeader]
    assert pod.is_leader


def test_lock_that_can_not_be_renewed_in_time(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    pod = start(ttl=4.0, renew_every=0.05)
    wait_until(lambda: job.notes == ["begin"], "it runs")
    key.down = True
    wait_until(lambda: "cleanup" in job.notes, "it has ended")
    assert not pod.is_leader
    assert NotLeader in {type(error) for error in job.errors}


def test_renewal_that_hangs(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    """The lock is given up in time, without an answer."""
    key.hang = threading.Event()
    pod = start(ttl=4.0, renew_every=0.05)
    wait_until(lambda: "cleanup" in job.notes, "it has ended")
    assert [type(error) for error in job.errors] == [NotLeader]
    assert pod.stop()


def test_short_outage(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    pod = start(ttl=300.0)
    wait_until(lambda: job.notes == ["begin"], "it runs")
    key.down = True
    tried = len(key.calls)
    wait_until(lambda: len(key.calls) > tried + 3, "it tries")
    key.down = False
    tried = len(key.calls)
    wait_until(lambda: len(key.calls) > tried + 3, "it renews")
    assert pod.is_leader
    assert job.notes == ["begin"]
    assert job.errors == []


def test_store_that_is_away_at_first(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    key.down = True
    start()
    wait_until(lambda: len(key.calls) > 3, "it tries")
    key.down = False
    wait_until(lambda: job.notes == ["begin"], "it runs")
    assert [type(error) for error in job.errors] == [StoreUnavailable]


def test_run_that_takes_too_long(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    """It is told to stop and reported; the lock is kept, and the next run begins."""
    pod = start(max_run=0.05)
    wait_until(lambda: job.notes.count("begin") >= 3, "it runs again")
    assert {type(error) for error in job.errors} == {TimeoutError}
    assert len(job.errors) >= 2
    assert key.calls.count("lock") == 1
    assert pod.is_leader


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_run_that_raises(error: BaseException, key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    def refuse(stop: threading.Event) -> None:
        raise error

    job.work = refuse
    start()
    wait_until(lambda: len(job.errors) >= 3, "it runs again")
    assert set(job.errors) == {error}
    assert key.calls.count("lock") == 1


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_cleanup_and_callback_that_raise(key: Key, error: type[BaseException]) -> None:
    told: list[BaseException] = []
    runs: list[int] = []

    def refuse() -> None:
        raise error("the cleanup")

    def note(error: BaseException) -> None:
        told.append(error)
        raise type(error)("the callback")

    def run(stop: threading.Event) -> None:
        runs.append(1)
        raise error("the run")

    pod = SinglePod("x", key, run, refuse, SinglePodConfig(**QUICK), on_error=note)
    pod.start()
    wait_until(lambda: len(runs) > 2, "it goes on")
    key.kept = False
    wait_until(lambda: "unlock" in key.calls, "the lock is lost")
    key.kept = True
    wait_until(lambda: key.calls.count("lock") > key.calls.count("unlock"), "it has the lock again")
    assert pod.stop()
    assert {"the run", "the cleanup"} <= {str(error) for error in told}
    assert key.calls[-1] == "unlock"


def test_lock_that_exits(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    """A lock of the user's may raise anything, and is asked again."""
    key.error = SystemExit
    key.down = True
    start()
    wait_until(lambda: key.calls.count("lock") > 1, "it is asked again")
    key.down = False
    wait_until(lambda: job.notes, "it runs")
    renewals = key.calls.count("renew")
    key.down = True
    wait_until(lambda: key.calls.count("renew") > renewals + 1, "it is asked again")
    key.down = False
    renewals = key.calls.count("renew")
    wait_until(lambda: key.calls.count("renew") > renewals + 1, "it is renewed again")
    assert job.notes == ["begin"]


def test_run_that_can_not_be_started(
    key: Key, job: Job, start: Callable[..., SinglePod], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no more threads are to be had: the lock, which others could have, is not kept for nothing."""
    full = True

    class Thread(threading.Thread):
        def start(self) -> None:
            if full and self.name.startswith("taskgate-run"):
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(threading, "Thread", Thread)
    start()
    wait_until(lambda: len(job.errors) > 1, "it is tried again")
    full = False
    wait_until(lambda: job.notes, "it runs")
    assert {str(error) for error in job.errors} == {"can't start new thread"}


def test_run_that_does_not_end(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    """The lock is kept for as long as it runs: nobody else may begin."""
    end = threading.Event()
    job.work = lambda stop: end.wait(DEADLINE)
    pod = start(stop_within=0.0)
    wait_until(lambda: job.notes == ["begin"], "it runs")
    assert not pod.stop()
    renewed = key.calls.count("renew")
    wait_until(lambda: key.calls.count("renew") > renewed + 2, "it is renewed")
    assert "unlock" not in key.calls
    end.set()
    wait_until(lambda: "unlock" in key.calls, "it is given back")
    pod.start()
    wait_until(lambda: job.notes.count("begin") >= 2, "it runs again")


def test_stop_by_the_run(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    pods: list[SinglePod] = []
    job.work = lambda stop: wait_until(lambda: bool(pods), "it is known") or pods[0].stop()
    pods.append(start())
    wait_until(lambda: key.calls[-1] == "unlock", "it is given back")
    assert job.notes == ["begin", "end", "cleanup"]


def test_only_one_of_several_processes_runs(store_url: str) -> None:
    """On every store: four pods hand over, and no two run at a time."""
    store = None
    if not store_url.startswith("memory:"):
        store = InDatabase(store_url)
    settings = BrokerSettings(store_url, **({} if store is None else store.settings))
    running: list[int] = []
    most: list[int] = []
    runs: list[int] = []

    def job_of(number: int) -> Callable[[threading.Event], None]:
        def run(stop: threading.Event) -> None:
            running.append(number)
            most.append(len(running))
            runs.append(number)
            stop.wait(0.002)
            running.remove(number)

        return run

    locks = [SqlLock(settings) for _ in range(4)]
    config = SinglePodConfig(ttl=10.0, pause=0.0, standby=0.01)
    pods = [SinglePod("job", lock, job_of(number), config=config) for number, lock in enumerate(locks)]
    for pod in pods:
        pod.start()
    for _ in range(12):
        seen = len(runs)
        wait_until(lambda seen=seen: len(runs) > seen + 2, "somebody runs")  # type: ignore[misc]
        wait_until(lambda: any(pod.is_leader for pod in pods), "somebody leads")
        leader = next(pod for pod in pods if pod.is_leader)
        assert leader.stop()
        wait_until(lambda: any(pod.is_leader for pod in pods), "another one leads")
        leader.start()
    for pod in pods:
        assert pod.stop()
    assert max(most) == 1
    assert len(set(runs)) > 1, "the job has not changed hands"
    for lock in locks:
        lock.close()
    if store is not None:
        store.close()


@pytest.mark.parametrize(
    ("times", "named"),
    [
        ({"ttl": 10, "renew_every": 7}, "renew_every 7 s is too long for a ttl of 10 s"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": float("nan")}, "ttl"),
        ({"ttl": "15"}, "ttl"),
        ({"ttl": None}, "ttl"),
        ({"pause": "1"}, "pause"),
        ({"stop_within": None}, "stop_within"),
        ({"renew_every": 0}, "renew_every"),
        ({"standby": -1}, "standby"),
        ({"max_run": 0}, "max_run"),
        ({"pause": -1}, "pause"),
        ({"stop_within": float("inf")}, "stop_within"),
    ],
)
def test_times_that_do_not_fit(times: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SinglePodConfig(**times)


def test_wrong_id(key: Key) -> None:
    with pytest.raises(ConfigError):
        SinglePod("", key, lambda stop: None)


def test_child_does_not_lead(key: Key, job: Job, start: Callable[..., SinglePod]) -> None:
    pod = start()
    wait_until(lambda: pod.is_leader, "it leads")
    with warnings.catch_warnings():
        # Newer Pythons warn of forks with threads: that is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os._exit(0 if not pod.is_leader and pod.stop() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pod.is_leader
