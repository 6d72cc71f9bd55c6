"""What Celery's suite runs with: a database of its own, a Redis of its own, and a copy of its tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from tests.conformance.celery_suite import checkout
from tests.conformance.celery_suite.running import Result, Suite
from tests.conformance.databases import own_database
from tests.services import ServiceMissing
from tests.workers.servers import PrivateRedis

PREFIX = "taskgate+"


def run(
    archive: Path,
    url: str,
    output: Path,
    *,
    backend: str | None = None,
    arguments: Sequence[str] = (),
    each: float = 200,
    limit: float = 5400,
    tell: Callable[[str], None],
) -> dict[str, Result]:
    """What becomes of Celery's tests.

    Args:
        archive: Celery's source distribution.
        url: of the broker, ``taskgate+…``, on whose server a database is made for the run and dropped after it.
        output: an empty folder for what the run writes down and prints.
        backend: URL of the result backend; ``redis`` for the run's own; if left out, the broker's.
        arguments: for pytest, a selection.
        each: seconds that one test may take.
        limit: seconds that all may take.
        tell: is given a line for each test as it ends.

    Raises:
        ServiceMissing: Redis is not installed. The suite's tasks record things in it, whatever the broker is.
        SuiteBroken: the suite can't be run, or took longer than its limit.
    """
    if not PrivateRedis.available():
        raise ServiceMissing("Celery's suite needs a Redis of its own, and redis-server is not installed")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="taskgate-celery-suite-")))
        redis = stack.enter_context(closing(PrivateRedis()))
        broker = PREFIX + stack.enter_context(own_database(url.removeprefix(PREFIX), folder))
        environment = {
            "TEST_BROKER": broker,
            "TEST_BACKEND": redis.url if backend == "redis" else backend or broker,
            "REDIS_HOST": "127.0.0.1",
            "REDIS_PORT": str(redis.port),
        }
        options = ["-p", "celery.contrib.pytest", "-o", "testpaths=t/integration", *arguments]
        suite = Suite(checkout.make(archive, folder), options, environment, output, each, limit, tell)
        return suite.run()
