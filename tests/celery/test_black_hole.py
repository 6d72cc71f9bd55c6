"""Networks that swallow everything without a word (reports B14, B17)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from kombu.exceptions import OperationalError

from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, Proxy, Worker, proxy_for, wait_for

pytestmark = [pytest.mark.crash]

#: So long the engine waits for an answer here; leases live for their usual 60 s.
ANSWER = 2.0


@dataclass
class Hole:
    """A worker behind a proxy; the lab itself goes straight to the database."""

    lab: Lab
    proxy: Proxy
    url: str
    worker: Worker


@pytest.fixture
def hole(server_url: str, make_lab: MakeLab) -> Iterator[Hole]:
    with proxy_for(server_url, 5432 if server_url.startswith("postgresql") else 3306) as (proxy, url):
        lab = make_lab(server_url, answer_timeout=ANSWER, connect_timeout=2.0)
        yield Hole(lab, proxy, url, lab.start_worker("-c2", url=url))
        for worker in lab.workers:
            if worker.alive:
                worker.kill()


def test_work_goes_on_after_it(hole: Hole) -> None:
    """What ran ends in the hole, is acknowledged after it, and is not started again; nor is anything else."""
    gate = hole.lab.folder / "gate"
    running = [hole.lab.send("hold_until", str(gate)) for _ in range(2)]
    wait_for(lambda: hole.lab.journal.starts() == 2, 30, "two running")
    hole.proxy.black_hole(True)
    gate.touch()
    wait_for(lambda: hole.lab.journal.ends() == 2, 30, "both end")
    waiting = [hole.lab.send("work", 0) for _ in range(4)]
    wait_for(lambda: "can't be used just now" in hole.worker.text(), 30, "it is noticed")
    hole.proxy.black_hole(False)
    wait_for(lambda: hole.lab.journal.ended() == {*running, *waiting}, 30, "all ran")
    wait_for(lambda: not hole.lab.rows(), 30, "all settled")
    assert set(hole.lab.journal.starts_each().values()) == {1}
    assert hole.worker.alive


def test_work_goes_on_over_new_connections_when_the_old_ones_stay_silent(hole: Hole) -> None:
    """As behind a firewall that has forgotten its connections, with a peer that still takes every byte."""
    gate = hole.lab.folder / "gate"
    running = [hole.lab.send("hold_until", str(gate))]
    wait_for(lambda: hole.lab.journal.starts() == 1, 30, "one running")
    assert hole.proxy.forget() >= 2
    gate.touch()
    ids = [hole.lab.send("work", 0) for _ in range(6)]
    wait_for(lambda: hole.lab.journal.ended() == {*running, *ids}, 30, "all ran")
    wait_for(lambda: not hole.lab.rows(), 30, "all settled")
    assert set(hole.lab.journal.starts_each().values()) == {1}
    reply = wait_for(lambda: hole.lab.app.control.ping(timeout=1), 20, "it can be asked")
    assert list(reply[0]) == [hole.worker.name]


def test_a_worker_in_it_ends_when_told(hole: Hole) -> None:
    gate = hole.lab.folder / "gate"
    id = hole.lab.send("hold_until", str(gate))
    wait_for(lambda: hole.lab.journal.starts() == 1, 30, "one running")
    hole.proxy.black_hole(True)
    gate.touch()
    wait_for(lambda: hole.lab.journal.ends() == 1, 30, "it ends")
    hole.worker.terminate(60)
    # The lease is the dead worker's until it runs out, or the last word got through when the hole closed.
    assert hole.lab.journal.starts(id) == 1


def test_publishing_in_it_fails_in_time(hole: Hole) -> None:
    """B17: the caller is told, in a time that answer_timeout and connect_timeout bound."""
    app = hole.lab.make_app(broker_url=f"taskgate+{hole.url}")
    kept = hole.lab.send("work", 0, app=app)
    wait_for(lambda: hole.lab.journal.ended() == {kept}, 30, "it can publish")
    hole.proxy.black_hole(True)
    for policy in ({"retry": False}, {"retry": True, "retry_policy": {"max_retries": 1, "interval_start": 0.1}}):
        with pytest.raises(OperationalError):
            hole.lab.send("work", 0, app=app, **policy)
    hole.proxy.black_hole(False)
    later = hole.lab.send("work", 0, app=app)
    wait_for(lambda: later in hole.lab.journal.ended(), 30, "it can publish again")
    app.close()
