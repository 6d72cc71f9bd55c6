"""Two of Celery's own examples, of the installed version, run with nothing changed but the broker's URL.

Their result backends stay what they are: next-steps sends results through the broker (rpc://), and the Django project
keeps them in a SQLite file (db+sqlite://).
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.workers.harness import Worker

pytestmark = [pytest.mark.conformance, pytest.mark.slow]

NEXT_STEPS = """
from celery import group
from proj.tasks import add, mul, xsum

assert add.delay(2, 2).get(timeout=30) == 4
assert add.apply_async((2, 3), countdown=0.5).get(timeout=30) == 5
assert (add.s(4, 4) | mul.s(8)).delay().get(timeout=30) == 64
assert group(add.s(i, i) for i in range(10))().get(timeout=30) == [2 * i for i in range(10)]
assert xsum.delay(list(range(5))).get(timeout=30) == 10
"""

DJANGO = """
import time
from demoapp.models import Widget
from demoapp.tasks import count_widgets, rename_widget, xsum
from django.db import transaction

with transaction.atomic():
    widget = Widget.objects.create(name="made")
    rename_widget.delay_on_commit(widget.id, "renamed")
deadline = time.monotonic() + 30
while Widget.objects.get(id=widget.id).name != "renamed":
    assert time.monotonic() < deadline, "the task has not renamed the widget"
    time.sleep(0.05)
assert count_widgets.delay().get(timeout=30) == 1
assert xsum.delay([1, 2, 3]).get(timeout=30) == 6
"""


def test_next_steps(unpack_sdist, own_database_url):
    project = unpack_sdist("celery", "examples/next-steps")
    point_at(own_database_url, project / "proj" / "celery.py", "'amqp://'")
    with worker(project):
        run(project, "-c", NEXT_STEPS)


def test_django(unpack_sdist, own_database_url):
    project = unpack_sdist("celery", "examples/django")
    point_at(own_database_url, project / "proj" / "settings.py", "'amqp://guest:guest@localhost'")
    # The project's urls.py can't be imported with Celery 5.4's source and a Django of today: its checks stay off.
    run(project, "manage.py", "migrate", "--skip-checks", "--verbosity", "0")
    with worker(project, "--skip-checks"):
        run(project, "manage.py", "shell", "-c", DJANGO)


def point_at(url: str, file: Path, old: str) -> None:
    """Change the broker's URL, which stands in one place, and nothing else."""
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name} of the example has changed"
    file.write_text(text.replace(old, repr(f"taskgate+{url}")))


def environment() -> dict[str, str]:
    # A setting of the surroundings must not reach the example.
    return {name: value for name, value in os.environ.items() if not name.startswith(("CELERY", "DJANGO"))}


def run(project: Path, *arguments: str) -> None:
    """A Python program of the project, as its README runs it."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def worker(project: Path, *options: str) -> Iterator[None]:
    """A real worker of the project, ready for tasks; it ends in good order."""
    name = f"example-{uuid.uuid4().hex[:6]}@test"
    log = project / "worker.log"
    command = [sys.executable, "-m", "celery", *options, "-A", "proj", "worker", "-l", "INFO", "-c", "2", "-n", name]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=project,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = Worker(process, log, name)
    try:
        started.wait_ready()
        assert "taskgate+" in started.text(), "the worker does not say that it is on taskgate"
        yield
        assert started.terminate() == 0, started.text()
    finally:
        if started.alive:
            started.kill()
        print(started.text())  # noqa: T201  # pytest shows it with the failure
