"""MySQL and MariaDB."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.mysql import LONGBLOB, LONGTEXT, insert
from sqlalchemy.engine.interfaces import DBAPIConnection

from ..errors import ConfigError
from ..settings import BrokerSettings
from .base import Dialect, Verdict

#: SKIP LOCKED came with 8.0.1, the collation used for names with 8.0.17; SKIP LOCKED of MariaDB with 10.6.
OLDEST_MYSQL = (8, 0, 17)
OLDEST_MARIADB = (10, 6, 0)

#: Error numbers (MySQL manual, server error reference): deadlock, duplicate key; MariaDB: record changed.
_AGAIN = {1213, 1062, 1020}
#: lock wait timeout, NOWAIT lock.
_BUSY = {1205, 3572}
#: gone away, lost connection (2), killed, disconnected by the server.
_LOST = {2006, 2013, 2055, 1927, 4031}
#: can't connect (2), too many connections (3), shutdown, read-only (--read-only, --super-read-only, a replica),
#: disk full (4), out of memory, interrupted, statement time limit (2), node of a cluster not ready, network
#: trouble as the server sees it, a driver's own "not connected".
_GONE = _LOST | {
    2002, 2003, 1040, 1203, 1226, 1053, 1290, 1792, 1836, 1021, 1028, 1030, 1114, 1041, 1317, 1969, 3024, 1047,
    1158, 1159, 1160, 1161, 0,
}  # fmt: skip
#: What an upsert with a condition has done with the row that is there.
_REPLACED, _REFUSED = 2, 3


class MySQL(Dialect):
    """READ COMMITTED: under REPEATABLE READ a claim would lock gaps and see old rows."""

    backends = ("mysql", "mariadb")
    drivers = (("pymysql", "pymysql"), ("mysqldb", "MySQLdb"), ("mariadbconnector", "mariadb"))
    plain_drivers = ("pymysql", "mysqldb")
    install = "pip install 'celery-taskgate[mysql]'"
    begin = "START TRANSACTION"
    blob_type = LONGBLOB()
    text_type = LONGTEXT()

    def engine_options(self, url: sa.URL, settings: BrokerSettings, answer_timeout: float) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if url.drivername.endswith(("+pymysql", "+mysqldb")):
            arguments = {
                "connect_timeout": max(1, round(settings.connect_timeout)),
                "charset": "utf8mb4",
                # A peer that vanished without a word is noticed. Whole seconds: one of the drivers wants them.
                "read_timeout": math.ceil(answer_timeout),
                "write_timeout": math.ceil(answer_timeout),
            }
        return {"connect_args": {name: value for name, value in arguments.items() if name not in url.query}}

    def on_connect(self, connection: DBAPIConnection, settings: BrokerSettings) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            cursor.execute(
                f"SET SESSION innodb_lock_wait_timeout = {max(1, math.floor(settings.lock_timeout))}"
                # A comment to MySQL, which has no limit for transactions alone.
                f" /*M!100300 , SESSION idle_transaction_timeout = {max(1, math.ceil(settings.answer_timeout))} */"
            )
            # Strict: a value that does not fit is an error, never cut.
            cursor.execute("SET SESSION sql_mode = CONCAT(@@sql_mode, ',STRICT_ALL_TABLES')")
        finally:
            cursor.close()

    def check_server(self, conn: sa.Connection, settings: BrokerSettings) -> None:
        found = conn.dialect.server_version_info or ()
        maria = bool(getattr(conn.dialect, "is_mariadb", False))
        name, oldest = ("MariaDB", OLDEST_MARIADB) if maria else ("MySQL", OLDEST_MYSQL)
        if tuple(part for part in found if isinstance(part, int))[:3] < oldest:
            have, need = (".".join(map(str, version)) for version in (found, oldest))
            raise ConfigError(f"{name} {have} is too old: taskgate needs {name} {need} or newer (SKIP LOCKED)")

    def max_payload(self, conn: sa.Connection) -> int | None:
        # The rest of the statement has to fit as well, and the driver writes some bytes as two.
        return (int(conn.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()) - 64 * 1024) // 2

    def server_now(self) -> sa.ColumnElement[int]:
        # UTC throughout: no session time zone, no hour that comes twice.
        return sa.literal_column("TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000", sa.BigInteger)

    def classify(self, error: sa.exc.DBAPIError) -> Verdict:
        number = _number(error)
        if number in _AGAIN:
            return Verdict.AGAIN
        if number in _BUSY:
            return Verdict.BUSY
        if number in _GONE or error.connection_invalidated or isinstance(error, sa.exc.InterfaceError):
            return Verdict.GONE
        return Verdict.FATAL

    def lost(self, error: sa.exc.DBAPIError) -> bool:
        return bool(error.connection_invalidated) or _number(error) in _LOST

    def keep_short(self, conn: sa.Connection, silence: float, wait: float) -> None:
        # Of the session, for there is none of the transaction. MySQL knows no limit for transactions alone: there a
        # connection that was used so is also closed when it is idle, and replaced at its next use. Whatever else uses
        # the connection waits for locks as long as ever, but begins anew more often.
        limit = "idle_transaction_timeout" if getattr(conn.dialect, "is_mariadb", False) else "wait_timeout"
        conn.exec_driver_sql(
            f"SET SESSION {limit} = {max(1, math.ceil(silence))}, "
            f"SESSION innodb_lock_wait_timeout = {max(1, math.floor(wait))}"
        )

    def insert(self, table: sa.Table) -> Any:
        return insert(table)

    def inserted(self, insert: Any, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
        # Not the alias that newer servers have: it can't be given to INSERT … SELECT.
        return sa.func.VALUES(column)

    def upsert(
        self,
        insert: Any,
        *,
        keys: Sequence[sa.Column[Any]],
        values: Mapping[str, Any],
        where: sa.ColumnElement[bool] | None = None,
        outcome: sa.Column[Any] | None = None,
    ) -> sa.Insert:
        if where is None or outcome is None:
            return insert.on_duplicate_key_update(list(values.items()))  # type: ignore[no-any-return]  # untyped above
        # There is no WHERE. Assignments are made from left to right, so the first decides and the others look at it;
        # what it has decided is also what the driver calls the id of the last row.
        decided = sa.func.LAST_INSERT_ID(sa.case((where, _REPLACED), else_=_REFUSED))
        table = outcome.table.c
        changes = [(name, sa.case((outcome == _REPLACED, value), else_=table[name])) for name, value in values.items()]
        return insert.on_duplicate_key_update([(outcome.name, decided), *changes])  # type: ignore[no-any-return]  # as above

    def ignore_known(self, insert: Any, keys: Sequence[sa.Column[Any]]) -> sa.Insert:
        # Not INSERT IGNORE, which also turns other errors into warnings.
        return insert.on_duplicate_key_update({keys[0].name: keys[0]})  # type: ignore[no-any-return]  # as above

    def took_effect(self, result: sa.CursorResult[Any]) -> bool:
        return result.rowcount > 0 and result.lastrowid != _REFUSED

    @contextmanager
    def schema_lock(self, conn: sa.Connection, name: str) -> Iterator[None]:
        # DDL commits by itself here, so the lock must outlive transactions: one of the session.
        lock = "taskgate-" + hashlib.sha256(name.encode()).hexdigest()[:40]
        if conn.execute(sa.select(sa.func.get_lock(lock, 60))).scalar() != 1:
            raise ConfigError("another process has been creating the taskgate tables for 60 seconds: look at it")
        try:
            yield
        finally:
            conn.execute(sa.select(sa.func.release_lock(lock)))

    def table_options(self, conn: sa.Connection) -> Mapping[str, Any]:
        # Binary collations that do not pad: names that differ in case or trailing blanks are different names.
        collation = "utf8mb4_nopad_bin" if getattr(conn.dialect, "is_mariadb", False) else "utf8mb4_0900_bin"
        options = {"engine": "InnoDB", "default_charset": "utf8mb4", "collate": collation, "row_format": "DYNAMIC"}
        return {f"{name}_{key}": value for name in ("mysql", "mariadb") for key, value in options.items()}


def _number(error: sa.exc.DBAPIError) -> int | None:
    """The server's or driver's error number; the drivers keep it in different places."""
    number = getattr(error.orig, "errno", None)
    if isinstance(number, int):
        return number
    arguments = getattr(error.orig, "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], int) else None
