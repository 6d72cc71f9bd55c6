"""Workers that are killed in the middle of a chord (reports B74 and B12)."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
from celery import chord
from celery.result import AsyncResult

from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, Worker, freeze_between_writes, wait_for

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(900)]

#: Rounds for each place and store.
ROUNDS = int(os.environ.get("TASKGATE_CHORD_ROUNDS", "3"))
LONG = 90.0
TASKS = "tests.workers.chords"
#: As tests.workers.chords calls them; that module wants a worker's environment.
PLACES = ["before the last part", "before the body", "before the commit", "after the body"]


class Fray:
    """A lab with workers that die at a place, and others that come after them."""

    def __init__(self, make_lab: MakeLab, url: str, results: str | None = None, **conf: Any) -> None:
        conf = {"task_ignore_result": False, "imports": [TASKS], **conf}
        conf["result_backend"] = f"{TASKS}:Victim+{results or url}"
        self.lab: Lab = make_lab(url, conf, lease_ttl=2.0, lease_lost_max=1000, max_deliveries=1000)
        self.kill = self.lab.folder / "kill"
        #: The test only reads.
        self.lab.app.conf.result_backend = f"taskgate+{results or url}"
        self.deaths = 0

    def worker(self) -> Worker:
        return self.lab.start_worker("-c2", "-Pthreads", ready=False, TASKGATE_TEST_KILL=str(self.kill))

    def living(self, number: int) -> list[Worker]:
        """Replace the dead."""
        alive = [worker for worker in self.lab.workers if worker.alive]
        while len(alive) < number:
            alive.append(self.worker())
        return alive

    def arm(self, place: str) -> None:
        fresh = self.kill.with_suffix(".new")
        fresh.write_text(place, encoding="utf-8")
        fresh.rename(self.kill)

    def sig(self, name: str, *args: Any) -> Any:
        return self.lab.app.signature(f"{TASKS}.{name}", args=args)

    def join(self, number: int) -> AsyncResult:
        return chord([self.sig("part", n) for n in range(number)], app=self.lab.app)(self.sig("body"))

    def after_a_kill_at(self, place: str, number: int) -> AsyncResult:
        """Publish a chord and have a worker die at the place; the chord that has ended all the same."""
        self.arm(place)
        result = self.join(number)
        wait_for(lambda: not self.kill.exists(), LONG, f"a worker dies {place}")
        wait_for(lambda: any(not worker.alive for worker in self.lab.workers[-4:]), LONG, "it is dead")
        self.living(2)
        assert result.get(timeout=LONG) == list(range(number))
        return result

    def close(self) -> None:
        for worker in self.lab.workers:
            if worker.alive:
                worker.kill()
        backend = self.lab.app.backend
        backend.result_consumer.stop()
        backend.broker.close()

    def runs(self, result: AsyncResult) -> int:
        """How often the body was published: one that a dying worker had begun runs again under its first execution."""
        return len({line["execution"] for line in self.lab.journal.of("body", result.id)})


def test_killed_while_a_chord_ends(make_lab: MakeLab, database_url: str) -> None:
    """B74: before the last part, before the body and after it: the body runs once, with all values."""
    fray = Fray(make_lab, database_url)
    fray.living(2)
    results = [fray.after_a_kill_at(place, 4) for _ in range(ROUNDS) for place in PLACES]
    wait_for(lambda: not fray.lab.rows(), LONG, "nothing is left")
    assert [fray.runs(result) for result in results] == [1] * len(results)
    dead = [worker for worker in fray.lab.workers if worker.process.poll() == -signal.SIGKILL]
    assert len(dead) == len(results)
    fray.close()


def test_killed_between_results_and_acknowledgements(make_lab: MakeLab, main_url: str) -> None:
    """B74: three of ten tasks of a header run a second time after they have left their parts."""
    fray = Fray(make_lab, main_url)
    fray.living(2)
    fray.arm("after a part")
    result = fray.join(10)
    for number in range(3):
        wait_for(lambda: not fray.kill.exists(), LONG, "a worker dies")
        wait_for(
            lambda n=number: sum(not worker.alive for worker in fray.lab.workers) > n,  # type: ignore[misc]
            LONG,
            "it is dead",
        )
        if number < 2:
            fray.arm("after a part")
        fray.living(2)
    assert result.get(timeout=LONG) == list(range(10))
    wait_for(lambda: not fray.lab.rows(), LONG, "nothing is left")
    assert fray.runs(result) == 1
    assert len(fray.lab.journal.of("part")) >= 13
    fray.close()


def test_killed_where_broker_and_results_are_apart(make_lab: MakeLab, postgresql_url: str, tmp_path: Path) -> None:
    """In two databases the body begins at least once, and once unless its end is cut in the middle."""
    fray = Fray(make_lab, postgresql_url, f"sqlite:///{tmp_path}/results.db")
    fray.living(2)
    assert not fray.lab.app.backend.is_broker
    for place in PLACES:
        result = fray.after_a_kill_at(place, 3)
        wait_for(lambda: not fray.lab.rows(), LONG, "nothing is left")
        assert fray.runs(result) == 1
    fray.close()


def test_a_parent_that_runs_again(make_lab: MakeLab, main_url: str) -> None:
    """A chord whose ids are in the message is one chord, however often its publisher is run."""
    fray = Fray(make_lab, main_url)
    fray.living(2)
    inner = chord([fray.sig("quick", 1), fray.sig("quick", 2)], fray.sig("body"), app=fray.lab.app)
    result = inner.freeze()
    fray.lab.app.send_task(f"{TASKS}.publishes", (inner, True))
    wait_for(lambda: any(not worker.alive for worker in fray.lab.workers), LONG, "its worker is dead")
    fray.living(2)
    wait_for(lambda: len(fray.lab.journal.of("parent")) >= 2, LONG, "it has run again")
    wait_for(lambda: not fray.lab.rows(), LONG, "nothing is left")
    assert result.get(timeout=LONG) == [1, 2]
    assert fray.runs(result) == 1
    fray.close()


def test_a_frozen_worker_changes_no_result(make_lab: MakeLab, main_url: str, tmp_path: Path) -> None:
    """B12: who comes back after another has taken over stores neither a result nor a part."""
    fray = Fray(make_lab, main_url)
    go = tmp_path / f"go{uuid.uuid4().hex}"
    frozen = fray.worker().wait_ready()
    result = fray.lab.app.send_task("tests.workers.app.hold_until", (str(go),))
    wait_for(lambda: fray.lab.journal.starts(result.id), LONG, "it runs")
    freeze_between_writes(fray.lab.url, frozen.pid)
    fray.worker().wait_ready()
    wait_for(lambda: fray.lab.journal.starts(result.id) >= 2, LONG, "another has taken it over")
    go.touch()
    assert result.get(timeout=LONG) is None
    first = fray.lab.app.backend.broker.results.get([result.id])[result.id]
    frozen.thaw()
    wait_for(lambda: "refused: SUCCESS" in frozen.text(), LONG, "the frozen one is refused")
    assert fray.lab.app.backend.broker.results.get([result.id])[result.id] == first
    fray.close()
