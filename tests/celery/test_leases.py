"""Leases: the living are never doubted, the dead are replaced (reports B01, B02, B07, B08, B13, B109)."""

from __future__ import annotations

import time

import psycopg
import pytest
from celery import Celery

from kombu_taskgate.core.model import State
from tests.workers.fixtures import MakeLab
from tests.workers.harness import holds_for, wait_for

pytestmark = pytest.mark.crash
#: More than a busy machine may pause between two renewals: whoever lives loses nothing.
TTL = 4.0


def test_task_longer_than_its_lease_is_delivered_once(make_lab: MakeLab, main_url: str) -> None:
    """B01: three workers, a task of four lease times."""
    lab = make_lab(main_url, lease_ttl=TTL)
    for _ in range(3):
        lab.start_worker("-c1", ready=False)
    for worker in lab.workers:
        worker.wait_ready()
    id = lab.send("work", 4 * TTL)
    wait_for(lambda: lab.journal.starts(id), 30, "start")

    def one_delivery() -> bool:
        return all((row.deliveries, row.lease_lost) == (1, 0) for row in lab.unfinished())

    holds_for(one_delivery, 3 * TTL, "delivered again while it ran", every=0.2)
    wait_for(lambda: lab.journal.ends(id), 30 + TTL, "end")
    wait_for(lambda: not lab.rows(), 30, "the row is gone after success")
    assert lab.journal.starts() == 1


def test_waiting_messages_keep_their_leases(make_lab: MakeLab, main_url: str) -> None:
    """B02: messages reserved behind a running task are renewed like it."""
    lab = make_lab(main_url, conf={"worker_prefetch_multiplier": 4}, lease_ttl=TTL)
    lab.start_worker("-c1")
    ids = [lab.send("work", 0.4 * TTL) for _ in range(5)]
    wait_for(lab.journal.starts, 30, "first start")
    lab.start_worker("-c1")  # idle, and joins late
    wait_for(lambda: lab.journal.ended() == set(ids), 30, "all five end")
    wait_for(lambda: not lab.rows(), 30, "all rows gone")
    assert lab.journal.starts() == 5


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_tasks_of_a_killed_worker_run_elsewhere(make_lab: MakeLab, main_url: str, pool: str) -> None:
    """B07: SIGKILL of a worker with four running tasks: all four start again soon after their leases have run out."""
    lab = make_lab(main_url, lease_ttl=TTL)
    first = lab.start_worker("-c4", f"-P{pool}")
    gate = lab.folder / "gate"
    ids = [lab.send("hold_until", str(gate)) for _ in range(4)]
    wait_for(lambda: lab.journal.starts() == 4, 30, "four running")
    lab.start_worker("-c4")
    killed = time.time()
    first.kill()
    # By the sessions, which were renewed: a row itself keeps the end that it was claimed with.
    ends = [found.lease_until for id in ids if (found := lab.broker.inspect(id)) is not None]
    over = max(end for end in ends if end is not None) / 1000
    wait_for(lambda: all(count == 2 for count in lab.journal.starts_each().values()), 30, "all four start again")
    late = max(line["time"] for line in lab.journal.of("start")) - over
    assert over > killed, "it was renewed until it was killed"
    print(f"the last started again {late:.2f} s after its lease had run out")  # noqa: T201  # a figure for people
    assert late < 5, f"the last of four started again {late:.1f} s after its lease had run out"
    assert all(line["redelivered"] for line in lab.journal.of("start") if line["time"] > killed)
    gate.touch()
    wait_for(lambda: lab.journal.ended() == set(ids), 30, "all end")
    wait_for(lambda: not lab.rows(), 30, "all rows gone")


