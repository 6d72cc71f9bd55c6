"""The delivery engine: batches, outages, lost and canceled leases, the event loop."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from typing import Any

import pytest
from kombu.asynchronous.hub import Hub

from kombu_taskgate.core.errors import ConfigError, StoreUnavailable
from kombu_taskgate.core.memory import MemoryBroker, MemoryStore
from kombu_taskgate.core.model import Filter, NewTask, State
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.topology import Binding, Queue
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.statements import noted
from kombu_taskgate.testing.threads import DEADLINE, wait_until
from kombu_taskgate.transport import connection as connection_module
from kombu_taskgate.transport import declared as declared_module
from kombu_taskgate.transport import engine as engine_module
from kombu_taskgate.transport.errors import BrokerUnavailable, RecoverableConnectionError
from tests.transport.helpers import Taken, consuming, drain, get, nothing_comes, outstanding, publish, size


class Flaky:
    """A broker that can be told to fail.

    Args:
        broker: the real one.
    """

    def __init__(self, broker: Any) -> None:
        self._broker = broker
        #: Raised by every call while it is set.
        self.down: Exception | None = None
        #: Method -> how many more of its calls raise after they took effect.
        self.lost_answers: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._broker, name)
        if not callable(real):
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if self.down is not None:
                raise self.down
            answer = real(*args, **kwargs)
            if self.lost_answers[name] > 0:
                self.lost_answers[name] -= 1
                raise StoreUnavailable("the connection broke; whether it took effect is unknown")
            return answer

        return call


@pytest.fixture
def flaky(monkeypatch):
    """Every connection opened in the test has a flaky broker, found at ``connection.connection.broker``."""
    real = connection_module.open_broker
    monkeypatch.setattr(connection_module, "open_broker", lambda settings: Flaky(real(settings)))
    monkeypatch.setattr(engine_module, "MIN_PAUSE", 0.01)
    monkeypatch.setattr(engine_module, "MAX_PAUSE", 0.05)


def records(caplog, text):
    return [record for record in caplog.records if text in record.message]


# -- batches ---------------------------------------------------------------------------------------


def test_a_fast_consumer_is_served_in_batches(connect_sql):
    connection = connect_sql(ack_delay=1)  # or a busy machine would see more and smaller batches
    broker = connection.connection.broker
    publish(connection, "q", 0)
    payload = broker.list(Filter(queue="q"))[0].payload
    broker.enqueue_many([NewTask("q", payload) for _ in range(999)])
    with (
        noted(broker.database.engine) as sent,
        consuming(connection, "q", then=lambda message: message.ack(), prefetch=64) as taken,
    ):
        drain(connection, taken, 1000)
        wait_until(lambda: not connection.connection.engine._live, "the acks are stored")
    statements = [text for text in sent if not text.startswith(("BEGIN", "START TRANSACTION", "COMMIT"))]
    assert len(statements) < 100, Counter(statement.split("\n")[0][:60] for statement in statements)
    assert broker.list() == []


def test_a_slow_consumer_keeps_its_window_full(connect_memory):
    """Less than half a window is filled too, only a little later."""
    connection = connect_memory()
    publish(connection, "q", *range(30))
    with consuming(connection, "q", prefetch=8) as taken:
        drain(connection, taken, 8)
        for number in range(8, 20):
            taken[number - 8].ack()
            drain(connection, taken, number + 1)


def test_acks_are_stored_soon_although_other_messages_are_unsettled(connect_memory):
    connection = connect_memory()
    publish(connection, "q", *range(10))
    broker = connection.connection.broker
    with consuming(connection, "q", prefetch=10) as taken:
        drain(connection, taken, 10)
        taken[3].ack()
        wait_until(lambda: len(broker.list()) == 9, "the ack is stored")


def test_one_ack_is_stored_before_the_next_look_for_work(connect_memory):
    connection = connect_memory(poll_min=30, poll_max=30)
    publish(connection, "q", *range(10))
    start = time.monotonic()
    with consuming(connection, "q") as taken:
        drain(connection, taken, 10)
        taken[3].ack()
        wait_until(lambda: len(connection.connection.broker.list()) == 9, "the ack is stored")
    assert time.monotonic() - start < 25


def test_when_nothing_is_left_to_do_acks_do_not_wait_for_others(connect_memory):
    connection = connect_memory(ack_delay=30)
    publish(connection, "q", 1)
    start = time.monotonic()
    with consuming(connection, "q", prefetch=10) as taken:
        drain(connection, taken, 1)
        taken[0].ack()
        wait_until(lambda: connection.connection.broker.list() == [], "the ack is stored")
    assert time.monotonic() - start < 25


@pytest.mark.parametrize("options", [{"no_ack": True}, {"prefetch": 8}])
def test_half_a_window_is_filled_without_waiting_for_the_rest(connect_memory, options):
    connection = connect_memory(ack_delay=30)
    publish(connection, "q", *range(250))
    start = time.monotonic()
    with consuming(connection, "q", then=None if "no_ack" in options else lambda m: m.ack(), **options) as taken:
        drain(connection, taken, 250)
    assert time.monotonic() - start < 25


def test_windows_of_two_channels_hold_when_they_share_a_call(connect, monkeypatch):
    connection = connect()
    publish(connection, "wide", *range(40))
    publish(connection, "narrow", *range(40))
    with consuming(connection, "wide", prefetch=30) as wide, consuming(connection, "narrow", prefetch=2) as narrow:
        while len(wide) + len(narrow) < 32:
            connection.drain_events(timeout=DEADLINE)
        assert nothing_comes(connection)
        assert (len(wide), len(narrow)) == (30, 2)
        assert (size(connection, "wide"), size(connection, "narrow")) == (10, 38)


def test_queues_with_their_own_lease_time_are_claimed_under_their_own_session(connect):
    connection = connect(lease_ttl=60, queues={"short": {"lease_ttl": 5}})
    broker = connection.connection.broker
    publish(connection, "short", "s")
    publish(connection, "long", "l")
    with consuming(connection, "short", "long", prefetch=10) as taken:
        drain(connection, taken, 2)
        ends = {task.queue: task.lease_until - task.created_at for task in broker.list()}
        assert ends["long"] - ends["short"] > 40_000  # one may have waited longer than the other
        for message in taken:
            message.ack()
        wait_until(lambda: broker.list() == [], "both are settled")


def test_messages_published_here_wake_their_consumer_at_once(connect_memory):
    connection = connect_memory(poll_min=30, poll_max=30)
    with consuming(connection, "q") as taken:
        assert nothing_comes(connection, 0.1)
        publish(connect_memory(poll_min=30, poll_max=30), "q", 1)
        start = time.monotonic()
        drain(connection, taken, 1)
        assert time.monotonic() - start < 25  # not at the next look


def test_messages_published_elsewhere_are_found(connect):
    connection = connect()
    with consuming(connection, "q") as taken:
        assert nothing_comes(connection, 0.1)
        connection.connection.broker.enqueue(NewTask("q", b'{"v":1,"body":"none","headers":{},"properties":{}}\n'))
        drain(connection, taken, 1)


# -- order -----------------------------------------------------------------------------------------


def publish_together(connection: Any, *queues: str) -> None:
    """One message to each of the queues, in this order and in one transaction, so that one turn claims them all."""
    with connection.channel() as channel:
        batch = channel.create_publish_batch(100)
        for queue in queues:
            batch.publish(channel.prepare_message(b"", content_type="text/plain"), routing_key=queue)
        batch.flush()


def test_a_task_does_not_overtake_the_broadcast_before_it(connect):
    """A revocation and then the task, as Celery's test_revoked_by_headers_simple_canvas."""
    connection = connect()
    with consuming(connection, "tasks") as tasks, consuming(connection, "control", no_ack=True) as control:
        for _ in range(3):
            publish_together(connection, "control", "tasks")
            wait_until(lambda: outstanding(connection) == 2 + len(tasks), "both are here")
            connection.drain_events(timeout=DEADLINE)
            assert len(control) == len(tasks) + 1, "the broadcast comes first"
            drain(connection, tasks, len(control))


