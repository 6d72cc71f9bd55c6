"""Statements that are executed again and again, run on the driver's own cursor.

SQLAlchemy writes them, once. What it does for every execution besides (contexts, events, results) costs more time than
the database's own work, and holds up the threads of a worker; where values are numbers, texts and bytes, none of it is
needed. What is executed for the first time, or with many sets of parameters, goes the usual way.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPICursor

T = TypeVar("T")

#: Statements that are remembered; those that were executed once are forgotten first.
MOST = 500
#: Called with the engine and the text of each statement that is run this way: for tests and benchmarks, which can't use
#: SQLAlchemy's events for it.
observers: list[Callable[[sa.Engine, str], object]] = []


class Scalars(list[T], Generic[T]):
    """The first column of some rows."""

    def all(self) -> list[T]:
        """All of them."""
        return self


class Rows:
    """What a statement has returned; as much of SQLAlchemy's ``CursorResult`` as is used here."""

    __slots__ = ("_rows", "lastrowid", "returns_rows", "rowcount")

    def __init__(self, rows: list[Any], rowcount: int, lastrowid: Any, *, returns_rows: bool) -> None:
        self._rows = rows
        self.rowcount = rowcount
        self.lastrowid = lastrowid
        self.returns_rows = returns_rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def all(self) -> list[Any]:
        """All rows."""
        return self._rows

    def first(self) -> Any:
        """The first row, or ``None``."""
        return self._rows[0] if self._rows else None

    def one(self) -> Any:
        """The only row; raises as SQLAlchemy if there is none, or another."""
        if not self._rows:
            raise sa.exc.NoResultFound("No row was found when one was required")
        if len(self._rows) > 1:
            raise sa.exc.MultipleResultsFound("Multiple rows were found when exactly one was required")
        return self._rows[0]

    def scalars(self) -> Scalars[Any]:
        """The first column."""
        return Scalars(row[0] for row in self._rows)

    def scalar(self) -> Any:
        """The first column of the first row, or ``None``."""
        return self._rows[0][0] if self._rows else None

    def scalar_one(self) -> Any:
        """The first column of the only row."""
        return self.one()[0]

    @property
    def inserted_primary_key(self) -> tuple[Any]:
        """The key that the database has given to a row."""
        return (self.lastrowid,)


@dataclass(slots=True)
class Quick:
    """A statement compiled for certain parameters: their names, and how long its lists are."""

    text: str
    #: The values that are always the same, by name.
    fixed: Mapping[str, Any]
    #: By list: the names of its elements.
    lists: Mapping[str, Sequence[str]]
    #: What the driver wants done to values, by name.
    processors: Mapping[str, Callable[[Any], Any]]
    #: Names of the parameters where the driver wants them by place.
    places: Sequence[str] | None
    #: Class of its rows, once there were some.
    row: Callable[[Any], Any] | None = field(default=None)

    def run(self, cursor: DBAPICursor, values: Mapping[str, Any]) -> None:
        """Execute it; the values are bound by the driver.

        Args:
            cursor: of the driver.
            values: by name; only numbers, texts, bytes and ``None``, and lists (of pairs) of them.
        """
        bound = {**self.fixed, **values}
        for name, names in self.lists.items():
            bound.update(zip(names, _flat(bound.pop(name), len(names)), strict=True))
        for name, process in self.processors.items():
            bound[name] = process(bound[name])
        cursor.execute(self.text, bound if self.places is None else tuple([bound[name] for name in self.places]))

    def rows(self, cursor: DBAPICursor) -> Rows:
        """What the cursor has got."""
        # Not every driver has it.
        lastrowid = getattr(cursor, "lastrowid", None)
        if not cursor.description:
            return Rows([], cursor.rowcount, lastrowid, returns_rows=False)
        if self.row is None:
            self.row = _row_class([column[0] for column in cursor.description])
        found = list(map(self.row, cursor.fetchall()))
        return Rows(found, cursor.rowcount, lastrowid, returns_rows=True)


def _row_class(names: Sequence[str]) -> Callable[[Any], Any]:
    base = namedtuple("Row", names, rename=True)  # type: ignore[misc]  # noqa: PYI024  # known at run time only
    made: Any = type("Row", (base,), {"__slots__": (), "_mapping": property(base._asdict)})
    make: Callable[[Any], Any] = made._make
    return make