def test_renewal_rewrites_no_leased_row(make_lab: MakeLab, postgresql_url: str) -> None:
    """B109: however many messages a worker holds, a renewal leaves one dead row version behind, not one for each."""
    lab = make_lab(postgresql_url, conf={"worker_prefetch_multiplier": 20}, lease_ttl=TTL)
    lab.start_worker("-c1")
    gate = lab.folder / "gate"
    ids = [lab.send("hold_until", str(gate)) for _ in range(20)]
    wait_for(lambda: sum(row.state is State.RUNNING for row in lab.rows()) == 20, 30, "all are claimed")

    def seen(column: str, table: str) -> set[str]:
        with psycopg.connect(postgresql_url) as connection:
            rows = connection.execute(f"SELECT {column}::text FROM {lab.options['table_prefix']}{table}").fetchall()
        return {row[0] for row in rows}

    versions = seen("(id, xmin)", "tasks")
    renewals: set[str] = set()
    wait_for(lambda: renewals.update(seen("until_", "sessions")) or len(renewals) >= 5, 30, "four renewals")
    assert seen("(id, xmin)", "tasks") == versions
    gate.touch()
    wait_for(lambda: lab.journal.ended() == set(ids), 30, "all end")
    assert set(lab.journal.starts_each().values()) == {1}


def test_lease_time_has_nothing_to_do_with_task_time(make_lab: MakeLab, main_url: str) -> None:
    """B08: one lease time for both: a long healthy task runs once, a dead worker is replaced soon."""
    ttl = TTL
    lab = make_lab(main_url, lease_ttl=ttl)
    first, _ = lab.start_worker("-c1"), lab.start_worker("-c1")
    healthy = lab.send("work", 5 * ttl)
    wait_for(lambda: lab.journal.starts(healthy), 30, "healthy start")
    name = lab.journal.of("start", healthy)[0]["worker"]
    doomed_worker = next(worker for worker in lab.workers if worker.name != name)
    doomed = lab.send("hold_until", str(lab.folder / "gate"))
    wait_for(lambda: lab.journal.starts(doomed), 30, "doomed start")
    assert doomed_worker.name == lab.journal.of("start", doomed)[0]["worker"]
    lab.start_worker("-c1")
    killed = time.time()
    doomed_worker.kill()
    wait_for(lambda: lab.journal.starts(doomed) == 2, 30, "replacement start")
    assert lab.journal.of("start", doomed)[1]["time"] - killed < 2 * ttl + 3
    wait_for(lambda: lab.journal.ends(healthy), 6 * ttl + 30, "healthy end")
    assert lab.journal.starts(healthy) == 1
    del first


def test_lost_worker_is_not_a_failure(make_lab: MakeLab, main_url: str, tmp_path: object) -> None:
    """B13: between the kill and the rerun no failure is stored anywhere."""
    results = f"file://{tmp_path}"
    conf = {"result_backend": results, "task_ignore_result": False, "task_track_started": True}
    lab = make_lab(main_url, conf=conf, lease_ttl=TTL)
    app = Celery("asker", set_as_current=False, backend=results)
    first = lab.start_worker("-c1")
    id = lab.send("work", 0.5)
    wait_for(lambda: lab.journal.ends(id), 30, "warm-up")
    gate = lab.folder / "gate"
    id = lab.send("hold_until", str(gate))
    wait_for(lambda: lab.journal.starts(id), 30, "start")
    first.kill()
    lab.start_worker("-c1")
    seen = set()

    def again() -> bool:
        seen.add(app.AsyncResult(id).state)
        seen.update(row.state.value for row in lab.rows())
        return lab.journal.starts(id) == 2

    wait_for(again, 30, "rerun")
    assert not seen & {"FAILURE", State.FAILED.value, State.CANCELED.value}, seen
    gate.touch()
    wait_for(lambda: app.AsyncResult(id).state == "SUCCESS", 30, "success")


def test_poison_task_becomes_a_dead_letter(make_lab: MakeLab, main_url: str) -> None:
    """A task that takes its whole worker with it is stopped at lease_lost_max; others are not held up."""
    lab = make_lab(main_url, lease_ttl=TTL, lease_lost_max=2)
    gate = lab.folder / "gate"
    id = lab.send("hold_until", str(gate))
    for attempt in (1, 2):
        worker = lab.start_worker("-c1")
        wait_for(lambda attempt=attempt: lab.journal.starts(id) == attempt, 30, f"start {attempt}")
        worker.kill()
    lab.start_worker("-c1")
    dead = wait_for(lambda: lab.rows(states=[State.FAILED]), 30, "dead letter")[0]
    assert (dead.task_id, dead.lease_lost, dead.reason) == (id, 2, "lease_lost")
    assert dead.owner
    other = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(other), 30, "others go on")
    assert lab.journal.starts(id) == 2
