"""The stored results of all processes, in tables."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa

from ..clock import to_ms
from ..database import Confirm, Database
from ..errors import TaskgateError
from ..listener import Listener
from ..notifier import RESULTS, ResultNotifier, listed, text_of
from ..result_statements import ResultStatements
from ..results import Finality, NewResult, Result, check, parent_ended
from ..settings import BrokerSettings, check_name, check_payload
from ..watch import Polling, Wake, Watch
from ..watchers import Watchers
from . import waits
from .work import Work, chunks, repeat

logger = logging.getLogger("kombu_taskgate.results")


class SqlResults:
    """See :class:`~kombu_taskgate.core.results.Results`.

    Args:
        database: where.
        sql: the statements for its tables.
        settings: of the broker.
        max_payload: largest payload in bytes.
        channel: on which results are told; ``None``: they are not.
        together: runs something in one of the broker's transactions.
    """

    def __init__(
        self,
        database: Database,
        sql: ResultStatements,
        settings: BrokerSettings,
        max_payload: int,
        channel: str | None,
        together: Callable[[Callable[[Work], bool], Confirm[bool] | None], bool],
    ) -> None:
        self._database = database
        self._sql = sql
        self._settings = settings
        self._max_payload = max_payload
        self._channel = channel
        self._together = together
        self._notifier = ResultNotifier()
        self._watchers = Watchers()
        self._listener: Listener | None = None
        if channel is not None:
            self._listener = Listener(database, channel, self._send, lambda: None, kind=RESULTS)

    # -- storing -------------------------------------------------------------------------------------

    def store(self, result: NewResult) -> bool:
        """See the protocol."""
        check(result, self._max_payload)
        text = None if self._channel is None else self._notifier.text(result.task_id)
        parameters = self._sql.time(**_parameters(result))
        if text is None:
            stored = self._database.write(lambda conn: self._store(conn, parameters))
        else:
            told = {**parameters, "p_channel": self._channel, "p_text": text}
            began = time.monotonic()
            stored = self._database.write(
                lambda conn: conn.execute(self._sql.store_result_and_tell, told).first() is not None
            )
            self._notifier.took(time.monotonic() - began)
        if stored:
            self._watchers.wake([result.task_id])
            return True
        return self._is_awaited(result) and self._store_awaited(result)

    def _is_awaited(self, result: NewResult) -> bool:
        """Whether it was not stored because executions may wait for it."""
        asked = {"p_task_id": result.task_id}
        return self._database.read(lambda conn: conn.execute(self._sql.waits.is_awaited, asked).first() is not None)

    def _store_awaited(self, result: NewResult) -> bool:
        """Store a result and wake who waits for it, or cancel them, in one transaction."""

        def part(work: Work) -> bool:
            # This locks it, so that a child that is being stored is seen by what follows, or sees this.
            done = work.run_timed(self._sql.store_awaited_result, **_parameters(result))
            if not self._database.dialect.took_effect(done):
                return False
            if result.finality is not Finality.OPEN:
                detail = parent_ended(result.task_id, result.status)
                waits.ended(work, result.task_id, detail, result.finality)
            return True

        def confirm(conn: sa.Connection, stored: bool) -> bool:
            row = conn.execute(self._sql.get_results, {"p_task_ids": [result.task_id]}).first()
            # Not the lease: what is said under none leaves the one that is there.
            mine = (result.status, result.payload)
            return not stored or (row is not None and (row.status, bytes(row.payload)) == mine)

        stored = self._together(part, confirm)
        if stored:
            self.tell([result.task_id])
        return stored

    def _store(self, conn: sa.Connection, parameters: dict[str, Any]) -> bool:
        return self._database.dialect.took_effect(conn.execute(self._sql.store_result, parameters))

    # -- asking --------------------------------------------------------------------------------------

    def get(self, task_ids: Collection[str], *, ended: bool = False) -> dict[str, Result]:
        """See the protocol."""
        statement = self._sql.get_ended_results if ended else self._sql.get_results
        names = list(task_ids)

        def look(conn: sa.Connection) -> dict[str, Result]:
            found = {}
            for part in chunks(names):
                for row in conn.execute(statement, {"p_task_ids": part}):
                    found[row.task_id] = to_result(row)
            return found

        return self._database.read(look) if names else {}

    def forget(self, task_ids: Collection[str]) -> int:
        """See the protocol."""
        return sum(
            self._database.write(partial(_delete, statement=statement, parameters={"p_task_ids": part}))
            for part in chunks(sorted(set(task_ids)))
            for statement in (self._sql.blank_results, self._sql.delete_results)
        )

    # -- groups --------------------------------------------------------------------------------------

    def save_group(self, group_id: str, payload: bytes, expires_in: float | None) -> None:
        """See the protocol."""
        check_name(group_id, "group id")
        check_payload(payload, f"group {group_id}", self._max_payload)
        parameters = self._sql.time(p_group_id=group_id, p_payload=payload, p_expires_in=_ms(expires_in))
        self._database.write(lambda conn: conn.execute(self._sql.save_group, parameters))

    def group(self, group_id: str) -> bytes | None:
        """See the protocol."""
        found = self._database.read(lambda conn: conn.execute(self._sql.get_group, {"p_group_id": group_id}).scalar())
        return None if found is None else bytes(found)

    def delete_group(self, group_id: str) -> None:
        """See the protocol."""
        self._database.write(lambda conn: conn.execute(self._sql.delete_group, {"p_group_ids": [group_id]}))

    # -- expiry --------------------------------------------------------------------------------------

    def sweep(self, limit: int = 1000) -> int:
        """See the protocol."""
        results = self._sweep(self._sql.pick_expired_results, self._sql.delete_expired_results, "p_task_ids", limit)
        return max(results, self._sweep(self._sql.pick_expired_groups, self._sql.delete_group, "p_group_ids", limit))

    def _sweep(self, pick: sa.Executable, delete: sa.Executable, name: str, limit: int) -> int:
        def work(conn: sa.Connection) -> int:
            ids = conn.execute(pick, self._sql.time(p_limit=limit)).scalars().all()
            for part in chunks(ids):
                conn.execute(delete, {name: part})
            return len(ids)

        return self._database.transaction(work, confirm=repeat)

    # -- waiting -------------------------------------------------------------------------------------

    def _send(self, text: str) -> None:
        parameters = {"p_channel": self._channel, "p_text": text}
        self._database.read(lambda conn: conn.execute(self._sql.tell_of_result, parameters))

    def watch(self, wake: Wake) -> Watch:
        """See the protocol."""
        here = self._watchers.add(wake)
        if self._listener is not None:
            return _Both(self._listener.watch(wake), here)
        return _Both(Polling(self._settings.poll_max), here)

    def change_mark(self) -> object | None:
        """See the protocol."""
        return self._database.change_mark() if self._database.dialect.probe_every is not None else None

    def tell(self, task_ids: Sequence[str]) -> None:
        """Results of these tasks were stored in a transaction that is committed by now. Does not raise."""
        self._watchers.wake(task_ids)
        if self._channel is None:
            return
        try:
            for part in listed(task_ids):
                self._send(text_of(RESULTS, part))
        except TaskgateError as error:
            logger.debug("nobody was told of new results: %s", error)

    def close(self) -> None:
        """Tell nobody any more."""
        if self._listener is not None:
            self._listener.close()


class _Both:
    """Told by other processes and by this one."""

    def __init__(self, others: Watch, leave: Callable[[], None]) -> None:
        self._others = others
        self._leave = leave

    @property
    def longest_pause(self) -> float:
        return self._others.longest_pause

    @property
    def live(self) -> bool:
        return self._others.live

    def doubt(self) -> None:
        self._others.doubt()

    def close(self) -> None:
        self._leave()
        self._others.close()


def _parameters(result: NewResult) -> dict[str, Any]:
    return {
        "p_task_id": result.task_id,
        "p_status": result.status,
        "p_finality": int(result.finality),
        "p_type": result.type,
        "p_execution": result.execution,
        "p_token": result.token,
        "p_fence": result.execution if result.fenced else 0,
        "p_expires_in": _ms(result.expires_in),
        "p_content_type": result.content_type,
        "p_content_encoding": result.content_encoding,
        "p_payload": result.payload,
    }


def to_result(row: Any) -> Result:
    """A row as others see it."""
    return Result(
        task_id=row.task_id,
        status=row.status,
        finality=Finality(row.finality),
        payload=bytes(row.payload),
        content_type=row.content_type,
        content_encoding=row.content_encoding,
        type=row.type,
        version=row.version,
        execution=row.execution,
        token=row.token,
        stored_at=row.stored_at,
        expires_at=row.expires_at,
    )


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else to_ms(seconds)


def _delete(conn: sa.Connection, statement: sa.Executable, parameters: dict[str, Any]) -> int:
    return int(conn.execute(statement, parameters).rowcount)