def _flat(values: Collection[Any], length: int) -> list[Any]:
    """The elements of a list, the last repeated until there are so many: for membership that makes no difference."""
    flat: list[Any] = list(values)
    width = 1
    if flat and isinstance(flat[0], tuple):
        width = len(flat[0])
        flat = [part for element in flat for part in element]
    return flat + flat[-width:] * ((length - len(flat)) // width)


def _padded(number: int) -> int:
    """The length of a list is rounded up, so that there are few texts of a statement."""
    return number if number <= 2 else 1 << (number - 1).bit_length()


def compile_quick(statement: Any, dialect: sa.Dialect, values: Mapping[str, Any]) -> Quick:
    """Compile a statement for values with these names, and lists of these lengths.

    Args:
        statement: of Core.
        dialect: of the engine whose connections it will run on.
        values: by name.
    """
    compiled = statement.compile(dialect=dialect, column_keys=sorted(values))
    lists = {name: values[name] for name, bind in compiled.binds.items() if bind.expanding and name in values}
    sample = dict(values)
    for name, value in lists.items():
        known = list(value)
        sample[name] = known + known[-1:] * (_padded(len(known)) - len(known))
    state = compiled.construct_expanded_state(sample)
    expansion = {name: list(state.parameter_expansion.get(name, ())) for name in lists}
    elements = {element for names in expansion.values() for element in names}
    return Quick(
        text=state.statement,
        fixed={name: value for name, value in state.parameters.items() if not (name in values or name in elements)},
        lists=expansion,
        processors={
            name: process
            for name, process in state.processors.items()
            if name in state.parameters and callable(process)
        },
        places=list(state.positiontup) if compiled.positional else None,
    )


class _Lasting:
    """A statement that has been executed before."""

    __slots__ = ("statement", "used", "variants")

    def __init__(self, statement: Any) -> None:
        self.statement = statement
        self.used = False
        self.variants: dict[Any, Quick] = {}


class Repertory:
    """The statements of one database that are executed again and again. Safe to use from any thread.

    Args:
        dialect: of the engines.
    """

    def __init__(self, dialect: sa.Dialect) -> None:
        self._dialect = dialect
        self._known: dict[int, _Lasting] = {}

    def find(self, statement: Any, values: Mapping[str, Any]) -> Quick | None:
        """The statement for these values; ``None`` when it is executed for the first time."""
        lasting = self._known.get(id(statement))
        if lasting is None:
            # The reference keeps its id from being given to another.
            self._remember(statement)
            return None
        lasting.used = True
        key = tuple([_shape(name, value) for name, value in values.items()])
        found = lasting.variants.get(key)
        if found is None:
            found = lasting.variants[key] = compile_quick(statement, self._dialect, values)
        return found

    def _remember(self, statement: Any) -> None:
        if len(self._known) >= MOST:
            self._known = {key: lasting for key, lasting in list(self._known.items()) if lasting.used}
            if len(self._known) >= MOST:
                self._known = {}
        self._known[id(statement)] = _Lasting(statement)


def _shape(name: str, value: Any) -> Any:
    return (name, _padded(len(value))) if isinstance(value, (list, set, frozenset, tuple)) else name


class QuickConnection:
    """A connection of SQLAlchemy that runs on the driver's cursor what has been executed before.

    Args:
        conn: the connection; it is asked for everything else.
        repertory: what has been executed before.
        asked: called before a question is sent to the server.
        translate: makes of a driver's error what SQLAlchemy would raise.
    """

    __slots__ = ("_asked", "_conn", "_cursor", "_repertory", "_translate")

    def __init__(
        self,
        conn: sa.Connection,
        repertory: Repertory,
        asked: Callable[[], object],
        translate: Callable[[Exception], Exception],
    ) -> None:
        self._conn = conn
        self._repertory = repertory
        self._asked = asked
        self._translate = translate
        self._cursor: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conn, name)

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        """As ``sa.Connection.execute``."""
        values = {} if parameters is None else parameters
        quick = self._repertory.find(statement, values) if isinstance(values, Mapping) else None
        if quick is None:
            return self._conn.execute(statement, parameters)
        try:
            cursor = self._ask(quick.text)
            quick.run(cursor, values)
            return quick.rows(cursor)
        except Exception as error:
            known = self._translate(error)
            if known is error:
                raise
            raise known from error

    def say(self, text: str) -> None:
        """Run a statement that has no parameters and returns nothing: BEGIN and COMMIT."""
        try:
            self._ask(text).execute(text)
        except Exception as error:
            known = self._translate(error)
            if known is error:
                raise
            raise known from error

    def _ask(self, text: str) -> Any:
        """The cursor on which this text is going to be executed."""
        self._asked()
        for observer in observers:
            observer(self._conn.engine, text)
        if self._cursor is None:
            self._cursor = self._conn.connection.cursor()
        return self._cursor

    def end(self) -> None:
        """Close the cursor, whatever has become of its connection."""
        if self._cursor is not None:
            with suppress(Exception):
                self._cursor.close()
