"""The programs of docs/depends_on.md and docs/inspecting.md do what the pages say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workers.harness import wait_for

DOCS = Path(__file__).resolve().parents[2] / "docs"
LATE = 60


def write(page: str, folder: Path) -> None:
    """Write the page's only program to the file that its first line names."""
    (block,) = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    name = re.match(r"# (\w+\.py)\n", block)
    assert name is not None
    (folder / name[1]).write_text(block)


def python(folder: Path, code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LATE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Starts a worker of an app in the test's folder; it ends with the test."""
    workers: list[subprocess.Popen[bytes]] = []

    def start(app: str) -> None:
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "-P", "solo"]
        with (tmp_path / f"{app}.log").open("wb") as log:
            workers.append(subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    yield start
    for worker in workers:
        worker.kill()
        worker.wait(LATE)


def test_the_report_waits_for_what_is_loaded(tmp_path: Path, start_worker: Callable[[str], None]) -> None:
    """The page's program publishes a task that ends after the two that it depends on."""
    write("depends_on.md", tmp_path)
    id = python(tmp_path, "import reports; print(reports.run().id)")
    look = f"import reports; print(reports.app.AsyncResult({id!r})"
    assert python(tmp_path, f"{look}.state)") == "PENDING"
    start_worker("reports")
    assert python(tmp_path, f"{look}.get(timeout={LATE}))") == "all is summarized"


def test_a_task_is_looked_at(tmp_path: Path, start_worker: Callable[[str], None]) -> None:
    """The page's program tells apart what never was, what waits, and what has ended."""
    write("inspecting.md", tmp_path)
    assert python(tmp_path, "import look; print(look.show('never'))") == "there is no such task"
    ids = python(tmp_path, "import look; print(look.add.delay(1, 2), look.add.delay(3, 4))").split()
    assert python(tmp_path, f"import look; print(look.show({ids[1]!r}))") == "number 2 in the queue celery"
    waits = f"look.add.apply_async((1, 2), depends_on=[{ids[1]!r}])"
    assert python(tmp_path, f"import look; print(look.show({waits}.id))") == f"waits for {ids[1]}"
    start_worker("look")
    python(tmp_path, f"import look; look.app.AsyncResult({ids[1]!r}).get(timeout={LATE})")
    show = f"import look; print(look.show({ids[1]!r}))"
    wait_for(lambda: python(tmp_path, show) == "completed, SUCCESS", LATE, "it has been acknowledged")
