"""SQLite: one file, one writer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine.interfaces import DBAPIConnection

from ..errors import ConfigError
from ..settings import BrokerSettings
from .base import Dialect, Verdict
from .on_conflict import OnConflict

#: RETURNING came with 3.35 (2021-03), which also is the oldest that Python 3.10's installers ship.
OLDEST = (3, 35, 0)


class SQLite(OnConflict, Dialect):
    """WAL journal and BEGIN IMMEDIATE: readers never block, writers queue up instead of failing half-way."""

    backends = ("sqlite",)
    drivers = (("pysqlite", "sqlite3"),)
    plain_drivers = ("pysqlite",)
    install = "this Python was built without its sqlite3 module; use a Python that has it"
    begin = "BEGIN IMMEDIATE"
    # Its library keeps the locks of a process in memory: a child that opens the file again would believe that it
    # holds what the parent holds (sqlite.org, "How To Corrupt An SQLite Database File", 2.7).
    survives_fork = False
    insert_of = insert
    skip_locked = False
    probe_every = 0.05
    explain_words = "EXPLAIN QUERY PLAN"
    id_type = sa.Integer()  # only INTEGER PRIMARY KEY numbers rows
    never_reuse_ids: ClassVar[Mapping[str, Any]] = {"sqlite_autoincrement": True}

    def check_url(self, url: sa.URL) -> None:
        if url.database in (None, "", ":memory:") or "mode=memory" in str(url.query):
            raise ConfigError(
                "a SQLite database in memory is seen by one connection only: "
                "name a file (sqlite:///taskgate.db), or use memory:// for a broker inside one process"
            )
        folder = Path(str(url.database)).absolute().parent
        if not str(url.database).startswith("file:") and not folder.is_dir():
            raise ConfigError(f"the folder {folder} of the SQLite database does not exist: create it first")

    def engine_options(self, url: sa.URL, settings: BrokerSettings, answer_timeout: float) -> dict[str, Any]:
        # The driver's own wait is short, so that a stop or a fork is not held up; database.py waits on.
        return {"connect_args": {"timeout": min(settings.busy_timeout, 1.0)}}

    def on_connect(self, connection: DBAPIConnection, settings: BrokerSettings) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute(f"PRAGMA synchronous={settings.synchronous}")
        finally:
            cursor.close()

    def check_server(self, conn: sa.Connection, settings: BrokerSettings) -> None:
        found = str(conn.exec_driver_sql("SELECT sqlite_version()").scalar_one())
        if tuple(int(part) for part in found.split(".")[:3]) < OLDEST:
            needed = ".".join(map(str, OLDEST))
            raise ConfigError(f"SQLite {found} is too old: taskgate needs {needed} or newer; use a newer Python")

    def server_now(self) -> sa.ColumnElement[int]:
        return sa.literal_column("CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER)", sa.BigInteger)

    def lost(self, error: sa.exc.DBAPIError) -> bool:
        return False  # there is nothing between the library and the file that could break

    def partial_index(self, where: str) -> Mapping[str, Any]:
        return {"sqlite_where": sa.text(where)}

    def classify(self, error: sa.exc.DBAPIError) -> Verdict:
        text = str(error.orig)
        if isinstance(error, sa.exc.IntegrityError):
            return Verdict.AGAIN
        if "locked" in text or "busy" in text:
            return Verdict.BUSY
        if any(part in text for part in ("disk is full", "disk I/O error", "unable to open", "closed database")):
            return Verdict.GONE
        return Verdict.FATAL

    def keep_short(self, conn: sa.Connection, silence: float, wait: float) -> None:
        """Nobody can: a process that is frozen inside a transaction keeps all others from writing until it goes on."""

    def change_mark(self, conn: sa.Connection) -> object | None:
        # Numbers of different connections mean nothing to each other, so the connection is part of the mark.
        connection = conn.info.setdefault("taskgate_mark", object())
        return connection, conn.exec_driver_sql("PRAGMA data_version").scalar_one()

    @contextmanager
    def schema_lock(self, conn: sa.Connection, name: str) -> Iterator[None]:
        yield  # BEGIN IMMEDIATE has locked the whole file already
