"""ETAs wait in the database, and what has expired is not delivered."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import kombu
import pytest

from kombu_taskgate.core.model import Filter, State
from kombu_taskgate.testing.threads import wait_until
from tests.transport.helpers import consuming, drain, get, nothing_comes, publish, size


def at(clock, seconds, zone=timezone.utc):
    """An instant so many seconds from the test clock's now, as Celery writes it."""
    return (datetime.fromtimestamp(clock.now_ms() / 1000, zone) + timedelta(seconds=seconds)).isoformat()


def task(**headers):
    return {"headers": {"task": "t", "id": "i", **headers}}


def without_lease(message):
    """The headers, less the lease under which the message was delivered."""
    return {name: value for name, value in message.headers.items() if name != "taskgate_lease"}


def test_an_eta_is_waited_for_in_the_database(connect, clock):
    connection = connect()
    eta = at(clock, 60)
    publish(connection, "q", "later", **task(eta=eta))
    publish(connection, "q", "now", **task(eta=None))
    with consuming(connection, "q", prefetch=1) as taken:
        drain(connection, taken, 1)
        assert taken.bodies == ["now"]
        taken[0].ack()
        assert nothing_comes(connection)
        # It takes up neither a lease nor a place in the window.
        assert connection.connection.broker.list(Filter(states=[State.RUNNING])) == []
        assert size(connection, "q") == 1
        clock.advance(59)
        assert nothing_comes(connection)
        clock.advance(2)
        drain(connection, taken, 2)
    assert taken.bodies == ["now", "later"]
    # Or Celery's worker would put it on its own timer.
    assert without_lease(taken[1]) == {"task": "t", "id": "i", "eta": None, "taskgate_eta": eta}


def test_an_eta_that_has_passed_is_neutralised_too_and_again_when_redelivered(connect, clock):
    connection = connect()
    eta = at(clock, -60)
    publish(connection, "q", 1, **task(eta=eta))
    first = connection.default_channel.basic_get("q")
    first.requeue()
    second = connection.default_channel.basic_get("q")
    assert without_lease(first) == without_lease(second) == {"task": "t", "id": "i", "eta": None, "taskgate_eta": eta}
    (lease, other) = (message.headers["taskgate_lease"] for message in (first, second))
    assert lease[0] == other[0]
    assert lease[1] < other[1]


def test_what_is_said_of_a_delivery_is_not_published_again(connect, clock):
    """A retry carries the headers of the message on, and is delivered by a lease of its own, at a time of its own."""
    connection = connect()
    publish(connection, "q", 1, **task(eta=at(clock, -60)))
    first = connection.default_channel.basic_get("q")
    publish(connection, "q", 2, headers=first.headers)
    first.ack()
    second = connection.default_channel.basic_get("q")
    assert second.headers["taskgate_lease"] != first.headers["taskgate_lease"]
    assert "taskgate_eta" not in second.headers


def test_the_same_instant_in_any_zone(connect, clock):
    connection = connect(timezone="Asia/Tokyo")
    tokyo = timezone(timedelta(hours=9))
    for number, eta in enumerate([at(clock, 10), at(clock, 10, tokyo), at(clock, 10, tokyo).partition("+")[0]]):
        publish(connection, "q", number, **task(eta=eta))
    assert {row.run_at for row in connection.connection.broker.list()} == {clock.now_ms() + 10_000}


def test_an_eta_without_a_zone_is_utc(connect_memory, clock):
    connection = connect_memory()
    publish(connection, "q", 1, **task(eta=at(clock, 10).partition("+")[0]))
    assert connection.connection.broker.list()[0].run_at == clock.now_ms() + 10_000


@pytest.mark.parametrize("eta", ["2056-01-01T00:00:00+00:00", "9999-12-31T23:59:59+00:00", "9999-12-31T23:59:59-12:00"])
def test_far_etas_are_stored(connect, clock, eta):
    connection = connect()
    publish(connection, "q", 1, **task(eta=eta))
    assert get(connection, "q") is None
    assert size(connection, "q") == 1


@pytest.mark.parametrize("eta", ["tomorrow", 5, True, ["x"], "9999-99-99"])
def test_garbage_is_delivered_as_it_is(connect_memory, eta):
    """The worker knows how to reject it."""
    connection = connect_memory()
    publish(connection, "q", 1, **task(eta=eta))
    message = connection.default_channel.basic_get("q")
    if eta == 5:  # an instant in 1970
        assert message.headers["taskgate_eta"] == 5
    else:
        assert message.headers["eta"] == eta


def test_other_messages_may_have_a_header_of_that_name(connect_memory, clock):
    connection = connect_memory()
    publish(connection, "q", 1, headers={"eta": at(clock, 60)})
    assert connection.default_channel.basic_get("q").headers == {"eta": at(clock, 60)}


def test_what_has_expired_is_not_delivered(connect, clock):
    connection = connect()
    publish(connection, "q", "ttl", expiration=5)
    publish(connection, "q", "task", **task(expires=at(clock, 5)))
    publish(connection, "q", "kept", expiration=60, **task(expires=at(clock, 60)))
    publish(connection, "q", "for ever")
    clock.advance(6)
    assert [get(connection, "q") for _ in range(3)] == ["kept", "for ever", None]
    rows = connection.connection.broker.list(Filter(queue="q"))
    assert {(row.state, row.reason) for row in rows} == {(State.CANCELED, "expired")}


def test_a_queue_can_have_its_own_time_to_live(connect, clock):
    connection, other = connect(), connect()
    queue = kombu.Queue("short", kombu.Exchange("x", "fanout"), message_ttl=5)
    queue(other.default_channel).declare()
    kombu.Queue("long", kombu.Exchange("x", "fanout"))(other.default_channel).declare()
    kombu.Producer(connection).publish("both", exchange="x", expiration=60)
    publish(connection, "short", "direct")
    clock.advance(6)
    assert get(connection, "short") is None
    assert get(connection, "long") == "both"


def test_remote_control_is_not_dropped_by_its_expires_header(connect, clock):
    """It is the sender's clock, and AMQP and Redis do not look at it either."""
    connection = connect()
    publish(connection, "pidbox", "ping", headers={"expires": clock.now_ms() / 1000 - 60})
    assert get(connection, "pidbox") == "ping"


def test_an_expired_message_does_not_stop_the_others(connect, clock):
    connection = connect()
    publish(connection, "q", *range(150), expiration=1)
    publish(connection, "q", "live")
    clock.advance(2)
    with consuming(connection, "q", then=lambda message: message.ack(), prefetch=4) as taken:
        drain(connection, taken, 1)
        wait_until(lambda: size(connection, "q") == 0, "the queue is empty")
    assert taken.bodies == ["live"]
