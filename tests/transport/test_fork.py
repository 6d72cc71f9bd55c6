"""Forks, and the end of a process, in programs of their own: a process with threads is not forked in a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.transport.helpers import get, publish, size

ROOT = Path(__file__).resolve().parents[2]

START = """
import json, os, sys, threading, time, warnings
warnings.filterwarnings("ignore", category=DeprecationWarning)  # fork with threads: that is the point
import kombu, kombu_taskgate
url, options = sys.argv[1], json.loads(sys.argv[2])
connection = kombu.Connection(url, transport_options=options)

def wait_until(condition):
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)

def forked(work):
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.fixture
def run(sql_store_url, sql_store):
    """Runs a program that has a connection to the store; returns what it printed."""

    def run(program: str, **more) -> str:
        given = [f"taskgate+{sql_store_url}", json.dumps({**sql_store.settings, **more})]
        done = subprocess.run(
            [sys.executable, "-c", START + textwrap.dedent(program), *given],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_child_opens_its_own_connection_and_settles_nothing_of_its_parents(run, connect_sql):
    run(
        """
        for body in range(4):
            kombu.Producer(connection).publish(body, routing_key="q")
        taken = []
        channel = connection.channel()
        consumer = kombu.Consumer(channel, [kombu.Queue("q", routing_key="q")], on_message=taken.append)
        consumer.qos(prefetch_count=3)
        consumer.consume()
        while len(taken) < 2:
            connection.drain_events(timeout=60)
        parents = connection.connection

        def child():
            assert not connection.connected
            assert not parents.connected and channel.connection is None
            assert parents not in kombu_taskgate.transport.process.watched()
            taken[0].ack()  # not the child's to settle
            channel.close()
            parents.close()
            kombu.Producer(connection).publish("child", routing_key="answers")
            assert connection.connection is not parents and connection.connected
            got = connection.default_channel.basic_get("answers")
            assert got.payload == "child"
            got.ack()
            connection.release()

        forked(child)
        assert connection.connected
        # The parent goes on as if nothing had been.
        taken[0].ack()
        taken[1].ack()
        while len(taken) < 4:
            connection.drain_events(timeout=60)
        assert [m.payload for m in taken] == [0, 1, 2, 3]
        assert not any(m.delivery_info["redelivered"] for m in taken)
        for message in taken[2:]:
            message.ack()
        connection.release()
        """
    )
    connection = connect_sql()
    assert connection.connection.broker.list() == []


def test_a_fork_while_every_thread_is_busy(run, connect_sql):
    run(
        """
        stop = threading.Event()
        busy = set()

        def consume():
            with kombu.Connection(url, transport_options=options) as mine:
                consumer = mine.Consumer([kombu.Queue("q", routing_key="q")], on_message=lambda m: m.ack())
                consumer.qos(prefetch_count=4)
                with consumer:
                    while not stop.is_set():
                        try:
                            mine.drain_events(timeout=0.1)
                            busy.add(threading.get_ident())
                        except TimeoutError:
                            continue

        def produce():
            with kombu.Connection(url, transport_options=options) as mine:
                producer = kombu.Producer(mine)
                while not stop.is_set():
                    producer.publish("x", routing_key="q")
                    busy.add(threading.get_ident())

        threads = [threading.Thread(target=work) for work in (consume, produce, produce)]
        for thread in threads:
            thread.start()
        connection.connect()
        # Python itself can't be forked while another thread imports something, as each does at first.
        wait_until(lambda: len(busy) == 3)

        def child():
            for number in range(3):
                kombu.Producer(connection).publish(number, routing_key="children")
            connection.release()

        try:
            for _ in range(10):
                forked(child)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        """
    )
    assert size(connect_sql(), "children") == 30


def test_a_process_that_ends_without_closing_settles_what_it_has(run, connect_sql):
    out = run(
        """
        for body in range(4):
            kombu.Producer(connection).publish(body, routing_key="q")
        taken = []
        consumer = connection.Consumer([kombu.Queue("q", routing_key="q")], on_message=taken.append)
        consumer.qos(prefetch_count=3)
        consumer.consume()
        while len(taken) < 2:
            connection.drain_events(timeout=60)
        taken[0].ack()
        print(taken[1].payload)
        """,
        lease_ttl=3600,
    )
    assert out == "1\n"
    connection = connect_sql()
    fetched = [connection.default_channel.basic_get("q") for _ in range(4)]
    assert [message and message.payload for message in fetched] == [1, 2, 3, None]
    assert [message.delivery_info["redelivered"] for message in fetched[:3]] == [True, False, False]


def test_a_process_that_ends_after_giving_its_connection_up(run, connect_sql):
    run(
        """
        kombu.Producer(connection).publish(1, routing_key="q")
        message = connection.default_channel.basic_get("q")
        connection.collect()
        """,
        lease_ttl=3600,
    )
    assert get(connect_sql(), "q") == 1


def test_a_child_that_exits_normally_leaves_its_parents_messages_alone(run, connect_sql):
    run(
        """
        kombu.Producer(connection).publish(1, routing_key="q")
        message = connection.default_channel.basic_get("q")
        child = os.fork()
        if not child:
            sys.exit(0)  # runs what is registered for the end of the process
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert connection.default_channel.basic_get("q") is None
        message.ack()
        connection.release()
        """,
        lease_ttl=3600,
    )
    assert connect_sql().connection.broker.list() == []


def test_publishing_works_in_parent_and_child_through_a_pool(run, connect_sql):
    run(
        """
        import kombu.pools
        pool = kombu.pools.producers[connection]
        with pool.acquire(block=True) as producer:
            producer.publish("parent", routing_key="q")

        def child():
            mine = kombu.Connection(url, transport_options=options)
            with kombu.pools.producers[mine].acquire(block=True) as producer:
                producer.publish("child", routing_key="q", retry=True)

        forked(child)
        with pool.acquire(block=True) as producer:
            producer.publish("parent again", routing_key="q")
        """
    )
    connection = connect_sql()
    publish(connection, "q", "test")
    assert [get(connection, "q") for _ in range(5)] == ["parent", "child", "parent again", "test", None]
