"""docs/settings.md lists every option with its real default."""

from __future__ import annotations

import ast
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.transport.options import EngineOptions, known_options, parse_options

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "settings.md").read_text()


def documented(heading: str) -> dict[str, Any]:
    """Defaults by name, from the table under a heading."""
    section = TEXT.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| \S.* \|$", section, re.MULTILINE)
    assert len(rows) == section.count("\n| `"), "a row of the table can't be read"
    return {name: ast.literal_eval(default) for name, default in rows}


def defaults(settings: type) -> dict[str, Any]:
    """Defaults by name of a dataclass's fields; those without one are not options."""
    found = {}
    for field in fields(settings):
        if not field.init:
            continue
        if field.default is not MISSING:
            found[field.name] = field.default
        elif field.default_factory is not MISSING:
            found[field.name] = field.default_factory()
    return found


def test_broker_options():
    assert documented("The broker") == defaults(BrokerSettings)


def test_delivery_options():
    assert documented("Delivery") == defaults(EngineOptions)


def test_every_option_that_is_known_is_documented():
    assert {*documented("The broker"), *documented("Delivery"), "queues"} == set(known_options())


def test_examples_are_accepted():
    examples = re.findall(r"^broker_transport_options = (\{.*\})$", TEXT, re.MULTILINE)
    assert examples
    for example in examples:
        parse_options("memory://", ast.literal_eval(example))


def test_queues_is_another_form_of_queue_lease_ttl():
    one, other = re.findall(r"`(\{\"urgent\": .*?\})`", TEXT)
    broker, _ = parse_options("memory://", {"queue_lease_ttl": ast.literal_eval(one)})
    same, _ = parse_options("memory://", {"queues": ast.literal_eval(other)})
    assert broker == same
