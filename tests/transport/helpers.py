"""Publishing and consuming in few words."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kombu

from kombu_taskgate.testing.threads import DEADLINE


class Taken(list[Any]):
    """A consumer's messages, in the order of delivery."""

    @property
    def bodies(self) -> list[Any]:
        """What they say."""
        return [message.payload for message in self]


def publish(connection: kombu.Connection, queue: str, *bodies: Any, **options: Any) -> None:
    """Publish each body to a queue by its name."""
    with connection.channel() as channel:
        producer = kombu.Producer(channel)
        for body in bodies:
            producer.publish(body, routing_key=queue, **options)


@contextmanager
def consuming(
    connection: kombu.Connection,
    *queues: str,
    then: Callable[[Any], object] | None = None,
    prefetch: int = 0,
    no_ack: bool = False,
    channel: Any = None,
) -> Iterator[Taken]:
    """Consume queues; each message is kept, and handed to ``then``."""
    taken = Taken()

    def receive(message: Any) -> None:
        taken.append(message)
        if then is not None:
            then(message)

    consumer = kombu.Consumer(
        channel if channel is not None else connection.channel(),
        [kombu.Queue(name, routing_key=name) for name in queues],
        on_message=receive,
        prefetch_count=prefetch,
        no_ack=no_ack,
    )
    with consumer:
        yield taken


def drain(connection: kombu.Connection, taken: Taken, number: int) -> None:
    """Drain until so many messages have come.

    Raises:
        TimeoutError: they did not come.
    """
    deadline = time.monotonic() + DEADLINE
    while len(taken) < number:
        connection.drain_events(timeout=max(0.0, deadline - time.monotonic()))


def nothing_comes(connection: kombu.Connection, seconds: float = 0.3) -> bool:
    """Whether nothing is delivered for a while: longer than the longest pause between two looks."""
    try:
        connection.drain_events(timeout=seconds)
    except TimeoutError:
        return True
    return False


def size(connection: kombu.Connection, queue: str) -> int:
    """How many messages wait in a queue."""
    with connection.channel() as channel:
        return int(channel._size(queue))


def outstanding(connection: kombu.Connection) -> int:
    """How many messages are with the consumers of a connection: claimed, handed to their channels, and not settled."""
    return sum(window.outstanding for window in connection.connection.engine._windows)


def get(connection: kombu.Connection, queue: str) -> Any:
    """Fetch and acknowledge one message; its body, or ``None``."""
    message = connection.default_channel.basic_get(queue)
    if message is None:
        return None
    message.ack()
    return message.payload
