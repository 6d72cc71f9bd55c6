"""Statements on the driver's own cursor behave as they do by SQLAlchemy."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from kombu_taskgate.core import quick
from kombu_taskgate.core.database import Use
from kombu_taskgate.core.errors import StoreUnavailable
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.parameters import among
from kombu_taskgate.core.quick import Repertory, Rows
from kombu_taskgate.core.sql import SqlBroker
from kombu_taskgate.testing.stores import InDatabase

metadata = sa.MetaData()
things = sa.Table(
    f"quick_things_{uuid.uuid4().hex[:8]}",  # other processes run these tests on the same servers
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("name", sa.String(50), unique=True),
    sa.Column("data", sa.LargeBinary),
)


@pytest.fixture
def broker(sql_store: InDatabase) -> Iterator[SqlBroker]:
    broker = sql_store.open()
    assert isinstance(broker, SqlBroker)
    database = broker.database
    database.transaction(metadata.create_all, schema=True)
    rows = [{"id": n, "token": n * 10, "name": f"%s {n} 🐘", "data": bytes([0, n, 255])} for n in range(1, 8)]
    database.transaction(lambda conn: conn.execute(sa.insert(things), rows))
    yield broker
    database.transaction(metadata.drop_all, schema=True)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of the statements that are run the quick way."""
    texts: list[str] = []
    monkeypatch.setattr(quick, "observers", [lambda engine, text: texts.append(text)])
    return texts


