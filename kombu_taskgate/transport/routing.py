"""From exchange and routing key to queues, by the tables that all processes share.

The default exchange leads to the queue that the routing key names, declared or not: nothing is lost because a
consumer is late. A message that no binding of a declared exchange wants is dropped, as in AMQP. A message to an
exchange that does not exist is an error: AMQP closes the channel for it, and a publish that went nowhere
must not look like one that did not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

from ..core.topology import Binding, Exchange, Queue, Topology
from .declared import short_lived
from .errors import NotFound

#: Exchanges that exist without being declared.
BUILT_IN: Mapping[str, Exchange] = {
    f"amq.{kind}": Exchange(f"amq.{kind}", kind) for kind in ("direct", "topic", "fanout", "headers")
}
BUILT_IN_TYPES = frozenset({"direct", "topic", "fanout", "headers"})
#: Seconds for which a declaration that was read is believed, and for which it is that there is none.
BELIEVED, ABSENCE_BELIEVED = 60.0, 5.0
_MOST = 1000

T = TypeVar("T")


class _Read(Generic[T]):
    """Declarations as they were read a moment ago."""

    def __init__(self, read: Callable[[str], T]) -> None:
        self._read = read
        self._known: dict[str, tuple[float, T]] = {}

    def get(self, name: str) -> T:
        found = self._known.get(name)
        now = time.monotonic()
        if found is not None and now < found[0]:
            return found[1]
        value = self._read(name)
        self.put(name, value)
        return value

    def put(self, name: str, value: T) -> None:
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[name] = (time.monotonic() + (ABSENCE_BELIEVED if value is None else BELIEVED), value)

    def forget(self, name: str) -> None:
        self._known.pop(name, None)


class Router:
    """Finds the queues of messages. Safe to use from any thread.

    Args:
        topology: the shared tables.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._exchanges: _Read[Exchange | None] = _Read(topology.exchange)
        self._queues: _Read[Queue | None] = _Read(topology.queue)

    def route(
        self, exchange: str, routing_key: str, headers: Mapping[str, Any], *, transient: bool = False
    ) -> list[str]:
        """Names of the queues that a message goes to, each once.

        ``transient``: it may be lost, so what the bindings were a moment ago will do. An event that nobody listens
        to then costs nothing.

        Raises:
            NotFound: there is no such exchange.
        """
        if not exchange:
            return [routing_key]
        found = self._existing(exchange)
        # Broadcasts are seldom, and who sends one may just have bound the queue for its replies.
        recent = transient and found.type == "topic"
        bindings = self._topology.recent_bindings(exchange) if recent else self._topology.bindings(exchange)
        if not bindings and not recent and exchange not in BUILT_IN:
            # Perhaps because it is gone: a publish that goes nowhere must not look like one that does not.
            self._exchanges.forget(exchange)
            self._existing(exchange)
        return matching(found, bindings, routing_key, headers)

    def _existing(self, name: str) -> Exchange:
        found = self.exchange(name)
        if found is None:
            self._exchanges.forget(name)
            raise NotFound(f"NOT_FOUND - no exchange {name!r}: declare it before publishing to it")
        return found

    def exchange(self, name: str) -> Exchange | None:
        """The exchange of that name."""
        return BUILT_IN.get(name) or self._exchanges.get(name)

    def message_ttl(self, queue: str) -> float | None:
        """The queue's own message_ttl in seconds."""
        found = self._queues.get(queue)
        return None if found is None else found.message_ttl

    def short_lived(self, queue: str) -> float | None:
        """For how many seconds its messages are of interest, see :func:`.declared.short_lived`."""
        return short_lived(self._queues.get(queue))

    def queue_changed(self, name: str, queue: Queue | None = None) -> None:
        """Note what this process has just declared, or deleted."""
        if queue is None:
            self._queues.forget(name)
        else:
            self._queues.put(name, queue)

    def exchange_changed(self, name: str, exchange: Exchange | None = None) -> None:
        """Note what this process has just declared, or deleted."""
        if exchange is None:
            self._exchanges.forget(name)
        else:
            self._exchanges.put(name, exchange)


def matching(
    exchange: Exchange, bindings: Iterable[Binding], routing_key: str, headers: Mapping[str, Any]
) -> list[str]:
    """Queues of the bindings that want the message, each once, in the order of the bindings."""
    wants = _WANTS[exchange.type]
    return list(dict.fromkeys(binding.queue for binding in bindings if wants(binding, routing_key, headers)))


def _direct(binding: Binding, routing_key: str, headers: Mapping[str, Any]) -> bool:
    return binding.routing_key == routing_key


def _fanout(binding: Binding, routing_key: str, headers: Mapping[str, Any]) -> bool:
    return True


def _topic(binding: Binding, routing_key: str, headers: Mapping[str, Any]) -> bool:
    return topic_matches(_words(binding.routing_key), _words(routing_key))


def _headers(binding: Binding, routing_key: str, headers: Mapping[str, Any]) -> bool:
    """``x-match``: all (the default) or any; a value of ``None`` asks for the header, whatever its value."""
    arguments = binding.arguments
    match = arguments.get("x-match", "all")
    asked = {name: value for name, value in arguments.items() if match.endswith("-with-x") or name[:2] != "x-"}
    asked.pop("x-match", None)
    met = (name in headers and (value is None or headers[name] == value) for name, value in asked.items())
    return any(met) if match.startswith("any") else all(met)


_WANTS: Mapping[str, Callable[[Binding, str, Mapping[str, Any]], bool]] = {
    "direct": _direct,
    "fanout": _fanout,
    "topic": _topic,
    "headers": _headers,
}


@lru_cache(maxsize=4096)
def _words(key: str) -> tuple[str, ...]:
    """Words of a key; an empty key has none."""
    return tuple(key.split(".")) if key else ()


def topic_matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Whether words match a pattern: ``*`` is exactly one word, ``#`` any number of words, none included."""
    at = place = 0
    # The last "#", and the word at which it has been taken to end: on a mismatch it takes one word more.
    hash_at, hash_end = -1, 0
    while place < len(words):
        if at < len(pattern) and pattern[at] == "#":
            hash_at, hash_end = at, place
            at += 1
        elif at < len(pattern) and pattern[at] in ("*", words[place]):
            at += 1
            place += 1
        elif hash_at >= 0:
            hash_end += 1
            at, place = hash_at + 1, hash_end
        else:
            return False
    return all(word == "#" for word in pattern[at:])
