"""What one database must say about itself. Adding a database adds one file with a subclass of Dialect."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPIConnection

from ..errors import ConfigError
from ..settings import BrokerSettings


class Verdict(Enum):
    """What a driver's error means for the transaction it broke."""

    #: Deadlock, serialization failure, a unique key somebody else has just taken: run it again.
    AGAIN = "again"
    #: A lock was waited for in vain: run it again, with a pause, while busy_timeout lasts.
    BUSY = "busy"
    #: The connection or the server is gone, or it refuses to work just now.
    GONE = "gone"
    #: The database will never take this; a person has to change something.
    FATAL = "fatal"


class Dialect:
    """One kind of database."""

    #: URL names it serves.
    backends: ClassVar[tuple[str, ...]]
    #: Drivers in order of preference: SQLAlchemy's name and the module to look for.
    drivers: ClassVar[tuple[tuple[str, str], ...]]
    #: Those whose values need nothing done to them: numbers, texts and bytes come as such, and go as such.
    plain_drivers: ClassVar[tuple[str, ...]] = ()
    #: What to install when none of the drivers is there.
    install: ClassVar[str]
    #: Statement that begins a transaction that is going to write. The pool's connections are in autocommit
    #: mode, so that a single statement costs one round trip.
    begin: ClassVar[str] = "BEGIN"
    #: Whether a process may fork while it has connections. If not, they are closed before.
    survives_fork: ClassVar[bool] = True
    #: Whether a driver of it waits for an answer without a limit; then :meth:`descriptor` tells what to shut down.
    waits_for_ever: ClassVar[bool] = False
    #: Whether SELECT … FOR UPDATE SKIP LOCKED means something; otherwise ``begin`` must exclude writers.
    skip_locked: ClassVar[bool] = True
    #: Whether it can tell other connections of new work by itself: then ``notification`` and the methods that hear.
    notifies: ClassVar[bool] = False
    #: Longest pause in seconds between two looks where :meth:`change_mark` makes a look all but free.
    probe_every: ClassVar[float | None] = None
    #: Words before a statement that make the database show its plan.
    explain_words: ClassVar[str] = "EXPLAIN"
    #: Types of a growing id, of bytes and of text without a practical limit.
    id_type: ClassVar[sa.types.TypeEngine[int]] = sa.BigInteger()
    blob_type: ClassVar[sa.types.TypeEngine[bytes]] = sa.LargeBinary()
    text_type: ClassVar[sa.types.TypeEngine[str]] = sa.Text()
    #: Table options without which the id of a deleted row could be given again.
    never_reuse_ids: ClassVar[Mapping[str, Any]] = {}

    def choose_driver(self, url: sa.URL) -> sa.URL:
        """Return the URL with a driver in it.

        Raises:
            ConfigError: no driver, or not the one the URL names, is installed.
        """
        backend, _, named = url.drivername.partition("+")
        for driver, module in self.drivers:
            if named in ("", driver) and importlib.util.find_spec(module) is not None:
                return url.set(drivername=f"{backend}+{driver}")
        known = [driver for driver, _ in self.drivers]
        if named and named not in known:
            raise ConfigError(f"{backend} driver {named!r} is not supported: use one of {', '.join(known)}")
        missing = f"driver {named!r} is" if named else f"a driver ({' or '.join(known)}) is"
        raise ConfigError(f"{missing} not installed for {backend}: {self.install}")

    def begin_with(self, settings: BrokerSettings) -> str:
        """What begins a writing transaction.

        Its waits for locks end after ``busy_timeout``. Where the server can, it ends it when the client, which may be
        frozen, says nothing for ``answer_timeout``: others may wait for what it has locked.
        """
        return self.begin

    def engine_options(self, url: sa.URL, settings: BrokerSettings, answer_timeout: float) -> dict[str, Any]:
        """Keyword arguments for ``create_engine``, ``connect_args`` among them.

        ``answer_timeout``: longest wait in seconds for an answer on its connections, where the driver can limit it.
        """
        raise NotImplementedError

    def on_connect(self, connection: DBAPIConnection, settings: BrokerSettings) -> None:
        """Prepare a fresh driver connection."""

    def check_url(self, url: sa.URL) -> None:
        """Raise ConfigError for a URL that can't be right."""

    def check_server(self, conn: sa.Connection, settings: BrokerSettings) -> None:
        """Raise ConfigError when the server is too old or can't be written to."""

    def max_payload(self, conn: sa.Connection) -> int | None:
        """Largest value in bytes that one statement can carry; ``None`` when the server sets no limit."""
        return None

    def server_now(self) -> sa.ColumnElement[int]:
        """The server's time at the statement (not the transaction), in milliseconds since the epoch."""
        raise NotImplementedError

    def partial_index(self, where: str) -> Mapping[str, Any]:
        """Keyword arguments that make an ``Index`` hold only some rows; none where that does not exist."""
        return {}

    def classify(self, error: sa.exc.DBAPIError) -> Verdict:
        """What the error means."""
        raise NotImplementedError

    def lost(self, error: sa.exc.DBAPIError) -> bool:
        """Whether the connection broke, so that nobody knows what became of the statement."""
        return bool(error.connection_invalidated)

    def transaction_mark(self) -> sa.ColumnElement[int] | None:
        """What names the running transaction, for :meth:`committed`; ``None`` where the database can't tell."""
        return None

    def committed(self, conn: sa.Connection, mark: int) -> bool | None:
        """Whether the transaction of that mark was committed; ``None``: not known (yet)."""
        return None

    def insert_or_ignore(self, table: sa.Table) -> sa.Insert:
        """An INSERT that does nothing when the primary key exists."""
        return self.ignore_known(self.insert(table), list(table.primary_key.columns))

    def insert(self, table: sa.Table) -> Any:
        """An INSERT that :meth:`upsert` and :meth:`ignore_known` can extend."""
        raise NotImplementedError

    def inserted(self, insert: Any, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
        """Within an upsert: what would have been inserted into the column."""
        raise NotImplementedError

    def upsert(
        self,
        insert: Any,
        *,
        keys: Sequence[sa.Column[Any]],
        values: Mapping[str, Any],
        where: sa.ColumnElement[bool] | None = None,
        outcome: sa.Column[Any] | None = None,
    ) -> sa.Insert:
        """Let an INSERT change the row that is there.

        Args:
            insert: from :meth:`insert`.
            keys: what is unique.
            values: by column, what it becomes.
            where: only if this is true of the row that is there.
            outcome: a small number of the table that may be used to find that out.
        """
        raise NotImplementedError

    def ignore_known(self, insert: Any, keys: Sequence[sa.Column[Any]]) -> sa.Insert:
        """Let an INSERT do nothing where the row is there."""
        raise NotImplementedError

    def took_effect(self, result: sa.CursorResult[Any]) -> bool:
        """Whether an upsert with a condition has stored something."""
        return result.rowcount > 0

    def telling(self, channel: sa.ColumnElement[str], text: sa.ColumnElement[str]) -> sa.ColumnElement[Any]:
        """An expression that sends a text to those who listen to the channel, when the transaction commits."""
        raise NotImplementedError

    def change_mark(self, conn: sa.Connection) -> object | None:
        """What differs from the last answer on this connection once others have committed something.

        ``None``: it can't be told more cheaply than by looking.
        """
        return None

    def keep_short(self, conn: sa.Connection, silence: float, wait: float) -> None:
        """Bound the running transaction, for whose locks others must not wait long.

        Args:
            conn: its connection.
            silence: the server ends it when its client, which may be frozen, says nothing for so many seconds.
            wait: it waits for locks of others for so many seconds at a stretch. What it has locked itself is free
                before it tries again.
        """
        raise NotImplementedError

    def notification(self, channel: sa.ColumnElement[str], text: sa.ColumnElement[str]) -> sa.Select[Any]:
        """Send a text to those who listen to the channel, when the transaction commits."""
        raise NotImplementedError

    def listen(self, conn: sa.Connection, channel: str) -> None:
        """Have the connection notified from now on."""
        raise NotImplementedError

    def descriptor(self, connection: DBAPIConnection) -> int:
        """The file descriptor of its socket, which is readable when a notification has arrived."""
        raise NotImplementedError

    def heard(self, connection: DBAPIConnection) -> list[str]:
        """The texts that have arrived since; does not wait.

        Raises:
            StoreUnavailable: the connection is gone.
        """
        raise NotImplementedError

    @contextmanager
    def schema_lock(self, conn: sa.Connection, name: str) -> Iterator[None]:
        """Exclude every other process that creates or migrates tables. Entered inside a transaction."""
        raise NotImplementedError
        yield  # type: ignore[unreachable]  # makes it a generator, as its subclasses' are

    def table_options(self, conn: sa.Connection) -> Mapping[str, Any]:
        """Keyword arguments for every ``Table``."""
        return {}

    def explain(self, conn: sa.Connection, statement: sa.Executable, parameters: Mapping[str, Any]) -> str:
        """The plan of a statement, as text."""
        compiled = statement.compile(  # type: ignore[attr-defined]  # Executable does not declare it
            conn, compile_kwargs={"render_postcompile": True}
        )
        rows = conn.exec_driver_sql(f"{self.explain_words} {compiled}", _positional(compiled, parameters))
        return "\n".join(" ".join(str(value) for value in row) for row in rows)


def _positional(compiled: Any, parameters: Mapping[str, Any]) -> Any:
    values = compiled.construct_params(parameters)
    return tuple(values[name] for name in compiled.positiontup) if compiled.positional else values
