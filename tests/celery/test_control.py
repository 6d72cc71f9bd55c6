"""Remote control: every command of the installed Celery, with real workers (reports B39, B44, B46)."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
from celery.worker.consumer import Consumer
from celery.worker.control import Panel
from sqlalchemy import make_url

from kombu_taskgate.core.model import State
from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, Worker, wait_for
from tests.workers.victims import Victim

Reply = dict[str, Any]


def ask(lab: Lab, command: str, *workers: Worker, timeout: float = 30.0, **arguments: Any) -> list[Reply]:
    """What these workers (one, unless more are named) answer, in the order in which they are named."""
    names = [worker.name for worker in workers or lab.workers[:1]]
    replies = lab.app.control.broadcast(
        command, arguments=arguments, destination=names, reply=True, timeout=timeout, limit=len(names)
    )
    answers = {name: answer for reply in replies for name, answer in reply.items()}
    assert sorted(answers) == sorted(names), f"{command} was answered by {sorted(answers)}"
    return [answers[name] for name in names]


def queues_of(lab: Lab, worker: Worker) -> set[str]:
    (answer,) = ask(lab, "active_queues", worker)
    return {queue["name"] for queue in answer}


def ping_all(lab: Lab, times: int) -> None:
    expected = {worker.name: {"ok": "pong"} for worker in lab.workers}
    for number in range(times):
        # The last answer ends it: the time is for those that would never come.
        answers = lab.app.control.inspect(timeout=15, limit=len(expected)).ping()
        assert answers == expected, f"ping {number} was answered by {sorted(answers or {})}"


def start_three(lab: Lab, *arguments: str) -> None:
    for _ in range(3):
        lab.start_worker("-c1", *arguments, ready=False)
    for worker in lab.workers:
        worker.wait_ready()


def test_three_workers_answer_every_ping(make_lab: MakeLab, main_url: str) -> None:
    """B39: each of 50 pings has three answers, also while nobody has a free pool process."""
    lab = make_lab(main_url)
    start_three(lab)
    ping_all(lab, 25)
    gate = lab.folder / "gate"
    ids = [lab.send("hold_until", str(gate)) for _ in range(9)]
    wait_for(lambda: lab.journal.starts() == 3, 30, "all pools are full")
    ping_all(lab, 25)
    gate.touch()
    wait_for(lambda: lab.journal.ended() == set(ids), 30, "the tasks have run")
    assert set(lab.journal.starts_each().values()) == {1}


@pytest.mark.crash
def test_pings_after_sessions_were_killed(victim: Victim, make_lab: MakeLab) -> None:
    """B39: right after a worker's sessions have been killed it answers as the others do."""
    lab = make_lab(victim.url)
    start_three(lab)
    for _ in range(2):
        assert victim.kill_sessions() >= 1
        ping_all(lab, 5)
    assert all(worker.alive for worker in lab.workers)


# -- every command ---------------------------------------------------------------------------------------

#: Arguments for the commands that need some, by name; a test below sees to it that no command is left out.
ARGUMENTS: dict[str, Reply] = {
    "add_consumer": {"queue": "more", "exchange": "more", "exchange_type": "direct", "routing_key": "more"},
    "autoscale": {"max": 3, "min": 1},
    "cancel_consumer": {"queue": "more"},
    "conf": {"with_defaults": True},
    "election": {"id": "1", "topic": "leader", "action": None},
    "hello": {"from_node": "somebody@else", "revoked": {}},
    "memdump": {"samples": 3},
    "objgraph": {"num": 1, "max_depth": 1, "type": "Request"},
    "pool_grow": {"n": 1},
    "pool_shrink": {"n": 1},
    "query_task": {"ids": ["none"]},
    "rate_limit": {"task_name": "tests.workers.app.work", "rate_limit": "100/s"},
    "registered": {"taskinfoitems": ["rate_limit"]},
    "revoke": {"task_id": ["none"], "terminate": True, "signal": "TERM"},
    "revoke_by_stamped_headers": {"headers": {"who": ["nobody"]}},
    "terminate": {"signal": "TERM", "task_id": ["none"]},
    "time_limit": {"task_name": "tests.workers.app.work", "soft": 50.0, "hard": 60.0},
}
#: Commands without arguments; the last one of all ends the worker.
PLAIN = {
    "active", "active_queues", "clock", "disable_events", "enable_events", "heartbeat", "memsample", "ping",
    "pool_restart", "report", "reserved", "revoked", "scheduled", "shutdown", "stats",
}  # fmt: skip
#: What refuses for reasons of Celery's own, which is an answer all the same: the worker does not autoscale (another
#: test has one that does), a library for debugging is not there, and gossip, which elects, is for Redis and RabbitMQ.
REFUSES = {
    "autoscale": "Autoscale not enabled",
    "election": "'Gossip' object has no attribute 'dispatcher'",
    "objgraph": "Requires the objgraph library",
}


