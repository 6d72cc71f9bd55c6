"""Empty, shared, old, new and unsupported databases (reports B99, B100, B112, B115, B116)."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import sqlalchemy as sa

from kombu_taskgate.core import migrations
from kombu_taskgate.core.dialects.mysql import MySQL
from kombu_taskgate.core.dialects.postgresql import PostgreSQL
from kombu_taskgate.core.dialects.sqlite import SQLite
from kombu_taskgate.core.errors import ConfigError, SchemaError
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker
from tests.workers.fixtures import MakeLab, drop_tables
from tests.workers.harness import Lab, wait_for

PUBLISH = """
from tests.workers.app import app, echo
import json, os
print(json.dumps([echo.delay(os.getpid()).id for _ in range(3)]))
app.close()
"""

DECLARE = """
import json, os
from kombu import Connection, Queue
url, options = os.environ["TASKGATE_TEST_URL"], json.loads(os.environ["TASKGATE_TEST_OPTIONS"])
with Connection(url, transport_options=options) as connection:
    for number in range(5):
        with connection.channel() as channel:
            queue = Queue("brand-new", routing_key="brand-new", channel=channel)
            queue.declare()
            connection.Producer(channel).publish({"n": number}, routing_key="brand-new")
"""


def fresh(url: str, tmp_path: Path, **options: object) -> Lab:
    """A lab whose tables nobody has created yet: the lab opens them, so drop them first."""
    folder = tmp_path / "fresh"
    folder.mkdir()
    lab = Lab(url, folder, {"table_prefix": f"t{uuid.uuid4().hex[:10]}_", **options})
    drop_tables(url, lab.options["table_prefix"])
    return lab


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_twenty_processes_start_on_an_empty_schema(database_url: str, tmp_path: Path) -> None:
    """B99: workers and publishers race to create the tables: nobody fails, one version row."""
    lab = fresh(database_url, tmp_path)
    try:
        publishers = [lab.run_python(PUBLISH) for _ in range(16)]
        workers = [lab.start_worker("-c1", "-Psolo", ready=False) for _ in range(4)]
        ids: set[str] = set()
        for publisher in publishers:
            output, _ = publisher.communicate(timeout=120)
            assert publisher.returncode == 0, output.decode()
            ids.update(json.loads(output.decode().splitlines()[-1]))
        for worker in workers:
            worker.wait_ready(60)
        wait_for(lambda: lab.journal.ended() == ids, 30, "all first tasks ran")
        assert len(ids) == 48
        broker = SqlBroker(lab.settings())
        versions = broker.database.read(lambda conn: conn.execute(sa.select(broker.tables.version)).all())
        assert [row.version for row in versions] == [migrations.SCHEMA_VERSION]
        broker.close()
    finally:
        lab.close()
        drop_tables(lab.url, lab.options["table_prefix"])


def test_eight_processes_declare_one_queue(make_lab: MakeLab, database_url: str) -> None:
    """B100: 40 declarations and publishes to one new queue: one queue row, all messages."""
    lab = make_lab(database_url)
    processes = [lab.run_python(DECLARE) for _ in range(8)]
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output.decode()
    assert [queue.name for queue in lab.broker.topology.queues()].count("brand-new") == 1
    assert lab.broker.queue_len("brand-new") == 40


def test_long_names_and_emoji_round_trip(make_lab: MakeLab, database_url: str) -> None:
    """B112: four-byte characters everywhere, ids of 255 characters, queue names of 200."""
    lab = make_lab(database_url)
    queue = "q🚀" * 100
    task_id = "😀" * 255
    lab.start_worker("-c1", "-Psolo", "-Q", queue)
    lab.send("echo", "naïve 🎉", key="日本語 🗾", queue=queue, task_id=task_id)
    line = wait_for(lambda: lab.journal.of("start", task_id), 30, "it runs")[0]
    assert len(queue) == 200
    assert (line["args"], line["kwargs"]) == (["naïve 🎉"], {})
    lab.broker.enqueue(NewTask("k", type="🧮" * 255, key="🔑" * 255, group_id="👥" * 255))
    (row,) = lab.rows(queue="k")
    assert (row.type, row.key, row.group_id) == ("🧮" * 255, "🔑" * 255, "👥" * 255)


def test_names_that_differ_in_case_or_blanks_differ(make_lab: MakeLab, database_url: str) -> None:
    """B112's kind: no database folds or pads names."""
    lab = make_lab(database_url)
    names = ["queue", "Queue", "queue ", "quéue"]
    for name in names:
        lab.broker.enqueue(NewTask(name, key=f"key-{name}"))
    assert [lab.broker.queue_len(name) for name in names] == [1, 1, 1, 1]


def test_two_prefixes_are_two_installations(make_lab: MakeLab, database_url: str) -> None:
    """B115: two apps in one database never see each other's messages."""
    one, two = make_lab(database_url), make_lab(database_url)
    one.start_worker("-c1", "-Psolo")
    here, there = one.send("work", 0), two.send("work", 0)
    wait_for(lambda: one.journal.ends(here), 30, "its own runs")
    assert [row.task_id for row in two.rows()] == [there]
    assert one.journal.starts(there) == 0


