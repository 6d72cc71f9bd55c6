"""Where beat's leases and schedules are kept, opened when it is first asked for something."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.schedules import Schedules
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.terms import LeaseStore
from kombu_taskgate.transport.url import masked

from .settings import BeatSettings, beat_settings


class _Opened(NamedTuple):
    terms: LeaseStore
    schedules: Schedules
    close: Callable[[], None]


class _Late:
    """A part of what is opened, which is opened by whoever first calls a method of it."""

    def __init__(self, opened: Callable[[], _Opened], name: str) -> None:
        self._opened = opened
        self._name = name

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(getattr(self._opened(), self._name), method)(*args, **kwargs)

        return call


class Stores:
    """The stores of one app's beat. Nothing is connected to before a method of them is called.

    That call then may raise ``StoreUnavailable``, and the next one tries again; ``ConfigError`` and ``SchemaError`` say
    that it will not work this way.

    Args:
        settings: see there.
    """

    def __init__(self, settings: BeatSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._open: _Opened | None = None
        self.terms = cast("LeaseStore", _Late(self._opened, "terms"))
        self.schedules = cast("Schedules", _Late(self._opened, "schedules"))

    @property
    def key(self) -> str:
        """What is led, and whose schedule it is."""
        return self.settings.key

    @property
    def shown(self) -> str:
        """The URL, without its password."""
        if self.settings.redis_url is not None:
            return masked(self.settings.redis_url)
        assert self.settings.database is not None
        return masked(self.settings.database.url)

    def open(self) -> None:
        """Connect now.

        Raises:
            StoreUnavailable: nobody answers.
            ConfigError, SchemaError: it will not work this way.
        """
        self._opened()

    def close(self) -> None:
        """Close the connections. Idempotent; whoever asks for something afterwards opens them again."""
        with self._lock:
            opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def _opened(self) -> _Opened:
        opened = self._open
        if opened is None:
            with self._lock:
                opened = self._open
                if opened is None:
                    opened = self._open = self._connect()
        return opened

    def _connect(self) -> _Opened:
        url = self.settings.redis_url
        if url is not None:
            from kombu_taskgate.core.redis_schedules import RedisSchedules
            from kombu_taskgate.core.redis_terms import RedisTerms

            terms, schedules = RedisTerms(url), RedisSchedules(url)

            def close() -> None:
                terms.close()
                schedules.close()

            return _Opened(terms, schedules, close)
        assert self.settings.database is not None
        broker = open_broker(_patience(self.settings.database, self.settings.ttl))
        return _Opened(broker.terms, broker.schedules, broker.close)


def _patience(database: BrokerSettings, ttl: float) -> BrokerSettings:
    """Settings that let nobody wait for the database longer than a lease lives: somebody else leads by then."""
    longest = max(1.0, ttl / 2)
    return replace(
        database,
        pool_size=2,
        answer_timeout=min(database.answer_timeout, longest),
        busy_timeout=min(database.busy_timeout, longest),
        pool_timeout=min(database.pool_timeout, longest),
        connect_timeout=min(database.connect_timeout, max(0.5, ttl / 5)),
    )


def open_stores(app: Any) -> Stores:
    """The stores of an app's beat.

    Raises:
        ConfigError: a setting can't be right.
    """
    return Stores(beat_settings(app))
