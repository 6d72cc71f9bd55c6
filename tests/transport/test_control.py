"""Control commands are told to observers, and revoked messages are not delivered."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from typing import Any

import kombu
import pytest
from kombu.pidbox import Mailbox

from kombu_taskgate.core.errors import StoreUnavailable
from kombu_taskgate.core.memory import MemoryBroker
from kombu_taskgate.core.model import Claim, Filter, State
from kombu_taskgate.core.revocations import Revocation
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.transport import control, revocations
from kombu_taskgate.transport.codec import Envelope
from kombu_taskgate.transport.columns import columns_of
from kombu_taskgate.transport.errors import BrokerUnavailable
from kombu_taskgate.transport.revocations import RevokedClaims, of_stamp, of_task, revocable_by
from tests.transport.helpers import consuming, drain, get, nothing_comes, publish, size


class Observer:
    """Keeps what it is told, and raises what it is told to."""

    def __init__(self) -> None:
        self.seen: list[Envelope] = []
        self.error: Exception | None = None

    def published(self, connection: Any, message: Envelope) -> Envelope:
        self.seen.append(message)
        if self.error is not None:
            raise self.error
        return message


@pytest.fixture
def observer(monkeypatch: pytest.MonkeyPatch) -> Observer:
    observer = Observer()
    monkeypatch.setattr(control, "observers", lambda: (observer,))
    return observer


def broadcast(connection: kombu.Connection) -> kombu.Queue:
    """Broadcast one command to a node that listens; its queue."""
    mailbox = Mailbox("ns", type="fanout")(connection)
    queue = mailbox.get_queue("node")
    queue(connection.default_channel).declare()
    with connection.Producer() as producer:
        message = {"method": "m", "arguments": {}}
        producer.publish(message, exchange=mailbox.exchange.name, declare=[mailbox.exchange], serializer="json")
    return queue


# -- observers ---------------------------------------------------------------------------------------


def test_observers_see_broadcasts_and_nothing_else(connect_memory, observer):
    connection = connect_memory()
    queue = broadcast(connection)
    publish(connection, "q", 1)
    assert [message.exchange for message in observer.seen] == ["ns.pidbox"]
    assert size(connection, queue.name) == 1


def test_what_could_not_be_stored_is_raised_and_not_broadcast(connect_memory, observer):
    observer.error = StoreUnavailable("down")
    connection = connect_memory()
    with pytest.raises(BrokerUnavailable, match="down"):
        broadcast(connection)
    assert size(connection, "node.ns.pidbox") == 0


def test_a_broken_observer_loses_no_broadcast(connect_memory, observer, caplog):
    observer.error = KeyError("a bug")
    connection = connect_memory()
    queue = broadcast(connection)
    assert size(connection, queue.name) == 1
    assert "a bug" in caplog.text


# -- who is revoked by what --------------------------------------------------------------------------


def test_stamps_and_ids():
    headers = {
        "task": "t",
        "id": "the-id",
        "stamped_headers": ["one", "many", "missing"],
        "stamps": {"one": 7, "many": ["a", "b"], "unlisted": "x"},
    }
    assert revocable_by(Envelope(b"", headers=headers)) == [
        of_task("the-id"),
        of_stamp("one", 7),
        of_stamp("many", "a"),
        of_stamp("many", "b"),
    ]
    assert revocable_by(Envelope(b"", headers={**headers, "task": None})) == []
    assert revocable_by(Envelope(b"", headers={"task": "t", "stamped_headers": 5, "stamps": []})) == []


def test_long_and_strange_stamps_can_be_stored():
    values = ["x" * 1000, "x" * 1001, {"b": 1, "a": [2]}, "\0", "\ud800", None, "7", 7]
    found = {of_stamp("h" * 300, value) for value in values}
    assert len(found) == len(values)
    MemoryBroker(BrokerSettings("memory://")).revocations.add([one for one in found if one is not None], 1)
    assert of_stamp("h", {"a": [2], "b": 1}) == of_stamp("h", {"b": 1, "a": [2]})
    assert of_stamp(None, 1) is None
    assert of_task(5) is None


def test_ids_that_begin_alike_are_revoked_one_by_one():
    ids = ["x" * 255, "x" * 255 + "y", "x" * 255 + "z", "a\0b", "ab", "\ud800", "\ud801", "?"]
    found = {of_task(id) for id in ids}
    assert len(found) == len(ids)
    MemoryBroker(BrokerSettings("memory://")).revocations.add([one for one in found if one is not None], 1)
    for id in ids:
        assert of_task(id) == of_task(columns_of(Envelope(b"", headers={"task": "t", "id": id})).task_id)


def test_stamps_of_any_shape_do_not_keep_others_waiting(connect, observer):
    connection = connect()
    strange: list[Any] = [["unhashable"], {"a": 1}, None, 5, "twice"]
    with consuming(connection, "q") as taken:
        connection.connection.broker.revocations.add([Revocation("other")], 60)
        connection.connection.revoked()
        stamps = {"twice": [{"of": datetime(2020, 1, 1, tzinfo=timezone.utc)}], "5": {1: 2}}
        publish(connection, "q", 1, headers={"task": "t", "id": "one", "stamped_headers": strange, "stamps": stamps})
        publish(connection, "q", 2, headers={"task": "t", "id": "two"})
        drain(connection, taken, 2)
    assert of_stamp("h", {1: 2, "a": 3}) is None


class Counting:
    """Revocations that count the questions."""

    def __init__(self, *stored: Revocation) -> None:
        self.revocations = self
        self.stored = set(stored)
        self.looks = self.finds = 0

    def any(self) -> bool:
        self.looks += 1
        return bool(self.stored)

    def find(self, asked: list[Revocation]) -> set[Revocation]:
        self.finds += 1
        return self.stored & set(asked)


def claimed(id: int, task_id: str = "one", exchange: str = "") -> tuple[Claim, Envelope]:
    return Claim(id, 1), Envelope(b"", headers={"task": "t", "id": task_id}, exchange=exchange)


def test_where_nothing_is_revoked_batches_cost_nothing(monkeypatch):
    monkeypatch.setattr(revocations, "BELIEVED", 3600.0)
    broker = Counting()
    revoked = RevokedClaims(broker)
    for number in range(100):
        assert revoked.among([claimed(number)]) == set()
    assert (broker.looks, broker.finds) == (1, 0)


def test_one_question_for_a_batch():
    broker = Counting(Revocation("one"))
    revoked = RevokedClaims(broker)
    assert revoked.among([claimed(1), claimed(2, "two"), claimed(3)]) == {1, 3}
    assert broker.finds == 1


def test_a_revocation_is_noticed_after_a_while_or_at_once(monkeypatch):
    monkeypatch.setattr(revocations, "BELIEVED", 3600.0)
    broker = Counting()
    revoked = RevokedClaims(broker)
    revoked.among([claimed(1)])
    broker.stored.add(Revocation("one"))
    assert revoked.among([claimed(1)]) == set()
    assert revoked.among([claimed(1), claimed(2, exchange="celery.pidbox")]) == {1, 2}
    revoked = RevokedClaims(broker)
    broker.stored.clear()
    revoked.among([claimed(1)])
    broker.stored.add(Revocation("one"))
    revoked.noticed()
    assert revoked.among([claimed(1)]) == {1}
    monkeypatch.setattr(revocations, "BELIEVED", 0.0)
    broker.stored.clear()
    looks = broker.looks
    revoked = RevokedClaims(broker)
    for _ in range(3):
        assert revoked.among([claimed(1)]) == set()
    assert broker.looks == looks + 3


def test_a_notice_while_the_database_is_asked_is_not_lost():
    broker = Counting()
    revoked = RevokedClaims(broker)

    def revoke_after_the_look() -> bool:
        broker.stored.add(Revocation("one"))
        revoked.noticed()
        return False

    broker.any = revoke_after_the_look
    revoked.among([claimed(1)])
    assert revoked.among([claimed(1)]) == {1}


# -- the engine --------------------------------------------------------------------------------------


def publish_tasks(connection: kombu.Connection, *ids: str) -> None:
    for id in ids:
        publish(connection, "q", id, headers={"task": "t", "id": id})


def states(connection: kombu.Connection) -> dict[str | None, State]:
    return {task.task_id: task.state for task in connection.connection.broker.list(Filter(queue="q", type="t"))}


@pytest.mark.parametrize("no_ack", [False, True])
def test_revoked_messages_are_not_delivered(connect, no_ack):
    connection = connect()
    connection.connect()
    broker = connection.connection.broker
    publish_tasks(connection, "one", "two", "three")
    publish(connection, "q", "no task", correlation_id="one")
    broker.revocations.add([Revocation("one"), Revocation("three")], 60)
    with consuming(connection, "q", no_ack=no_ack) as taken:
        drain(connection, taken, 2)
        assert taken.bodies == ["two", "no task"]
        assert nothing_comes(connection)
    found = states(connection)
    assert (found["one"], found["three"]) == (State.CANCELED, State.CANCELED)
    assert [task.task_id for task in broker.claim_answers(10)] == ["one", "three"]


def test_revoked_messages_are_not_fetched(connect):
    connection = connect()
    connection.connect()
    publish_tasks(connection, "one", "two")
    connection.connection.broker.revocations.add([Revocation("one")], 60)
    assert get(connection, "q") == "two"
    assert get(connection, "q") is None
    assert [task.task_id for task in connection.connection.broker.claim_answers(10)] == ["one"]


@pytest.mark.parametrize("fetch", [False, True])
def test_what_may_be_revoked_waits_until_that_is_known(connect_memory, monkeypatch, caplog, fetch):
    """The database goes away between the claim and the question: nothing is delivered unasked, nothing lost."""
    connection = connect_memory()
    connection.connect()
    publish_tasks(connection, "one", "two")
    stored = connection.connection.broker.revocations
    stored.add([Revocation("one")], 60)
    failures = [StoreUnavailable("away"), StoreUnavailable("away")]
    find = stored.find

    def failing(asked):
        if failures:
            raise failures.pop()
        return find(asked)

    monkeypatch.setattr(stored, "find", failing)
    caplog.set_level(logging.WARNING)
    if fetch:
        for _ in range(2):
            with pytest.raises(BrokerUnavailable):
                get(connection, "q")
        assert get(connection, "q") == "two"
    else:
        with consuming(connection, "q") as taken:
            drain(connection, taken, 1)
        assert taken.bodies == ["two"]
        assert [message.delivery_info["redelivered"] for message in taken] == [False]
        assert "away" in caplog.text
    assert not failures
    assert states(connection)["one"] is State.CANCELED
