"""What the tests with real workers share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.workers.fixtures import (  # noqa: F401  # fixtures of this folder
    database_url,
    main_url,
    make_beats,
    make_lab,
    pgbouncer,
    private_server,
    private_servers,
    server_url,
)
from tests.workers.victims import victim  # noqa: F401  # as above


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A worker inside the test's process sets the level of the root logger, which others would miss lines for."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
