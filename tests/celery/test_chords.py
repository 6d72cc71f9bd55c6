"""Chords that real workers run: the body begins once, with the values of all, in order."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord, group
from celery.canvas import Signature
from celery.exceptions import ChordError
from celery.result import AsyncResult

from kombu_taskgate.core.chords import ChordState
from tests import services
from tests.workers.fixtures import drop_tables
from tests.workers.harness import Lab, wait_for

pytestmark = pytest.mark.timeout(180)

LONG = 30.0
TASKS = "tests.workers.chords"


def lab_with_results(url: str, folder: Any, **more: Any) -> Lab:
    """A database for tasks and for results."""
    conf = {"result_backend": f"taskgate+{url}", "task_ignore_result": False, "imports": [TASKS]}
    conf.update(more.pop("conf", {}))
    options = {"table_prefix": f"t{uuid.uuid4().hex[:10]}_", **more}
    return Lab(url, folder, options, conf)


@pytest.fixture(scope="module", params=services.SQL_STORES)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One worker for all tests of this file that do not harm it."""
    folder = tmp_path_factory.mktemp("chords")
    url = (
        f"sqlite:///{folder}/broker.db"
        if request.param == "sqlite"
        else request.getfixturevalue(f"{request.param}_url")
    )
    lab = lab_with_results(url, folder, conf={"worker_prefetch_multiplier": 8})
    lab.start_worker("-c4", "-Pthreads")
    yield lab
    close(lab)


def close(lab: Lab) -> None:
    backend = lab.app.backend
    backend.result_consumer.stop()
    if backend._broker is not None:
        backend._broker.close()
    lab.close()
    drop_tables(lab.url, lab.options["table_prefix"])


def sig(lab: Lab, name: str, *args: Any, **options: Any) -> Signature:
    return lab.app.signature(f"{TASKS}.{name}", args=args, options=options)


def join(lab: Lab, header: Any, **options: Any) -> AsyncResult:
    """Publish a chord with the body that notes what it gets."""
    return chord(header, app=lab.app)(sig(lab, "body", **options))


def runs_of(lab: Lab, result: AsyncResult) -> list[Any]:
    return [line["values"] for line in lab.journal.of("body", result.id)]


def chord_ended(lab: Lab, result: AsyncResult, values: Any) -> None:
    """The body has run once, with these values, and nothing of the chord is left in a queue."""
    assert result.get(timeout=LONG) == values
    wait_for(lambda: not lab.rows(), LONG, f"nothing is left: {lab.rows()[:3]}")
    assert runs_of(lab, result) == [values if len(values) < 100 else len(values)]


# -- headers of all kinds --------------------------------------------------------------------------


def test_a_header_in_order(lab: Lab) -> None:
    """B77: values come in the order of the header, and no task ever polls for them."""
    chord_ended(lab, join(lab, [sig(lab, "part", number) for number in range(10)]), list(range(10)))
    assert "chord_unlock" not in lab.logs()


def test_headers_of_one_and_none_and_of_a_generator(lab: Lab) -> None:
    """B81: an empty header runs the body at once; one task, and a generator of unknown length, are headers."""
    chord_ended(lab, join(lab, []), [])
    chord_ended(lab, join(lab, [sig(lab, "part", 1)]), [1])
    chord_ended(lab, join(lab, (sig(lab, "part", number) for number in range(7))), list(range(7)))
    single = chain(group([sig(lab, "part", 1)]), sig(lab, "body"), app=lab.app)()
    assert single.get(timeout=LONG) in ([1], 1)


def test_retried_parts(lab: Lab) -> None:
    """B75: a task counts when it has succeeded, not when it is retried."""
    header = [sig(lab, "retries", number) if number < 2 else sig(lab, "part", number) for number in range(5)]
    chord_ended(lab, join(lab, header), list(range(5)))


