"""Apps whose results are in a store of the test's, without a worker: results are stored as a worker would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from celery import Celery, states

from celery_ext.backend import TaskgateBackend
from kombu_taskgate.core.settings import BrokerSettings


def make_app(settings: BrokerSettings, **conf: Any) -> Celery:
    """An app whose broker and result backend are one database, with the tables of a test."""
    options = {"table_prefix": settings.table_prefix, "create_tables": settings.create_tables}
    app = Celery("results", set_as_current=False)
    app.conf.update(
        broker_url=f"taskgate+{settings.url}",
        result_backend=f"taskgate+{settings.url}",
        broker_transport_options={**options, **conf.pop("options", {})},
    )
    app.conf.update(conf)
    return app


@contextmanager
def an_app(settings: BrokerSettings, **conf: Any) -> Iterator[Celery]:
    """The same, with its connections closed in the end."""
    app = make_app(settings, **conf)
    try:
        yield app
    finally:
        close(app)


def close(app: Celery) -> None:
    """Close what an app has opened; Celery leaves that to the end of the process."""
    backend = app.backend
    assert isinstance(backend, TaskgateBackend)
    backend.result_consumer.stop()
    if backend._broker is not None:
        backend._broker.close()
    app.amqp.producer_pool.force_close_all()
    app.pool.force_close_all()
    app.close()


def request(task_id: str, *lease: int, **values: Any) -> Any:
    """What a backend is handed with a task's result; the lease is (execution, token)."""
    lists = {"errbacks": [], "chord": None, "chain": None, "children": []}
    return SimpleNamespace(id=task_id, taskgate_lease=list(lease), ignore_result=False, **{**lists, **values})


def succeed(app: Celery, task_id: str, value: Any = None, *lease: int) -> None:
    """Store the result of a task that has succeeded."""
    app.backend.store_result(task_id, value, states.SUCCESS, request=request(task_id, *lease) if lease else None)
