"""Revocations hold whatever workers are up, and callers learn of them (reports B34, B35, B37, B38)."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from celery import chord, states
from celery.exceptions import TaskRevokedError

from celery_ext import control
from kombu_taskgate.core.model import State
from tests.workers.fixtures import MakeLab
from tests.workers.harness import ROOT, Lab, Worker, holds_for, wait_for


@pytest.fixture
def results(tmp_path: Path) -> dict[str, Any]:
    """Settings of an app that keeps results, where every process can read them."""
    folder = tmp_path / "results"
    folder.mkdir()
    return {"result_backend": f"file://{folder}", "task_ignore_result": False}


def state_of(lab: Lab, id: str) -> str:
    return str(lab.app.AsyncResult(id).state)


def wait_revoked(lab: Lab, *ids: str) -> None:
    for id in ids:
        wait_for(lambda id=id: state_of(lab, id) == states.REVOKED, 30, f"{id} REVOKED")  # type: ignore[misc]


def wait_heard(lab: Lab, worker: Worker) -> None:
    """Until the worker has fetched all control commands."""
    wait_for(lambda: not lab.rows(queue=f"{worker.name}.celery.pidbox"), 60, "the worker has heard of it")


def wait_flagged(worker: Worker, id: str) -> None:
    """Until the worker knows that a task is revoked, which is after it has fetched the command."""

    def flagged() -> bool:
        return any("flagged as revoked" in line and id in line for line in worker.text().splitlines())

    wait_for(flagged, 60, f"the worker has learned that {id} is revoked")


def celery(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run Celery's command line."""
    command = [sys.executable, "-m", "celery", "-A", "tests.workers.app", *arguments]
    return subprocess.run(command, env=lab.environment(), cwd=ROOT, capture_output=True, timeout=60, check=False)


def settled(lab: Lab) -> bool:
    return not [row for row in lab.unfinished() if row.queue == "celery"]


def run_one(lab: Lab) -> None:
    """Have a task run after all that waited before it."""
    id = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(id), 30, "a task that is not revoked")
    wait_for(lambda: settled(lab), 30, "nothing waits")


def test_revoked_while_no_worker_is_up(make_lab: MakeLab, database_url: str, results: dict[str, Any]) -> None:
    """B34: waiting tasks are canceled and told at once, and a later worker runs neither them nor what is revoked."""
    lab = make_lab(database_url, results)
    ids = [lab.send("work", 0), lab.send("work", 0), lab.send("work", 0, countdown=3600)]
    lab.app.control.revoke(ids[0])
    lab.app.control.revoke(ids[1:])
    assert [state_of(lab, id) for id in ids] == [states.REVOKED] * 3
    assert lab.states() == {State.CANCELED: 3}
    later = str(uuid.uuid4())
    lab.app.control.revoke(later)
    lab.send("work", 0, task_id=later)
    assert state_of(lab, later) == states.PENDING
    lab.start_worker("-c1")
    run_one(lab)
    wait_revoked(lab, later)
    assert [lab.journal.starts(id) for id in (*ids, later)] == [0] * 4


