"""Many tasks at once: copies of one that was published in the usual way, made by the database itself."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta, timezone
from functools import partial

import sqlalchemy as sa
from kombu import Connection, Queue

from kombu_taskgate.core.sql import SqlBroker

#: Rows of one statement: a transaction must not become so large that a server would have to be set up for it.
CHUNK = 100_000
#: Numbers that are counted by recursion; no database has a lower limit than 1000.
_DIGITS = 1000
#: Seconds until the tasks with an ETA are due.
LATER = 7 * 86400


def task_headers(eta: datetime | None = None) -> dict[str, str]:
    """Headers of a message that is a task of Celery's: an ``eta`` of another means nothing to the transport."""
    headers = {"task": "bench", "id": str(uuid.uuid4())}
    return headers if eta is None else {**headers, "eta": eta.isoformat()}


def publish(store: SqlBroker, queue: str, *, eta: bool = False) -> int:
    """Publish one message as an app does; its id.

    Args:
        store: in whose tables.
        queue: it is declared, too.
        eta: whether it is to wait for a week.
    """
    headers = task_headers(datetime.now(timezone.utc) + timedelta(seconds=LATER) if eta else None)
    options = {"table_prefix": store.settings.table_prefix}
    with Connection(f"taskgate+{store.settings.url}", transport_options=options) as connection:
        producer = connection.Producer()
        producer.publish("x" * 500, routing_key=queue, headers=headers, declare=[Queue(queue)])
    tasks = store.tables.tasks
    newest = sa.select(sa.func.max(tasks.c.id)).where(tasks.c.queue == queue)
    id = int(store.database.read(lambda conn: conn.execute(newest).scalar_one()))
    task = store.get(id)
    if eta != (task.run_at > task.created_at):
        raise RuntimeError(f"a task that was published {'with an' if eta else 'without'} ETA is stored as {task}")
    return id


def multiply(store: SqlBroker, id: int, number: int) -> None:
    """Store ``number`` copies of an execution.

    Args:
        store: in whose tables.
        id: of the execution; it waits, and nothing depends on it.
        number: of copies.
    """
    tasks = store.tables.tasks
    names = ", ".join(column.name for column in tasks.columns if column.name != "id")
    numbers = f"WITH RECURSIVE digits (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM digits WHERE n < {_DIGITS - 1})"
    for first in range(0, number, CHUNK):
        copies = min(CHUNK, number - first)
        if copies < _DIGITS:
            source, condition = f"{tasks.name} t, digits a", f"a.n < {copies}"
        else:
            source, condition = f"{tasks.name} t, digits a, digits b", f"a.n * {_DIGITS} + b.n < {copies}"
        text = (
            f"INSERT INTO {tasks.name} ({names}) {numbers} "
            f"SELECT {', '.join(f't.{name}' for name in names.split(', '))} FROM {source} "
            f"WHERE t.id = {id} AND {condition}"
        )
        store.database.transaction(partial(_run, text))


def settle(store: SqlBroker) -> None:
    """Let the database learn of what was stored, as its own daemons would after a while."""
    kind = sa.make_url(store.settings.url).get_backend_name()
    texts = {"postgresql": "VACUUM (ANALYZE) {}", "mysql": "ANALYZE TABLE {}", "mariadb": "ANALYZE TABLE {}"}
    if kind in texts:
        text = texts[kind].format(store.tables.tasks.name)
        store.database.write(partial(_run, text))


def _run(text: str, conn: sa.Connection) -> None:
    conn.exec_driver_sql(text).close()
