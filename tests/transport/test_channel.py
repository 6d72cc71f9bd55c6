"""Queues, settling and consuming, as kombu's callers know them from AMQP."""

from __future__ import annotations

import logging
import threading

import kombu
import pytest
from kombu.exceptions import ChannelError

from kombu_taskgate.core.model import Filter, Reason, State
from kombu_taskgate.testing.threads import DEADLINE, errors_of, together, wait_until
from kombu_taskgate.transport.errors import NotFound, PreconditionFailed, RecoverableConnectionError, TagInUse
from tests.transport.helpers import consuming, drain, get, nothing_comes, outstanding, publish, size


def drained(connection, queue, number, **options):
    """Consume so many messages, acknowledging each; their bodies."""
    with consuming(connection, queue, then=lambda message: message.ack(), **options) as taken:
        drain(connection, taken, number)
    return taken.bodies


# -- queues ----------------------------------------------------------------------------------------


def test_declaring_queues(connect):
    channel = connect().channel()
    name, messages, consumers = channel.queue_declare("q", durable=True)
    assert (name, messages, consumers) == ("q", 0, 0)
    assert channel.queue_declare("q", passive=True).queue == "q"
    generated = [channel.queue_declare().queue for _ in range(2)]
    assert all(name.startswith("amq.gen-") for name in generated)
    assert len(set(generated)) == 2
    with pytest.raises(NotFound, match="no queue 'missing'") as raised:
        channel.queue_declare("missing", passive=True)
    assert raised.value.code == 404


def test_a_queue_that_only_holds_messages_can_be_looked_at(connect):
    connection = connect()
    publish(connection, "q", 1, 2)
    assert connection.default_channel.queue_declare("q", passive=True).message_count == 2


def test_arguments_of_queues(connect):
    connection = connect()
    channel = connection.channel()
    kombu.Queue("q", expires=60, message_ttl=5, max_priority=9, max_length=10)(channel).declare()
    stored = connection.connection.broker.topology.queue("q")
    assert (stored.expires, stored.message_ttl) == (60.0, 5.0)
    for arguments in ({"x-expires": 0}, {"x-expires": "soon"}, {"x-message-ttl": -1}):
        with pytest.raises(PreconditionFailed, match="no duration in milliseconds"):
            channel.queue_declare("r", arguments=arguments)
    channel.queue_declare("r", arguments={"x-message-ttl": 0, "x-queue-type": "quorum"})


def test_consumers_of_this_process_are_counted(connect):
    here, there = connect(), connect()
    with consuming(here, "q"), consuming(there, "q"):
        assert there.default_channel.queue_declare("q", passive=True).consumer_count == 2
    assert there.default_channel.queue_declare("q", passive=True).consumer_count == 0


def test_consumers_of_other_processes_are_counted_while_they_live(connect):
    connection = connect(lease_ttl=5)
    broker = connection.connection.broker
    channel = connection.default_channel
    channel.queue_declare("q")
    elsewhere = broker.open_session("elsewhere", 5.0)
    broker.topology.set_consumers(elsewhere, {"q": 3})
    with consuming(connection, "q"):
        assert channel.queue_declare("q", passive=True).consumer_count == 4
        with pytest.raises(PreconditionFailed, match="has consumers"):
            channel.queue_delete("q", if_unused=True)
    assert channel.queue_declare("q", passive=True).consumer_count == 3
    wait_until(lambda: channel.queue_declare("q", passive=True).consumer_count == 0, "their holder is dead")


def test_purging_takes_all_that_waits_and_nothing_that_runs(connect):
    connection = connect()
    publish(connection, "q", *range(5))
    publish(connection, "q", "later", headers={"task": "t", "eta": "9999-12-31T00:00:00"})
    running = connection.default_channel.basic_get("q")
    assert connection.default_channel.queue_purge("q") == 5
    assert size(connection, "q") == 0
    running.reject(requeue=True)
    assert get(connection, "q") == running.payload


def test_purging_takes_what_a_canceled_consumer_had_not_seen(connect):
    connection = connect()
    publish(connection, "q", *range(5))
    with consuming(connection, "q") as taken:
        drain(connection, taken, 1)
    assert connection.default_channel.queue_purge("q") == 4


