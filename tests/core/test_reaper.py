"""The reaper goes on, whatever a round meets."""

from __future__ import annotations

import math
import threading
import time

import pytest

from kombu_taskgate.core.errors import StoreUnavailable, TaskgateError
from kombu_taskgate.core.memory import MemoryBroker, MemoryStore
from kombu_taskgate.core.model import NewTask, State
from kombu_taskgate.core.reaper import Reaper
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.threads import DEADLINE
from kombu_taskgate.testing.threads import wait_until as wait_for


class Scripted(MemoryBroker):
    """A broker whose rounds can be made to fail."""

    fault: Exception | None = None
    calm = 0.0
    rounds = 0
    prunes = 0

    def reap_expired(self) -> int:
        self.rounds += 1
        if self.fault is not None:
            raise self.fault
        return super().reap_expired()

    def reap_in(self) -> float:
        return self.calm

    def prune(self, limit: int = 1000) -> int:
        self.prunes += 1
        return super().prune(limit)


def make_broker() -> Scripted:
    return Scripted(BrokerSettings("memory://", lease_ttl=0.05), store=MemoryStore())


def test_takes_back_what_ran_out() -> None:
    broker = make_broker()
    id = broker.enqueue(NewTask("q"))
    broker.dequeue(["q"])
    reaper = Reaper(broker, 0.01)
    reaper.start()
    wait_for(lambda: broker.get(id).state is State.PENDING, "reaped")
    reaper.stop()
    assert broker.get(id).lease_lost == 1
    assert broker.prunes == 1


def test_reaps_nothing_where_nothing_can_have_run_out() -> None:
    broker = make_broker()
    broker.calm = 1.0
    also: list[None] = []
    reaper = Reaper(broker, 0.01, also=lambda: also.append(None))
    reaper.start()
    wait_for(lambda: len(also) >= 5, "it goes on with the rest")
    assert broker.rounds == 0
    broker.calm = 0.0
    wait_for(lambda: broker.rounds >= 3, "it reaps")
    reaper.stop()


@pytest.mark.parametrize("fault", [StoreUnavailable("away"), RuntimeError("a bug")])
def test_survives_failing_rounds(fault: Exception, caplog: pytest.LogCaptureFixture) -> None:
    broker = make_broker()
    broker.fault = fault
    reaper = Reaper(broker, 0.01)
    reaper.start()
    wait_for(lambda: broker.rounds >= 3, "it goes on")
    broker.fault = None
    id = broker.enqueue(NewTask("q"))
    broker.dequeue(["q"])
    wait_for(lambda: broker.get(id).state is State.PENDING, "it reaps again")
    reaper.stop()
    warnings = [record for record in caplog.records if "can't reap" in record.getMessage()]
    assert len(warnings) == (1 if isinstance(fault, StoreUnavailable) else 0), "an outage is said once"


def test_errors_go_to_who_asks() -> None:
    broker = make_broker()
    broker.fault = StoreUnavailable("away")
    told: list[TaskgateError] = []
    reaper = Reaper(broker, 0.01, on_error=told.append)
    reaper.start()
    wait_for(lambda: len(told) >= 2, "told")
    reaper.stop()


def test_also_is_called_after_each_round() -> None:
    broker = make_broker()
    calls: list[int] = []
    reaper = Reaper(broker, 0.01, also=lambda: calls.append(broker.rounds))
    reaper.start()
    wait_for(lambda: len(calls) >= 3, "called")
    reaper.stop()
    reaper.stop()
    seen = broker.rounds
    time.sleep(0.05)  # as long as several rounds would take: a thread that went on would be seen
    assert broker.rounds == seen


def test_stop_does_not_wait_for_an_answer_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kombu_taskgate.core.rounds.STOP_WITHIN", 0.1)
    broker = make_broker()
    asked, answers = threading.Event(), threading.Event()
    swept: list[str] = []

    def hang() -> int:
        asked.set()
        answers.wait(DEADLINE)
        return 0

    monkeypatch.setattr(broker, "reap_expired", hang)
    reaper = Reaper(broker, 0.01, also=lambda: swept.append("swept"))
    reaper.start()
    thread = reaper._rounds.thread
    assert thread is not None
    assert asked.wait(DEADLINE)
    reaper.stop()
    assert thread.is_alive()
    answers.set()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert swept == [], "a round that comes back after the stop does nothing more"


def test_looks_when_a_lease_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next usual round when a lease ends before, or could, were it claimed right after a calm look."""
    broker = make_broker()
    reaper = Reaper(broker, 20.0)
    for calm, end, expected in [(0.0, math.inf, 25.0), (0.0, 30.0, 25.0), (0.0, 3.0, 3.5), (4.0, math.inf, 4.5)]:
        monkeypatch.setattr(broker, "reap_in", lambda calm=calm: calm)
        monkeypatch.setattr(broker, "runs_out_in", lambda end=end: end)
        pauses = [reaper._round(lambda: False) for _ in range(50)]
        if expected == 25.0:
            assert min(pauses) >= 15.0
        else:
            assert expected - 0.5 < min(pauses), "never before the end"
        assert max(pauses) <= expected


def test_a_healthy_cluster_is_looked_at_as_seldom_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that lives has at least 2/3 of its time left, which is later than the next round can be."""
    broker = make_broker()
    monkeypatch.setattr(broker, "runs_out_in", lambda: 40.0)
    reaper = Reaper(broker, 20.0)
    assert all(15.0 <= reaper._round(lambda: False) <= 25.0 for _ in range(50))
