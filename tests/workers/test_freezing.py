"""A process that a test freezes must not take the lock of an SQLite file along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.harness import can_be_written, freeze_between_writes, is_stopped, wait_for

#: Writes half of the time, and says so.
WRITER = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
while True:
    connection.execute("BEGIN IMMEDIATE")
    print("writing", flush=True)
    time.sleep(0.05)
    connection.execute("COMMIT")
    time.sleep(0.05)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "x.db")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.crash
def test_frozen_between_writes(writer: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Although it is in the middle of a write when it is to be frozen, others can write once it is."""
    url = f"sqlite:///{tmp_path}/x.db"
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"writing\n"
    freeze_between_writes(url, writer.pid)
    assert is_stopped(writer.pid)
    assert can_be_written(url)
    os.killpg(writer.pid, signal.SIGCONT)
    wait_for(lambda: not is_stopped(writer.pid), 30, "it goes on")
