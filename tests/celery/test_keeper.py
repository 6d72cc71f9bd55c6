"""The keeper does several kinds of work in one thread; answers that fail are tried again and hold up no others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, states
from celery.backends.base import KeyValueStoreBackend

from celery_ext.dead_letters import TRIES, DeadLetterAnswers
from celery_ext.errors import DeadLettered
from celery_ext.keeper import Keeper
from kombu_taskgate.core.memory import MemoryBroker, MemoryStore
from kombu_taskgate.core.model import ANSWER_WITHIN, FailKind, NewTask
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.transport.codec import Envelope, encode
from tests.workers.harness import wait_for


class Store(KeyValueStoreBackend):  # type: ignore[misc]  # Celery has no types
    """A result backend that can be away, and can refuse to write."""

    data: dict[bytes, Any]
    away = False
    refuses: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.data = {}

    def get(self, key: bytes) -> Any:
        if self.away:
            raise ConnectionError("away")
        return self.data.get(key)

    def set(self, key: bytes, value: Any) -> None:
        if self.refuses is not None and self.refuses.encode() in key:
            raise ValueError("not this one")
        self.data[key] = value


class Scene:
    """An app, its backend, and a broker whose time the test sets."""

    def __init__(self) -> None:
        self.app = Celery("scene", set_as_current=False, backend=f"{__name__}:Store")
        self.app.conf.task_ignore_result = False
        self.clock = FakeClock()
        self.broker = MemoryBroker(BrokerSettings("memory://"), store=MemoryStore(), clock=self.clock)
        self.backend = Store(self.app)
        self.app._backend_cache = self.app._local.backend = self.backend
        self.answers = DeadLetterAnswers(self.app, self.broker, lambda: {"q"}, lease_lost_max=3)

    def dead(self, id: str, **headers: Any) -> None:
        message = Envelope(b"[[], {}, {}]", "application/json", "utf-8", {"task": "t", "id": id, **headers})
        self.broker.enqueue(NewTask("q", encode(message), type="t", task_id=id))
        (claim,) = self.broker.dequeue(["q"])
        self.broker.fail(claim, FailKind.SKIP)

    def run(self) -> float | None:
        return self.answers(lambda: False)

    def left(self) -> int:
        return sum(task.answer_at is not None for task in self.broker.list())

    def state(self, id: str) -> str:
        return str(self.backend.get_state(id))


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.app.close()


def test_backend_that_is_away(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is given up however long it lasts; it is said once; then all is told."""
    for number in range(3):
        scene.dead(f"id{number}")
    scene.backend.away = True
    for _ in range(2 * TRIES):
        assert ANSWER_WITHIN < (scene.run() or 0) < ANSWER_WITHIN + 10
        scene.clock.advance(ANSWER_WITHIN)
    assert scene.left() == 3
    assert caplog.text.count("can't be reached") == 1
    scene.backend.away = False
    assert scene.run() is None
    assert (scene.left(), scene.state("id0")) == (0, states.FAILURE)
    assert "can be reached again" in caplog.text


def test_answer_that_can_never_succeed(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged with its error, given up after some tries, and holds up no others."""
    scene.dead("bad")
    scene.backend.refuses = "bad"
    for number in range(TRIES):
        scene.dead(f"good{number}")
        scene.run()
        assert scene.state(f"good{number}") == states.FAILURE
        assert scene.left() == (number + 1 < TRIES)
        scene.clock.advance(ANSWER_WITHIN)
    assert caplog.text.count("not this one") >= TRIES
    assert scene.state("bad") == states.PENDING


@pytest.mark.parametrize("state", [states.SUCCESS, states.FAILURE, states.REVOKED])
def test_what_has_ended_for_its_caller_is_left_alone(scene: Scene, state: str) -> None:
    """A final state is not overwritten."""
    scene.backend.store_result("id", ValueError("first") if state != states.SUCCESS else 1, state)
    scene.dead("id")
    assert scene.run() is None
    assert (scene.left(), scene.state("id")) == (0, state)
    assert "given up" not in str(scene.backend.get_result("id"))


def test_half_done_answer_is_done_again(scene: Scene) -> None:
    """Who finds the error of an answerer that ended in the middle goes on; a replay is not told twice."""
    scene.backend.store_result("id", DeadLettered("earlier"), states.FAILURE)
    scene.dead("id")
    scene.broker.claim_answers(1)
    scene.clock.advance(ANSWER_WITHIN)
    scene.run()
    assert "was rejected" in str(scene.backend.get_result("id"))
    scene.dead("id")
    scene.backend.store_result("id", DeadLettered("earlier"), states.FAILURE)
    scene.run()
    assert str(scene.backend.get_result("id")) == "earlier"


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_the_error_survives_serializers(serializer: str) -> None:
    """Class, text and numbers are the same on the other side."""
    app = Celery("serial", set_as_current=False)
    app.conf.update(result_serializer=serializer, accept_content=["json", "pickle"])
    backend = Store(app)
    backend.store_result("id", DeadLettered("task t[id] was given up", "lease_lost", 3, 2), states.FAILURE)
    error = Store.get_result(backend, "id")
    assert isinstance(error, DeadLettered)
    assert (str(error), error.reason, error.deliveries, error.lease_lost) == (
        "task t[id] was given up",
        "lease_lost",
        3,
        2,
    )
    app.close()


def test_keeper_does_its_works_when_they_are_due_or_woken(caplog: pytest.LogCaptureFixture) -> None:
    """Each has its own interval; one that raises is said once and stops no other; the end is the end."""
    keeper = Keeper()
    before = set(threading.enumerate())

    def keepers() -> int:
        return sum(thread.name == "taskgate-keeper" for thread in set(threading.enumerate()) - before)

    calls: dict[str, int] = {"often": 0, "woken": 0, "raises": 0}

    def work(name: str, again: float | None) -> Callable[[Callable[[], bool]], float | None]:
        def do(stopping: Callable[[], bool]) -> float | None:
            calls[name] += 1
            if name == "raises":
                raise RuntimeError("a bug")
            return again

        return do

    keeper.add("often", work("often", 0.01))
    keeper.add("raises", work("raises", None), interval=0.01)
    woken = keeper.add("woken", work("woken", None))
    keeper.start()
    keeper.start()
    wait_for(lambda: calls["often"] >= 5 and calls["raises"] >= 5, 30, "both go on")
    assert calls["woken"] == 1
    woken.wake()
    wait_for(lambda: calls["woken"] == 2, 30, "woken")
    assert keepers() == 1
    keeper.stop()
    keeper.stop()
    assert keepers() == 0
    assert caplog.text.count("raises failed") == 1
