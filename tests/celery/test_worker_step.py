"""The step comes into a worker by itself, and only where the broker is taskgate."""

from __future__ import annotations

import subprocess
import sys
import uuid

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.worker.request import Request

from celery_ext.worker.request import TaskgateRequest, mix_in, request_class
from celery_ext.worker.step import WorkerStep
from tests.workers.requests import OwnRequest


def add(x: int, y: int) -> int:
    return x + y


def app_on(url: str) -> Celery:
    app = Celery("embedded", set_as_current=False, broker=url, backend="cache+memory://")
    app.conf.task_acks_late = True
    app.task(name="add", shared=False)(add)
    return app


def steps_of(worker: object) -> list[str]:
    return [type(step).__name__ for step in worker.consumer.steps]  # type: ignore[attr-defined]


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_embedded_worker_has_the_step(pool: str) -> None:
    """``start_worker`` of Celery's testing tools, with nothing about taskgate but the URL."""
    app = app_on(f"taskgate+memory://{uuid.uuid4().hex}")
    with start_worker(app, pool=pool, perform_ping_check=False) as worker:
        assert steps_of(worker).count("WorkerStep") == 1
        assert app.tasks["add"].delay(1, 2).get(timeout=60) == 3
        assert issubclass(app.tasks["add"].Request, TaskgateRequest)
    app.close()


def test_other_brokers_of_the_process_are_left_alone() -> None:
    """A second app, on another broker, in a process that has used taskgate: no step, and tasks as they were."""
    taskgate = app_on(f"taskgate+memory://{uuid.uuid4().hex}")
    other = app_on(f"memory://{uuid.uuid4().hex}")
    with start_worker(taskgate, perform_ping_check=False):
        pass
    with start_worker(other, perform_ping_check=False) as worker:
        assert "WorkerStep" not in steps_of(worker)
        assert other.tasks["add"].delay(1, 2).get(timeout=60) == 3
        assert not issubclass(request_class_of(other), TaskgateRequest)
    for app in (taskgate, other):
        app.close()


def request_class_of(app: Celery) -> type:
    from celery.utils.imports import symbol_by_name

    found: type = symbol_by_name(app.tasks["add"].Request)
    return found


def test_an_app_that_changes_its_broker() -> None:
    """The step stays in the app's set; it leaves itself out where the broker is another."""
    app = app_on(f"taskgate+memory://{uuid.uuid4().hex}")
    with start_worker(app, perform_ping_check=False) as worker:
        assert "WorkerStep" in steps_of(worker)
    assert WorkerStep in app.steps["consumer"]
    app.close()
    app.conf.broker_url = app.conf.broker_read_url = app.conf.broker_write_url = f"memory://{uuid.uuid4().hex}"
    with start_worker(app, perform_ping_check=False) as worker:
        assert "WorkerStep" not in steps_of(worker)
    app.close()


def test_request_classes() -> None:
    """Celery's own by its path, and an app's own as a class: ours is mixed in once."""
    default = request_class("celery.worker.request:Request")
    assert issubclass(default, TaskgateRequest)
    assert issubclass(default, Request)
    own = request_class(OwnRequest)
    assert own.__mro__.index(TaskgateRequest) < own.__mro__.index(OwnRequest)
    assert request_class(own) is own
    assert request_class(OwnRequest) is own
    app = app_on("memory://")
    assert mix_in(app.tasks)
    assert not mix_in(app.tasks)


def test_programs_without_celery_load_nothing_of_it() -> None:
    """A pure kombu program uses the transport, and Celery is not imported."""
    code = (
        "import sys, kombu, kombu_taskgate\n"
        "with kombu.Connection('taskgate+memory://x') as connection:\n"
        "    connection.default_channel.basic_get('q')\n"
        "assert 'celery_ext.plugin' in sys.modules, 'it was not asked'\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] == 'celery'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