def test_holds_when_every_worker_is_restarted(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """B34: a running task whose worker dies does not come back, nor does a task that is published after it all."""
    lab = make_lab(main_url, results, lease_ttl=4.0)
    worker = lab.start_worker("-c1")
    running = lab.send("hold_until", str(lab.folder / "never"))
    wait_for(lambda: lab.journal.starts(running), 30, "the task runs")
    later = str(uuid.uuid4())
    lab.app.control.revoke([running, later])
    assert lab.states()[State.RUNNING] >= 1
    worker.kill()
    lab.send("work", 0, task_id=later)
    lab.start_worker("-c1")
    wait_revoked(lab, running, later)
    run_one(lab)
    assert (lab.journal.starts(running), lab.journal.starts(later)) == (1, 0)
    assert [row.state for row in lab.rows(queue="celery")] == [State.CANCELED] * 2


def test_revoked_before_its_time(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """B35: a task that is due soon leaves the queue at once and does not run when it would have been due."""
    lab = make_lab(main_url, results)
    lab.start_worker("-c1")
    due = time.monotonic() + 6
    id = lab.send("work", 0, countdown=6)
    assert lab.broker.queue_len("celery") == 1
    lab.app.control.revoke(id)
    assert (lab.broker.queue_len("celery"), state_of(lab, id)) == (0, states.REVOKED)
    holds_for(lambda: not lab.journal.starts(id), due + 1 - time.monotonic(), "it ran", every=0.2)


def test_running_task_ends_well_and_its_retry_does_not_run(
    make_lab: MakeLab, main_url: str, results: dict[str, Any]
) -> None:
    """Revoking what runs lets it end as a success; a retry of it is a new execution, and revoked."""
    lab = make_lab(main_url, results)
    lab.start_worker("-c2")
    gate = lab.folder / "gate"
    running = lab.send("hold_until", str(gate))
    retrying = lab.send("flaky", 5, 3600.0)
    wait_for(lambda: lab.journal.starts(running) and lab.journal.starts(retrying), 30, "both run")
    wait_for(lambda: lab.broker.queue_len("celery"), 30, "the retry waits")
    wait_for(lambda: state_of(lab, retrying) == states.RETRY, 30, "the worker has said so, and says no more of it")
    lab.app.control.revoke([running, retrying])
    assert state_of(lab, retrying) == states.REVOKED
    gate.touch()
    wait_for(lambda: state_of(lab, running) == states.SUCCESS, 30, "the running one counts")
    run_one(lab)
    assert lab.journal.starts(retrying) == 1


def test_retry_after_the_revocation_does_not_run(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """A task that is revoked while it runs and then retries is ended by the claim of its retry."""
    lab = make_lab(main_url, results)
    worker = lab.start_worker("-c1")
    gate = lab.folder / "gate"
    id = lab.send("retry_after", str(gate))
    wait_for(lambda: lab.journal.starts(id), 30, "it runs")
    lab.app.control.revoke(id)
    wait_flagged(worker, id)
    gate.touch()
    wait_revoked(lab, id)
    run_one(lab)
    assert lab.journal.starts(id) == 1
    said = f"tests.workers.app.retry_after[{id}] is revoked and will not run"
    wait_for(lambda: said in worker.text(), 30, "it is said")


def test_prefetched_task_is_dropped(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """What a busy worker has prefetched does not run either, and is settled."""
    lab = make_lab(main_url, {**results, "worker_prefetch_multiplier": 4})
    worker = lab.start_worker("-c1")
    gate = lab.folder / "gate"
    running = lab.send("hold_until", str(gate))
    waiting = lab.send("work", 0)
    wait_for(lambda: waiting in worker.text(), 30, "it is prefetched")
    lab.app.control.revoke(waiting)
    wait_flagged(worker, waiting)
    gate.touch()
    wait_revoked(lab, waiting)
    run_one(lab)
    assert (lab.journal.ends(running), lab.journal.starts(waiting)) == (1, 0)


def test_of_long_lists_workers_hear_what_they_can_have(
    make_lab: MakeLab, tmp_path: Path, results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B37: what is prefetched is dropped, and nobody's memory is filled with what no worker has."""
    monkeypatch.setattr(control, "MOST", 3)
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db", {**results, "worker_prefetch_multiplier": 4})
    worker = lab.start_worker("-c1")
    gate = lab.folder / "gate"
    lab.send("hold_until", str(gate))
    prefetched = lab.send("work", 0)
    wait_for(lambda: prefetched in worker.text(), 30, "it is prefetched")
    waiting = lab.send("work", 0, countdown=3600)
    later = str(uuid.uuid4())
    lab.app.control.revoke([prefetched, waiting, later, "unknown"])
    wait_flagged(worker, prefetched)
    heard = lab.app.control.inspect([worker.name], timeout=30).revoked()
    assert heard == {worker.name: [prefetched]}
    gate.touch()
    lab.send("work", 0, task_id=later)
    wait_revoked(lab, prefetched, waiting, later)
    run_one(lab)
    assert [lab.journal.starts(id) for id in (prefetched, waiting, later)] == [0, 0, 0]
    assert lab.broker.revocations.count() == 4
    lab.app.pool.force_close_all()


def test_commands_that_mean_nothing(make_lab: MakeLab, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other commands, and revocations of nothing or of what is no id, are broadcast and change nothing."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db")
    lab.send("work", 0)
    for arguments in ({}, {"task_id": None}, {"task_id": []}, {"task_id": [5, None]}, {"task_id": {"a": 1}}):
        lab.app.control.broadcast("revoke", arguments=arguments)
    for headers in (None, [], {}, {"h": []}, ["no equals sign"], "text"):
        lab.app.control.broadcast("revoke_by_stamped_headers", arguments={"headers": headers})
    lab.app.control.broadcast("ping")
    assert (lab.states(), lab.broker.revocations.any()) == ({State.PENDING: 1}, False)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_stamps_of_the_command_line(make_lab: MakeLab, tmp_path: Path, results: dict[str, Any]) -> None:
    """The command line gives stamped headers as texts."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db", results)
    id = lab.send("work", 0, stamped_headers=["customer"], customer="c1")
    done = celery(lab, "control", "revoke_by_stamped_headers", "customer=c1")
    assert state_of(lab, id) == states.REVOKED, done


def test_terminated_task_is_not_redelivered(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """revoke(terminate=True): its pool process is killed, the caller sees REVOKED, and no loss is counted."""
    lab = make_lab(main_url, results, lease_ttl=60.0)
    lab.start_worker("-c1")
    id = lab.send("work", 60)
    wait_for(lambda: lab.journal.starts(id), 30, "it runs")
    lab.app.control.revoke(id, terminate=True)
    wait_revoked(lab, id)
    run_one(lab)
    assert (lab.journal.starts(id), lab.journal.ends(id)) == (1, 0)
    assert [row.lease_lost for row in lab.rows(task_id=id)] in ([], [0])


def test_stamped_headers(make_lab: MakeLab, main_url: str, results: dict[str, Any]) -> None:
    """revoke_by_stamped_headers finds what waits now and what is published later, by any of several stamps."""
    lab = make_lab(main_url, results)

    def stamped(**stamps: Any) -> str:
        return lab.send("work", 0, stamped_headers=list(stamps), **stamps)

    revoked = [stamped(customer="c1"), stamped(customer=["c0", "c1"]), stamped(order=7, customer="c9")]
    kept = [stamped(customer="c2"), stamped(other="c1"), lab.send("work", 0)]
    lab.app.control.revoke_by_stamped_headers({"customer": ["c1", "c3"], "order": 7})
    assert [state_of(lab, id) for id in revoked] == [states.REVOKED] * 3
    later = [stamped(customer="c3"), stamped(customer="c1")]
    kept.append(stamped(customer="c9"))
    lab.start_worker("-c1")
    wait_for(lambda: lab.journal.ended() == set(kept), 30, "the others run")
    wait_revoked(lab, *later)
    run_one(lab)
    assert [lab.journal.starts(id) for id in (*revoked, *later)] == [0] * 5


def test_revoked_for_one_worker_only(make_lab: MakeLab, tmp_path: Path, results: dict[str, Any]) -> None:
    """A revocation that is meant for one worker is that worker's affair."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db", results)
    id = lab.send("work", 0)
    lab.app.control.revoke(id, destination=["nobody@test"])
    lab.app.control.revoke(id, pattern="nobody*", matcher="glob")
    assert (lab.states(), lab.broker.revocations.any()) == ({State.PENDING: 1}, False)


def test_a_result_that_is_there_stays(make_lab: MakeLab, tmp_path: Path, results: dict[str, Any]) -> None:
    """The error handler of a chord tells of its body's tasks, and revokes them then; nor is a success unsaid."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db", results)
    ids = [lab.send("work", 0), lab.send("work", 0)]
    lab.app.backend.mark_as_failure(ids[0], ValueError("chord"))
    lab.app.backend.mark_as_done(ids[1], "done")
    lab.app.control.revoke(ids)
    assert [state_of(lab, id) for id in ids] == [states.FAILURE, states.SUCCESS]
    assert lab.states() == {State.CANCELED: 2}


def test_without_a_result_backend(make_lab: MakeLab, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is told, and nothing is wrong with that."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db")
    lab.app.control.revoke(lab.send("work", 0))
    assert lab.states() == {State.CANCELED: 1}
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_a_result_backend_that_fails(
    make_lab: MakeLab, tmp_path: Path, results: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The revocation holds all the same, and the log says who was not told."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db", results)
    id = lab.send("work", 0)
    (tmp_path / "results").rmdir()
    lab.app.control.revoke(id)
    assert lab.states() == {State.CANCELED: 1}
    assert f"[{id}] is revoked and will not run, but its caller could not be told" in caplog.text


def test_result_of_rpc(make_lab: MakeLab, tmp_path: Path) -> None:
    """A caller that waits on rpc:// is told; a result on its way is no task, though it has the task's id."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db", {"result_backend": "rpc://", "task_ignore_result": False})
    revoked, done = (lab.app.send_task("tests.workers.app.work", [0]) for _ in range(2))
    lab.app.control.revoke(revoked.id)
    lab.start_worker("-c1")
    wait_for(lambda: settled(lab), 30, "the other one has run")
    lab.app.control.revoke(done.id)
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=30)
    assert done.get(timeout=30) is None
    lab.app.backend.result_consumer.stop()


@pytest.mark.redis
@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # Celery's backend calls it
def test_chord_learns_of_a_revoked_part(make_lab: MakeLab, tmp_path: Path, redis_url: str) -> None:
    """The body of a chord fails when a part of its header is revoked while it waits."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db", {"result_backend": redis_url, "task_ignore_result": False})
    work = lab.app.signature("tests.workers.app.work", args=(0,), immutable=True)
    parts = [work.clone(), work.clone().set(countdown=3600)]
    body = chord(parts, app=lab.app)(work.clone())
    lab.start_worker("-c1")
    wait_for(lambda: lab.journal.ends() == 1, 30, "one part has run")
    wait_for(lambda: state_of(lab, body.parent.results[0].id) == states.SUCCESS, 30, "and is counted")
    lab.app.control.revoke(body.parent.results[1].id)
    assert state_of(lab, body.parent.results[1].id) == states.REVOKED
    wait_for(lambda: state_of(lab, body.id) == states.FAILURE, 30, "the body fails")
    body.parent.forget()
    body.forget()
    backend = lab.app.backend
    backend.result_consumer.stop()
    backend.client.connection_pool.disconnect()


def test_purge_counts_what_waits(make_lab: MakeLab, main_url: str) -> None:
    """B38: of 10 ready, 5 scheduled and 2 running tasks purge removes 15, and only the 2 end."""
    lab = make_lab(main_url)
    lab.start_worker("-c2")
    gate = lab.folder / "gate"
    running = {lab.send("hold_until", str(gate)) for _ in range(2)}
    wait_for(lambda: lab.journal.starts() == 2, 30, "two run")
    for number in range(15):
        lab.send("work", 0, countdown=1.0 if number < 5 else None)
    if main_url.startswith("sqlite"):
        assert lab.app.control.purge() == 15
    else:
        assert b"Purged 15 messages" in celery(lab, "purge", "-f").stdout
    gate.touch()
    wait_for(lambda: lab.journal.ended() == running, 30, "the two end")
    wait_for(lambda: settled(lab), 30, "and are settled")
    holds_for(lambda: lab.journal.starts() == 2, 1.5, "something else ran", every=0.2)


def rss(worker: Worker) -> int:
    """Resident memory in bytes."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{worker.pid}/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


@pytest.mark.slow
@pytest.mark.timeout(300)  # it is a lot of work for a busy machine
def test_two_hundred_thousand_revocations(make_lab: MakeLab, main_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B37: they cost a worker little memory, hold up no start, and are gone after their time."""
    monkeypatch.setenv("CELERY_WORKER_REVOKE_EXPIRES", "1")
    lab = make_lab(main_url, lease_ttl=3.0)
    began = time.monotonic()
    worker = lab.start_worker("-c1")
    usual = time.monotonic() - began
    run_one(lab)
    before = rss(worker)
    # A server's share is smaller, to keep the test short: its statements are of the same length for any number.
    number = 200_000 if main_url.startswith("sqlite") else 20_000
    lab.app.control.revoke([str(uuid.uuid4()) for _ in range(number)])
    assert lab.broker.revocations.count() > 0
    wait_heard(lab, worker)
    run_one(lab)
    assert rss(worker) - before < 50 * 2**20
    worker.terminate()
    began = time.monotonic()
    lab.start_worker("-c1")
    assert time.monotonic() - began < 10 + 2 * usual
    run_one(lab)
    wait_for(lambda: lab.broker.revocations.count() == 0, 120, "they are swept")
