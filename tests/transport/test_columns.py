"""What is stored beside a message, read from what Celery writes into it."""

from __future__ import annotations

import hashlib
from zoneinfo import ZoneInfo

import pytest

from kombu_taskgate.core.model import Filter
from kombu_taskgate.transport.codec import Envelope
from kombu_taskgate.transport.columns import clamp_priority, columns_of, new_task
from tests.transport.helpers import get, publish

NOW = 1_700_000_000_000


def of(headers=None, **properties):
    return columns_of(Envelope(b"", headers={"task": "t", **(headers or {})}, properties=properties))


def test_ids_of_a_task():
    found = of({"id": "i", "root_id": "r", "parent_id": "p", "group": "g"}, correlation_id="c")
    assert (found.type, found.task_id, found.root_id, found.parent_id, found.group_id) == ("t", "i", "r", "p", "g")


def test_a_message_without_task_headers_has_its_correlation_id():
    found = columns_of(Envelope(b"", properties={"correlation_id": "c"}))
    assert (found.type, found.task_id, found.root_id) == ("", "c", None)


@pytest.mark.parametrize(("given", "stored"), [(None, 0), (-1, 0), (0, 0), (5, 5), (9, 9), (50, 9), ("7", 7), ("x", 0)])
def test_priorities_are_brought_into_bounds(given, stored):
    assert clamp_priority(given) == stored
    envelope = Envelope(b"", properties={"priority": given})
    assert columns_of(envelope).priority == stored
    assert envelope.properties["priority"] == stored


def test_an_infinite_priority_is_no_number():
    assert clamp_priority(float("inf")) == 0


def test_eta_is_when_it_may_run():
    assert of({"eta": "2023-11-14T22:13:30+00:00"}).run_at == NOW + 10_000
    assert of({"eta": "2053-11-14T22:13:30"}).run_at == 2_646_771_210_000
    assert of({"eta": "next tuesday"}).run_at is None


def test_the_earliest_expiry_counts():
    assert of(expiration="5000").expires_in == 5.0
    both = of({"expires": "2023-11-14T22:13:23"}, expiration="5000")
    assert (both.expires_at, both.expires_in) == (NOW + 3000, 5.0)
    assert of({"expires": NOW / 1000 + 60}).expires_at == NOW + 60_000
    garbage = of({"expires": "whenever"}, expiration="soon")
    assert (garbage.expires_at, garbage.expires_in) == (None, None)
    assert of(expiration="1e300").expires_in is None
    assert new_task("q", b"", of(expiration="5000"), 2.0).expires_in == 2.0
    assert new_task("q", b"", of(), None).expires_in is None


def test_times_without_a_zone_get_one():
    """What the worker reads is the same instant as what the broker reads."""
    tokyo = ZoneInfo("Asia/Tokyo")
    envelope = Envelope(b"", headers={"task": "t", "eta": "2023-11-15T07:13:30", "expires": "2023-11-14T22:14:00Z"})
    assert columns_of(envelope, tokyo).run_at == NOW + 10_000
    assert envelope.headers["eta"] == "2023-11-15T07:13:30+09:00"
    assert envelope.headers["expires"] == "2023-11-14T22:14:00Z"


def test_headers_of_other_messages_mean_other_things():
    """Remote control commands have an "expires" by the sender's clock, which nothing else looks at."""
    found = columns_of(Envelope(b"", headers={"expires": NOW / 1000 - 5, "eta": "2023-11-14T22:13:30"}))
    assert (found.expires_at, found.run_at) == (None, None)


def test_strange_names_do_not_fail_a_publish(connect):
    connection = connect()
    names = {"task": "t" * 300, "id": "i\0d", "root_id": "\ud800", "parent_id": 5, "group": "🐘" * 300}
    publish(connection, "q", "body", headers=dict(names))
    (task,) = connection.connection.broker.list(Filter(queue="q"))
    assert task.type == "t" * 255
    digests = {name: hashlib.sha256(str(names[name]).encode("utf-8", "surrogatepass")).hexdigest() for name in names}
    assert (task.task_id, task.root_id) == (f"id~{digests['id']}", f"?~{digests['root_id']}")
    assert task.parent_task_id is None
    assert task.group_id == "🐘" * 190 + "~" + digests["group"]
    message = connection.default_channel.basic_get("q")
    assert message.headers == {**names, "taskgate_lease": [task.id, message.headers["taskgate_lease"][1]]}
    assert message.payload == "body"


def test_a_queue_name_that_can_not_be_stored_is_an_error(connect_memory):
    connection = connect_memory()
    for name in ("", "q" * 256, "nul\0"):
        with pytest.raises(Exception, match="queue name") as raised:
            publish(connection, name, 1)
        assert not isinstance(raised.value, connection.connection_errors)
    publish(connection, "q" * 255, 1)
    assert get(connection, "q" * 255) == 1
