"""The contract suite: what every broker store must do, as test classes that take a factory.

A store joins with a class and a fixture::

    from kombu_taskgate.testing.contract import BrokerContract, Store

    class TestMyStore(BrokerContract):
        @pytest.fixture
        def store(self) -> Iterator[Store]:
            ...

The suite asserts meaning, not means: it knows no table and no statement, but in the cases that ask for the
capability ``sql``.
"""

import pkgutil

import pytest

# Before the cases are imported, so that a failing assertion shows its values.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))

from .store import FORK, PERSISTENT, SERVER_CLOCK, SQL, Store  # noqa: E402
from .suite import BrokerContract  # noqa: E402

__all__ = ["FORK", "PERSISTENT", "SERVER_CLOCK", "SQL", "BrokerContract", "Store"]
