"""The result backend as Celery's API shows it, on every store; workers are in test_results_of_workers.py."""

from __future__ import annotations

import importlib.util
import pickle
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, chord, states
from celery.app.defaults import NAMESPACES
from celery.backends import base
from celery.backends.base import Backend
from celery.exceptions import ChordError, ImproperlyConfigured, TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import GroupResult
from kombu.serialization import register, unregister
from kombu.utils.encoding import ensure_bytes

from celery_ext.answers import answer
from celery_ext.backend import TaskgateBackend
from celery_ext.contexts import subject_of
from celery_ext.result_settings import same_tables
from kombu_taskgate.core.chords import ChordPart, ChordState
from kombu_taskgate.core.errors import PayloadTooLarge
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.model import FailKind, Filter, Reason
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.threads import errors_of, together
from kombu_taskgate.transport.codec import decode
from tests.celery.results import an_app, close, make_app, request, succeed
from tests.workers.harness import wait_for

LONG = 30.0
SERIALIZERS = ["json", "pickle", *(name for name in ("yaml", "msgpack") if importlib.util.find_spec(name))]


@pytest.fixture
def app(broker_settings: BrokerSettings) -> Iterator[Celery]:
    with an_app(broker_settings) as app:
        yield app


def new_id() -> str:
    return uuid.uuid4().hex


class OddError(Exception):
    """One whose constructor takes something else than its arguments."""

    def __init__(self, number: int, *, text: str) -> None:
        super().__init__(f"{number} {text}")
        self.number = number


# -- states and what is stored with them -----------------------------------------------------------


@pytest.mark.parametrize("state", [states.STARTED, states.RETRY, states.REVOKED, "PROGRESS"])
def test_states(app: Celery, state: str) -> None:
    """Each state is there as it was stored, and only the final ones are ready."""
    result = app.AsyncResult(new_id())
    assert (result.state, result.result, result.ready()) == (states.PENDING, None, False)
    value = TaskRevokedError("no") if state in states.EXCEPTION_STATES else {"percent": 3}
    app.backend.store_result(result.id, value, state, traceback="where")
    assert result.state == state
    assert (type(result.result), result.traceback) == (type(value), "where")
    assert result.ready() is (state == states.REVOKED)


