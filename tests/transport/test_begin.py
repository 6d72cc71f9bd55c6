"""Messages that are acknowledged when their run begins, and settled when it has ended."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import kombu
import pytest

from kombu_taskgate.core.model import Filter, State, Task
from kombu_taskgate.testing.statements import noted
from kombu_taskgate.testing.threads import wait_until
from kombu_taskgate.transport import engine as engine_module
from kombu_taskgate.transport.settle import Action, Batch, Settlement
from kombu_taskgate.transport.window import Stage

from .conftest import Connect
from .helpers import consuming, drain, nothing_comes, publish


def rows(connection: kombu.Connection) -> list[Task]:
    return connection.connection.broker.list(Filter(queue="q"))


def begun(connection: kombu.Connection) -> Callable[[], bool]:
    return lambda: [row.begun for row in rows(connection)] == [True]


def lost(connection: kombu.Connection) -> Callable[[], bool]:
    return lambda: [(row.state, row.reason) for row in rows(connection)] == [(State.FAILED, "lost")]


def test_a_run_that_has_begun_takes_up_no_place(connect: Connect) -> None:
    """To kombu it is acknowledged; its row stays, under its lease, until the end is told."""
    connection = connect()
    publish(connection, "q", 1, 2)
    with consuming(connection, "q", prefetch=1) as taken:
        drain(connection, taken, 1)
        assert nothing_comes(connection)
        taken[0].begin()
        assert taken[0].acknowledged
        with pytest.raises(taken[0].MessageStateError):
            taken[0].begin()
        drain(connection, taken, 2)
        taken[1].ack()
        wait_until(begun(connection), "one is left, and has begun")
        assert [(row.state, row.deliveries) for row in rows(connection)] == [(State.RUNNING, 1)]
        taken[0].done()
        taken[0].done()
        wait_until(lambda: not rows(connection), "it is settled at the end")
        assert connection.connection.engine.refused == 0


def test_of_a_short_run_only_the_end_is_written(connect_sql: Connect) -> None:
    """It begins and ends between two turns: one DELETE, no UPDATE."""
    connection = connect_sql(ack_delay=30)  # for so long a beginning waits for its end, should the machine pause there

    def run(message: Any) -> None:
        message.begin()
        message.done()

    publish(connection, "q", *range(20))
    with noted() as written, consuming(connection, "q", prefetch=4, then=run) as taken:
        drain(connection, taken, 20)
        wait_until(lambda: not rows(connection), "all are settled")
    assert not any(" SET begun" in statement for statement in written)


def test_a_beginning_waits_as_long_as_an_acknowledgement(connect_sql: Connect) -> None:
    """A turn for something else does not take it along before: the run may end by then."""
    connection = connect_sql(ack_delay=5.0)
    publish(connection, "q", 1, 2, 3)
    with consuming(connection, "q", prefetch=4) as taken:
        drain(connection, taken, 3)
        taken[0].begin()
        taken[1].reject()
        wait_until(lambda: [row.reason for row in rows(connection)][1:] == ["rejected", None], "a turn")
        assert not any(row.begun for row in rows(connection))
        wait_until(lambda: rows(connection)[0].begun, "it is written")
        taken[0].done()
        taken[2].ack()


def test_beginnings_are_written_together(connect_sql: Connect) -> None:
    """Of twenty that begin within a moment and go on, one UPDATE or few tell."""
    connection = connect_sql(ack_delay=2.0)
    publish(connection, "q", *range(20))
    with consuming(connection, "q", prefetch=20) as taken:
        drain(connection, taken, 20)
        with noted() as written:
            for message in taken:
                message.begin()
            wait_until(lambda: all(row.begun for row in rows(connection)), "all have begun")
        assert 1 <= sum(" SET begun" in statement for statement in written) <= 3
        for message in taken:
            message.done()


def test_channel_that_closes_before_the_end(connect: Connect) -> None:
    """Nobody can tell the end any more: a dead letter, and not delivered again; what had not begun goes back."""
    connection, other = connect(), connect()
    publish(connection, "q", 1, 2)
    channel = connection.channel()
    with consuming(connection, "q", channel=channel) as taken:
        drain(connection, taken, 2)
        taken[0].begin()
    channel.close()
    assert [(row.state, row.reason) for row in rows(connection)] == [(State.FAILED, "lost"), (State.PENDING, None)]
    taken[0].done()  # it comes too late, and harms nothing
    with consuming(other, "q") as again:
        drain(other, again, 1)
        assert again.bodies == [2]
        again[0].ack()


def test_connection_that_closes_before_the_end(connect: Connect) -> None:
    """The same where the beginning has not been written yet."""
    connection, other = connect(ack_delay=60), connect()
    publish(connection, "q", 1)
    with consuming(connection, "q") as taken:
        drain(connection, taken, 1)
        taken[0].begin()
        connection.release()
    wait_until(lost(other), "it is a dead letter")


def test_run_that_is_interrupted(connect: Connect) -> None:
    """Who has ended it from outside says so, for whoever finds the dead letter."""
    connection = connect()
    publish(connection, "q", 1)
    with consuming(connection, "q") as taken:
        drain(connection, taken, 1)
        taken[0].begin()
        taken[0].interrupted("a cold shutdown")
        taken[0].done()
        wait_until(lost(connection), "it is a dead letter")
    assert (rows(connection)[0].detail or "").startswith("a cold shutdown: ")


def test_settling_several_leaves_it_alone(connect: Connect) -> None:
    """What was acknowledged before is not meant by an acknowledgement of all, nor by a recover."""
    connection = connect()
    publish(connection, "q", 1, 2)
    channel = connection.channel()
    with consuming(connection, "q", channel=channel) as taken:
        drain(connection, taken, 2)
        taken[0].begin()
        channel.basic_ack(0, multiple=True)
        channel.basic_recover(requeue=True)
        wait_until(begun(connection), "the other is acknowledged")
        taken[0].done()
        wait_until(lambda: not rows(connection), "it is settled")


def test_message_that_nobody_has_any_more(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ran it has forgotten it: a dead letter, not a row that runs for ever."""
    monkeypatch.setattr(engine_module, "FORGOTTEN_EVERY", 0.0)
    connection = connect()
    publish(connection, "q", 1)
    with consuming(connection, "q") as taken:
        drain(connection, taken, 1)
        taken[0].begin()
        wait_until(begun(connection), "it runs")
        publish(connection, "q", 2)
        drain(connection, taken, 2)
        taken[1].ack()
        wait_until(begun(connection), "the other is settled, and it still runs")
        taken.clear()
        gc.collect()
        publish(connection, "q", 3)
        drain(connection, taken, 1)
        taken[0].ack()
        wait_until(lost(connection), "it is a dead letter")


