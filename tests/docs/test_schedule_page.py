"""What docs/schedule.md shows is done as it stands there."""

from __future__ import annotations

import inspect
import re
import shlex
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_ext.beat.texts import parse
from celery_ext.cli.group import command
from celery_ext.schedule import Schedule

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "schedule.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return [block for written_in, block in found if written_in == language]


@pytest.fixture
def app(tmp_path: Path) -> Celery:
    return Celery("shop", broker=f"taskgate+sqlite:///{tmp_path}/a.db", set_as_current=False)


def test_python(tmp_path: Path) -> None:
    (block,) = blocks("python")
    (tmp_path / "schedule.py").write_text(block)
    (tmp_path / "celeryconfig.py").write_text('broker_url = "taskgate+sqlite:///a.db"\n')
    line = [sys.executable, "schedule.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    poll, report = done.stdout.splitlines()
    assert poll.startswith("poll interval 30s 2")
    assert re.fullmatch(r"report crontab 0 9 \* \* mon-fri \d{4}-\d\d-\d\d 09:00:00\+0[12]:00", report)


def test_commands(app: Celery) -> None:
    commands = [line for block in blocks("") for line in block.splitlines() if line.startswith("celery ")]
    assert len(commands) == 8
    for line in commands:
        words = shlex.split(line)
        assert words[:4] == ["celery", "-A", "proj", "taskgate"]
        result = CliRunner().invoke(command, words[4:], obj=SimpleNamespace(app=app))
        assert result.exit_code == 0, (line, result.output)
    with Schedule(app) as schedule:
        (entry,) = schedule.list()
        assert (entry.name, entry.args, entry.timezone) == ("report", ("daily",), "Europe/Berlin")
        assert entry.requested_at is not None
    app.close()


def test_rows(app: Celery, tmp_path: Path) -> None:
    with Schedule(app) as schedule, closing(sqlite3.connect(tmp_path / "a.db")) as database:
        assert schedule.list() == []
        hourly, night, pause, remove = blocks("sql")
        for statement in (hourly, night, pause):
            assert database.execute(statement).rowcount == 1
            database.commit()
        paused, nightly = schedule.list()
        assert (paused.name, paused.enabled, paused.problem) == ("hourly", False, None)
        assert (nightly.args, nightly.options, nightly.timezone) == (("full",), {"queue": "slow"}, "Europe/Berlin")
        assert nightly.next_due is not None
        assert (nightly.next_due.hour, nightly.next_due.minute) == (2, 30)
        assert database.execute(remove).rowcount == 1
        database.commit()
        assert [entry.name for entry in schedule.list()] == ["night"]
    app.close()


def test_texts(app: Celery) -> None:
    texts = re.findall(r"`((?:interval|crontab) [^`]+)`", TEXT)
    assert len(texts) >= 6
    for text in texts:
        parse(text, app)


def test_the_options_of_add_are_listed_with_their_defaults() -> None:
    table = TEXT.split("and:\n", 1)[1].split("\n\n", 1)[0]
    listed = set(re.findall(r"`(\w+)`(?=.*\| (?:none|off|on|the app's) \|)", table))
    taken = set(inspect.signature(Schedule.add).parameters)
    assert listed == taken - {"self", "name", "task", "every", "crontab", "solar", "schedule"}
