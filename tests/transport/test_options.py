"""Transport options: taken, ignored with a reason, or refused with the nearest name."""

from __future__ import annotations

import ast
import importlib.util
import logging
from pathlib import Path

import kombu
import pytest

from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.transport import options
from kombu_taskgate.transport.foreign_options import ENCRYPTION, KOMBU, REASONS
from kombu_taskgate.transport.options import EngineOptions, known_options, parse_options

URL = "memory://"


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(options, "_told", set())


def test_nothing_given():
    assert parse_options(URL, None) == (BrokerSettings(URL), EngineOptions())
    assert parse_options(URL, {}, connect_timeout=4)[0].connect_timeout == 4.0


def test_options_reach_broker_and_engine():
    given = {
        "lease_ttl": 30,
        "table_prefix": "shop_",
        "schema": None,
        "connect_timeout": 2,
        "queue_lease_ttl": {"a": 5},
        "queues": {"b": {"lease_ttl": 7.5}, "c": {}},
        "ack_delay": 0,
        "reap_interval": 1,
        "timezone": "Europe/Berlin",
    }
    broker, engine = parse_options(URL, given, connect_timeout=4)
    assert (broker.lease_ttl, broker.table_prefix, broker.schema, broker.connect_timeout) == (30.0, "shop_", None, 2.0)
    assert broker.queue_lease_ttl == {"a": 5.0, "b": 7.5}
    assert (engine.ack_delay, engine.reap_interval, str(engine.naive)) == (0.0, 1.0, "Europe/Berlin")


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("lease_tll", "lease_ttl"),
        ("leasettl", "lease_ttl"),
        ("tableprefix", "table_prefix"),
        ("max_retry", "max_retries"),
    ],
)
def test_unknown_options_name_the_nearest(wrong, near):
    with pytest.raises(ConfigError, match=f"unknown transport option '{wrong}': did you mean '{near}'"):
        parse_options(URL, {wrong: 1})


def test_unknown_options_that_are_like_nothing_list_what_there_is():
    with pytest.raises(ConfigError, match=r"unknown transport option 'zzz'; known are .*lease_ttl"):
        parse_options(URL, {"zzz": 1})
    with pytest.raises(ConfigError, match="unknown option 'lease_tll' of queue 'q': did you mean 'lease_ttl'"):
        parse_options(URL, {"queues": {"q": {"lease_tll": 1}}})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("lease_ttl", "60", "lease_ttl must be a number of seconds, not '60'"),
        ("lease_ttl", True, "number of seconds"),
        ("lease_ttl", float("nan"), "number of seconds"),
        ("lease_ttl", None, "number of seconds"),
        ("lease_ttl", -1, "more than 0"),
        ("pool_size", 1.5, "whole number"),
        ("pool_size", 0, "at least 1"),
        ("create_tables", "yes", "True or False"),
        ("table_prefix", 5, "must be a text"),
        ("table_prefix", "no spaces", "plain SQL name"),
        ("queue_lease_ttl", 5, "must map names of queues to seconds"),
        ("queue_lease_ttl", {"q": "x"}, "number of seconds"),
        ("queues", ["q"], "must map names of queues to their options"),
        ("queues", {"q": 5}, "must be a mapping such as"),
        ("queues", {"q": {"lease_ttl": "5"}}, "lease_ttl of queue 'q' must be a number"),
        ("queues", {"q": {"lease_ttl": 0}}, "lease_ttl of queue 'q' must be more than 0"),
        ("ack_delay", -1, "must not be negative"),
        ("reap_interval", 0, "more than 0"),
        ("timezone", "Middle/Earth", "'Middle/Earth' is not known"),
    ],
)
def test_values_that_can_not_be_right(name, value, why):
    with pytest.raises(ConfigError, match=why):
        parse_options(URL, {name: value})


def test_what_other_transports_know_is_ignored_and_told_once(caplog):
    caplog.set_level(logging.INFO, logger="kombu_taskgate.transport")
    given = {"visibility_timeout": 3600, "fanout_prefix": True, "fanout_patterns": True, "lease_ttl": 5}
    for _ in range(3):
        assert parse_options(URL, given)[0].lease_ttl == 5.0
    (record,) = caplog.records
    assert record.message == (
        "transport options that are not used here: fanout_patterns, fanout_prefix (priorities, exchanges and bindings "
        "are columns and tables); visibility_timeout (leases are renewed while the worker lives, so there is no "
        "time-out to set)"
    )


def test_how_kombu_connects_and_publishes_again_is_kombus_business(caplog):
    parse_options(URL, dict.fromkeys(KOMBU, 1))
    assert not caplog.records


@pytest.mark.parametrize("name", sorted(ENCRYPTION))
def test_encryption_is_not_ignored(name):
    parse_options(URL, {name: False})
    with pytest.raises(ConfigError, match="put the driver's own parameters into the URL"):
        parse_options(URL, {name: {"ca_certs": "x"}})


def test_encryption_asked_for_on_the_connection_is_not_ignored_either():
    with pytest.raises(ConfigError, match="broker_use_ssl"):
        kombu.Connection("taskgate+memory://", ssl={"ca_certs": "x"}).connect()


def test_wrong_options_are_told_at_once_and_not_tried_again():
    connection = kombu.Connection("taskgate+memory://", transport_options={"leese_ttl": 1})
    with pytest.raises(ConfigError, match="did you mean 'lease_ttl'"):
        connection.ensure_connection(max_retries=None, interval_start=60)


def test_names_are_not_both_ours_and_ignored():
    known = set(known_options())
    assert not known & set(REASONS)
    assert not known & KOMBU
    assert not ENCRYPTION & (known | set(REASONS) | KOMBU)


def kombus_option_names() -> set[str]:
    """Names that kombu's transports take from their options, read from its source."""
    found = set()
    origin = importlib.util.find_spec("kombu.transport").origin
    for path in Path(origin).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and _named(node.targets[0]) == "from_transport_options":
                found |= {c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant)}
            elif (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop")
            ):
                owner = _named(node.func.value)
                if owner == "transport_options" and node.args and isinstance(node.args[0], ast.Constant):
                    found.add(node.args[0].value)
    return found


def _named(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_every_option_of_kombus_transports_is_known_here():
    names = kombus_option_names()
    assert {"visibility_timeout", "fanout_prefix", "region", "queue_tablename"} <= names
    assert names - set(known_options()) - set(REASONS) - ENCRYPTION - KOMBU == set()
