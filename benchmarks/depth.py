"""What a deep queue costs: claims beside a million ready tasks, and beside a million that wait for their ETA.

    python benchmarks/depth.py postgresql://postgres@127.0.0.1:5432/test

Three sets of tables have a thousand ready tasks, a million of them, and a thousand beside a million with an ETA in a
week. By turns a process of its own claims and acknowledges from each, over the broker and then as a consumer over
kombu, whose memory is looked at. Where few are ready, it also sees how late those are that become due at once. What
counts are the ratios to the first set; the clocks of this machine and of the database must agree.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import psutil
from filling import multiply, publish, settle, task_headers
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
#: Tasks that become due at once.
ETAS = 60
#: Seconds without a message after which none is taken to be left.
QUIET = 1.0


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


def consume(settings: BrokerSettings, number: int, etas: int) -> tuple[int, list[float]]:
    """Consume over kombu.

    Args:
        settings: of the broker.
        number: of messages that are consumed at the least.
        etas: messages that are published, when nothing else is left, so that they become due at once; 0: none are, and
            the others may stay.

    Returns:
        The memory of this process after ``number`` messages, in bytes that it shares with no other, and by how many
        milliseconds those that became due were late.
    """
    left = number
    late: list[float] = []

    def took(body: Any, message: Any) -> None:
        nonlocal left
        if isinstance(body, float):
            late.append((time.time() - body) * 1000)
        message.ack()
        left -= 1

    options = {"table_prefix": settings.table_prefix}
    with Connection(f"taskgate+{settings.url}", transport_options=options) as connection:
        queue = connection.SimpleQueue(QUEUE).queue
        with connection.Consumer(queue, callbacks=[took], prefetch_count=BATCH):
            while left > 0:
                connection.drain_events(timeout=30)
            memory = int(psutil.Process().memory_full_info().uss)
            if etas:
                with suppress(TimeoutError):
                    while True:
                        connection.drain_events(timeout=QUIET)
                eta = datetime.now(timezone.utc) + timedelta(seconds=2)
                for _ in range(etas):
                    connection.Producer().publish(eta.timestamp(), routing_key=QUEUE, headers=task_headers(eta))
                while len(late) < etas:
                    connection.drain_events(timeout=30)
    return memory, late


@dataclass(frozen=True)
class Turn:
    """What came of one turn.

    Args:
        rate: claims per second.
        memory: bytes of the consuming process.
        late: milliseconds by which those with an ETA were late.
        failed: what went wrong.
    """

    rate: float = 0.0
    memory: int = 0
    late: Sequence[float] = ()
    failed: str = ""


def turn(settings: BrokerSettings, number: int, etas: int, answers: Any) -> None:
    """One turn of one set, in a process of its own."""
    try:
        rate = claim(settings, number)
        answers.put(Turn(rate, *consume(settings, BATCH * 2, etas)))
    except BaseException as error:
        answers.put(Turn(failed=f"{type(error).__name__}: {error}"))
        raise


def take_turn(store: SqlBroker, number: int, etas: int) -> Turn:
    """Start a process for a turn.

    Raises:
        RuntimeError: it failed.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=turn, args=(store.settings, number, etas, answers))
    process.start()
    done: Turn = answers.get(timeout=600)
    process.join()
    if done.failed:
        raise RuntimeError(done.failed)
    return done


def measure(url: str, rows: int, rounds: int, number: int) -> dict[str, Any]:
    """All of it; the tables are dropped afterwards."""
    found: dict[str, list[Turn]] = {SHALLOW: [], READY: [], WAITING: []}
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
                found[name].append(take_turn(stores[name], number, 0 if name == READY else ETAS))
                # As deep as before; the copies are of one that has not been claimed.
                multiply(stores[name], publish(stores[name], QUEUE), number + 2 * BATCH if name == READY else few)
            ratio = found[READY][-1].rate / found[SHALLOW][-1].rate
            print(f"round {count + 1}: claims beside many ready ones at {ratio:.2f} of the rate", flush=True)
    rates = {name: statistics.median(turn.rate for turn in turns) for name, turns in found.items()}
    memories = {name: statistics.median(turn.memory for turn in turns) for name, turns in found.items()}
    late = {name: [one for turn in found[name] for one in turn.late] for name in (SHALLOW, WAITING)}
    return {
        "rows": rows,
        "claims_per_second": rates,
        "memory_bytes": memories,
        "ready_rate_ratio": rates[READY] / rates[SHALLOW],
        "eta_rate_ratio": rates[WAITING] / rates[SHALLOW],
        "eta_memory_ratio": memories[WAITING] / memories[SHALLOW],
        "late_ms": {name: {"p50": statistics.median(times), "max": max(times)} for name, times in late.items()},
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
    beside, without = found["late_ms"][WAITING], found["late_ms"][SHALLOW]
    print(f"  {ETAS} that are due at once: {beside['p50']:.0f} ms late in the median, {beside['max']:.0f} ms at most")
    print(f"  (goals: 20 and 250; without the others {without['p50']:.0f} and {without['max']:.0f})")
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