def test_failure_and_revocation_are_raised(app: Celery) -> None:
    """get() raises what was stored, and gives it back with propagate=False."""
    failed, revoked = app.AsyncResult(new_id()), app.AsyncResult(new_id())
    app.backend.mark_as_failure(failed.id, KeyError("x"), traceback="Traceback…")
    app.backend.mark_as_revoked(revoked.id, "terminated")
    with pytest.raises(KeyError, match="x"):
        failed.get(timeout=LONG)
    with pytest.raises(TaskRevokedError, match="terminated"):
        revoked.get(timeout=LONG)
    assert isinstance(app.AsyncResult(failed.id).get(timeout=LONG, propagate=False), KeyError)
    assert app.AsyncResult(failed.id).traceback == "Traceback…"
    assert app.AsyncResult(failed.id).failed()


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_exceptions_with_odd_arguments(broker_settings: BrokerSettings, serializer: str) -> None:
    """What can't be made again, or not be serialized, is still an error that says something."""
    errors = [OddError(1, text="odd"), ValueError(object(), {1, 2}), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")]
    errors += [KeyError(), Exception("💥" * 1000), OSError(2, "gone", "file")]
    with an_app(broker_settings, result_serializer=serializer, accept_content=[serializer]) as app:
        for error in errors:
            result = app.AsyncResult(new_id())
            app.backend.mark_as_failure(result.id, error)
            with pytest.raises(Exception) as raised:  # noqa: PT011  # each is another one
                result.get(timeout=LONG)
            assert type(error).__name__ in repr(raised.value)


@pytest.mark.parametrize("store_name", ["sqlite"])
def test_an_exception_of_an_unknown_class(app: Celery) -> None:
    """A reader that lacks the class gets one of that name."""
    result = app.AsyncResult(new_id())
    app.backend.mark_as_failure(result.id, type("Strange", (Exception,), {"__module__": "nowhere"})("why"))
    with pytest.raises(Exception, match="why") as raised:
        result.get(timeout=LONG)
    assert type(raised.value).__name__ == "Strange"


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_extended_results(broker_settings: BrokerSettings, serializer: str) -> None:
    """result_extended keeps the task's name, arguments, worker, queue and retries; family ids are always kept."""
    about = request(
        "one", 7, 9, task="tasks.add", args=[1, "ü"], kwargs={"x": None}, hostname="w@host", retries=2,
        delivery_info={"routing_key": "fast"}, group="g1", parent_id="p1", root_id="r1",
    )  # fmt: skip
    with an_app(
        broker_settings, result_extended=True, result_serializer=serializer, accept_content=[serializer]
    ) as app:
        app.backend.store_result("one", 3, states.SUCCESS, request=about)
        result = app.AsyncResult("one")
        assert (result.name, result.args, result.kwargs) == ("tasks.add", [1, "ü"], {"x": None})
        assert (result.worker, result.queue, result.retries) == ("w@host", "fast", 2)
        meta = app.backend.get_task_meta("one")
        assert (meta["group_id"], meta["parent_id"]) == ("g1", "p1")
        assert result.date_done is not None
        stored = app.backend.broker.results.get(["one"])["one"]
        assert (stored.type, stored.execution, stored.token) == ("tasks.add", 7, 9)


def test_children(app: Celery) -> None:
    """The tasks that a task has published are kept with its result, and followed by collect()."""
    parent, child, group = (
        new_id(),
        app.AsyncResult(new_id()),
        GroupResult(new_id(), [app.AsyncResult(new_id())], app=app),
    )
    about = request(parent, children=[child, group])
    app.backend.store_result(parent, child.as_tuple(), states.SUCCESS, request=about)
    for one in (child, group[0]):
        succeed(app, one.id, one.id)
    result = app.AsyncResult(parent)
    assert result.children == [child, group]
    assert [one.id for one, _ in result.collect(timeout=LONG)] == [parent, child.id, group.id, group[0].id]


@pytest.mark.parametrize("serializer", SERIALIZERS)
@pytest.mark.parametrize("store_name", ["sqlite"])
def test_serializers(broker_settings: BrokerSettings, serializer: str) -> None:
    """Each can be used; readers with another serializer of their own read it if they accept it."""
    value = {"a": [1, 2.5, None, "ü🐘"], "b": True}
    accept = {"accept_content": SERIALIZERS, "result_accept_content": SERIALIZERS}
    with an_app(broker_settings, result_serializer=serializer, **accept) as app:
        succeed(app, "one", value)
        assert app.AsyncResult("one").get(timeout=LONG) == value
    with an_app(broker_settings, **accept) as reader:
        assert reader.AsyncResult("one").get(timeout=LONG) == value


@pytest.mark.parametrize("store_name", ["memory", "sqlite"])
def test_a_serializer_of_the_apps_own(broker_settings: BrokerSettings) -> None:
    """What kombu knows by name will do, binary or not."""
    register(
        "own", lambda data: pickle.dumps(data)[::-1], lambda data: pickle.loads(bytes(data)[::-1]), "app/own", "binary"
    )
    try:
        with an_app(broker_settings, result_serializer="own", result_accept_content=["own"]) as app:
            succeed(app, "one", {1, 2})
            assert app.AsyncResult("one").get(timeout=LONG) == {1, 2}
    finally:
        unregister("own")


@pytest.mark.skipif(not hasattr(base, "compress_payload"), reason="Celery before 5.7 compresses no results")
def test_compressed_results(broker_settings: BrokerSettings) -> None:
    """result_compression makes them short, and readers without it read them."""
    value = "long " * 100_000
    with an_app(broker_settings, result_compression="gzip") as app, an_app(broker_settings) as reader:
        succeed(app, "one", value)
        assert len(app.backend.broker.results.get(["one"])["one"].payload) < 10_000
        assert reader.AsyncResult("one").get(timeout=LONG) == value


# -- which word counts (B69) -----------------------------------------------------------------------


def test_an_older_lease_says_nothing_after_a_success(app: Celery) -> None:
    """B69: STARTED and FAILURE of a stale run change neither state nor value; nor does a later run."""
    succeed(app, "one", "value", 5, 20)
    for state, value in ((states.STARTED, None), (states.FAILURE, ValueError()), (states.RETRY, ValueError())):
        for lease in ((5, 10), (4, 99), (6, 30), ()):
            app.backend.store_result("one", value, state, request=request("one", *lease) if lease else None)
    result = app.AsyncResult("one")
    assert (result.state, result.result) == (states.SUCCESS, "value")


def test_a_retry_goes_on_to_success(app: Celery) -> None:
    """B69: RETRY of the first execution gives way to the second one, whichever is stored first."""
    for first in (True, False):
        id = new_id()
        words = [(states.RETRY, (1, 5)), (states.STARTED, (2, 3)), (states.SUCCESS, (2, 3))]
        for state, lease in words if first else [*words[1:], words[0]]:
            value = ValueError("again") if state == states.RETRY else 1
            app.backend.store_result(id, value, state, request=request(id, *lease))
        assert app.AsyncResult(id).get(timeout=LONG) == 1


# -- expiry (B72) ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conf", "kept_for"),
    [
        ({}, (86400, 86400)),
        ({"result_expires": 3600}, (3600, 3600)),
        ({"result_expires": timedelta(minutes=1)}, (60, 60)),
        ({"result_expires": None}, (None, None)),
        ({"result_expires": 0}, (None, None)),
        ({"result_expires": None, "result_failure_expires": timedelta(days=1)}, (None, 86400)),
        ({"result_expires": 60, "result_failure_expires": 0}, (60, None)),
    ],
)
@pytest.mark.parametrize("store_name", ["sqlite"])
def test_how_long_results_are_kept(
    broker_settings: BrokerSettings, conf: dict[str, Any], kept_for: tuple[float | None, float | None]
) -> None:
    """result_expires and result_failure_expires as numbers, timedelta, 0 and None; the last two mean for ever."""
    if "result_failure_expires" in conf and "failure_expires" not in NAMESPACES["result"]:
        pytest.skip("Celery before 5.7 knows one time for all results")
    with an_app(broker_settings, **conf) as app:
        succeed(app, "good")
        app.backend.mark_as_failure("bad", ValueError())
        found = app.backend.broker.results.get(["good", "bad"])
        for id, seconds in zip(("good", "bad"), kept_for, strict=True):
            expires, stored = found[id].expires_at, found[id].stored_at
            assert (None if expires is None else (expires - stored) / 1000) == seconds


