"""Creating the tables and bringing old ones up to date, one numbered step at a time, under a lock.

A step must do no harm when it is run twice: some databases commit DDL at once, so a process may have been
killed inside it.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from .database import Database
from .errors import SchemaError
from .schema import Tables

Step = Callable[[sa.Connection, Tables], None]


def _tasks_and_leases(conn: sa.Connection, tables: Tables) -> None:
    for table in (tables.tasks, tables.deps, tables.sessions, tables.quotas):
        table.create(conn, checkfirst=True)


def _topology(conn: sa.Connection, tables: Tables) -> None:
    for table in (tables.queues, tables.exchanges, tables.bindings):
        table.create(conn, checkfirst=True)


def _consumers(conn: sa.Connection, tables: Tables) -> None:
    tables.consumers.create(conn, checkfirst=True)


def _revocations(conn: sa.Connection, tables: Tables) -> None:
    tables.revocations.create(conn, checkfirst=True)


def _results(conn: sa.Connection, tables: Tables) -> None:
    for table in (tables.results, tables.groups, tables.chords, tables.chord_parts):
        table.create(conn, checkfirst=True)


def _begun(conn: sa.Connection, tables: Tables) -> None:
    _add_columns(conn, tables.tasks, "begun")


def _unique_keys(conn: sa.Connection, tables: Tables) -> None:
    _add_columns(conn, tables.tasks, "unique_key", "lock_")
    _add_index(conn, tables.tasks, f"{tables.prefix}tasks_lock")


def _add_index(conn: sa.Connection, table: sa.Table, name: str) -> None:
    """Add an index to a table, unless it has it."""
    index = next(index for index in table.indexes if index.name == name)
    known = {one["name"] for one in sa.inspect(conn).get_indexes(table.name, schema=table.schema)}
    if name not in known:
        index.create(conn)


def _waits(conn: sa.Connection, tables: Tables) -> None:
    tables.waits.create(conn, checkfirst=True)
    _add_columns(conn, tables.results, "awaited")


def _add_columns(conn: sa.Connection, table: sa.Table, *names: str) -> None:
    """Add columns to a table, unless it has them."""
    known = {column["name"] for column in sa.inspect(conn).get_columns(table.name, schema=table.schema)}
    spelled = conn.dialect.identifier_preparer.format_table(table)
    for name in names:
        if name not in known:
            column = sa.schema.CreateColumn(table.c[name]).compile(dialect=conn.dialect)
            conn.exec_driver_sql(f"ALTER TABLE {spelled} ADD COLUMN {column}")


def _answers(conn: sa.Connection, tables: Tables) -> None:
    _add_columns(conn, tables.tasks, "answer_at")
    _add_index(conn, tables.tasks, f"{tables.prefix}tasks_answer")


def _schedules(conn: sa.Connection, tables: Tables) -> None:
    for table in (tables.terms, tables.candidates, tables.entries, tables.ticks):
        table.create(conn, checkfirst=True)


#: Step n brings version n-1 to version n.
STEPS: tuple[Step, ...] = (
    _tasks_and_leases,
    _topology,
    _consumers,
    _revocations,
    _results,
    _begun,
    _unique_keys,
    _waits,
    _answers,
    _schedules,
)
SCHEMA_VERSION = len(STEPS)


def current_version(conn: sa.Connection, tables: Tables) -> int:
    """Version of the tables in the database; 0 when there are none."""
    if not sa.inspect(conn).has_table(tables.version.name, schema=tables.version.schema):
        return 0
    found = conn.execute(sa.select(tables.version.c.version)).scalar()
    return 0 if found is None else found


def check(database: Database, tables: Tables) -> None:
    """Compare the tables with this code; create or migrate them when settings allow it.

    Raises:
        SchemaError: the tables are newer than this code, or are missing or old and may not be changed.
    """
    found = database.read(lambda conn: current_version(conn, tables), quick=False)
    if found == SCHEMA_VERSION:
        return
    _refuse_newer(found, database)
    if not database.settings.create_tables:
        have = f"version {found}" if found else "no tables yet"
        raise SchemaError(
            f"the database {database.shown} has {have}, this taskgate needs version {SCHEMA_VERSION} of its tables, "
            "and create_tables is off: let somebody with the rights run the upgrade, or switch create_tables on once"
        )
    upgrade(database, tables)


def upgrade(database: Database, tables: Tables, to: int | None = None) -> int:
    """Run the missing steps up to version ``to`` (default: newest); returns the version reached.

    Raises:
        SchemaError: the tables are newer than this code.
    """
    target = SCHEMA_VERSION if to is None else to

    def work(conn: sa.Connection) -> int:
        with database.dialect.schema_lock(conn, f"{tables.metadata.schema or ''}.{tables.prefix}"):
            tables.version.create(conn, checkfirst=True)
            found = current_version(conn, tables)
            _refuse_newer(found, database)
            for number in range(found + 1, target + 1):
                STEPS[number - 1](conn, tables)
                conn.execute(sa.delete(tables.version))
                conn.execute(sa.insert(tables.version).values(id=1, version=number))
            return max(found, target)

    return database.transaction(work, schema=True)


def drop(database: Database, tables: Tables) -> None:
    """Drop all of taskgate's tables with this prefix, with everything in them."""

    def work(conn: sa.Connection) -> None:
        with database.dialect.schema_lock(conn, f"{tables.metadata.schema or ''}.{tables.prefix}"):
            tables.metadata.drop_all(conn)

    database.transaction(work, schema=True)


def _refuse_newer(found: int, database: Database) -> None:
    if found > SCHEMA_VERSION:
        raise SchemaError(
            f"the tables in {database.shown} are version {found}, newer than this taskgate, which knows "
            f"{SCHEMA_VERSION}: install the newer celery-taskgate here too"
        )