def test_no_command_is_forgotten() -> None:
    assert set(Panel.meta) <= {*ARGUMENTS, *PLAIN}, "a new command of Celery: give it arguments here"


def test_every_command_is_answered(make_lab: MakeLab, main_url: str) -> None:
    lab = make_lab(main_url, {"worker_pool_restarts": True})
    worker = lab.start_worker("-c2", "-E")
    for name in sorted(set(Panel.meta) - {"shutdown"}):
        (answer,) = ask(lab, name, **ARGUMENTS.get(name, {}))
        refusal = answer.get("error") if isinstance(answer, dict) else None
        if refusal is not None or name in REFUSES:
            assert REFUSES.get(name, "no refusal") in str(refusal), f"{name}: {answer}"
    id = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(id), 30, "the worker works after all of them")
    lab.app.control.shutdown(destination=[worker.name])
    assert worker.process.wait(60) == 0
    assert not lab.unfinished()


@pytest.mark.postgresql
def test_stats_show_no_password(make_lab: MakeLab, postgresql_url: str) -> None:
    """Whoever may ask a worker, or look at Flower, need not know the database's passwords."""
    # The server here asks for none, so any will do.
    url = make_url(postgresql_url).set(password="s3cret").update_query_dict({"sslpassword": "t0psecret"})
    lab = make_lab(url.render_as_string(hide_password=False))
    address = f"taskgate+{lab.url}"
    lab.start_worker("-c1", "-P", "solo", TASKGATE_TEST_URL=f"{address};{address}")
    for command in ("stats", "conf", "report"):
        answer = str(ask(lab, command)[0])
        assert "taskgate" in answer, f"{command} shows the broker"
        assert "s3cret" not in answer, command
        assert "t0psecret" not in answer, command
    log = lab.workers[0].text()
    assert "s3cret" not in log
    assert "t0psecret" not in log


def test_commands_have_their_effect(make_lab: MakeLab, main_url: str) -> None:
    lab = make_lab(main_url, {"worker_pool_restarts": True})
    worker = lab.start_worker("-c2", ready=False)
    scaled = lab.start_worker("--autoscale=3,1", "-Q", "elsewhere", ready=False)
    worker.wait_ready()
    scaled.wait_ready()

    def pids() -> set[int]:
        return set(ask(lab, "stats", worker)[0]["pool"]["processes"])

    assert "ok" in ask(lab, "time_limit", worker, task_name="tests.workers.app.hold_until", soft=None, hard=3.0)[0]
    before = pids()
    assert len(before) == 2
    assert "ok" in ask(lab, "pool_grow", worker, n=1)[0]
    wait_for(lambda: len(pids()) == 3, 30, "the pool has grown")
    assert "ok" in ask(lab, "pool_shrink", worker, n=1)[0]
    wait_for(lambda: len(pids()) == 2, 30, "the pool has shrunk")
    assert "ok" in ask(lab, "pool_restart", worker)[0]
    # A process takes note of it after its next task.
    wait_for(lambda: lab.send("echo") and not before & pids(), 30, "all pool processes are new", every=0.2)
    # Celery 5.7 takes note of a new time limit when the pool restarts, or the worker reconnects.
    held = lab.send("hold_until", str(lab.folder / "never"))
    wait_for(lambda: "Hard time limit (3.0s) exceeded" in worker.text(), 30, "the task is ended")
    assert lab.journal.starts(held) == 1

    assert "ok" in ask(lab, "autoscale", scaled, max=5, min=2)[0]
    assert ask(lab, "stats", scaled)[0]["autoscaler"]["max"] == 5
    wait_for(lambda: len(ask(lab, "stats", scaled)[0]["pool"]["processes"]) >= 2, 30, "it has scaled up")
    assert "error" in ask(lab, "pool_grow", scaled, n=1)[0]

    assert "ok" in ask(lab, "rate_limit", worker, task_name="tests.workers.app.work", rate_limit="1/h")[0]
    first, second = lab.send("work", 0), lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(first), 30, "the first may run")
    echo = lab.send("echo")
    wait_for(lambda: lab.journal.ends(echo), 30, "other tasks are not held up")
    assert not lab.journal.starts(second), "the second has to wait for an hour"

    lab.app.control.shutdown(destination=[worker.name])
    assert worker.process.wait(60) == 0
    assert scaled.alive
    # The other worker may still have to read the command that was not for it.
    wait_for(lambda: len(lab.unfinished()) == 1, 30, "one is left")
    (limited,) = lab.unfinished()
    assert (limited.task_id, limited.state) == (second, State.PENDING), "who waits for the limit is given back"


