"""The runner of Celery's suite loses no outcome, whatever a test does to the process that it runs in."""

from __future__ import annotations

import pytest

from tests.conformance.celery_suite.checkout import let_past
from tests.conformance.celery_suite.running import TIMED_OUT, Suite, SuiteBroken


def suite(folder, tests, *, conftest="", each=60.0, limit=100.0):
    """A suite of one module, test_m."""
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\nxfail_strict = true\n")
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_m.py").write_text(tests)
    (folder / "output").mkdir()
    return Suite(folder, [], {}, folder / "output", each, limit)


def outcomes(results):
    return {name.removeprefix("test_m::"): result.outcome for name, result in results.items()}


def test_each_outcome_has_its_name(tmp_path):
    """Failed parts, expected failures that pass, and errors in teardown are failures; modules that break are, too."""
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    tests = """
import pytest

@pytest.fixture
def bad_end():
    yield
    raise ValueError("at the end")

class TestClass:
    @pytest.mark.parametrize("n", [1])
    def test_good(self, n): pass

def test_skipped(): pytest.skip("no reason")

@pytest.mark.xfail(reason="known")
def test_known(): assert False

@pytest.mark.xfail(reason="known")
def test_known_no_more(): pass

def test_teardown(bad_end): pass

def test_part(subtests):
    with subtests.test(msg="one"):
        assert False
"""
    results = suite(tmp_path, tests).run()
    assert outcomes(results) == {
        "test_broken": "failed",
        "TestClass::test_good[1]": "passed",
        "test_skipped": "skipped",
        "test_known": "xfailed",
        "test_known_no_more": "failed",
        "test_teardown": "failed",
        "test_part": "failed",
    }
    assert "no_such_module" in results["test_broken"].text
    assert "at the end" in results["test_m::test_teardown"].text


def test_a_failure_has_a_second_try_in_a_fresh_process(tmp_path):
    """What fails for what an earlier test has left behind passes alone, and what fails alone fails."""
    tests = """
import sys

def test_leaves_something(): sys.left = True

def test_is_disturbed(): assert not hasattr(sys, "left")

def test_fails(): assert False
"""
    results = suite(tmp_path, tests).run()
    assert outcomes(results) == {
        "test_leaves_something": "passed",
        "test_is_disturbed": "passed",
        "test_fails": "failed",
    }
    assert [result.tries for result in results.values()] == [1, 2, 2]


def test_a_test_that_uses_up_its_time_has_had_its_try(tmp_path):
    """The bound holds whatever the test's own mark says, and a second try would only take as long."""
    tests = """
import threading
import pytest

@pytest.mark.timeout(300)
def test_waits(): threading.Event().wait(100)

@pytest.mark.timeout(0.0001)
def test_is_in_no_hurry():
    sum(range(100_000))
"""
    results = suite(tmp_path, tests, each=2.0).run()
    assert outcomes(results) == {"test_waits": "failed", "test_is_in_no_hurry": "passed"}
    assert TIMED_OUT in results["test_m::test_waits"].text
    assert results["test_m::test_waits"].tries == 1


def test_a_process_that_ends_in_the_middle_costs_one_test(tmp_path):
    """The test that ended it has failed; those after it run in another one."""
    tests = """
import os

def test_before(): pass

def test_ends_it(): os._exit(0)

def test_after(): pass
"""
    results = suite(tmp_path, tests).run()
    assert outcomes(results) == {"test_before": "passed", "test_ends_it": "failed", "test_after": "passed"}
    assert results["test_m::test_before"].tries == 1
    assert "ended with 0" in results["test_m::test_ends_it"].text


def test_a_worker_that_ends_costs_one_test(tmp_path):
    """The test in which the shared worker ended has failed; those after it have a worker again."""
    conftest = """
import pytest
from types import SimpleNamespace
from celery.bootsteps import CLOSE, RUN

@pytest.fixture(scope="session")
def celery_session_worker():
    worker = SimpleNamespace(blueprint=SimpleNamespace(state=RUN))
    yield worker
    worker.blueprint.state = CLOSE

@pytest.fixture(autouse=True)
def needs_it(celery_session_worker):
    assert celery_session_worker.blueprint.state == RUN
"""
    tests = """
from celery.bootsteps import CLOSE

def test_before(): pass

def test_ends_it(celery_session_worker):
    celery_session_worker.blueprint.state = CLOSE

def test_after(): pass
"""
    told = []
    running = suite(tmp_path, tests, conftest=conftest)
    running.tell = told.append
    results = running.run()
    first_try = told[: told.index("once more: 1 that failed")]
    assert [line.split()[0] for line in first_try] == ["PASSED", "FAILED", "PASSED"]
    assert {name: result.tries for name, result in results.items()} == {
        "test_m::test_before": 1,
        "test_m::test_ends_it": 2,
        "test_m::test_after": 1,
    }


def test_a_suite_that_gets_nowhere_is_no_result(tmp_path):
    """A conftest that breaks, and a suite that takes longer than its limit, are told from failing tests."""
    broken = tmp_path / "broken"
    broken.mkdir()
    with pytest.raises(SuiteBroken, match="no_such_module"):
        suite(broken, "def test_a(): pass", conftest="import no_such_module").run()
    endless = tmp_path / "endless"
    endless.mkdir()
    with pytest.raises(SuiteBroken, match=r"not done after 2 s, at test_m::test_a"):
        suite(endless, "def test_a():\n    import time\n    time.sleep(100)", limit=2.0).run()


def test_taskgate_is_let_past_the_checks_for_redis_alone():
    """The checks that leave a test out are changed, and those that make a difference within one are not."""
    check = (
        "if not manager.app.conf.result_backend.startswith('redis'):\n"
        "            raise pytest.skip('Requires redis result backend.')\n"
    )
    text, number = let_past(check + check.replace("'", '"').replace("raise ", ""))
    assert number == 2
    assert text.count("startswith(('redis', 'taskgate'))") == 1
    assert text.count("startswith((\"redis\", 'taskgate'))") == 1
    text, number = let_past(check.replace("'redis'", "('redis', 'rpc')").replace("redis result", "redis or rpc result"))
    assert number == 1
    assert "startswith(('redis', 'rpc', 'taskgate'))" in text
    assert let_past(check.replace("Requires redis", "Requires Redis"))[1] == 1
    other = "if manager.app.conf.result_backend.startswith('redis'):\n            expected = 1"
    assert let_past(other) == (other, 0)
