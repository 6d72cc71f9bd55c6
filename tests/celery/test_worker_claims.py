"""worker_disable_prefetch: a worker reserves no more than its pool can run, and what it says at start."""

from __future__ import annotations

import pytest

from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, holds_for, wait_for

CONF = {"worker_disable_prefetch": True, "worker_prefetch_multiplier": 4}


def held_by(lab: Lab) -> list[int]:
    """How many tasks each worker has, most first; those that run although they were acknowledged too."""
    owners: dict[str, int] = {}
    for row in lab.rows():
        if row.owner is not None:
            owners[row.owner] = owners.get(row.owner, 0) + 1
    return sorted(owners.values(), reverse=True)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_nothing_is_reserved_beyond_the_pool(make_lab: MakeLab, main_url: str, pool: str) -> None:
    """Of six long tasks the only worker takes two; a second one, that comes later, starts two more at once."""
    lab = make_lab(main_url, conf=CONF)
    gate = lab.folder / "gate"
    ids = [lab.send("hold_until", str(gate)) for _ in range(6)]
    first = lab.start_worker("-c2", "-P", pool)
    wait_for(lambda: lab.journal.starts() == 2, 30, "two run")
    holds_for(lambda: held_by(lab) == [2], 0.5, "and no more are reserved")
    lab.start_worker("-c2", "-P", pool)
    wait_for(lambda: lab.journal.starts() == 4, 30, "two more run, although none of the first has ended")
    holds_for(lambda: held_by(lab) == [2, 2], 0.5, "and no more are reserved")
    gate.touch()
    wait_for(lambda: lab.journal.ended() == set(ids), 30, "all end")
    wait_for(lambda: not lab.rows(), 30, "all acknowledged")
    assert lab.journal.starts() == 6
    assert "taskgate claims no more than the pool can run" in first.text()


def test_tasks_acknowledged_early_fill_the_pool_too(make_lab: MakeLab, postgresql_url: str) -> None:
    """What was acknowledged at its start has left the prefetch window; it takes up a place in the pool all the same."""
    lab = make_lab(postgresql_url, conf={**CONF, "task_acks_late": False})
    gate = lab.folder / "gate"
    for _ in range(6):
        lab.send("hold_until", str(gate))
    lab.start_worker("-c2")
    wait_for(lambda: lab.journal.starts() == 2, 30, "two run")
    wait_for(lambda: sum(row.begun for row in lab.rows()) == 2, 30, "two are acknowledged")
    holds_for(lambda: held_by(lab) == [2], 0.5, "and nothing is reserved")
    gate.touch()
    wait_for(lambda: lab.journal.ends() == 6, 30, "all end")


def test_autoscaled_pool(make_lab: MakeLab, postgresql_url: str) -> None:
    """The pool may grow to three, so three are reserved, and it grows."""
    lab = make_lab(postgresql_url, conf=CONF)
    gate = lab.folder / "gate"
    for _ in range(6):
        lab.send("hold_until", str(gate))
    lab.start_worker("--autoscale=3,1")
    wait_for(lambda: lab.journal.starts() == 3, 30, "three run")
    holds_for(lambda: held_by(lab) == [3], 0.5, "and no more are reserved")
    gate.touch()
    wait_for(lambda: lab.journal.ends() == 6, 30, "all end")


def test_without_the_setting_the_window_counts(make_lab: MakeLab, postgresql_url: str) -> None:
    """Celery's default: a worker reserves worker_prefetch_multiplier tasks for each process."""
    lab = make_lab(postgresql_url, conf={**CONF, "worker_disable_prefetch": False})
    gate = lab.folder / "gate"
    for _ in range(9):
        lab.send("hold_until", str(gate))
    lab.start_worker("-c2")
    wait_for(lambda: held_by(lab) == [8], 30, "eight reserved")
    gate.touch()
    wait_for(lambda: lab.journal.ends() == 9, 30, "all end")


@pytest.mark.parametrize("late", [True, False])
def test_early_acknowledgement_is_told_at_start(make_lab: MakeLab, postgresql_url: str, late: bool) -> None:
    """One line that names the two settings, at a level that a worker shows by default; none when they are set."""
    lab = make_lab(postgresql_url, conf={"task_acks_late": late})
    worker = lab.start_worker("-c1", "-l", "WARNING", ready=False)
    id = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(id), 30, "it works")

    def lines() -> list[str]:
        return [line for line in worker.text().splitlines() if "task_acks_late is off" in line]

    if not late:
        wait_for(lines, 30, "it is told")
    assert len(lines()) == (0 if late else 1)
    assert all("task_reject_on_worker_lost = True" in line for line in lines())
