"""Every pool of Celery: prefork, solo, threads, gevent, eventlet (reports B52, B57, B58, B60, B61)."""

from __future__ import annotations

import importlib.util
import threading
import time
import uuid
from collections.abc import Callable

import psycopg
import pytest

from tests import services
from tests.workers.fixtures import MakeLab
from tests.workers.harness import Journal, Lab, holds_for, wait_for

pytestmark = pytest.mark.slow

POOLS = {
    "prefork": ("--pool=prefork", "-c2"),
    "solo": ("--pool=solo",),
    "threads": ("--pool=threads", "-c4"),
    "gevent": ("--pool=gevent", "-c20"),
    "eventlet": ("--pool=eventlet", "-c20"),
}


def installed(pool: str) -> None:
    with services.skip_if_missing():
        if pool in ("gevent", "eventlet") and importlib.util.find_spec(pool) is None:
            raise services.ServiceMissing(f"{pool} is not installed: pip install {pool}")


@pytest.mark.parametrize("pool", POOLS)
def test_each_pool_consumes_publishes_waits_and_answers(make_lab: MakeLab, database_url: str, pool: str) -> None:
    installed(pool)
    lab = make_lab(database_url)
    worker = lab.start_worker(*POOLS[pool])
    spawned = [lab.send("spawn", 2) for _ in range(15)]
    later = lab.send("work", countdown=1)
    wait_for(lambda: later in lab.journal.ended(), 40, "what was delayed has run")
    wait_for(lambda: lab.journal.ends() == 15 * 3 + 1, 40, "all have run, and what they published")
    wait_for(lambda: not lab.rows(), 30, "all is settled")
    assert set(lab.journal.starts_each().values()) == {1}
    assert set(spawned) < lab.journal.ended()
    assert lab.app.control.ping(destination=[worker.name], timeout=30) == [{worker.name: {"ok": "pong"}}]
    assert "Traceback" not in worker.text()
    assert worker.terminate() == 0


def test_a_task_that_blocks_the_solo_pool_keeps_its_lease(make_lab: MakeLab, main_url: str) -> None:
    """B52: leases are renewed by a thread and over a connection of their own."""
    lab = make_lab(main_url, lease_ttl=4)
    lab.start_worker("-Psolo")
    id = lab.send("work", 11.0)
    wait_for(lambda: lab.journal.starts(id) == 1, 30, "it runs")
    lab.start_worker("-Psolo")
    wait_for(lambda: lab.journal.ends(id) == 1, 30, "it ends")
    assert lab.journal.starts(id) == 1
    wait_for(lambda: not lab.rows(), 30, "it is settled")


def test_children_are_replaced_after_their_number_of_tasks(make_lab: MakeLab, main_url: str) -> None:
    lab = make_lab(main_url)
    worker = lab.start_worker("-c2", "--max-tasks-per-child=3")
    ids = [lab.send("work") for _ in range(30)]
    wait_for(lambda: lab.journal.ended() == set(ids), 60, "all have run")
    wait_for(lambda: not lab.rows(), 30, "all are settled")
    assert set(lab.journal.starts_each().values()) == {1}
    assert len({line["pid"] for line in lab.journal.of("end")}) >= 10
    assert "Traceback" not in worker.text()


def most_at_once(journal: Journal) -> int:
    """How many tasks have run at the same time."""
    changes = [(line["time"], 1) for line in journal.of("start")] + [(line["time"], -1) for line in journal.of("end")]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most


def test_autoscale_grows_with_prefetch_one_and_leaves_nothing_leased(make_lab: MakeLab, main_url: str) -> None:
    """B61."""
    lab = make_lab(main_url, {"worker_prefetch_multiplier": 1})
    worker = lab.start_worker("--autoscale=6,1", AUTOSCALE_KEEPALIVE="1")
    ids = [lab.send("work", 0.5) for _ in range(60)]
    wait_for(lambda: lab.journal.ended() == set(ids), 60, "all have run")
    assert most_at_once(lab.journal) >= 4
    assert set(lab.journal.starts_each().values()) == {1}
    wait_for(lambda: not lab.rows(), 30, "all are settled")

    def children() -> int:
        answers = lab.app.control.inspect([worker.name], timeout=5).stats() or {}
        return len(answers[worker.name]["pool"]["processes"]) if answers else 0

    wait_for(lambda: children() == 1, 40, "it has scaled down")
    again = [lab.send("work", 0.2) for _ in range(12)]
    wait_for(lambda: set(again) <= lab.journal.ended(), 40, "it works on")
    wait_for(lambda: not lab.rows(), 30, "nothing is left leased")


def publish_from_threads(lab: Lab, threads: int, each: int) -> set[str]:
    """Publish from many threads of this process at once, with one app."""
    ids: list[str] = []
    wrong: list[BaseException] = []

    def publish() -> None:
        try:
            ids.extend([lab.send("work") for _ in range(each)])
        except BaseException as error:
            wrong.append(error)

    publishers = [threading.Thread(target=publish) for _ in range(threads)]
    for publisher in publishers:
        publisher.start()
    for publisher in publishers:
        publisher.join()
    assert wrong == []
    return set(ids)


@pytest.mark.timeout(300)  # it is a lot of work for a busy machine
def test_fifty_threads_publish_while_twenty_consume(make_lab: MakeLab, database_url: str) -> None:
    """B57."""
    lab = make_lab(database_url)
    worker = lab.start_worker("-Pthreads", "-c20")
    ids = publish_from_threads(lab, threads=50, each=20)
    assert len(ids) == 1000
    wait_for(lambda: lab.journal.ended() == ids, 200, "all have run")
    assert set(lab.journal.starts_each().values()) == {1}
    wait_for(lambda: not lab.rows(), 30, "all are settled")
    assert "Traceback" not in worker.text()


def sessions_named(url: str, name: str) -> Callable[[], int]:
    def count() -> int:
        with psycopg.connect(url) as connection:
            query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
            row = connection.execute(query, [name]).fetchone()
        assert row is not None
        return int(row[0])

    return count


@pytest.mark.postgresql
@pytest.mark.parametrize("pool", ["threads", "gevent", "eventlet"])
def test_tasks_that_publish_do_not_multiply_sessions(make_lab: MakeLab, postgresql_url: str, pool: str) -> None:
    """B58, B60: at most pool_size connections, one for renewals and one that listens, however many run at once."""
    installed(pool)
    mark = f"pools_{uuid.uuid4().hex[:10]}"
    lab = make_lab(postgresql_url, pool_size=4)
    worker = lab.start_worker(f"--pool={pool}", "-c50", url=f"{postgresql_url}?application_name={mark}")
    for _ in range(200):
        lab.send("spawn", 3)
    most = 0
    count = sessions_named(postgresql_url, mark)

    def done() -> bool:
        nonlocal most
        now = count()
        for _ in range(40):
            if now <= 4 + 2:
                break
            # A session that was closed is listed until the server's process has ended, and another may have begun.
            time.sleep(0.05)
            now = min(now, count())
        most = max(most, now)
        return lab.journal.ends() == 200 * 4

    wait_for(done, 80, "all have run, and what they published")
    assert 2 <= most <= 4 + 2
    wait_for(lambda: not lab.rows(), 30, "all are settled")
    wait_for(lambda: count() <= 4 + 2, 30, "no more sessions afterwards")
    holds_for(lambda: count() <= 4 + 2, 1.0, "no more sessions afterwards")
    assert set(lab.journal.starts_each().values()) == {1}
    assert "Traceback" not in worker.text()
