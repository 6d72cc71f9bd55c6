"""``broker_transport_options``: checked, and turned into settings of the broker and of the delivery engine."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import tzinfo
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from ..core.errors import ConfigError
from ..core.settings import LONGEST, BrokerSettings
from .foreign_options import ENCRYPTION, KOMBU, REASONS
from .zones import naive_zone, prepare

logger = logging.getLogger("kombu_taskgate.transport")

_told: set[frozenset[str]] = set()


@dataclass(slots=True, frozen=True)
class EngineOptions:
    """How a connection delivers. Durations are seconds.

    Args:
        ack_delay: longest time that acknowledgements, and free places of the prefetch window, are collected.
        reap_interval: how often leases that have run out are looked for; ``None``: a third of the shortest
            lease time, at least 0.5.
        timezone: zone of an ``eta`` or ``expires`` that names none, e.g. ``Europe/Berlin``; ``None``: that of the
            Celery app's settings, and UTC in a program without Celery.
        revoke_expires: how long a revocation is stored; ``None``: as long as Celery's workers remember one, which
            the environment variable CELERY_WORKER_REVOKE_EXPIRES sets (10800).
    """

    ack_delay: float = 0.005
    reap_interval: float | None = None
    timezone: str | None = None
    revoke_expires: float | None = None
    _naive: tzinfo | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.ack_delay >= 0:
            raise ConfigError(f"ack_delay must not be negative, not {self.ack_delay!r}")
        if self.reap_interval is not None and not self.reap_interval > 0:
            raise ConfigError(f"reap_interval must be more than 0 seconds, not {self.reap_interval!r}")
        if self.revoke_expires is not None and not 0 <= self.revoke_expires <= LONGEST:
            raise ConfigError(f"revoke_expires must be 0 seconds to 100 years, not {self.revoke_expires!r}")
        if self.timezone is None:
            prepare()
        else:
            try:
                object.__setattr__(self, "_naive", ZoneInfo(self.timezone))
            except (ZoneInfoNotFoundError, ValueError, OSError):
                raise ConfigError(
                    f"timezone {self.timezone!r} is not known: write a name such as 'Europe/Berlin' "
                    "(where the system has no zones, install tzdata)"
                ) from None

    @property
    def naive(self) -> tzinfo:
        """The zone that ``timezone`` names, or whoever knows the app's settings."""
        return naive_zone() if self._naive is None else self._naive


def parse_options(
    url: str, given: Mapping[str, Any] | None, connect_timeout: float | None = None
) -> tuple[BrokerSettings, EngineOptions]:
    """Settings from a database URL and transport options.

    Args:
        url: the database's URL.
        given: ``broker_transport_options``.
        connect_timeout: kombu's own, used where the options have none.

    Raises:
        ConfigError: an option is unknown (names the nearest one) or its value can't be right.
    """
    given = dict(given or {})
    _refuse_unknown(given)
    _refuse_encryption(given)
    _tell_ignored(given)
    broker = {name: _checked(name, given[name], kind) for name, kind in _BROKER.items() if name in given}
    if "connect_timeout" not in broker and connect_timeout:
        broker["connect_timeout"] = float(connect_timeout)
    if "queues" in given:
        broker["queue_lease_ttl"] = {**broker.get("queue_lease_ttl", {}), **_queue_ttls(given["queues"])}
    engine = {name: _checked(name, given[name], kind) for name, kind in _ENGINE.items() if name in given}
    return BrokerSettings(url=url, **broker), EngineOptions(**engine)


def _kinds(settings: type, skip: frozenset[str] = frozenset()) -> dict[str, str]:
    return {
        option.name: str(option.type)
        for option in fields(settings)
        if option.init and option.name not in skip and (option.default, option.default_factory) != (MISSING, MISSING)
    }


#: Option -> the annotation of its field.
_BROKER = _kinds(BrokerSettings, frozenset({"url"}))
_ENGINE = _kinds(EngineOptions)
#: What may be said of one queue in ``queues``.
_QUEUE = ("lease_ttl",)


def known_options() -> list[str]:
    """Names of all options that do something here."""
    return sorted({*_BROKER, *_ENGINE, "queues"})


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    known = {*known_options(), *KOMBU}
    for name in given:
        if name in known or name in REASONS or name in ENCRYPTION:
            continue
        raise ConfigError(f"unknown transport option {name!r}{_nearest(name, sorted(known))}")


def _nearest(name: Any, known: list[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"


def _refuse_encryption(given: Mapping[str, Any]) -> None:
    for name in sorted(ENCRYPTION.intersection(given)):
        if given[name]:
            raise ConfigError(
                f"transport option {name!r} does nothing here, and ignoring it could leave the connection "
                "unencrypted: put the driver's own parameters into the URL, e.g. ?sslmode=verify-full, and remove it"
            )


def _tell_ignored(given: Mapping[str, Any]) -> None:
    names = frozenset(given) & frozenset(REASONS)
    if not names or names in _told:
        return
    _told.add(names)
    reasons: dict[str, list[str]] = {}
    for name in sorted(names):
        reasons.setdefault(REASONS[name], []).append(name)
    told = "; ".join(f"{', '.join(listed)} ({reason})" for reason, listed in reasons.items())
    logger.info("transport options that are not used here: %s", told)


def _checked(name: str, value: Any, kind: str) -> Any:
    if value is None and kind.endswith("| None"):
        return None
    check = _CHECKS.get(kind.removesuffix(" | None"))
    # A kind without a check is the business of the settings class.
    return value if check is None else check(name, value)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a number of seconds, not {value!r}")
    return float(value)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")
    return value


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a text, not {value!r}")
    return value


def _ttls(name: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must map names of queues to seconds, not {value!r}")
    return {queue: _seconds(f"{name}[{queue!r}]", ttl) for queue, ttl in value.items()}


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "float": _seconds,
    "int": _whole,
    "bool": _switch,
    "str": _text,
    "Mapping[str, float]": _ttls,
}


def _queue_ttls(queues: Any) -> dict[str, float]:
    if not isinstance(queues, Mapping):
        raise ConfigError(f"queues must map names of queues to their options, not {queues!r}")
    ttls = {}
    for queue, options in queues.items():
        if not isinstance(options, Mapping):
            raise ConfigError(f"queues[{queue!r}] must be a mapping such as {{'lease_ttl': 30}}, not {options!r}")
        for name, value in options.items():
            if name not in _QUEUE:
                raise ConfigError(f"unknown option {name!r} of queue {queue!r}{_nearest(name, list(_QUEUE))}")
            ttls[queue] = _seconds(f"lease_ttl of queue {queue!r}", value)
    return ttls
