"""``INSERT … ON CONFLICT``, which PostgreSQL has and SQLite has taken from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa


class OnConflict:
    """Mixin of dialects whose INSERT says itself what to do with a row that is there."""

    #: SQLAlchemy's INSERT of this dialect, which has ``on_conflict_do_update``.
    insert_of: ClassVar[Callable[[sa.Table], Any]]

    def insert(self, table: sa.Table) -> Any:
        return type(self).insert_of(table)

    def inserted(self, insert: Any, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
        return insert.excluded[column.name]  # type: ignore[no-any-return]  # of the insert, which differs by dialect

    def upsert(
        self,
        insert: Any,
        *,
        keys: Sequence[sa.Column[Any]],
        values: Mapping[str, Any],
        where: sa.ColumnElement[bool] | None = None,
        outcome: sa.Column[Any] | None = None,
    ) -> sa.Insert:
        return insert.on_conflict_do_update(index_elements=keys, set_=values, where=where)  # type: ignore[no-any-return]  # as above

    def ignore_known(self, insert: Any, keys: Sequence[sa.Column[Any]]) -> sa.Insert:
        return insert.on_conflict_do_nothing()  # type: ignore[no-any-return]  # as above