def test_a_task_waits_while_the_broadcast_before_it_is_acknowledged(connect_memory, monkeypatch):
    connection = connect_memory()
    broker = connection.connection.broker
    may_ack, real = threading.Event(), broker.ack_many
    monkeypatch.setattr(broker, "ack_many", lambda leases: may_ack.wait(DEADLINE) and real(leases))
    with consuming(connection, "tasks") as tasks, consuming(connection, "control", no_ack=True) as control:
        publish_together(connection, "control", "tasks")
        try:
            assert nothing_comes(connection)
        finally:
            may_ack.set()
        connection.drain_events(timeout=DEADLINE)
        assert (len(control), len(tasks)) == (1, 0)
        drain(connection, tasks, 1)


def test_old_tasks_and_broadcasts_take_turns(connect_memory):
    """A broadcast does not wait behind everything that was published before it."""
    connection = connect_memory()
    publish(connection, "tasks", *range(20))
    with consuming(connection, "tasks") as tasks, consuming(connection, "control", no_ack=True) as control:
        publish(connection, "control", "news")
        wait_until(lambda: outstanding(connection) == 21, "all are here")
        drain(connection, control, 1)
        assert len(tasks) <= 2


# -- outages ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("flaky")
def test_an_outage_is_waited_out(connect, caplog):
    connection = connect()
    publish(connection, "q", 1, 2)
    flaky = connection.connection.broker
    with consuming(connection, "q", prefetch=1) as taken:
        drain(connection, taken, 1)
        flaky.down = StoreUnavailable("cut")
        taken[0].ack()
        wait_until(lambda: flaky.calls["ack_and_dequeue"] + flaky.calls["ack_many"] > 5, "it goes on trying")
        assert nothing_comes(connection)
        assert len(records(caplog, "can't be used just now")) == 1
        with pytest.raises(BrokerUnavailable):
            publish(connection, "q", 3)
        flaky.down = None
        drain(connection, taken, 2)
        taken[1].ack()
        wait_until(lambda: flaky.list() == [], "both acks are stored")
        wait_until(lambda: bool(records(caplog, "can be used again")), "it is said")
    assert [record.levelname for record in records(caplog, "can't be used just now")] == ["WARNING"]
    assert len(records(caplog, "can be used again")) == 1
    assert connection.connection.engine.refused == 0


