"""django-celery-beat's scheduler on two replicas: nothing of the project changes but ``-S``."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.beats import Beats
from tests.workers.fixtures import drop_tables
from tests.workers.harness import ROOT, holds_for, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


class DjangoBeats(Beats):
    """Replicas of a Django project."""

    def environment(self, own: dict[str, Any] | None = None, **more: str) -> dict[str, str]:
        return super().environment(own, TASKGATE_TEST_DJANGO=str(self.folder / "django.db"), **more)

    def django(self, *words: str) -> str:
        """Run a command of the project."""
        script = str(ROOT / "tests" / "workers" / "beat_django.py")
        done = subprocess.run(
            [sys.executable, "-W", "ignore", script, *words],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def beats(main_url: str, tmp_path: Path) -> Iterator[DjangoBeats]:
    prefix = f"d{uuid.uuid4().hex[:10]}_"
    beats = DjangoBeats(main_url, tmp_path, prefix, {"code": 1, "old": 1}, app="tests.workers.beat_django")
    beats.django("migrate")
    yield beats
    beats.close()
    drop_tables(beats.url, beats.prefix)


def test_database_scheduler(beats: DjangoBeats) -> None:
    """B90: rows that change while it runs are heard of. B94: what the code has no longer is disabled."""
    beats.start(2)
    beats.wait_ticks(3, "code")
    beats.django("add", "row", "1")
    beats.django("add", "once", "1", "one-off")
    beats.wait_ticks(2, "row")
    beats.wait_ticks(1, "once")
    first = beats.leader()
    first.kill()
    count = len(beats.ticks("row"))
    beats.wait_ticks(count + 3, "row")
    second = beats.leader()
    assert second is not first
    beats.django("enable", "row", "no")
    # django-celery-beat looks for changes every five seconds.
    wait_for(lambda: _quiet(beats, "row"), 30, "it is not sent any more")
    del beats.entries["old"]
    (third,) = beats.start()
    second.terminate()
    wait_for(lambda: beats.leader() is third, 30, "the new code leads")
    wait_for(lambda: json.loads(beats.django("show"))["old"] is False, 30, "its row is disabled")
    count = len(beats.ticks("old"))
    beats.wait_ticks(len(beats.ticks("code")) + 3, "code")
    assert len(beats.ticks("old")) == count
    assert third.alive
    assert len(beats.ticks("once")) == 1, "the next leader knows, although the row did not say so"
    beats.check()


def _quiet(beats: DjangoBeats, name: str) -> bool:
    count = len(beats.ticks(name))
    try:
        holds_for(lambda: len(beats.ticks(name)) == count, 2.5, "quiet")
    except AssertionError:
        return False
    return True
