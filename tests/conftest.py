"""Fixtures that all test folders share; services.py says where the services come from."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import pytest
from kombu import pools

from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.stores import InDatabase, InMemory
from tests import services

# A wall-clock limit for one example, or for making up the first ones, would fail on busy machines only.
BUSY: Any = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("laptop", **BUSY)
# The same examples in every run, so that a red build is about the change in it.
hypothesis.settings.register_profile("ci", **BUSY, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "laptop")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a service with its name, so that a run without the service can leave it out."""
    for item in items:
        for service in ("postgresql", "mysql", "redis", "rabbitmq"):
            if f"{service}_url" in getattr(item, "fixturenames", ()):
                item.add_marker(service)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Keep the outcome where fixtures find it: those with real processes show their logs after a failure."""
    report = yield
    setattr(item, f"rep_{report.when}", report)
    return report


@pytest.fixture(autouse=True)
def closed_pools_forgotten() -> Iterator[None]:
    """All apps of one broker share kombu's pools: one that a test has closed would be the next test's too."""
    yield
    for group in (pools.producers, pools.connections):
        for key in [key for key, pool in group.items() if pool._closed]:
            dict.__delitem__(group, key)  # the keys are hashes, and kombu's own would hash them again


@pytest.fixture(scope="session")
def postgresql_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a PostgreSQL database that tests may fill."""
    with services.skip_if_missing(), services.postgresql_server(tmp_path_factory.mktemp("postgresql")) as url:
        yield url


@pytest.fixture(scope="session")
def mysql_url() -> str:
    """URL of a MySQL or MariaDB database that tests may fill."""
    with services.skip_if_missing():
        return services.find_database("TASKGATE_TEST_MYSQL_URL")


@pytest.fixture(scope="session")
def redis_url() -> str:
    """URL of a Redis server."""
    with services.skip_if_missing():
        return services.find_redis()


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    """URL of a RabbitMQ server."""
    with services.skip_if_missing():
        return services.find_rabbitmq()


@pytest.fixture(params=services.STORES)
def store_name(request: pytest.FixtureRequest) -> str:
    """Runs the test once for each store."""
    return str(request.param)


@pytest.fixture(params=services.SQL_STORES)
def sql_store_name(request: pytest.FixtureRequest) -> str:
    """Runs the test once for each SQL database."""
    return str(request.param)


@pytest.fixture
def store_url(store_name: str, request: pytest.FixtureRequest) -> str:
    """URL of each store in turn, without the prefix taskgate+."""
    return services.url_of_store(store_name, request)


@pytest.fixture
def sql_store_url(sql_store_name: str, request: pytest.FixtureRequest) -> str:
    """URL of each SQL database in turn, without the prefix taskgate+."""
    return services.url_of_store(sql_store_name, request)


@pytest.fixture
def store(store_url: str) -> Iterator[InMemory | InDatabase]:
    """Each store in turn, empty; what is opened from it is closed and dropped after the test."""
    store = services.store_at(store_url)
    yield store
    store.close()


@pytest.fixture
def sql_store(sql_store_url: str) -> Iterator[InDatabase]:
    """Each SQL store in turn."""
    store = InDatabase(sql_store_url)
    yield store
    store.close()


@pytest.fixture
def broker_settings(store: InMemory | InDatabase, store_url: str) -> BrokerSettings:
    """Settings of a broker on each store in turn, with tables of the test's own that are dropped after it."""
    return BrokerSettings(store_url, **(store.settings if isinstance(store, InDatabase) else {}))
