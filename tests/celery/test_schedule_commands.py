"""``celery taskgate``: what it prints, where to, and how it ends."""

from __future__ import annotations

import inspect
import json
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner, Result

from celery_ext.beat.plan import code_entries
from celery_ext.beat.stores import open_stores
from celery_ext.cli import running
from celery_ext.cli.group import command
from celery_ext.cli.leader import Found
from celery_ext.schedule import Schedule
from kombu_taskgate.core.schedules import Entry, Progress, Tick
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.terms import Candidate
from tests.celery import results

ROOT = Path(__file__).resolve().parents[2]


class Shell:
    """``celery -A app taskgate …`` in this process."""

    def __init__(self, app: Celery) -> None:
        self.app = app

    def run(self, *words: str, code: int = 0, typed: str = "") -> Result:
        # Newer versions of click keep the two apart anyway.
        mixed = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
        result = CliRunner(**mixed).invoke(command, words, obj=SimpleNamespace(app=self.app), input=typed)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        assert result.exit_code == code, result.output
        return result

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.run(*words, "--json", code=code).stdout)

    def error(self, *words: str, code: int) -> str:
        result = self.run(*words, code=code)
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        return result.stderr


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    app = Celery("shop", broker=f"taskgate+sqlite:///{tmp_path}/a.db", set_as_current=False)
    app.conf.update(timezone="Europe/Berlin", beat_taskgate_lease_ttl=100)
    yield Shell(app)
    app.close()


def test_it_is_a_command_of_celerys() -> None:
    assert celery_command.commands["taskgate"] is command


def test_an_entrys_life(shell: Shell) -> None:
    added = shell.json(
        "schedule", "add", "daily", "shop.report", "--crontab", "0 9 * * 1-5", "--args", '[1, "a"]',
        "--kwargs", '{"b": 2}', "--queue", "big", "--priority", "3", "--options", '{"shadow": "s"}', "--expires", "5m",
        "--starting-deadline", "1h", "--timezone", "America/New_York", "--no-overlap", "--one-off",
    )  # fmt: skip
    assert (added["name"], added["task"], added["schedule"]) == ("daily", "shop.report", "crontab 0 9 * * 1-5")
    assert (added["args"], added["kwargs"]) == ([1, "a"], {"b": 2})
    assert added["options"] == {"queue": "big", "priority": 3, "shadow": "s", "expires": 300.0}
    assert (added["starting_deadline"], added["no_overlap"], added["one_off"]) == (3600.0, True, True)
    due = datetime.fromisoformat(added["next_due"])
    assert (due.hour, due.tzinfo is not None) == (9, True)
    assert shell.json("schedule", "list") == [added]
    table = shell.run("schedule", "list").stdout
    for shown in (
        "daily",
        "shop.report",
        "crontab 0 9 * * 1-5",
        "America/New_York",
        "on, no overlap, one-off",
        "09:00:00-0",
    ):
        assert shown in table
    assert shell.json("schedule", "pause", "daily")["enabled"] is False
    assert "paused" in shell.run("schedule", "list").stdout
    assert shell.json("schedule", "resume", "daily")["enabled"] is True
    assert shell.json("schedule", "run-now", "daily")["requested_at"] is not None
    assert "to run now" in shell.run("schedule", "list").stdout
    assert shell.json("schedule", "remove", "daily", "--yes") == {"removed": "daily"}
    assert shell.json("schedule", "list") == []
    assert shell.run("schedule", "list").stdout == "no entries\n"


def test_what_people_read(shell: Shell) -> None:
    shown = shell.run("schedule", "add", "fast", "t", "--every", "90s", "--paused").stdout
    lines = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert lines == {
        "name": "fast",
        "source": "added",
        "task": "t",
        "schedule": "interval 90s",
        "timezone": "Europe/Berlin",
        "state": "paused",
        "runs": "0",
    }


def test_markup_in_names_is_shown_as_it_is(shell: Shell) -> None:
    shell.run("schedule", "add", "[red]x[/blue]", "t", "--every", "5")
    assert "[red]x[/blue]" in shell.run("schedule", "list").stdout


def test_an_entry_that_can_not_be_sent_says_so_in_the_list(shell: Shell) -> None:
    stores = open_stores(shell.app)
    stores.schedules.add(stores.key, Entry("bad", task="t", schedule="sometimes"))
    stores.close()
    assert "never: the schedule 'sometimes' can't be used" in shell.run("schedule", "list").stdout


def test_removing_asks(shell: Shell) -> None:
    shell.run("schedule", "add", "fast", "t", "--every", "90")
    asked = shell.run("schedule", "remove", "fast", typed="n\n", code=1)
    assert "Remove fast (t, interval 90)?" in asked.stderr
    assert len(shell.json("schedule", "list")) == 1
    # Nobody is there to answer.
    shell.run("schedule", "remove", "fast", code=1)
    assert shell.run("schedule", "remove", "fast", typed="y\n").stdout == "removed fast\n"
    assert shell.json("schedule", "list") == []