def test_deleting_queues(connect):
    connection = connect()
    channel = connection.channel()
    kombu.Queue("q", kombu.Exchange("x"), "k")(channel).declare()
    publish(connection, "q", 1, 2)
    with pytest.raises(ChannelError, match="not empty"):
        channel.queue_delete("q", if_empty=True)
    with consuming(connection, "q") as taken:
        drain(connection, taken, 1)
        with pytest.raises(ChannelError, match="has consumers"):
            channel.queue_delete("q", if_unused=True)
    assert channel.queue_delete("q") == 1
    assert list(channel.list_bindings()) == []
    with pytest.raises(NotFound):
        channel.queue_declare("q", passive=True)
    # What was running is settled as usual.
    taken[0].ack()
    broker = connection.connection.broker
    wait_until(lambda: broker.list(Filter(queue="q", states=[State.RUNNING])) == [], "the ack is stored")


def test_auto_delete_exchanges_go_with_their_last_queue(connect):
    connection = connect()
    channel = connection.channel()
    exchange = kombu.Exchange("x", "fanout", auto_delete=True)
    for name in ("q1", "q2"):
        kombu.Queue(name, exchange)(channel).declare()
    channel.queue_delete("q1")
    channel.exchange_declare("x", passive=True)
    channel.queue_delete("q2")
    with pytest.raises(NotFound):
        channel.exchange_declare("x", passive=True)


def test_exclusive_queues_go_with_their_last_consumer(connect):
    connection = connect()
    topology = connection.connection.broker.topology
    queue = kombu.Queue("b", routing_key="b", exclusive=True)
    with connection.SimpleQueue(queue, no_ack=True) as simple:
        simple.put("x")
        assert simple.get(timeout=DEADLINE).payload == "x"
        assert topology.queue("b") is not None
    assert topology.queue("b") is None


def test_exclusive_queues_go_with_their_connection(connect):
    connection, other = connect(), connect()
    connection.channel().queue_declare("q", exclusive=True)
    topology = other.connection.broker.topology
    assert topology.queue("q").auto_delete
    connection.release()
    assert topology.queue("q") is None


# -- order -----------------------------------------------------------------------------------------


def test_first_in_first_out(connect):
    connection = connect()
    publish(connection, "q", *range(30))
    assert drained(connection, "q", 30, prefetch=7) == list(range(30))


def test_higher_priorities_go_first(connect):
    connection = connect()
    for priority in (0, 5, 9, 5, -1, 50):
        publish(connection, "q", priority, priority=priority)
    assert drained(connection, "q", 6, prefetch=1) == [9, 50, 5, 5, 0, -1]


def test_priority_reaches_the_consumer(connect_memory):
    connection = connect_memory()
    publish(connection, "q", 1, priority=7)
    assert connection.default_channel.basic_get("q").properties["priority"] == 7


# -- prefetch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 3])
def test_no_more_than_the_window_is_unsettled(connect, prefetch):
    connection = connect()
    publish(connection, "q", *range(10))
    with consuming(connection, "q", prefetch=prefetch) as taken:
        drain(connection, taken, prefetch)
        assert nothing_comes(connection)
        assert size(connection, "q") == 10 - prefetch
        taken[0].ack()
        drain(connection, taken, prefetch + 1)
        assert nothing_comes(connection)
    assert taken.bodies == list(range(prefetch + 1))


def test_without_a_window_everything_comes(connect_memory):
    connection = connect_memory()
    publish(connection, "q", *range(250))
    with consuming(connection, "q") as taken:
        drain(connection, taken, 250)
    assert taken.bodies == list(range(250))


def test_the_window_can_be_changed_while_consuming(connect_memory):
    connection = connect_memory()
    channel = connection.channel()
    publish(connection, "q", *range(10))
    with consuming(connection, "q", prefetch=2, channel=channel) as taken:
        drain(connection, taken, 2)
        assert nothing_comes(connection)
        channel.basic_qos(0, 5, False)
        drain(connection, taken, 5)
        assert nothing_comes(connection)
        channel.basic_qos(0, 1, False)
        for message in taken[:4]:
            message.ack()
        assert nothing_comes(connection)
        taken[4].ack()
        drain(connection, taken, 6)
        assert channel.qos.prefetch_count == 1
        assert not channel.qos.can_consume()
        assert channel.qos.can_consume_max_estimate() == 0


def test_fetched_messages_take_no_place_in_the_window(connect_memory):
    connection = connect_memory()
    channel = connection.channel()
    publish(connection, "q", *range(3))
    fetched = channel.basic_get("q")
    with consuming(connection, "q", prefetch=1, channel=channel) as taken:
        drain(connection, taken, 1)
    assert [fetched.payload, *taken.bodies] == [0, 1]


