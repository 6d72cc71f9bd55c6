"""A process that competes for a key and writes down when it leads.

Run as ``python -m tests.workers.electors URL PREFIX KEY TTL``. Each line on its standard output is one word and the
number of the term.
"""

from __future__ import annotations

import sys
import threading

from kombu_taskgate.core.election import LeaderElector
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.redis_terms import RedisTerms
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.terms import LeaseStore, Term


def open_terms(url: str, prefix: str) -> LeaseStore:
    """The terms behind a URL, as another process sees them."""
    if url.startswith("redis"):
        return RedisTerms(url, prefix)
    return open_broker(BrokerSettings(url, table_prefix=prefix, lease_ttl=6.0)).terms


def main(url: str, prefix: str, key: str, ttl: str) -> None:
    def say(word: str, term: Term) -> None:
        sys.stdout.write(f"{word} {term.number}\n")
        sys.stdout.flush()

    elector = LeaderElector(
        open_terms(url, prefix),
        key,
        ttl=float(ttl),
        on_gained=lambda term: say("gained", term),
        on_lost=lambda term: say("lost", term),
    )
    elector.start()
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
