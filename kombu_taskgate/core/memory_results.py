"""Results in memory: the reference for the shared tables."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from .clock import Clock, to_ms
from .results import Finality, NewResult, Result, check, parent_ended
from .settings import BrokerSettings, check_name, check_payload
from .watch import Polling, Wake, Watch

if TYPE_CHECKING:
    from .memory import Changes, MemoryStore


class MemoryResults:
    """The :class:`~kombu_taskgate.core.results.Results` of a :class:`MemoryStore`.

    Args:
        store: the data.
        clock: its time.
        settings: of the broker.
        transaction: a transaction of the broker's.
        ended: told, in a transaction, the task_id of a task that has ended, whether well, and how.
    """

    def __init__(
        self,
        store: MemoryStore,
        clock: Clock,
        settings: BrokerSettings,
        transaction: Callable[[], AbstractContextManager[Changes]],
        ended: Callable[[str, bool, str, Changes], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._transaction = transaction
        self._ended = ended

    def store(self, result: NewResult) -> bool:
        """See the protocol."""
        check(result, self._settings.max_payload)
        with self._transaction() as changes:
            old = self._store.results.get(result.task_id)
            if not self._store.is_current(result) or (old is not None and not _gives_way(old, result)):
                return False
            now = self._clock.now_ms()
            keeps_lease = old is not None and not result.execution
            self._store.results[result.task_id] = Result(
                task_id=result.task_id,
                status=result.status,
                finality=result.finality,
                payload=bytes(result.payload),
                content_type=result.content_type,
                content_encoding=result.content_encoding,
                type=result.type,
                version=1 if old is None else old.version + 1,
                execution=old.execution if old is not None and keeps_lease else result.execution,
                token=old.token if old is not None and keeps_lease else result.token,
                stored_at=now,
                expires_at=None if result.expires_in is None else now + to_ms(result.expires_in),
            )
            if result.finality is not Finality.OPEN:
                how = parent_ended(result.task_id, result.status)
                self._ended(result.task_id, result.finality is Finality.SUCCEEDED, how, changes)
        self._store.watchers.wake([result.task_id])
        return True

    def get(self, task_ids: Collection[str], *, ended: bool = False) -> dict[str, Result]:
        """See the protocol."""
        with self._store.changed:
            found = {id: self._store.results[id] for id in task_ids if id in self._store.results}
        return {id: one for id, one in found.items() if not ended or one.finality is not Finality.OPEN}

    def forget(self, task_ids: Collection[str]) -> int:
        """See the protocol."""
        with self._store.changed:
            return sum(self._store.results.pop(id, None) is not None for id in set(task_ids))

    def save_group(self, group_id: str, payload: bytes, expires_in: float | None) -> None:
        """See the protocol."""
        check_name(group_id, "group id")
        check_payload(payload, f"group {group_id}", self._settings.max_payload)
        with self._store.changed:
            until = None if expires_in is None else self._clock.now_ms() + to_ms(expires_in)
            self._store.groups[group_id] = bytes(payload), until

    def group(self, group_id: str) -> bytes | None:
        """See the protocol."""
        with self._store.changed:
            found = self._store.groups.get(group_id)
        return None if found is None else found[0]

    def delete_group(self, group_id: str) -> None:
        """See the protocol."""
        with self._store.changed:
            self._store.groups.pop(group_id, None)

    def sweep(self, limit: int = 1000) -> int:
        """See the protocol."""
        with self._store.changed:
            now = self._clock.now_ms()
            awaited = {name for _, name in self._store.waits}
            results = {id: one.expires_at for id, one in self._store.results.items() if id not in awaited}
            groups = {id: until for id, (_, until) in self._store.groups.items()}
            old_results, old_groups = _over(results, now)[:limit], _over(groups, now)[:limit]
            for id in old_results:
                del self._store.results[id]
            for id in old_groups:
                del self._store.groups[id]
            return max(len(old_results), len(old_groups))

    def watch(self, wake: Wake) -> Watch:
        """See the protocol. Everybody who can store is in this process, so nothing is missed."""
        return _Told(self._store.watchers.add(wake))

    def change_mark(self) -> object | None:
        """See the protocol."""
        return None


class _Told(Polling):
    live = True

    def __init__(self, leave: Callable[[], None]) -> None:
        super().__init__(30.0)
        self._leave = leave

    def close(self) -> None:
        self._leave()


def _gives_way(old: Result, new: NewResult) -> bool:
    if old.finality is Finality.SUCCEEDED:
        return False
    if not new.execution or new.execution > old.execution:
        return True
    return old.finality is Finality.OPEN and new.execution == old.execution and new.token >= old.token


def _over(until: dict[str, int | None], now: int) -> list[str]:
    over = [(end, id) for id, end in until.items() if end is not None and end <= now]
    return [id for _, id in sorted(over)]
