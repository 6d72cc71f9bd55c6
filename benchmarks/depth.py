"""What a deep queue costs: claims beside a million ready tasks, and beside a million that wait for their ETA.

    python benchmarks/depth.py postgresql://postgres@127.0.0.1:5432/test

Three sets of tables have a thousand ready tasks, a million of them, and a thousand beside a million with an ETA in a
week. By turns a process of its own claims and acknowledges from each, over the broker and then as a consumer over
kombu, whose memory is looked at. What counts are the ratios to the first set.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from contextlib import ExitStack
from typing import Any

import psutil
from filling import multiply, publish, settle
from kombu import Connection
from throwaway import bare, broker

from kombu_taskgate.core.model import Claim
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker

SHALLOW, READY, WAITING = "shallow", "ready", "waiting for an ETA"
QUEUE = "depth"
#: Ready tasks where there are few.
FEW = 1000
#: Tasks in one claim, and the consumer's prefetch window.
BATCH = 16


def claim(settings: BrokerSettings, number: int) -> float:
    """Claim and acknowledge so many; tasks per second."""
    store = SqlBroker(settings)
    session = store.open_session("depth", 60.0)
    claims: list[Claim] = []
    _, claims = store.ack_and_dequeue([], [QUEUE], BATCH, session=session)  # connects, compiles
    began, done = time.perf_counter(), 0
    while done < number:
        done += len(claims)
        _, claims = store.ack_and_dequeue(claims, [QUEUE], BATCH, session=session)
        if not claims:
            raise RuntimeError(f"only {done} of {number} tasks could be claimed")
    rate = done / (time.perf_counter() - began)
    store.close_session(session)
    store.close()
    return rate


def consume(settings: BrokerSettings, number: int) -> int:
    """Consume so many over kombu; the memory of this process then, in bytes that it shares with no other."""
    left = number

    def took(body: object, message: Any) -> None:
        nonlocal left
        message.ack()
        left -= 1

    options = {"table_prefix": settings.table_prefix}
    with Connection(f"taskgate+{settings.url}", transport_options=options) as connection:
        queue = connection.SimpleQueue(QUEUE).queue
        with connection.Consumer(queue, callbacks=[took], prefetch_count=BATCH):
            while left > 0:
                connection.drain_events(timeout=30)
            return int(psutil.Process().memory_full_info().uss)


def turn(settings: BrokerSettings, number: int, answers: Any) -> None:
    """One turn of one set, in a process of its own."""
    try:
        answers.put((claim(settings, number), consume(settings, BATCH * 2), None))
    except BaseException as error:
        answers.put((0.0, 0, f"{type(error).__name__}: {error}"))
        raise


def take_turn(store: SqlBroker, number: int) -> tuple[float, int]:
    """Start a process for a turn; the rate of claims, and bytes of memory.

    Raises:
        RuntimeError: it failed.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=turn, args=(store.settings, number, answers))
    process.start()
    rate, memory, failed = answers.get(timeout=600)
    process.join()
    if failed:
        raise RuntimeError(failed)
    return rate, memory


def measure(url: str, rows: int, rounds: int, number: int) -> dict[str, Any]:
    """All of it; the tables are dropped afterwards."""
    found: dict[str, list[tuple[float, int]]] = {SHALLOW: [], READY: [], WAITING: []}
    few = max(FEW, number + 100)
    with ExitStack() as stack:
        stores = {name: stack.enter_context(broker(url)) for name in found}
        templates: dict[str, int] = {}
        for name, store in stores.items():
            began = time.monotonic()
            templates[name] = publish(store, QUEUE)
            multiply(store, templates[name], rows if name == READY else few)
            if name == WAITING:
                multiply(store, publish(store, QUEUE, eta=True), rows)
            settle(store)
            print(f"filled the tables of {name!r} within {time.monotonic() - began:.0f} s", flush=True)
        for count in range(rounds):
            order = list(stores) if count % 2 else list(reversed(stores))
            for name in order:
                found[name].append(take_turn(stores[name], number))
                # As deep as before; the copies are of one that has not been claimed.
                template = publish(stores[name], QUEUE)
                multiply(stores[name], template, number + 2 * BATCH)
            ratio = found[READY][-1][0] / found[SHALLOW][-1][0]
            print(f"round {count + 1}: claims beside many ready ones at {ratio:.2f} of the rate", flush=True)
    rates = {name: statistics.median(rate for rate, _ in turns) for name, turns in found.items()}
    memories = {name: statistics.median(memory for _, memory in turns) for name, turns in found.items()}
    return {
        "rows": rows,
        "claims_per_second": rates,
        "memory_bytes": memories,
        "ready_rate_ratio": rates[READY] / rates[SHALLOW],
        "eta_rate_ratio": rates[WAITING] / rates[SHALLOW],
        "eta_memory_ratio": memories[WAITING] / memories[SHALLOW],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="claim from deep queues, and compare with a shallow one")
    parser.add_argument("url", help="of a database")
    parser.add_argument("--rows", type=int, default=1_000_000, help="in the deep queues (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--claims", type=int, default=FEW - 100, help="tasks claimed in a turn (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, too, in the last line")
    given = parser.parse_args()
    found = measure(bare(given.url), given.rows, given.rounds, given.claims)
    print(f"{given.rows:,} ready: claims at {found['ready_rate_ratio']:.2f} of the rate with {FEW:,} (goal: 0.9)")
    print(f"{given.rows:,} waiting for an ETA: claims at {found['eta_rate_ratio']:.2f} of the rate without")
    print(f"  memory of a consuming process: {found['eta_memory_ratio']:.2f} of that without")
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