def test_two_channels_share_a_queue_within_their_windows(connect):
    connection = connect()
    publish(connection, "q", *range(10))
    with consuming(connection, "q", prefetch=2) as one, consuming(connection, "q", prefetch=3) as two:
        while len(one) + len(two) < 5:
            connection.drain_events(timeout=DEADLINE)
        assert nothing_comes(connection)
        assert (len(one), len(two)) == (2, 3)


def test_two_consumers_of_a_channel_take_turns(connect_memory):
    connection = connect_memory()
    channel = connection.channel()
    with consuming(connection, "q", channel=channel) as one, consuming(connection, "q", channel=channel) as two:
        publish(connection, "q", *range(20))
        while len(one) + len(two) < 20:
            connection.drain_events(timeout=DEADLINE)
    assert (len(one), len(two)) == (10, 10)


def test_a_queue_full_of_tasks_does_not_hold_up_another_channel(connect):
    """Remote control answers while tasks wait."""
    connection = connect()
    publish(connection, "tasks", *range(50))
    with consuming(connection, "tasks", prefetch=2) as tasks, consuming(connection, "pidbox", no_ack=True) as control:
        drain(connection, tasks, 2)
        publish(connection, "pidbox", "ping")
        drain(connection, control, 1)
    assert control.bodies == ["ping"]


def test_channels_take_turns_when_both_have_something(connect_memory):
    connection = connect_memory()
    publish(connection, "tasks", *range(50))
    with consuming(connection, "tasks") as tasks, consuming(connection, "pidbox", no_ack=True) as control:
        publish(connection, "pidbox", "ping")
        wait_until(lambda: outstanding(connection) == 51, "all are here")
        wait_until(lambda: len(connection.connection.broker.list()) == 50, "the ping is acknowledged")
        drain(connection, control, 1)
    assert len(tasks) <= 1


def test_flow_stops_and_goes_on(connect_memory):
    connection = connect_memory()
    channel = connection.channel()
    publish(connection, "q", 1, 2)
    with consuming(connection, "q", prefetch=1, channel=channel) as taken:
        drain(connection, taken, 1)
        channel.flow(False)
        taken[0].ack()
        assert nothing_comes(connection)
        channel.flow(True)
        drain(connection, taken, 2)


# -- settling --------------------------------------------------------------------------------------


def test_acknowledged_messages_are_gone(connect):
    connection = connect()
    publish(connection, "q", 1)
    assert get(connection, "q") == 1
    assert get(connection, "q") is None
    wait_until(lambda: connection.connection.broker.list() == [], "the row is deleted")


def test_unsettled_messages_come_back_when_their_channel_closes(connect, caplog):
    caplog.set_level(logging.INFO, logger="kombu_taskgate.transport")
    connection = connect()
    publish(connection, "q", *range(4))
    channel = connection.channel()
    with consuming(connection, "q", prefetch=3, channel=channel) as taken:
        drain(connection, taken, 2)
        channel.close()
    assert "Restoring 2 unacknowledged message(s)" in caplog.messages
    assert channel.connection is None
    fetched = [connection.default_channel.basic_get("q") for _ in range(4)]
    assert [message.payload for message in fetched] == [0, 1, 2, 3]
    # The third was claimed and never seen by anybody.
    assert [message.delivery_info["redelivered"] for message in fetched] == [True, True, False, False]


def test_a_settlement_after_the_channel_was_closed_is_no_error(connect_memory, caplog):
    caplog.set_level(logging.INFO, logger="kombu_taskgate.transport")
    connection = connect_memory()
    publish(connection, "q", 1)
    with connection.channel() as channel:
        message = channel.basic_get("q")
    message.ack()
    assert any(text.startswith("ack of delivery 1 came after its channel was closed") for text in caplog.messages)
    assert get(connection, "q") == 1


def test_requeue_comes_back_as_redelivered(connect):
    connection = connect()
    publish(connection, "q", 1)
    first = connection.default_channel.basic_get("q")
    assert first.delivery_info["redelivered"] is False
    first.requeue()
    second = connection.default_channel.basic_get("q")
    assert second.payload == 1
    assert second.delivery_info["redelivered"] is True
    assert second.delivery_tag != first.delivery_tag


def test_rejected_messages_become_dead_letters(connect):
    connection = connect()
    publish(connection, "q", 1)
    connection.default_channel.basic_get("q").reject()
    assert get(connection, "q") is None
    (dead,) = connection.connection.broker.list(Filter(queue="q"))
    assert (dead.state, dead.reason) == (State.FAILED, Reason.REJECTED)


