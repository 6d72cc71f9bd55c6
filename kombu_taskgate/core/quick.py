"""Statements of the hot path, run on the driver's own cursor.

SQLAlchemy writes them, once. What it does for every execution besides (contexts, events, results) costs a publisher
more time than the database's own work, and a statement whose parameters are numbers, texts and bytes needs none of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPICursor


@dataclass(frozen=True, slots=True)
class Quick:
    """A compiled statement."""

    text: str
    #: The values that are always the same, by name.
    fixed: Mapping[str, Any]
    #: Names of the parameters where the driver wants them by place.
    places: tuple[str, ...] | None

    def run(self, cursor: DBAPICursor, values: Mapping[str, Any]) -> Any:
        """Execute it; the values are bound by the driver.

        Args:
            cursor: of the driver.
            values: by name; only numbers, texts, bytes and ``None``.

        Returns:
            The first row; ``None`` where the statement returns none.
        """
        values = {**self.fixed, **values}
        cursor.execute(self.text, values if self.places is None else tuple(values[name] for name in self.places))
        return None if cursor.description is None else cursor.fetchone()


def quick(statement: Any, dialect: sa.Dialect, columns: Collection[str] = ()) -> Quick:
    """Compile a statement.

    Args:
        statement: of Core, without lists of values.
        dialect: of the engine whose connections it will run on.
        columns: of an INSERT: those that get a value at each execution.
    """
    compiled = statement.compile(dialect=dialect, column_keys=list(columns) or None)
    fixed = {name: bind.value for name, bind in compiled.binds.items() if not (bind.required or name in columns)}
    return Quick(str(compiled), fixed, tuple(compiled.positiontup) if compiled.positional else None)