@pytest.mark.usefixtures("flaky")
def test_an_outage_is_over_when_the_broker_has_answered_and_not_when_it_is_not_asked(connect_memory, caplog):
    connection = connect_memory(lease_ttl=0.5)
    with consuming(connection, "q"):
        flaky = connection.connection.broker
        flaky.down = StoreUnavailable("cut")
        wait_until(lambda: records(caplog, "can't be used just now"), "it is noticed")
        wait_until(lambda: not connection.connection.engine._keeper.may_claim, "it claims nothing any more")
        assert nothing_comes(connection, 1.0)
        assert records(caplog, "can be used again") == []
        flaky.down = None
        wait_until(lambda: records(caplog, "can be used again"), "it is over")
    assert len(records(caplog, "can't be used just now")) == 1


@pytest.mark.usefixtures("flaky")
def test_an_outage_is_not_a_busy_loop(connect_memory, monkeypatch):
    monkeypatch.setattr(engine_module, "MIN_PAUSE", 0.05)
    connection = connect_memory()
    with consuming(connection, "q"):
        flaky = connection.connection.broker
        flaky.down = StoreUnavailable("cut")
        before, began = flaky.calls["ack_and_dequeue"], time.monotonic()
        assert nothing_comes(connection, 1.0)
        number = flaky.calls["ack_and_dequeue"] - before
        assert number < 60 * (time.monotonic() - began)
        flaky.down = None


@pytest.mark.usefixtures("flaky")
@pytest.mark.parametrize(
    "settle",
    [
        lambda message: message.ack(),
        lambda message: message.reject(),
        lambda message: message.requeue(),
    ],
)
def test_a_settlement_whose_answer_was_lost_is_not_taken_for_a_lost_lease(connect, caplog, settle):
    connection = connect()
    publish(connection, "q", 1)
    flaky = connection.connection.broker
    message = connection.default_channel.basic_get("q")
    for name in ("ack_many", "ack_and_dequeue", "fail", "requeue_many"):
        flaky.lost_answers[name] = 1
    settle(message)
    wait_until(lambda: not connection.connection.engine._live, "it is settled")
    assert records(caplog, "refused") == []
    assert connection.connection.engine.refused == 0


@pytest.mark.usefixtures("flaky")
def test_claims_whose_answer_was_lost_come_back(connect_memory):
    connection = connect_memory(lease_ttl=6)
    flaky = connection.connection.broker
    flaky.lost_answers["ack_and_dequeue"] = 1
    publish(connection, "q", 1)
    with consuming(connection, "q", then=lambda message: message.ack()) as taken:
        drain(connection, taken, 1)
    assert taken[0].delivery_info["redelivered"] is False


