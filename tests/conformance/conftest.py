"""Sources of kombu and Celery, and databases of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import services
from tests.conformance.databases import own_database
from tests.conformance.sdists import installed_sdist, unpack

Unpack = Callable[[str, str], Path]


@pytest.fixture
def unpack_sdist(request: pytest.FixtureRequest, tmp_path: Path) -> Unpack:
    """Unpacks a folder of an installed package's source distribution; skips, or fails in CI, where there is none."""

    def unpack_part(name: str, part: str) -> Path:
        with services.skip_if_missing():
            return unpack(installed_sdist(name, request.config.cache.mkdir("sdists")), part, tmp_path / "sdist")
        raise AssertionError("unreachable: skip_if_missing swallows nothing")

    return unpack_part


@pytest.fixture
def own_database_url(sql_store_url: str, tmp_path: Path) -> Iterator[str]:
    """A database of the test's own on each kind, for programs that can't be told a table prefix."""
    with own_database(sql_store_url, tmp_path) as url:
        yield url
