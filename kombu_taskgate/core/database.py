"""The only way to the database: connections, transactions, retries, and what an error means.

Connections are in autocommit mode; a transaction is begun by name. A broken transaction is run again as a
whole, so what runs in one must have no other effects. After a fork the child forgets the parent's
connections without closing them (the parent still uses those sockets) and opens its own; where even that is
not safe, connections are closed before the fork.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import Enum
from functools import partial
from typing import Any, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.pool import QueuePool

from .dialects.base import Dialect, Verdict
from .errors import ConfigError, StoreBusy, StoreUnavailable, TaskgateError
from .forkgate import ForkGate, Forks
from .patience import Patience, Waiting
from .quick import QuickConnection, Repertory
from .settings import BrokerSettings
from .urls import shown

logger = logging.getLogger("kombu_taskgate.database")
T = TypeVar("T")

#: What tells whether a transaction whose COMMIT was cut off took effect.
Confirm = Callable[[sa.Connection, T], "bool | None"]

#: How often a transaction is run again after a deadlock or a taken unique key.
MAX_AGAIN = 50
#: How often it is begun when its COMMIT is cut off each time.
MAX_UNKNOWN = 3
#: Longest wait in seconds for a statement that changes tables.
SCHEMA_TIMEOUT = 3600.0
#: Engines inherited over a fork, kept so that nothing closes the connections the parent uses.
_inherited: list[sa.Engine] = []
_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_forks = Forks()


class InjectedDeadlock(Exception):
    """Raised by a test's fault hook: treated as the database's word that it broke a deadlock."""


class InjectedDisconnect(Exception):
    """Raised by a test's fault hook: treated as a connection that was cut."""


class Use(Enum):
    """What a connection is for; each use has a pool of its own."""

    WORK = "work"
    #: Renewing leases must never wait for a free connection.
    RENEWAL = "renewal"
    #: Listening, or asking whether anything has changed: what only makes sense on one and the same connection.
    ASIDE = "aside"
    #: Listening for results, which a process does that waits for some.
    RESULTS = "results"
    #: Creating and changing tables, which may take long.
    SCHEMA = "schema"


