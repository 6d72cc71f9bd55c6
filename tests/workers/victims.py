"""Sessions of a database that a test may kill, told apart from everybody else's."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import sqlalchemy as sa

from kombu_taskgate.core.migrations import drop
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.sql import SqlBroker


@dataclass
class Victim:
    """A URL whose sessions can be told from all others, and who kills them."""

    url: str
    mark: str
    killer: SqlBroker

    def kill_sessions(self) -> int:
        """End them, as an administrator or a proxy would; returns how many those were."""
        with self.killer.database.engine.connect() as conn:
            if self.killer.database.url.get_backend_name() == "postgresql":
                query = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s"
                return len(conn.exec_driver_sql(query, (self.mark,)).all())
            query = "select id from information_schema.processlist where db = %s and id <> connection_id()"
            ids = list(conn.exec_driver_sql(query, (self.mark,)).scalars())
            return sum(_kill(conn, id) for id in ids)


def _kill(conn: sa.Connection, id: int) -> bool:
    try:
        conn.exec_driver_sql(f"KILL {id}")
    except sa.exc.DBAPIError:
        return False
    return True


@pytest.fixture
def victim(server_url: str) -> Iterator[Victim]:
    """By the application's name on one server, by a database of their own on the other."""
    mark = f"victim_{uuid.uuid4().hex[:10]}"
    killer = SqlBroker(BrokerSettings(server_url, table_prefix=f"{mark}_"))
    if server_url.startswith("postgresql"):
        yield Victim(f"{server_url}{'&' if '?' in server_url else '?'}application_name={mark}", mark, killer)
    else:
        with killer.database.engine.connect() as conn:
            conn.exec_driver_sql(f"CREATE DATABASE {mark}")
        url = sa.make_url(server_url).set(database=mark).render_as_string(hide_password=False)
        yield Victim(url, mark, killer)
        with killer.database.engine.connect() as conn:
            conn.exec_driver_sql(f"DROP DATABASE {mark}")
    drop(killer.database, killer.tables)
    killer.close()
