"""LISTEN and NOTIFY: who is told of what, how seldom, and what happens when a word is lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psycopg
import pytest
import sqlalchemy as sa

from kombu_taskgate.core import listener as listener_module
from kombu_taskgate.core import notifier as notifier_module
from kombu_taskgate.core.model import FailKind, NewTask
from kombu_taskgate.core.notifier import LONGEST, RESULTS, Notifier, ResultNotifier, names_in, work_in
from kombu_taskgate.core.sql import SqlBroker
from kombu_taskgate.core.topology import Binding, Exchange, Queue
from kombu_taskgate.core.watch import LOOK_ON
from kombu_taskgate.testing.statements import noted
from kombu_taskgate.testing.stores import InDatabase
from kombu_taskgate.testing.threads import wait_until

pytestmark = pytest.mark.postgresql


@pytest.fixture
def store(postgresql_url: str) -> Iterator[InDatabase]:
    store = InDatabase(postgresql_url)
    yield store
    store.close()


class Hearer:
    """A broker, as another process would have it, and what it was told."""

    def __init__(self, broker: SqlBroker) -> None:
        self.broker = broker
        self.told: list[set[str] | None] = []
        self.watch = broker.watch(lambda queues: self.told.append(None if queues is None else set(queues)))
        wait_until(lambda: self.watch.live, "it listens")
        wait_until(lambda: self.told == [None], "it is told to look when it begins to listen")
        self.told.clear()

    def queues(self) -> set[str]:
        return {queue for queues in self.told for queue in queues or ()}


@pytest.fixture
def hearer(store: InDatabase) -> Hearer:
    return Hearer(store.open())


@pytest.fixture
def teller(store: InDatabase) -> SqlBroker:
    return store.open()


@pytest.fixture
def heard(store: InDatabase, teller: SqlBroker, postgresql_url: str) -> Iterator[Callable[[], list[str]]]:
    """Every single notification on the broker's channel; the call waits until a mark it sends itself has arrived."""
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(f'LISTEN "{teller._channel}"')

        def collect() -> list[str]:
            connection.execute("SELECT pg_notify(%s, 'mark')", [teller._channel])
            texts: list[str] = []
            for notification in connection.notifies():
                if notification.payload == "mark":
                    return texts
                texts.append(notification.payload)
            raise AssertionError("unreachable")

        yield collect


def test_work_of_another_process_is_told(hearer, teller):
    teller.enqueue(NewTask("q"))
    wait_until(lambda: hearer.queues() == {"q"}, "the queue is told")
    teller.enqueue_many([NewTask("a"), NewTask("b", delay=60.0)])
    wait_until(lambda: hearer.queues() == {"q", "a", "b"}, "delayed ones too: the next may be due earlier now")


def test_whatever_becomes_ready_is_told(store, teller, heard):
    calm = notifier_module.ANNOUNCE_EVERY

    def told(what: Callable[[], object]) -> list[str]:
        time.sleep(calm)
        what()
        return heard()

    teller.enqueue_many([NewTask("q"), NewTask("q"), NewTask("q", max_retry=5)])
    first, second, third = teller.dequeue(["q"], 3)
    heard()
    assert told(lambda: teller.requeue(first)) == [work_in(["q"])]
    assert told(lambda: teller.fail(third, FailKind.BUSINESS, delay=0.0)) == [work_in(["q"])]
    session = teller.open_session("somebody", 60.0)
    teller.dequeue(["q"], 1, session=session)
    assert told(lambda: teller.close_session(session)) == [work_in(["q"])]
    child = teller.enqueue(NewTask("child", parents=(second.id,)))
    assert heard() == [], "a blocked one is work for nobody"
    assert told(lambda: teller.ack(second)) == [work_in(["child"])]
    teller.cancel(child)
    assert told(lambda: teller.replay(child)) == [work_in(["child"])]
    short = store.open(lease_ttl=0.05)
    short.dequeue(["child"], 1)
    wait_until(lambda: short.reap_expired() == 1, "the lease has run out")
    assert heard() == [work_in(["child"])]


def test_a_thousand_messages_in_one_transaction_are_one_notification(teller, heard):
    teller.enqueue_many([NewTask("q") for _ in range(1000)])
    assert heard() == [work_in(["q"])]


