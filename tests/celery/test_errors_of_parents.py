"""Whoever waits for a result is given the error of what had to end before it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from celery import Celery, states
from celery.exceptions import ChordError


def test_the_error_of_a_parent_goes_before_that_of_the_result(tmp_path: Path) -> None:
    """The body of a chord fails for its header's sake: get() raises what the header's task has raised."""
    url = f"taskgate+sqlite:///{tmp_path}/results.db"
    app = Celery("parents", broker=url, backend=url, set_as_current=False)
    header, body = app.AsyncResult("header"), app.AsyncResult("body")
    body.parent = header

    def fail_both() -> None:
        app.backend.store_result("header", KeyError("of the header"), states.FAILURE)
        app.backend.store_result("body", ChordError("the header has failed"), states.FAILURE)

    later = threading.Timer(0.3, fail_both)  # what has failed before get() begins is found at once, another way
    later.start()
    with pytest.raises(KeyError, match="of the header"):
        body.get(timeout=30)
    later.join()
    app.close()
