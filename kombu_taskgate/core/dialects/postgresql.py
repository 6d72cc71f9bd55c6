"""PostgreSQL."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine.interfaces import DBAPIConnection

from ..clock import to_ms
from ..errors import ConfigError, StoreUnavailable
from ..settings import BrokerSettings
from .base import Dialect, Verdict
from .on_conflict import OnConflict

#: SKIP LOCKED is 9.5; 12 is the oldest that SQLAlchemy and psycopg 3 test.
OLDEST = 120000

#: SQLSTATEs (PostgreSQL manual, appendix A): serialization_failure, deadlock_detected, unique_violation.
_AGAIN = {"40001", "40P01", "23505"}
#: lock_not_available.
_BUSY = {"55P03"}
#: read_only_sql_transaction (a replica, or a fail-over under way), idle_in_transaction_session_timeout,
#: query_canceled by an operator. Classes: 08 connection, 53 resources (disk, memory, too many connections),
#: 57P shutdown, 58 system error.
_GONE = {"25006", "25P03", "57014"}
_GONE_CLASSES = ("08", "53", "57P", "58")
#: What of 57P and 08 no waiting mends: database_dropped; a wrong password (28) is fatal as well.
_FATAL = {"57P04"}


class PostgreSQL(OnConflict, Dialect):
    """READ COMMITTED by name, whatever the server's default is: the claim relies on it."""

    backends = ("postgresql", "postgres")
    drivers = (("psycopg", "psycopg"), ("psycopg2", "psycopg2"))
    plain_drivers = ("psycopg",)
    install = "pip install 'celery-taskgate[postgresql]'"
    notifies = True
    insert_of = insert
    # libpq has no time limit for an answer, and neither driver adds one.
    waits_for_ever = True
    begin = "BEGIN ISOLATION LEVEL READ COMMITTED"

    def choose_driver(self, url: sa.URL) -> sa.URL:
        _, plus, driver = url.drivername.partition("+")
        return super().choose_driver(url.set(drivername=f"postgresql{plus}{driver}"))

    def begin_with(self, settings: BrokerSettings) -> str:
        # In the same round trip; of the transaction, so that a transaction-pooling proxy does not mind.
        return (
            f"{self.begin}; SET LOCAL lock_timeout = {max(1, to_ms(settings.lock_timeout))}; "
            f"SET LOCAL idle_in_transaction_session_timeout = {max(1, to_ms(settings.answer_timeout))}"
        )

    def engine_options(self, url: sa.URL, settings: BrokerSettings, answer_timeout: float) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            # libpq takes whole seconds, at least 2 (PostgreSQL manual, connect_timeout).
            "connect_timeout": max(2, math.ceil(settings.connect_timeout)),
            # A peer that vanished without a word is noticed within half a minute.
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": min(30_000, to_ms(answer_timeout)),
        }
        arguments = {name: value for name, value in arguments.items() if name not in url.query}
        if url.drivername.endswith("+psycopg"):
            # Server-side prepared statements break behind a transaction-pooling proxy.
            arguments["prepare_threshold"] = None
        return {"connect_args": arguments}

    def check_server(self, conn: sa.Connection, settings: BrokerSettings) -> None:
        number = int(conn.exec_driver_sql("SHOW server_version_num").scalar_one())
        if number < OLDEST:
            found = conn.exec_driver_sql("SHOW server_version").scalar_one()
            raise ConfigError(f"PostgreSQL {found} is too old: taskgate needs {OLDEST // 10000} or newer")

    def server_now(self) -> sa.ColumnElement[int]:
        return sa.cast(sa.func.floor(sa.extract("epoch", sa.func.statement_timestamp()) * 1000), sa.BigInteger)

    def partial_index(self, where: str) -> Mapping[str, Any]:
        return {"postgresql_where": sa.text(where)}

    def classify(self, error: sa.exc.DBAPIError) -> Verdict:
        state = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
        if state in _AGAIN:
            return Verdict.AGAIN
        if state in _BUSY:
            return Verdict.BUSY
        text = str(error.orig)
        if state in _FATAL or "number of parameters must be" in text:
            return Verdict.FATAL
        if "during recovery" in text:  # feature_not_supported, but of a standby: it may be promoted
            return Verdict.GONE
        if state in _GONE or (state or "").startswith(_GONE_CLASSES):
            return Verdict.GONE
        # Without a state the server did not answer: refused, cut, timed out.
        if error.connection_invalidated or (state is None and isinstance(error, sa.exc.OperationalError)):
            return _connect_verdict(str(error.orig))
        return Verdict.FATAL

    def lost(self, error: sa.exc.DBAPIError) -> bool:
        state = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
        return bool(error.connection_invalidated) or (state or "08").startswith(("08", "57P"))

    def transaction_mark(self) -> sa.ColumnElement[int] | None:
        return sa.func.txid_current(type_=sa.BigInteger)

    def committed(self, conn: sa.Connection, mark: int) -> bool | None:
        status = conn.execute(sa.select(sa.func.txid_status(sa.cast(mark, sa.BigInteger)))).scalar()
        return {"committed": True, "aborted": False}.get(str(status))

    def keep_short(self, conn: sa.Connection, silence: float, wait: float) -> None:
        conn.exec_driver_sql(
            f"SET LOCAL idle_in_transaction_session_timeout = {max(1, to_ms(silence))}; "
            f"SET LOCAL lock_timeout = {max(1, to_ms(wait))}"
        )

    def upsert(self, insert: Any, **how: Any) -> sa.Insert:
        upsert = super().upsert(insert, **how)
        # A driver's row count is not kept for an INSERT; a row that was stored is returned.
        return upsert if how.get("where") is None else upsert.returning(*how["keys"])

    def took_effect(self, result: sa.CursorResult[Any]) -> bool:
        return result.first() is not None

    def notification(self, channel: sa.ColumnElement[str], text: sa.ColumnElement[str]) -> sa.Select[Any]:
        return sa.select(self.telling(channel, text))

    def telling(self, channel: sa.ColumnElement[str], text: sa.ColumnElement[str]) -> sa.ColumnElement[Any]:
        return sa.func.pg_notify(channel, text)

    def listen(self, conn: sa.Connection, channel: str) -> None:
        conn.exec_driver_sql(f"LISTEN {conn.dialect.identifier_preparer.quote(channel)}")

    def descriptor(self, connection: DBAPIConnection) -> int:
        number: int = connection.fileno()
        return number

    def heard(self, connection: DBAPIConnection) -> list[str]:
        driver: Any = connection
        try:
            if hasattr(driver, "pgconn"):
                driver.pgconn.consume_input()
                texts = []
                while (notification := driver.pgconn.notifies()) is not None:
                    texts.append(bytes(notification.extra).decode())
                return texts
            driver.poll()
            texts = [notification.payload for notification in driver.notifies]
            driver.notifies.clear()
        except Exception as error:
            # Each driver has its own class for it, and none of them is imported here.
            raise StoreUnavailable(f"the connection that listens for new work is gone: {error}") from error
        return texts

    @contextmanager
    def schema_lock(self, conn: sa.Connection, name: str) -> Iterator[None]:
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        # Of the transaction, not the session: works behind a transaction-pooling proxy too.
        conn.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.cast(key, sa.BigInteger))))
        yield


def _connect_verdict(text: str) -> Verdict:
    """libpq reports what the server says during start-up as text only: tell what waiting can't mend."""
    hopeless = ("password authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied")
    return Verdict.FATAL if any(part in text for part in hopeless) else Verdict.GONE
