"""Fixtures for tests that run real workers; the conftest.py of their folders import them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kombu_taskgate.core.errors import StoreUnavailable
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.memory import MemoryBroker
from kombu_taskgate.core.migrations import drop
from kombu_taskgate.core.settings import BrokerSettings
from tests import services

from .beats import Beats
from .harness import Lab
from .servers import PrivateMariaDB, PrivatePgBouncer, PrivatePostgres, PrivateServer

MakeLab = Callable[..., Lab]
MakeBeats = Callable[..., Beats]


@pytest.fixture
def make_lab(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeLab]:
    """Make labs on any database; their processes end and their tables go with the test."""
    labs: list[Lab] = []

    def make(url: str, conf: dict[str, Any] | None = None, **options: Any) -> Lab:
        folder = tmp_path / f"lab{len(labs)}"
        folder.mkdir()
        options.setdefault("table_prefix", f"t{uuid.uuid4().hex[:10]}_")
        lab = Lab(url, folder, options, conf or {})
        labs.append(lab)
        return lab

    yield make
    failed = getattr(request.node, "rep_call", None) is not None and request.node.rep_call.failed
    for lab in labs:
        if failed:
            print(lab.logs())  # noqa: T201  # pytest shows it with the failure
        lab.close()
        with suppress(StoreUnavailable):  # a server of the test's own ends before
            drop_tables(lab.url, lab.options["table_prefix"])


def drop_tables(url: str, prefix: str) -> None:
    broker = open_broker(BrokerSettings(url, table_prefix=prefix), notify=lambda change: None)
    if not isinstance(broker, MemoryBroker):
        drop(broker.database, broker.tables)  # type: ignore[attr-defined]  # an SqlBroker
    broker.close()


@pytest.fixture(params=services.SQL_STORES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that real workers share, of each kind."""
    return url_of(request, tmp_path, request.param)


@pytest.fixture(params=services.SQL_STORES[:2])
def main_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """As database_url, for long tests: one with a server and one without."""
    return url_of(request, tmp_path, request.param)


@pytest.fixture(params=services.SQL_STORES[1:])
def server_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that is reached over the network."""
    return url_of(request, tmp_path, request.param)


def url_of(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> str:
    if kind == "sqlite":
        return f"sqlite:///{tmp_path}/broker.db"
    return str(request.getfixturevalue(f"{kind}_url"))


@pytest.fixture(params=services.SQL_STORES[1:])
def private_server(request: pytest.FixtureRequest) -> Iterator[PrivateServer]:
    """A server that the test may restart."""
    request.getfixturevalue(f"{request.param}_url")  # skips, or fails in CI, where there is none of the kind
    server: PrivateServer = PrivatePostgres() if request.param == "postgresql" else PrivateMariaDB()
    yield server
    server.close()


@pytest.fixture(scope="module")
def private_servers(request: pytest.FixtureRequest) -> Iterator[Callable[[str], PrivateServer]]:
    """By kind, one for all tests of a file: starting one takes longer than most tests."""
    servers: dict[str, PrivateServer] = {}

    def get(kind: str) -> PrivateServer:
        request.getfixturevalue(f"{kind}_url")  # skips, or fails in CI, where there is none of the kind
        if kind not in servers:
            servers[kind] = PrivatePostgres() if kind == "postgresql" else PrivateMariaDB()
        return servers[kind]

    yield get
    for server in servers.values():
        server.close()


@pytest.fixture
def pgbouncer(postgresql_url: str) -> Iterator[PrivatePgBouncer]:
    """A proxy that pools transactions, with five connections, before the tests' PostgreSQL."""
    with services.skip_if_missing():
        if not PrivatePgBouncer.available():
            raise services.ServiceMissing("pgbouncer is not installed: install the package of that name")
        server = PrivatePgBouncer(postgresql_url)
    yield server
    server.close()


@pytest.fixture
def make_beats(tmp_path: Path) -> Iterator[MakeBeats]:
    """Make replicas of beat on any database; they end, and their tables go, with the test."""
    made: list[Beats] = []

    def make(url: str, entries: dict[str, Any] | None = None, conf: dict[str, Any] | None = None, **more: Any) -> Beats:
        folder = tmp_path / f"beats{len(made)}"
        folder.mkdir()
        prefix = f"b{uuid.uuid4().hex[:10]}_"
        made.append(Beats(url, folder, prefix, {"often": 1} if entries is None else entries, conf or {}, **more))
        return made[-1]

    yield make
    for beats in made:
        beats.close()
        with suppress(StoreUnavailable):
            drop_tables(beats.url, beats.prefix)
