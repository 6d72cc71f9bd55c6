"""Exchanges and bindings lead where AMQP says."""

from __future__ import annotations

import itertools
import re

import kombu
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.exceptions import ChannelError

from kombu_taskgate.core.sql.topology import SqlTopology
from kombu_taskgate.core.topology import Binding, Exchange
from kombu_taskgate.transport.errors import NotFound, PreconditionFailed
from kombu_taskgate.transport.routing import matching, topic_matches
from tests.transport.helpers import get, publish, size

WORDS = st.lists(st.sampled_from(["a", "b", "", "stock"]), max_size=5)
PATTERN = st.lists(st.sampled_from(["a", "b", "", "*", "#", "stock"]), max_size=5)


def expected(pattern: list[str], words: list[str]) -> bool:
    """The same by brute force: each # stands for 0 to all words."""
    if not pattern:
        return not words
    first, rest = pattern[0], pattern[1:]
    if first == "#":
        return any(expected(rest, words[taken:]) for taken in range(len(words) + 1))
    return bool(words) and first in ("*", words[0]) and expected(rest, words[1:])


@given(PATTERN, WORDS)
def test_topic_patterns_match_word_by_word(pattern, words):
    assert topic_matches(pattern, words) == expected(pattern, words)


@pytest.mark.parametrize(
    ("key", "message_key", "wanted"),
    [
        ("*.stock.#", "usd.stock", True),
        ("*.stock.#", "eur.stock.db", True),
        ("*.stock.#", "stock.nasdaq", False),
        ("#", "", True),
        ("*", "", False),
        ("", "", True),
        ("a.*", "a", False),
        ("a.#", "a", True),
        ("a.b", "a.b.c", False),
        ("a.b", "a+b", False),
        ("#.#", "x", True),
        ("*.*", "x.", True),
    ],
)
def test_topic_keys(key, message_key, wanted):
    exchange = Exchange("x", "topic")
    assert matching(exchange, [Binding("x", "q", key)], message_key, {}) == (["q"] if wanted else [])