@pytest.mark.usefixtures("flaky")
def test_what_will_never_work_is_an_error_in_the_log_and_tried_again_all_the_same(connect_memory, caplog):
    connection = connect_memory()
    with consuming(connection, "q") as taken:
        connection.connection.broker.down = ConfigError("no such table")
        wait_until(lambda: bool(records(caplog, "no such table")), "it is told")
        connection.connection.broker.down = None
        publish(connection, "q", 1)
        drain(connection, taken, 1)
    assert [record.levelname for record in records(caplog, "no such table (")] == []
    assert "ERROR" in {record.levelname for record in records(caplog, "no such table")}


@pytest.mark.usefixtures("flaky")
def test_a_bug_in_a_turn_does_not_end_the_pump(connect_memory, caplog):
    connection = connect_memory()
    with consuming(connection, "q") as taken:
        connection.connection.broker.down = RuntimeError("a bug")
        wait_until(lambda: bool(records(caplog, "a turn of the delivery engine failed")), "it is told")
        connection.connection.broker.down = None
        publish(connection, "q", 1)
        drain(connection, taken, 1)


@pytest.mark.usefixtures("flaky")
def test_closing_during_an_outage_says_what_will_run_again(connect_memory, caplog, monkeypatch):
    monkeypatch.setattr(engine_module, "LAST_TRY", 0.1)
    connection = connect_memory()
    publish(connection, "q", 1)
    message = connection.default_channel.basic_get("q")
    connection.connection.broker.down = StoreUnavailable("cut")
    message.ack()
    connection.release()
    assert len(records(caplog, "stopping with 1 acknowledgements and 0 other settlements unwritten")) == 1


@pytest.mark.usefixtures("flaky")
def test_closing_writes_the_acknowledgements_after_a_short_outage(connect_memory):
    connection, other = connect_memory(), connect_memory()
    publish(connection, "q", 1)
    message = connection.default_channel.basic_get("q")
    flaky = connection.connection.broker
    flaky.down = StoreUnavailable("cut")
    message.ack()
    timer = threading.Timer(0.3, lambda: setattr(flaky, "down", None))
    timer.start()
    connection.release()
    timer.join()
    assert other.connection.broker.list() == []


@pytest.mark.usefixtures("flaky")
def test_consuming_can_not_begin_during_an_outage(connect_memory):
    connection = connect_memory()
    channel = connection.channel()
    connection.connection.broker.down = StoreUnavailable("cut")
    with pytest.raises(BrokerUnavailable):
        channel.basic_consume("q")
    with pytest.raises(BrokerUnavailable):
        channel.basic_get("q")
    connection.connection.broker.down = None
    assert channel.basic_get("q") is None


@pytest.mark.usefixtures("flaky")
def test_nothing_is_claimed_while_leases_can_not_be_renewed(connect_memory, monkeypatch):
    connection = connect_memory()
    with consuming(connection, "q"):
        wait_until(lambda: connection.connection.broker.calls["ack_and_dequeue"] > 0, "it claims")
        monkeypatch.setattr(type(connection.connection.engine._keeper), "may_claim", property(lambda keeper: False))
        publish(connection, "q", 1)
        assert nothing_comes(connection)
        assert size(connection, "q") == 1
        monkeypatch.undo()


def test_a_consumer_that_can_not_tell_its_room_gets_nothing_and_may_settle(connect_memory, caplog):
    connection = connect_memory()
    channel = connection.channel()
    answers: list[int] = [1]
    with consuming(connection, "q", prefetch=4, channel=channel) as taken:
        channel.limit_claims(lambda: answers[0])
        publish(connection, "q", 1, 2)
        drain(connection, taken, 1)
        del answers[:]
        wait_until(lambda: bool(records(caplog, "can't tell how much it could start")), "it is told")
        taken[0].ack()
        wait_until(lambda: size(connection, "q") == 1, "the first is settled")
        assert nothing_comes(connection)
        answers.append(1)
        drain(connection, taken, 2)
    assert len(records(caplog, "can't tell how much it could start")) == 1


def test_room_that_comes_while_leases_can_not_be_renewed_is_filled_afterwards(connect_memory, monkeypatch):
    connection = connect_memory()
    with consuming(connection, "q", prefetch=1) as taken:
        publish(connection, "q", 1, 2)
        drain(connection, taken, 1)
        engine = connection.connection.engine
        with monkeypatch.context() as patched:
            patched.setattr(type(engine._keeper), "may_claim", property(lambda keeper: False))
            # As if another channel, which has room, slept until it is told.
            engine._looking.at = time.monotonic() + 3600.0
            taken[0].ack()
            wait_until(
                lambda: size(connection, "q") == 1 and not engine._pending and engine._looking.found_nothing, "it waits"
            )
        drain(connection, taken, 2)


