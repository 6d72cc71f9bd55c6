"""The command line of the installed Celery, as people type it."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from kombu_taskgate.core.model import State
from kombu_taskgate.transport.codec import decode
from tests.workers.fixtures import MakeLab
from tests.workers.harness import ROOT, Lab, wait_for

#: Runs many commands in one process, each as "celery …" would: one start of Python instead of forty.
MANY = """
import json, sys
from click.testing import CliRunner
from celery.bin.celery import celery
for line in json.loads(sys.argv[1]):
    result = CliRunner().invoke(celery, ["-A", "tests.workers.app", *line], catch_exceptions=True)
    print(json.dumps([line, result.exit_code, result.output]), flush=True)
"""

#: As docs/monitoring.md has it.
MIGRATE = """
import os
from celery.contrib.migrate import migrate_tasks
from kombu import Connection
from tests.workers.app import app
migrate_tasks(Connection(os.environ["SOURCE"]), app.connection_for_write(), app=app, ack_messages=True, timeout=5)
"""


def run(lab: Lab, *arguments: str, input: str = "", fails: bool = False) -> str:
    """What ``celery …`` writes."""
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tests.workers.app", *arguments],
        cwd=ROOT,
        env=lab.environment(),
        input=input,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode != 0) is fails, f"celery {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def run_many(lab: Lab, lines: list[list[str]]) -> list[tuple[list[str], int, str]]:
    done = subprocess.run(
        [sys.executable, "-c", MANY, json.dumps(lines)],
        cwd=ROOT,
        env=lab.environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


INSPECT = [
    "active", "active_queues", "clock", "conf", "memdump", "memsample", "ping", "query_task none", "registered",
    "registered rate_limit", "report", "reserved", "revoked", "scheduled", "stats",
]  # fmt: skip
CONTROL = [
    "add_consumer more", "cancel_consumer more", "disable_events", "enable_events", "heartbeat", "pool_grow 1",
    "pool_restart", "pool_shrink 1", "rate_limit tests.workers.app.work 100/m", "revoke none",
    "revoke_by_stamped_headers who=nobody", "terminate TERM none", "time_limit tests.workers.app.work 50 60",
]  # fmt: skip


def test_inspect_control_and_status(make_lab: MakeLab, main_url: str) -> None:
    lab = make_lab(main_url, {"worker_pool_restarts": True})
    workers = [lab.start_worker("-c1", ready=False) for _ in range(2)]
    for worker in workers:
        worker.wait_ready()
    lines = [["inspect", *words.split()] for words in INSPECT] + [["control", *words.split()] for words in CONTROL]
    lines += [["status"], ["status", "--json"], ["inspect", "ping", "--json"]]
    # With names it need not wait for others that might answer too.
    names = ",".join(worker.name for worker in workers)
    for line, code, output in run_many(lab, [[*line[:1], "-t", "30", "-d", names, *line[1:]] for line in lines]):
        assert code == 0, f"{line}: {output}"
        assert all(worker.name in output for worker in workers), f"{line}: {output}"
        assert "Error" not in output, f"{line}: {output}"
    assert "2 nodes online." in run(lab, "status", "-t", "30", "-d", names)
    run(lab, "control", "shutdown", fails=True)  # nobody is left to answer, and Celery says so
    assert [worker.process.wait(60) for worker in workers] == [0, 0]
    assert "No nodes replied" in run(lab, "inspect", "ping", fails=True)


def test_purge_list_report_and_events(make_lab: MakeLab, main_url: str) -> None:
    lab = make_lab(main_url)
    for _ in range(3):
        lab.send("work", 0)
    lab.send("work", 0, countdown=3600)
    bindings = run(lab, "list", "bindings")
    assert "celery" in bindings.splitlines()[-1]
    assert "taskgate" in run(lab, "report")
    assert "Purged 4 messages from 1 known task queue" in run(lab, "purge", "-f")
    assert "No messages purged" in run(lab, "purge", "-f")
    worker = lab.start_worker("-c1", "-P", "solo")
    with (lab.folder / "dump").open("wb") as file:
        dump = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "tests.workers.app", "events", "--dump"],
            cwd=ROOT,
            env=lab.environment(PYTHONUNBUFFERED="1"),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    lab.processes.append(dump)
    run(lab, "control", "-t", "30", "-d", worker.name, "enable_events")
    words = ("heartbeat", "task received", "task started", "task succeeded")

    def heard() -> bool:
        text = (lab.folder / "dump").read_text()
        if all(word in text for word in words):
            return True
        lab.send("work", 0)  # of the first ones some events may have come before anybody listened
        return False

    wait_for(heard, 30, "celery events shows what happens", every=0.2)
    dump.terminate()
    dump.wait(60)


def test_amqp(make_lab: MakeLab, main_url: str) -> None:
    """The shell for exchanges, queues and single messages."""
    lab = make_lab(main_url)
    script = """exchange.declare birds direct
