"""Opening brokers: one per process and settings, shared by all who ask for the same."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from .broker import Broker, Notify
from .clock import Clock
from .errors import ConfigError
from .settings import BrokerSettings

if TYPE_CHECKING:
    from .memory import MemoryStore

#: URL name of the broker that lives in this process only.
MEMORY = "memory"


class _Guard:
    """The lock of this module; a forked child makes its own."""

    lock = threading.Lock()


_guard = _Guard()
_stores: dict[str, MemoryStore] = {}
_shared: dict[tuple[str, str], _Shared] = {}


def open_broker(settings: BrokerSettings, *, clock: Clock | None = None, notify: Notify | None = None) -> Broker:
    """Open the broker that the settings name. Close it once per open.

    Brokers opened with equal settings in one process share their connections; one with a clock or a notify
    callback is a broker of its own.

    Raises:
        ConfigError: the URL, the driver or the server can't be right.
        SchemaError: the tables are newer than this code, or may not be created or migrated.
        StoreUnavailable: the database does not answer.
    """
    if clock is not None or notify is not None:
        return _create(settings, clock, notify)
    name = (settings.url, repr(settings))  # the repr leaves the URL out: it may hold a password
    with _guard.lock:
        shared = _shared.get(name)
        if shared is None:
            shared = _shared[name] = _Shared(name)
        shared.users += 1
    try:
        shared.prepare(settings)
    except BaseException:
        shared.release()
        raise
    return _Handle(shared)


def _create(settings: BrokerSettings, clock: Clock | None, notify: Notify | None) -> Broker:
    scheme = settings.url.partition(":")[0]
    if not scheme or "://" not in settings.url:
        raise ConfigError("the broker URL must look like taskgate+dialect://…, for example taskgate+sqlite:///app.db")
    if scheme == MEMORY:
        from .memory import MemoryBroker, MemoryStore

        # One store per name for as long as the process lives, as a database would be.
        store = _stores.setdefault(f"{settings.url} {settings.table_prefix}", MemoryStore())
        return MemoryBroker(settings, store=store, clock=clock, notify=notify)
    # Imported late: SQLAlchemy takes a while, and memory:// does not need it.
    from .sql import SqlBroker

    return SqlBroker(settings, clock=clock, notify=notify)


class _Shared:
    """A broker and how many use it."""

    def __init__(self, name: tuple[str, str]) -> None:
        self.name = name
        self.users = 0
        self.broker: Broker | None = None
        self._lock = threading.Lock()

    def prepare(self, settings: BrokerSettings) -> None:
        with self._lock:
            if self.broker is None:
                self.broker = _create(settings, None, None)

    def release(self) -> None:
        with _guard.lock:
            self.users -= 1
            last = self.users == 0
            if last and _shared.get(self.name) is self:
                del _shared[self.name]
        if last and self.broker is not None:
            self.broker.close()


class _Handle:
    """One user's hold on a shared broker; closing it twice does no harm."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared.broker, name)

    def close(self) -> None:
        """Give the hold back; the last one closes the connections."""
        if not self._closed:
            self._closed = True
            self._shared.release()


def _after_fork() -> None:
    _guard.lock = threading.Lock()
    for shared in _shared.values():
        shared._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