def test_claims_are_given_back_when_a_bug_keeps_them_from_being_delivered(connect_memory, monkeypatch, caplog):
    connection = connect_memory()
    with consuming(connection, "q") as taken:
        engine = connection.connection.engine
        among = engine.revoked.among
        bugs = [RuntimeError("a bug")]

        def fail(claims):
            if bugs:
                raise bugs.pop()
            return among(claims)

        monkeypatch.setattr(engine.revoked, "among", fail)
        publish(connection, "q", 1)
        drain(connection, taken, 1)
        assert taken[0].delivery_info["redelivered"] is False
    assert records(caplog, "a turn of the delivery engine failed")


def test_a_channel_that_is_closed_during_a_look_is_forgotten(connect_memory, monkeypatch):
    connection = connect_memory()
    with consuming(connection, "q"):
        engine = connection.connection.engine
        channel = connection.channel()
        claim = engine.broker.ack_and_dequeue
        window = channel.qos

        def claim_and_close(*args, **options):
            found = claim(*args, **options)
            engine.remove_window(window)
            return found

        monkeypatch.setattr(engine.broker, "ack_and_dequeue", claim_and_close)
        with consuming(connection, "other", channel=channel):
            wait_until(lambda: window not in engine._windows, "it is closed")
            wait_until(lambda: engine._looking.found_nothing, "the look has ended")
            assert window not in {known for known, _ in engine._looking.found_nothing}


# -- lost and canceled -----------------------------------------------------------------------------


def test_an_ack_that_comes_too_late_is_refused_with_one_warning(connect, caplog):
    connection = connect()
    publish(connection, "q", 1, correlation_id="the-id")
    message = connection.default_channel.basic_get("q")
    broker = connection.connection.broker
    # Somebody takes the execution over.
    (task,) = broker.list()
    connection.connection.engine._keeper.session_for("q")
    for session in [kept.session for kept in connection.connection.engine._keeper._kept.values()]:
        broker.close_session(session)
    (claim,) = broker.dequeue(["q"])
    message.ack()
    wait_until(lambda: connection.connection.engine.refused == 1, "it is refused")
    (warning,) = records(caplog, "refused")
    assert warning.levelname == "WARNING"
    for part in (f"ack of execution {task.id} ", "'q'", "task_id the-id"):
        assert part in warning.message
    assert broker.get(task.id).state is State.RUNNING
    broker.ack(claim)


def test_leases_that_are_lost_are_forgotten_and_told_once(connect, caplog):
    connection = connect(lease_ttl=6)
    publish(connection, "q", 1, 2, 3, correlation_id="the-id")
    broker = connection.connection.broker
    with consuming(connection, "q", prefetch=3) as taken:
        drain(connection, taken, 1)
        wait_until(lambda: broker.queue_len("q") == 0, "all are claimed")
        for kept in connection.connection.engine._keeper._kept.values():
            broker.close_session(kept.session)
        wait_until(lambda: len(records(caplog, "lease lost")) == 1, "the loss is told")
        (warning,) = records(caplog, "lease lost")
        for part in ("'q'", "task_id the-id", "the result of this run will not be accepted"):
            assert part in warning.message
        taken[0].ack()
        # The window is free again, and everything is delivered anew.
        drain(connection, taken, 4)
        assert sorted(taken.bodies) == [1, 1, 2, 3]
    assert records(caplog, "refused") == []


def test_a_lease_whose_ack_is_on_its_way_is_not_reported_lost(connect_memory, caplog):
    connection = connect_memory()
    publish(connection, "q", 1)
    message = connection.default_channel.basic_get("q")
    engine = connection.connection.engine
    (delivery,) = engine._live.values()
    with engine._turn_lock:
        message.ack()
        engine._on_lost([delivery.claim])
    wait_until(lambda: not engine._live, "the ack is stored")
    assert records(caplog, "lease lost") == []
    assert engine.refused == 0


