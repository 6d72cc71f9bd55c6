"""The contract suite on every store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kombu_taskgate.testing.contract import BrokerContract, Store
from kombu_taskgate.testing.stores import InDatabase, InMemory


class TestMemory(BrokerContract):
    @pytest.fixture
    def store(self) -> Store:
        return InMemory()


class TestSQLite(BrokerContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        with closing(InDatabase(f"sqlite:///{tmp_path}/taskgate.db")) as store:
            yield store


@pytest.mark.postgresql
class TestPostgreSQL(BrokerContract):
    @pytest.fixture
    def store(self, postgresql_url: str) -> Iterator[Store]:
        with closing(InDatabase(postgresql_url)) as store:
            yield store


@pytest.mark.mysql
class TestMySQL(BrokerContract):
    @pytest.fixture
    def store(self, mysql_url: str) -> Iterator[Store]:
        with closing(InDatabase(mysql_url)) as store:
            yield store