def test_what_is_not_there_or_refused_ends_with_1(shell: Shell) -> None:
    shell.run("schedule", "add", "fast", "t", "--every", "90")
    for words in (["pause"], ["resume"], ["run-now"], ["remove"], ["remove", "--yes"], ["ticks"]):
        assert "no entry 'fest' in the schedule 'beat:shop': did you mean 'fast'?" in shell.error(
            "schedule", *words, "fest", code=1
        )
    assert "there is an entry 'fast' already" in shell.error("schedule", "add", "fast", "t", "--every", "5", code=1)
    assert shell.json("schedule", "add", "fast", "u", "--every", "5", "--replace")["task"] == "u"


def test_an_entry_of_the_code_is_not_removed(shell: Shell) -> None:
    shell.app.conf.beat_schedule = {"code": {"task": "t", "schedule": 5.0}}
    stores = open_stores(shell.app)
    term = stores.terms.try_acquire(stores.key, "me", 60)
    assert term is not None
    stores.schedules.sync(term, [planned.row for planned in code_entries(shell.app).values()])
    stores.close()
    assert "code" in shell.error("schedule", "remove", "code", "--yes", code=1)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--crontab", "0 25 * * *"], "the hour '25' can't be read"),
        (["--every", "soon"], "'soon' is no number"),
        ([], "given: none"),
        (["--every", "5", "--timezone", "Europe/Berln"], "did you mean Europe/Berlin?"),
        (["--every", "5", "--options", '{"queu": 1}'], "did you mean queue?"),
    ],
)
def test_what_can_not_be_right_ends_with_2(shell: Shell, words: list[str], error: str) -> None:
    assert error in shell.error("schedule", "add", "x", "t", *words, code=2)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--args", "{}"], "write it as '[1, \"a\"]'"),
        (["--args", "x"], "it is no JSON"),
        (["--args", "[" * 10_000 + "]" * 10_000], "it is no JSON"),
        (["--kwargs", '{"at": {"__type__": "datetime", "__value__": 5}}'], "it is no JSON"),
        (["--kwargs", "[]"], "write it as"),
        (["--expires", "soon"], "'soon' is no duration"),
        (["--queue", "a", "--options", '{"queue": "b"}'], "queue is given twice"),
    ],
)
def test_usage_ends_with_2(shell: Shell, words: list[str], error: str) -> None:
    assert error in shell.run("schedule", "add", "x", "t", "--every", "5", *words, code=2).stderr


def test_ticks(shell: Shell) -> None:
    with Schedule(shell.app) as schedule:
        schedule.add("fast", "t", every=5)
    stores = open_stores(shell.app)
    term = stores.terms.try_acquire(stores.key, "me", 60)
    assert term is not None
    base = None
    for due in (1_900_000_000_000, 1_900_000_005_000):
        assert stores.schedules.tick(term, Tick("fast", due, f"id-{due}"), Progress(base, due))
        base = due
    stores.close()
    newest, _ = shell.json("schedule", "ticks", "fast")
    assert newest["task_id"] == "id-1900000005000"
    assert newest["due_at"] == "2030-03-17T17:46:45+00:00"
    assert (newest["state"], newest["term"]) == ("sent", term.number)
    assert len(shell.json("schedule", "ticks", "--limit", "1")) == 1
    assert "2030-03-17 17:46:45+00:00" in shell.run("schedule", "ticks").stdout


# -- leader ------------------------------------------------------------------------------------------


@pytest.fixture
def host() -> str:
    return socket.gethostname()[:200]


def test_nobody_leads(shell: Shell) -> None:
    shown = shell.run("leader", code=1).stdout
    assert "nobody" in shown
    assert shell.json("leader", code=1)["leader"] is None


def test_who_leads_and_who_stands_by(shell: Shell, host: str) -> None:
    stores = open_stores(shell.app)
    term = stores.terms.try_acquire(stores.key, "there:1:ab", 50)
    stores.terms.register(stores.key, f"{host}:2:cd")
    stores.close()
    assert term is not None
    found = shell.json("leader")
    assert found["key"] == "beat:shop"
    assert (found["leader"]["holder"], found["leader"]["term"]) == ("there:1:ab", term.number)
    since, until = (datetime.fromisoformat(found["leader"][name]) for name in ("since", "until"))
    assert (until - since).total_seconds() == 50
    assert [standby["holder"] for standby in found["standbys"]] == [f"{host}:2:cd"]
    shown = shell.run("leader").stdout
    assert f"term      {term.number}" in shown
    assert f"{host}:2:cd" in shown