@pytest.mark.parametrize("expires", [None, 0, 3600])
def test_cleanup_deletes_only_what_expires(broker_settings: BrokerSettings, expires: float | None) -> None:
    """B72: nothing goes where expiry is off, also not what was stored when it was on; else exactly what is over."""
    with an_app(broker_settings, result_expires=0.001) as before:
        succeed(before, "old")
        GroupResult("old group", [before.AsyncResult("old")], app=before).save()
        until = time.time() * 1000 + 50
    with an_app(broker_settings, result_expires=expires) as app:
        succeed(app, "new")
        wait_for(lambda: time.time() * 1000 > until, LONG, "its time is over")
        for clean in (app.backend.cleanup, app.backend.tend):
            clean()
            assert set(app.backend.broker.results.get(["old", "new"])) == ({"new"} if expires else {"old", "new"})
            assert (app.GroupResult.restore("old group") is None) is bool(expires)


@pytest.mark.skipif("failure_expires" not in NAMESPACES["result"], reason="Celery before 5.7")
def test_failures_may_expire_alone(broker_settings: BrokerSettings) -> None:
    """B72: where only failures expire they are swept, and successes stay."""
    with an_app(broker_settings, result_expires=None, result_failure_expires=0.001) as app:
        succeed(app, "good")
        app.backend.mark_as_failure("bad", ValueError())
        wait_for(lambda: app.backend.tend() == 1, LONG, "it is swept")
        assert set(app.backend.broker.results.get(["good", "bad"])) == {"good"}


