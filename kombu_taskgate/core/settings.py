"""Settings of a broker, and how a URL becomes the database to use.

Nothing here imports SQLAlchemy: a wrong option is told before a driver is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .errors import ConfigError, PayloadTooLarge
from .model import MAX_NAME

#: A hundred years in seconds: longer than anything that is kept or waited for.
LONGEST = 100 * 366 * 86400.0
#: What the names of parameters are like whose values nobody is to see.
SECRET = re.compile(r"pass|pwd|secret|token", re.IGNORECASE)
_DURATIONS = (
    "lease_ttl", "keep_completed", "keep_failed", "pool_timeout", "connect_timeout", "poll_min", "poll_max",
    "poll_listening", "busy_timeout", "answer_timeout",
)  # fmt: skip
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,30}\Z")


@dataclass(slots=True, frozen=True)
class BrokerSettings:
    """How one broker behaves. Durations are seconds, sizes are bytes.

    Args:
        url: database URL without the ``taskgate+`` prefix, as SQLAlchemy reads it, or ``memory://name``.
        table_prefix: put before every table name; lets several apps share a database.
        schema: database schema that holds the tables; ``None`` is the connection's default one.
        create_tables: create and migrate tables at connect; off for locked-down databases.
        lease_ttl: how long a claim is valid without renewal.
        queue_lease_ttl: lease_ttl of single queues, by name.
        lease_lost_max: losses of a lease after which an execution is a dead letter.
        throttled_max: throttlings after which it is a dead letter.
        max_deliveries: deliveries, those not counted that ended in a business failure or a throttling, after which
            it is a dead letter (RabbitMQ's quorum queues: 20).
        keep_completed: how long completed rows are kept; 0 deletes them at ack.
        keep_failed: how long failed and canceled rows, and completed ones with a business key, are kept.
        max_payload: largest message in bytes, headers included.
        pool_size: most connections of this process to the database, the reserved one not counted.
        pool_timeout: longest wait for one of them.
        connect_timeout: longest wait for a new connection.
        poll_min, poll_max: how often a waiting dequeue looks: quick after work, slow when idle. Consumers look even
            sooner after work: after a tenth of poll_min.
        listen: tell other processes of new work, and be told, where the database can (PostgreSQL's LISTEN and NOTIFY).
        poll_listening: poll_max while that works.
        synchronous: where the client decides (a database in a file): ``FULL`` survives power loss, ``NORMAL``
            is quicker and may lose the last commits then.
        busy_timeout: how long locks of others are waited for before StoreUnavailable.
        answer_timeout: how long an answer of the server is waited for before its connection is taken for dead.
    """

    url: str = field(repr=False)
    table_prefix: str = "taskgate_"
    schema: str | None = None
    create_tables: bool = True
    lease_ttl: float = 60.0
    queue_lease_ttl: Mapping[str, float] = field(default_factory=dict)
    lease_lost_max: int = 3
    throttled_max: int = 100
    max_deliveries: int = 20
    keep_completed: float = 0.0
    keep_failed: float = 14 * 86400.0
    max_payload: int = 32 * 1024 * 1024
    pool_size: int = 10
    pool_timeout: float = 30.0
    connect_timeout: float = 5.0
    poll_min: float = 0.01
    poll_max: float = 0.25
    listen: bool = True
    poll_listening: float = 30.0
    synchronous: Literal["FULL", "NORMAL"] = "FULL"
    busy_timeout: float = 60.0
    answer_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not _IDENTIFIER.match(self.table_prefix):
            raise ConfigError(
                f"table_prefix {self.table_prefix!r} is not a plain SQL name: use letters, digits and _, at most 31"
            )
        if self.schema is not None and not re.match(r"[A-Za-z_][A-Za-z0-9_]{0,62}\Z", self.schema):
            raise ConfigError(f"schema {self.schema!r} is not a plain SQL name: use letters, digits and _")
        for name in _DURATIONS:
            if not abs(getattr(self, name)) <= LONGEST:
                raise ConfigError(f"{name} must be a number of seconds up to 100 years, not {getattr(self, name)!r}")
        for name in (
            "lease_ttl", "pool_timeout", "connect_timeout", "poll_min", "poll_max", "poll_listening", "busy_timeout",
            "answer_timeout",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0 seconds, not {getattr(self, name)!r}")
        for name in ("lease_lost_max", "throttled_max", "max_deliveries", "max_payload", "pool_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        for name in ("keep_completed", "keep_failed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)!r}")
        if self.poll_min > self.poll_max:
            raise ConfigError(f"poll_min {self.poll_min} must not be more than poll_max {self.poll_max}")
        if self.synchronous not in ("FULL", "NORMAL"):
            raise ConfigError(f"synchronous must be FULL or NORMAL, not {self.synchronous!r}")
        for queue, ttl in self.queue_lease_ttl.items():
            check_name(queue, "queue")
            if not 0 < ttl <= LONGEST:
                raise ConfigError(f"lease_ttl of queue {queue!r} must be more than 0 seconds, not {ttl!r}")

    @property
    def lock_timeout(self) -> float:
        """How long the server waits for a lock at a stretch: it must answer while its answer is waited for."""
        return min(self.busy_timeout, self.answer_timeout / 2)

    @property
    def renewal_timeout(self) -> float:
        """answer_timeout of renewals: there must be time left for others, over a new connection."""
        return min(self.answer_timeout, max(1.0, min([self.lease_ttl, *self.queue_lease_ttl.values()]) / 6))

    def ttl_of(self, queue: str) -> float:
        """Lease time of a queue, in seconds."""
        return self.queue_lease_ttl.get(queue, self.lease_ttl)


def is_number(value: object) -> bool:
    """Whether seconds can be told by it: no text, no truth value, nothing that only looks like a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_name(name: str, what: str) -> str:
    """Return the name, or raise ConfigError when no store can hold it.

    The bound is AMQP's short string. NUL can't be stored by PostgreSQL; surrogates can't be encoded.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what} name must be a text of 1 to {MAX_NAME} characters, not {name!r}")
    if len(name) > MAX_NAME:
        raise ConfigError(f"{what} name is {len(name)} characters long, at most {MAX_NAME} fit: {name[:40]!r}…")
    if "\0" in name:
        raise ConfigError(f"{what} name must not contain a NUL character: {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} name is not valid Unicode: {name!r}") from None
    return name


def storable(text: str) -> str:
    """The text without what some database can't store: for details and owners, which must not fail a call."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def check_payload(payload: bytes, what: str, max_payload: int) -> None:
    """Raise PayloadTooLarge for what is too long to store."""
    if len(payload) > max_payload:
        raise PayloadTooLarge(
            f"{what} has {len(payload)} bytes: at most {max_payload} bytes are stored; "
            "pass a reference to the data instead, or raise max_payload (and the server's own limit)"
        )