def test_old_tables_are_brought_up_to_date(make_lab: MakeLab, database_url: str) -> None:
    """B115: version 1 on disk: upgraded at start, with what was in it."""
    lab = make_lab(database_url)
    broker = SqlBroker(lab.settings())
    migrations.drop(broker.database, broker.tables)
    migrations.upgrade(broker.database, broker.tables, to=1)
    id = broker.enqueue(NewTask("q", b"old"))
    broker.close()
    again = SqlBroker(lab.settings())
    assert again.get(id).payload == b"old"
    assert again.topology.queues() == []
    again.close()


def test_old_tables_that_may_not_be_changed(make_lab: MakeLab, database_url: str) -> None:
    """B115: one instruction, and nothing is touched."""
    lab = make_lab(database_url)
    broker = SqlBroker(lab.settings())
    migrations.drop(broker.database, broker.tables)
    migrations.upgrade(broker.database, broker.tables, to=1)
    with pytest.raises(SchemaError, match=rf"version 1.*needs version {migrations.SCHEMA_VERSION}.*create_tables"):
        SqlBroker(lab.settings(create_tables=False))
    assert broker.database.read(lambda conn: migrations.current_version(conn, broker.tables), quick=False) == 1
    broker.close()


def test_newer_tables_stop_worker_and_publisher(make_lab: MakeLab, database_url: str) -> None:
    """B115: a schema newer than the code: one clear message, at once, and the worker does not start."""
    lab = make_lab(database_url)
    broker = SqlBroker(lab.settings())
    broker.database.transaction(lambda conn: conn.execute(sa.update(broker.tables.version).values(version=99)))
    worker = lab.start_worker("-c1", "-Psolo", ready=False)
    assert worker.process.wait(60) != 0
    assert "version 99, newer than this taskgate" in worker.text()
    assert worker.text().count("Unrecoverable error") == 1, "said once, not in a loop"
    app = lab.make_app()
    with pytest.raises(SchemaError, match="newer"):
        app.send_task("x", connection=app.connection_for_write(transport_options={**lab.options, "lease_ttl": 61.0}))
    app.close()
    broker.database.transaction(
        lambda conn: conn.execute(sa.update(broker.tables.version).values(version=migrations.SCHEMA_VERSION))
    )
    broker.close()


class Server:
    """A connection to a server of any version."""

    def __init__(self, version: str, *, maria: bool = False) -> None:
        self.version = version
        self.dialect = self
        self.is_mariadb = maria
        self.server_version_info = tuple(int(part) for part in version.split("."))

    def exec_driver_sql(self, statement: str) -> Server:
        self.asked = statement
        return self

    def scalar_one(self) -> str:
        return str(int(self.version.split(".")[0]) * 10000) if "num" in self.asked else self.version


@pytest.mark.parametrize(
    ("dialect", "server", "message"),
    [
        (MySQL(), Server("5.7.44"), "MySQL 5.7.44 is too old: taskgate needs MySQL 8.0.17"),
        (MySQL(), Server("10.5.9", maria=True), "MariaDB 10.5.9 is too old: taskgate needs MariaDB 10.6.0"),
        (PostgreSQL(), Server("11.22"), "PostgreSQL 11.22 is too old: taskgate needs 12"),
        (SQLite(), Server("3.31.1"), "SQLite 3.31.1 is too old: taskgate needs 3.35.0"),
    ],
)
def test_old_servers_are_named(dialect: SQLite, server: Server, message: str) -> None:
    """B116: the found and the needed version."""
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        dialect.check_server(server, BrokerSettings("sqlite:///x"))  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["oracle://u:secret@h/x", "mssql+pyodbc://u:secret@h/x", "nonsense"])
def test_unsupported_databases_are_refused(url: str) -> None:
    """B116: one error at once, with what would work and without the password."""
    with pytest.raises(ConfigError) as caught:
        open_broker(BrokerSettings(url))
    assert "secret" not in str(caught.value)
    assert "sqlite" in str(caught.value)


def test_old_server_stops_the_worker(make_lab: MakeLab, tmp_path: Path) -> None:
    """B116: a worker on a server that is too old ends with the message, instead of trying for ever."""
    lab = make_lab(f"sqlite:///{tmp_path}/broker.db")
    hook = tmp_path / "sitecustomize.py"
    hook.write_text(
        "import kombu_taskgate.core.dialects.sqlite as sqlite\nsqlite.OLDEST = (99, 0, 0)\n", encoding="utf-8"
    )
    root = Path(__file__).resolve().parents[2]
    worker = lab.start_worker("-c1", "-Psolo", ready=False, PYTHONPATH=f"{tmp_path}:{root}")
    assert worker.process.wait(60) != 0
    assert "too old: taskgate needs 99.0.0" in worker.text()
