"""Where the time of one task goes, without workers: statements, microseconds, and the functions they are spent in.

    python benchmarks/micro.py postgresql://postgres@127.0.0.1:5432/test

Publishes as an app does (``apply_async`` over taskgate's transport), and claims and acknowledges as the delivery engine
does. A statement is one question to the database, BEGIN and COMMIT counted, and so one round trip where the database is
a server. CPU is that of this process; on SQLite the database's own work is in it.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import celery
import kombu
import sqlalchemy
from celery import Celery
from throwaway import bare, broker

import kombu_taskgate
from kombu_taskgate.core.model import Claim, NewTask
from kombu_taskgate.core.sql import SqlBroker
from kombu_taskgate.testing.statements import noted

#: Tasks in one transaction.
BATCHES = (1, 16, 64)
#: Functions of each library that are shown.
TOP = 5
#: Built-in functions in which a thread waits for a server, a disk, or another thread.
WAITS = ("wait", "poll", "select", "recv", "send", "connect", "acquire", "sleep", "read", "fsync")
QUEUE = "micro"


@dataclass(frozen=True)
class Cost:
    """What one task costs.

    Args:
        what: ``published``, or ``consumed`` (claimed and acknowledged).
        batch: tasks in one transaction.
        statements: per task.
        wall, cpu: microseconds per task.
    """

    what: str
    batch: int
    statements: float
    wall: float
    cpu: float


def cost(what: str, batch: int, tasks: int, do: Callable[[int], object]) -> Cost:
    """Do it for so many tasks, first counting statements and then by the clock, as counting takes time too.

    Args:
        what: see :class:`Cost`.
        batch: see :class:`Cost`.
        tasks: how many.
        do: does it for as many as it is told.
    """
    do(batch * 4)  # connections are open then, and statements compiled
    counted = max(batch, 64)
    with noted() as texts:
        do(counted)
    walls, cpus = [], []
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        do(tasks)
        walls.append((time.perf_counter() - wall) / tasks * 1e6)
        cpus.append((time.process_time() - cpu) / tasks * 1e6)
    return Cost(what, batch, len(texts) / counted, statistics.median(walls), statistics.median(cpus))


def noop(number: int) -> None:
    """The task; nobody executes it."""


class Publisher:
    """Publishes through Celery.

    Args:
        url: of the database.
        prefix: of the tables.
    """

    def __init__(self, url: str, prefix: str) -> None:
        self.app = Celery("micro", broker=f"taskgate+{url}", set_as_current=False)
        self.app.conf.update(broker_transport_options={"table_prefix": prefix}, task_default_queue=QUEUE)
        self.task = self.app.task(name="micro.noop", ignore_result=True)(noop)

    def publish(self, number: int, batch: int = 1) -> None:
        """Publish so many, in transactions of ``batch``."""
        with self.app.producer_pool.acquire(block=True) as producer:
            for first in range(0, number, batch):
                together: AbstractContextManager[Any] = producer.batch(max_size=batch) if batch > 1 else nullcontext()
                with together:
                    for count in range(first, min(number, first + batch)):
                        self.task.apply_async((count,), producer=producer)

    @property
    def batches(self) -> bool:
        """Whether the installed kombu can publish in batches."""
        return hasattr(kombu.Producer, "batch")

    def close(self) -> None:
        """Close its connections."""
        self.app.close()


class Consumer:
    """Claims and acknowledges as the delivery engine does: the last batch and the next in one transaction.

    Args:
        store: with enough in its queue.
    """

    def __init__(self, store: SqlBroker) -> None:
        self.store = store
        self.session = store.open_session("micro", 60.0)

    def consume(self, number: int, batch: int) -> None:
        """Claim and acknowledge so many, in transactions of ``batch``."""
        claims: list[Claim] = []
        for first in range(0, number, batch):
            limit = min(batch, number - first)
            _, claims = self.store.ack_and_dequeue(claims, [QUEUE], limit, owner="micro", session=self.session)
            if len(claims) != limit:
                raise RuntimeError(f"{limit} tasks were to be claimed, and {len(claims)} were")
        self.store.ack_many(claims)


def fill(store: SqlBroker, number: int) -> None:
    """Store so many tasks."""
    for first in range(0, number, 500):
        store.enqueue_many([NewTask(QUEUE, b"x" * 500, type="micro") for _ in range(min(500, number - first))])


def profile(publisher: Publisher, tasks: int) -> dict[str, Any]:
    """Where the time of publishing goes.

    Returns by library the microseconds per task in its own functions, and which of them take the most.
    """
    publisher.publish(20)
    profiler = cProfile.Profile()
    profiler.enable()
    publisher.publish(tasks)
    profiler.disable()
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    entries: dict[tuple[str, int, str], Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (file, line, name), (_, calls, own, *_) in entries.items():
        where = f"{Path(file).name}:{line} {name}" if line else name
        found[library(file, name)].append((own / tasks * 1e6, f"{where} ({calls / tasks:.1f} calls)"))
    return {
        group: {
            "microseconds": sum(own for own, _ in functions),
            "top": [{"microseconds": own, "function": where} for own, where in sorted(functions, reverse=True)[:TOP]],
        }
        for group, functions in sorted(found.items(), key=lambda item: -sum(own for own, _ in item[1]))
    }


def library(file: str, name: str) -> str:
    """To which library a function belongs, by its file."""
    if file == "~":  # it is written in C
        driver = any(part in name for part in ("psycopg", "sqlite3", "libpq", "pq."))
        return (
            "waiting"
            if not driver and any(f"'{wait}" in name or f".{wait}" in name for wait in WAITS)
            else ("driver" if driver else "Python")
        )
    for group, modules in _MODULES.items():
        if any(f"/{module}/" in file.replace("\\", "/") for module in modules):
            return "waiting" if group == "driver" and name.startswith(("wait", "_wait")) else group
    return "Python"


_MODULES = {
    "taskgate": (Path(kombu_taskgate.__file__).parent.name, "celery_ext"),
    "celery": (Path(celery.__file__).parent.name,),
    "kombu": (Path(kombu.__file__).parent.name, "amqp", "vine"),
    "SQLAlchemy": (Path(sqlalchemy.__file__).parent.name,),
    "driver": ("psycopg", "psycopg_binary", "psycopg2", "pymysql", "sqlite3"),
}


def measure(url: str, tasks: int) -> dict[str, Any]:
    """All of it, on tables that are dropped afterwards."""
    with broker(url) as store:
        publisher = Publisher(url, store.settings.table_prefix)
        consumer = Consumer(store)
        costs = []
        try:
            for batch in BATCHES if publisher.batches else BATCHES[:1]:
                publish = partial(publisher.publish, batch=batch)
                costs += [cost("published", batch, tasks, publish)]
            found = profile(publisher, tasks)
            store.purge(QUEUE)
            for batch in BATCHES:
                fill(store, 3 * tasks + 5 * batch + 64)
                costs += [cost("consumed", batch, tasks, partial(consumer.consume, batch=batch))]
                store.purge(QUEUE)
            store.close_session(consumer.session)
        finally:
            publisher.close()
    return {"costs": [asdict(one) for one in costs], "publisher": found}


def main() -> None:
    parser = argparse.ArgumentParser(description="statements and microseconds per task, and where they go")
    parser.add_argument("url", help="of a database")
    parser.add_argument("--tasks", type=int, default=2000, help="of each measurement (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args()
    found = measure(bare(given.url), given.tasks)
    if given.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'per task':10} {'batch of':>8} {'statements':>11} {'wall µs':>9} {'CPU µs':>9}")
    for one in found["costs"]:
        print(f"{one['what']:10} {one['batch']:>8} {one['statements']:>11.2f} {one['wall']:>9.0f} {one['cpu']:>9.0f}")
    print("\nWhere the time of a publisher goes, one message a transaction (profiled: dearer than above)")
    total = sum(group["microseconds"] for group in found["publisher"].values())
    for name, group in found["publisher"].items():
        print(f"\n{name}: {group['microseconds']:.0f} µs, {group['microseconds'] / total:.0%}")
        for function in group["top"]:
            print(f"  {function['microseconds']:7.1f} µs  {function['function']}")


if __name__ == "__main__":
    main()