# -- sweeping (B71) --------------------------------------------------------------------------------


def test_tending_takes_bounded_batches(broker_settings: BrokerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """B71: as many batches as there is time for; what lives stays."""
    monkeypatch.setattr("celery_ext.backend.SWEEP", 10)
    with an_app(broker_settings, result_expires=0.001) as app:
        for number in range(25):
            succeed(app, f"old {number}")
        with an_app(broker_settings) as living:
            succeed(living, "new")
        assert app.backend.tend(budget=0) == 0
        swept = [0]
        wait_for(lambda: swept.append(app.backend.tend()) or sum(swept) >= 25, LONG, "all are swept")
        assert sum(swept) == 25
        assert app.backend.tend() == 0
        assert app.AsyncResult("new").ready()


# -- groups ----------------------------------------------------------------------------------------


def test_groups(app: Celery) -> None:
    """Saved, restored with what they consist of, nested ones too, and deleted."""
    inner = GroupResult(new_id(), [app.AsyncResult(new_id())], app=app)
    group = GroupResult(new_id(), [app.AsyncResult(new_id()), inner], app=app)
    assert app.GroupResult.restore(group.id) is None
    group.save()
    restored = app.GroupResult.restore(group.id)
    assert restored == group
    for id in (group[0].id, inner[0].id):
        succeed(app, id, id)
    assert restored.get(timeout=LONG) == [group[0].id, [inner[0].id]]
    group.delete()
    assert app.GroupResult.restore(group.id, backend=app.backend) is None
    fresh = app.backend.get_group_meta(group.id, cache=False)
    assert fresh is None


def test_joining(app: Celery) -> None:
    """join, join_native, iter_native and get_many answer with the order and the errors that Celery means."""
    results = [app.AsyncResult(new_id()) for _ in range(5)]
    group = GroupResult(new_id(), results, app=app)
    with pytest.raises(CeleryTimeoutError):
        group.get(timeout=0.05)
    assert list(app.backend.get_many([one.id for one in results], timeout=LONG, max_iterations=1, interval=0.01)) == []
    for number, one in enumerate(results):
        succeed(app, one.id, number)
    fresh = GroupResult(group.id, [app.AsyncResult(one.id) for one in results], app=app)
    assert fresh.join(timeout=LONG) == [0, 1, 2, 3, 4]
    heard: list[tuple[str, Any]] = []
    assert fresh.join_native(timeout=LONG) == [0, 1, 2, 3, 4]
    fresh.join(timeout=LONG, callback=lambda id, value: heard.append((id, value)))
    assert heard == [(one.id, number) for number, one in enumerate(results)]
    found = dict(app.backend.get_many([one.id for one in results], timeout=LONG))
    assert {id: meta["result"] for id, meta in found.items()} == {one.id: n for n, one in enumerate(results)}
    assert list(app.ResultSet([]).iter_native()) == []
    bad = app.AsyncResult(new_id())
    app.backend.mark_as_failure(bad.id, ValueError("bad"))
    with pytest.raises(ValueError, match="bad"):
        app.ResultSet([app.AsyncResult(results[0].id), bad]).join_native(timeout=LONG)


def test_forgetting(app: Celery) -> None:
    """A forgotten result is pending again, and can be stored again."""
    result = app.AsyncResult(new_id())
    succeed(app, result.id, 1)
    assert result.get(timeout=LONG) == 1
    result.forget()
    assert app.AsyncResult(result.id).state == states.PENDING
    succeed(app, result.id, 2)
    assert app.AsyncResult(result.id).get(timeout=LONG) == 2


# -- bounds (B70) ----------------------------------------------------------------------------------


def test_large_results(app: Celery) -> None:
    """B70: arguments of 1 MB, a result of 5 MB and a group of 5,000 ids are the same after the round trip."""
    arguments, value = "ä" * 1000 + "x" * 1_000_000, "🐘" * 1000 + "y" * 5_000_000
    app.conf.result_extended = True
    about = request("one", task="t", args=[arguments], kwargs={}, hostname=None, retries=0)
    app.backend.store_result("one", value, states.SUCCESS, request=about)
    assert app.AsyncResult("one").get(timeout=LONG) == value
    assert app.AsyncResult("one").args == [arguments]
    group = GroupResult("g", [app.AsyncResult(new_id()) for _ in range(5000)], app=app)
    group.save()
    assert app.backend.get_group_meta("g", cache=False)["result"].results == group.results


def test_a_result_beyond_the_limit(broker_settings: BrokerSettings) -> None:
    """B70: it is refused with the number of bytes and what to do, never cut; what was stored before stays."""
    with an_app(broker_settings, options={"max_payload": 50_000}) as app:
        app.backend.store_result("one", 1, "PROGRESS")
        with pytest.raises(PayloadTooLarge, match=r"result of task one has \d+ bytes: at most 50000"):
            succeed(app, "one", "x" * 50_000)
        with pytest.raises(PayloadTooLarge, match="group g"):
            GroupResult("g", [app.AsyncResult(new_id()) for _ in range(5000)], app=app).save()
        assert app.AsyncResult("one").result == 1


def test_a_chord_whose_body_is_beyond_the_limit(broker_settings: BrokerSettings) -> None:
    """Values that are too much for one message fail the body, not the task that has come last."""
    with an_app(broker_settings, options={"max_payload": 30_000}) as app:
        body = app.signature("some.body", options={"task_id": new_id()})
        app.backend.set_chord_size("g", 2)
        for place in range(2):
            part = request(f"part {place}", group="g", group_index=place)
            part.chord = body
            app.backend.on_chord_part_return(part, states.SUCCESS, "x" * 20_000)
        with pytest.raises(ChordError, match="Callback error"):
            app.AsyncResult(body.id).get(timeout=LONG)
        assert app.backend.broker.chords.get("g").state is ChordState.FAILED


def end_with(app: Celery, group_id: str, body: Any, value: Any = 1) -> None:
    """Store the parts of a header of two, as workers would."""
    app.backend.set_chord_size(group_id, 2)
    for place in range(2):
        part = request(f"{group_id} {place}", group=group_id, group_index=place)
        part.chord = body
        app.backend.on_chord_part_return(part, states.SUCCESS, value)


REFUSED = {"unique_key": "taken"}, {"depends_on": ["nobody"]}


@pytest.mark.parametrize("options", REFUSED)
def test_a_chord_whose_body_is_refused_when_it_is_stored(app: Celery, options: dict[str, Any]) -> None:
    """A unique key that is taken, or a parent that nobody knows, fails the body; the last part's task has nothing to do
    with it."""
    app.send_task("other", unique_key="taken")
    body = app.signature("some.body", options={"task_id": new_id(), "link_error": [app.signature("told")], **options})
    end_with(app, "g", body)
    with pytest.raises(ChordError, match=r"Callback error: Task(Exists|NotFound)"):
        app.AsyncResult(body.id).get(timeout=LONG)
    assert app.backend.broker.chords.get("g").state is ChordState.FAILED
    assert [row.type for row in app.backend.broker.list(Filter())] == ["other", "told"]


def header_of_two(app: Celery, **options: Any) -> tuple[Any, list[Any]]:
    """Publish a chord, and claim the tasks of its header as a worker would."""
    header = [app.signature("some.part", args=[place], options=options) for place in range(2)]
    result = chord(header, app=app)(app.signature("some.body", options={"link_error": [app.signature("told")]}))
    claims = app.backend.broker.dequeue(["celery"], 2, 5.0)
    return result, sorted(claims, key=lambda claim: claim.id)


def finish(app: Celery, claim: Any, value: Any) -> None:
    made = subject_of(app, decode(claim.payload)).request
    made.taskgate_lease = [claim.id, claim.token]
    app.backend.mark_as_done(claim.task_id, value, request=made)
    app.backend.broker.ack(claim)


def answer_all(app: Celery) -> None:
    tasks = app.backend.broker.claim_answers(10)
    assert tasks
    for task in tasks:
        answer(app, task, lambda: "canceled")


@pytest.mark.parametrize("state", [states.SUCCESS, states.FAILURE])
@pytest.mark.parametrize("end", ["lost", "canceled"])
def test_a_part_whose_worker_died_after_it_had_stored_the_result(app: Celery, state: str, end: str) -> None:
    """Whoever answers for the task leaves its part, with the result that is stored."""
    result, (one, last) = header_of_two(app)
    finish(app, one, "first")
    broker = app.backend.broker
    lease = request(last.task_id, last.id, last.token)
    app.backend.store_result(
        last.task_id, "last" if state == states.SUCCESS else ValueError("no"), state, request=lease
    )
    if end == "lost":
        broker.begin_many([last])
        broker.fail(last, FailKind.LOST)
    else:
        broker.requeue(last)
        broker.cancel(last.id)
    answer_all(app)
    assert app.AsyncResult(last.task_id).state == state
    if state == states.SUCCESS:
        (body,) = [row for row in broker.list(Filter()) if row.type == "some.body"]
        assert subject_of(app, decode(body.payload)).request.args == [["first", "last"]]
    else:
        with pytest.raises(ChordError, match="no"):
            app.AsyncResult(result.id).get(timeout=LONG)


def test_a_part_whose_message_can_not_be_read(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """Its chord is known by what is noted of it: the body fails, and its error callbacks are called."""
    result, (one, last) = header_of_two(app, serializer="pickle")  # which the app does not accept
    app.conf.accept_content = ["json", "pickle"]
    finish(app, one, "first")
    app.conf.accept_content = ["json"]
    app.backend.broker.fail(last, FailKind.SKIP, reason=Reason.UNDECODABLE)
    answer_all(app)
    with pytest.raises(ChordError, match="DeadLettered"):
        app.AsyncResult(result.id).get(timeout=LONG)
    assert "told" in [row.type for row in app.backend.broker.list(Filter())]


def test_an_error_callback_that_is_refused(app: Celery) -> None:
    """It holds up neither the end of its chord nor the other callbacks, and nothing is told twice."""
    app.send_task("other", unique_key="taken")
    told = [app.signature("told", options={"unique_key": "taken"}), app.signature("told too")]
    body = app.signature("some.body", options={"task_id": new_id(), "link_error": told})
    app.backend.set_chord_size("g", 1)
    part = request("part", group="g", group_index=0)
    part.chord = body
    app.backend.on_chord_part_return(part, states.FAILURE, ValueError("no"))
    assert app.backend.broker.chords.get("g").state is ChordState.FAILED
    assert [row.type for row in app.backend.broker.list(Filter())] == ["other", "told too"]


@pytest.mark.parametrize("options", [*REFUSED, {"serializer": "none such"}, {}])
def test_a_body_that_another_broker_refuses(tmp_path: Any, options: dict[str, Any]) -> None:
    """Where results are not in the broker's tables, what can't be published fails the chord too; it is not stuck."""
    app = Celery("results", set_as_current=False)
    app.conf.update(
        broker_url=f"taskgate+sqlite:///{tmp_path}/broker.db",
        result_backend=f"taskgate+sqlite:///{tmp_path}/results.db",
        broker_transport_options={"max_payload": 30_000},
    )
    try:
        app.send_task("other", unique_key="taken")
        body = app.signature("some.body", options={"task_id": new_id(), **options})
        end_with(app, "g", body, 1 if options else "x" * 20_000)
        with pytest.raises(ChordError, match="Callback error"):
            app.AsyncResult(body.id).get(timeout=LONG)
        assert app.backend.broker.chords.get("g").state is ChordState.FAILED
    finally:
        close(app)


def test_a_stuck_chord_that_can_not_be_read_holds_up_no_other(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of one may be of a kind that this worker does not accept."""
    monkeypatch.setattr("celery_ext.chords.STUCK_AFTER", -1.0)
    chords = app.backend.broker.chords
    for name, body in (("g", b"application/none-such\nutf-8\n{}"), ("h", app.backend._dump_body(app.signature("b")))):
        chords.begin(name, header=None, body=body, expires_in=None)
        chords.set_size(name, 1)
        chords.put(name, ChordPart(f"part of {name}", 0, states.SUCCESS, app.backend.encode(7).encode(), 1, 1))
    assert app.backend.tend() == 2
    assert [chords.get(name).state for name in "gh"] == [ChordState.OPEN, ChordState.DONE]


@pytest.mark.parametrize("options", [{}, {"pool_size": 3}])
def test_a_stuck_chord_is_ended_by_tending(
    broker_settings: BrokerSettings, monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    """One whose last worker died, and was not to run again: its body is published, once, in the chord's transaction."""
    monkeypatch.setattr("celery_ext.chords.STUCK_AFTER", -1.0)
    with an_app(broker_settings, result_backend_transport_options=options) as app:
        backend = app.backend
        chords = backend.broker.chords
        body = app.signature("some.body", options={"task_id": new_id()})
        chords.begin("g", header=None, body=backend._dump_body(body), expires_in=None)
        chords.set_size("g", 1)
        chords.put("g", ChordPart("part", 0, states.SUCCESS, backend.encode(7).encode(), 1, 1))
        monkeypatch.setattr(type(chords), "claim", None)  # what bodies that are published by themselves need
        assert backend.tend() == 1
        assert chords.get("g").state is ChordState.DONE
        rows = backend.broker.list(Filter())
        assert [(row.type, row.task_id) for row in rows] == [("some.body", body.id)]
        assert backend.tend() == 0


def test_strange_ids(app: Celery) -> None:
    """Ids that are longer than a column, or hold what a database can't, are told apart."""
    ids = ["x" * 255, "x" * 256, "x" * 256 + "y", "🐘" * 255, "🐘" * 300, "nul \0", "nul ", "Case", "case", "trailing "]
    for number, id in enumerate(ids):
        succeed(app, id, number)
        app.GroupResult(id, [app.AsyncResult(id)]).save()
    assert [app.AsyncResult(id).get(timeout=5) for id in ids] == list(range(len(ids)))
    assert [app.GroupResult.restore(id)[0].id for id in ids] == ids


def test_two_apps_in_one_database(broker_settings: BrokerSettings, store_name: str) -> None:
    """With prefixes of their own they know nothing of each other."""
    with an_app(broker_settings) as app, an_app(broker_settings) as other:
        if store_name != "memory":
            other.conf.broker_transport_options = {"table_prefix": broker_settings.table_prefix[:-1] + "x_"}
        else:
            other.conf.broker_transport_options = {"table_prefix": "other_"}
        succeed(app, "one", "app")
        try:
            assert other.AsyncResult("one").state == states.PENDING
            succeed(other, "one", "other")
            assert app.AsyncResult("one").get(timeout=LONG) == "app"
            assert other.AsyncResult("one").get(timeout=LONG) == "other"
        finally:
            if store_name != "memory":
                from kombu_taskgate.core.migrations import drop

                broker = open_broker(other.backend.settings, notify=lambda change: None)
                drop(broker.database, broker.tables)  # type: ignore[attr-defined]  # an SqlBroker
                broker.close()


def test_storing_from_many_threads(app: Celery) -> None:
    """One backend serves all threads of a process."""
    errors = errors_of(together([lambda n=n: [succeed(app, f"{n} {i}", i) for i in range(10)] for n in range(8)]))  # type: ignore[misc]
    assert errors == []
    assert len(app.backend.broker.results.get([f"{n} {i}" for n in range(8) for i in range(10)])) == 80


# -- settings --------------------------------------------------------------------------------------


def backend_of(url: str, **conf: Any) -> Backend:
    app = Celery("settings", set_as_current=False)
    app.conf.update(result_backend=url, broker_url="memory://", **conf)
    return app.backend


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("taskgate://", {}, "names no database"),
        ("taskgate+nosuch://u:secret@host/db", {}, "nosuch"),
        ("taskgate+sqlite:///x.db", {"table_prefx": "a_"}, "did you mean 'table_prefix'"),
        ("taskgate+sqlite:///x.db", {"pool_size": "many"}, "pool_size must be a whole number"),
        ("taskgate+sqlite:///x.db", {"retry_policy": 3}, "retry_policy must be a mapping"),
        ("taskgate+postgresql+asyncpg://u:secret@host/db", {}, "asyncpg"),
    ],
)
def test_settings_that_can_not_be_right(url: str, options: dict[str, Any], message: str) -> None:
    """They are refused as Celery does it, when the backend is first used, and no password is shown."""
    with pytest.raises(ImproperlyConfigured, match=message) as raised:
        backend_of(url, result_backend_transport_options=options).get_state("one")
    assert "secret" not in str(raised.value)


def test_the_password_is_shown_nowhere() -> None:
    """Neither as_uri, which a worker's banner shows, nor repr nor a bug report has it."""
    url = "taskgate+postgresql://user:s%40cret@host/db?sslpassword=s%40cret"
    backend = backend_of(url)
    shown = [backend.as_uri(), repr(backend), str(backend), repr(backend.settings), repr(vars(backend)["settings"])]
    # What Celery shows of a query by itself is its own business.
    shown.append(backend_of(url.partition("?")[0]).app.bugreport())
    assert all("cret" not in text for text in shown)
    assert "taskgate+postgresql://user:**@host/db" in shown[0]
    assert backend.as_uri(include_password=True) == url


def test_results_are_pickled_with_their_backend(broker_settings: BrokerSettings) -> None:
    """A pickled AsyncResult is got where it is unpickled, any number of times, over the connections there are."""
    with an_app(broker_settings) as app:
        app.set_current()
        try:
            succeed(app, "one", 5)
            for _ in range(3):
                again = pickle.loads(pickle.dumps(app.AsyncResult("one")))
                assert isinstance(again.backend, TaskgateBackend)
                assert again.get(timeout=LONG) == 5
                again.backend.result_consumer.stop()
                again.backend.broker.close()
        finally:
            Celery("nobody").set_current()


@pytest.mark.parametrize("store_name", ["sqlite"])
def test_options_of_the_broker_hold_for_the_results_of_the_same_database(broker_settings: BrokerSettings) -> None:
    """result_backend_transport_options are laid over them, and the two still count as one database."""
    with an_app(
        broker_settings, result_backend_transport_options={"pool_size": 3, "retry_policy": {"timeout": 1}}
    ) as app:
        assert app.backend.settings.pool_size == 3
        assert app.backend.settings.table_prefix == broker_settings.table_prefix
        assert app.backend.is_broker
        assert app.backend._policy["timeout"] == 1
    with an_app(broker_settings, result_backend_transport_options={"table_prefix": "apart_"}) as app:
        assert app.backend.settings.table_prefix == "apart_"
        assert not app.backend.is_broker
    assert same_tables(broker_settings, broker_settings)


@pytest.mark.parametrize("store_name", ["sqlite"])
def test_options_of_another_broker_do_not(broker_settings: BrokerSettings) -> None:
    """With Redis as the broker its options are its own; those that results had there are told of once."""
    app = make_app(broker_settings)
    app.conf.update(broker_url="redis://nowhere/0", broker_transport_options={"visibility_timeout": 5, "sep": ":"})
    app.conf.result_backend_transport_options = {"master_name": "x", "global_keyprefix": "y"}
    assert app.backend.settings.table_prefix == "taskgate_"
    assert not app.backend.is_broker


def test_whether_a_task_is_known(app: Celery) -> None:
    """A task is known when it has a result, or waits in the broker."""
    assert not app.backend.task_result_exists("nobody's")
    sent = app.send_task("some.task")
    assert app.backend.task_result_exists(sent.id)
    succeed(app, "one")
    assert app.backend.task_result_exists("one")


def test_a_part_may_look_like_anything(app: Celery) -> None:
    """What a task of a header returns comes to the body as it is, whatever its keys are."""
    value = {"taskgate_error": 1, "taskgate_called": [2]}
    part = ChordPart("one", 0, states.SUCCESS, ensure_bytes(app.backend.encode(value)))
    assert app.backend._value_of(part) == value