def test_canceled_executions_that_nobody_has_seen_are_finished(connect):
    connection = connect(lease_ttl=6)
    publish(connection, "q", 1, 2)
    broker = connection.connection.broker
    with consuming(connection, "q", prefetch=2) as taken:
        drain(connection, taken, 1)
        wait_until(lambda: broker.queue_len("q") == 0, "both are claimed")
        seen, unseen = broker.list()
        broker.cancel(seen.id)
        broker.cancel(unseen.id)
        wait_until(lambda: broker.get(unseen.id).state is State.CANCELED, "the unseen one is finished")
        assert broker.get(seen.id).state is State.RUNNING
        taken[0].ack()
        assert nothing_comes(connection)
    assert taken.bodies == [1]


def test_a_living_consumer_keeps_its_leases(connect):
    # More than a busy machine may pause between two renewals.
    connection, other = connect(lease_ttl=4, reap_interval=0.2), connect()
    publish(connection, "q", 1, 2)
    with consuming(connection, "q", prefetch=2) as taken:
        drain(connection, taken, 1)
        wait_until(lambda: size(other, "q") == 0, "both are claimed")
        deadline = time.monotonic() + 9.0  # more than two lease times
        while time.monotonic() < deadline:
            assert other.default_channel.basic_get("q") is None
            time.sleep(0.1)
        drain(connection, taken, 2)
    assert [message.delivery_info["redelivered"] for message in taken] == [False, False]


# -- connections that are given up -----------------------------------------------------------------


def test_a_connection_given_up_still_settles_what_somebody_works_on(connect, caplog):
    """Celery gives its connection up after an error and opens another, while tasks run on."""
    connection = connect()
    publish(connection, "q", *range(6))
    broker = connect().connection.broker
    with consuming(connection, "q", prefetch=4) as taken:
        drain(connection, taken, 2)
        channel = taken[0].channel
        connection.collect()
    assert channel.connection is None
    assert not connection.connected
    wait_until(lambda: broker.queue_len("q") == 4, "what nobody has seen is back")
    taken[0].ack()
    wait_until(lambda: len(broker.list()) == 5, "the ack is stored")
    taken[1].reject(requeue=True)
    wait_until(lambda: broker.queue_len("q") == 5, "the requeue is stored")
    wait_until(lambda: not any("taskgate" in t.name for t in _threads_of(channel)), "its threads have ended")
    assert records(caplog, "refused") == []
    # The connection opens again.
    assert [get(connection, "q") for _ in range(6)] == [1, 2, 3, 4, 5, None]


def _threads_of(channel):
    engine = channel._engine
    threads = [engine._thread, engine._keeper._thread, engine._reaper._rounds.thread]
    return [thread for thread in threads if thread is not None and thread.is_alive()]


def test_messages_that_nobody_has_any_more_go_back(connect, monkeypatch):
    monkeypatch.setattr(engine_module, "COLLECT_AFTER", 0.1)
    connection = connect()
    publish(connection, "q", 1, 2)
    broker = connect().connection.broker
    with consuming(connection, "q") as taken:
        drain(connection, taken, 2)
        running, forgotten = taken
        forgotten.cycle = forgotten  # only the garbage collector finds this one
        taken.clear()
        gc.disable()
        try:
            connection.collect()
            del forgotten
            wait_until(lambda: broker.queue_len("q") == 1, "the forgotten one is back")
        finally:
            gc.enable()
    assert len(broker.list(Filter(states=[State.RUNNING]))) == 1
    running.ack()
    wait_until(lambda: len(broker.list()) == 1, "the ack is stored")
    message = connect().default_channel.basic_get("q")
    assert (message.payload, message.delivery_info["redelivered"]) == (2, True)


def test_giving_up_a_connection_that_does_not_consume(connect_memory):
    connection = connect_memory()
    publish(connection, "q", 1)
    connection.collect()
    assert get(connection, "q") == 1


# -- the event loop --------------------------------------------------------------------------------


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


def run_until(hub, condition, what):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, what
        hub.run_once()


def test_an_event_loop_delivers(connect, hub):
    connection = connect()
    publish(connection, "q", *range(200))
    connection.register_with_event_loop(hub)
    with consuming(connection, "q", then=lambda message: message.ack(), prefetch=10) as taken:
        run_until(hub, lambda: len(taken) == 200, "all are delivered")
        publish(connection, "q", "one more")
        run_until(hub, lambda: len(taken) == 201, "one more is delivered")
    assert taken.bodies == [*range(200), "one more"]
    wait_until(lambda: connection.connection.broker.list() == [], "all acks are stored")