queue.declare nest
queue.bind nest birds song
basic.publish tweet birds song
basic.publish again birds song
queue.declare nest 1
basic.get nest
basic.ack 1
queue.purge nest
queue.delete nest
exchange.delete birds 0
queue.declare nest 1
"""
    output = run(lab, "amqp", "repl", input=script)
    assert "queue:nest messages:2" in output
    assert "tweet" in output
    assert "1 messages deleted." in output
    assert "NOT_FOUND" in output.splitlines()[-2] + output.splitlines()[-1]
    assert not lab.rows()


@pytest.fixture
def redis_app(redis_url: str) -> Iterator[Celery]:
    """An app that publishes to Redis, in a queue of the test's own."""
    app = Celery("from-redis", broker=redis_url, set_as_current=False)
    app.conf.task_default_queue = f"taskgate-test-{uuid.uuid4().hex[:10]}"
    yield app
    with app.connection_for_write() as connection:
        app.amqp.queues[app.conf.task_default_queue](connection.default_channel).delete()
    app.close()


@pytest.mark.redis
@pytest.mark.parametrize("how", ["command", "function"])
def test_migrate_from_redis(make_lab: MakeLab, tmp_path: Path, redis_app: Celery, how: str) -> None:
    """50 tasks with headers, ETAs and priorities: every one arrives as it was, and those that are due run."""
    queue = redis_app.conf.task_default_queue
    # The command knows no broker_transport_options; the function can be told.
    prefix = "taskgate_" if how == "command" else "mine_"
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db", {"task_default_queue": queue}, table_prefix=prefix)
    eta = (datetime.now(timezone.utc) + timedelta(hours=1)).replace(microsecond=0)
    sent: dict[str, dict[str, Any]] = {}
    for number in range(50):
        options: dict[str, Any] = {"headers": {"number": number}, "priority": number % 10}
        if number % 5 == 0:
            options["eta"] = eta
        id = redis_app.send_task("tests.workers.app.echo", [number, "🐘"], {"k": number}, **options).id
        sent[id] = {"number": number, **options}
    source = str(redis_app.conf.broker_url)
    if how == "command":
        output = run(lab, "migrate", source, f"taskgate+{lab.url}", "-t", "5", "-a")
        assert output.count("Migrating task") == 50
    else:
        process = lab.run_python(MIGRATE, SOURCE=source)
        assert process.wait(60) == 0
    rows = {str(row.task_id): row for row in lab.rows()}
    assert set(rows) == set(sent)
    for id, wanted in sent.items():
        row, message = rows[id], decode(lab.broker.get(rows[id].id).payload)
        assert message.headers["number"] == wanted["number"]
        assert row.priority == wanted["priority"]
        delayed = row.run_at > row.created_at + 1000
        assert delayed is ("eta" in wanted)
        if delayed:
            assert row.run_at == int(eta.timestamp() * 1000)
    lab.start_worker("-c1", "-P", "solo")
    due = {id for id, wanted in sent.items() if "eta" not in wanted}
    wait_for(lambda: lab.journal.ended() >= due, 30, "what is due runs")
    assert lab.journal.ended() == due
    (line, *_) = [line for line in lab.journal.of("start") if line["kwargs"]["k"] == 7]
    assert line["args"] == [7, "🐘"]
    wait_for(lambda: {row.state for row in lab.unfinished()} == {State.PENDING}, 30, "and only that")
