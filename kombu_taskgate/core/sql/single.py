"""Publishing one execution that is ready now: what publishers do most, by the quickest way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPICursor

from ..model import NewTask
from ..quick import quick
from ..statements import Statements
from .publish import Stored, plain

#: Columns that get a value at each INSERT.
COLUMNS = (
    "queue", "rank_", "type", "task_id", "root_id", "parent_task_id", "group_id", "max_retry", "fail_fast", "payload",
    "expires_at",
)  # fmt: skip


class SinglePublish:
    """Stores one execution, and announces its queue in the same statement.

    Args:
        sql: the statements for its tables.
        dialect: of the engine whose connections are used.
        channel: where queues are announced; ``None`` where they are not.
    """

    def __init__(self, sql: Statements, dialect: sa.Dialect, channel: str | None) -> None:
        self._sql = sql
        self._channel = channel
        self._store = quick(sql.store_ready, dialect, COLUMNS)
        self._store_and_tell = None if channel is None else quick(sql.store_ready_and_tell, dialect, COLUMNS)

    def values(self, task: NewTask) -> Mapping[str, Any]:
        """The parameters of :meth:`store`."""
        return self._sql.time(expires_at=task.expires_at, **plain(task))

    def store(self, cursor: DBAPICursor, values: Mapping[str, Any], text: str | None) -> Stored:
        """Run the statement.

        Args:
            cursor: of the driver, in a transaction.
            values: from :meth:`values`.
            text: what is announced; ``None``: nothing.
        """
        if text is not None and self._store_and_tell is not None:
            row = self._store_and_tell.run(cursor, {**values, "p_channel": self._channel, "p_text": text})
        else:
            row = self._store.run(cursor, values)
        if row is None:
            key: Any = cursor.lastrowid
            return Stored([key], None)
        return Stored([row[0]], row[1])
