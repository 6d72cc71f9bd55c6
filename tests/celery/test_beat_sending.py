"""One tick: its message, its row and its entry are stored together, under the leader's term or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from celery_ext import signals
from celery_ext.beat.sending import Due, NotSent, Outcome, Sender, task_id_of
from celery_ext.result_settings import broker_settings
from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import ConfigError, NotLeader
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.schedules import Entry, Progress, Tick, TickState
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.terms import Term
from tests.celery import results

DUE = 1_800_000_000_000


class Scene:
    """An app, its broker, an entry, and a term."""

    def __init__(self, settings: BrokerSettings, together: bool) -> None:
        self.app: Celery = results.make_app(settings)
        self.broker: Broker = open_broker(settings)
        self.leads = True
        self.term = self.lead("one")
        own = broker_settings(self.app) if together else None
        self.sender = Sender(self.broker.schedules, self.term, lambda: self.leads, own)
        self.broker.schedules.add("k", Entry("e", task="t", schedule="interval 1", base_at=DUE - 1))
        self.told: list[dict[str, Any]] = []

    def lead(self, holder: str) -> Term:
        term = self.broker.terms.try_acquire("k", holder, 60)
        assert term is not None
        return term

    def due(self, due_at: int = DUE, seen: int = DUE - 1) -> Due:
        return Due("e", due_at, Progress(seen, due_at), due_at + 250)

    def publish(self, task_id: str, **options: Any) -> object:
        return self.app.send_task("t", task_id=task_id, **options)

    def sent(self) -> list[str | None]:
        return [task.task_id for task in self.broker.list()]

    def ticks(self) -> list[tuple[int, TickState]]:
        return [(tick.due_at, tick.state) for tick in self.broker.schedules.ticks("k")]

    def entry(self) -> Entry:
        (entry,) = self.broker.schedules.entries("k")
        return entry

    def hear(self, sender: str, signal: Any, **told: Any) -> None:
        self.told.append({"signal": signal.name, **told})

    def close(self) -> None:
        self.broker.close()
        results.close(self.app)


@pytest.fixture(params=["together", "apart"])
def scene(request: pytest.FixtureRequest, broker_settings: BrokerSettings) -> Iterator[Scene]:
    scene = Scene(broker_settings, request.param == "together")
    heard = [signals.tick_sent, signals.tick_skipped]
    for signal in heard:
        signal.connect(scene.hear, weak=False, dispatch_uid="scene")
    yield scene
    for signal in heard:
        signal.disconnect(dispatch_uid="scene")
    scene.close()


def test_a_tick_is_sent_once(scene: Scene) -> None:
    """With an id that every replica would give it; whoever sends it again sends nothing."""
    assert scene.sender.send(scene.due(), scene.publish) is Outcome.SENT
    id = task_id_of("k", "e", DUE)
    assert scene.sent() == [id]
    assert scene.ticks() == [(DUE, TickState.SENT)]
    entry = scene.entry()
    assert (entry.base_at, entry.last_due_at, entry.total_run_count) == (DUE, DUE, 1)
    assert scene.sender.send(scene.due(), scene.publish) is Outcome.REPEATED
    assert scene.sender.send(scene.due(seen=DUE), scene.publish) is Outcome.REPEATED
    assert scene.sent() == [id]
    assert scene.broker.schedules.unsent("k") == []
    (told,) = scene.told
    assert told["signal"] == "tick_sent"
    assert (told["entry"], told["due"], told["lateness"], told["task_id"]) == ("e", DUE / 1000, 0.25, id)


def test_who_leads_no_more_sends_nothing(scene: Scene) -> None:
    """Neither by its own clock nor by the store's."""
    scene.leads = False
    with pytest.raises(NotLeader):
        scene.sender.send(scene.due(), scene.publish)
    scene.leads = True
    scene.broker.terms.release("k", "one")
    scene.lead("two")
    with pytest.raises(NotLeader):
        scene.sender.send(scene.due(), scene.publish)
    assert scene.sent() == []
    assert scene.ticks() == []
    assert scene.entry().base_at == DUE - 1


def test_who_is_overtaken_while_it_publishes(scene: Scene) -> None:
    """In one database nothing of it is stored; elsewhere the message goes out, and is the only one of its tick."""

    def publish(task_id: str) -> object:
        scene.broker.terms.release("k", "one")
        scene.lead("two")
        return scene.publish(task_id)

    if scene.sender.together:
        with pytest.raises(NotLeader):
            scene.sender.send(scene.due(), publish)
        assert scene.sent() == []
        assert scene.ticks() == []
    else:
        assert scene.sender.send(scene.due(), publish) is Outcome.SENT
        assert scene.ticks() == [(DUE, TickState.SENT)]