def test_an_event_loop_gets_its_turn_between_deliveries(connect_memory, hub, monkeypatch):
    monkeypatch.setattr(connection_module, "MOST_AT_ONCE", 5)
    connection = connect_memory()
    publish(connection, "q", *range(20))
    connection.register_with_event_loop(hub)
    rounds = []
    with consuming(connection, "q") as taken:
        wait_until(lambda: outstanding(connection) == 20, "all are here")
        while len(taken) < 20:
            hub.run_once()
            rounds.append(len(taken))
    steps = [after - before for before, after in zip([0, *rounds], rounds, strict=False)]
    assert max(steps) == 5


def test_a_slow_callback_gives_the_loop_its_turn(connect_memory, hub, monkeypatch):
    monkeypatch.setattr(connection_module, "LONGEST_AT_ONCE", 0.0)
    connection = connect_memory()
    publish(connection, "q", *range(3))
    connection.register_with_event_loop(hub)
    with consuming(connection, "q") as taken:
        wait_until(lambda: outstanding(connection) == 3, "all are here")
        seen = []
        while len(taken) < 3:
            hub.run_once()
            seen.append(len(taken))
    assert {after - before for before, after in zip([0, *seen], seen, strict=False)} <= {0, 1}


def test_an_error_in_a_callback_leaves_the_rest_for_the_next_round(connect_memory, hub):
    connection = connect_memory()
    publish(connection, "q", *range(3))
    connection.register_with_event_loop(hub)

    def fail_once(message):
        if message.payload == 0:
            raise KeyError("mine")

    with consuming(connection, "q", then=fail_once) as taken:
        wait_until(lambda: outstanding(connection) == 3, "all are here")
        with pytest.raises(KeyError):
            run_until(hub, lambda: len(taken) == 3, "never")
        run_until(hub, lambda: len(taken) == 3, "the others are delivered")


def test_leaving_an_event_loop(connect_memory, hub):
    connection = connect_memory()
    connection.register_with_event_loop(hub)
    assert len(hub.readers) == 1
    connection.transport.unregister_from_event_loop(connection.connection, hub)
    assert not hub.readers
    connection.register_with_event_loop(hub)
    connection.close()
    assert not hub.readers
    connection.connect()
    connection.register_with_event_loop(hub)
    old, transport = connection.connection, connection.transport
    connection.collect()
    assert not hub.readers
    with pytest.raises(RecoverableConnectionError):
        transport.on_readable(old, hub)


# -- queues with a limited life --------------------------------------------------------------------


def test_queues_that_expire_live_as_long_as_they_are_consumed(connect):
    connection = connect(reap_interval=0.2)
    topology = connect().connection.broker.topology
    channel = connection.channel()
    channel.queue_declare("kept", arguments={"x-expires": 4000})
    channel.queue_declare("left", arguments={"x-expires": 4000})
    publish(connection, "left", 1)
    with consuming(connection, "kept", channel=channel):
        wait_until(lambda: topology.queue("left") is None, "the unused queue is deleted")
        assert size(connection, "left") == 0
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            assert topology.queue("kept") is not None
            time.sleep(0.05)
    wait_until(lambda: topology.queue("kept") is None, "the queue is deleted once nobody consumes it")


def test_a_consumed_queue_that_was_deleted_is_declared_again_with_its_bindings(connect, caplog):
    connection = connect(reap_interval=60, lease_ttl=3)
    topology = connect(lease_ttl=3).connection.broker.topology
    channel = connection.channel()
    channel.exchange_declare("x", type="fanout")
    channel.queue_declare("mine", arguments={"x-expires": 3000})
    channel.queue_bind("mine", "x", "k")
    channel.queue_bind("mine", "x", "k2")
    channel.queue_unbind("mine", "x", "k2")
    with consuming(connection, "mine", channel=channel):
        topology.delete_queue("mine")
        wait_until(lambda: topology.bindings() != [], "it is bound again")
        wait_until(lambda: bool(records(caplog, "'mine', which is consumed here, was deleted")), "it is said")
    assert topology.queue("mine") == Queue("mine", durable=False, expires=3.0)
    assert topology.bindings() == [Binding("x", "mine", "k")]
    assert len(records(caplog, "'mine', which is consumed here, was deleted")) == 1


def test_what_is_published_while_a_queue_is_deleted_does_not_stay(connect_memory, monkeypatch):
    connection = connect_memory()
    channel = connection.channel()
    channel.queue_declare("q")
    topology = connection.connection.broker.topology
    real = topology.delete_queue

    def publish_late(name):
        publish(connection, name, "late")
        real(name)

    monkeypatch.setattr(topology, "delete_queue", publish_late)
    assert channel.queue_delete("q") == 1
    assert connection.connection.broker.list() == []


