"""The Celery app that the tests run real workers on: ordinary tasks that note in a journal what happens to them.

Everything comes from the environment: TASKGATE_TEST_URL, _OPTIONS (transport options, JSON), _CONF (Celery
settings, JSON) and _JOURNAL (a file that every process appends to).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from typing import Any

from celery import Celery, Task
from celery.apps.worker import Worker
from celery.exceptions import Ignore, Reject
from celery.signals import task_postrun, worker_process_init
from celery.worker.control import control_command

from celery_ext import Throttled
from celery_ext.worker import names
from kombu_taskgate.transport.errors import RecoverableConnectionError
from tests.workers.requests import OwnTask


class LoopLess(Worker):  # type: ignore[misc]  # Celery has no types
    """A worker that does without an event loop, as Celery's does where a transport has none."""

    def should_use_eventloop(self) -> bool:
        return False


# How long it waits for the answer of a namesake that lives: a busy machine may take more than the usual second.
names.PATIENCE = float(os.environ.get("TASKGATE_TEST_PATIENCE", names.PATIENCE))
app = Celery("taskgate-tests")
if os.environ.get("TASKGATE_TEST_NO_LOOP"):
    app.Worker = partial(LoopLess, app=app)
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
        "eta": [task.request.eta, getattr(task.request, "taskgate_eta", None)],
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


@app.task(bind=True, base=OwnTask)
def hold_own(self: Task, path: str) -> None:
    """The same, with a request class of the app's own."""
    hold_until.run.__func__(self, path)


@app.task(bind=True, max_retries=5)
def flaky(self: Task, failures: int, countdown: float = 0.1) -> None:
    """Fail a few times first."""
    note("start", self, retries=self.request.retries)
    if self.request.retries < failures:
        raise self.retry(countdown=countdown)
    note("end", self)


@app.task(bind=True, max_retries=5)
def retry_after(self: Task, path: str) -> None:
    """Retry at once when a file appears."""
    note("start", self, retries=self.request.retries)
    while not os.path.exists(path):  # noqa: PTH110  # as in hold_until
        time.sleep(0.01)
    raise self.retry(countdown=0)


@app.task(bind=True)
def replace(self: Task, path: str) -> None:
    """Let another task take the own place."""
    note("start", self)
    raise self.replace(hold_until.s(path))


@app.task(bind=True)
def spawn(self: Task, number: int = 1) -> None:
    """Publish more work."""
    note("start", self)
    for _ in range(number):
        work.delay(tag=self.request.id)
    note("end", self)


@app.task(bind=True)
def kill_self(self: Task) -> None:
    """Die without a word, as under the kernel's out-of-memory killer."""
    note("start", self)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True)
def kill_once(self: Task) -> None:
    """Die on the first delivery."""
    note("start", self)
    if not self.request.delivery_info["redelivered"]:
        os.kill(os.getpid(), signal.SIGKILL)
    note("end", self)


@app.task(bind=True)
def fail(self: Task) -> None:
    """Raise an error of the app's own."""
    note("start", self)
    raise ValueError("as a test wants it")


@app.task(bind=True)
def ignore(self: Task) -> None:
    """Want no result."""
    note("start", self)
    raise Ignore


@app.task(bind=True)
def leave(self: Task) -> None:
    """End the process in good order, as a library might."""
    note("start", self)
    sys.exit(3)


@app.task(bind=True)
def reject(self: Task, times: int) -> None:
    """Give the own message back a few times."""
    note("start", self)
    mark = f"{os.environ['TASKGATE_TEST_JOURNAL']}.{self.request.id}"
    with open(mark, "a+b") as file:  # noqa: PTH123  # as light as can be
        done = file.tell()
        file.write(b".")
    if done < times:
        raise Reject("not now", requeue=True)
    note("end", self)


class Busy(Throttled):
    """An exception of the app's own, made of other arguments."""

    def __init__(self, *, host: str, seconds: float) -> None:
        super().__init__(retry_after=seconds, reason=f"{host} is busy")
        self.host = host


@app.task(bind=True, max_retries=1, autoretry_for=(Exception,))
def throttle(self: Task, times: int, seconds: float) -> None:
    """Ask to run later a few times."""
    note("start", self, retries=self.request.retries)
    mark = f"{os.environ['TASKGATE_TEST_JOURNAL']}.{self.request.id}"
    with open(mark, "a+b") as file:  # noqa: PTH123  # as light as can be
        done = file.tell()
        file.write(b".")
    if done < times:
        raise Busy(host="db1", seconds=seconds)
    note("end", self)


@app.task(bind=True, rate_limit="1/h")
def seldom(self: Task) -> None:
    """Once an hour in each worker."""
    note("start", self)
    note("end", self)


@app.task(bind=True)
def end_with_worker(self: Task, marker: str) -> str:
    """Succeed, and the first time take the whole worker along before the message is acknowledged."""
    note("start", self)
    return marker


@task_postrun.connect(sender=end_with_worker)
def _end_with_worker(retval: str, **_: object) -> None:
    try:
        os.close(os.open(retval, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.killpg(0, signal.SIGKILL)


@app.task(bind=True)
def limited(self: Task) -> None:
    """To be limited by the test's settings."""
    note("start", self)
    note("end", self)


@app.task(bind=True)
def echo(self: Task, *args: object, **kwargs: object) -> None:
    """Note what came."""
    note("start", self, args=list(args), kwargs=kwargs)
    note("end", self)


@app.task(bind=True)
def kill_worker(self: Task) -> None:
    """Take the whole worker along each time."""
    note("start", self)
    os.killpg(0, signal.SIGKILL)


@app.task(bind=True)
def refuse(self: Task) -> None:
    """Reject the own message for good."""
    note("start", self)
    raise Reject("never", requeue=False)


@app.task
def on_error(request: Any, exc: BaseException, traceback: object) -> None:
    """An errback of the new kind, which is called with the request by whoever learns of the failure."""
    if os.environ.get("TASKGATE_TEST_ERRBACK_GATE"):
        hold("errback", request.id)
    event("errback", request.id, error=type(exc).__name__, text=str(exc))


@app.task(bind=True)
def on_error_id(self: Task, id: str) -> None:
    """An errback of the old kind, which is a task of its own."""
    event("errback", id, error="", text="")


@app.task
def body(results: list[Any]) -> str:
    """The body of a chord."""
    return "body"


def event(name: str, id: str, **more: object) -> None:
    """A line about another task."""
    line = {"event": name, "id": id, "pid": os.getpid(), "time": time.time(), **more}
    file = os.open(os.environ["TASKGATE_TEST_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def hold(name: str, id: str) -> None:
    """Say that something has begun, and go on when the file of that gate is there."""
    event(f"{name} begins", id)
    while not os.path.exists(os.environ["TASKGATE_TEST_ERRBACK_GATE"]):  # noqa: PTH110  # as in hold_until
        time.sleep(0.01)


@control_command()
def lose_connection(state: Any) -> None:
    """Make Celery believe that its connection broke."""
    state.consumer.hub.call_later(0.01, _break)


def _break() -> None:
    raise RecoverableConnectionError("a test has cut it")


@worker_process_init.connect
def _unbuffered(**_: object) -> None:
    os.environ["PYTHONUNBUFFERED"] = "1"


@app.task(bind=True)
def publish(self: Task, tag: str) -> None:
    """Publish another task, over whatever connection this process has for it."""
    work.delay(0, tag)


if os.environ.get("TASKGATE_TEST_PUBLISH"):
    # As apps do that start something when they are imported: the main process has used its connections before it forks.
    work.delay(0, os.environ["TASKGATE_TEST_PUBLISH"])