def test_replaced_and_added_parts(lab: Lab) -> None:
    """Whatever takes a task's place gives its value, and who joins the header is waited for."""
    result = join(lab, [sig(lab, "replaced", 0), sig(lab, "part", 1), sig(lab, "becomes_group", [2, 3])])
    chord_ended(lab, result, [0, 1, [2, 3]])
    result = join(lab, [sig(lab, "invites", 0), sig(lab, "part", 1)])
    # The guest has the place of its host.
    assert sorted(map(str, result.get(timeout=LONG))) == ["0", "1", "guest of 0"]
    wait_for(lambda: len(runs_of(lab, result)) == 1, LONG, "the body has run")


def test_parts_whose_results_are_ignored(lab: Lab) -> None:
    """The body gets their values all the same."""
    chord_ended(lab, join(lab, [sig(lab, "silent", number) for number in range(3)]), [0, 1, 2])


def test_nested_headers(lab: Lab) -> None:
    """Groups and chains in a header, and chords in it."""
    nested = group([sig(lab, "part", 1), sig(lab, "part", 2)], app=lab.app)
    chained = chain(sig(lab, "part", 3), sig(lab, "quick"), app=lab.app)
    # Celery gives the tasks of a nested group places in reverse order.
    assert join(lab, [sig(lab, "part", 0), nested, chained]).get(timeout=LONG) == [0, 2, 1, 3]
    inner = chord([sig(lab, "part", 1), sig(lab, "part", 2)], sig(lab, "quick"), app=lab.app)
    chord_ended(lab, join(lab, [sig(lab, "part", 0), inner]), [0, [1, 2]])


def test_nested_bodies(lab: Lab) -> None:
    """A chain, a group and a chord as the body."""
    header = [sig(lab, "part", 0), sig(lab, "part", 1)]
    result = chord(header, app=lab.app)(chain(sig(lab, "quick"), sig(lab, "body"), app=lab.app))
    chord_ended(lab, result, [0, 1])
    result = chord(header, app=lab.app)(group([sig(lab, "quick"), sig(lab, "quick")], app=lab.app))
    assert result.get(timeout=LONG) == [[0, 1], [0, 1]]
    inner = chord([sig(lab, "quick"), sig(lab, "quick")], sig(lab, "body"), app=lab.app)
    chord_ended(lab, chord(header, app=lab.app)(inner), [[0, 1], [0, 1]])


def test_a_chord_that_is_applied_again(lab: Lab) -> None:
    """One that keeps its ids runs once for each time."""
    again = chord([sig(lab, "quick", 1), sig(lab, "quick", 2)], sig(lab, "body"), app=lab.app)
    again.freeze()
    for times in (1, 2):
        result = again.apply_async()
        wait_for(lambda: len(lab.journal.of("body", result.id)) == times, LONG, "it has run")  # noqa: B023
        wait_for(lambda: not lab.rows(), LONG, "nothing is left")
    assert runs_of(lab, result) == [[1, 2], [1, 2]]


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["task", "chain", "chord"])
def test_a_failing_part(lab: Lab, kind: str) -> None:
    """B78: the body fails with a ChordError that names the task, its error callback runs once, get() raises."""
    bad = sig(lab, "fails", 1)
    if kind == "chain":
        bad = chain(bad, sig(lab, "quick"), app=lab.app)
    elif kind == "chord":
        bad = chord([sig(lab, "quick", 1), bad], sig(lab, "quick"), app=lab.app)
    header = [*(sig(lab, "quick", number) for number in range(9)), bad]
    result = join(lab, header, link_error=[sig(lab, "told")])
    with pytest.raises(ChordError, match=r"Dependency .* raised ") as raised:
        result.get(timeout=LONG, follow_parents=False)  # else the task's own error may be raised first
    assert "no 1" in str(raised.value)
    wait_for(lambda: result.id in [line["of"] for line in lab.journal.of("told")], LONG, "the error callback has run")
    wait_for(lambda: not lab.rows(), LONG, "nothing is left")
    assert [line["of"] for line in lab.journal.of("told")].count(result.id) == 1
    assert runs_of(lab, result) == []


