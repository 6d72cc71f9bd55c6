"""Celery gives its connection up and opens another, again and again (reports B16)."""

from __future__ import annotations

from pathlib import Path

import psutil
import psycopg
import pytest
import sqlalchemy as sa

from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, Worker, wait_for

pytestmark = pytest.mark.crash

POOLS = {"prefork": ("-c1",), "threads": ("-c1", "-Pthreads"), "solo": ("-Psolo",)}
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


def lose_connection(lab: Lab, worker: Worker, number: int) -> None:
    lab.app.control.broadcast("lose_connection", destination=[worker.name])
    wait_for(lambda: worker.text().count("Connected to") == number + 1, 20, f"reconnect {number}")


@pytest.mark.parametrize("pool", POOLS)
def test_twenty_times(postgresql_url: str, pool: str, make_lab: MakeLab) -> None:
    """Each time it consumes again, what runs goes on, and nothing is left of what it had before."""
    mark = "again-and-again"
    url = sa.make_url(postgresql_url).update_query_dict({"application_name": mark}).render_as_string(False)
    lab = make_lab(postgresql_url)
    worker = lab.start_worker(*POOLS[pool], url=url)
    gate = lab.folder / "gate"
    for number in range(1, TIMES + 1):
        if number == 3 and pool != "solo":  # solo runs a task instead of its event loop
            lab.send("hold_until", str(gate))
            wait_for(lambda: lab.journal.starts() == 1, 10, "one is running")
        lose_connection(lab, worker, number)
        if number == 3:
            gate.touch()
            lab.send("work", 0, "first")
            wait_for(lambda: [line for line in lab.journal.of("end") if line.get("tag") == "first"], 20, "it consumes")
            wait_for(lambda: not lab.rows(), 20, "what was running is acknowledged")
            before = threads(worker), descriptors(worker), sessions(postgresql_url, mark)
    last = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(last), 20, "it consumes")
    wait_for(lambda: not lab.rows(), 20, "all is settled")
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
