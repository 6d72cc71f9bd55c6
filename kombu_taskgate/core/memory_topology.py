"""Queues, exchanges and bindings in memory: the reference for the shared tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from .clock import Clock, to_ms
from .model import Session
from .settings import check_name
from .topology import Binding, Exchange, Queue

if TYPE_CHECKING:
    from .memory import MemoryStore


class MemoryTopology:
    """A :class:`~kombu_taskgate.core.topology.Topology` over a :class:`MemoryStore`."""

    def __init__(self, store: MemoryStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def declare_exchange(self, exchange: Exchange) -> Exchange:
        check_name(exchange.name, "exchange")
        with self._store.changed:
            return self._store.exchanges.setdefault(exchange.name, exchange)

    def exchange(self, name: str) -> Exchange | None:
        with self._store.changed:
            return self._store.exchanges.get(name)

    def exchanges(self) -> list[Exchange]:
        with self._store.changed:
            return sorted(self._store.exchanges.values(), key=attrgetter("name"))

    def delete_exchange(self, name: str) -> None:
        with self._store.changed:
            self._store.exchanges.pop(name, None)
            self._drop_bindings(lambda binding: binding.exchange == name)

    def declare_queue(self, queue: Queue) -> Queue:
        check_name(queue.name, "queue")
        with self._store.changed:
            self._store.touched[queue.name] = self._clock.now_ms()
            return self._store.queues.setdefault(queue.name, queue)

    def queue(self, name: str) -> Queue | None:
        with self._store.changed:
            return self._store.queues.get(name)

    def queues(self) -> list[Queue]:
        with self._store.changed:
            return sorted(self._store.queues.values(), key=attrgetter("name"))

    def delete_queue(self, name: str) -> None:
        with self._store.changed:
            self._store.queues.pop(name, None)
            self._store.touched.pop(name, None)
            self._drop_bindings(lambda binding: binding.queue == name)

    def bind(self, binding: Binding) -> None:
        with self._store.changed:
            self._store.bindings.setdefault(_binding_key(binding), binding)

    def unbind(self, binding: Binding) -> None:
        with self._store.changed:
            self._store.bindings.pop(_binding_key(binding), None)

    def bindings(self, exchange: str | None = None) -> list[Binding]:
        with self._store.changed:
            return [b for b in self._store.bindings.values() if exchange is None or b.exchange == exchange]

    def recent_bindings(self, exchange: str) -> list[Binding]:
        return self.bindings(exchange)

    def set_consumers(self, session: Session, numbers: Mapping[str, int]) -> None:
        with self._store.changed:
            for queue, number in numbers.items():
                if number:
                    self._store.consumers[queue, session.id] = number
                else:
                    self._store.consumers.pop((queue, session.id), None)
                    self._touch([queue])

    def consumers(self, queue: str, but: Collection[int] = ()) -> int:
        with self._store.changed:
            now = self._clock.now_ms()
            return sum(
                number
                for (name, session), number in self._store.consumers.items()
                if name == queue and session not in but and self._store.sessions.get(session, 0) >= now
            )

    def touch(self, names: Sequence[str]) -> None:
        with self._store.changed:
            self._touch(names)

    def _touch(self, names: Sequence[str]) -> None:
        now = self._clock.now_ms()
        self._store.touched.update({name: now for name in names if name in self._store.queues})

    def unused(self) -> list[str]:
        with self._store.changed:
            now = self._clock.now_ms()
            return sorted(
                queue.name
                for queue in self._store.queues.values()
                if queue.expires is not None and self._last_use(queue.name) + to_ms(queue.expires) < now
            )

    def _last_use(self, queue: str) -> int:
        ends = [self._store.sessions.get(session, 0) for name, session in self._store.consumers if name == queue]
        return max([self._store.touched[queue], *ends])

    def _drop_bindings(self, dropped: Callable[[Binding], bool]) -> None:
        self._store.bindings = {key: b for key, b in self._store.bindings.items() if not dropped(b)}


def _binding_key(binding: Binding) -> tuple[str, str, str, str]:
    arguments = json.dumps(dict(binding.arguments), sort_keys=True, default=str)
    return binding.exchange, binding.queue, binding.routing_key, arguments