@pytest.mark.filterwarnings("ignore:task_allow_error_cb_on_chord_header")
def test_an_error_callback_of_nested_chords(lab: Lab) -> None:
    """What is linked to a chord, and so to one in its header, is called once; the outer chord fails all the same."""
    inner = chord([sig(lab, "quick", 1), sig(lab, "fails", 1)], sig(lab, "quick"), app=lab.app)
    outer = chord([sig(lab, "quick", 2), inner], sig(lab, "body"), app=lab.app)
    outer.link_error(sig(lab, "told"))
    before = len(lab.journal.of("told"))
    result = outer.apply_async()
    with pytest.raises(ChordError):
        result.get(timeout=LONG, follow_parents=False)
    wait_for(lambda: len(lab.journal.of("told")) > before, LONG, "the error callback has run")
    wait_for(lambda: not lab.rows(), LONG, "nothing is left")
    assert len(lab.journal.of("told")) == before + 1
    assert runs_of(lab, result) == []


# -- size ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_large_header(lab: Lab) -> None:
    """B79: the body gets 5,000 values in order, in one delivery."""
    result = join(lab, [sig(lab, "quick", number) for number in range(5000)])
    began = time.monotonic()
    assert result.get(timeout=300) == list(range(5000))
    assert runs_of(lab, result) == [5000]
    print(f"5000 parts: {time.monotonic() - began:.1f} s after publishing")  # noqa: T201  # shown with -s


# -- where broker and results are apart ------------------------------------------------------------


def test_results_beside_another_broker(redis_url: str, tmp_path: Any, request: pytest.FixtureRequest) -> None:
    """With Redis as the broker chords are joined by taskgate all the same, and the other way round Redis does it."""
    url = f"sqlite:///{tmp_path}/results.db"
    queue = f"q{uuid.uuid4().hex[:8]}"
    conf = {"broker_url": redis_url, "broker_transport_options": {}, "task_default_queue": queue}
    lab = lab_with_results(url, tmp_path, conf=conf, table_prefix="taskgate_")
    try:
        lab.start_worker("-c2", "-Pthreads", "-Q", queue)
        assert not lab.app.backend.is_broker
        result = join(lab, [sig(lab, "part", number) for number in range(5)])
        assert result.get(timeout=LONG) == [0, 1, 2, 3, 4]
        result = join(lab, [sig(lab, "fails", 1), sig(lab, "part", 0)], link_error=[sig(lab, "told")])
        with pytest.raises(ChordError):
            result.get(timeout=LONG, follow_parents=False)
        wait_for(lambda: lab.journal.of("told"), LONG, "the error callback has run")
        assert len(lab.journal.of("body")) == 1
    finally:
        close(lab)


def test_another_backend_beside_the_broker(redis_url: str, tmp_path: Any) -> None:
    """Tasks in taskgate and results in Redis."""
    lab = lab_with_results(f"sqlite:///{tmp_path}/tasks.db", tmp_path, conf={"result_backend": redis_url})
    try:
        lab.start_worker("-c2", "-Pthreads")
        assert join(lab, [sig(lab, "part", number) for number in range(5)]).get(timeout=LONG) == [0, 1, 2, 3, 4]
    finally:
        lab.app.backend.result_consumer.stop()
        lab.app.backend.client.close()
        lab.close()


def test_chord_states(lab: Lab) -> None:
    """What is left of a chord is one row that says how it ended."""
    result = join(lab, [sig(lab, "quick", 1)] * 2)
    assert result.get(timeout=LONG) == [1, 1]
    group_id = result.parent.id
    known = lab.app.backend.broker.chords.get(group_id)
    assert (known.state, known.parts) == (ChordState.DONE, 0)
