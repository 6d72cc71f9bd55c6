"""One broker, measured once: publishes, has workers execute, and prints the figures as a JSON object.

``compare.py`` runs this in a process of its own for each broker and round, with the settings of the app in its
environment (see ``app.py``) and a :class:`Plan` as JSON in its argument.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from app import app, due, echo, noop, total
from celery import chord
from workers import Marks, Worker, worker

#: What can be measured, in the order in which it is.
PARTS = ("publish", "batch", "prefork", "solo", "trips", "chord", "eta", "idle")
#: Messages that are published in one transaction.
BATCH = 200
#: Seconds after the last task has begun, in which it is acknowledged.
SETTLE = 0.3


@dataclass(frozen=True)
class Plan:
    """What to measure, and how much of it.

    Args:
        folder: for notes and logs.
        parts: some of :data:`PARTS`.
        tasks: in the backlog.
        trips, warm_ups: round trips that are measured, and those before them.
        chords, chord_size: how many, and tasks in the header of each.
        etas: tasks that become due at once.
        idle: seconds for which the idle worker is watched.
        limit: seconds after which a part that is too slow is broken off; what was done until then counts.
    """

    folder: str
    parts: tuple[str, ...] = PARTS
    tasks: int = 4000
    trips: int = 150
    warm_ups: int = 20
    chords: int = 3
    chord_size: int = 100
    etas: int = 60
    idle: float = 20.0
    limit: float = 120.0


def publish(number: int) -> float:
    """Publish so many, each by itself; messages per second."""
    with app.producer_pool.acquire(block=True) as producer:
        began = time.perf_counter()
        for count in range(number):
            noop.apply_async((count,), producer=producer)
        return number / (time.perf_counter() - began)


def publish_batch(number: int) -> float | None:
    """Publish so many in batches; messages per second, or ``None`` where kombu or the transport can't."""
    with app.producer_pool.acquire(block=True) as producer:
        if not getattr(producer, "supports_batch_publish", False):
            return None
        began = time.perf_counter()
        with producer.batch(max_size=BATCH):
            for count in range(number):
                noop.apply_async((count,), producer=producer)
        return number / (time.perf_counter() - began)


def drain(worker: Worker, marks: Marks, expected: int, limit: float) -> tuple[float, float]:
    """Let a worker that has just been started execute the backlog.

    Returns tasks per second, the first tenth not counted, and milliseconds of CPU per task, what had been used before
    the first was executed not counted.

    Raises:
        RuntimeError: nothing was executed.
    """
    before = [worker.cpu(look=True)]

    def begun() -> bool:
        if len(marks):
            return True
        before[0] = worker.cpu(look=True)
        return False

    if not worker.wait(begun, limit):
        raise RuntimeError(f"the worker has executed nothing within {limit:g} s: {worker.last_words()}")
    worker.wait(lambda: len(marks) >= expected, limit, every=0.02)
    time.sleep(SETTLE)
    used = worker.cpu(look=True) - before[0]
    times = marks.all()
    first = len(times) // 10
    return (len(times) - 1 - first) / (times[-1] - times[first]) * 1e9, used / len(times) * 1000


def round_trips(plan: Plan) -> dict[str, float]:
    """How long from ``delay()`` to the return of ``get()``, one after the other."""
    for number in range(plan.warm_ups):
        echo.delay(number).get(timeout=plan.limit)
    trips: list[float] = []
    end = time.monotonic() + plan.limit
    for number in range(plan.trips):
        began = time.perf_counter()
        echo.delay(number).get(timeout=plan.limit)
        trips.append((time.perf_counter() - began) * 1000)
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return {"trip_p50": statistics.median(trips), "trip_p99": sorted(trips)[math.ceil(0.99 * len(trips)) - 1]}


def chords(plan: Plan) -> float:
    """Seconds that a chord takes, median."""
    times: list[float] = []
    for _ in range(plan.chords):
        began = time.perf_counter()
        result = chord(echo.s(number) for number in range(plan.chord_size))(total.s())
        if result.get(timeout=plan.limit) != sum(range(plan.chord_size)):
            raise RuntimeError("the chord has come to a wrong result")
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def lateness(worker: Worker, marks: Marks, plan: Plan) -> dict[str, float]:
    """By how many milliseconds tasks with the same ETA are late."""
    marks.clear()
    eta = datetime.now(timezone.utc) + timedelta(seconds=2)
    at = round(eta.timestamp() * 1e9)
    for _ in range(plan.etas):
        due.apply_async((at,), eta=eta)
    if not worker.wait(lambda: len(marks) >= plan.etas, plan.limit, every=0.02):
        raise RuntimeError(f"of {plan.etas} tasks with an ETA only {len(marks)} have run")
    late = [nanoseconds / 1e6 for nanoseconds in marks.all()]
    return {"eta_p50": statistics.median(late), "eta_max": late[-1]}


def idle(worker: Worker, seconds: float) -> float:
    """Seconds of CPU per minute of a worker that has nothing to do."""
    time.sleep(min(2.0, seconds))  # what it did before comes to its end
    before, began = worker.cpu(look=True), time.monotonic()
    time.sleep(seconds)
    return (worker.cpu(look=True) - before) / (time.monotonic() - began) * 60


def measure(plan: Plan) -> dict[str, float | None]:
    """All parts of the plan; figures by name (see ``report.py``)."""
    found: dict[str, float | None] = {}
    parts, folder, queue = set(plan.parts), Path(plan.folder), str(app.conf.task_default_queue)
    marks = Marks(Path(os.environ["TASKGATE_BENCH_MARKS"]))
    publish(1)  # connects, and declares what there is to declare
    app.control.purge()
    waiting = 0
    if parts & {"publish", "prefork"}:
        rate = publish(plan.tasks)
        waiting = plan.tasks
        if "publish" in parts:
            found["published"] = rate
    if parts & {"prefork", "trips", "chord", "eta", "idle"}:
        marks.clear()
        with worker(queue, "prefork", 2, folder) as running:
            if "prefork" in parts:
                found["executed"], found["cpu"] = drain(running, marks, waiting, plan.limit)
            app.control.purge()  # what was left when the time was over
            waiting = 0
            echo.delay(0).get(timeout=plan.limit)  # it runs, and so does whatever carries results
            if "trips" in parts:
                found.update(round_trips(plan))
            if "chord" in parts:
                found["chord"] = chords(plan)
            if "eta" in parts:
                found.update(lateness(running, marks, plan))
            if "idle" in parts:
                found["idle"] = idle(running, plan.idle)
    if "batch" in parts:
        app.control.purge()
        found["batch"] = publish_batch(plan.tasks)
        waiting = 0 if found["batch"] is None else plan.tasks
    if "solo" in parts:
        if waiting != plan.tasks:
            publish(plan.tasks)
        marks.clear()
        with worker(queue, "solo", 1, folder) as running:
            found["executed_solo"], found["cpu_solo"] = drain(running, marks, plan.tasks, plan.limit)
    app.control.purge()
    return found


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(measure(Plan(**given))) + "\n")