def test_a_queue_that_was_announced_a_moment_ago_is_not_announced_again(teller, heard, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(notifier_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(20):
        teller.enqueue(NewTask("q"))
    assert heard() == [work_in(["q"])]
    now[0] += notifier_module.ANNOUNCE_EVERY
    teller.enqueue(NewTask("q"))
    assert heard() == [work_in(["q"])]


def test_a_commit_that_took_longer_than_silence_is_announced_after_it(teller, heard):
    teller.enqueue(NewTask("q"))
    assert heard() == [work_in(["q"])]
    teller.database.fault = lambda point: time.sleep(2 * notifier_module.ANNOUNCE_EVERY)
    teller.enqueue(NewTask("q"))
    assert heard() == [work_in(["q"])]


def test_an_announcement_of_long_ago_silences_nobody(teller, heard):
    """Whoever heard of the first may have stopped looking before this process was able to go on."""
    teller.database.fault = lambda point: time.sleep(LOOK_ON if point == "after_commit" else 0.0)
    teller.enqueue(NewTask("q"))
    teller.database.fault = None
    teller.enqueue(NewTask("q"))
    assert heard() == 2 * [work_in(["q"])]


def test_nothing_is_told_of_what_is_rolled_back(teller, heard):
    teller.enqueue(NewTask("other"))
    heard()

    def fail(point: str) -> None:
        raise RuntimeError(point)

    teller.database.fault = fail
    with pytest.raises(RuntimeError):
        teller.enqueue(NewTask("q"))
    teller.database.fault = None
    assert heard() == []


def test_switched_off_nobody_tells_and_nobody_listens(store, heard):
    quiet = store.open(listen=False)
    quiet.enqueue(NewTask("q"))
    assert heard() == []
    before = set(threading.enumerate())
    watch = quiet.watch(lambda queues: None)
    assert not watch.live
    assert watch.longest_pause == quiet.settings.poll_max
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "taskgate-listener"]
    watch.close()


def test_the_thread_and_its_connection_end_with_the_last_watch(hearer, postgresql_url):
    second = hearer.broker.watch(lambda queues: None)
    thread = hearer.broker._listener._thread
    hearer.watch.close()
    assert second.live
    assert sessions_that_listen(postgresql_url, hearer.broker._channel) == 1
    second.close()
    second.close()
    assert not second.live
    wait_until(lambda: not thread.is_alive(), "the thread has ended")
    wait_until(lambda: not sessions_that_listen(postgresql_url, hearer.broker._channel), "the connection is closed")


def sessions_that_listen(url: str, channel: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE %s AND pid <> pg_backend_pid()",
            [f"LISTEN%{channel}%"],
        ).fetchone()
    assert row is not None
    return int(row[0])


def kill_listener(url: str, channel: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE %s AND pid <> pg_backend_pid()",
            [f"LISTEN%{channel}%"],
        )


def test_a_killed_listening_session_is_noticed_and_replaced(hearer, teller, postgresql_url):
    """B106."""
    paused = hearer.watch.longest_pause
    kill_listener(postgresql_url, hearer.broker._channel)
    wait_until(lambda: None in hearer.told, "it is told to look by itself")
    wait_until(lambda: hearer.watch.live, "it listens again")
    assert hearer.watch.longest_pause == paused
    wait_until(lambda: hearer.told.count(None) >= 2, "it is told to look for what came meanwhile")
    hearer.told.clear()
    teller.enqueue(NewTask("q"))
    wait_until(lambda: hearer.queues() == {"q"}, "it hears")


def test_while_it_cannot_listen_it_is_not_live(hearer, postgresql_url, monkeypatch):
    def refuse(conn: sa.Connection, channel: str) -> None:
        conn.exec_driver_sql("SELECT 1/0")

    monkeypatch.setattr(hearer.broker.database.dialect, "listen", refuse)
    kill_listener(postgresql_url, hearer.broker._channel)
    wait_until(lambda: not hearer.watch.live, "it has noticed")
    assert hearer.watch.longest_pause == hearer.broker.settings.poll_max
    monkeypatch.undo()
    wait_until(lambda: hearer.watch.live, "it listens again")


def test_a_connection_that_has_gone_deaf_is_found_out_when_somebody_doubts(hearer, monkeypatch):
    listener = hearer.broker._listener
    monkeypatch.setattr("kombu_taskgate.core.listener.ANSWER", 0.2)
    monkeypatch.setattr("kombu_taskgate.core.listener.TRY_AGAIN", 0.1)
    real = listener._send
    monkeypatch.setattr(listener, "_send", lambda text: None)
    tested = listener._tested_at
    hearer.watch.doubt()
    assert not listener._doubted, "it was tested a moment ago"
    monkeypatch.setattr("kombu_taskgate.core.listener.DOUBT_EVERY", 0.0)
    hearer.watch.doubt()
    wait_until(lambda: not hearer.watch.live, "it is found out")
    assert listener._tested_at > tested
    monkeypatch.setattr(listener, "_send", real)
    wait_until(lambda: hearer.watch.live, "it has a new connection")


def test_where_notifications_do_not_arrive_it_says_so_once_and_polls(store, caplog, monkeypatch):
    monkeypatch.setattr("kombu_taskgate.core.listener.ANSWER", 0.1)
    monkeypatch.setattr("kombu_taskgate.core.listener.TRY_AGAIN", 0.1)
    broker = store.open()
    monkeypatch.setattr(broker._listener, "_send", lambda text: None)
    watch = broker.watch(lambda queues: None)
    wait_until(lambda: "does not deliver notifications" in caplog.text, "it is said")
    tested = broker._listener._tested_at
    wait_until(lambda: broker._listener._tested_at > tested, "it is tried again")
    assert not watch.live
    assert watch.longest_pause == broker.settings.poll_max
    assert caplog.text.count("does not deliver notifications") == 1
    watch.close()


def test_an_answer_that_was_there_while_the_process_was_frozen_counts(hearer, monkeypatch):
    listener = hearer.broker._listener
    sent: list[str] = []
    monkeypatch.setattr(listener, "_send", sent.append)
    hours = iter(range(0, 360_000, 3600))
    monkeypatch.setattr(listener_module, "time", SimpleNamespace(monotonic=lambda: float(next(hours))))
    assert listener._arrives(lambda timeout: sent, threading.Event())
    assert not listener._arrives(lambda timeout: [], threading.Event())


def test_changed_bindings_are_told_so_recent_ones_are_right(hearer, teller):
    mine, theirs = hearer.broker.topology, teller.topology
    theirs.declare_exchange(Exchange("x", "topic"))
    assert mine.recent_bindings("x") == []
    theirs.declare_queue(Queue("q"))
    binding = Binding("x", "q", "k")
    theirs.bind(binding)
    wait_until(lambda: mine.recent_bindings("x") == [binding], "the new one is seen")
    theirs.unbind(binding)
    wait_until(lambda: mine.recent_bindings("x") == [], "it is seen to be gone")
    theirs.bind(binding)
    wait_until(lambda: mine.recent_bindings("x") == [binding], "it is back")
    theirs.delete_queue("q")
    wait_until(lambda: mine.recent_bindings("x") == [], "it went with its queue")


def test_recent_bindings_are_not_read_again(hearer, teller):
    with noted(hearer.broker.database.engine) as sent:
        hearer.broker.topology.recent_bindings("x")
        # Its listener may use the engine as well.
        assert len([text for text in sent if "bindings" in text]) == 1
        for _ in range(100):
            hearer.broker.topology.recent_bindings("x")
    assert len([text for text in sent if "bindings" in text]) == 1


# -- the texts -------------------------------------------------------------------------------------


def test_texts_say_what_they_were_made_of():
    for queues in (["a"], ["b", "a"], ["🐘\n'\"", "x" * 255]):
        assert names_in(work_in(queues)) == sorted(queues)


def test_too_many_queues_to_name_are_any():
    text = work_in([f"{number:0200}" for number in range(100)])
    assert len(text) <= LONGEST
    assert names_in(text) is None


def test_queues_are_due_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(notifier_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    notifier = Notifier()
    assert notifier.due(["a", "b"]) == ["a", "b"]
    notifier.sent(["a"], now[0])
    assert notifier.due(["a", "b"]) == ["b"]
    now[0] += 2 * notifier_module.ANNOUNCE_EVERY
    assert notifier.due(["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("took", "silence"),
    [
        (0.0, notifier_module.ANNOUNCE_MIN),
        (0.002, 0.002 * notifier_module.SILENCE),
        (0.1, notifier_module.ANNOUNCE_EVERY),
    ],
)
def test_who_waits_long_at_commits_announces_seldom(monkeypatch, took, silence):
    now = [100.0]
    monkeypatch.setattr(notifier_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    notifier = Notifier()
    notifier.sent(["q"], now[0] - took)
    now[0] += 0.99 * silence
    assert notifier.due(["q"]) == []
    assert notifier.overdue(["q"]) == []
    now[0] += 0.02 * silence
    assert notifier.due(["q"]) == ["q"]
    assert notifier.overdue(["q"]) == ([] if silence < notifier_module.ANNOUNCE_EVERY else ["q"])


@pytest.mark.parametrize("took", [0.001, 0.02])
def test_results_are_named_for_a_fixed_part_of_the_time(monkeypatch, took):
    now = [100.0]
    monkeypatch.setattr(notifier_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    notifier = ResultNotifier()

    def store(seconds: float) -> dict[str | None, int]:
        said: dict[str | None, int] = Counter()
        end = now[0] + seconds
        while now[0] < end:
            text = notifier.text("id")
            said[text] += 1
            now[0] += took
            if text not in (None, RESULTS):
                notifier.took(took)
        return said

    store(2.0)  # the credit is used up
    said = store(10.0)
    named = said['r["id"]']
    assert named == pytest.approx(10.0 / notifier_module.cost_of(took), rel=0.1)
    if took < notifier_module.ANNOUNCE_EVERY / 2:
        assert said[RESULTS] <= 10.0 / notifier_module.ANNOUNCE_EVERY + 1
    now[0] += 5.0
    assert notifier.text("id") == 'r["id"]', "after a while without any they are named again"


def test_what_was_sent_is_not_remembered_for_ever(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(notifier_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    notifier = Notifier()
    for number in range(5000):
        notifier.sent([str(number)], now[0])
        now[0] += 1.0
    assert len(notifier._sent) < 1100