def test_several_at_once(connect):
    connection = connect()
    channel = connection.channel()
    publish(connection, "q", *range(6))
    tags = [channel.basic_get("q").delivery_tag for _ in range(6)]
    channel.basic_ack(tags[1], multiple=True)
    channel.basic_nack(tags[3], multiple=True, requeue=True)
    channel.basic_nack(tags[4], requeue=False)
    channel.basic_ack(0, multiple=True)
    assert [get(connection, "q") for _ in range(3)] == [2, 3, None]
    assert [task.reason for task in connection.connection.broker.list(Filter(queue="q"))] == ["rejected"]


def test_recover_requeues_everything_unsettled(connect):
    connection = connect()
    channel = connection.channel()
    publish(connection, "q", *range(3))
    messages = [channel.basic_get("q") for _ in range(3)]
    messages[1].ack()
    channel.basic_recover(requeue=True)
    assert [get(connection, "q") for _ in range(3)] == [0, 2, None]


def test_unknown_delivery_tags_are_ignored(connect_memory):
    channel = connect_memory().channel()
    channel.basic_ack(5)
    publish(channel.connection.client, "q", 1)
    message = channel.basic_get("q")
    channel.basic_ack(message.delivery_tag + 1)
    message.ack()
    channel.basic_ack(message.delivery_tag)
    channel.basic_reject(message.delivery_tag, requeue=True)
    assert channel.basic_get("q") is None


def test_without_acknowledgements_a_message_is_gone_when_it_is_delivered(connect):
    connection = connect()
    publish(connection, "q", 1, 2, 3)
    with consuming(connection, "q", no_ack=True, prefetch=1) as taken:
        drain(connection, taken, 3)
        taken[0].ack()  # does nothing, as in kombu
    assert taken.bodies == [1, 2, 3]
    publish(connection, "q", 4)
    assert connection.default_channel.basic_get("q", no_ack=True).payload == 4
    assert connection.connection.broker.list() == []


def test_what_a_canceled_consumer_has_not_seen_goes_back(connect):
    connection = connect()
    publish(connection, "q", *range(5))
    with consuming(connection, "q", prefetch=4) as taken:
        drain(connection, taken, 1)
        wait_until(lambda: connection.connection.broker.queue_len("q") == 1, "four are claimed")
    wait_until(lambda: connection.connection.broker.queue_len("q") == 4, "three are back")
    taken[0].ack()
    fetched = [connect().default_channel.basic_get("q") for _ in range(4)]
    assert [(m.payload, m.delivery_info["redelivered"]) for m in fetched] == [(n, False) for n in (1, 2, 3, 4)]


def test_fetching_sees_what_a_consumer_of_the_channel_has_buffered(connect):
    connection = connect()
    channel = connection.channel()
    publish(connection, "q", *range(3))
    with consuming(connection, "q", channel=channel) as taken:
        drain(connection, taken, 1)
        fetched = channel.basic_get("q")
        unacknowledged = channel.basic_get("q", no_ack=True)
        assert nothing_comes(connection)
    assert [*taken.bodies, fetched.payload, unacknowledged.payload] == [0, 1, 2]
    broker = connection.connection.broker
    wait_until(lambda: len(broker.list()) == 2, "the one without acknowledgement is settled")


def test_fetching_what_a_consumer_without_acknowledgements_has_buffered(connect):
    connection = connect()
    channel = connection.channel()
    publish(connection, "q", 1, 2)
    with consuming(connection, "q", channel=channel, no_ack=True) as taken:
        drain(connection, taken, 1)
        wait_until(lambda: connection.connection.broker.list() == [], "both are settled")
        wait_until(lambda: channel.qos.outstanding == 1, "one is buffered")
        fetched = channel.basic_get("q")
        fetched.ack()
        assert nothing_comes(connection)
    assert [*taken.bodies, fetched.payload] == [1, 2]
    assert connection.connection.engine.refused == 0


def test_settling_from_other_threads(connect):
    connection = connect()
    publish(connection, "q", *range(40))
    with consuming(connection, "q", prefetch=40) as taken:
        drain(connection, taken, 40)
        settle = [(message.ack if message.payload % 2 else message.requeue) for message in taken]
        assert errors_of(together(settle)) == []
        drain(connection, taken, 60)
        assert sorted(taken.bodies[40:]) == list(range(0, 40, 2))


def test_the_consumer_thread_and_a_settling_thread_together(connect_memory):
    connection = connect_memory()
    publish(connection, "q", *range(300))
    waiting: list[kombu.Message] = []
    arrived = threading.Condition()

    def keep(message):
        with arrived:
            waiting.append(message)
            arrived.notify()

    def settle():
        for _ in range(300):
            with arrived:
                assert arrived.wait_for(lambda: waiting, DEADLINE)
                message = waiting.pop()
            message.ack()

    thread = threading.Thread(target=settle)
    thread.start()
    with consuming(connection, "q", then=keep, prefetch=8) as taken:
        drain(connection, taken, 300)
        thread.join(DEADLINE)
    assert sorted(taken.bodies) == list(range(300))
    wait_until(lambda: connection.connection.broker.list() == [], "all acks are stored")