def both(broker: SqlBroker, statement: Any, values: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Rows by SQLAlchemy, which has it for the first time, and by the driver."""
    run = lambda: broker.database.read(lambda conn: [tuple(row) for row in conn.execute(statement, values)])  # noqa: E731
    return run(), run()


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 7])
def test_lists_of_any_length(broker: SqlBroker, texts: list[str], number: int) -> None:
    statement = sa.select(things).where(among(things.c.id, "p_ids")).order_by(things.c.id)
    usual, quickly = both(broker, statement, {"p_ids": list(range(1, number + 1))})
    assert len(usual) == number
    assert usual == quickly
    assert len(texts) == 1


@pytest.mark.parametrize("number", [0, 1, 3, 6])
def test_lists_of_pairs(broker: SqlBroker, texts: list[str], number: int) -> None:
    pairs = [(n, n * 10) for n in range(1, number + 1)] + [(7, 1)]
    wanted = sa.tuple_(things.c.id, things.c.token).in_(sa.bindparam("p_pairs", expanding=True))
    statement = sa.select(things.c.id).where(wanted).order_by(things.c.id)
    usual, quickly = both(broker, statement, {"p_pairs": pairs})
    assert usual == quickly == [(n,) for n in range(1, number + 1)]
    assert len(texts) == 1


def test_lists_of_similar_length_share_a_text(broker: SqlBroker, texts: list[str]) -> None:
    statement = sa.select(things.c.id).where(among(things.c.id, "p_ids"))
    for number in (1, 5, 6, 7, 8):
        broker.database.read(lambda conn, n=number: conn.execute(statement, {"p_ids": list(range(n))}).all())
    assert len(set(texts)) == 1


def test_rows_have_names_and_results_their_numbers(broker: SqlBroker) -> None:
    select = sa.select(things.c.id, things.c.data, sa.func.count().over().label("wait")).order_by(things.c.id)
    change = sa.update(things).where(things.c.id > sa.bindparam("p_id")).values(token=sa.bindparam("p_token"))
    for _ in range(2):
        found: Any = broker.database.read(lambda conn: conn.execute(select))
        row = found.first()
        assert (row.id, bytes(row.data), row.wait) == (1, b"\x00\x01\xff", 7)
        assert dict(row._mapping) == row._asdict() == {"id": 1, "data": row.data, "wait": 7}
        changed = broker.database.transaction(lambda c: c.execute(change, {"p_id": 5, "p_token": 1}).rowcount)
        assert changed == 2
    assert isinstance(found, Rows)
    assert list(found.scalars()) == found.scalars().all() == list(range(1, 8))
    with pytest.raises(sa.exc.MultipleResultsFound):
        found.one()
    with pytest.raises(sa.exc.NoResultFound):
        Rows([], 0, None, returns_rows=True).scalar_one()


def test_several_sets_of_parameters_go_the_usual_way(broker: SqlBroker, texts: list[str]) -> None:
    statement = sa.insert(things)
    for start in (100, 200):
        rows = [{"id": start + n, "token": 1, "name": None, "data": b""} for n in range(3)]
        broker.database.transaction(lambda conn, rows=rows: conn.execute(statement, rows))
    assert set(texts) <= {broker.database._begin, "COMMIT"}


def test_a_refused_value_is_the_usual_error_and_rolled_back(broker: SqlBroker) -> None:
    statement = sa.insert(things)

    def twice(id: int) -> None:
        def work(conn: sa.Connection) -> None:
            conn.execute(statement, {"id": id, "token": 1, "name": f"{id}", "data": b""})
            conn.execute(statement, {"id": id, "token": 1, "name": f"again {id}", "data": b""})

        broker.database._once(work, begin=broker.database._begin, use=Use.WORK)

    for id in (50, 51):
        with pytest.raises(sa.exc.IntegrityError):
            twice(id)
    left = broker.database.read(lambda conn: conn.execute(sa.select(things.c.id).where(things.c.id >= 50)).all())
    assert left == []


def test_a_statement_is_never_taken_for_another() -> None:
    repertory = Repertory(SQLiteDialect_pysqlite())
    for number in range(3 * quick.MOST):
        # Each is gone before the next is made, so most get an id that another had.
        statement = sa.select(sa.literal(number))
        assert repertory.find(statement, {}) is None
        found = repertory.find(statement, {})
        assert found is not None
        assert number in found.fixed.values()


def test_those_that_were_executed_once_are_forgotten_first() -> None:
    repertory = Repertory(SQLiteDialect_pysqlite())
    lasting = sa.select(sa.literal(1))
    repertory.find(lasting, {})
    found = repertory.find(lasting, {})
    for number in range(3 * quick.MOST):
        repertory.find(sa.select(sa.literal(number)), {})
    assert len(repertory._known) <= quick.MOST
    assert repertory.find(lasting, {}) is found


@pytest.mark.postgresql
def test_sessions_that_were_all_ended_are_replaced(postgresql_url: str, request: pytest.FixtureRequest) -> None:
    """The next publish works, however many connections of the pool are dead."""
    name = f"quick{uuid.uuid4().hex[:8]}"
    store = InDatabase(f"{postgresql_url}{'&' if '?' in postgresql_url else '?'}application_name={name}")
    request.addfinalizer(store.close)
    broker = store.open(pool_size=6)
    together = threading.Barrier(3)
    broker.database.fault = lambda point: None if point == "after_commit" else (together.wait(20), None)[1]
    threads = [threading.Thread(target=broker.enqueue, args=(NewTask("q"),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broker.database.fault = None
    with psycopg.connect(postgresql_url, autocommit=True) as admin:
        ended = admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", [name]
        )
        assert ended.rowcount == 3
    for _ in range(2):
        broker.enqueue(NewTask("q"))
    assert broker.queue_len("q") == 5


@pytest.mark.postgresql
@pytest.mark.parametrize(("dead", "survives"), [(1, True), (4, True), (5, False)])
def test_as_many_dead_connections_are_borne_as_a_pool_has(
    postgresql_url: str, request: pytest.FixtureRequest, dead: int, survives: bool
) -> None:
    """Others take the fresh ones meanwhile; that there is always one dead more means something else."""
    store = InDatabase(postgresql_url)
    request.addfinalizer(store.close)
    left = [dead]

    def attempt() -> str:
        if left[0]:
            left[0] -= 1
            raise sa.exc.OperationalError("", None, psycopg.OperationalError("closed"), connection_invalidated=True)
        return "done"

    database = store.open(pool_size=4).database
    if survives:
        assert database._repeat(attempt, None) == "done"
    else:
        with pytest.raises(StoreUnavailable):
            database._repeat(attempt, None)


@pytest.mark.postgresql
def test_a_server_that_refuses_is_asked_once_more_only(postgresql_url: str, request: pytest.FixtureRequest) -> None:
    store = InDatabase(postgresql_url)
    request.addfinalizer(store.close)
    asked: list[int] = []

    def attempt() -> None:
        asked.append(1)
        raise sa.exc.OperationalError("", None, psycopg.errors.DiskFull("full"))

    with pytest.raises(StoreUnavailable):
        store.open(pool_size=4).database._repeat(attempt, None)
    assert len(asked) == 2
