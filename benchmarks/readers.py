"""What readers of the hot table cost on PostgreSQL, as a ratio.

Each of four readers opens a REPEATABLE READ transaction, reads the table of tasks, holds the transaction for a while,
reads again, and begins anew. They overlap, so that there is always an old snapshot which keeps vacuum from removing
what has died since. This publishes, claims and acknowledges beside them and without them by turns.

    python benchmarks/readers.py postgresql://postgres@127.0.0.1:5432/test
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import sqlalchemy as sa
from throwaway import bare, broker

from kombu_taskgate.core.model import Claim, NewTask
from kombu_taskgate.core.sql import SqlBroker

READERS = 4
#: Seconds for which a reader holds its snapshot.
HOLD = 2.0
#: Tasks in one transaction.
BATCH = 16
QUEUE = "readers"


def read(url: str, table: str, late: float, stop: Any, ready: Any) -> None:
    """One reader, until it is stopped; it begins ``late`` seconds after the others so that snapshots overlap."""
    stop.wait(late)
    told = False
    with psycopg.connect(url, autocommit=True) as conn:
        while not stop.is_set():
            conn.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            conn.execute(f"SELECT count(*) FROM {table}")
            if not told:
                told = True
                ready.release()
            stop.wait(HOLD)
            conn.execute(f"SELECT count(*) FROM {table}")
            conn.execute("COMMIT")


def read_all(url: str, table: str, readers: int, stop: Any, ready: Any) -> None:
    """The process of the readers, each in a thread."""
    spread = HOLD / max(1, readers)
    threads = [
        threading.Thread(target=read, args=(url, table, number * spread, stop, ready)) for number in range(readers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def reading(url: str, table: str, readers: int) -> Iterator[None]:
    """Have readers in a process of their own read during the block.

    Raises:
        RuntimeError: they do not begin.
    """
    context = multiprocessing.get_context("spawn")
    stop, ready = context.Event(), context.Semaphore(0)
    process = context.Process(target=read_all, args=(url, table, readers, stop, ready))
    process.start()
    try:
        for _ in range(readers):
            if not ready.acquire(timeout=60):
                raise RuntimeError("the readers do not begin to read")
        yield
    finally:
        stop.set()
        process.join()


def throughput(store: SqlBroker, seconds: float) -> float:
    """Publish, claim and acknowledge; tasks per second."""
    tasks = [NewTask(QUEUE, b"x" * 500) for _ in range(BATCH)]
    session = store.open_session("bench", 60.0)
    claims: list[Claim] = []
    began, done = time.monotonic(), 0
    while time.monotonic() < began + seconds:
        store.enqueue_many(tasks)
        _, claims = store.ack_and_dequeue(claims, [QUEUE], BATCH, session=session)
        done += len(claims)
    store.ack_many(claims)
    rate = done / (time.monotonic() - began)
    store.close_session(session)
    return rate


def measure(url: str, seconds: float, rounds: int, readers: int) -> dict[str, Any]:
    """By turns with and without readers, on tables that are dropped afterwards."""
    plain = sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with broker(url) as store:
        throughput(store, min(1.0, seconds))
        found: dict[bool, list[float]] = {True: [], False: []}
        for number in range(rounds):
            # Each first as often as the other: the table is not the same all the time.
            for beside in (True, False) if number % 2 else (False, True):
                if beside:
                    with reading(plain, store.tables.tasks.name, readers):
                        found[beside].append(throughput(store, seconds))
                else:
                    found[beside].append(throughput(store, seconds))
            print(
                f"round {number + 1}: {found[True][-1] / found[False][-1]:.2f} of the rate without readers", flush=True
            )
    return {
        "readers": readers,
        "with": found[True],
        "without": found[False],
        "ratio": statistics.median(a / b for a, b in zip(found[True], found[False], strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="publish and claim beside readers of the table, and without")
    parser.add_argument("url", help="of a PostgreSQL database")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--readers", type=int, default=READERS)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, too, in the last line")
    given = parser.parse_args()
    url = bare(given.url)
    if not url.startswith("postgresql"):
        sys.exit("the readers need PostgreSQL: give postgresql://user@host/database")
    found = measure(url, given.seconds, given.rounds, given.readers)
    print(f"{given.readers} readers: median {found['ratio']:.2f} of the rate without them (goal: 0.95)")
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