class _CommitUnknownError(Exception):
    """The connection was lost in COMMIT: nobody here knows whether it took effect."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


class Database:
    """One database, as one process uses it.

    Args:
        settings: pool sizes and time limits.
        dialect: what kind of database it is.
        url: SQLAlchemy URL with a driver.
    """

    def __init__(self, settings: BrokerSettings, dialect: Dialect, url: sa.URL) -> None:
        self.settings = settings
        self.dialect = dialect
        self.url = url
        #: Test hook, called with "before_commit" and "after_commit" around each commit.
        self.fault: Callable[[str], None] | None = None
        #: Called when a connection turned out to be dead: others that were opened with it may be as well.
        self.on_lost: Callable[[], None] = lambda: None
        self._begin = dialect.begin_with(settings)
        self._gate = None if dialect.survives_fork else ForkGate(_forks)
        #: Of dialects whose drivers would wait for ever.
        self._patience = Patience(dialect.descriptor) if dialect.waits_for_ever else None
        self._repertory: Repertory | None = None
        self._reset()
        _databases.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[Use, sa.Engine] = {}

    def before_fork(self) -> None:
        """Close all connections where a process that has some must not fork."""
        if self._gate is not None and self._gate.empty():
            self.dispose()

    def after_fork_in_child(self) -> None:
        """Forget the parent's connections without touching them."""
        _inherited.extend(self._engines.values())
        self._reset()

    @property
    def shown(self) -> str:
        """The URL without its passwords, for messages."""
        return shown(self.url)

    @property
    def engine(self) -> sa.Engine:
        """The engine of ordinary work: at most ``pool_size`` connections."""
        return self._engine(Use.WORK)

    def _engine(self, use: Use) -> sa.Engine:
        engine = self._engines.get(use)
        if engine is None:
            with self._lock:
                engine = self._engines.get(use)
                if engine is None:
                    engine = self._engines[use] = self._create(use)
        return engine

    def _limit(self, use: Use) -> float:
        """Longest wait for one answer, in seconds."""
        limits = {Use.RENEWAL: self.settings.renewal_timeout, Use.SCHEMA: SCHEMA_TIMEOUT}
        return limits.get(use, self.settings.answer_timeout)

    def _create(self, use: Use) -> sa.Engine:
        size = self.settings.pool_size if use is Use.WORK else 1
        options = self.dialect.engine_options(self.url, self.settings, self._limit(use))
        if "skip_autocommit_rollback" in inspect.signature(DefaultDialect.__init__).parameters:  # SQLAlchemy 2.0.43
            options["skip_autocommit_rollback"] = True
        patience = self._patience
        engine = sa.create_engine(
            self.url,
            isolation_level="AUTOCOMMIT",
            poolclass=QueuePool,
            # A burst opens connections up to pool_size; only half of them are kept when idle.
            pool_size=max(1, size // 2),
            max_overflow=size - max(1, size // 2),
            pool_timeout=self.settings.pool_timeout,
            # Every transaction here ends by name; a ROLLBACK at each return would cost a round trip.
            pool_reset_on_return=None,
            pool_use_lifo=True,
            hide_parameters=True,  # payloads are nobody's business in logs
            **options,
        )

        @sa.event.listens_for(engine, "connect")
        def prepare(connection: Any, record: object) -> None:
            if patience is not None:
                patience.connected(connection)
            self.dialect.on_connect(connection, self.settings)

        if patience is not None:

            @sa.event.listens_for(engine, "before_cursor_execute")
            def asked(*_: object) -> None:
                patience.asked()

        return engine

    def dispose(self) -> None:
        """Close the idle connections; the next use opens new ones."""
        for engine in list(self._engines.values()):
            engine.dispose()

    # -- running -----------------------------------------------------------------------------------

    def read(self, work: Callable[[sa.Connection], T], *, quick: bool = True) -> T:
        """Run one reading statement (or several that need not agree) outside a transaction.

        ``quick``: see :mod:`.quick`; not for what inspects the database.
        """
        return self._repeat(lambda: self._once(work, begin=None, use=Use.WORK, quick=quick), None)

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run one writing statement that is its own transaction, and that may be repeated: one round trip."""
        return self._repeat(lambda: self._once(work, begin=None, use=Use.WORK), None)

    def renew(self, work: Callable[[sa.Connection], T]) -> T:
        """Run statements, each a transaction of its own that may be repeated, on the connection kept for renewals."""
        return self._repeat(lambda: self._once(work, begin=None, use=Use.RENEWAL), None)

    def change_mark(self) -> object | None:
        """See :meth:`.dialects.base.Dialect.change_mark`; always asked on the same connection."""
        return self._repeat(lambda: self._once(self.dialect.change_mark, begin=None, use=Use.ASIDE), None)

    @contextmanager
    def aside(self, use: Use = Use.ASIDE) -> Iterator[sa.Connection]:
        """A connection for the block alone, which may leave it in any condition; it is closed at the end.

        Raises:
            StoreUnavailable, ConfigError: there is none to be had.
        """
        with self.translated(), self._limited(use):
            conn = self._engine(use).connect()
        try:
            yield conn
        finally:
            self._throw_away(conn)
            conn.close()

    @contextmanager
    def answered(self, conn: sa.Connection) -> Iterator[None]:
        """Let the block ask on a connection of :meth:`aside`; a question that gets no answer in time breaks it."""
        with self._limited(Use.ASIDE) as call:
            call.on(conn.connection.dbapi_connection)
            yield

    def _limited(self, use: Use) -> AbstractContextManager[Waiting]:
        return nullcontext(Waiting(0.0)) if self._patience is None else self._patience.limit(self._limit(use))

    def transaction(
        self,
        work: Callable[[sa.Connection], T],
        *,
        confirm: Confirm[T] | None = None,
        reserved: bool = False,
        schema: bool = False,
    ) -> T:
        """Run ``work`` in one transaction and return what it returns.

        Args:
            work: may run several times; must have no effect but through its connection.
            confirm: asked, when the connection broke in COMMIT, whether the transaction took effect. ``True``: it
                did; ``False``: it did not, or doing it again does no harm; ``None``: that can't be known.
            reserved: use the connection that is kept free for heartbeats.
            schema: it changes tables, which takes as long as it takes.

        Raises:
            StoreUnavailable: the database can't be reached or refuses; says when the outcome is unknown.
            ConfigError: it will never do this (rights, read-only file, wrong password, missing table).
        """
        use = Use.SCHEMA if schema else Use.RENEWAL if reserved else Use.WORK
        try:
            return self._repeat(lambda: self._once(work, begin=self._begin, use=use), confirm)
        finally:
            if schema:
                self._engine(use).dispose()

    def _repeat(self, attempt: Callable[[], T], confirm: Confirm[T] | None) -> T:
        began = time.monotonic()
        deadline = began + self.settings.busy_timeout
        again = 0
        dead = 0
        while True:
            try:
                return attempt()
            except _CommitUnknownError as unknown:
                self.on_lost()
                took_effect = None if confirm is None else self._took_effect(unknown, confirm)
                if took_effect:
                    return unknown.result  # type: ignore[no-any-return]  # a T, carried by the exception
                again += 1
                if took_effect is None or again >= MAX_UNKNOWN:
                    raise StoreUnavailable(
                        f"the connection to {self.shown} broke while a transaction was committed; "
                        "whether it took effect is unknown"
                    ) from unknown.__cause__
            except InjectedDeadlock:
                again += 1
            except sa.exc.TimeoutError as error:
                raise StoreUnavailable(
                    f"all {self.settings.pool_size} connections to {self.shown} stayed in use for "
                    f"{self.settings.pool_timeout:g} s: raise pool_size"
                ) from error
            except (InjectedDisconnect, sa.exc.DBAPIError) as error:
                verdict = self._verdict(error)
                if verdict is Verdict.AGAIN and again < MAX_AGAIN:
                    again += 1
                    time.sleep(random.uniform(0, min(0.1, 0.002 * again)))
                elif verdict is Verdict.BUSY and time.monotonic() < deadline:
                    time.sleep(random.uniform(0.001, 0.05))
                elif verdict is Verdict.GONE and _was_connected(error) and self._may_reconnect(error, dead, began):
                    # A pooled connection that the server has closed: nothing was committed, so use another.
                    dead += 1
                    self.on_lost()
                else:
                    raise self._translate(error, verdict) from error

    def _may_reconnect(self, error: BaseException, dead: int, began: float) -> bool:
        """Whether to try once more after so many dead connections: all of the pool may be, but none may take long.

        A server that lives and refuses, being full or read-only, is asked once more only.
        """
        in_time = time.monotonic() < began + self.settings.answer_timeout
        return not dead or (self._is_lost(error) and dead < self.settings.pool_size and in_time)

    def _took_effect(self, unknown: _CommitUnknownError, confirm: Confirm[T]) -> bool | None:
        """Ask the database, with a few reconnects, whether the commit that broke took effect."""
        pause = 0.05
        deadline = time.monotonic() + self.settings.answer_timeout
        for left in reversed(range(8)):
            last = not left or time.monotonic() >= deadline
            try:
                answer = self._once(lambda conn: confirm(conn, unknown.result), begin=None, use=Use.WORK)
                if answer is not None or last:
                    return answer
                time.sleep(pause)
            except (InjectedDisconnect, sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
                if last:
                    raise StoreUnavailable(
                        f"the connection to {self.shown} broke while a transaction was committed, and it can't be "
                        "reached to see whether it took effect"
                    ) from error
                time.sleep(pause)
            pause = min(1.0, pause * 2)
        raise AssertionError("unreachable")

    def _once(self, work: Callable[[sa.Connection], T], *, begin: str | None, use: Use, quick: bool = True) -> T:
        if self._gate is None:
            return self._attempt(work, begin=begin, use=use, quick=quick)
        with self._gate.inside():
            return self._attempt(work, begin=begin, use=use, quick=quick)

    def _attempt(self, work: Callable[[sa.Connection], T], *, begin: str | None, use: Use, quick: bool) -> T:
        with self._limited(use) as call, self._engine(use).connect() as conn:
            call.on(conn.connection.dbapi_connection)
            if not quick or use is Use.SCHEMA or conn.dialect.driver not in self.dialect.plain_drivers:
                return self._attempt_on(conn, conn.exec_driver_sql, work, conn, begin)
            quickly = QuickConnection(conn, self._repertory_of(conn), call.again, partial(self._as_raised, conn))
            try:
                # As much of a connection as is used where statements are executed again and again.
                return self._attempt_on(conn, quickly.say, work, cast("sa.Connection", quickly), begin)
            finally:
                quickly.end()

    def _attempt_on(
        self,
        conn: sa.Connection,
        say: Callable[[str], object],
        work: Callable[[sa.Connection], T],
        given: sa.Connection,
        begin: str | None,
    ) -> T:
        result: T
        if begin is None:
            try:
                return work(given)
            except BaseException as error:
                # Cut off in the middle of a query, say by a task's time limit, a connection can't be used again.
                if self._is_lost(error) or not isinstance(error, (sa.exc.DBAPIError, TaskgateError)):
                    self._throw_away(conn)
                raise
        committing = False
        try:
            say(begin)
            result = work(given)
            self._hook("before_commit")
            committing = True
            say("COMMIT")
            self._hook("after_commit")
        except BaseException as error:
            lost = self._is_lost(error)
            self._roll_back(conn, lost=lost or not isinstance(error, (sa.exc.DBAPIError, TaskgateError)))
            if committing and lost:
                raise _CommitUnknownError(result) from error
            raise
        return result

    def _repertory_of(self, conn: sa.Connection) -> Repertory:
        if self._repertory is None:
            self._repertory = Repertory(conn.dialect)
        return self._repertory

    def _as_raised(self, conn: sa.Connection, error: Exception) -> Exception:
        """What SQLAlchemy would raise for a driver's error."""
        driver: Any = conn.dialect.loaded_dbapi
        if not isinstance(error, driver.Error):
            return error
        gone = conn.dialect.is_disconnect(error, conn.connection.dbapi_connection, None)
        raised: Any = sa.exc.DBAPIError.instance(
            "", None, error, driver.Error, hide_parameters=True, connection_invalidated=gone, dialect=conn.dialect
        )
        return cast("Exception", raised)

    def _is_lost(self, error: BaseException) -> bool:
        if isinstance(error, sa.exc.DBAPIError):
            return self.dialect.lost(error)
        return isinstance(error, InjectedDisconnect)

    def _hook(self, point: str) -> None:
        if self.fault is not None:
            self.fault(point)

    def _roll_back(self, conn: sa.Connection, *, lost: bool) -> None:
        """End a broken transaction; a connection that can't even do that is thrown away."""
        if not lost and not conn.invalidated:
            with suppress(sa.exc.DBAPIError):
                conn.exec_driver_sql("ROLLBACK")
                return
        self._throw_away(conn)

    def _throw_away(self, conn: sa.Connection) -> None:
        with suppress(Exception):
            conn.invalidate()

    # -- errors ------------------------------------------------------------------------------------

    def _verdict(self, error: BaseException) -> Verdict:
        if isinstance(error, sa.exc.DBAPIError):
            return self.dialect.classify(error)
        return Verdict.GONE

    def _translate(self, error: BaseException, verdict: Verdict) -> Exception:
        said = " ".join(str(getattr(error, "orig", None) or error).split())
        if verdict is Verdict.FATAL:
            if isinstance(error, (sa.exc.DataError, sa.exc.IntegrityError)):
                return ConfigError(f"the database {self.shown} refused a value: {said}")
            return ConfigError(f"the database {self.shown} can't be used: {said}")
        if verdict is Verdict.GONE:
            return StoreUnavailable(f"the database {self.shown} is not available: {said}")
        return StoreBusy(
            f"the database {self.shown} stayed locked by others for {self.settings.busy_timeout:g} s: {said}"
        )

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turn driver errors of the block into this project's."""
        try:
            yield
        except sa.exc.DBAPIError as error:
            raise self._translate(error, self.dialect.classify(error)) from error


def _was_connected(error: BaseException) -> bool:
    """Whether a statement failed, and not the attempt to connect: that was not sent and is not retried here."""
    return isinstance(error, InjectedDisconnect) or getattr(error, "statement", None) is not None


def _before_fork() -> None:
    _forks.begin()
    for database in list(_databases):
        database.before_fork()


def _after_fork_in_child() -> None:
    _forks.reset()
    for database in list(_databases):
        database.after_fork_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_forks.end, after_in_child=_after_fork_in_child)
