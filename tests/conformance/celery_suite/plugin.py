"""A pytest plugin inside a run of Celery's suite: it bounds each test, and writes down what becomes of it.

From the environment: SUITE_RECORD, a file that gets one JSON object a line; SUITE_EACH, seconds that each test may
take; SUITE_ONLY, a file with the names of the tests to run (if not set: all that are selected).

The suite keeps one worker for all of its tests, in a thread of the process that runs them. When that has ended, every
later test would wait in vain: the process stops then, and whoever started it starts another for what is left.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from celery.bootsteps import RUN

#: Characters of a failure's text that are kept, from its end, which says what was wrong.
TEXT = 6000


def name_of(nodeid: str) -> str:
    """``t/integration/test_a.py::test_B::test_c[x]`` is ``test_a::test_B::test_c[x]`` in lists and reports."""
    path, *inside = nodeid.split("::")
    return "::".join([Path(path).stem, *inside])


class Record:
    """The file that gets a line as soon as something is known: it survives a process that is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **facts: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


class Suite:
    """The hooks of pytest."""

    def __init__(self, record: Record, each: float, only: frozenset[str] | None) -> None:
        self._record, self._each, self._only = record, each, only
        self._worker: Any = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # a module that can't be imported
            self._record.write(begin=name_of(report.nodeid))
            self._record.write(
                end=name_of(report.nodeid), outcome="failed", text=report.longreprtext[-TEXT:], seconds=0.0
            )

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._only is not None:
            left_out = [item for item in items if name_of(item.nodeid) not in self._only]
            items[:] = [item for item in items if name_of(item.nodeid) in self._only]
            config.hook.pytest_deselected(items=left_out)
        for item in items:
            # Whatever its own mark says: a shorter one is about the speed of the machines that its authors have.
            item.add_marker(pytest.mark.timeout(self._each), append=False)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._record.write(collected=[name_of(item.nodeid) for item in session.items])

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        value = yield
        if fixturedef.argname == "celery_session_worker":
            self._worker = value
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        self._record.write(begin=name_of(item.nodeid))
        self._outcome, self._text, self._seconds = "passed", "", 0.0
        done = yield
        # After the last test it has been stopped, with what else the session had.
        if nextitem is not None and self._worker is not None and self._worker.blueprint.state != RUN:
            self._take("failed", "The worker that all tests share has ended in this one.")
            item.session.shouldstop = "the worker has ended"
        self._record.write(
            end=name_of(item.nodeid), outcome=self._outcome, text=self._text[-TEXT:], seconds=round(self._seconds, 3)
        )
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if type(report) is pytest.TestReport:  # not of a part, whose time is in that of the whole
            self._seconds += report.duration
        if report.skipped and hasattr(report, "wasxfail"):
            self._take("xfailed", str(report.wasxfail))
        elif report.skipped:
            where = report.longrepr
            self._take("skipped", where[2] if isinstance(where, tuple) else str(where))
        elif report.failed:
            self._take("failed", report.longreprtext)

    def _take(self, outcome: str, text: str) -> None:
        # A test has several reports: setup, call, teardown, and those of its parts. What is bad stays.
        if outcome == "failed" or self._outcome != "failed":
            self._outcome, self._text = outcome, f"{self._text}\n{text}".strip()


def pytest_configure(config: pytest.Config) -> None:
    only = os.environ.get("SUITE_ONLY")
    names = frozenset(Path(only).read_text().splitlines()) if only else None
    suite = Suite(Record(Path(os.environ["SUITE_RECORD"])), float(os.environ["SUITE_EACH"]), names)
    config.pluginmanager.register(suite, "celery-suite")
