"""The contract suite on every store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kombu_taskgate.testing.contract import BrokerContract, Store
from kombu_taskgate.testing.contract.schedules import SqlScheduleCases
from kombu_taskgate.testing.contract.sqlonly import SqlCases
from kombu_taskgate.testing.stores import InDatabase, InMemory


class TestMemory(BrokerContract):
    @pytest.fixture
    def store(self) -> Store:
        return InMemory()


#: Cases of other groups that ask for a clock of the store's own, for data that outlive objects, or for rows to delete.
NEEDS_A_DATABASE = ["test_wrong_clock_of_the_caller", "test_outlives_brokers", "test_deleted_term"]
NEEDS_A_DATABASE += ["test_writing_under_a_deleted_term"]

# What memory is not asked for is left out here instead of being skipped: a skip says that something is missing.
_SQL_ONLY = [name for cases in (SqlCases, SqlScheduleCases) for name in vars(cases) if name.startswith("test_")]
for _name in _SQL_ONLY + NEEDS_A_DATABASE:
    setattr(TestMemory, _name, None)


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
