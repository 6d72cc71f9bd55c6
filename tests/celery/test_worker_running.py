"""What is kept of a pool's jobs while Celery connects again; test_reconnect.py shows the rest with real workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_ext.worker.running import RunningJobs


class Process:
    inqW_fd = 7  # noqa: N815  # billiard's name

    def _is_alive(self) -> bool:
        return True


class Job:
    def __init__(self, *, accepted: bool = True, ready: bool = False) -> None:
        self.states = accepted, ready
        self._write_to, self._scheduled_for = None, Process()

    def accepted(self) -> bool:
        return self.states[0]

    def ready(self) -> bool:
        return self.states[1]


def pool_of(jobs: dict[int, Job]) -> Any:
    return SimpleNamespace(_pool=SimpleNamespace(_cache=jobs, _busy_workers=set()))


def clear(pool: Any) -> None:
    pool._pool._cache.clear()
    pool._pool._busy_workers.clear()


def test_what_runs_comes_back_each_time() -> None:
    """Celery clears its pool again when an attempt to connect fails."""
    jobs = {1: Job(), 2: Job(accepted=False)}
    runs = jobs[1]
    pool = pool_of(jobs)
    running = RunningJobs(pool)
    running.keep()
    for _ in range(2):
        clear(pool)
        running.put_back()
        assert jobs == {1: runs}
        assert pool._pool._busy_workers == {Process.inqW_fd}
    running.release()
    clear(pool)
    running.put_back()
    assert not jobs


def test_what_has_ended_does_not_come_back() -> None:
    """Its process was found dead while the pool was cleared."""
    jobs = {1: Job()}
    pool = pool_of(jobs)
    running = RunningJobs(pool)
    running.keep()
    jobs[1].states = True, True
    clear(pool)
    running.put_back()
    assert not jobs
    assert not pool._pool._busy_workers


@pytest.mark.parametrize("pool", [SimpleNamespace(), SimpleNamespace(_pool=SimpleNamespace(_cache={1: Job()}))])
def test_other_pools_are_left_alone(pool: Any) -> None:
    """Pools of threads; pools of processes without an event loop, which no loop would tell when to let go."""
    running = RunningJobs(pool)
    running.keep()
    running.put_back()
    assert not running._jobs
