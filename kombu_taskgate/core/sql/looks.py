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
        #: By queues: until when (monotonic seconds) they stay empty, by a look that found nothing.
        self._empty: dict[frozenset[str], float] = {}
        #: By queues: what the mark was before that look, and until when that is believed.
        self._nothing: dict[frozenset[str], tuple[object, float]] = {}

    def due_in(self, queues: Sequence[str]) -> float:
        """Seconds for which there will be nothing, if nobody adds it; 0 when that is not known."""
        return max(0.0, self._empty.get(frozenset(queues), 0.0) - time.monotonic())

    def forget(self, queues: Sequence[str]) -> None:
        """Something else than a look has been done with these queues."""
        self._empty.pop(frozenset(queues), None)

    def anything(self, queues: Sequence[str]) -> bool:
        """Whether a claim from these queues may find something."""
        name = frozenset(queues)
        mark = self._database.change_mark() if self._probes else None
        if mark is not None:
            known, until = self._nothing.get(name, (None, 0.0))
            if mark == known and time.monotonic() < min(until, self._empty.get(name, 0.0)):
                return False
        due_at = self._look(queues)
        if due_at is None:
            self.forget(queues)
            return True
        if len(self._empty) >= _MOST:
            self._empty.clear()
            self._nothing.clear()
        self._empty[name] = due_at
        self._nothing[name] = (mark, time.monotonic() + BELIEVED)
        return False

    def expired_heads(self, queues: Sequence[str]) -> list[str]:
        """Those of the queues that begin with what nobody wants any more."""

        def look(conn: sa.Connection) -> list[str]:
            found: list[str] = []
            for part in chunks(queues):
                parameters = self._sql.time(**queue_parameters(part))
                found.extend(
                    part[place] for place in conn.execute(self._sql.expired_heads(len(part)), parameters).scalars()
                )
            return found

        return self._database.read(look) if queues else []

    def _look(self, queues: Sequence[str]) -> float | None:
        """When (monotonic seconds) the first delayed execution is due; ``None`` when there is something now."""

        def look(conn: sa.Connection) -> float | None:
            due_at = math.inf
            for part in chunks(queues):
                rows = conn.execute(self._sql.anything(len(part)), self._sql.time(**queue_parameters(part))).all()
                for row in rows:
                    if row.place >= 0 or row.wait <= 0:
                        return None
                    due_at = min(due_at, time.monotonic() + row.wait / 1000)
            return due_at

        return self._database.read(look)
