"""What a long transaction elsewhere costs claims on PostgreSQL, as a ratio.

While somebody's REPEATABLE READ transaction is open, vacuum can remove no row version that has died since. A queue
makes dead versions all the time, and claims must not have to walk over them more and more. This lets tasks flow, and
compares the claims of the first seconds with those of the last, with such a transaction open all the while.

    python benchmarks/held_snapshot.py postgresql://postgres@127.0.0.1:5432/test
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
import uuid

import psycopg

from kombu_taskgate.core.migrations import drop
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker

#: Tasks per second, and how many are claimed at once.
RATE, BATCH = 200, 10


def produce(broker: SqlBroker, stop: threading.Event) -> None:
    """Publish at a steady rate."""
    while not stop.wait(BATCH / RATE):
        broker.enqueue_many([NewTask("bench", b"x" * 500) for _ in range(BATCH)])


def consume(broker: SqlBroker, seconds: float) -> list[float]:
    """Claim and acknowledge as an engine does; returns how long each claim that got something took."""
    session = broker.open_session("bench", 60.0)
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        claims = broker.dequeue(["bench"], BATCH, session=session)
        if claims:
            times.append(time.monotonic() - began)
            broker.ack_many(claims)
        time.sleep(BATCH / RATE / 4)
    broker.close_session(session)
    return times


def p95(times: list[float]) -> float:
    return statistics.quantiles(times, n=20)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="claim while a snapshot is held, and compare the end with the start")
    parser.add_argument("url", help="of a PostgreSQL database, without taskgate+")
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    settings = BrokerSettings(arguments.url, table_prefix=f"bench_{uuid.uuid4().hex[:8]}_")
    broker = SqlBroker(settings)
    stop = threading.Event()
    producer = threading.Thread(target=produce, args=(broker, stop))
    try:
        with psycopg.connect(arguments.url) as holder:
            holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            holder.execute(f"SELECT count(*) FROM {settings.table_prefix}tasks")
            producer.start()
            times = consume(broker, arguments.seconds)
            stop.set()
            producer.join()
            dead = holder.execute(
                "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = %s", [f"{settings.table_prefix}tasks"]
            ).fetchone()
        tenth = max(2, len(times) // 10)
        first, last = times[:tenth], times[-tenth:]
        print(f"{len(times)} claims of up to {BATCH}; dead row versions at the end: {dead[0] if dead else '?'}")
        print(f"95th percentile of the last tenth is {p95(last) / p95(first):.1f} times that of the first tenth")
        print(f"median of the last tenth is {statistics.median(last) / statistics.median(first):.1f} times the first's")
    finally:
        stop.set()
        drop(broker.database, broker.tables)
        broker.close()


if __name__ == "__main__":
    main()
