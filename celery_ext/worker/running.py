"""Tasks that go on in a pool of processes while Celery connects again.

Celery before 5.7 lets its pool forget them (``AsynPool.flush``): their processes go on, but nobody hears of their end,
so they are never acknowledged, and the next task may be given to a process that is busy. Celery 5.7 keeps them; there
nothing is missing, and nothing is put back.
"""

from __future__ import annotations

from typing import Any


class RunningJobs:
    """What a pool ran when its connection was given up.

    Args:
        pool: Celery's pool of the worker; of other kinds than pools of processes nothing is kept.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._jobs: dict[int, Any] = {}

    def keep(self) -> None:
        """Note what runs: the connection has been given up, and Celery is about to clear the pool."""
        self._jobs.update((number, job) for number, job in self._cache().items() if job.accepted())

    def put_back(self) -> None:
        """After the pool was cleared: let it know again what has not ended."""
        cache = self._cache()
        for number, job in self._jobs.items():
            if job.ready():  # its process died meanwhile
                continue
            cache.setdefault(number, job)
            process = job._write_to or job._scheduled_for
            if process is not None and process._is_alive():
                self._pool._pool._busy_workers.add(process.inqW_fd)

    def release(self) -> None:
        """The event loop runs again. Until then Celery clears the pool anew whenever connecting fails.

        A message that is kept here longer than the pool keeps it would not go back: one whose task was canceled.
        """
        self._jobs.clear()

    def _cache(self) -> dict[int, Any]:
        # Celery clears no other pool: this one alone knows which of its processes are busy.
        pool: Any = getattr(self._pool, "_pool", None)
        cache: dict[int, Any] = pool._cache if hasattr(pool, "_busy_workers") else {}
        return cache