@pytest.mark.parametrize(
    ("arguments", "headers", "wanted"),
    [
        ({"x-match": "all", "a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, True),
        ({"x-match": "all", "a": 1, "b": 2}, {"a": 1}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({"x-match": "any", "a": 1, "b": 2}, {"b": 2}, True),
        ({"x-match": "any", "a": 1, "b": 2}, {"b": 3}, False),
        ({"x-match": "all", "a": None}, {"a": "whatever"}, True),
        ({"x-match": "all", "a": None}, {}, False),
        ({"x-match": "all", "x-other": 1}, {}, True),
        ({"x-match": "all-with-x", "x-other": 1}, {}, False),
        ({"x-match": "all"}, {}, True),
        ({"x-match": "any"}, {"a": 1}, False),
    ],
)
def test_headers(arguments, headers, wanted):
    exchange = Exchange("x", "headers")
    binding = Binding("x", "q", "", arguments)
    assert matching(exchange, [binding], "", headers) == (["q"] if wanted else [])


def test_a_queue_with_two_matching_bindings_gets_the_message_once():
    bindings = [Binding("x", "q", "a.*"), Binding("x", "q", "a.b"), Binding("x", "r", "#")]
    assert matching(Exchange("x", "topic"), bindings, "a.b", {}) == ["q", "r"]


def test_processes_agree_on_direct_topic_fanout_and_headers(connect):
    here, there = connect(), connect()
    for kind, key, arguments in [
        ("direct", "key", None),
        ("topic", "k.*", None),
        ("fanout", "", None),
        ("headers", "", {"x-match": "any", "colour": "red"}),
    ]:
        exchange = kombu.Exchange(f"x-{kind}", kind)
        for number in (1, 2):
            kombu.Queue(f"{kind}{number}", exchange, key, binding_arguments=arguments)(there.default_channel).declare()
    producer = kombu.Producer(here)
    for kind, hit, miss in [("direct", "key", "other"), ("topic", "k.e", "k"), ("fanout", "x", None)]:
        producer.publish("hit", exchange=f"x-{kind}", routing_key=hit)
        if miss is not None:
            producer.publish("miss", exchange=f"x-{kind}", routing_key=miss)
    producer.publish("hit", exchange="x-headers", headers={"colour": "red"})
    producer.publish("miss", exchange="x-headers", headers={"colour": "blue"})
    for kind, number in itertools.product(("direct", "topic", "fanout", "headers"), (1, 2)):
        assert [get(there, f"{kind}{number}") for _ in range(2)] == ["hit", None]


def test_the_default_exchange_stores_for_queues_nobody_has_declared(connect):
    connection = connect()
    publish(connection, "not-declared", 1)
    assert size(connection, "not-declared") == 1
    assert get(connect(), "not-declared") == 1


def test_built_in_exchanges_need_no_declaration(connect):
    connection = connect()
    channel = connection.channel()
    for kind in ("direct", "topic", "fanout", "headers"):
        channel.queue_declare(f"b-{kind}")
        channel.queue_bind(f"b-{kind}", f"amq.{kind}", "key")
        channel.exchange_declare(f"amq.{kind}", type=kind, passive=True)
        channel.exchange_declare(f"amq.{kind}", type=kind, durable=True)
        kombu.Producer(channel).publish(kind, exchange=f"amq.{kind}", routing_key="key")
        assert get(connection, f"b-{kind}") == kind
    with pytest.raises(PreconditionFailed, match=re.escape("'amq.direct' exists with type 'direct'")):
        channel.exchange_declare("amq.direct", type="topic")


def test_publishing_to_an_unknown_exchange_is_an_error(connect_memory):
    connection = connect_memory()
    with pytest.raises(NotFound, match="no exchange 'nowhere'") as raised:
        kombu.Producer(connection).publish(1, exchange="nowhere", routing_key="k")
    assert raised.value.code == 404
    assert isinstance(raised.value, connection.channel_errors)


def test_an_exchange_declared_right_after_the_error_is_known(connect_memory):
    here, there = connect_memory(), connect_memory()
    with pytest.raises(NotFound):
        kombu.Producer(here).publish(1, exchange="late", routing_key="k")
    kombu.Queue("late-queue", kombu.Exchange("late"), "k")(there.default_channel).declare()
    kombu.Producer(here).publish(1, exchange="late", routing_key="k")
    assert get(here, "late-queue") == 1


def test_tasks_are_routed_by_the_bindings_of_this_moment_also_transient_ones(connect, monkeypatch):
    # What is bound here is bound by another process: nothing tells of it but the tables.
    monkeypatch.setattr(SqlTopology, "forget_bindings", lambda topology: None)
    connection = connect()
    channel = connection.channel()
    channel.exchange_declare("x", type="topic")
    producer = kombu.Producer(channel, exchange=kombu.Exchange("x", type="topic"))
    producer.publish("dropped", routing_key="k", headers={"task": "t", "id": "1"}, delivery_mode="transient")
    channel.queue_declare("q")
    channel.queue_bind("q", "x", "k")
    producer.publish("kept", routing_key="k", headers={"task": "t", "id": "2"}, delivery_mode="transient")
    assert size(connection, "q") == 1


def test_messages_no_binding_wants_are_dropped_and_mandatory_ones_returned(connect_memory):
    connection = connect_memory()
    channel = connection.channel()
    channel.exchange_declare("x", type="direct")
    returned = []
    producer = kombu.Producer(channel, on_return=lambda *what: returned.append(what))
    producer.publish("dropped", exchange="x", routing_key="k")
    assert returned == []
    producer.publish("returned", exchange="x", routing_key="k", mandatory=True)
    ((error, exchange, key, _),) = returned
    assert (error.code, exchange, key) == (312, "x", "k")


def test_exchange_types_that_clash_or_do_not_exist(connect):
    channel = connect().channel()
    channel.exchange_declare("x", type="topic", durable=True)
    channel.exchange_declare("x", type="topic", durable=False)  # the stored one stays
    with pytest.raises(PreconditionFailed, match="exists with type 'topic'"):
        connect().channel().exchange_declare("x", type="fanout")
    with pytest.raises(PreconditionFailed, match="unknown type 'x-weird'"):
        channel.exchange_declare("y", type="x-weird")
    with pytest.raises(NotFound, match="no exchange 'z'"):
        channel.exchange_declare("z", passive=True)
    with pytest.raises(NotFound, match="no exchange 'z' to bind queue 'q' to"):
        channel.queue_bind("q", "z", "k")


def test_exchange_delete(connect):
    connection = connect()
    channel = connection.channel()
    kombu.Queue("q", kombu.Exchange("x"), "k")(channel).declare()
    with pytest.raises(ChannelError, match="in use"):
        channel.exchange_delete("x", if_unused=True)
    publish(connection, "q", 1)
    channel.exchange_delete("x")
    assert list(channel.list_bindings()) == []
    assert get(connection, "q") == 1
    with pytest.raises(NotFound):
        kombu.Producer(channel).publish(1, exchange="x", routing_key="k")


def test_unbinding_and_listing(connect):
    connection = connect()
    channel = connection.channel()
    kombu.Queue("q", kombu.Exchange("x"), "k")(channel).declare()
    channel.queue_bind("q", "x", "k2")
    channel.queue_bind("q", "x", "k2")
    assert sorted(channel.list_bindings()) == [("q", "x", "k"), ("q", "x", "k2")]
    channel.queue_unbind("q", "x", "k")
    assert channel.get_bindings() == [{"destination": "q", "source": "x", "routing_key": "k2"}]
    assert connection.get_manager().get_bindings() == channel.get_bindings()
    kombu.Producer(channel).publish("lost", exchange="x", routing_key="k")
    kombu.Producer(channel).publish("kept", exchange="x", routing_key="k2")
    assert [get(connection, "q"), get(connection, "q")] == ["kept", None]


def test_exchange_to_exchange_bindings_are_refused(connect_memory):
    channel = connect_memory().channel()
    with pytest.raises(NotImplementedError, match="bind the queues to the source"):
        channel.exchange_bind("a", "b", "k")
    with pytest.raises(NotImplementedError):
        channel.exchange_unbind("a", "b", "k")
