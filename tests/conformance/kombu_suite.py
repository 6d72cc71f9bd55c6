"""kombu's own integration tests on a URL: what test_kombu.py runs, in a pytest of its own.

kombu gathers them in base classes (t/integration/common.py of its source distribution), one set for all transports,
and each transport adds fixtures. These are taskgate's. The classes are found by looking, so that one that a later
kombu adds runs too, and fails where it asks for a fixture that is not here.

From the environment: CONFORMANCE_URL, CONFORMANCE_DEAD_URL (of the same kind, where nothing answers),
CONFORMANCE_OPTIONS (transport options, JSON).
"""

from __future__ import annotations

import inspect
import json
import os
from typing import Any
from urllib.parse import urlsplit

import kombu
import pytest

import kombu_taskgate  # noqa: F401  # as a program without Celery does

pytest.register_assert_rewrite("common")

import common  # noqa: E402  # from kombu's source distribution

URL, DEAD_URL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_DEAD_URL"]
OPTIONS = json.loads(os.environ["CONFORMANCE_OPTIONS"])


class DrainAll(kombu.Connection):
    """A connection whose drain_events delivers all that there is.

    The tests of priority call it once and look at three or four messages. py-amqp hands over whatever has come with
    one read; elsewhere one call is one message, and kombu's own tests of such transports call it more often.
    """

    def drain_events(self, **kwargs: Any) -> None:
        super().drain_events(**kwargs)
        while True:
            try:
                super().drain_events(**kwargs)
            except TimeoutError:
                return


@pytest.fixture
def connection(request):
    kind = DrainAll if issubclass(request.cls, common.BasePriority) else kombu.Connection
    connection = kind(URL, transport_options=OPTIONS)
    yield connection
    connection.release()


@pytest.fixture
def invalid_connection():
    connection = kombu.Connection(DEAD_URL, transport_options=OPTIONS)
    yield connection
    connection.release()


@pytest.fixture
def failover_connection(request):
    # As an app may say it (broker_port in Celery); see expected_failures.toml on what it changes.
    port = urlsplit(DEAD_URL).port if getattr(request.cls, "port_told", False) else None
    connection = kombu.Connection(f"{DEAD_URL};{URL}", port=port, transport_options=OPTIONS)
    yield connection
    connection.release()


def base_classes() -> dict[str, type]:
    """kombu's classes with tests in them, by name."""
    return {
        name: found
        for name, found in inspect.getmembers(common, inspect.isclass)
        if found.__module__ == common.__name__ and any(member.startswith("test_") for member in vars(found))
    }


for _name, _base in base_classes().items():
    globals()[f"Test{_name}"] = type(f"Test{_name}", (_base,), {"__module__": __name__})


if hasattr(common.BaseFailover, "test_failover_switches_to_alternate_url") and urlsplit(DEAD_URL).port:

    class TestFailoverWithPortTold:
        """The rest of the test of which expected_failures.toml says why its first lines fail."""

        port_told = True
        test_failover_switches_to_alternate_url = common.BaseFailover.test_failover_switches_to_alternate_url
