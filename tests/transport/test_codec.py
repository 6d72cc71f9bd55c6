"""Messages come out of their bytes as they went in."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from decimal import Decimal

import kombu
import kombu.utils.json as kombu_json
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_taskgate.core.model import Filter, NewTask, Reason, State
from kombu_taskgate.testing.threads import wait_until
from kombu_taskgate.transport.codec import Envelope, decode, encode
from kombu_taskgate.transport.errors import Undecodable
from tests.transport.helpers import consuming, drain, publish

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
TEXT = st.text(st.characters(exclude_categories=[]))  # lone surrogates too
ENVELOPES = st.builds(
    Envelope,
    body=st.none() | st.binary() | TEXT,
    content_type=st.none() | TEXT,
    content_encoding=st.none() | TEXT,
    headers=st.dictionaries(TEXT, VALUES, max_size=4),
    properties=st.dictionaries(st.sampled_from(["priority", "correlation_id", "reply_to"]), st.integers() | TEXT),
    exchange=TEXT,
    routing_key=TEXT,
)


@given(ENVELOPES)
def test_round_trip(envelope):
    assert decode(encode(envelope)) == envelope


def test_the_body_is_stored_as_it_is_behind_one_line_of_json():
    payload = encode(Envelope(b"\n\x00{}\xff", "application/x", headers={"line": "a\nb"}))
    line, _, body = payload.partition(b"\n")
    assert body == b"\n\x00{}\xff"
    assert json.loads(line)["headers"] == {"line": "a\nb"}


def test_bytes_dates_and_decimals_in_headers_keep_their_types():
    headers = {
        "text": b"caf\xc3\xa9",
        "binary": b"\xff\x00",
        "when": dt.datetime(2026, 10, 1, 12, tzinfo=dt.timezone.utc),
        "day": dt.date(2026, 10, 1),
        "price": Decimal("1.10"),
        "id": uuid.uuid4(),
        "nested": {"deep": [b"x"]},
    }
    assert decode(encode(Envelope(b"", headers=headers))).headers == headers


def test_what_can_not_be_written_is_left_out():
    class Rude:
        def __json__(self):
            raise RuntimeError("no")

    circle: list[object] = []
    circle.append(circle)
    headers = {"good": 1, "object": object(), "rude": Rude(), "circle": circle, ("a", "b"): 1, "also": "good"}
    properties = {"correlation_id": "c", "reply_to": object(), "some_other": 1, "on_reply": lambda: None}
    found = decode(encode(Envelope(b"x", headers=headers, properties=properties)))
    assert found.headers == {"good": 1, "also": "good"}
    assert found.properties == {"correlation_id": "c"}


def test_properties_amqp_does_not_know_are_dropped():
    properties = {
        "delivery_mode": 2,
        "priority": 3,
        "delivery_info": {},
        "body_encoding": "base64",
        "x": 1,
        "type": None,
    }
    assert decode(encode(Envelope(b"", properties=properties))).properties == {"delivery_mode": 2, "priority": 3}


def test_a_body_that_was_not_serialized_is_refused(connect_memory):
    with pytest.raises(TypeError, match="text or bytes, not dict: let the producer serialize it"):
        encode(Envelope({"a": 1}))  # type: ignore[arg-type]
    for body in (bytearray(b"x"), memoryview(b"x")):
        assert decode(encode(Envelope(body))).body == b"x"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "no header line"),
        (b"plain old bytes", "no header line"),
        (b"{}\n", "of something else"),
        (b"[1]\nx", "of something else"),
        (b"\xff\xfe\n", "not JSON"),
        (b'{"v":2,"body":"bytes"}\nx', "version 2, this code reads version 1"),
        (b'{"v":1,"body":"gzip","headers":{},"properties":{}}\nx', "unknown kind 'gzip'"),
        (b'{"v":1,"body":"text","headers":{},"properties":{}}\n\xff', "not UTF-8"),
        (b'{"v":1,"body":"bytes","headers":[],"properties":{}}\n', "'headers' in the header line is not a mapping"),
        (b'{"v":1,"body":"bytes","headers":{},"properties":{},"key":5}\n', "'key' in the header line is not a text"),
        (b'{"v":1,"typed":true,"body":"bytes","x":{"__type__":"os.system","__value__":"ls"}}\n', "not JSON"),
        (b'{"v":1,"typed":true,"body":"bytes","x":{"__type__":"decimal","__value__":"x"}}\n', "not JSON"),
        (b"[" * 100_000 + b"\n", "not JSON"),
    ],
)
def test_garbage_is_told_apart(payload, why):
    with pytest.raises(Undecodable, match=why):
        decode(payload)


@given(st.binary())
def test_no_bytes_crash_the_decoder(payload):
    try:
        decode(payload)
    except Undecodable:
        return
    raise AssertionError("random bytes are no message")


def test_a_row_that_is_no_message_becomes_a_dead_letter_and_the_next_is_delivered(connect, caplog):
    connection = connect()
    broker = connection.connection.broker
    bad = broker.enqueue(NewTask("q", b"not a message", priority=9))
    publish(connection, "q", "good")
    with consuming(connection, "q", then=lambda message: message.ack()) as taken:
        drain(connection, taken, 1)
    assert taken.bodies == ["good"]
    wait_until(lambda: broker.get(bad).state is State.FAILED, "the row is failed")
    assert broker.get(bad).reason == Reason.UNDECODABLE
    assert "no header line" in broker.get(bad).detail
    assert [r.levelname for r in caplog.records if f"execution {bad} " in r.message] == ["ERROR"]


def test_basic_get_steps_over_what_is_no_message(connect_memory):
    connection = connect_memory()
    broker = connection.connection.broker
    broker.enqueue_many([NewTask("q", b"bad"), NewTask("q", b"bad too")])
    assert connection.default_channel.basic_get("q") is None
    assert [task.reason for task in broker.list(Filter(queue="q"))] == ["undecodable", "undecodable"]


def test_texts_bytes_compression_and_errors_reach_the_consumer_as_with_other_transports(connect_memory):
    connection = connect_memory()
    producer = kombu.Producer(connection)
    producer.publish("a text", routing_key="q", content_type="text/plain", content_encoding="utf-8")
    producer.publish(b"\x00\xff", routing_key="q", content_type="application/data", content_encoding="binary")
    producer.publish({"big": "x" * 1000}, routing_key="q", compression="gzip")
    connection.default_channel.basic_publish("bare", routing_key="q")
    producer.publish("not gzip", routing_key="q", headers={"compression": "gzip"})
    channel = connection.default_channel
    fetched = [channel.basic_get("q") for _ in range(5)]
    assert [message.payload for message in fetched[:4]] == ["a text", b"\x00\xff", {"big": "x" * 1000}, "bare"]
    assert fetched[0].body == b"a text"
    assert fetched[4].errors


def test_a_registered_type_that_can_not_be_read_is_undecodable(monkeypatch):
    """Whatever its decoder raises: it must not hold up what was claimed with it."""

    class Strange(Exception):
        pass

    def refuse(value):
        raise Strange("of another version")

    monkeypatch.setitem(kombu_json._decoders, "strange", refuse)
    line = {"v": 1, "typed": True, "body": "none", "headers": {"x": {"__type__": "strange", "__value__": 1}}}
    with pytest.raises(Undecodable, match="of another version"):
        decode(json.dumps({**line, "properties": {}}).encode() + b"\n")