# -- queues that are added and removed --------------------------------------------------------------------

#: A queue that was canceled and added again; older versions of Celery forget it when they connect again.
REMEMBERED = ["again"] if "select_add(queues[queue])" in inspect.getsource(Consumer.add_task_queue) else []


@pytest.mark.crash
def test_added_and_canceled_queues_survive_killed_sessions(victim: Victim, make_lab: MakeLab) -> None:
    """B44: the worker consumes what was added and not what was canceled, however often it loses its connections."""
    lab = make_lab(victim.url, lease_ttl=5.0)
    worker = lab.start_worker("-c1", "-Q", "celery,other")
    assert "ok" in ask(lab, "add_consumer", queue="added")[0]
    assert "ok" in ask(lab, "cancel_consumer", queue="other")[0]
    unwanted = lab.send("work", 0, queue="other")
    for _ in range(3):
        assert victim.kill_sessions() >= 1
        id = lab.send("work", 0, queue="added")
        wait_for(lambda id=id: lab.journal.ends(id), 30, "what was added is consumed")
        assert queues_of(lab, worker) == {"celery", "added"}
    assert lab.journal.starts(unwanted) == 0
    assert "ok" in ask(lab, "add_consumer", queue="other")[0]
    wait_for(lambda: lab.journal.ends(unwanted), 30, "what was canceled is consumed when it is added again")
    assert worker.alive


def test_added_and_canceled_queues_survive_a_new_connection(make_lab: MakeLab, tmp_path: Path) -> None:
    """B44: the same when Celery gives its connection up, and puts together anew what it consumes from."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db")
    worker = lab.start_worker("-c1", "-Q", "celery,other,again")
    assert "ok" in ask(lab, "add_consumer", queue="added")[0]
    assert "ok" in ask(lab, "cancel_consumer", queue="other")[0]
    assert "ok" in ask(lab, "cancel_consumer", queue="again")[0]
    wait_for(lambda: queues_of(lab, worker) == {"celery", "added"}, 30, "two are canceled")
    assert "ok" in ask(lab, "add_consumer", queue="again")[0]
    unwanted = lab.send("work", 0, queue="other")
    for number in (2, 3):
        lab.app.control.broadcast("lose_connection", destination=[worker.name])
        wait_for(lambda number=number: worker.text().count("Connected to") == number, 30, "it has connected again")
        ids = [lab.send("work", 0, queue=queue) for queue in ("celery", "added", *REMEMBERED)]
        wait_for(lambda ids=ids: lab.journal.ended() >= set(ids), 30, "what was added is consumed")
        assert queues_of(lab, worker) == {"celery", "added", *REMEMBERED}
    assert lab.journal.starts(unwanted) == 0
    assert worker.alive


# -- terminating where there are no processes --------------------------------------------------------------


@pytest.mark.parametrize("pool", ["threads", "gevent", "eventlet", "solo"])
def test_terminate_without_processes(make_lab: MakeLab, main_url: str, pool: str) -> None:
    """B46: the command is answered, nothing is thrown in the worker, and the next task runs."""
    lab = make_lab(main_url, {"worker_prefetch_multiplier": 1 if pool == "solo" else 2})
    worker = lab.start_worker("-c1", "-P", pool)
    gate = lab.folder / "gate"
    running = lab.send("hold_until", str(gate))
    wait_for(lambda: lab.journal.starts(running), 30, "it runs")
    wanted = [running]
    if pool == "solo":  # it answers when it has time
        threading.Timer(1.0, gate.touch).start()
    else:
        wanted.append(lab.send("hold_until", str(gate)))
        wait_for(lambda: f"[{wanted[-1]}] received" in worker.text(), 30, "the other has come")
    (answer,) = ask(lab, "revoke", task_id=wanted, terminate=True)
    assert "ok" in answer
    gate.touch()
    id = lab.send("work", 0)
    wait_for(lambda: lab.journal.ends(id), 30, "the next task runs")
    wait_for(lambda: not lab.unfinished(), 30, "all is settled")
    assert "Traceback" not in worker.text()
    go_on = {one for one in wanted if f"[{one}] can't be terminated and goes on" in worker.text()}
    if pool == "threads":
        assert go_on == set(wanted)
    if pool != "solo":  # greenlets are ended, by newer versions of Celery, and one that has not begun does not begin
        assert lab.journal.ended() == {*go_on, id}
