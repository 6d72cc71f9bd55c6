"""The result backend: ``result_backend = "taskgate+postgresql://…"`` (or any other database that taskgate knows).

Celery finds it by the entry point group ``celery.result_backends``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from celery import states
from celery.backends.asynchronous import AsyncBackendMixin
from celery.backends.base import Backend
from celery.exceptions import ImproperlyConfigured
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import ResultSet, result_from_tuple
from kombu.serialization import loads
from kombu.utils.encoding import bytes_to_str, ensure_bytes
from kombu.utils.functional import retry_over_time

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import ConfigError, StoreUnavailable
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.results import Finality, NewResult, Result
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.transport.texts import id_text, short_text
from kombu_taskgate.transport.url import PREFIX, masked

from .chords import STUCK_AT_ONCE, ChordMixin
from .inspecting import broker_of
from .lease import lease_of
from .result_settings import broker_settings, result_settings, same_tables
from .worker import results as look_after_results

try:
    from celery.backends.base import decompress_payload
except ImportError:  # Celery before 5.7 does not compress

    def decompress_payload(payload: bytes) -> bytes:
        """Nothing is compressed."""
        return payload


logger = logging.getLogger("celery_ext.backend")
T = TypeVar("T")

#: Longest time in seconds that a result waits for a database that does not answer, unless ``retry_policy`` has a
#: ``timeout``. The broker is down then too, mostly: there is nothing else to do, and the result must not be lost.
STORE_FOR = 120.0
#: Rows that are swept at once.
SWEEP = 1000
#: Longest time in seconds that one round of tending takes.
TEND_FOR = 5.0
#: Seconds for which a chord that got a part is looked at whether it is stuck.
LOOK_BACK = 3600.0
_RETRY = {"max_retries": None, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 2.0, "timeout": STORE_FOR}


class TaskgateBackend(ChordMixin, AsyncBackendMixin, Backend):
    """Results, groups and chords in the tables of a database.

    Args:
        app: the Celery app.
        url: of the database, without ``taskgate+``.

    Raises:
        ImproperlyConfigured: the URL or an option can't be right; says what.
    """

    supports_native_join = True
    supports_autoexpire = True
    persistent = True
    supports_result_compression = True
    supports_failure_expires = True

    def __init__(self, app: Any, url: str | None = None, **kwargs: Any) -> None:
        super().__init__(app, url=url, **kwargs)
        # One for all threads of a process: they wait together.
        self.thread_safe = True
        if not url or url == "taskgate" or url.startswith("taskgate://"):
            raise ImproperlyConfigured(
                "result_backend names no database: write taskgate+postgresql://user:password@host/database, "
                "taskgate+mysql://…, taskgate+sqlite:///file.db or taskgate+memory://"
            )
        try:
            self.settings, policy = result_settings(app, url)
        except ConfigError as error:
            raise ImproperlyConfigured(f"result_backend {self.as_uri()}: {error}") from error
        self._policy: dict[str, Any] = {**_RETRY, **policy}
        self._broker: Broker | None = None
        self._publishing: BrokerSettings | None = None
        self._publishing_known = False
        self._looked_back = False
        look_after_results.install()
        # Imported late: it needs Celery's event loops, which a process that only publishes does not.
        from .waiting import ResultConsumer

        self.result_consumer = ResultConsumer(
            self, self.app, self.accept, self._pending_results, self._pending_messages
        )

    @property
    def broker(self) -> Broker:
        """What holds the results; opened when it is first used.

        Raises:
            ImproperlyConfigured: there is no such kind of database, or no driver for it.
            StoreUnavailable, SchemaError: see :func:`~kombu_taskgate.core.factory.open_broker`.
        """
        if self._broker is None:
            try:
                self._broker = open_broker(self.settings)
            except ConfigError as error:
                raise ImproperlyConfigured(f"result_backend {self.as_uri()}: {error}") from error
        return self._broker

    @property
    def is_broker(self) -> bool:
        """Whether the app's broker has the same tables, so that a lease can be looked up and a body be published."""
        settings = self.publishing
        return settings is not None and same_tables(settings, self.settings)

    @property
    def publishing(self) -> BrokerSettings | None:
        """The settings of the broker that the app publishes to; ``None`` where that is not taskgate."""
        if not self._publishing_known:
            try:
                self._publishing = broker_settings(self.app)
            except ConfigError:
                # Whoever publishes is told.
                self._publishing = None
            self._publishing_known = True
        return self._publishing

    def as_uri(self, include_password: bool = False) -> str:
        """The URL, with its passwords masked unless told otherwise."""
        url = self.url or ""
        return PREFIX + (url if include_password else masked(url))

    def __reduce__(self, args: Any = (), kwargs: Any = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url})

    # -- storing -------------------------------------------------------------------------------------

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        """Whether ``result_backend_always_retry`` may try again."""
        return isinstance(exc, StoreUnavailable)

    def surely(self, work: Callable[[], T]) -> T:
        """Do something that must not be lost, again and again while the database does not answer.

        Raises:
            StoreUnavailable: it has not answered for too long.
        """
        told = False

        def failed(error: BaseException, intervals: Iterator[float], retries: int) -> float:
            nonlocal told
            if not told:
                told = True
                logger.warning("a result can't be stored now and is tried again: %s", error)
            return float(next(intervals))

        return retry_over_time(work, StoreUnavailable, errback=failed, **self._policy)  # type: ignore[no-any-return]  # kombu's is untyped

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta["task_id"] = bytes_to_str(task_id)
        lease = lease_of(request, bytes_to_str(task_id))
        stored = NewResult(
            task_id=self.key_of(task_id),
            status=state,
            finality=finality_of(state),
            payload=ensure_bytes(self.encode(meta)),
            content_type=self.content_type,
            content_encoding=self.content_encoding,
            type=short_text(getattr(request, "task", None)) or "",
            execution=lease.execution,
            token=lease.token,
            fenced=lease.held and self.is_broker,
            expires_in=self._expires_in(state),
        )
        if not self.surely(lambda: self.broker.results.store(stored)):
            logger.log(
                logging.WARNING if lease.held else logging.INFO,
                "refused: %s of task %s: it has a final result already, or its lease was lost",
                state,
                task_id,
            )
        return result

    def _expires_in(self, state: str) -> float | None:
        expires = self.expires
        if state == states.FAILURE:
            given = self.app.conf.get("result_failure_expires")
            expires = expires if given is None else self.prepare_expires(given)
        # 0 means never, as None does.
        return float(expires) if expires else None

    @staticmethod
    def key_of(task_id: Any) -> str:
        """The id of a task or group as the tables can hold it."""
        return id_text(bytes_to_str(str(task_id) if not isinstance(task_id, bytes) else task_id)) or ""

    # -- asking --------------------------------------------------------------------------------------

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        key = self.key_of(task_id)
        found = self.broker.results.get([key]).get(key)
        return {"status": states.PENDING, "result": None} if found is None else self.meta_of(found)

    def meta_of(self, result: Result) -> dict[str, Any]:
        """What a stored result says, as Celery calls it."""
        meta = self.meta_from_decoded(self._read(result.payload, result.content_type, result.content_encoding))
        return dict(meta)

    def _read(self, payload: bytes, content_type: str, content_encoding: str) -> Any:
        return loads(
            decompress_payload(payload),
            content_type=content_type or self.content_type,
            content_encoding=content_encoding or self.content_encoding,
            accept=self.accept,
        )

    def task_result_exists(self, task_id: str) -> bool:
        """Whether the task is known: it has a result, or a message of it is in the broker, waiting or running."""
        key = self.key_of(task_id)
        if self.broker.results.get([key]):
            return True
        with broker_of(self.app) as broker:
            return broker is not None and broker.inspect(key) is not None

    def get_many(
        self,
        task_ids: Collection[str],
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,
        on_message: Any = None,
        on_interval: Any = None,
        max_iterations: int | None = None,
        READY_STATES: Collection[str] = states.READY_STATES,  # noqa: N803  # Celery's name
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield (task_id, meta) of tasks as they end.

        Raises:
            celery.exceptions.TimeoutError: not all have ended within ``timeout`` seconds.
        """
        results = ResultSet([self.app.AsyncResult(id, backend=self) for id in dict.fromkeys(task_ids)], app=self.app)
        longest = None if max_iterations is None else max_iterations * interval
        limited = longest is not None and (timeout is None or longest < timeout)
        try:
            yield from self.iter_native(
                results, timeout=longest if limited else timeout, on_message=on_message, on_interval=on_interval
            )
        except CeleryTimeoutError:
            if not limited:
                raise

    def iter_native(self, result: Any, no_ack: bool = True, **kwargs: Any) -> Iterator[Any]:
        """Yield (id, meta) of a set's results as they come, and (id, results) of sets in it at once.

        Celery's has one place per task for what arrives, so that of two threads that join the same group one gets all.
        """
        self._ensure_not_eager()
        left = list(result.results)
        if not left:
            return
        for _ in self._wait_for_pending(result, no_ack=no_ack, **kwargs):
            here, left = _come(left)
            yield from here
        yield from _come(left)[0]

    def wait_for_pending(self, result: Any, callback: Any = None, propagate: bool = True, **kwargs: Any) -> Any:
        """Wait for a result; one that has not come in time is not remembered for ever."""
        try:
            return super().wait_for_pending(result, callback=callback, propagate=propagate, **kwargs)
        except CeleryTimeoutError:
            if not any(result.on_ready.listeners):
                self.remove_pending_result(result)
            raise

    # -- forgetting ----------------------------------------------------------------------------------

    def _forget(self, task_id: str) -> None:
        self.surely(lambda: self.broker.results.forget([self.key_of(task_id)]))
        self.result_consumer.cancel_for(task_id)

    def cleanup(self) -> None:
        """Delete what has expired, now; workers do so by themselves all the time. No result where none expires."""
        for sweep in self._sweeps():
            while sweep() >= SWEEP:
                continue

    def tend(self, budget: float = TEND_FOR) -> int:
        """Do what nobody waits for: :meth:`tend_chords`, then :meth:`sweep`; returns the sum of both."""
        deadline = time.monotonic() + budget
        return self.tend_chords() + self.sweep(max(0.0, deadline - time.monotonic()))

    def tend_chords(self) -> int:
        """End chords that are stuck; returns how many were found.

        The first call in a process looks for those of any age, later ones for those to which a part came in the last
        ``LOOK_BACK`` seconds.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        count = self.end_stuck_chords(since=LOOK_BACK if self._looked_back else None)
        # As many as are asked for at once: there may be more.
        self._looked_back = self._looked_back or count < STUCK_AT_ONCE
        return count

    def sweep(self, budget: float = TEND_FOR) -> int:
        """Delete what has expired, in batches.

        Args:
            budget: seconds after which no further batch is begun.

        Returns:
            How many rows were deleted; 0: there is nothing more.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        deadline = time.monotonic() + budget
        count = 0
        for sweep in self._sweeps():
            swept = SWEEP
            while swept >= SWEEP and time.monotonic() < deadline:
                swept = sweep()
                count += swept
        return count

    def _sweeps(self) -> list[Callable[[], int]]:
        """What deletes a batch of what is over; the parts of chords that have ended are no results."""
        results, chords = self.broker.results.sweep, self.broker.chords.sweep
        expires = self._expires_in(states.SUCCESS) or self._expires_in(states.FAILURE)
        return [lambda: results(SWEEP), lambda: chords(SWEEP)] if expires else [lambda: chords(SWEEP)]

    # -- groups --------------------------------------------------------------------------------------

    def _save_group(self, group_id: str, result: Any) -> Any:
        payload = ensure_bytes(self.encode({"result": result.as_tuple()}))
        key, expires = self.key_of(group_id), self._expires_in(states.SUCCESS)
        self.surely(lambda: self.broker.results.save_group(key, payload, expires))
        return result

    def _restore_group(self, group_id: str) -> dict[str, Any] | None:
        payload = self.broker.results.group(self.key_of(group_id))
        if payload is None:
            return None
        meta = dict(self._read(payload, self.content_type, self.content_encoding))
        meta["result"] = result_from_tuple(meta["result"], self.app)
        return meta

    def _delete_group(self, group_id: str) -> None:
        self.surely(lambda: self.broker.results.delete_group(self.key_of(group_id)))


def _come(nodes: list[Any]) -> tuple[list[tuple[str, Any]], list[Any]]:
    """Those of a set's results that are there, as (id, meta), and the others."""
    here, left = [], []
    for node in nodes:
        if isinstance(node, ResultSet):
            here.append((node.id, node.results))
        elif getattr(node, "_cache", None):
            here.append((node.id, node._cache))
        else:
            left.append(node)
    return here, left


def finality_of(state: str) -> Finality:
    """What may follow a state of Celery's."""
    if state == states.SUCCESS:
        return Finality.SUCCEEDED
    return Finality.ENDED if state in states.READY_STATES else Finality.OPEN
