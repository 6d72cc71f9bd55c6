"""Looking for work without a transaction: what an idle consumer does most of the time."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence

import sqlalchemy as sa

from ..database import Database
from ..schema import Tables
from ..statements import Statements
from .claim import queue_parameters
from .work import chunks

#: Longest time in seconds for which "nothing has changed" is believed: the machine's clock may have been set.
BELIEVED = 30.0
#: Sets of queues whose last look is remembered.
_MOST = 64


def channel_name(tables: Tables) -> str:
    """The channel on which those who share these tables notify each other."""
    place = f"{tables.metadata.schema or ''}.{tables.prefix}"
    return f"taskgate_{hashlib.sha256(place.encode()).hexdigest()[:20]}"


class Looks:
    """Asks whether there is anything to claim, and when something will be.

    Where the database can say that nobody has written since (see :meth:`..dialects.base.Dialect.change_mark`), a look
    that found nothing need not be repeated until the next delayed execution is due.

    Args:
        database: where.
        sql: the statements for its tables.
        probes: whether the database can and should be asked that.
    """

    def __init__(self, database: Database, sql: Statements, *, probes: bool) -> None:
        self._database = database
        self._sql = sql
        self._probes = probes
        #: Monotonic time at which the first delayed execution is due, as the last look showed; ``None``: not known.
        self._due_at: float | None = None
        #: By queues: what the mark was before a look that found nothing, and until when that is believed.
        self._nothing: dict[frozenset[str], tuple[object, float]] = {}

    def due_in(self) -> float | None:
        """See :meth:`..broker.Broker.due_in`."""
        due_at = self._due_at
        return None if due_at is None else max(0.0, due_at - time.monotonic())

    def forget(self) -> None:
        """Somebody claims without looking: a claim tells neither what is delayed nor what others have locked."""
        self._due_at = None

    def anything(self, queues: Sequence[str]) -> bool:
        """Whether a claim from these queues may find something."""
        if not self._probes:
            return self._look(queues)
        name = frozenset(queues)
        mark = self._database.change_mark()
        known, until = self._nothing.get(name, (None, 0.0))
        due_at = self._due_at
        if due_at is not None and mark == known and time.monotonic() < min(until, due_at):
            return False
        if self._look(queues):
            return True
        if len(self._nothing) >= _MOST:
            self._nothing.clear()
        self._nothing[name] = (mark, time.monotonic() + BELIEVED)
        return False

    def _look(self, queues: Sequence[str]) -> bool:
        def look(conn: sa.Connection) -> bool:
            for part in chunks(queues):
                rows = conn.execute(self._sql.anything(len(part)), self._sql.time(**queue_parameters(part))).all()
                waits = [row.wait for row in rows if row.place < 0]
                self._due_at = time.monotonic() + waits[0] / 1000 if waits else math.inf
                if any(row.place >= 0 or row.wait <= 0 for row in rows):
                    return True
            return False

        return self._database.read(look)
