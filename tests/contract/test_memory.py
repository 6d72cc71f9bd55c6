"""What is special about the store in memory: it needs no database, and a fork copies it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import traceback
import warnings

from kombu_taskgate.core.memory import MemoryBroker, MemoryStore
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.threads import DEADLINE, wait_until


def test_needs_no_database_library() -> None:
    code = (
        "import sys; from kombu_taskgate.core.memory import MemoryBroker; "
        "from kombu_taskgate.core.settings import BrokerSettings; MemoryBroker(BrokerSettings('memory://')).counts(); "
        "sys.exit('sqlalchemy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_brokers_without_a_common_store_share_nothing() -> None:
    one, two = (MemoryBroker(BrokerSettings("memory://")) for _ in range(2))
    one.enqueue(NewTask("q"))
    assert (one.queue_len("q"), two.queue_len("q")) == (1, 0)


def test_own_clock_is_the_process_clock() -> None:
    before = time.time() * 1000 - 1
    id = (broker := MemoryBroker(BrokerSettings("memory://"))).enqueue(NewTask("q"))
    assert before <= broker.get(id).created_at <= time.time() * 1000 + 1


def test_closed_broker_stops_waiting() -> None:
    broker = MemoryBroker(BrokerSettings("memory://", poll_max=DEADLINE))
    thread = threading.Thread(target=lambda: broker.dequeue(["q"], timeout=None), daemon=True)
    thread.start()
    broker.close()
    thread.join(DEADLINE / 2)
    assert not thread.is_alive()


def test_fork_while_threads_hold_the_lock() -> None:
    """The child's copy is whole, its locks are free, and the parent goes on."""
    store = MemoryStore()
    broker = MemoryBroker(BrokerSettings("memory://"), store=store)
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            # Both or neither are in the child's copy.
            broker.enqueue_many([NewTask("a"), NewTask("b")])

    threads = [threading.Thread(target=publish, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            seen = store.last_id
            wait_until(lambda seen=seen: store.last_id > seen, "the threads publish")  # type: ignore[misc]
            assert _exit_status_of_child(broker) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE)
    assert broker.queue_len("a") == broker.queue_len("b") > 0
    assert broker.queue_len("child") == 0


def _exit_status_of_child(broker: MemoryBroker) -> int:
    with warnings.catch_warnings():
        # Newer Pythons warn of forks with threads: that is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert broker.queue_len("a") == broker.queue_len("b")
            broker.enqueue(NewTask("child"))
            assert len(broker.dequeue(["child"], timeout=1)) == 1
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    give_up = time.monotonic() + DEADLINE / 4
    while time.monotonic() < give_up:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -9