def test_a_broker_that_is_away(scene: Scene) -> None:
    """In one database nothing was stored; elsewhere the tick stays to be sent, by whoever leads, under its own id."""

    def publish(task_id: str) -> object:
        raise OperationalError("away")

    with pytest.raises(NotSent):
        scene.sender.send(scene.due(), publish)
    assert scene.told == []
    if scene.sender.together:
        assert scene.ticks() == []
        assert scene.sender.send(scene.due(), scene.publish) is Outcome.SENT
    else:
        (tick,) = scene.broker.schedules.unsent("k")
        assert (tick.due_at, tick.task_id) == (DUE, task_id_of("k", "e", DUE))
        with pytest.raises(NotSent):
            scene.sender.resend(tick, publish)
        scene.leads = False
        with pytest.raises(NotLeader):
            scene.sender.resend(tick, scene.publish)
        scene.leads = True
        scene.sender.resend(tick, scene.publish)
    assert scene.sent() == [task_id_of("k", "e", DUE)]
    assert scene.broker.schedules.unsent("k") == []
    assert scene.ticks() == [(DUE, TickState.SENT)]


def test_a_message_that_can_not_be_made(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """It is told, and the entry goes on with its next due time."""

    def publish(task_id: str) -> object:
        return scene.publish(task_id, args=[object()])

    assert scene.sender.send(scene.due(), publish) is Outcome.FAILED
    assert "'e' could not be sent" in caplog.text
    assert scene.sent() == []
    assert scene.entry().base_at == DUE
    assert [told["reason"] for told in scene.told] == ["error"]
    assert scene.sender.send(scene.due(DUE + 1000, DUE), scene.publish) is Outcome.SENT
    too_large = scene.due(DUE + 2000, DUE + 1000)
    assert scene.sender.send(too_large, lambda id: scene.publish(id, args=["x" * 40_000_000])) is Outcome.FAILED


def test_a_database_that_can_not_be_used(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no matter of the message: the tick is there to be sent when somebody has put it right."""
    if not scene.sender.together:
        return

    ticks = type(scene.broker.schedules)
    store = ticks.tick

    def refused(schedules: Any, term: Term, tick: Tick, progress: Progress, tasks: Any = ()) -> bool:
        if tasks:
            raise ConfigError("no rights") from LookupError("tasks")
        return store(schedules, term, tick, progress)

    with monkeypatch.context() as patch:
        patch.setattr(ticks, "tick", refused)
        with pytest.raises(ConfigError, match="no rights"):
            scene.sender.send(scene.due(), scene.publish)
    assert scene.sender.send(scene.due(), scene.publish) is Outcome.SENT
    assert scene.ticks() == [(DUE, TickState.SENT)]


def test_a_tick_whose_entry_is_gone(scene: Scene) -> None:
    if scene.sender.together:
        return
    assert scene.broker.schedules.tick(scene.term, Tick("e", DUE, "id", TickState.SENDING), Progress(DUE - 1, DUE))
    scene.sender.give_up(scene.broker.schedules.unsent("k")[0])
    assert scene.broker.schedules.unsent("k") == []


def test_no_overlap(broker_settings: BrokerSettings) -> None:
    """While a task of the entry has not ended its ticks are stored as skipped."""
    scene = Scene(broker_settings, together=True)
    outcomes = [
        scene.sender.send(scene.due(DUE + n, DUE + n - 1), lambda id: scene.publish(id, unique_key="beat:e"))
        for n in range(3)
    ]
    assert outcomes == [Outcome.SENT, Outcome.OVERLAP, Outcome.OVERLAP]
    assert len(scene.sent()) == 1
    assert scene.ticks() == [(DUE + 2, TickState.SKIPPED), (DUE + 1, TickState.SKIPPED), (DUE, TickState.SENT)]
    assert scene.entry().total_run_count == 1
    (claim,) = scene.broker.dequeue(["celery"])
    scene.broker.ack(claim)
    assert (
        scene.sender.send(scene.due(DUE + 3, DUE + 2), lambda id: scene.publish(id, unique_key="beat:e"))
        is Outcome.SENT
    )
    scene.close()
