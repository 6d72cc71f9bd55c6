"""What it costs to keep leases alive: CPU at the usual lease time, and rows written, with few and with many held.

    python benchmarks/leases.py postgresql://postgres@127.0.0.1:5432/test

Claims the leases and has the lease keeper renew them, only more often than it would; the rounds of a lease time of 60 s
are 20 s apart. CPU is that of this process. The server's work is somewhere in the time that a renewal waits for it, so
that time, with the CPU of the rest, is the most that both together can have used of one core.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from filling import multiply, publish, settle
from throwaway import bare, broker

from kombu_taskgate.core.lease import LeaseKeeper
from kombu_taskgate.core.model import Renewal, Session
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker

QUEUE = "leases"
#: Leases that are claimed at once.
BATCH = 500
#: Seconds between rounds while they are measured, when they are as quick as that.
EVERY = 0.02
_WRITES = re.compile(r"\b(INSERT|UPDATE|DELETE|REPLACE)\b", re.IGNORECASE)


class Rounds:
    """A broker that notes how long each renewal took, and the CPU time of this process in it.

    Args:
        store: what it hands everything to.
    """

    def __init__(self, store: SqlBroker) -> None:
        self._store = store
        self._more = threading.Condition()
        self.times: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def renew_session(self, session: Session, *, look: bool = True) -> Renewal:
        """As the broker's."""
        began, cpu = time.perf_counter(), time.thread_time()
        renewal = self._store.renew_session(session, look=look)
        with self._more:
            self.times.append((time.perf_counter() - began, time.thread_time() - cpu))
            self._more.notify_all()
        return renewal

    def wait(self, number: int) -> None:
        """Wait until there have been so many.

        Raises:
            RuntimeError: that takes longer than ten minutes.
        """
        with self._more:
            if not self._more.wait_for(lambda: len(self.times) >= number, 600):
                raise RuntimeError(f"only {len(self.times)} of {number} rounds of renewal came to an end")


@contextmanager
def held(url: str, number: int) -> Iterator[tuple[Rounds, LeaseKeeper]]:
    """A keeper that holds so many leases, on tables that are dropped after the block."""
    with broker(url) as store:
        multiply(store, publish(store, QUEUE), number)
        settle(store)
        rounds = Rounds(store)
        keeper = LeaseKeeper(rounds, "bench", store.settings.lease_ttl, every=EVERY)
        keeper.start()
        try:
            while keeper.held < number:
                wanted = min(BATCH, number - keeper.held)
                claims = store.dequeue([QUEUE], wanted, session=keeper.session_for(QUEUE))
                if not claims:
                    raise RuntimeError(f"only {keeper.held} of {number} leases could be claimed")
                keeper.hold(claims)
            yield rounds, keeper
        finally:
            keeper.stop()


def rows_written(settings: BrokerSettings, session: Session) -> int:
    """How many rows a renewal writes, as the database tells.

    A broker's first execution of a statement is SQLAlchemy's, whose events tell the number.
    """
    written = 0

    def note(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        nonlocal written
        if _WRITES.search(statement):
            written += max(0, cursor.rowcount)

    store = SqlBroker(settings)
    try:
        sa.event.listen(sa.Engine, "after_cursor_execute", note)
        try:
            store.renew_session(session)
        finally:
            sa.event.remove(sa.Engine, "after_cursor_execute", note)
    finally:
        store.close()
    return written


def measure(url: str, number: int, rounds: int) -> dict[str, float]:
    """With so many leases.

    Returns the parts of one core that renewing uses: by this process (``cpu``), and at most together with the database
    (``most``); and the ``rows`` that are written in a round.
    """
    with held(url, number) as (store, keeper):
        store.wait(len(store.times) + 3)
        first, cpu = len(store.times), time.process_time()
        store.wait(first + rounds)
        cpu, done = time.process_time() - cpu, len(store.times) - first
        every = keeper.session_for(QUEUE).ttl / 3
        waited = statistics.mean(wall - own for wall, own in store.times[first : first + done])
        return {
            "held": number,
            "cpu": cpu / done / every,
            "most": (cpu / done + max(0.0, waited)) / every,
            "rows": rows_written(store.settings, keeper.session_for(QUEUE)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="renew many leases, and compare with renewing few")
    parser.add_argument("url", help="of a database")
    parser.add_argument("--held", type=int, default=10_000, help="leases (default: %(default)s)")
    parser.add_argument("--few", type=int, default=100, help="to compare with (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=50, help="of renewal (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, too, in the last line")
    given = parser.parse_args()
    found = [measure(bare(given.url), number, given.rounds) for number in (given.few, given.held)]
    for one in found:
        print(
            f"{one['held']:,} held: {one['cpu']:.2%} of a core for renewing them, with the database's share at most "
            f"{one['most']:.2%} (goal: 1 %); rows written in a round: {one['rows']:.0f}"
        )
    print(f"rows written grow by a factor of {found[1]['rows'] / max(1, found[0]['rows']):.2f} (goal: 1)")
    if given.json:
        print(json.dumps({"few": found[0], "many": found[1]}))


if __name__ == "__main__":
    main()
