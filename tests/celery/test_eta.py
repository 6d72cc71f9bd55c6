"""ETAs wait in the database (reports B26, B27, B30, B31, B33)."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from celery import _state

from kombu_taskgate.core.model import NewTask, State
from tests.workers.fixtures import MakeLab
from tests.workers.harness import holds_for, wait_for
from tests.workers.servers import PrivateServer

#: Seconds that a due task may be late on a busy machine: far less than the 30 s after which a consumer that nobody has
#: told of anything looks by itself.
LATE = 15.0


@pytest.fixture(autouse=True)
def _current_app() -> Iterator[None]:
    """An app that a test makes current is current for that test only."""
    before = _state._tls.current_app
    yield
    _state._set_current_app(before)


def test_eta_far_beyond_the_lease_runs_once(make_lab: MakeLab, main_url: str) -> None:
    """B26: ETA beyond the lease time, three workers: each runs once, not early, and holds no lease meanwhile."""
    ttl = 4.0  # more than a busy machine may pause in the middle of a run
    lab = make_lab(main_url, lease_ttl=ttl)
    for _ in range(3):
        lab.start_worker("-c2", ready=False)
    for worker in lab.workers:
        worker.wait_ready()
    due = time.time() + 2.5 * ttl
    eta = datetime.fromtimestamp(due, timezone.utc)
    ids = {lab.send("work", 0, eta=eta) for _ in range(50)}

    def all_wait() -> bool:
        # The states first: while they are read it may become time.
        return lab.states() == {State.PENDING: 50} or time.time() > due - 0.5

    holds_for(all_wait, max(0.0, due - 0.5 - time.time()), "a waiting task was claimed", every=0.2)
    wait_for(lambda: lab.journal.ended() == ids, 30, "all ran")
    assert set(lab.journal.starts_each().values()) == {1}
    starts = [line["time"] for line in lab.journal.of("start")]
    assert min(starts) >= due
    assert max(starts) - due < LATE


def test_waiting_tasks_cost_a_worker_nothing(make_lab: MakeLab, main_url: str) -> None:
    """B27: 20,000 messages that are due in an hour: no lease, no memory, and other work is not held up."""
    lab = make_lab(main_url, lease_ttl=5.0)
    worker = lab.start_worker("-c1")
    warm = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(warm), 30, "warm-up")
    before = rss(worker.pid)
    lab.broker.enqueue_many([NewTask("celery", b"{}\n[]" * 50, type="later", delay=3600.0) for _ in range(20_000)])
    sent = time.time()
    id = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(id), 30, "normal task")
    assert lab.journal.of("start", id)[0]["time"] - sent < LATE
    assert lab.broker.counts()[("later", State.PENDING)] == 20_000
    assert rss(worker.pid) - before < 20 * 2**20


def test_due_tasks_are_shared(make_lab: MakeLab, main_url: str) -> None:
    """B27: 40 tasks become due at once: no worker hoards them, and each takes as many as it can run."""
    lab = make_lab(main_url, lease_ttl=10.0)
    workers = [lab.start_worker("-c2", ready=False) for _ in range(2)]
    for worker in workers:
        worker.wait_ready()
    gate = lab.folder / "gate"
    eta = datetime.now(timezone.utc) + timedelta(seconds=1.5)
    ids = {lab.send("hold_until", str(gate), eta=eta) for _ in range(40)}
    shares = {worker.name: 2 for worker in workers}
    wait_for(lambda: Counter(line["worker"] for line in lab.journal.of("start")) == shares, 30, "both are busy")
    holds_for(lambda: lab.states() == {State.RUNNING: 4, State.PENDING: 36}, 1.0, "a worker has more than it can run")
    gate.touch()
    wait_for(lambda: lab.journal.ended() == ids, 30, "all ran")
    assert set(lab.journal.starts_each().values()) == {1}


def rss(pid: int) -> int:
    """Resident memory in bytes."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


@pytest.mark.crash
def test_etas_survive_a_database_restart(make_lab: MakeLab, private_server: PrivateServer) -> None:
    """B30: the server restarts between publish and ETA."""
    lab = make_lab(private_server.url, lease_ttl=10.0)
    worker = lab.start_worker("-c2")
    due = time.time() + 3
    ids = {lab.send("work", 0, eta=datetime.fromtimestamp(due, timezone.utc)) for _ in range(10)}
    private_server.restart()
    up = time.time()
    wait_for(lambda: lab.journal.ended() == ids, 30, "all ran")
    starts = [line["time"] for line in lab.journal.of("start")]
    assert set(lab.journal.starts_each().values()) == {1}
    assert min(starts) >= due
    assert max(starts) - max(due, up) < LATE
    assert worker.alive


