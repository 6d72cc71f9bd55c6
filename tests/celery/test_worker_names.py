"""Two living workers of one name (reports B43)."""

from __future__ import annotations

import time

import pytest

from tests.workers.fixtures import MakeLab
from tests.workers.harness import proxy_for, wait_for

pytestmark = pytest.mark.crash
TTL = 4.0
WARNING = "DuplicateNodenameWarning"


def test_two_workers_of_one_name(make_lab: MakeLab, main_url: str) -> None:
    """B43: both work, the tasks of either run elsewhere when it dies, and the second says what is wrong."""
    lab = make_lab(main_url, lease_ttl=TTL)
    first = lab.start_worker("-c1", "-n", "twin@test")
    second = lab.start_worker("-c1", "-n", "twin@test", TASKGATE_TEST_PATIENCE="30")
    assert WARNING not in first.text()
    assert second.text().count(WARNING) == 1
    for victim in (first, second):
        gate = lab.folder / f"gate{victim.pid}"
        ids = [lab.send("hold_until", str(gate)) for _ in range(2)]
        wait_for(lambda ids=ids: all(lab.journal.starts(id) for id in ids), 30, "both work")
        children = victim.children()
        doomed = next(id for id in ids if lab.journal.of("start", id)[0]["pid"] in children)
        victim.kill()
        if victim is first:
            # One that was killed has left its queue behind; the one that lives answers.
            lab.start_worker("-c1", "-n", "twin@test")
        else:
            lab.start_worker("-c1")
        wait_for(lambda id=doomed: lab.journal.starts(id) == 2, 30, "it starts again")
        gate.touch()
        wait_for(lambda ids=ids: lab.journal.ended() >= set(ids), 30, "both end")


def test_queue_of_a_dead_worker_is_no_namesake(make_lab: MakeLab, postgresql_url: str) -> None:
    """A worker that was killed leaves the queue of its name; the next one waits a second at most, and is silent."""
    lab = make_lab(postgresql_url, lease_ttl=TTL)
    lab.start_worker("-c1", "-n", "heir@test").kill()
    assert lab.broker.topology.queue("heir@test.celery.pidbox") is not None
    began = time.time()
    heir = lab.start_worker("-c1", "-n", "heir@test")
    assert time.time() - began < 30
    id = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(id), 30, "it works")
    assert WARNING not in heir.text()


def test_database_that_comes_later(make_lab: MakeLab, postgresql_url: str) -> None:
    """Without a database nobody can be asked: the worker says so as always, and starts when there is one."""
    lab = make_lab(postgresql_url)
    with proxy_for(postgresql_url, 5432) as (proxy, url):
        proxy.down()
        worker = lab.start_worker("-c1", ready=False, url=url)
        wait_for(lambda: "Trying again in" in worker.text(), 30, "it tries")
        proxy.up()
        worker.wait_ready()
        id = lab.send("work", 0)
        wait_for(lambda: lab.journal.ends(id), 30, "it works")
        worker.terminate()


def test_without_remote_control_nobody_is_asked(make_lab: MakeLab, postgresql_url: str) -> None:
    """Without remote control a name is nothing but a name."""
    lab = make_lab(postgresql_url, conf={"worker_enable_remote_control": False})
    workers = [lab.start_worker("-c1", "-n", "twin@test") for _ in range(2)]
    ids = [lab.send("work", 0.1) for _ in range(4)]
    wait_for(lambda: lab.journal.ended() == set(ids), 30, "they work")
    assert not any(WARNING in worker.text() for worker in workers)