def test_the_probe(shell: Shell, host: str) -> None:
    stores = open_stores(shell.app)
    assert f"no replica {host}:… of beat:shop was heard of within 100 s" in shell.error("leader", "--probe", code=1)
    assert shell.json("leader", "--probe", code=1) == {"alive": False, "role": None, "holder": None}
    stores.terms.try_acquire(stores.key, "there:1:ab", 50)
    shell.error("leader", "--probe", code=1)
    assert shell.run("leader", "--probe", "--host", "there").stdout == "leader: there:1:ab\n"
    # A host whose name only begins alike is another.
    shell.error("leader", "--probe", "--host", "ther", code=1)
    assert shell.run("leader", "--probe", "--holder-prefix", "ther").stdout == "leader: there:1:ab\n"
    stores.terms.register(stores.key, f"{host}:2:cd")
    assert shell.json("leader", "--probe") == {"alive": True, "role": "standby", "holder": f"{host}:2:cd"}
    stores.terms.release(stores.key, "there:1:ab")
    shell.error("leader", "--probe", "--host", "there", code=1)
    stores.close()
    assert "belong to --probe" in shell.run("leader", "--host", "x", code=2).stderr


def test_a_standby_that_was_not_heard_of_for_the_lease_time_is_no_standby(shell: Shell, host: str) -> None:
    old = Candidate("k", f"{host}:2:cd", 0, 1000, 1000 + 15_001)
    heard = Candidate("k", f"{host}:3:ef", 0, 1000, 1000 + 15_000)
    assert Found("k", "", 15.0, None, [old, heard]).standbys == [heard]


# -- stores that are away ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["schedule", "list"], ["leader"], ["leader", "--probe"], ["schedule", "remove", "x", "--yes"]]
)
def test_a_store_that_can_not_be_reached_ends_with_2(words: list[str]) -> None:
    app = Celery("shop", broker="taskgate+postgresql://user:secret@127.0.0.1:1/x", set_as_current=False)
    error = Shell(app).error(*words, code=2)
    assert "can't be reached" in error
    assert "secret" not in error
    app.close()


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where somebody listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_store_that_does_not_answer_ends_with_2(silent: int) -> None:
    """By the limits of its connections, long before the command's own."""
    app = Celery("shop", broker=f"taskgate+postgresql://user:secret@127.0.0.1:{silent}/x", set_as_current=False)
    error = Shell(app).error("leader", "--probe", code=2)
    assert "secret" not in error
    app.close()


def test_a_command_ends_whatever_hangs(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(running, "PATIENCE", 0.05)
    monkeypatch.setattr("celery_ext.cli.leader._look", lambda stores: never.wait())
    assert "has not answered within 0.05 s" in shell.error("leader", code=2)
    never.set()


def test_settings_that_name_no_store_end_with_2() -> None:
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    assert "beat_taskgate_lease_url" in Shell(app).error("leader", code=2)
    app.close()


def test_without_rich_there_is_a_hint_and_json(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    for module in ("rich.table", "rich.box", "rich.text", "rich.console"):
        monkeypatch.setitem(sys.modules, module, None)
    for words in (["schedule", "list"], ["schedule", "ticks"]):
        assert "pip install 'celery-taskgate[cli]'" in shell.error(*words, code=2)
    assert shell.json("schedule", "list") == []
    assert shell.json("schedule", "ticks") == []


def test_a_leader_with_standbys_is_shown_without_rich_too(
    shell: Shell, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = open_stores(shell.app)
    stores.terms.try_acquire(stores.key, "there:1:ab", 50)
    stores.terms.register(stores.key, f"{host}:2:cd")
    stores.close()
    monkeypatch.setitem(sys.modules, "rich.table", None)
    shown = shell.run("leader").stdout
    assert "there:1:ab" in shown
    assert f"{host}:2:cd" in shown


def test_as_it_is_typed(tmp_path: Path) -> None:
    """The whole way: the installed program, an app of its own, and what a shell sees."""
    (tmp_path / "proj.py").write_text(
        "from celery import Celery\n"
        f"app = Celery('shop', broker='taskgate+sqlite:///{tmp_path}/a.db')\n"
        "away = Celery('shop', broker='taskgate+postgresql://user:secret@127.0.0.1:1/x')\n"
    )

    def typed(app: str, *words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "celery", "-A", f"proj:{app}", "taskgate", *words]
        return subprocess.run(
            line,
            cwd=tmp_path,
            env=None,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    added = typed("app", "schedule", "add", "fast", "t", "--every", "5m", "--json")
    assert added.returncode == 0, added.stderr
    assert json.loads(added.stdout)["schedule"] == "interval 5m"
    gone = typed("app", "schedule", "pause", "slow")
    assert (gone.returncode, gone.stdout) == (1, "")
    assert gone.stderr == "Error: there is no entry 'slow' in the schedule 'beat:shop'\n"
    away = typed("away", "leader", "--probe")
    assert (away.returncode, away.stdout, away.stderr.count("\n")) == (2, "", 1)
    assert "secret" not in away.stderr
    assert "Traceback" not in away.stderr


def test_an_app_in_memory() -> None:
    """Of one process, so there is little to see; but nothing breaks."""
    with results.an_app(BrokerSettings(f"memory://{uuid.uuid4().hex}")) as app:
        assert Shell(app).json("schedule", "list") == []
