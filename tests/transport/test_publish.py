"""Publishing: stored when it returns, an error when it is not."""

from __future__ import annotations

import time

import kombu
import pytest
from kombu.exceptions import OperationalError

from kombu_taskgate.core.errors import PayloadTooLarge, StoreUnavailable
from kombu_taskgate.testing.threads import errors_of, together
from kombu_taskgate.transport.errors import BrokerUnavailable, NotFound
from tests.transport.helpers import get, publish, size

BATCHES = pytest.mark.skipif(not hasattr(kombu.Producer, "batch"), reason="kombu has batches from 5.7 on")


def test_a_message_over_the_limit_is_refused(connect):
    connection = connect(max_payload=2000)
    with pytest.raises(OperationalError, match="bytes") as raised:
        publish(connection, "q", "x" * 2000)
    assert isinstance(raised.value, PayloadTooLarge)
    assert not isinstance(raised.value, connection.connection_errors)
    publish(connection, "q", "x" * 1000)
    assert size(connection, "q") == 1


def test_a_message_over_the_limit_is_not_published_again_and_again(connect_memory):
    connection = connect_memory(max_payload=100)
    start = time.monotonic()
    with pytest.raises(PayloadTooLarge):
        publish(connection, "q", "x" * 100, retry=True, retry_policy={"max_retries": 3, "interval_start": 30})
    assert time.monotonic() - start < 25


def test_a_failed_publish_raises(connect_memory, monkeypatch):
    connection = connect_memory()
    broker = connection.connection.broker

    def fail(*what):
        raise StoreUnavailable("read only")

    monkeypatch.setattr(broker, "enqueue", fail, raising=False)
    with pytest.raises(OperationalError, match="read only") as raised:
        publish(connection, "q", 1)
    assert isinstance(raised.value, BrokerUnavailable)
    assert isinstance(raised.value, connection.recoverable_connection_errors)
    assert get(connection, "q") is None


def test_publishing_again_over_a_new_connection(connect, monkeypatch):
    connection = connect()
    broker = connection.connection.broker

    def fail(*what):
        raise StoreUnavailable("cut")

    monkeypatch.setattr(broker, "enqueue", fail, raising=False)
    kombu.Producer(connection).publish(1, routing_key="q", retry=True, retry_policy={"max_retries": 2})
    assert get(connection, "q") == 1


def test_many_threads_and_one_new_queue(connect):
    connections = [connect() for _ in range(8)]

    def work(connection):
        queue = kombu.Queue("new", kombu.Exchange("x"), "k")
        producer = kombu.Producer(connection)
        for number in range(5):
            producer.publish(number, exchange="x", routing_key="k", declare=[queue])

    assert errors_of(together([lambda c=c: work(c) for c in connections])) == []
    assert size(connections[0], "new") == 40
    assert list(connections[0].default_channel.list_bindings()) == [("new", "x", "k")]


@BATCHES
def test_a_batch_is_stored_as_a_whole(connect):
    connection = connect()
    producer = connection.Producer()
    assert producer.supports_batch_publish
    with producer.batch():
        for number in range(5):
            producer.publish(number, routing_key="q")
        assert size(connection, "q") == 0
    assert [get(connection, "q") for _ in range(6)] == [0, 1, 2, 3, 4, None]


@BATCHES
def test_a_batch_that_fails_stores_nothing(connect):
    connection = connect(max_payload=1000)
    producer = connection.Producer()

    def left_by_an_error():
        with producer.batch():
            producer.publish(1, routing_key="q")
            raise ValueError("mine")

    def too_large():
        with producer.batch():
            producer.publish(1, routing_key="q")
            producer.publish("x" * 1000, routing_key="q")

    with pytest.raises(ValueError, match="mine"):
        left_by_an_error()
    with pytest.raises(PayloadTooLarge):
        too_large()
    assert size(connection, "q") == 0


@BATCHES
def test_a_batch_is_stored_in_parts_when_it_is_full_or_flushed(connect_memory):
    connection = connect_memory()
    producer = connection.Producer()
    with producer.batch(max_size=3) as batch:
        for number in range(4):
            producer.publish(number, routing_key="q")
        assert size(connection, "q") == 3
        batch.flush()
        assert size(connection, "q") == 4
        with pytest.raises(NotFound):
            producer.publish(1, exchange="nowhere", routing_key="q")
    assert size(connection, "q") == 4


@BATCHES
def test_a_batch_wakes_consumers_of_this_process(connect_memory):
    connection = connect_memory(poll_min=30, poll_max=30)
    producer = connect_memory(poll_min=30, poll_max=30).Producer()
    with connection.SimpleQueue("q") as queue:
        with pytest.raises(queue.Empty):
            queue.get(timeout=0.1)
        start = time.monotonic()
        with producer.batch():
            producer.publish(1, routing_key="q")
        assert queue.get(timeout=29).payload == 1
        assert time.monotonic() - start < 25


def test_a_pool_of_connections(connect):
    pool = connect().Pool(2)
    with pool.acquire() as one, pool.acquire() as two:
        publish(one, "q", 1)
        publish(two, "q", 2)
    with pool.acquire() as again:
        assert [get(again, "q"), get(again, "q")] == [1, 2]
    pool.force_close_all()
