"""The ``beat_taskgate_…`` settings, checked."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import Any

from kombu_taskgate.core.election import JITTER, TRUST
from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.settings import LONGEST, BrokerSettings, check_name
from kombu_taskgate.transport.options import parse_options
from kombu_taskgate.transport.url import PREFIX

from ..result_settings import broker_settings, result_settings, same_tables

#: What begins with it is this project's.
PRE = "beat_taskgate_"
NAMES = ("scheduler", "lease_url", "lease_ttl", "lease_interval", "key", "starting_deadline")
_REDIS = ("redis", "rediss", "unix", "redis+socket")


@dataclass(slots=True, frozen=True)
class BeatSettings:
    """How beat is led. Durations are seconds.

    Args:
        key: what is led; replicas that are to elect one among them have the same one.
        ttl: for how long a leader that is not heard of is still the leader.
        interval: how often it is heard of.
        scheduler: the class that is to be wrapped, or its path; empty: not said.
        starting_deadline: how late a missed tick is still sent; ``None``: however late.
        redis_url: of the leases and schedules, where Redis keeps them.
        database: where a SQL database does.
        is_broker: the messages are stored in the same tables.
    """

    key: str
    ttl: float
    interval: float
    scheduler: str | type
    starting_deadline: float | None
    redis_url: str | None = field(repr=False)  # it may hold a password
    database: BrokerSettings | None
    is_broker: bool


def beat_settings(app: Any) -> BeatSettings:
    """The settings of an app. Nothing is connected to.

    Raises:
        ConfigError: a setting can't be right.
    """
    _refuse_unknown(app)
    ttl = _duration(app, "lease_ttl", 15.0, least=0.5)
    interval = _duration(app, "lease_interval", ttl / 3, least=0.05)
    if interval * JITTER >= ttl * TRUST:
        raise ConfigError(
            f"{PRE}lease_interval {interval:g} s is too long for {PRE}lease_ttl {ttl:g} s: a leader that is well would "
            f"lose its term. Leave it out, or set it to less than {ttl * TRUST / JITTER:g} s"
        )
    deadline = _get(app, "starting_deadline")
    if deadline is not None:
        deadline = _duration(app, "starting_deadline", 0.0, least=0.0)
    _check_celerys_deadline(app)
    broker = broker_settings(app)
    redis_url, database = _store(app, broker)
    return BeatSettings(
        key=check_name(_get(app, "key") or f"beat:{app.main or 'celery'}", f"{PRE}key"),
        ttl=ttl,
        interval=interval,
        scheduler=_get(app, "scheduler") or "",
        starting_deadline=deadline,
        redis_url=redis_url,
        database=database,
        is_broker=broker is not None and database is not None and same_tables(broker, database),
    )


def _get(app: Any, name: str) -> Any:
    return app.conf.get(PRE + name)


def _duration(app: Any, name: str, default: float, *, least: float) -> float:
    value = _get(app, name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{PRE}{name} must be a number of seconds, not {value!r}")
    if not least <= value <= LONGEST:
        raise ConfigError(f"{PRE}{name} must be {least:g} seconds to 100 years, not {value!r}")
    return float(value)


def _check_celerys_deadline(app: Any) -> None:
    """Celery's own setting, which would only be looked at when a tick was missed."""
    value = app.conf.beat_cron_starting_deadline
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= value <= LONGEST):
        raise ConfigError(f"beat_cron_starting_deadline must be None or 0 seconds to 100 years, not {value!r}")


def _refuse_unknown(app: Any) -> None:
    for given in app.conf:
        # A namespace, such as Django projects have, may stand before it.
        _, pre, name = str(given).lower().partition(PRE)
        if pre and name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1, 0.0)
            raise ConfigError(f"the setting {given} is not known: did you mean {PRE}{near[0]}?")


def _store(app: Any, broker: BrokerSettings | None) -> tuple[str | None, BrokerSettings | None]:
    """Where leases and schedules are kept: a URL of Redis, or a database."""
    url = _get(app, "lease_url")
    if url is None:
        if broker is not None:
            return None, broker
        url = app.conf.result_backend
        if not (isinstance(url, str) and url.startswith(PREFIX)):
            raise ConfigError(
                "beat's replicas need a place for their lease, and the broker is no SQL database: set "
                f"{PRE}lease_url to redis://… or to the URL of a database, such as postgresql://user@host/database"
            )
    if not isinstance(url, str) or "://" not in url:
        raise ConfigError(f"{PRE}lease_url must be a URL such as redis://host/0 or postgresql://user@host/database")
    url = url.removeprefix(PREFIX)
    if url.partition("://")[0].lower() in _REDIS:
        return url.replace("redis+socket://", "unix://", 1), None
    if broker is not None and broker.url == url:
        return None, broker
    if app.conf.result_backend == PREFIX + url:
        return None, result_settings(app, url)[0]
    return None, parse_options(url, None, app.conf.broker_connection_timeout)[0]
