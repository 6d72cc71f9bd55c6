"""Locks among processes, over the stores of terms."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Protocol

from .election import new_holder
from .errors import ConfigError
from .factory import open_broker
from .redis_terms import RedisTerms
from .settings import BrokerSettings
from .terms import LeaseStore

if TYPE_CHECKING:
    from .redis_link import Server


class Lock(Protocol):
    """A lock that one process at a time has, for a limited time. May be used from any thread.

    Every method may raise ``StoreUnavailable``; whether it took effect is not known then.
    """

    def lock(self, id: str, ttl: float) -> bool:
        """Take the lock for ``ttl`` seconds, if nobody has it. Whoever has it already is refused as well."""

    def renew(self, id: str, ttl: float) -> bool:
        """Have the lock for ``ttl`` seconds from now; ``False``: it was lost, and somebody else may have had it."""

    def unlock(self, id: str) -> None:
        """Give the lock back. Idempotent; of one that is not held, or lost, nothing is changed."""


class TermLock:
    """A :class:`Lock` over any store of terms. What it holds is its own: a forked child has none of it.

    Args:
        terms: where.
    """

    def __init__(self, terms: LeaseStore) -> None:
        self._terms = terms
        self._guard = threading.Lock()
        self._pid = os.getpid()
        #: By id: in whose name it is held, and the number of the term.
        self._held: dict[str, tuple[str, int]] = {}
        #: By id, in whose name it was asked for without an answer.
        self._asked: dict[str, str] = {}

    def lock(self, id: str, ttl: float) -> bool:
        """See the protocol."""
        self._forget_the_parents()
        with self._guard:
            if id in self._held:
                return False
            # A name for each time: what was sent under another, and arrives late, does nothing to this one.
            holder = self._asked.setdefault(id, new_holder())
        term = self._terms.try_acquire(id, holder, ttl)
        with self._guard:
            first = self._asked.get(id) == holder
            if first:
                del self._asked[id]
                if term is not None:
                    self._held[id] = (holder, term.number)
            stray = term is not None and self._held.get(id) != (holder, term.number)
        if stray:
            # Two threads have asked in one name. The other one was first, and has given it back meanwhile: what came
            # of this one's asking after that is nobody's.
            self._terms.release(id, holder)
        return first and term is not None

    def renew(self, id: str, ttl: float) -> bool:
        """See the protocol."""
        self._forget_the_parents()
        held = self._held.get(id)
        if held is None:
            return False
        holder, number = held
        term = self._terms.try_acquire(id, holder, ttl)
        if term is not None and term.number == number and self._held.get(id) == held:
            return True
        with self._guard:
            if self._held.get(id) == held:
                del self._held[id]
        if term is not None:
            # It was over, and others may have had it since; or it was given back meanwhile.
            self._terms.release(id, holder)
        return False

    def unlock(self, id: str) -> None:
        """See the protocol."""
        self._forget_the_parents()
        with self._guard:
            held = self._held.pop(id, None)
        if held is not None:
            self._terms.release(id, held[0])

    def _forget_the_parents(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._guard, self._held, self._asked = os.getpid(), threading.Lock(), {}, {}


class SqlLock(TermLock):
    """A lock in a database, or in memory.

    Args:
        where: URL of the database (with or without ``taskgate+``), or settings of a broker there.

    Raises:
        ConfigError, SchemaError, StoreUnavailable: see :func:`~kombu_taskgate.core.factory.open_broker`.
    """

    def __init__(self, where: str | BrokerSettings) -> None:
        settings = BrokerSettings(where.removeprefix("taskgate+")) if isinstance(where, str) else where
        if not isinstance(settings, BrokerSettings):
            raise ConfigError(f"a lock is in a database: name its URL, or give settings of a broker, not {where!r}")
        self._broker = open_broker(settings)
        super().__init__(self._broker.terms)

    def close(self) -> None:
        """Release the connections. Idempotent."""
        self._broker.close()


class RedisLock(TermLock):
    """A lock in Redis.

    Args:
        server: URL, or a client, which the caller closes.
        prefix: put before the name of every key.

    Raises:
        ConfigError: see :class:`~kombu_taskgate.core.redis_terms.RedisTerms`.
    """

    def __init__(self, server: Server, prefix: str = "taskgate:") -> None:
        self._redis = RedisTerms(server, prefix)
        super().__init__(self._redis)

    def close(self) -> None:
        """Close the connections, unless the client is the caller's. Idempotent."""
        self._redis.close()
