"""What it costs publishers on PostgreSQL to tell consumers of new work (NOTIFY), as a ratio.

Commits that notify take turns in PostgreSQL, so that telling with each message would halve what many publishers
get done at once. This has 32 threads in four processes publish, one message a transaction, with ``listen`` on and off
by turns, and prints how the two compare.

    python benchmarks/notify.py postgresql://postgres@127.0.0.1:5432/test
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
import uuid
from typing import Any

from kombu_taskgate.core.migrations import drop
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker

PROCESSES, THREADS = 4, 8


def publish(settings: BrokerSettings, seconds: float, ready: Any, go: Any, count: Any) -> None:
    """One process: several threads publish to one queue for some seconds."""
    broker = SqlBroker(settings)
    numbers: list[int] = []
    task = NewTask("bench", b"x" * 500)

    def run(barrier: threading.Barrier) -> None:
        broker.enqueue(task)  # the connection is there before the clock runs
        barrier.wait()
        go.wait()
        number, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            broker.enqueue(task)
            number += 1
        numbers.append(number)

    barrier = threading.Barrier(THREADS + 1)
    threads = [threading.Thread(target=run, args=(barrier,)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    barrier.wait()
    ready.release()
    for thread in threads:
        thread.join()
    count.put(sum(numbers))
    broker.close()


def rate(url: str, prefix: str, seconds: float, *, listen: bool) -> float:
    """Messages per second of all of them together, while one consumer listens."""
    settings = BrokerSettings(url, table_prefix=prefix, pool_size=THREADS, listen=listen)
    context = multiprocessing.get_context("spawn")
    ready, go, count = context.Semaphore(0), context.Event(), context.Queue()
    broker = SqlBroker(settings)
    watch = broker.watch(lambda queues: None)
    processes = [context.Process(target=publish, args=(settings, seconds, ready, go, count)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    go.set()
    total = sum(count.get() for _ in processes)
    for process in processes:
        process.join()
    broker.purge("bench")
    watch.close()
    broker.close()
    return total / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="publish with and without NOTIFY, and compare")
    parser.add_argument("url", help="of a PostgreSQL database, without taskgate+")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one round")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    prefix = f"bench_{uuid.uuid4().hex[:8]}_"
    owner = SqlBroker(BrokerSettings(arguments.url, table_prefix=prefix))
    try:
        ratios = []
        for number in range(arguments.rounds):
            # By turns, and each first as often as the other: the machine is not the same all the time.
            order = (True, False) if number % 2 else (False, True)
            rates = {listen: rate(arguments.url, prefix, arguments.seconds, listen=listen) for listen in order}
            ratios.append(rates[True] / rates[False])
            print(f"round {number + 1}: with NOTIFY {ratios[-1]:.2f} of what goes without")
        print(f"{PROCESSES * THREADS} publishers: median {statistics.median(ratios):.2f} of the rate without NOTIFY")
    finally:
        drop(owner.database, owner.tables)
        owner.close()


if __name__ == "__main__":
    main()
