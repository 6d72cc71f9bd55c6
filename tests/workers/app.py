"""The Celery app that the tests run real workers on: ordinary tasks that note in a journal what happens to them.

Everything comes from the environment: TASKGATE_TEST_URL, _OPTIONS (transport options, JSON), _CONF (Celery
settings, JSON) and _JOURNAL (a file that every process appends to).
"""

from __future__ import annotations

import json
import os
import signal
import time

from celery import Celery, Task
from celery.signals import worker_process_init
from celery.worker.control import control_command
from kombu.exceptions import ConnectionError

app = Celery("taskgate-tests")
app.conf.update(
    broker_url=os.environ["TASKGATE_TEST_URL"],
    broker_transport_options=json.loads(os.environ.get("TASKGATE_TEST_OPTIONS", "{}")),
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=True,
    task_create_missing_queues=True,
)
app.conf.update(json.loads(os.environ.get("TASKGATE_TEST_CONF", "{}")))


def note(event: str, task: Task, **more: object) -> None:
    """Append one line; O_APPEND makes it whole, whoever else writes."""
    line = {
        "event": event,
        "id": task.request.id,
        "name": task.name,
        "pid": os.getpid(),
        "worker": task.request.hostname,
        "redelivered": bool((task.request.delivery_info or {}).get("redelivered")),
        "time": time.time(),
        **more,
    }
    file = os.open(os.environ["TASKGATE_TEST_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


@app.task(bind=True)
def work(self: Task, seconds: float = 0.0, tag: str | None = None) -> str | None:
    """Take some time."""
    note("start", self, tag=tag)
    time.sleep(seconds)
    note("end", self, tag=tag)
    return tag


@app.task(bind=True)
def hold_until(self: Task, path: str) -> None:
    """Run until a file appears."""
    note("start", self)
    while not os.path.exists(path):  # noqa: PTH110  # as light as can be: it is asked a hundred times a second
        time.sleep(0.01)
    note("end", self)


@app.task(bind=True, max_retries=5)
def flaky(self: Task, failures: int, countdown: float = 0.1) -> None:
    """Fail a few times first."""
    note("start", self, retries=self.request.retries)
    if self.request.retries < failures:
        raise self.retry(countdown=countdown)
    note("end", self)


@app.task(bind=True)
def kill_self(self: Task) -> None:
    """Die without a word, as under the kernel's out-of-memory killer."""
    note("start", self)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True)
def echo(self: Task, *args: object, **kwargs: object) -> None:
    """Note what came."""
    note("start", self, args=list(args), kwargs=kwargs)
    note("end", self)


@worker_process_init.connect
def _unbuffered(**_: object) -> None:
    os.environ["PYTHONUNBUFFERED"] = "1"


@app.task(bind=True)
def publish(self: Task, tag: str) -> None:
    """Publish another task, over whatever connection this process has for it."""
    work.delay(0, tag)


@control_command()
def lose_connection(state: object) -> str:
    """Have Celery believe that its connection is lost, as when something raises inside its event loop."""
    state.consumer.hub.call_soon(_raise, ConnectionError("a test says so"))  # type: ignore[attr-defined]
    return "lost"


def _raise(error: Exception) -> None:
    raise error


if os.environ.get("TASKGATE_TEST_PUBLISH"):
    # As apps do that start something when they are imported: the main process has used its connections before it forks.
    work.delay(0, os.environ["TASKGATE_TEST_PUBLISH"])
