"""kombu's own integration tests, of the installed version, pass on every database (kombu_suite.py has the fixtures)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest
import sqlalchemy as sa
from packaging.specifiers import SpecifierSet

from kombu_taskgate.testing.stores import InDatabase
from tests import services

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Those of kombu 5.4.0, the oldest supported: a run that has lost one of them proves nothing.
CLASSES = {
    "BasicFunctionality",
    "BaseExchangeTypes",
    "BaseTimeToLive",
    "BasePriority",
    "BaseMessage",
    "BaseFailover",
}
#: Seconds for one of kombu's tests, and for all of them.
EACH, ALL = 60, 400


@pytest.fixture
def dead_url(sql_store_url: str, tmp_path: Path) -> Iterator[str]:
    """A URL of the store's kind where nothing answers."""
    url = sa.make_url(sql_store_url)
    if url.get_backend_name() == "sqlite":
        yield f"sqlite:///{tmp_path}"  # SQLite can't open a folder, not even for root
        return
    with services.skip_if_missing():
        if url.query or not url.port:
            # Connection.switch() takes parameters of a URL for its own, and a server in a socket file is one.
            raise services.ServiceMissing("kombu's tests of failover need a server that is reached over TCP")
    with closing(socket.socket()) as unheard:
        unheard.bind(("127.0.0.1", 0))  # nobody else can have the port, and nobody listens
        dead = url.set(host="127.0.0.1", port=unheard.getsockname()[1])
        yield dead.render_as_string(hide_password=False)


@pytest.mark.conformance
@pytest.mark.slow
@pytest.mark.timeout(ALL + 120)
def test_kombus_own_integration_tests(unpack_sdist, sql_store_name, sql_store_url, dead_url, tmp_path):
    store = InDatabase(sql_store_url)
    results = tmp_path / "results.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(unpack_sdist("kombu", "t/integration")), str(ROOT)]),
        "CONFORMANCE_URL": f"taskgate+{sql_store_url}",
        "CONFORMANCE_DEAD_URL": f"taskgate+{dead_url}",
        "CONFORMANCE_OPTIONS": json.dumps(store.settings),
    }
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--noconftest", "--rootdir", str(tmp_path)]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest", "--timeout", str(EACH)]
    command += ["--durations=10", "--tb=short", "--junit-xml", str(results), str(HERE / "kombu_suite.py")]
    with closing(store):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ALL,
            check=False,
        )
    print(done.stdout, done.stderr)  # noqa: T201  # pytest shows it with the failure
    assert done.returncode in {0, 1}, "kombu's tests did not run"
    passed, failed = outcomes(results)
    found = surprises(passed, failed, expected_failures(sql_store_name))
    assert not found, "\n".join(found)
    assert {test.partition("::")[0] for test in passed} >= CLASSES, "classes of kombu's tests are missing"


def outcomes(results: Path) -> tuple[set[str], set[str]]:
    """Tests that passed, and those that did anything else: skipped ones have to be listed as well."""
    passed, other = set(), set()
    for case in ET.parse(results).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2].removeprefix('Test')}::{case.get('name')}"
        bad = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        (other if bad else passed).add(name)
    return passed - other, other


def expected_failures(store: str) -> set[str]:
    entries = tomllib.loads((HERE / "expected_failures.toml").read_text())["expected"]
    assert all(entry["reason"].strip() for entry in entries)
    return {
        entry["test"]
        for entry in entries
        if store in entry["stores"] and version("kombu") in SpecifierSet(entry["versions"])
    }


def surprises(passed: set[str], failed: set[str], expected: set[str]) -> list[str]:
    """What differs from the list of expected failures, either way."""
    return [
        *(f"{test} failed and is not listed" for test in sorted(failed - expected)),
        *(f"{test} is listed and passed" for test in sorted(expected & passed)),
        *(f"{test} is listed and did not run" for test in sorted(expected - passed - failed)),
    ]


def test_the_list_is_checked_both_ways():
    assert surprises({"A::a"}, {"A::b"}, {"A::b"}) == []
    assert surprises(set(), {"A::b"}, set()) == ["A::b failed and is not listed"]
    assert surprises({"A::b"}, set(), {"A::b"}) == ["A::b is listed and passed"]
    assert surprises(set(), set(), {"A::b"}) == ["A::b is listed and did not run"]


def test_what_is_skipped_does_not_count_as_passed(tmp_path):
    (tmp_path / "results.xml").write_text(
        "<testsuites><testsuite>"
        '<testcase classname="x.TestA" name="a"/>'
        '<testcase classname="x.TestA" name="b"><skipped/></testcase>'
        '<testcase classname="x.TestA" name="c"/><testcase classname="x.TestA" name="c"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    assert outcomes(tmp_path / "results.xml") == ({"A::a"}, {"A::b", "A::c"})
