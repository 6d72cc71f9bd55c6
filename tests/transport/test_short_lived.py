"""Queues of short-lived messages stay short although nobody consumes them (reports B42)."""

from __future__ import annotations

import time

import kombu
import pytest

from kombu_taskgate.core.errors import StoreUnavailable
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.transport import declared, publish

from .conftest import Connect
from .helpers import publish as send


def events(connection: kombu.Connection, **options: float) -> kombu.Queue:
    queue = kombu.Queue("events", auto_delete=True, durable=False, **options)(connection.default_channel)
    queue.declare()
    return queue


def sweep(connection: kombu.Connection) -> None:
    sweeper = declared.Sweeper(connection.connection.broker)
    for _ in range(declared.SWEEP_EVERY):
        sweeper.sweep()


def stored(connection: kombu.Connection) -> list[int]:
    return [task.id for task in connection.connection.broker.list()]


def test_publishers_drop_what_has_expired(connect: Connect, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody claims, and nobody reaps: after the time of one message what is published next takes it away."""
    monkeypatch.setattr(publish, "SHORTEST", 0.0)
    connection = connect()
    events(connection, expires=60, message_ttl=0.001)
    send(connection, "events", *range(20))
    old = set(stored(connection))
    assert old
    clock.advance(1)
    for _ in range(10):  # the time of a message may not have passed on the clock that decides when to look
        time.sleep(0.002)
        send(connection, "events", "more")
    assert not set(stored(connection)) & old


def test_a_look_is_as_rare_as_messages_are_long_lived(connect: Connect, clock: FakeClock) -> None:
    connection = connect()
    events(connection, expires=60, message_ttl=600)
    asked: list[object] = []
    trimmer = publish.Trimmer(connection.connection.broker, connection.connection.router)
    trimmer._broker = type("Asked", (), {"drop_expired": lambda self, names: asked.append(names)})()  # type: ignore[assignment]
    for _ in range(100):
        trimmer.published(["events", "tasks"])
    assert asked == []


def test_a_publish_does_not_fail_with_the_look(connect_memory: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "SHORTEST", 0.0)
    connection = connect_memory()
    events(connection, expires=60, message_ttl=0.0)

    def fail(queues: object) -> None:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(connection.connection.broker, "drop_expired", fail)
    send(connection, "events", *range(3))
    assert len(stored(connection)) == 3


def test_the_reaper_drops_what_has_expired(connect: Connect, clock: FakeClock) -> None:
    """Publishers are gone too; a durable queue keeps its rows until they are claimed."""
    connection = connect()
    events(connection, expires=60, message_ttl=5)
    kombu.Queue("tasks", message_ttl=5)(connection.default_channel).declare()
    send(connection, "events", *range(3))
    send(connection, "tasks", "task")
    sweep(connection)
    assert len(stored(connection)) == 4
    clock.advance(5)
    sweep(connection)
    assert [task.queue for task in connection.connection.broker.list()] == ["tasks"]
