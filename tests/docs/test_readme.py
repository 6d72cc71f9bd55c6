"""The README's Python blocks are files (their first line names them) of an app that works."""

from __future__ import annotations

import ast
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from kombu import Connection
from kombu.transport import TRANSPORT_ALIASES

from kombu_taskgate.transport.url import database_url

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DEADLINE = 60.0

PUBLISH_TWICE = """
from tasks import charge

for _ in range(2):  # as a redelivery: the same task id
    charge.apply_async(args=["ann", 5], task_id="one-id")
charge.delay("bob", 7)
"""


def blocks() -> dict[str, str]:
    found = {}
    for block in re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None, f"the first line of a Python block names its file: {block[:60]!r}"
        found[name.group(1)] = block
    return found


def rows(path: Path) -> list[tuple[str, int]]:
    if not path.exists():
        return []
    with closing(sqlite3.connect(path)) as shop:
        if not shop.execute("SELECT 1 FROM sqlite_master WHERE name = 'charges'").fetchone():
            return []
        return shop.execute("SELECT customer, amount FROM charges ORDER BY customer").fetchall()


def received(output: Path) -> int:
    """How many executions the worker has finished."""
    return len(re.findall(r"Task tasks\.charge\[[^]]+\] succeeded", output.read_text()))


def test_the_two_commands_are_make_demo_and_make_test():
    commands = re.findall(r"^```\n(.*?)\n```", README, re.MULTILINE | re.DOTALL)
    assert commands[:2] == ["make demo", "make test"]


def test_urls_of_the_table_are_understood():
    urls = re.findall(r"`(taskgate\+\w+://[^`]*)`", README)
    assert len(urls) == 5
    for url in urls:
        connection = Connection(url)
        assert TRANSPORT_ALIASES[url.partition("://")[0]].startswith("kombu_taskgate.")
        assert connection.transport.driver_type == "taskgate"
        assert database_url(connection) == url.removeprefix("taskgate+")


def test_configuration_takes_five_lines():
    assert [type(node) for node in ast.parse(blocks()["celeryconfig.py"]).body] == [ast.Assign] * 5


@pytest.mark.slow
def test_blocks_are_an_app_that_charges_once(tmp_path):
    for name, text in blocks().items():
        (tmp_path / name).write_text(text)
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        worker = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "tasks", "worker", "--concurrency", "2", "--loglevel", "INFO"],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        subprocess.run([sys.executable, "-c", PUBLISH_TWICE], cwd=tmp_path, timeout=DEADLINE, check=True)
        deadline = time.monotonic() + DEADLINE
        while received(output) < 3:
            assert time.monotonic() < deadline, output.read_text()
            assert worker.poll() is None, output.read_text()
            time.sleep(0.05)
        assert rows(tmp_path / "shop.db") == [("ann", 5), ("bob", 7)]
        worker.terminate()
        assert worker.wait(timeout=DEADLINE) == 0, output.read_text()
    finally:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
