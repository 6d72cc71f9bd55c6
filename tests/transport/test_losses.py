"""What AMQP has no word for: losses, giving back unseen, and a limit on claims."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import kombu
import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.model import Filter, State, Task
from kombu_taskgate.core.watch import LOOK_ON
from kombu_taskgate.testing.threads import DEADLINE

from .conftest import Connect
from .helpers import consuming, drain, nothing_comes, publish


@pytest.fixture
def connection(connect: Connect) -> kombu.Connection:
    return connect()


@pytest.fixture
def rows(connection: kombu.Connection) -> Iterator[Any]:
    broker: Broker = connection.connection.broker

    def find() -> list[Task]:
        connection.connection.engine.flush()
        return broker.list(Filter(queue="q"))

    return find


def test_loss_is_counted_and_ready_at_once(connection: kombu.Connection, rows: Any) -> None:
    publish(connection, "q", "a")
    with consuming(connection, "q") as taken:
        for count in (1, 2):
            drain(connection, taken, count)
            taken[-1].lost = "signal 9"
            taken[-1].reject(requeue=True)
            drain(connection, taken, count + 1)
            assert taken[-1].delivery_info["redelivered"]
            assert [row.lease_lost for row in rows()] == [count]
        taken[-1].lost = "signal 9"
        taken[-1].reject_log_error(None, (), requeue=True)
        assert nothing_comes(connection)
    (dead,) = rows()
    assert (dead.state, dead.reason, dead.lease_lost) == (State.FAILED, "lease_lost", 3)
    assert (dead.detail, dead.deliveries) == ("signal 9", 3)


def test_rejection_without_requeue_is_none(connection: kombu.Connection, rows: Any) -> None:
    publish(connection, "q", "a")
    with consuming(connection, "q") as taken:
        drain(connection, taken, 1)
        taken[0].lost = "signal 9"
        taken[0].reject()
    (dead,) = rows()
    assert (dead.reason, dead.lease_lost) == ("rejected", 0)


def test_a_message_is_lost_once(connection: kombu.Connection) -> None:
    publish(connection, "q", "a")
    with consuming(connection, "q") as taken:
        drain(connection, taken, 1)
        taken[0].lost = "signal 9"
        taken[0].reject(requeue=True)
        with pytest.raises(taken[0].MessageStateError):
            taken[0].reject(requeue=True)
        with pytest.raises(taken[0].MessageStateError):
            taken[0].ack()


def test_what_is_given_back_was_never_delivered(connection: kombu.Connection, rows: Any) -> None:
    publish(connection, "q", "a")
    with consuming(connection, "q", prefetch=1) as taken:
        drain(connection, taken, 1)
        thread = threading.Thread(target=taken[0].give_back)
        thread.start()
        thread.join(DEADLINE)
        taken[0].give_back()  # the second time nothing happens
        drain(connection, taken, 2)
        assert not taken[1].delivery_info["redelivered"]
        assert [(row.deliveries, row.lease_lost) for row in rows()] == [(1, 0)]
        taken[1].ack()
        taken[1].give_back()
    assert rows() == []


def test_limit_on_claims(connection: kombu.Connection, rows: Any) -> None:
    """Claimed is what can be started, not what the window has room for; when that grows, it is seen by itself."""
    room = 2
    publish(connection, "q", *range(5))
    channel = connection.channel()
    channel.limit_claims(lambda: room - len(taken))
    with consuming(connection, "q", prefetch=4, channel=channel) as taken:
        drain(connection, taken, 2)
        assert nothing_comes(connection)
        assert sorted(row.state.value for row in rows()) == ["pending"] * 3 + ["running"] * 2
        room = 4
        drain(connection, taken, 4)
        assert nothing_comes(connection)
        room = 9
        assert nothing_comes(connection), "the prefetch window counts as well"
        taken[0].ack()
        drain(connection, taken, 5)
        channel.limit_claims(None)
        for message in taken[1:]:
            message.ack()


@pytest.mark.parametrize("how", ["limit", "prefetch", "flow"])
def test_room_that_comes_without_an_ack_is_used(connection: kombu.Connection, how: str) -> None:
    """Another channel has had nothing for long, and the store would tell of news: there are none, only room."""
    channel = connection.channel()
    with consuming(connection, "quiet", no_ack=True), consuming(connection, "q", prefetch=1, channel=channel) as taken:
        publish(connection, "q", 1)
        drain(connection, taken, 1)
        room = 0
        if how == "limit":
            channel.limit_claims(lambda: room)
            channel.basic_qos(0, 5, False)
        if how == "flow":
            channel.flow(False)
            channel.basic_qos(0, 5, False)
        publish(connection, "q", 2)
        # Longer than the engine looks by itself after it has found something.
        assert nothing_comes(connection, LOOK_ON + 1.0)
        if how == "limit":
            room = 1
        elif how == "flow":
            channel.flow(True)
        else:
            channel.basic_qos(0, 2, False)
        connection.drain_events(timeout=20)  # sooner than anybody looks who expects to be told
        assert taken.bodies == [1, 2]
        for message in taken:
            message.ack()


def test_message_in_the_callback_is_counted_once(connection: kombu.Connection) -> None:
    """While a callback runs, its consumer may not have counted the message: nothing is claimed in its place."""
    counted: list[Any] = []
    publish(connection, "q", *range(3))
    channel = connection.channel()
    channel.limit_claims(lambda: 1 - len(counted))
    at_once: list[int] = []

    def receive(message: Any) -> None:
        # The engine may look at any time: here it has several times as long as it waits between two looks.
        threading.Event().wait(0.2)
        at_once.append(channel.qos.in_hand + channel.qos.outstanding)
        counted.append(message)

    with consuming(connection, "q", prefetch=4, channel=channel, then=receive) as taken:
        for number in range(1, 4):
            drain(connection, taken, number)
            counted.pop().ack()
    assert at_once == [2, 2, 2], "each was in hand and unsettled, and none was claimed behind it"
