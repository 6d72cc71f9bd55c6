"""The tools that the tests rely on do what they say."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kombu_taskgate.testing import threads
from kombu_taskgate.testing.clock import START_MS, FakeClock
from kombu_taskgate.testing.faults import FailAt
from kombu_taskgate.testing.threads import errors_of, together
from tests import services
from tests.workers import harness
from tests.workers.fixtures import database_url  # noqa: F401  # a fixture


def test_clock_moves_only_when_told() -> None:
    clock = FakeClock()
    assert [clock.now_ms(), clock.now_ms()] == [START_MS, START_MS]
    assert clock.advance(0.001) == clock.now_ms() == START_MS + 1
    clock.advance(-1)
    assert clock.now_ms() == START_MS - 999


def test_clock_is_safe_under_threads() -> None:
    clock = FakeClock()
    together([lambda: [clock.advance(0.001) for _ in range(2000)]] * 8)
    assert clock.now_ms() == START_MS + 16_000


def test_fault_is_raised_where_and_as_often_as_planned() -> None:
    fault = FailAt("b", ValueError, times=2, skip=1)
    seen = []
    for point in "abababab":
        try:
            fault(point)
            seen.append("-")
        except ValueError:
            seen.append("!")
    assert "".join(seen) == "---!-!--"
    assert (fault.raised, fault.passed) == (2, {"a": 4, "b": 4})


def test_together_runs_at_the_same_time_and_keeps_the_order() -> None:
    meeting = threading.Barrier(3, timeout=30)
    outcomes = together([lambda: meeting.wait() >= 0, lambda: meeting.wait() >= 0, lambda: 1 / (meeting.wait() * 0)])
    assert outcomes[:2] == [True, True]
    assert [type(error) for error in errors_of(outcomes)] == [ZeroDivisionError]


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port of this machine where nobody listens, and nobody can begin to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("variable", "scheme"),
    [
        ("TASKGATE_TEST_POSTGRESQL_URL", "postgresql"),
        ("TASKGATE_TEST_MYSQL_URL", "mysql"),
        ("TASKGATE_TEST_REDIS_URL", "redis"),
        ("TASKGATE_TEST_RABBITMQ_URL", "amqp"),
    ],
)
def test_missing_service_skips_with_its_reason_and_fails_where_it_is_required(
    dead_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, scheme: str
) -> None:
    for name in ("CI", "TASKGATE_REQUIRE_SERVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, f"{scheme}://me:secret@127.0.0.1:{dead_port}/x")

    def find() -> None:
        with services.skip_if_missing():
            if scheme == "postgresql":
                with services.postgresql_server(tmp_path):
                    pass
            elif scheme == "mysql":
                services.find_database(variable)
            else:
                {"redis": services.find_redis, "amqp": services.find_rabbitmq}[scheme]()

    with pytest.raises(pytest.skip.Exception) as skipped:
        find()
    for part in (scheme, str(dead_port), variable):
        assert part in str(skipped.value)
    assert "secret" not in str(skipped.value)
    for name in ("CI", "TASKGATE_REQUIRE_SERVICES"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            with pytest.raises(pytest.fail.Exception, match="required"):
                find()
    monkeypatch.setenv("CI", "false")
    with pytest.raises(pytest.skip.Exception):
        find()


@pytest.mark.slow
@pytest.mark.postgresql
def test_postgresql_from_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dead_port: int) -> None:
    """Where no server runs one is started, in a folder of the test's own, and stopped afterwards."""
    monkeypatch.setitem(services.LOCAL, "TASKGATE_TEST_POSTGRESQL_URL", f"postgresql://127.0.0.1:{dead_port}/test")
    monkeypatch.delenv("TASKGATE_TEST_POSTGRESQL_URL", raising=False)
    with services.skip_if_missing(), services.postgresql_server(tmp_path / "pg") as url:
        store = services.store_at(url)
        assert store.open().list() == []
        store.close()
        assert (tmp_path / "pg" / "postmaster.pid").exists()
    assert not (tmp_path / "pg" / "postmaster.pid").exists()


def test_what_needs_a_server_is_marked(request: pytest.FixtureRequest, database_url: str) -> None:  # noqa: F811
    """A run that leaves out a mark leaves out all that needs the server, whichever fixture asks for it."""
    kind = database_url.partition(":")[0]
    assert kind == "sqlite" or request.node.get_closest_marker(kind) is not None


def test_what_names_a_server_is_marked(request: pytest.FixtureRequest, postgresql_url: str) -> None:
    """So does a test that asks for one server by its name."""
    assert postgresql_url
    assert request.node.get_closest_marker("postgresql") is not None


# -- waiting -----------------------------------------------------------------------------------------


def paused_at_first() -> Callable[[], bool]:
    """A condition that comes true while whoever waits for it is paused for longer than it would wait."""
    looks: list[None] = []

    def condition() -> bool:
        looks.append(None)
        if len(looks) > 1:
            return True
        time.sleep(0.2)
        return False

    return condition


def test_what_came_true_during_a_pause_was_not_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    harness.wait_for(paused_at_first(), 0.1, "it comes true")
    monkeypatch.setattr(threads, "DEADLINE", 0.1)
    threads.wait_until(paused_at_first(), "it comes true")
    with pytest.raises(AssertionError, match="never"):
        harness.wait_for(lambda: False, 0.1, "never")
    with pytest.raises(TimeoutError, match="never"):
        threads.wait_until(lambda: False, "never")


def test_a_proxy_that_is_down_lets_nobody_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor whoever it was just connecting when it went down."""
    connect = socket.create_connection
    with a_server() as (server, address):
        proxy = harness.Proxy(*address)

        def goes_down_meanwhile(*arguments: Any) -> socket.socket:
            proxy.down()
            return connect(*arguments)

        monkeypatch.setattr(socket, "create_connection", goes_down_meanwhile)
        with socket.socket() as client:
            client.settimeout(60)
            client.connect(("127.0.0.1", proxy.port))
            server.accept()[0].close()
            with suppress(ConnectionError):
                assert client.recv(1) == b""
        assert proxy._pairs == []
        proxy.close()


@contextmanager
def a_server() -> Iterator[tuple[socket.socket, tuple[str, int]]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        yield server, server.getsockname()
