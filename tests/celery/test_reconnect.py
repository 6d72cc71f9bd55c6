"""Celery gives its connection up and opens another, again and again (reports B16)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest
import sqlalchemy as sa

from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, Worker, holds_for, wait_for

pytestmark = pytest.mark.crash

POOLS = {"prefork": ("-c2",), "threads": ("-c2", "-Pthreads"), "solo": ("-Psolo",)}
TIMES = 20
#: So many connections a process keeps when it is idle: half of pool_size; each is a session and a descriptor.
KEPT = 5


def sessions(url: str, mark: str) -> int:
    with psycopg.connect(url) as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        row = connection.execute(query, [mark]).fetchone()
    assert row is not None
    return int(row[0])


def threads(worker: Worker) -> int:
    return psutil.Process(worker.pid).num_threads()


def descriptors(worker: Worker) -> int:
    return len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))


def usual(worker: Worker, count: Callable[[], int]) -> tuple[int, int, int]:
    """Threads, descriptors and sessions; the most of each, for some may be about to be opened again."""
    seen = [(threads(worker), descriptors(worker), count())]
    holds_for(lambda: seen.append((threads(worker), descriptors(worker), count())) is None, 2.0, "it is looked at")
    most = [max(numbers) for numbers in zip(*seen, strict=True)]
    return most[0], most[1], most[2]


def lose_connection(lab: Lab, worker: Worker, number: int) -> None:
    lab.app.control.broadcast("lose_connection", destination=[worker.name])
    wait_for(lambda: worker.text().count("Connected to") == number + 1, 30, f"reconnect {number}")


def consumes(lab: Lab) -> None:
    ids = {lab.send("work", 0) for _ in range(2)}
    wait_for(lambda: ids <= lab.journal.ended(), 30, "it consumes")


def lose_connection_at_work(lab: Lab, worker: Worker, number: int) -> None:
    """Two tasks run, and one waits for a place in the pool."""
    gates = [lab.folder / "short", lab.folder / "long"]
    for gate in gates:
        lab.send("hold_until", str(gate))
    wait_for(lambda: lab.journal.starts() == 2, 30, "two are running")
    reserved = lab.send("work", 0)
    wait_for(lambda: f"[{reserved}] received" in worker.text(), 30, "another waits for a place")
    lose_connection(lab, worker, number)
    gates[0].touch()
    wait_for(lambda: lab.journal.ends(reserved), 30, "what had not begun begins")
    # One of these would come to the process that still runs a task, if it were not known that it does.
    consumes(lab)
    gates[1].touch()


@pytest.mark.parametrize("pool", POOLS)
def test_twenty_times(postgresql_url: str, pool: str, make_lab: MakeLab) -> None:
    """Each time it consumes again, what runs goes on, and nothing is left of what it had before."""
    mark = "again-and-again"
    url = sa.make_url(postgresql_url).update_query_dict({"application_name": mark}).render_as_string(False)
    lab = make_lab(postgresql_url, {"worker_prefetch_multiplier": 2})
    worker = lab.start_worker(*POOLS[pool], url=url)
    for number in range(1, TIMES + 1):
        if number != 3:
            lose_connection(lab, worker, number)
        elif pool == "solo":  # runs a task instead of its event loop
            lose_connection(lab, worker, number)
            consumes(lab)
        else:
            lose_connection_at_work(lab, worker, number)
        if number == 3:
            wait_for(lambda: not lab.rows(), 30, "what was running is acknowledged")
            before = usual(worker, lambda: sessions(postgresql_url, mark))
    last = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(last), 30, "it consumes")
    wait_for(lambda: not lab.rows(), 30, "all is settled")
    assert set(lab.journal.starts_each().values()) == {1}
    seen: list[tuple[int, ...]] = []

    def no_more() -> bool:
        seen[:] = [(threads(worker), descriptors(worker), sessions(postgresql_url, mark))]
        return all(have <= had + may for have, had, may in zip(seen[0], before, (1, KEPT, KEPT), strict=True))

    try:
        wait_for(no_more, 30, "nothing is left over")
    except AssertionError:
        raise AssertionError(f"threads, descriptors and sessions were {before} and are {seen[0]}") from None
    assert worker.alive
