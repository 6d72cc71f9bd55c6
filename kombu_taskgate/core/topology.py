"""Queues, exchanges and bindings (AMQP 0-9-1 §3.1) as all processes see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .model import Session


@dataclass(slots=True, frozen=True)
class Exchange:
    """A named router. ``type``: direct, topic, fanout or headers."""

    name: str
    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False


@dataclass(slots=True, frozen=True)
class Queue:
    """A named queue. ``expires`` (seconds unused) and ``message_ttl`` (seconds) are ``None`` for never."""

    name: str
    durable: bool = True
    auto_delete: bool = False
    exclusive: bool = False
    expires: float | None = None
    message_ttl: float | None = None


@dataclass(slots=True, frozen=True)
class Binding:
    """Messages of ``exchange`` that match ``routing_key`` (and ``arguments``) go to ``queue``."""

    exchange: str
    queue: str
    routing_key: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


class Topology(Protocol):
    """The shared tables. Every call is one transaction and safe under concurrent declaration."""

    def declare_exchange(self, exchange: Exchange) -> Exchange:
        """Store it unless one of that name exists; returns the stored one, which may differ."""

    def exchange(self, name: str) -> Exchange | None:
        """The exchange of that name."""

    def exchanges(self) -> list[Exchange]:
        """All exchanges, by name."""

    def delete_exchange(self, name: str) -> None:
        """Remove it and its bindings; its queues stay."""

    def declare_queue(self, queue: Queue) -> Queue:
        """Store it unless one of that name exists; returns the stored one, which may differ."""

    def queue(self, name: str) -> Queue | None:
        """The queue of that name."""

    def queues(self) -> list[Queue]:
        """All queues, by name."""

    def delete_queue(self, name: str) -> None:
        """Remove it and its bindings; what waits in it must be purged by the caller first."""

    def bind(self, binding: Binding) -> None:
        """Store it unless it exists (same exchange, queue, key and arguments)."""

    def unbind(self, binding: Binding) -> None:
        """Remove it if it exists."""

    def bindings(self, exchange: str | None = None) -> list[Binding]:
        """Bindings of one exchange, or all of them."""

    def recent_bindings(self, exchange: str) -> list[Binding]:
        """Bindings of one exchange as they were a moment ago: for what is sent often and may be lost."""

    def touch(self, names: Sequence[str]) -> None:
        """Say that these queues are in use now (for ``expires`` and auto-delete)."""

    def set_consumers(self, session: Session, numbers: Mapping[str, int]) -> None:
        """Say how many consumers a holder of leases has on queues now; 0 ends their use of the queue.

        A queue with consumers is in use as long as their session lives; closing the session ends it too.
        """

    def consumers(self, queue: str, but: Collection[int] = ()) -> int:
        """How many consumers a queue has, of all holders that live, but for these sessions' ids."""

    def unused(self) -> list[str]:
        """Names of queues whose ``expires`` has passed since they were last in use."""
