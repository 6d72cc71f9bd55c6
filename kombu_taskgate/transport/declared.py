"""Queues with a limited life: kept while somebody uses them, deleted when nobody does.

A worker's remote control queue, a reply queue, a broadcast queue: each has an ``expires`` in the shared tables. Who
consumes it is noted there too, under the session of its leases: as long as that lives the queue is in use, and
no message need be spent on saying so. If it was deleted all the same, because this process was
frozen or the database away for longer, it is declared again with its bindings, or its owner would be deaf
without knowing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.broker import Broker
from ..core.model import Session
from ..core.topology import Binding, Queue

logger = logging.getLogger("kombu_taskgate.transport")

#: Seconds after which an auto-delete queue that names no time of its own is deleted, once nobody uses it. Who
#: else consumes it can't be known when a consumer leaves, so it is not deleted at once.
AUTO_DELETE_EXPIRES = 3600.0
#: Longest pause between two looks whether the queues consumed here are still there.
LONGEST = 60.0
#: Rounds of the reaper from one look for unused queues to the next.
SWEEP_EVERY = 3
#: The same after a look that has found nothing.
SWEEP_SELDOM = 9


@dataclass(slots=True)
class _Declared:
    queue: Queue | None
    bindings: list[Binding] = field(default_factory=list)


class Declared:
    """The declarations of one connection.

    Args:
        broker: where.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._queues: dict[str, _Declared] = {}
        #: How many consumers of which queue the shared tables have for us.
        self._noted: dict[str, int] = {}
        self._session = 0
        self._kept_at = 0.0

    def after_fork(self) -> None:
        """In the child: the lock may have been held by a thread that is not here."""
        self._lock = threading.Lock()

    def queue(self, queue: Queue) -> None:
        """Note a declaration."""
        with self._lock:
            # Declared once more, it keeps its bindings.
            self._queues.setdefault(queue.name, _Declared(queue)).queue = queue

    def bound(self, binding: Binding) -> None:
        """Note a binding."""
        with self._lock:
            declared = self._queues.get(binding.queue)
            if declared is not None and binding not in declared.bindings:
                declared.bindings.append(binding)

    def unbound(self, binding: Binding) -> None:
        """Note that a binding was removed."""
        with self._lock:
            declared = self._queues.get(binding.queue)
            if declared is not None and binding in declared.bindings:
                declared.bindings.remove(binding)

    def forget(self, name: str) -> None:
        """Note that a queue was deleted."""
        with self._lock:
            self._queues.pop(name, None)

    def exclusive(self) -> list[str]:
        """Queues that end with this connection."""
        with self._lock:
            return [name for name, known in self._queues.items() if known.queue is not None and known.queue.exclusive]

    def is_exclusive(self, name: str) -> bool:
        """Whether this connection alone uses the queue."""
        with self._lock:
            known = self._queues.get(name)
            return known is not None and known.queue is not None and known.queue.exclusive

    def keep(self, session: Session, consumed: Mapping[str, int]) -> float:
        """Note who consumes here, and declare again what was deleted under them; returns when to look again (seconds).

        Args:
            session: of the leases of this process.
            consumed: queues and how many consumers they have here.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        topology = self._broker.topology
        now = time.monotonic()
        if session.id != self._session or now - self._kept_at > 2 * max(LONGEST, session.ttl):
            # Nothing is noted under a new session; and after a long sleep perhaps nothing under the old one either.
            self._noted, self._session = {}, session.id
        self._kept_at = now
        ended = dict.fromkeys((name for name in self._noted if name not in consumed), 0)
        changed = {name: number for name, number in consumed.items() if self._noted.get(name) != number}
        topology.set_consumers(session, {**ended, **changed})
        self._noted = dict(consumed)
        shortest = LONGEST
        for declared in [self._known(name) for name in consumed]:
            queue = declared.queue
            if queue is None or queue.expires is None:
                continue
            # Who was frozen for so long looks at once.
            shortest = min(shortest, session.ttl + queue.expires)
            if topology.queue(queue.name) is None:
                logger.warning("queue %r, which is consumed here, was deleted: declaring it again", queue.name)
                topology.declare_queue(queue)
                for binding in declared.bindings:
                    topology.bind(binding)
        return shortest

    def _known(self, name: str) -> _Declared:
        with self._lock:
            declared = self._queues.get(name)
        if declared is None:
            # Consumed without being declared here: what the tables say holds for as long as it is consumed.
            declared = _Declared(self._broker.topology.queue(name))
            with self._lock:
                declared = self._queues.setdefault(name, declared)
        return declared


def delete_queue(broker: Broker, name: str) -> int:
    """Delete a queue with its bindings and all that waits in it; returns how many messages that were.

    What is running is settled as usual. An auto-delete exchange that has lost its last binding goes too.
    """
    topology = broker.topology
    exchanges = {binding.exchange for binding in topology.bindings() if binding.queue == name}
    number = broker.purge(name)
    topology.delete_queue(name)
    # Whoever read the bindings before they were deleted may have published since.
    number += broker.purge(name)
    for exchange in exchanges:
        found = topology.exchange(exchange)
        if found is not None and found.auto_delete and not topology.bindings(exchange):
            topology.delete_exchange(exchange)
    return number


class Sweeper:
    """Deletes the queues that nobody has used for as long as they may be unused, and what has expired in the others.

    Args:
        broker: where.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._wait = SWEEP_EVERY

    def sweep(self) -> None:
        """Look, in every third round of the reaper; seldomer while there is nothing to sweep."""
        self._wait -= 1
        if self._wait > 0:
            return
        unused = self._broker.topology.unused()
        for name in unused:
            # Asked again for each, because deleting those before it takes time: a worker that starts again under its
            # old name may have declared it since.
            if name not in self._broker.topology.unused():
                continue
            number = delete_queue(self._broker, name)
            logger.info("deleted queue %r, which nobody has used for its time, and %d messages in it", name, number)
        names = [queue.name for queue in self._broker.topology.queues() if short_lived(queue) is not None]
        dropped = self._broker.drop_expired(names)
        self._wait = SWEEP_EVERY if unused or dropped else SWEEP_SELDOM


def short_lived(queue: Queue | None) -> float | None:
    """For how many seconds messages of a queue are of interest, if it is one whose consumer may just go away.

    The queues of event receivers and of remote control are of this kind. A consumer that is slow or frozen must not
    let them grow, so what is past its time is dropped without being claimed.
    """
    return None if queue is None or queue.expires is None else queue.message_ttl