def test_connection_that_was_given_up(connect: Connect) -> None:
    """Its engine keeps what has begun until it ends, and makes a dead letter of what is forgotten."""
    connection, other = connect(), connect()
    publish(connection, "q", 1, 2)
    with consuming(connection, "q") as taken:
        drain(connection, taken, 2)
        engine = connection.connection.engine
        for message in taken:
            message.begin()
        connection.connection.abandon()
    wait_until(lambda: [row.begun for row in rows(other)] == [True, True], "both run")
    taken.pop(0).done()
    wait_until(lambda: len(rows(other)) == 1, "the first has ended")
    assert begun(other)()
    taken.clear()
    del message
    gc.collect()
    wait_until(lost(other), "the second is a dead letter")
    wait_until(lambda: engine._stopping, "the engine has let go")


def test_lost_lease_of_a_run_that_has_begun(connect_sql: Connect, caplog: pytest.LogCaptureFixture) -> None:
    """It is told as for any run, and its end changes nothing."""
    connection = connect_sql(lease_ttl=6.0)
    publish(connection, "q", 1)
    with consuming(connection, "q") as taken:
        drain(connection, taken, 1)
        taken[0].begin()
        wait_until(begun(connection), "it runs")
        broker = connection.connection.broker
        with broker.database.engine.connect() as conn:
            table = conn.dialect.identifier_preparer.format_table(broker.tables.tasks)
            conn.exec_driver_sql(f"UPDATE {table} SET token = token + 1")
        wait_until(lambda: "lease lost" in caplog.text, "the loss is noticed")
        taken[0].done()
        connection.connection.engine.flush()
        assert [row.state for row in rows(connection)] == [State.RUNNING]
        assert connection.connection.engine.refused == 0, "its end was not even asked for"


def test_beginning_that_could_not_be_written_is_written_later() -> None:
    """In its old place; of one that has ended meanwhile nothing is."""

    class Run:
        def __init__(self, stage: Stage) -> None:
            self.stage = stage

    def settlement(stage: Stage, since: float) -> Settlement:
        return Settlement(Run(stage), Action.BEGIN, since)  # type: ignore[arg-type]  # no more of it is looked at

    batch = Batch()
    batch.add(settlement(Stage.BEGUN, 2.0))
    older = Batch()
    older.add(settlement(Stage.SETTLING, 0.0))
    older.add(settlement(Stage.BEGUN, 1.0))
    batch.put_back(older)
    assert batch.oldest_begin() == 1.0
    taken = batch.split(1.5)
    assert [one.since for one in taken.begins] == [1.0]
    assert [one.since for one in batch.begins] == [2.0]