@pytest.mark.parametrize(("enable_utc", "zone"), [(True, "UTC"), (True, "Asia/Tokyo"), (False, "Asia/Tokyo")])
def test_one_instant_in_many_spellings(make_lab: MakeLab, tmp_path: Path, enable_utc: bool, zone: str) -> None:
    """B31: countdown, naive, UTC and another offset, with enable_utc on and off: due at the same instant."""
    conf = {"enable_utc": enable_utc, "timezone": zone}
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db", conf=conf)
    app = lab.make_app()
    app.set_current()  # whose zone a naive time is in
    instant = time.time() + 3600
    utc = datetime.fromtimestamp(instant, timezone.utc)
    local = utc.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    spellings = {
        "aware utc": {"eta": utc, "expires": utc + timedelta(hours=1)},
        "aware +09:00": {
            "eta": utc.astimezone(timezone(timedelta(hours=9))),
            "expires": utc.astimezone(timezone(timedelta(hours=9))) + timedelta(hours=1),
        },
        "seconds": {"countdown": 3600, "expires": 7200},
        "text": {"eta": utc.isoformat(), "expires": (utc + timedelta(hours=1)).isoformat()},
        "naive": {"eta": local, "expires": local + timedelta(hours=1)},
    }
    for options in spellings.values():
        lab.send("work", 0, app=app, **options)
    # "seconds" count from when it was sent.
    spent = time.time() + 3600 - instant
    rows = lab.rows()
    assert len(rows) == len(spellings)
    for row, name in zip(rows, spellings, strict=True):
        assert -1 < row.run_at / 1000 - instant < 1 + spent, name
        assert row.expires_at is not None, name
        assert -1 < row.expires_at / 1000 - instant - 3600 < 1 + spent, name


@pytest.mark.parametrize("enable_utc", [True, False])
def test_naive_times_run_and_expire_when_they_say(make_lab: MakeLab, tmp_path: Path, enable_utc: bool) -> None:
    """B31: naive times of an app nine hours ahead: the broker and the worker agree on them."""
    conf = {"enable_utc": enable_utc, "timezone": "Asia/Tokyo"}
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db", conf=conf)
    lab.app.set_current()
    lab.start_worker("-c1")
    now = datetime.now(ZoneInfo("Asia/Tokyo")).replace(tzinfo=None)
    due = lab.send("work", 0, eta=now + timedelta(seconds=1), expires=now + timedelta(seconds=60))
    gone = lab.send("work", 0, eta=now + timedelta(seconds=1), expires=now + timedelta(seconds=0.5))
    wait_for(lambda: lab.journal.ends(due), 30, "due task ran")
    wait_for(lambda: not lab.unfinished(), 30, "the expired one is dropped")
    assert lab.journal.starts(gone) == 0
    assert [row.task_id for row in lab.rows(states=[State.CANCELED])] == [gone]


def test_countdowns_short_long_and_absurd(make_lab: MakeLab, main_url: str) -> None:
    """B33: 0.2 s, 90 days and 30 years are taken, can be listed with their due time, and the short one runs."""
    lab = make_lab(main_url)
    lab.start_worker("-c1")
    now = time.time()
    delays = {lab.send("work", 0, countdown=seconds): seconds for seconds in (0.2, 90 * 86400, 30 * 365 * 86400)}
    spent = time.time() - now
    short = next(id for id, seconds in delays.items() if seconds == 0.2)
    wait_for(lambda: lab.journal.ends(short), 30, "the short one ran")
    start = lab.journal.of("start", short)[0]
    assert start["time"] - now < LATE
    for told in start["eta"]:  # of the request, as Celery has it, and of the message's own header
        assert -1 < datetime.fromisoformat(told).timestamp() - now - 0.2 < 1 + spent
    wait_for(lambda: len(lab.rows()) == 2, 30, "the short one is settled")
    for row in lab.rows():
        assert row.task_id is not None
        assert -1 < row.run_at / 1000 - now - delays[row.task_id] < 1 + spent


def test_clock_change_between_publish_and_due_shifts_nothing(make_lab: MakeLab, tmp_path: Path) -> None:
    """B33: an ETA across the end of summer time is an instant, not a wall-clock reading."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db", conf={"timezone": "Europe/Berlin"})
    summer = datetime(2035, 10, 28, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=0)
    winter = summer.replace(fold=1)
    for eta in (summer, winter):
        lab.send("work", 0, eta=eta)
    first, second = (row.run_at for row in lab.rows())
    assert second - first == 3600 * 1000
    assert first == summer.timestamp() * 1000
