"""Events of real workers: what a receiver sees, and what they cost when it does not look (reports B42)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.workers.fixtures import MakeLab, url_of
from tests.workers.harness import Lab, freeze_between_writes, holds_for, wait_for

#: A receiver in a process of its own, which writes down the tasks it hears of.
RECEIVER = """
import os
from tests.workers.app import app
heard = open(os.environ["HEARD"], "a", buffering=1)
with app.connection_for_read() as connection:
    app.events.Receiver(connection, handlers={"*": lambda event: print(event.get("uuid"), file=heard)}).capture()
"""


@contextmanager
def receiving(lab: Lab) -> Iterator[list[dict[str, Any]]]:
    """Receive events in a thread, into the list."""
    seen: list[dict[str, Any]] = []
    app = lab.make_app()
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": seen.append})
        thread = threading.Thread(target=receiver.capture)
        thread.start()
        try:
            name = receiver.queue.name
            wait_for(lambda: name in {one.queue for one in lab.broker.topology.bindings()}, 30, "somebody listens")
            yield seen
        finally:
            receiver.should_stop = True
            thread.join(60)
    app.close()


def event_rows(lab: Lab) -> int:
    return sum("celeryev" in row.queue for row in lab.rows())


@pytest.mark.parametrize(("kind", "pool"), [("sqlite", "prefork"), ("postgresql", "solo"), ("mysql", "prefork")])
def test_receiver_sees_everything(
    make_lab: MakeLab, request: pytest.FixtureRequest, tmp_path: Path, kind: str, pool: str
) -> None:
    lab = make_lab(url_of(request, tmp_path, kind), {"task_send_sent_event": True})
    with receiving(lab) as seen:
        worker = lab.start_worker("-c1", "-E", "-P", pool, "--heartbeat-interval", "1")
        id = lab.send("work", 0)
        wanted = {"task-sent", "task-received", "task-started", "task-succeeded"}
        wait_for(lambda: {e["type"] for e in list(seen) if e.get("uuid") == id} >= wanted, 30, "the task's events")
        beats = [e for e in seen if e["type"] == "worker-heartbeat"]
        wait_for(
            lambda: sum(e["type"] == "worker-heartbeat" for e in list(seen)) >= len(beats) + 2, 30, "two heartbeats"
        )
        worker.terminate()
        wait_for(lambda: any(e["type"] == "worker-offline" for e in list(seen)), 30, "it says goodbye")
    assert {event["hostname"] for event in seen if event["type"].startswith("worker-")} == {worker.name}
    wait_for(lambda: event_rows(lab) == 0, 30, "nothing is left of what was received")


def test_nothing_is_written_where_nobody_listens(make_lab: MakeLab, main_url: str) -> None:
    """B42: a worker with -E and no receiver writes not one row for its events."""
    lab = make_lab(main_url)
    lab.start_worker("-c1", "-E", "-P", "solo", "--heartbeat-interval", "1")
    before = lab.send("work", 0)
    ids = [lab.send("work", 0.01) for _ in range(50)]
    holds_for(lambda: event_rows(lab) == 0, 3, "an event was stored")
    wait_for(lambda: lab.journal.ended() == {before, *ids}, 30, "the tasks have run")
    wait_for(lambda: not lab.rows(), 30, "no row is left at all")
    assert lab.broker.topology.queues()
    # Ids are never used again, so the next one tells how many rows there ever were.
    assert lab.broker.dequeue(["probe"]) == []
    lab.send("work", 0, queue="probe")
    assert lab.rows(queue="probe")[0].id == len(ids) + 2


@pytest.mark.slow
@pytest.mark.crash
def test_frozen_receiver(make_lab: MakeLab, main_url: str) -> None:
    """B42: the queue of a receiver that is frozen stays short, tasks run on, and it sees new events afterwards."""
    lab = make_lab(main_url, {"event_queue_ttl": 1.0}, lease_ttl=10.0)
    lab.start_worker("-c4", "-E", "-P", "threads", ready=False)
    heard = lab.folder / "heard"
    receiver = lab.run_python(RECEIVER, HEARD=str(heard))
    lab.workers[0].wait_ready()
    wait_for(lambda: lab.send("work", 0) and heard.exists() and heard.stat().st_size, 30, "the receiver hears")
    freeze_between_writes(lab.url, receiver.pid)
    stop = threading.Event()
    sent: list[str] = []

    def produce() -> None:
        app = lab.make_app()
        while not stop.wait(0.01):
            sent.append(lab.send("work", 0, app=app))
        app.close()

    thread = threading.Thread(target=produce)
    thread.start()
    most = 0

    def growing() -> bool:
        nonlocal most
        most = max(most, event_rows(lab))
        return True

    holds_for(growing, 8, "", every=0.2)
    before = len(lab.journal.ended())
    wait_for(lambda: len(lab.journal.ended()) >= before + 50, 30, "tasks run on")
    # A worker that was held up sends many events at once; of all that there were they are a small part soon.
    wait_for(
        lambda: growing() and 0 < most < 3 * len(lab.journal.ended()) / 2, 60, "rows are a small part of all events"
    )
    stop.set()
    thread.join(60)
    wait_for(lambda: event_rows(lab) <= 10, 30, "what is past its time goes without any publisher")
    receiver.send_signal(signal.SIGCONT)
    wait_for(lambda: set(sent) <= lab.journal.ended(), 60, "every task has run")
    last = lab.send("work", 0)
    wait_for(lambda: last in heard.read_text(), 30, "the receiver hears again")
