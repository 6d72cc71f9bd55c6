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

from kombu_taskgate.testing.stores import InDatabase
from tests import services
from tests.conformance.exceptions import expected, surprises

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
    found = outcomes(results)
    wrong = surprises(found, expected(HERE / "expected_failures.toml", store=sql_store_name, version=version("kombu")))
    assert not wrong, "\n".join(wrong)
    assert {test.partition("::")[0] for test in found if found[test] == "passed"} >= CLASSES, (
        "classes of kombu's tests are missing"
    )


def outcomes(results: Path) -> dict[str, str]:
    """Outcome of each test by its name; of several entries of one test what is worse."""
    found: dict[str, str] = {}
    for case in ET.parse(results).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2].removeprefix('Test')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            found[name] = "failed"
        elif case.find("skipped") is not None:
            found.setdefault(name, "skipped")
        else:
            found.setdefault(name, "passed")
    return found


def test_what_is_skipped_does_not_count_as_passed(tmp_path):
    (tmp_path / "results.xml").write_text(
        "<testsuites><testsuite>"
        '<testcase classname="x.TestA" name="a"/>'
        '<testcase classname="x.TestA" name="b"><skipped/></testcase>'
        '<testcase classname="x.TestA" name="c"/><testcase classname="x.TestA" name="c"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    assert outcomes(tmp_path / "results.xml") == {"A::a": "passed", "A::b": "skipped", "A::c": "failed"}