# -- odds and ends ---------------------------------------------------------------------------------


def test_consumer_tags(connect_memory):
    channel = connect_memory().channel()
    tag = channel.basic_consume("q", callback=lambda message: None)
    assert tag.startswith("ctag-")
    assert channel.basic_consume("q", consumer_tag="mine") == "mine"
    with pytest.raises(TagInUse, match="'mine' is in use"):
        channel.basic_consume("q", consumer_tag="mine")
    channel.basic_cancel("mine")
    channel.basic_cancel("mine")
    channel.basic_cancel("never was")
    assert channel.basic_consume("q", consumer_tag="mine") == "mine"


def test_delivery_info(connect_memory):
    connection = connect_memory()
    channel = connection.channel()
    queue = kombu.Queue("q", kombu.Exchange("x", "topic"), "a.*")(channel)
    queue.declare()
    kombu.Producer(channel).publish("m", exchange="x", routing_key="a.b", correlation_id="c", reply_to="r")
    with consuming(connection, "q") as taken:
        drain(connection, taken, 1)
    info = taken[0].delivery_info
    assert (info["exchange"], info["routing_key"], info["redelivered"]) == ("x", "a.b", False)
    assert info["consumer_tag"]
    properties = taken[0].properties
    assert (properties["correlation_id"], properties["reply_to"]) == ("c", "r")
    assert properties["delivery_tag"] == taken[0].delivery_tag


def test_drain_events_delivers_one_message(connect):
    """Who waits for two answers calls it twice."""
    connection = connect()
    publish(connection, "q", 1, 2)
    with consuming(connection, "q") as taken:
        drain(connection, taken, 1)
        assert len(taken) == 1


def test_drain_events_without_consumers_times_out(connect_memory):
    assert nothing_comes(connect_memory(), 0.05)


def test_an_error_of_a_callback_is_the_callers(connect_memory):
    connection = connect_memory()
    publish(connection, "q", 1)

    def fail(message):
        raise KeyError("mine")

    with consuming(connection, "q", then=fail) as taken, pytest.raises(KeyError, match="mine"):
        drain(connection, taken, 1)
    taken[0].requeue()
    assert get(connection, "q") == 1


def test_channels_have_numbers_and_are_context_managers(connect_memory):
    connection = connect_memory()
    with connection.channel() as one, connection.channel() as two:
        assert (one.channel_id, two.channel_id) == (1, 2)
        assert one.connection.client is connection
    with connection.channel() as three:
        assert three.channel_id == 1
    with pytest.raises(RecoverableConnectionError):
        one.queue_declare("q")
    one.close()


def test_a_closed_connection_raises_and_opens_again(connect):
    connection = connect()
    publish(connection, "q", 1)
    old = connection.connection
    with consuming(connection, "q") as taken:
        drain(connection, taken, 1)
        connection.close()
        with pytest.raises(RecoverableConnectionError):
            old.drain_events(timeout=0)
        with pytest.raises(RecoverableConnectionError):
            old.deliver_ready()
    assert not old.connected
    assert connection.connection is None
    connection.connect()
    assert get(connection, "q") == 1


def test_simple_queues(connect):
    connection = connect()
    with connection.SimpleQueue("s") as queue:
        queue.put({"a": 1}, headers={"h": 1}, priority=1)
        queue.put({"a": 2})
        assert len(queue) == 2
        message = queue.get(timeout=DEADLINE)
        assert (message.payload, message.headers) == ({"a": 1}, {"h": 1})
        message.ack()
        queue.get(timeout=DEADLINE).requeue()
        assert queue.get(timeout=DEADLINE).payload == {"a": 2}
        with pytest.raises(queue.Empty):
            queue.get(timeout=0.05)
        assert queue.clear() == 0


def test_what_the_transport_says_of_itself(connect_memory):
    connection = connect_memory()
    transport = connection.transport
    assert (transport.driver_type, transport.driver_name) == ("taskgate", "taskgate")
    assert transport.driver_version().startswith("2.")
    assert connection.is_evented
    assert not connection.supports_heartbeats
    for kind in ("direct", "topic", "fanout", "headers"):
        assert connection.supports_exchange_type(kind)
