"""Adds the transport's names to kombu's table.

kombu has no entry point group for transports, but it loads the group ``kombu.serializers`` whenever its
serializers are imported, which every Celery app does. So this module is listed there: being imported is all
that it is for. It is imported in the middle of kombu's own start, hence it may use nothing of kombu that
needs the serializers.
"""

from __future__ import annotations

from collections.abc import Iterator

from kombu.transport import TRANSPORT_ALIASES

#: The name before the first ``+`` of a broker URL.
SCHEME = "taskgate"
TRANSPORT = "kombu_taskgate.transport:Transport"

#: What may follow ``taskgate+``: database names and, for each, the drivers that can be named after it.
DATABASES: dict[str, tuple[str, ...]] = {
    "postgresql": ("psycopg", "psycopg2"),
    "postgres": ("psycopg", "psycopg2"),
    "mysql": ("pymysql", "mysqldb", "mariadbconnector"),
    "mariadb": ("pymysql", "mysqldb", "mariadbconnector"),
    "sqlite": ("pysqlite",),
    "memory": (),
}

#: What the entry point hands to ``kombu.serialization.register``: encoder, decoder, content type, encoding.
#: A name without either function can't be used to write or read anything, so kombu is left as it was.
SERIALIZER = (None, None, "application/x-taskgate", "utf-8")


def schemes() -> Iterator[str]:
    """Every URL scheme of the transport.

    kombu splits the first URL of a failover list at its first ``+``, but looks the others' schemes up whole.
    """
    yield SCHEME
    for database, drivers in DATABASES.items():
        yield f"{SCHEME}+{database}"
        for driver in drivers:
            yield f"{SCHEME}+{database}+{driver}"


def register() -> None:
    """Add the names; idempotent, and what somebody else has put under one of them stays."""
    for scheme in schemes():
        TRANSPORT_ALIASES.setdefault(scheme, TRANSPORT)


register()