def test_declaring_a_queue_again_is_using_it(connect, clock):
    channel = connect().channel()
    topology = connect().connection.broker.topology
    for seconds in (50, 20):
        channel.queue_declare("q", arguments={"x-expires": 60_000})
        clock.advance(seconds)
        assert topology.unused() == []
    clock.advance(50)
    assert topology.unused() == ["q"]


def test_a_queue_that_is_declared_again_while_others_are_deleted_stays(monkeypatch):
    clock = FakeClock()
    broker = MemoryBroker(BrokerSettings("memory://"), store=MemoryStore(), clock=clock)
    for name in ("a", "b"):
        broker.topology.declare_queue(Queue(name, expires=10.0))
    clock.advance(11.0)
    delete = declared_module.delete_queue

    def delete_slowly(broker, name):
        broker.topology.declare_queue(Queue("b", expires=10.0))
        return delete(broker, name)

    monkeypatch.setattr(declared_module, "delete_queue", delete_slowly)
    sweeper = declared_module.Sweeper(broker)
    for _ in range(declared_module.SWEEP_EVERY):
        sweeper.sweep()
    assert [queue.name for queue in broker.topology.queues()] == ["b"]


def test_a_queue_somebody_else_declared_is_kept_too(connect):
    connection, other = connect(reap_interval=0.2), connect()
    other.connection.broker.topology.declare_queue(Queue("theirs", expires=4.0))
    with consuming(connection, "theirs") as taken:
        assert isinstance(taken, Taken)
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            assert other.connection.broker.topology.queue("theirs") is not None
            time.sleep(0.05)


def test_undecodable_messages_are_not_delivered_to_those_who_do_not_acknowledge(connect_memory):
    """A message that becomes a dead letter is not also delivered, empty."""
    connection = connect_memory()
    connection.connect()
    broker = connection.connection.broker
    id = broker.enqueue(NewTask("q", payload=b"garbage"))
    with consuming(connection, "q", no_ack=True) as taken:
        wait_until(lambda: broker.get(id).state is State.FAILED, "a dead letter")
        publish(connection, "q", "after")
        drain(connection, taken, 1)
        assert nothing_comes(connection)
    assert taken.bodies == ["after"]


# -- resting ---------------------------------------------------------------------------------------


@pytest.fixture
def threads_of_engines():
    """The names of those that have begun in the test."""
    before = set(threading.enumerate())
    return lambda: [one.name for one in set(threading.enumerate()) - before if one.name.startswith("taskgate-")]


def test_an_engine_that_nobody_uses_rests_and_works_again(connect, monkeypatch, threads_of_engines):
    monkeypatch.setattr("kombu_taskgate.transport.engine.REST_AFTER", 0.2)
    connection = connect()
    publish(connection, "q", 1)
    channel = connection.channel()
    with consuming(connection, "q", channel=channel) as taken:
        drain(connection, taken, 1)
        wait_until(lambda: threads_of_engines() != [], "it runs")
    time.sleep(0.5)
    assert threads_of_engines() != [], "there still is something to settle"
    taken[0].ack()
    wait_until(lambda: threads_of_engines() == [], "it rests")
    assert size(connection, "q") == 0
    assert connection.connection.broker.list() == []
    publish(connection, "q", 2, 3)
    with consuming(connection, "q", channel=channel) as taken:
        drain(connection, taken, 2)
        for message in taken:
            message.ack()
        wait_until(lambda: connection.connection.consumers_of("q") == 1, "it is counted again")
    wait_until(lambda: threads_of_engines() == [], "it rests again")
    publish(connection, "q", 4)
    assert get(connection, "q") == 4
    wait_until(lambda: threads_of_engines() == [], "and again")
    assert connection.connection.broker.list() == []


def test_a_resting_engine_ends_with_its_connection(connect_memory, monkeypatch, threads_of_engines):
    monkeypatch.setattr("kombu_taskgate.transport.engine.REST_AFTER", 0.1)
    for end in ("collect", "close"):
        connection = connect_memory()
        assert get(connection, "q") is None
        wait_until(lambda: threads_of_engines() == [], "it rests")
        engine = connection.connection.engine
        getattr(connection, end)()
        assert engine._stopping
