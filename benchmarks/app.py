"""The Celery app of the benchmarks: its settings come from the environment, as workers are processes of their own.

``TASKGATE_BENCH_CONF`` is a JSON object of Celery settings, ``TASKGATE_BENCH_MARKS`` the file in which tasks note that
they were executed.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import time

from celery import Celery

app = Celery("bench")
app.conf.update(json.loads(os.environ.get("TASKGATE_BENCH_CONF", "{}")))

#: One note of a task: a number of nanoseconds.
MARK = struct.Struct("=q")


@functools.cache
def _marks(pid: int) -> int:
    """The open file of notes; each process of a pool opens its own."""
    path = os.environ.get("TASKGATE_BENCH_MARKS", os.devnull)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def mark(nanoseconds: int) -> None:
    """Add one note: what is appended in one call is not mixed with what others append."""
    os.write(_marks(os.getpid()), MARK.pack(nanoseconds))


@app.task(ignore_result=True)
def noop(number: int) -> None:
    """Do nothing, and note when: on the clock that all processes of a machine share."""
    mark(time.monotonic_ns())


@app.task(ignore_result=True)
def due(at: int) -> None:
    """Note by how much this is later than a wall-clock time (nanoseconds)."""
    mark(time.time_ns() - at)


@app.task
def echo(value: int) -> int:
    """Return what was given."""
    return value


@app.task
def total(values: list[int]) -> int:
    """The body of the chord."""
    return sum(values)
