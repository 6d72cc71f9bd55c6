"""Every example runs, with real workers, on SQLite in a temporary folder."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DEADLINE = 90.0


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE:.0f} s for {what}"
        time.sleep(0.05)


def group_is_gone(group: int) -> bool:
    """Whether no process of the group lives; one that has ended and that nobody waited for does not count."""
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return False
        except ProcessLookupError:
            continue
    return True


@contextmanager
def running(command: list[str], folder: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process in its own group with its output in a file; the whole group is gone afterwards."""
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, output
    finally:
        if not group_is_gone(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_every_example_has_a_test():
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"} == {
        "demo",
        "quickstart",
    }


@pytest.mark.slow
def test_quickstart(tmp_path):
    folder = EXAMPLES / "quickstart"
    environment = {"BROKER_URL": f"taskgate+sqlite:///{tmp_path / 'quickstart.db'}", "PYTHONPATH": str(folder)}
    worker = [sys.executable, "-m", "celery", "-A", "app", "worker", "--concurrency", "2", "--loglevel", "INFO"]
    with running(worker, tmp_path, **environment) as (process, output):
        wait_for(lambda: b" ready." in output.read_bytes() or process.poll() is not None, "the worker")
        done = subprocess.run(
            [sys.executable, str(folder / "publish.py")],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=True,
        )
        assert done.stdout == "published 3 tasks\n"
        for line in (b"hello, now", b"hello, a second later", b"flaky worked on its second try"):
            wait_for(lambda line=line: line in output.read_bytes() or process.poll() is not None, line.decode())
            assert line in output.read_bytes(), output.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=DEADLINE) == 0, output.read_text()


def demo_table(output: str) -> dict[str, int]:
    return {word: int(number) for word, number in re.findall(r"^  (\w+) +(\d+)$", output, re.MULTILINE)}


@pytest.mark.slow
@pytest.mark.crash
def test_demo_loses_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo" / "run.py")],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = demo_table(done.stdout)
    redelivered = table.pop("redelivered")
    assert table == {"published": 100, "executed": 100, "lost": 0}
    assert redelivered >= 1, "the killed worker held tasks"
    assert "\r" not in done.stdout, "no terminal: one line per step"
    workers = [int(pid) for pid in re.findall(r"worker: process (\d+)", done.stdout)]
    assert len(workers) == 2
    assert all(group_is_gone(pid) for pid in workers)


@pytest.mark.slow
@pytest.mark.crash
def test_demo_told_to_stop_leaves_no_process(tmp_path):
    with running([sys.executable, str(EXAMPLES / "demo" / "run.py")], tmp_path) as (process, output):
        wait_for(lambda: "100/100" in output.read_text(), "the publishing to end")
        found = re.search(r"worker: process (\d+)", output.read_text())
        assert found is not None
        worker = int(found.group(1))
        try:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=DEADLINE) == 128 + signal.SIGTERM
            wait_for(lambda: group_is_gone(worker), "the worker's processes to end")
        finally:
            if not group_is_gone(worker):
                os.killpg(worker, signal.SIGKILL)


def test_demo_counts_a_lost_task_as_lost(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("demo_run", EXAMPLES / "demo" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = run  # dataclasses look their module up
    try:
        spec.loader.exec_module(run)
        journal = tmp_path / "journal.txt"
        journal.write_text(
            "started a 1 0\nexecuted a 1 0\n"
            "started b 1 0\nstarted b 2 1\nexecuted b 2 1\n"  # its first worker was killed
            "started c 1 0\nretried c 1 0\n"  # and never came back
        )
        assert run.report(["a", "b", "c", "d"], run.Journal.read(journal)) == 2
    finally:
        del sys.modules[spec.name]
    assert demo_table(capsys.readouterr().out) == {"published": 4, "executed": 2, "redelivered": 1, "lost": 2}
